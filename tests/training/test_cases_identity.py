"""`StreamShard(model)` shards in place: libraries that look at the model still see the one they know."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import pydoc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import Precision, StreamShard
from streamshard.config import Settings
from streamshard.errors import StreamShardError
from tests.models import NormStack, Stack, TinyConfig, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, counted_collectives, full_grads, lm_step, piece_of, sgd, stack_step


@on_ranks(1, 2)
def test_the_same_object_is_returned(context: RankContext) -> None:
    """Whoever holds the model holds the sharded model."""
    model = TinyLM()
    assert StreamShard(model, precision=FP32) is model


@on_ranks(1, 2)
def test_the_model_is_an_instance_of_streamshard_and_of_its_own_class(context: RankContext) -> None:
    """Both isinstance checks hold."""
    model = StreamShard(TinyLM(), precision=FP32)
    assert isinstance(model, StreamShard)
    assert isinstance(model, TinyLM)


@on_ranks(2)
def test_an_ordinary_model_is_no_instance_of_streamshard(context: RankContext) -> None:
    """Also when another model of its class is sharded, and also the parts of a sharded model."""
    model = StreamShard(TinyLM(), precision=FP32)
    assert not isinstance(TinyLM(), StreamShard)
    assert not isinstance(nn.Linear(2, 2), StreamShard)
    assert not isinstance(model.blocks[0], StreamShard)


@on_ranks(1, 2)
def test_the_class_keeps_its_name(context: RankContext) -> None:
    """transformers writes the name into config files and picks label names by it."""
    model = StreamShard(TinyLM(), precision=FP32)
    assert type(model).__name__ == "TinyLM"
    assert type(model).__qualname__ == TinyLM.__qualname__
    assert type(model).__module__ == TinyLM.__module__


@on_ranks(1, 2)
def test_forward_keeps_its_signature(context: RankContext) -> None:
    """Trainers drop the columns of a batch that forward does not name."""
    model = TinyLM()
    bound, unbound = inspect.signature(model.forward), inspect.signature(type(model).forward)
    StreamShard(model, precision=FP32)
    assert inspect.signature(model.forward) == bound
    assert inspect.signature(type(model).forward) == unbound


def test_streamshard_says_which_options_it_has() -> None:
    """To help() and to editors that ask; with the defaults that count when an option is left out."""
    parameters = inspect.signature(StreamShard).parameters
    assert list(parameters)[:4] == ["module", "units", "resident", "mesh"]
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)} | {"precision": None}
    options = list(parameters.values())[4:]
    assert {option.name: option.default for option in options} == defaults
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert "weight_slots: 'SlotCount' = 2" in pydoc.plain(pydoc.render_doc(StreamShard)).split("Shard a model")[0]


@on_ranks(1)
def test_a_sharded_model_does_not_take_streamshards_options(context: RankContext) -> None:
    """Neither it nor its class, though that derives from StreamShard."""
    model = StreamShard(TinyLM(), precision=FP32)
    for called in (model, type(model)):
        assert "weight_slots" not in inspect.signature(called).parameters


@on_ranks(1, 2)
def test_attributes_and_methods_stay(context: RankContext) -> None:
    """What the user put on the model, and what the class has, is still there."""
    model = TinyLM(TinyConfig(tied=True))
    model.remark = ["mine"]  # type: ignore[assignment]
    config, remark, blocks = model.config, model.remark, list(model.blocks)
    StreamShard(model, precision=FP32)
    assert model.config is config
    assert model.remark is remark
    assert all(a is b for a, b in zip(model.blocks, blocks, strict=True))
    assert model.head.weight is model.embedding.weight
    assert callable(model.run_blocks)


class Wrapper(nn.Module):
    """A model with a child of this name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Stack()


@on_ranks(1)
def test_a_sharded_model_has_no_module_inside(context: RankContext) -> None:
    """The error says where the model is; a model's own child of that name is there."""
    model = StreamShard(TinyLM(), precision=FP32)
    assert not hasattr(model, "module")
    with pytest.raises(AttributeError, match="'TinyLM' object has no attribute 'module': .*in place"):
        model.module  # noqa: B018  # raises
    with pytest.raises(AttributeError, match="'TinyLM' object has no attribute 'modul'$"):
        model.modul  # noqa: B018  # raises
    assert isinstance(StreamShard(Wrapper(), precision=FP32).module, Stack)


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", [False, True])
def test_names_stay(context: RankContext, tied: bool) -> None:
    """State-dict keys, parameters, buffers and modules have the names and the order that they had."""
    model, plain = TinyLM(TinyConfig(tied=tied)), TinyLM(TinyConfig(tied=tied))
    StreamShard(model, precision=FP32)
    for _ in range(2):
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(1, 2)
def test_parameters_stay_the_same_objects(context: RankContext) -> None:
    """An optimizer, a parameter group or a hook made before sharding refers to the right ones, after a step too."""
    model = TinyLM()
    before = dict(model.named_parameters())
    StreamShard(model, precision=FP32)
    for _ in range(2):
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in after.values())
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2, 3)
def test_outside_forward_parameters_are_fp32_shards_with_as_many_dims(context: RankContext) -> None:
    """`p.ndim >= 2` still tells matrices from biases, and the shards of all ranks make up the whole."""
    model, plain = TinyLM(), TinyLM()
    StreamShard(model)
    for _ in range(2):
        for (name, shard), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert shard.dtype == torch.float32, name
            assert shard.ndim == whole.ndim, name
            assert shard.grad is None or shard.grad.shape == shard.shape, name
            total = torch.tensor(piece_of(shard).numel())
            dist.all_reduce(total)
            assert int(total) == whole.numel(), name
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(1, 2)
def test_the_type_of_a_sharded_model_builds_an_ordinary_one(context: RankContext) -> None:
    """`type(model)(config)` is what libraries do to make another one like it."""
    model = StreamShard(TinyLM(), precision=FP32)
    fresh = type(model)(model.config)
    assert isinstance(fresh, TinyLM)
    assert not isinstance(fresh, StreamShard)
    assert [p.shape for p in fresh.parameters()] == [p.shape for p in TinyLM().parameters()]
    with counted_collectives(model) as counts:
        lm_step(fresh, Call(0, context.rank, context.world_size, 1.0))
    assert counts == {}
    assert all(p.grad is not None for p in fresh.parameters())
    clone = copy.deepcopy(fresh)
    assert_same(clone.state_dict(), fresh.state_dict(), "copy of the ordinary model")


@on_ranks(2)
def test_the_ordinary_model_can_be_sharded_in_turn(context: RankContext) -> None:
    """Two models of one class, both sharded, do not get in each other's way."""
    first = StreamShard(TinyLM(), precision=FP32)
    second = StreamShard(type(first)(first.config), precision=FP32)
    assert type(second).__name__ == "TinyLM"
    second.load_state_dict(first.full_state_dict(rank0_only=False))
    call = Call(0, context.rank, 2, 1.0)
    assert torch.equal(lm_step(first, call), lm_step(second, call))
    assert_same(full_grads(first), full_grads(second), "gradients")


@on_ranks(2)
def test_train_and_eval_modes_are_kept_and_can_be_changed(context: RankContext) -> None:
    """The mode of every module is the user's."""
    model = NormStack()
    model.norms[1].eval()
    StreamShard(model, precision=FP32)
    assert model.training
    assert not model.norms[1].training
    model.eval()
    assert not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())


@on_ranks(2)
def test_the_users_own_hooks_run_as_before(context: RankContext) -> None:
    """Module hooks fire once per call, and see full-shape weights inside forward."""
    model = TinyLM()
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: object) -> None:
            seen.append((name, sum(p.numel() for p in module.parameters())))

        return hook

    block = model.blocks[1]
    numel = sum(p.numel() for p in block.parameters())
    block.up.register_forward_hook(note("up, before sharding"))
    StreamShard(model, precision=FP32)
    block.down.register_forward_pre_hook(note("down, after sharding"))
    lm_step(model, Call(0, context.rank, 2, 1.0))
    assert [name for name, _ in seen] == ["up, before sharding", "down, after sharding"]
    assert [size for _, size in seen] == [
        sum(p.numel() for p in TinyLM().blocks[1].up.parameters()),
        sum(p.numel() for p in TinyLM().blocks[1].down.parameters()),
    ]
    assert numel > sum(size for _, size in seen)


@on_ranks(2)
def test_full_parameters_can_be_summoned_and_go_away_again(context: RankContext) -> None:
    """Inside: original names, full shapes, fp32, the right values. Outside: the shards, untouched."""
    torch.manual_seed(4)
    plain = TinyLM()
    torch.manual_seed(4)
    model = StreamShard(TinyLM())
    shards = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with model.summon_full_params():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # without writeback this is lost
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_same(found, dict(plain.named_parameters()), "summoned")
    for name, p in model.named_parameters():
        assert p is shards[name][0]
        assert torch.equal(p, shards[name][1]), name


@on_ranks(2)
def test_summoned_parameters_are_written_back_on_request(context: RankContext) -> None:
    """An initialisation that needs full shapes is kept, and used by the next forward."""
    torch.manual_seed(4)
    plain, model = Stack(), StreamShard(Stack(), precision=FP32)
    with model.summon_full_params(writeback=True):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                a.copy_(b)
    assert_same(model.full_state_dict(rank0_only=False), plain.state_dict(), "weights")
    x = vector_batch(0, context.rank)
    assert_same({"out": model(x)}, {"out": plain(x)}, "forward")


@on_ranks(2)
def test_leaving_summon_by_an_exception_restores_the_shards(context: RankContext) -> None:
    """The user's error comes out and training goes on."""
    model = StreamShard(Stack(), precision=FP32)
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(KeyError, match="mine"), model.summon_full_params():
        raise KeyError("mine")
    assert [p.shape for p in model.parameters()] == shapes
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
@pytest.mark.parametrize("how", ["bfloat16", "half", "double", "to"])
def test_casting_a_sharded_model_raises_or_changes_nothing(context: RankContext, how: str) -> None:
    """Main weights are fp32; a cast must not quietly make them something else."""
    model = StreamShard(Stack(), precision=FP32)
    with contextlib.suppress(StreamShardError):
        model.to(torch.bfloat16) if how == "to" else getattr(model, how)()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = model.full_state_dict(rank0_only=False)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    sgd(model).step()
    after = model.full_state_dict(rank0_only=False)
    assert any(not torch.equal(after[name], before[name]) for name in before)


@on_ranks(2)
def test_printing_the_model_works(context: RankContext) -> None:
    """`repr` shows what it showed, and after the model's name how it is sharded."""
    plain = repr(TinyLM()).splitlines()
    settings = {"units": ["Block", "head"], "weight_slots": 3, "precision": Precision(grad_dtype=torch.bfloat16)}
    lines = repr(StreamShard(TinyLM(), **settings)).splitlines()
    assert lines[:3] == [
        "TinyLM(",
        "  StreamShard: 10,592 parameters over 2 ranks; units: 4 x Block, Linear and the root unit; resident: head",
        "  weight_slots=3, grad_slots=2; computes in bfloat16, gradients in bfloat16, summed in float32",
    ]
    assert lines[:1] + lines[3:] == plain


class Terse(Stack):
    """With words of its own."""

    def __repr__(self) -> str:
        return "terse"


@on_ranks(1)
def test_what_a_model_says_of_itself_stays(context: RankContext) -> None:
    """In one line; how it is sharded follows."""
    lines = repr(StreamShard(Terse(), precision=FP32, memory_budget="1GB")).splitlines()
    assert lines[0] == "terse"
    assert lines[1].startswith("  StreamShard: ")
    assert " over 1 rank; units: " in lines[1]
    assert (
        lines[2]
        == "  weight_slots='all', grad_slots='all'; computes in float32, gradients in float32, summed in float32"
    )


@on_ranks(4)
def test_printing_counts_replicas(context: RankContext) -> None:
    """Beside the ranks of each."""
    model = StreamShard(Stack(), mesh=init_device_mesh("cpu", (2, 2)), precision=FP32)
    assert "over 2 ranks in each of 2 replicas; units: " in repr(model)


@on_ranks(1, 2)
def test_the_output_is_what_forward_returned(context: RankContext) -> None:
    """In eval mode, without a backward, the output equals plain PyTorch's."""
    torch.manual_seed(4)
    plain = TinyLM()
    torch.manual_seed(4)
    model = StreamShard(TinyLM(), precision=FP32)
    tokens = token_batch(0, context.rank)
    found: Tensor = model.eval()(tokens)
    assert_same({"logits": found}, {"logits": plain.eval()(tokens)}, "forward")
