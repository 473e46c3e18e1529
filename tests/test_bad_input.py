"""Bad input raises before anything is allocated or changed, names the culprit, and leaves the model usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streamshard import Precision, StreamShard
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, StreamShardError, UnitError
from tests.models import Block, Layer, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, full_grads, lm_step, stack_step


class _Snapshot:
    """What a model was like, to see that a failed call changed nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kind = type(model)
        self.parameters = {name: (p, p.data, p.requires_grad) for name, p in model.named_parameters()}
        self.values = {name: p.detach().clone() for name, p in model.named_parameters() if p.device.type != "meta"}
        self.dicts = {name: dict(module.__dict__) for name, module in model.named_modules()}
        self.kinds = {name: type(module) for name, module in model.named_modules()}

    def assert_unchanged(self) -> None:
        """Same class, objects, storage, values, attributes and hooks."""
        assert type(self.model) is self.kind
        assert not isinstance(self.model, StreamShard)
        now = dict(self.model.named_parameters())
        assert list(now) == list(self.parameters)
        for name, (p, data, requires_grad) in self.parameters.items():
            assert now[name] is p, name
            assert p.requires_grad is requires_grad, name
            if name in self.values:
                assert p.data_ptr() == data.data_ptr(), name
                assert torch.equal(p, self.values[name]), name
        for name, module in self.model.named_modules():
            assert type(module) is self.kinds[name], name
            assert set(module.__dict__) == set(self.dicts[name]), name
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"):
                assert not module.__dict__[hooks], f"{name}.{hooks}"


def assert_refused(model: nn.Module, error: type[StreamShardError], match: str, *args: Any, **settings: Any) -> None:
    """`StreamShard(model, ...)` raises such an error on this rank and changes nothing."""
    before = _Snapshot(model)
    with pytest.raises(error, match=match):
        StreamShard(model, *args, **settings)
    before.assert_unchanged()


def assert_trains(context: RankContext, model: nn.Module, **settings: Any) -> None:
    """The model that was refused can be sharded once the reason is gone."""
    sharded = StreamShard(model, **{"precision": FP32, **settings})
    step = lm_step if isinstance(model, TinyLM) else stack_step
    step(sharded, Call(0, context.rank, context.world_size, 1.0))
    assert any(grad is not None for grad in full_grads(sharded).values())


# ---------------------------------------------------------------------------------------------- the model


@on_ranks(1, 2)
def test_a_model_without_parameters_is_refused(context: RankContext) -> None:
    """There is nothing to shard; the error names the class."""
    assert_refused(nn.Sequential(nn.ReLU(), nn.Tanh()), ShardingError, "Sequential.*no parameters")


@on_ranks(1, 2)
@pytest.mark.parametrize("what", [None, "model", torch.zeros(3), [nn.Linear(2, 2)]], ids=str)
def test_something_that_is_no_module_is_refused(context: RankContext, what: Any) -> None:
    """The error says what was given."""
    with pytest.raises(StreamShardError, match=type(what).__name__):
        StreamShard(what)


@on_ranks(1, 2)
def test_a_sharded_model_is_not_sharded_again(context: RankContext) -> None:
    """Neither itself, nor a part of it, nor a model that contains it; it goes on working."""
    model: Any = StreamShard(TinyLM(), precision=FP32)
    with pytest.raises(ShardingError, match="already sharded"):
        StreamShard(model, precision=FP32)
    with pytest.raises(ShardingError, match="already sharded"):
        StreamShard(model.blocks[0], precision=FP32)
    outer = nn.Sequential(nn.Embedding(4, 4), model)
    with pytest.raises(ShardingError, match=r"(?s)1.*already sharded"):
        StreamShard(outer, precision=FP32)
    lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(1, 2)
def test_parameters_on_the_meta_device_are_refused_by_name(context: RankContext) -> None:
    """One forgotten layer, and a whole model that was never materialised."""
    model = TinyLM()
    model.blocks[2].up.to("meta")
    assert_refused(model, ShardingError, r"blocks\.2\.up\.weight.*meta")
    with torch.device("meta"):
        empty = TinyLM()
    assert_refused(empty, ShardingError, r"positions.*meta")


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "value",
    [torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.bool)],
    ids=["complex", "int8", "bool"],
)
def test_parameters_of_other_kinds_are_refused_by_name(context: RankContext, value: Tensor) -> None:
    """Complex numbers, and integers as quantized weights have them."""
    model = TinyLM()
    model.blocks[1].register_parameter("odd", nn.Parameter(value, requires_grad=value.is_complex()))
    assert_refused(model, ShardingError, rf"blocks\.1\.odd.*{value.dtype}")
    del model.blocks[1]._parameters["odd"]
    assert_trains(context, model)


@on_ranks(1, 2)
def test_double_precision_is_refused_or_kept_exact(context: RankContext) -> None:
    """Main weights are fp32: fp64 weights must not be rounded without a word."""
    assert_refused(TinyLM().double(), ShardingError, r"positions.*float64")


@on_ranks(1, 2)
def test_lazy_parameters_are_refused_by_name(context: RankContext) -> None:
    """They have no shape yet."""
    model = nn.Sequential(*(Layer() for _ in range(3)), nn.LazyLinear(1))
    with pytest.raises(StreamShardError, match=r"3\.weight"):
        StreamShard(model)


@on_ranks(1, 2)
def test_sparse_gradients_are_right_or_refused_by_name(context: RankContext) -> None:
    """`nn.Embedding(sparse=True)`: at the latest backward says so."""
    size = context.world_size
    torch.manual_seed(7)
    plain = TinyLM()
    torch.manual_seed(7)
    model = TinyLM()
    model.embedding.sparse = True
    try:
        StreamShard(model, precision=FP32)
        lm_step(model, Call(0, context.rank, size, 1.0))
    except RuntimeError as error:
        assert "embedding" in str(error)
        return
    for rank in range(size):
        lm_step(plain, Call(0, rank, size, 1 / size))
    assert_same(full_grads(model), full_grads(plain), "gradients")


@on_ranks(1, 2)
def test_a_model_inside_ddp_is_refused(context: RankContext) -> None:
    """The wrapper is what is wrong; the model inside can be sharded."""
    wrapped = DistributedDataParallel(TinyLM())
    with pytest.raises(ShardingError, match="DistributedDataParallel"):
        StreamShard(wrapped)


# ---------------------------------------------------------------------------------------------- the units

BAD_UNITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a block and a part of it": (
        lambda m: ["blocks.1", "blocks.1.attention"],
        r"blocks\.1.*overlap.*blocks\.1\.attention",
    ),
    "the part first": (lambda m: [m.blocks[1].attention, m.blocks[1]], r"blocks\.1"),
    "all blocks and the list": (lambda m: ["blocks", "blocks.0"], r"blocks"),
    "one block twice": (lambda m: [m.blocks[0], "blocks.0"], r"blocks\.0.*twice"),
    "a name that is not there": (lambda m: ["blocks.9"], r"blocks\.9"),
    "a class that is not there": (lambda m: [nn.Conv2d], r"Conv2d"),
    "a module of another model": (lambda m: [nn.Linear(4, 4)], r"Linear.*not part of the model"),
    "the model itself": (lambda m: [m], r"whole model"),
    "a unit without parameters": (lambda m: ["blocks.0.dropout"], r"blocks\.0\.dropout.*no parameters"),
    "a number": (lambda m: [3], r"3"),
    "nothing": (lambda m: [], r"no module"),
    "a predicate that takes nothing": (lambda m: lambda module: False, r"predicate"),
    "a predicate that overlaps": (lambda m: lambda module: isinstance(module, Block | nn.Linear), r"blocks\.0"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("what", BAD_UNITS)
def test_bad_units_are_refused_by_name(context: RankContext, what: str) -> None:
    """Overlaps, strangers, empty ones; afterwards the same model can be sharded."""
    units_of, match = BAD_UNITS[what]
    model = TinyLM()
    assert_refused(model, UnitError, f"(?s){match}", units_of(model))
    assert_trains(context, model)


# ---------------------------------------------------------------------------------------------- the settings

BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no weight slots": ({"weight_slots": 0}, "weight_slots=0"),
    "half a slot": ({"grad_slots": 1.5}, "grad_slots=1.5"),
    "slots in words": ({"weight_slots": "many"}, "many"),
    "precision by name": ({"precision": "bf16"}, "bf16"),
    "a mesh that is none": ({"mesh": 3}, "mesh=3"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(context: RankContext, what: str) -> None:
    """The argument and its value are in the message."""
    settings, match = BAD_SETTINGS[what]
    model = TinyLM()
    assert_refused(model, ConfigError, match, **settings)
    assert_trains(context, model)


@pytest.mark.parametrize(
    "settings",
    [
        {"param_dtype": torch.int8},
        {"param_dtype": torch.float64},
        {"param_dtype": "bfloat16"},
        {"reduce_dtype": torch.float16},
        {"reduce_dtype": torch.complex64},
        {"grad_dtype": torch.float16},
        {"output_dtype": torch.int32},
        {"buffer_dtype": "float32"},
    ],
    ids=str,
)
def test_a_bad_precision_is_refused_when_it_is_made(settings: dict[str, Any]) -> None:
    """The field and its value are in the message, which is also a ValueError's."""
    (name,) = settings
    with pytest.raises(ConfigError, match=name) as caught:
        Precision(**settings)
    assert isinstance(caught.value, ValueError)


def test_precision_cannot_be_changed() -> None:
    """It was validated as it is."""
    with pytest.raises(AttributeError):
        Precision().param_dtype = torch.float32  # type: ignore[misc]


def test_unknown_arguments_are_refused() -> None:
    """A misspelt argument is a TypeError."""
    with pytest.raises(TypeError, match="weight_slot"):
        StreamShard(TinyLM(), weight_slot=2)  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------- ranks that differ


def _other_shape(rank: int) -> nn.Module:
    return Stack((16, 16, 16 + rank, 16, 16))


def _other_name(rank: int) -> nn.Module:
    model = Stack()
    if rank:
        model.layers[1].extra = nn.Linear(2, 2)
    return model


def _other_depth(rank: int) -> nn.Module:
    return Stack((16,) * (5 + rank))


def _other_dtype(rank: int) -> nn.Module:
    model = Stack()
    if rank:
        model.layers[2].bfloat16()
    return model


def _other_freezing(rank: int) -> nn.Module:
    model = Stack()
    if rank:
        model.layers[2].requires_grad_(False)
    return model


def _other_tying(rank: int) -> nn.Module:
    model: Any = Stack()
    if rank:
        model.layers[2].linear.weight = model.layers[1].linear.weight
    return model  # type: ignore[no-any-return]


DIFFERENCES: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "shapes": (_other_shape, r"layers\.1\.linear\.weight"),
    "names": (_other_name, r"layers\.1\.extra"),
    "depths": (_other_depth, r"layers\.4"),
    "dtypes": (_other_dtype, r"layers\.2\.linear"),
    "frozen parameters": (_other_freezing, r"layers\.2\.linear"),
    "tied parameters": (_other_tying, r"layers\.[12]\.linear\.weight"),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_with_different_models_are_refused_on_every_rank(context: RankContext, what: str) -> None:
    """Every rank raises, names the first difference and the rank, and keeps its model."""
    build, match = DIFFERENCES[what]
    model = build(min(context.rank, 1))
    assert_refused(model, RankMismatchError, f"(?s){match}")
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize(
    "settings",
    [{"units": ["layers.1", "layers.2"]}, {"precision": Precision(param_dtype=torch.float32)}, {"weight_slots": 3}],
    ids=["units", "precision", "slots"],
)
def test_ranks_with_different_settings_are_refused_on_every_rank(
    context: RankContext, settings: dict[str, Any]
) -> None:
    """Arguments differ instead of models."""
    model = Stack()
    assert_refused(model, RankMismatchError, "rank", **(settings if context.rank else {}))
    dist.barrier()
    assert_trains(context, model)
