"""Odd but legal models: what they are made of is kept, or the model is refused by name before anything changes."""

from __future__ import annotations

import abc
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join

from streamshard import Precision, StreamShard, export_safetensors
from streamshard.engine.handle import engine_of
from streamshard.errors import ConfigError, ShardingError, StreamShardError
from streamshard.plan.structure import check_params, params_of
from tests.models import DIM, Block, Layer, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    lm_step,
    piece_of,
    sgd,
    stack_step,
)

# ---------------------------------------------------------------------------------------------- memory


def _tied_by_data(model: Any) -> None:
    model.layers[2].linear.weight = nn.Parameter(model.layers[0].linear.weight.data)


def _overlapping(model: Any) -> None:
    flat = torch.randn(DIM * DIM + 4)
    model.layers[0].linear.weight.data = flat[: DIM * DIM].view(DIM, DIM)
    model.layers[2].linear.weight.data = flat[4:].view(DIM, DIM)


def _overlapping_columns(model: Any) -> None:
    matrix = torch.randn(DIM, 2 * DIM)
    model.layers[0].linear.weight.data = matrix[:, :DIM]
    model.layers[2].linear.weight.data = matrix[:, DIM - 1 : -1]


def _expanded(model: Any) -> None:
    model.layers[2].linear.weight = nn.Parameter(torch.randn(1, DIM).expand(DIM, DIM))


def _watched_by_a_buffer(model: Any) -> None:
    model.layers[2].register_buffer("view", model.layers[2].linear.weight.detach().view(-1)[:3])


SHARED = {
    "one storage": (_tied_by_data, r"layers\.0\.linear\.weight.*layers\.2\.linear\.weight.*share memory"),
    "a part of it": (_overlapping, r"layers\.0\.linear\.weight.*layers\.2\.linear\.weight.*share memory"),
    "a column": (_overlapping_columns, r"layers\.0\.linear\.weight.*layers\.2\.linear\.weight.*share memory"),
    "its own": (_expanded, r"layers\.2\.linear\.weight.*expanded"),
    "a buffer": (_watched_by_a_buffer, r"parameter 'layers\.2\.linear\.weight' and buffer 'layers\.2\.view'"),
}


@pytest.mark.parametrize("how", SHARED)
def test_parameters_that_share_memory_are_refused_by_name(how: str) -> None:
    """Two Parameters over one storage are tied in torch, and would be untied by their shards."""
    model = Stack()
    change, message = SHARED[how]
    change(model)
    with pytest.raises(ShardingError, match=message):
        check_params(model)


def test_views_of_one_storage_that_do_not_overlap_are_fine() -> None:
    """Flattened models, loaded files, and matrices whose columns belong to two parameters."""
    model: Any = Stack()
    flat = torch.randn(2 * DIM * DIM)
    model.layers[0].linear.weight.data = flat[: DIM * DIM].view(DIM, DIM)
    model.layers[1].linear.weight.data = flat[DIM * DIM :].view(DIM, DIM)
    matrix = torch.randn(DIM, 2 * DIM)
    model.layers[2].linear.weight.data = matrix[:, ::2]
    model.layers[3].linear.weight.data = matrix[:, 1::2]
    assert check_params(model) == torch.device("cpu")


def test_one_parameter_under_two_names_is_no_sharing() -> None:
    """That is how models are tied."""
    assert check_params(TinyLM(TinyConfig(tied=True))) == torch.device("cpu")


# ---------------------------------------------------------------------------------------------- attributes


class ScaledLayer(Layer):
    """Reads a multiplier from its parameter, as muP's optimizers do, and leaves a note on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.multiplier = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """tanh(W x + b) times the multiplier, added to x"""
        weight: Any = self.linear.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return x + torch.tanh(self.linear(x)) * weight.multiplier


@on_ranks(1, 2)
def test_attributes_of_parameters_are_read_and_kept_in_forward(context: RankContext) -> None:
    """What is set before sharding, after it and in forward is the same on the parameter and inside forward."""
    model = StreamShard(nn.Sequential(*(ScaledLayer() for _ in range(3))), precision=FP32)
    x = vector_batch(0, context.rank)
    halved = model(x)
    weights: list[Any] = [layer.linear.weight for layer in model]
    assert [weight.calls for weight in weights] == [1, 1, 1]
    for weight in weights:
        weight.multiplier = 0.0
    assert torch.equal(model(x), x)
    assert not torch.equal(halved, x)


class ListedLayer(Layer):
    """Keeps its parameters in a list and a dict beside its linear layer, and computes with those."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.linear.weight, (3, self.linear.bias)]
        self.named = {"deeper": {"weight": self.linear.weight}, "other": 3}

    def forward(self, x: Tensor) -> Tensor:
        """x + tanh(W W x + b)"""
        weight: Any = self.listed[0]
        _, bias = self.listed[1]  # type: ignore[misc]
        inner = nn.functional.linear(x, self.named["deeper"]["weight"])  # type: ignore[index]
        return x + torch.tanh(nn.functional.linear(inner, weight, bias))


@on_ranks(1, 2)
def test_parameters_in_a_modules_own_lists_and_dicts_are_what_it_computes_with(context: RankContext) -> None:
    """As RNNs keep theirs: whole inside forward, the very parameters outside."""
    model = assert_trains_like_plain(context, lambda: nn.Sequential(*(ListedLayer() for _ in range(3))), stack_step)
    layer: Any = model[0]  # type: ignore[index]
    assert layer.listed[0] is layer.linear.weight
    assert layer.named["deeper"]["weight"] is layer.linear.weight


# ---------------------------------------------------------------------------------------------- classes


class Registered(nn.Module):
    """A base class that keeps a register of its subclasses, each with a key."""

    known: dict[str, type] = {}

    def __init_subclass__(cls, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert key not in Registered.known, "registered twice"
        Registered.known[key] = cls


class RegisteredLayer(Registered, key="layer"):
    """One of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """tanh(W x + b)"""
        return torch.tanh(self.linear(x))


class Counting(abc.ABCMeta):
    """A metaclass that counts its classes."""

    made = 0

    def __new__(mcs, name: str, bases: tuple[type, ...], entries: dict[str, Any], **options: Any) -> Any:
        assert "size" in options
        Counting.made += 1
        return super().__new__(mcs, name, bases, entries)


class CountedLayer(Layer, metaclass=Counting, size=1):
    """A layer of a metaclass that wants an argument."""


class SlottedLayer(Layer):
    """A layer with a slot, and with its own ideas of attributes and calls."""

    __slots__ = ("calls",)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        out: Tensor = super().__call__(x)
        return out

    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "__class__", "this class does not change"
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return "anything" if name.startswith("any_") else super().__getattr__(name)


class _LinearLayer:
    """What the layers below have in common, without a ``__dict__`` of its own."""

    __slots__ = ()

    def __init__(self) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]  # of which those that derive from this one are
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """tanh(W x + b)"""
        return torch.tanh(self.linear(x))


class AbstractFirstLayer(_LinearLayer, abc.ABC, nn.Module):
    """Python adds its instances' ``__dict__`` to `abc.ABC`, not to `object`: another layout than nn.Module's."""


Item = TypeVar("Item")


class GenericFirstLayer(Generic[Item], _LinearLayer, nn.Module):
    """Likewise; `typing.Generic` raises if someone derives from it without an argument."""

    __init__ = _LinearLayer.__init__


class HasForward(Protocol):
    """A protocol, which adds a ``__dict__`` itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Of any layer."""


class ProtocolFirstLayer(_LinearLayer, HasForward, nn.Module):
    """Its metaclass is typing's."""

    __init__ = _LinearLayer.__init__
    forward = _LinearLayer.forward


class RegisteredFirst(_LinearLayer):
    """A base without a ``__dict__`` whose subclasses need an argument."""

    __slots__ = ()

    def __init_subclass__(cls, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.known[key] = cls


class RegisteredFirstLayer(RegisteredFirst, nn.Module, key="first"):
    """One of them."""


@final
class SlottedFirstLayer(_LinearLayer, nn.Module):
    """A last class of its kind, with a slot before its ``__dict__``."""

    __slots__ = ("calls",)


@on_ranks(1, 2)
@pytest.mark.parametrize(
    "layer",
    [
        RegisteredLayer,
        CountedLayer,
        SlottedLayer,
        AbstractFirstLayer,
        GenericFirstLayer,
        ProtocolFirstLayer,
        RegisteredFirstLayer,
        SlottedFirstLayer,
    ],
)
def test_classes_of_any_layout_and_metaclass_train_like_plain_pytorch(
    context: RankContext, layer: type[nn.Module]
) -> None:
    """As layers, as modules around layers, and as the root. The user's code does not see the classes that we make."""
    registered, made = dict(Registered.known), Counting.made
    assert_trains_like_plain(context, lambda: nn.Sequential(*(layer() for _ in range(3))), stack_step)
    around = assert_trains_like_plain(
        context, lambda: nn.Sequential(layer(), layer()), stack_step, units=["0.linear", "1.linear"]
    )
    root = assert_trains_like_plain(context, layer, stack_step, units=["linear"])
    assert isinstance(root, StreamShard)
    for module in (around[0], root):  # type: ignore[index]  # a Sequential
        assert isinstance(module, layer)
        assert type(module).__name__ == layer.__name__
        with pytest.raises(ShardingError, match=f"{layer.__name__} is sharded"):
            copy.deepcopy(module)
        assert type(type(module)()) is layer
    assert Registered.known == registered
    assert Counting.made == made


@on_ranks(2)
def test_the_class_of_a_layer_makes_ordinary_layers(context: RankContext) -> None:
    """`type(layer)(...)` is what libraries do to make another; and nobody derives from a sharded model's class."""
    model = StreamShard(Stack(), precision=FP32)
    fresh = type(model.layers[0])(DIM)
    assert type(fresh) is Layer
    assert fresh(torch.ones(1, DIM)).shape == (1, DIM)
    with pytest.raises(ShardingError, match="Mine derives from StreamShard"):
        type("Mine", (StreamShard,), {})(Stack())
    with pytest.raises(ShardingError, match="Derived derives from"):
        type("Derived", (type(model),), {})()


class OwnMethods(Stack):
    """Has methods and a child by names that StreamShard uses, and lists of parts that leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.check_weights = nn.Linear(DIM, DIM)

    def clip_grad_norm_(self, limit: float) -> str:
        """Nothing of the kind."""
        return f"clipped at {limit}"

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, 1]"""
        return super().forward(self.check_weights(x))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The head's only."""
        return self.head.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By other names."""
        return ((f"my_{name}", param) for name, param in super().named_parameters(*args, **kwargs))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """None."""
        return iter(())


@on_ranks(1, 2)
def test_a_models_own_names_stay_its_own(context: RankContext) -> None:
    """Its methods and children by names that we use are what it finds; ours are there as functions."""
    torch.manual_seed(3)
    plain = OwnMethods()
    torch.manual_seed(3)
    model = StreamShard(OwnMethods(), precision=FP32, check_grads=True)
    assert model.clip_grad_norm_(2.0) == "clipped at 2.0"
    assert isinstance(model.check_weights, nn.Linear)
    assert all(name.startswith("my_") for name, _ in model.named_parameters())
    assert list(model.parameters()) == list(model.head.parameters())
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    for rank in range(context.world_size):
        stack_step(plain, Call(0, rank, context.world_size, 1 / context.world_size))
    wanted = torch.nn.utils.clip_grad_norm_(params_of(plain).values(), 0.1)
    torch.testing.assert_close(StreamShard.clip_grad_norm_(model, 0.1).as_subclass(Tensor), wanted)
    assert list(model.local_ranges()) == list(params_of(plain))
    assert_same(full_grads(model), full_grads(plain), "gradients")
    StreamShard.check_weights(model)


@on_ranks(2)
def test_a_rank_that_has_run_out_clips_as_the_others_do(context: RankContext) -> None:
    """With our clipping, though the model has a method of that name."""
    model = StreamShard(OwnMethods(), precision=FP32)
    optimizer = sgd(model)

    def finish() -> None:
        StreamShard.clip_grad_norm_(model, 0.1)
        optimizer.step()

    with Join([model], repeat=finish):  # type: ignore[list-item]  # has all that a Joinable has
        for step in range(3 if context.rank else 2):
            stack_step(model, Call(step, context.rank, 2, 1.0))
            finish()
            optimizer.zero_grad()
    StreamShard.check_weights(model)


@on_ranks(2)
def test_names_that_torch_itself_asks_for_are_refused(context: RankContext) -> None:
    """Join would call the model's join_hook, and what DDP shall ignore would not be ignored."""
    model: Any = Stack()
    model.join_device = "mine"
    with pytest.raises(ShardingError, match=r"Stack has a join_device.*rename"):
        StreamShard(model, precision=FP32)
    del model.join_device
    model._ddp_params_and_buffers_to_ignore = ["head.weight"]
    with pytest.raises(ShardingError, match=r"head\.weight.*_ddp_params_and_buffers_to_ignore"):
        StreamShard(model, precision=FP32)


@on_ranks(2)
def test_all_attributes_of_a_sharded_model_can_be_looked_at(context: RankContext) -> None:
    """What inspectors do; also while a backward is under way, where ranges are what they are outside."""
    model = StreamShard(Stack(), precision=FP32)
    ranges = model.local_ranges()
    seen: list[Any] = []

    def look(*_: object) -> None:
        seen.append((model.local_ranges(), dict(inspect.getmembers(model))["head"], str(model.memory_report())))

    model.layers[1].register_full_backward_hook(look)
    model.layers[1].register_forward_hook(look)
    look()
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert [(found, head) for found, head, _ in seen] == [(ranges, model.head)] * 3


@on_ranks(2)
def test_torchscript_is_refused_where_it_has_parameters(context: RankContext) -> None:
    """A scripted activation may stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted, activation = torch.jit.script(nn.Linear(DIM, DIM)), torch.jit.script(nn.Tanh())
    model: Any = Stack()
    model.layers[1].linear = scripted
    with pytest.raises(ShardingError, match=r"layers\.1\.linear.*TorchScript"):
        StreamShard(model, precision=FP32)
    model = StreamShard(nn.Sequential(Layer(), activation, Layer(), Layer()), precision=FP32)
    stack_step(model, Call(0, context.rank, 2, 1.0))


# ---------------------------------------------------------------------------------------------- devices, modes


@on_ranks(2)
@pytest.mark.parametrize("slots", [2, "all"])
def test_moving_a_model_to_where_it_is_changes_nothing(context: RankContext, slots: Any) -> None:
    """Trainers do it. "cpu:0" is the CPU, though ``.to`` copies a tensor from the one to the other."""
    model = StreamShard(Stack(), precision=FP32, weight_slots=slots)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    before = [piece_of(t).data_ptr() for p in model.parameters() if p.grad is not None for t in (p, p.grad)]
    for move in (lambda m: m.to("cpu:0"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.zeros(1))):
        assert move(model) is model
        assert move(model.layers[0]) is model.layers[0]
    assert [piece_of(t).data_ptr() for p in model.parameters() if p.grad is not None for t in (p, p.grad)] == before
    stack_step(model, Call(1, context.rank, 2, 1.0))


@on_ranks(2)
def test_layers_of_a_sharded_model_cannot_be_cast_or_emptied(context: RankContext) -> None:
    """The layer's own ``.half()`` is refused as the model's is."""
    model = StreamShard(Stack(), precision=FP32)
    for change in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta")):
        for module in (model, model.layers[0]):
            with pytest.raises(ShardingError, match=f"{type(module).__name__} is sharded by StreamShard"):
                change(module)
    with pytest.raises(ShardingError, match="without its weights"):
        model.to_empty(device="cpu")
    with pytest.raises(ShardingError, match="shared memory"):
        model.share_memory()
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(1, 2)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_mode_leaves_nothing_behind_that_cannot_train(context: RankContext, param_dtype: torch.dtype) -> None:
    """Sharding, the first forward, a look at whole weights inside of it: training afterwards is as ever."""
    model = Stack()
    model.register_buffer("seen", torch.zeros(3))
    with torch.inference_mode():
        model.seen = torch.zeros(3)
        StreamShard(model, precision=Precision(param_dtype=param_dtype))
        model(vector_batch(0, context.rank))
        with model.summon_full_params(writeback=True):
            next(model.parameters()).data.mul_(2.0)
    for param in model.parameters():
        param.data = param.data.clone()
    with torch.inference_mode():
        model(vector_batch(0, context.rank))
    optimizer = sgd(model)
    for step in range(2):
        stack_step(model, Call(step, context.rank, context.world_size, 1.0))
        optimizer.step()
    model.seen.add_(1)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    """torch never lets its parameters train; that is not a rank's death."""
    with torch.inference_mode():
        model = Stack()
    with pytest.raises(ShardingError, match=r"layers\.0\.linear\.weight.*inference_mode.*build or load"):
        check_params(model)


@on_ranks(1, 2)
def test_transforms_that_differentiate_are_refused_and_vmap_is_not(context: RankContext) -> None:
    """`torch.func.grad` and its kin cannot see through gathers; the error says what can."""
    model = StreamShard(Stack(), precision=FP32)
    x = vector_batch(0, context.rank)
    for transform in (
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.func.grad(lambda x: StreamShard(Stack())(x).sum())(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
    ):
        with pytest.raises(ShardingError, match=r"torch\.func.*forward_ad"):
            transform()
    with pytest.raises(ShardingError, match="functional_call"):
        torch.func.functional_call(model, {"head.weight": torch.zeros(1, DIM)}, (x,))
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_a_group_without_this_rank_is_refused_by_what_it_is(context: RankContext) -> None:
    """`new_group` gives ranks outside of it a number; the ranks inside are not held up."""
    group = dist.new_group([0])
    if context.rank == 1:
        with pytest.raises(ConfigError, match=r"new_group.*rank 1 has no part"):
            StreamShard(Stack(), mesh=group)
    else:
        stack_step(StreamShard(Stack(), mesh=group, precision=FP32), Call(0, 0, 1, 1.0))


# ---------------------------------------------------------------------------------------------- outside of a pass


@on_ranks(2)
def test_a_forward_outside_of_a_pass_says_whose_piece_it_reads(context: RankContext) -> None:
    """Not that two matrices do not fit. Looking at a parameter is not computing with it."""
    model: Any = StreamShard(TinyLM(), precision=FP32)
    x = torch.zeros(2, 3, DIM)
    for call, name in (
        (lambda: model.blocks[0].up(x), "up"),
        (lambda: model.blocks[0].attention_norm(x), "attention_norm"),
        (lambda: model.blocks[0].forward(x), "attention_norm"),
        (lambda: model.blocks[0].attention.forward(x), "attention"),
    ):
        with pytest.raises(
            ShardingError, match=rf"'blocks\.0\.{name}[a-z.]*' outside of its model's forward: this rank"
        ):
            call()
    assert model.blocks[0].up.weight.ndim == 2
    assert model.blocks[0](x).shape == x.shape
    lm_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_what_needs_all_weights_says_that_layers_are_computing(context: RankContext, hook: str) -> None:
    """In hooks of forward and of backward; the step goes on."""
    model: Any = StreamShard(Stack(), precision=FP32)
    whole = model.full_state_dict(rank0_only=False)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": model.state_dict,
        "state_dict\\(\\) of": model.layers[1].state_dict,
        "full_state_dict": model.full_state_dict,
        "load_state_dict": lambda: model.load_state_dict(whole),
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "check_weights": model.check_weights,
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    refused = []

    def try_all(*_: object) -> None:
        for name, call in calls.items():
            with pytest.raises(StreamShardError, match=f"{name}.* inside a forward or backward"):
                call()
            refused.append(name)

    getattr(model.layers[1], hook)(try_all)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert refused == list(calls)
    assert_same(model.full_state_dict(rank0_only=False), whole, "weights")


@on_ranks(2)
def test_a_state_dict_after_a_failed_backward_holds_pieces(context: RankContext) -> None:
    """Not what layers computed with when it failed."""
    model = StreamShard(Stack(), precision=FP32)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}

    def fail(*_: object) -> None:
        raise KeyError("mine")

    handle = model.layers[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        stack_step(model, Call(0, context.rank, 2, 1.0))
    handle.remove()
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == wanted


# ---------------------------------------------------------------------------------------------- units that are found


class EncoderDecoder(nn.Module):
    """Two lists of layers of different classes, and one of small ones."""

    def __init__(self, decoder: type[nn.Module] = Block) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(6))
        self.decoder = nn.ModuleList(decoder() for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(12))


class Pairs(nn.Module):
    """Each layer is a list of two that the model calls one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Layer(), nn.Linear(DIM, DIM)]) for _ in range(3))


class Stages(nn.Sequential):
    """Stages of several layers each, as image models have them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(*(Layer() for _ in range(depth))) for depth in (2, 2, 5)))


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "encoder and decoder": (
        EncoderDecoder,
        [*(f"encoder.{place}" for place in range(6)), *(f"decoder.{place}" for place in range(3))],
    ),
    "lists in a list": (Pairs, [f"layers.{layer}.{part}" for layer in range(3) for part in range(2)]),
    "stages": (Stages, [f"{stage}.{layer}" for stage, depth in enumerate((2, 2, 5)) for layer in range(depth)]),
    "sequences as layers": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4))),
        [str(place) for place in range(4)],
    ),
}


@on_ranks(1)
@pytest.mark.parametrize("kind", FOUND)
def test_every_substantial_list_of_layers_is_found(context: RankContext, kind: str) -> None:
    """Not only the longest; small lists beside them stay at the edge."""
    build, wanted = FOUND[kind]
    assert [unit.name for unit in engine_of(StreamShard(build(), precision=FP32)).units[1:]] == wanted


@on_ranks(1)
def test_a_model_that_is_mostly_edge_says_so(context: RankContext) -> None:
    """Its layers are not in a list; the warning names what is gathered all at once. Embeddings do not count."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.first, self.second, self.third = Layer(DIM, 7), Layer(DIM, 7), Layer(DIM, 7)

    with pytest.warns(
        UserWarning, match=r"40% of the weights of Loose.*in 'first.linear', 'second.linear', 'third.linear'.*units="
    ) as heard:
        StreamShard(Loose(), precision=FP32)
    assert heard[0].filename == __file__
    StreamShard(TinyLM(TinyConfig(vocabulary=4000)), precision=FP32)


# ---------------------------------------------------------------------------------------------- arguments


@on_ranks(2)
def test_a_predicate_that_fails_on_one_rank_ends_all_of_them(context: RankContext) -> None:
    """The others do not wait for a rank that has raised an error of its own."""

    def choose(module: nn.Module) -> bool:
        if context.rank == 1:
            raise KeyError("mine")
        return isinstance(module, Layer)

    with pytest.raises(KeyError if context.rank else ShardingError, match="mine"):
        StreamShard(Stack(), units=choose, precision=FP32)


@on_ranks(1)
def test_arguments_of_the_wrong_kind_are_named(context: RankContext) -> None:
    """What was given and what is wanted, whichever call it was."""
    with pytest.raises(TypeError, match=r"StreamShard\(\): .*'unit'"):
        StreamShard(Stack(), unit=Layer)
    with pytest.raises(ConfigError, match="broadcast_weights='no'"):
        StreamShard(Stack(), broadcast_weights="no")
    model = StreamShard(Stack(), precision=FP32)
    with pytest.raises(ConfigError, match="requires_gradient_sync='no'"):
        model.set_requires_gradient_sync("no")
    with pytest.raises(ShardingError, match="NoneType is not sharded"):
        export_safetensors(None, "nowhere")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="Layer is a layer of a sharded model"):
        export_safetensors(model.layers[0], "nowhere")
