"""Weights that code keeps beyond their layer's forward: the right ones, with gradients, or an error by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from streamshard.errors import ShardingError
from tests.engine.test_kept_views import searching_what_is_new
from tests.models import Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, assert_trains_like_plain, full_weights, stack_step

# One rank has no slots. With three, those of layers that follow each other are not the same for longer.
each_number_of_slots = pytest.mark.parametrize(("world_size", "slots"), [(1, 2), (2, 2), (2, 3), (2, "all")])


class SaveWeight(torch.autograd.Function):
    """x @ w.T that saves the weight as it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, DIM], [DIM, DIM] -> [rows, DIM]"""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the input, and of the weight"""
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class OwnWeight(torch.autograd.Function):
    """The same, with the weight kept by the context: right while the layer itself is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, DIM], [DIM, DIM] -> [rows, DIM]"""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the input, and of the weight"""
        assert ctx.weight.data_ptr()  # as a kernel asks for it
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.saved_tensors[0]


class Box:
    """What a library may keep a weight in."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


# How a weight is kept, and what gives it back.
KEEPERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "object": (Box, lambda box: box.weight),
    "closure": (lambda weight: lambda: weight, lambda read: read()),
    "weak reference": (weakref.ref, lambda read: read()),
    "transposed later": (Box, lambda box: box.weight.t().t()),
    "data": (Box, lambda box: box.weight.data),
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "product": lambda x, weight: x * weight[0] + weight.mean(1),
    "saving": SaveWeight.apply,  # type: ignore[dict-item]  # is not annotated
    "own": OwnWeight.apply,  # type: ignore[dict-item]
}


class Keeping(Layer):
    """Keeps its weight on a shelf, and computes with what is there of layers before it."""

    def __init__(self, shelf: dict[int, Any], place: int, keeper: str = "object", use: str = "linear") -> None:
        super().__init__()
        self.shelf, self.place, self.keeper, self.use = shelf, place, keeper, use

    def kept(self) -> list[Tensor]:
        """Of layers one and two places before this one: in the other slot, and in its own."""
        read = KEEPERS[self.keeper][1]
        return [read(self.shelf[self.place - step]) for step in (1, 2) if self.place - step in self.shelf]

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        y = super().forward(x)
        for weight in self.kept():
            y = torch.tanh(USES[self.use](y, weight)) + y
        self.shelf[self.place] = KEEPERS[self.keeper][0](self.linear.weight)
        return y


class KeepingStack(Stack):
    """Layers that share a shelf.

    Args:
        keeper: how weights are kept.
        use: what is computed with them.
        clears: before each pass; else what is there is found by the next one.
        recomputed: layers are checkpointed.
    """

    def __init__(
        self, keeper: str = "object", use: str = "linear", *, clears: bool = True, recomputed: bool = False
    ) -> None:
        super().__init__()
        self.shelf: dict[int, Any] = {}
        self.clears, self.recomputed = clears, recomputed
        self.layers = nn.ModuleList(Keeping(self.shelf, place, keeper, use) for place in range(5))

    def order(self) -> Any:
        """Layers, or checkpoints around them."""
        for layer in self.layers:
            if self.recomputed:
                yield lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False)
            else:
                yield layer

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        if self.clears:
            self.shelf.clear()
        return super().forward(x)


@on_ranks()
@each_number_of_slots
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_weight_that_is_kept_stays_that_weight(context: RankContext, keeper: str, slots: Any) -> None:
    """However it is kept; for layers that use the same slot and for others."""
    assert_trains_like_plain(context, lambda: KeepingStack(keeper), stack_step, weight_slots=slots)


@on_ranks()
@each_number_of_slots
@pytest.mark.parametrize("use", ["product", "saving"])
def test_whatever_is_computed_with_it(context: RankContext, use: str, slots: Any) -> None:
    """Operations that save the weight itself, and a Function of the user's that does."""
    assert_trains_like_plain(context, lambda: KeepingStack(use=use), stack_step, weight_slots=slots)


@on_ranks()
@each_number_of_slots
def test_a_recomputation_finds_weights_that_were_kept(context: RankContext, slots: Any) -> None:
    """In backward, when other layers have had the slots."""
    assert_trains_like_plain(context, lambda: KeepingStack(recomputed=True), stack_step, weight_slots=slots)


class Looking(KeepingStack):
    """The first layers use weights of the last ones, which a step before this one has kept."""

    looks = False

    def __init__(self) -> None:
        super().__init__(clears=False)
        for layer in self.layers:
            layer.kept = lambda place=layer.place: [  # type: ignore[assignment, misc, union-attr]
                self.shelf[other].weight for other in (4, 3) if self.looks and place < 2
            ]


@on_ranks()
@each_number_of_slots
def test_a_weight_that_an_earlier_pass_has_kept_is_what_it_is_now(context: RankContext, slots: Any) -> None:
    """After optimizer steps, as a parameter of plain PyTorch's is; before its own layer has run."""

    def look(model: Any, number: int) -> None:
        model.looks = number > 0

    assert_trains_like_plain(context, Looking, stack_step, prepare=look, weight_slots=slots)


@on_ranks()
@each_number_of_slots
def test_without_gradients_too(context: RankContext, slots: Any) -> None:
    """Nothing is saved there."""
    torch.manual_seed(0)
    model = StreamShard(KeepingStack(), precision=FP32, weight_slots=slots)
    plain = KeepingStack()
    plain.load_state_dict(full_weights(model))
    for number in range(3):
        x = vector_batch(number, context.rank)
        with torch.no_grad():
            assert_same({"output": model(x)}, {"output": plain(x)}, f"pass {number}")


class Caller(Keeping):
    """Keeps its weight, and calls a layer that uses it, of which it then uses its own again."""

    inner: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        weight = self.linear.weight
        self.shelf[self.place] = Box(weight)
        for layer in self.inner:
            x = layer(torch.tanh(F.linear(x, weight)))
        return Layer.forward(self, F.linear(x, weight))


class CallerStack(KeepingStack):
    """Every second layer is called by another, whose slot it may need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Caller if place < 3 else Keeping)(self.shelf, place) for place in range(6))
        for place, step in ((0, 3), (1, 3), (2, 3)):
            inner: Any = self.layers[place + step]
            inner.kept = lambda place=place: [self.shelf[place].weight]
            self.layers[place].inner = (inner,)  # type: ignore[assignment]  # a tuple: no child

    def order(self) -> Any:
        """The outer ones."""
        return list(self.layers)[:3]


@on_ranks()
@each_number_of_slots
def test_a_layer_that_is_called_finds_what_its_caller_has_kept(context: RankContext, slots: Any) -> None:
    """And the caller, whose slot went to others, its own."""
    assert_trains_like_plain(context, CallerStack, stack_step, weight_slots=slots)


class Hooked(Stack):
    """Hooks on modules inside layers look at weights, which the root penalises after the layers have run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for layer in self.layers:
            layer.linear.register_forward_hook(  # type: ignore[union-attr]
                lambda module, args, output: self.seen.append(module.weight)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        self.seen.clear()
        out: Tensor = super().forward(x)
        return out + sum(weight.square().mean() for weight in self.seen)


@on_ranks()
@each_number_of_slots
def test_hooks_may_keep_weights(context: RankContext, slots: Any) -> None:
    """Of modules inside layers."""
    assert_trains_like_plain(context, Hooked, stack_step, weight_slots=slots)


class OfItsOwn(Layer):
    """What keeps the weight is the layer's own graph."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        return torch.tanh(USES["own"](x, self.linear.weight) + self.linear.bias) + x


class OfTheirOwn(Stack):
    """Layers with such graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfItsOwn() for _ in range(4))


@on_ranks()
@each_number_of_slots
def test_what_a_layers_own_graph_keeps_is_in_place_in_its_backward(context: RankContext, slots: Any) -> None:
    """Memory and all: kernels may read it."""
    assert_trains_like_plain(context, OfTheirOwn, stack_step, weight_slots=slots)


@on_ranks(2)
@pytest.mark.parametrize("change", ["in a layer", "later"])
def test_changing_a_weight_that_was_kept_raises(context: RankContext, change: str) -> None:
    """In another layer, where the change would be lost."""

    class Changing(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            """[rows, DIM] -> the same"""
            for weight in self.kept():
                with torch.no_grad():
                    weight.mul_(2.0)
            self.shelf[self.place] = Box(self.linear.weight)
            return Layer.forward(self, x)

    model: Any = KeepingStack()
    if change == "in a layer":
        model.layers = nn.ModuleList(Changing(model.shelf, place) for place in range(4))
    model = StreamShard(model, precision=FP32)
    with pytest.raises(ShardingError, match=r"parameter 'layers\.0\.linear\.weight' inside a forward"):
        model(vector_batch(0, context.rank))
        model.shelf[0].weight.data_ptr()


@on_ranks(2)
def test_a_weight_that_was_kept_means_nothing_after_the_pass(context: RankContext) -> None:
    """An error that names it, not another layer's; the parameter itself is as it was."""
    model: Any = StreamShard(KeepingStack(), precision=FP32)
    for number in range(2):
        stack_step(model, Call(number, context.rank, 2, 1.0))
        kept = model.shelf[1].weight
        assert kept.shape == (16, 16)
        assert isinstance(kept, nn.Parameter)
        with pytest.raises(ShardingError, match=r"'layers\.1\.linear\.weight' was read inside a forward and is used"):
            kept.norm()


class PassingViews(Layer):
    """Adds a view of its weight to those that it is given, and uses one of a layer before it."""

    make: Callable[[Tensor], Tensor] = staticmethod(Tensor.t)
    step = 1

    def forward(self, x: Tensor, views: Views) -> Tensor:
        """[rows, DIM] -> the same"""
        y = super().forward(x)
        if len(views.of_layers) >= self.step:
            weight = views.of_layers[-self.step]
            y = y[:, : weight.shape[0]] @ weight + y
        views.of_layers.append(self.make(self.linear.weight))
        return y


class Views:
    """What only a running function has."""

    def __init__(self) -> None:
        self.of_layers: list[Tensor] = []


class PassingStack(Stack):
    """Hands views from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassingViews() for _ in range(5))

    def order(self) -> Any:
        """Layers, which are all given the same object."""
        views = Views()
        for layer in self.layers:
            yield lambda x, layer=layer: layer(x, views)


def _first_rows(weight: Tensor) -> Tensor:
    return weight[:3]


def _silently(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.t()


@on_ranks(2)
@pytest.mark.parametrize(("slots", "step"), [(2, 1), (2, 2), (3, 1), (3, 3)])
@pytest.mark.parametrize("make", [Tensor.t, _first_rows, _silently])
def test_a_view_of_a_weight_that_is_passed_on_raises(
    context: RankContext, make: Callable[[Tensor], Tensor], slots: Any, step: int
) -> None:
    """Its memory is another layer's, that of the one that runs or of one to come; the parameter is named."""
    model: Any = PassingStack()
    for layer in model.layers:
        layer.make, layer.step = make, step
    model = StreamShard(model, precision=FP32, weight_slots=slots)
    view = r"a view of parameter 'layers\.\d\.linear\.weight' was kept"
    with searching_what_is_new, pytest.raises(ShardingError, match=view):
        for number in range(2):
            stack_step(model, Call(number, context.rank, 2, 1.0))
