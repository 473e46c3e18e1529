"""Weights that are read while their own layer does not run: the right ones, in time, with gradients; or an error."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard, register_forward_method
from streamshard.errors import ConfigError, ShardingError
from streamshard.inspect import engine_inside
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    counted_collectives,
    each_setting,
    stack_step,
)


def _pair_step(model: nn.Module, call: Call) -> Tensor:
    """Models whose forward returns an output and a penalty."""
    out, penalty = model(vector_batch(call.step, call.rank))
    return call.backward(out.square().mean() + 0.1 * penalty)


# ---------------------------------------------------------------------------------------------- weights that leave


class Kept(NamedTuple):
    """An output that has a weight in it."""

    x: Tensor
    weights: dict[str, list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The same, as a dataclass."""

    x: Tensor
    weights: dict[str, list[Tensor]]


class ReturningLayer(Layer):
    """Returns its weight with its output, as layers with regularisers do."""

    kind = "tuple"

    def forward(self, x: Tensor) -> Any:
        """[rows, DIM] -> the same, and the weight"""
        y, weight = super().forward(x), self.linear.weight
        return {
            "tuple": (y, weight),
            "list": [y, weight],
            "kept": Kept(y, {"w": [weight]}),
            "frozen": Frozen(y, {"w": [weight]}),
            "view": (y, weight.t()),
        }[self.kind]


class Regularised(Stack):
    """An orthogonality penalty on the weights that the layers returned."""

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturningLayer() for _ in range(4))
        for layer in self.layers:
            layer.kind = kind  # type: ignore[assignment]  # a str

    def forward(self, x: Tensor) -> Any:
        """[rows, DIM] -> [rows, 1], []"""
        weights = []
        for layer in self.layers:
            out = layer(x)
            x, weight = (out.x, out.weights["w"][0]) if isinstance(out, Kept | Frozen) else out
            weights.append(weight)
        penalty = sum((w @ w.t() - torch.eye(DIM)).square().mean() for w in weights)
        return self.head(x), penalty


@on_ranks()
@each_setting
@pytest.mark.parametrize("kind", ["tuple", "list", "kept", "frozen"])
def test_a_weight_that_a_layer_returns_stays_that_weight(context: RankContext, kind: str, settings: str) -> None:
    """Whatever the slot that it lay in is used for afterwards; in containers too."""
    assert_trains_like_plain(context, lambda: Regularised(kind), _pair_step, **SETTINGS[settings])


@on_ranks(2)
def test_a_part_of_a_weight_that_a_layer_returns_raises(context: RankContext) -> None:
    """Its memory is about to be another layer's."""
    model = StreamShard(Regularised("view"), precision=FP32)
    with pytest.raises(ShardingError, match=r"'layers\.0' returns a view of one of its weights, \(16, 16\)"):
        model(vector_batch(0, context.rank))


# ---------------------------------------------------------------------------------------------- reading others' weights


def _root_sums(model: Any, x: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]  # not 0


def _root_lists(model: Any, x: Tensor) -> Tensor:
    """All of them at once, from a list."""
    params = list(model.parameters())
    return torch.stack([(2 * p).square().mean() for p in params]).sum()


def _root_multiplies(model: Any, x: Tensor) -> Tensor:
    """Weights of layers that use the same slot meet in one operation, in both orders."""
    first, third, fourth = (model.layers[place].linear.weight for place in (0, 2, 3))
    return (first @ third).square().mean() + (third @ first + fourth).square().mean()


def _root_computes(model: Any, x: Tensor) -> Tensor:
    """A layer's weight and bias are used by hand, before the layer runs."""
    linear = model.layers[2].linear
    return F.linear(x, linear.weight, linear.bias).square().mean()


def _root_detaches(model: Any, x: Tensor) -> Tensor:
    weight = model.layers[1].linear.weight
    return (weight.detach() @ x.t()).square().mean() + (weight.data * x.mean()).sum()


def _root_views(model: Any, x: Tensor) -> Tensor:
    """Views of weights are used after other layers have had their slot."""
    views = [layer.linear.weight.view(-1)[: 2 * DIM].view(2, DIM) for layer in model.layers]
    return sum((view @ x.t()).square().mean() for view in views)  # type: ignore[return-value]  # not 0


def _root_calls_forward(model: Any, x: Tensor) -> Tensor:
    """Around ``__call__``."""
    for layer in model.layers:
        x = layer.forward(x)
    return x.square().mean()


def _root_calls_inside(model: Any, x: Tensor) -> Tensor:
    """A module inside a layer."""
    for layer in model.layers:
        x = layer.linear(x)
    return x.square().mean()


def _root_swaps(model: Any, x: Tensor) -> Tensor:
    """`torch.func.functional_call` of a layer with other weights, then with its own."""
    layer = model.layers[1]
    other = {name: torch.zeros_like(value) + 0.1 for name, value in layer.named_parameters()}
    out: Tensor = torch.func.functional_call(layer.linear, {"weight": other["linear.weight"]}, (x,))
    return out.square().mean() + layer(x).square().mean()


def _root_recomputes(model: Any, x: Tensor) -> Tensor:
    """The reading is checkpointed."""
    x = x.clone().requires_grad_()
    out: Any = checkpoint(lambda y: _root_computes(model, y) * _root_multiplies(model, y), x, use_reentrant=False)
    return out  # type: ignore[no-any-return]


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sums": _root_sums,
    "lists": _root_lists,
    "multiplies": _root_multiplies,
    "computes": _root_computes,
    "detaches": _root_detaches,
    "views": _root_views,
    "calls forward": _root_calls_forward,
    "calls inside": _root_calls_inside,
    "swaps": _root_swaps,
    "recomputes": _root_recomputes,
}


class Reading(Stack):
    """The root reads its layers' weights, after they have run or before."""

    def __init__(self, what: str, first: bool) -> None:
        super().__init__()
        self.what, self.first = what, first

    def forward(self, x: Tensor) -> Any:
        """[rows, DIM] -> [rows, 1], []"""
        if self.first:
            penalty = READERS[self.what](self, x)
            return super().forward(x), penalty
        out = super().forward(x)
        return out, READERS[self.what](self, x)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "settings", "what", "first"),
    [
        *((2, "two slots", what, first) for what in READERS for first in (True, False)),
        *((1, "two slots", what, number % 2 == 0) for number, what in enumerate(READERS)),
        *((2, "a slot each", what, number % 2 == 1) for number, what in enumerate(READERS)),
    ],
)
def test_the_root_may_read_weights_of_layers(context: RankContext, what: str, settings: str, first: bool) -> None:
    """Loss, gradients and weights are plain PyTorch's."""
    assert_trains_like_plain(context, lambda: Reading(what, first), _pair_step, steps=3, **SETTINGS[settings])


class Borrowing(Layer):
    """A layer that also uses the weight of another one, found at run time, beside its own in the same operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lender: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        mine = self.linear.weight
        for lender in self.lender:
            x = F.linear(x, torch.matmul(mine, lender.linear.weight), self.linear.bias)
            x = F.linear(x, lender.linear.weight - mine, lender.linear.bias)
        return super().forward(x)


class BorrowingStack(Stack):
    """Every layer borrows from the layers at distance `steps`: some in the same slot, some in the other one."""

    recomputed: str | None = None

    def __init__(self, *steps: int) -> None:
        super().__init__()
        layers = [Borrowing() for _ in range(5)]
        for place, layer in enumerate(layers):
            layer.lender = [layers[(place + step) % 5] for step in steps]
        self.layers = nn.ModuleList(layers)

    def order(self) -> Any:
        for layer in self.layers:
            if self.recomputed is None:
                yield layer
            else:
                yield lambda x, layer=layer: checkpoint(layer, x, use_reentrant=self.recomputed == "reentrant")

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        return super().forward(x.clone().requires_grad_())


class RecomputedBorrowingStack(BorrowingStack):
    """Layers are checkpointed."""

    recomputed = "not reentrant"


class ReentrantBorrowingStack(BorrowingStack):
    """The same with the old kind of checkpoint."""

    recomputed = "reentrant"


@on_ranks()
@each_setting
@pytest.mark.parametrize("steps", [(1,), (2,), (1, 2, 3)])
@pytest.mark.parametrize("build", [BorrowingStack, RecomputedBorrowingStack, ReentrantBorrowingStack])
def test_layers_may_read_weights_of_layers(
    context: RankContext, build: Callable[..., nn.Module], steps: tuple[int, ...], settings: str
) -> None:
    """The one that runs keeps its own."""
    assert_trains_like_plain(context, lambda: build(*steps), stack_step, steps=3, **SETTINGS[settings])


@on_ranks(2)
@pytest.mark.parametrize("steps", [(1,), (2,), (3,), (1, 2, 3)])
@pytest.mark.parametrize("build", [BorrowingStack, RecomputedBorrowingStack, ReentrantBorrowingStack])
def test_reading_weights_costs_no_reduction(
    context: RankContext, build: Callable[..., nn.Module], steps: tuple[int, ...]
) -> None:
    """The program has one place for each unit's, behind the last who has read it; no turn ends for a part of one."""
    model = StreamShard(build(*steps), precision=FP32)
    for number in range(2):
        with counted_collectives(model) as counts:
            stack_step(model, Call(number, context.rank, 2, 1.0))
        assert counts["reduce_scatter"] == 6


@on_ranks(2)
def test_ranks_may_differ_in_whether_what_was_read_gets_a_gradient(context: RankContext) -> None:
    """They have read the same: collectives are the same, whatever a rank's loss is made of."""

    def step(model: nn.Module, call: Call) -> Tensor:
        out, penalty = model(vector_batch(call.step, call.rank))
        return call.backward(out.square().mean() + (0.1 * penalty if call.rank == 0 else 0.0))

    assert_trains_like_plain(context, Summing, step)


class Summing(Stack):
    """A penalty whose gradient does not depend on the weights."""

    def forward(self, x: Tensor) -> Any:
        """[rows, DIM] -> [rows, 1], []"""
        penalty = sum(layer.linear.weight.sum() for layer in self.layers)  # type: ignore[union-attr, operator, misc]
        return super().forward(x), penalty


class Alternating(Borrowing):
    """Its own weight, another one's, and its own again."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        for lender in self.lender:
            x = F.linear(torch.tanh(F.linear(self.linear(x), lender.linear.weight)), self.linear.weight)
        return Layer.forward(self, x)


@on_ranks()
@each_setting
def test_a_layer_finds_its_weights_again_in_backward(context: RankContext, settings: str) -> None:
    """Those of a layer in the same slot were needed in between."""

    def build() -> nn.Module:
        model = BorrowingStack()
        layers = [Alternating() for _ in range(5)]
        for place, layer in enumerate(layers):
            layer.lender = [layers[(place + 2) % 5]]
        model.layers = nn.ModuleList(layers)
        return model

    assert_trains_like_plain(context, build, stack_step, **SETTINGS[settings])


class ReadingFirst(Stack):
    """A layer's weight is read, and the layer itself does not run."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        x = F.linear(x, self.layers[1].linear.weight)  # type: ignore[union-attr, arg-type]
        return super().forward(x)

    def order(self) -> Any:
        """All but that one."""
        return [layer for index, layer in enumerate(self.layers) if index != 1]


@on_ranks()
@each_setting
def test_a_layer_that_is_only_read_unfreezes(context: RankContext, settings: str) -> None:
    """Whether it trains is asked when it is read, as when it runs."""

    def step(model: nn.Module, call: Call) -> Tensor:
        model.get_submodule("layers.1").requires_grad_(call.step > 0)
        return stack_step(model, call)

    assert_trains_like_plain(context, ReadingFirst, step, **SETTINGS[settings])


class Keeping(Stack):
    """A penalty on the first layer is kept aside, whatever the output is used for."""

    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        self.penalty = self.layers[0].linear.weight.square().mean()  # type: ignore[union-attr, operator]
        return super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_weight_that_was_read_and_changed_since_raises(context: RankContext, settings: str) -> None:
    """Where its layer has just computed, in a graph that was made after the change, too."""
    model: Any = StreamShard(Keeping(), precision=FP32, **SETTINGS[settings])
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    model(vector_batch(1, context.rank))
    before = model.penalty
    with torch.no_grad():
        model.layers[0].linear.weight.mul_(0.5)
    loss = model(vector_batch(1, context.rank)).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + before).backward()


@on_ranks(1, 2)
def test_weights_that_are_away_compute_in_param_dtype(context: RankContext) -> None:
    """Like those that are in place."""

    class Asking(Stack):
        found: Any = ()

        def forward(self, x: Tensor) -> Any:
            weight = self.layers[1].linear.weight
            self.found = (
                weight.dtype,
                tuple(weight.shape),
                weight.requires_grad,
                weight.device,
                isinstance(weight, nn.Parameter),
                weight.numel(),
                weight.dim(),
                next(self.layers[2].parameters()).dtype,
            )
            return super().forward(x) + F.linear(x, weight).sum()

    model = StreamShard(Asking(), precision=Precision())
    model.layers[1].requires_grad_(False)
    model(vector_batch(0, context.rank)).sum().backward()
    bf16 = torch.bfloat16
    assert model.found == (bf16, (DIM, DIM), False, context.device, True, DIM * DIM, 2, bf16)


# ---------------------------------------------------------------------------------------------- unannounced need


class Wrapped:
    """An output class that nobody knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class WrappingLayer(Layer):
    """Takes and returns objects, and is checkpointed inside."""

    def forward(self, wrapped: Any) -> Any:
        """Wrapped [rows, DIM] -> the same"""
        return Wrapped(wrapped.x + checkpoint(super().forward, wrapped.x, use_reentrant=False))


class WrappingStack(Stack):
    """Hands objects from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WrappingLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        wrapped = Wrapped(x)
        for layer in self.layers:
            wrapped = layer(wrapped)
        out: Tensor = self.head(wrapped.x)
        return out


class WrappingToTheEnd(WrappingStack):
    """The root's output is such an object too."""

    def forward(self, x: Tensor) -> Any:
        """[rows, DIM] -> Wrapped [rows, 1]"""
        return Wrapped(super().forward(x))


class AsideLayer(Layer):
    """Stores a checkpointed auxiliary loss aside."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        y = super().forward(x)
        self.aside: Any = checkpoint(lambda v: self.linear(v).square().mean(), y, use_reentrant=False)
        return y


class AsideStack(Stack):
    """Adds up what its layers have stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AsideLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        out = super().forward(x)
        return out + sum(layer.aside for layer in self.layers)  # type: ignore[misc]  # an AsideLayer


@on_ranks()
@each_setting
@pytest.mark.parametrize("build", [WrappingStack, WrappingToTheEnd, AsideStack])
def test_a_recomputation_that_nobody_announces_finds_its_weights(
    context: RankContext, build: Callable[[], nn.Module], settings: str
) -> None:
    """It asks for them by reading them."""

    def step(model: nn.Module, call: Call) -> Tensor:
        out = model(vector_batch(call.step, call.rank))
        return call.backward((out.x if isinstance(out, Wrapped) else out).square().mean())

    assert_trains_like_plain(context, build, step, **SETTINGS[settings])


class Giving(Layer):
    """Gives its weight to the layer that it ends with, if there is one, and returns an object that nobody knows."""

    last: tuple[nn.Module, ...] = ()

    def forward(self, x: Tensor, given: Tensor | None = None) -> Any:
        """[rows, DIM] -> Wrapped [rows, DIM]; with a weight that is given, [rows, DIM]"""
        y = super().forward(x)
        if given is not None:
            return torch.tanh(F.linear(y, given))
        for layer in self.last:
            y = layer(y, self.linear.weight)
        return Wrapped(y)


class GivingStack(Stack):
    """The last layer runs inside the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Giving() for _ in range(4))
        self.layers[2].last = (self.layers[3],)  # type: ignore[assignment]  # a tuple, not a module

    def order(self) -> Any:
        """All but the last."""
        return [lambda x, layer=layer: layer(x).x for layer in list(self.layers)[:3]]


@on_ranks()
@each_setting
def test_a_layer_may_be_given_a_weight_that_is_in_its_slot(context: RankContext, settings: str) -> None:
    """Backward finds it again, although a second forward has had the slot since."""

    def step(model: nn.Module, call: Call) -> Tensor:
        losses = [model(vector_batch(call.step + 50 * part, call.rank)).square().mean() for part in range(2)]
        return call.backward(losses[0] + losses[1])

    assert_trains_like_plain(context, GivingStack, step, **SETTINGS[settings])


@on_ranks(2)
def test_a_weight_that_was_given_ends_no_turn(context: RankContext) -> None:
    """Of the layer that reads it: each unit is reduced once."""
    model = StreamShard(GivingStack(), precision=FP32)
    for number in range(2):
        with counted_collectives(model) as counts:
            stack_step(model, Call(number, context.rank, 2, 1.0))
        assert counts["reduce_scatter"] == 5


class Leaving(Layer):
    """Leaves its weight on a shelf, where the next layer takes it from."""

    def __init__(self, shelf: list[Tensor]) -> None:
        super().__init__()
        self.shelf = shelf

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        y = super().forward(x)
        y = F.linear(y, self.shelf.pop()) if self.shelf else y
        self.shelf.append(self.linear.weight)
        return y


class LeavingStack(Stack):
    """Layers that share a shelf."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf: list[Tensor] = []
        self.layers = nn.ModuleList(Leaving(self.shelf) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        self.shelf.clear()
        return super().forward(x)


@on_ranks(2)
def test_a_weight_that_was_left_in_its_own_slot_and_changed_since_raises(context: RankContext) -> None:
    """Another layer's weight, which the one that runs has found somewhere, is known by its address."""
    model: Any = StreamShard(LeavingStack(), precision=FP32, weight_slots="all")
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    loss = model(vector_batch(1, context.rank)).square().mean()
    with torch.no_grad():
        model.layers[0].linear.weight.mul_(0.5)
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' was modified by an inplace operation"):
        loss.backward(inputs=list(model.layers[1].parameters()))


# ---------------------------------------------------------------------------------------------- methods beside forward


class Encoder(Stack):
    """A method beside forward reads weights directly, and runs layers."""

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.head.weight * scale, self.head.bias)


@on_ranks()
@each_setting
def test_a_registered_method_is_a_forward(context: RankContext, settings: str) -> None:
    """Of the model and of a layer; losses of both kinds mix."""

    def step(model: Any, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and "encode" not in vars(model):
            register_forward_method(model, "encode")
            register_forward_method(model.layers[1], "halve")
            assert model.encode.__name__ == "encode"
        x = vector_batch(call.step, call.rank)
        return call.backward(model.encode(x, scale=2.0).square().mean() + model.layers[1].halve(x).mean())

    def build() -> nn.Module:
        class Halving(Layer):
            def halve(self, x: Tensor) -> Tensor:
                return F.linear(x, self.linear.weight) / 2

        model = Encoder()
        model.layers = nn.ModuleList(Halving() for _ in range(4))
        return model

    assert_trains_like_plain(context, build, step, **SETTINGS[settings])


@on_ranks(1)
def test_what_cannot_be_registered_is_named(context: RankContext) -> None:
    """A method that is not there, and modules that are not watched."""
    model = StreamShard(Encoder(), precision=FP32)
    with pytest.raises(ConfigError, match="Encoder has no method 'decode'"):
        register_forward_method(model, "decode")
    with pytest.raises(ShardingError, match="Linear is not sharded"):
        register_forward_method(nn.Linear(2, 2), "forward")


# ---------------------------------------------------------------------------------------------- what raises


def _writes(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _writes_data(weight: Any) -> None:
    weight.data.clamp_(0, 1)


def _writes_out(weight: Any) -> None:
    with torch.no_grad():
        torch.add(torch.ones(DIM, DIM), 1, out=weight)


def _writes_all(weight: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)


def _assigns(weight: Any) -> None:
    weight.data = torch.ones(DIM, DIM)


def _sets_items(weight: Any) -> None:
    with torch.no_grad():
        weight[0] = 1.0


@on_ranks(2)
@pytest.mark.parametrize("change", [_writes, _writes_data, _writes_out, _writes_all, _assigns, _sets_items])
def test_changing_a_weight_that_is_away_raises(context: RankContext, change: Callable[[Any], None]) -> None:
    """It names the parameter; the model is as it was."""

    class Changing(Stack):
        changes = True

        def forward(self, x: Tensor) -> Tensor:
            if self.changes:
                change(self.layers[2].linear.weight)
            return super().forward(x)

    model = StreamShard(Changing(), precision=FP32)
    before = model.full_state_dict(rank0_only=False)
    with pytest.raises(ShardingError, match=r"parameter 'layers\.2\.linear\.weight' inside a forward"):
        model(vector_batch(0, context.rank))
    model.changes = False
    assert_same(model.full_state_dict(rank0_only=False), before, "weights")
    stack_step(model, Call(0, context.rank, 2, 1.0))


def _adds(weight: Tensor) -> Tensor:
    return weight + 1


@on_ranks(2)
@pytest.mark.parametrize("use", [_adds, copy.deepcopy, Tensor.data_ptr])
def test_a_weight_that_is_away_means_nothing_after_the_pass(context: RankContext, use: Callable[[Any], Any]) -> None:
    """An error that names it, not a piece, and not another layer's."""

    class Stashing(Stack):
        stash: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.stash = [self.layers[1].linear.weight]
            return super().forward(x)

    model = StreamShard(Stashing(), precision=FP32)
    model(vector_batch(0, context.rank))
    assert "'layers.1.linear.weight', (16, 16), torch.float32" in repr(model.stash[0])
    with pytest.raises(ShardingError, match=r"'layers\.1\.linear\.weight'( was read)? inside a forward"):
        use(model.stash[0])


@on_ranks(2)
def test_outside_of_passes_look_ups_give_the_sharded_parameters(context: RankContext) -> None:
    """The very objects that optimizers have."""
    model = StreamShard(Stack(), precision=FP32)
    params = dict(model.named_parameters())
    for _ in range(2):
        assert model.layers[1].linear.weight is params["layers.1.linear.weight"]
        assert [id(p) for p in model.layers[1].parameters()] == [
            id(p) for name, p in params.items() if name.startswith("layers.1.")
        ]
        stack_step(model, Call(0, context.rank, 2, 1.0))
    assert not any(unit.is_bound for unit in engine_inside(model).units)


class _Giving(Layer):
    """Gives its own weight, or a part of it, to a layer that it calls."""

    inner: tuple[Layer, ...] = ()
    part = False

    def forward(self, x: Tensor, given: dict[str, Tensor] | None = None) -> Tensor:
        """[rows, DIM] -> the same"""
        weight = self.linear.weight
        y = super().forward(x if given is None else torch.tanh(F.linear(x, given["weight"])))
        for layer in self.inner:
            y = y + layer(y, {"weight": weight.t() if self.part else weight})
        out: Tensor = self.linear(y)
        return out


class _PairsThatGive(Stack):
    def __init__(self, *, part: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Giving() for _ in range(6))
        for outer, inner in zip(list(self.layers)[::2], list(self.layers)[1::2], strict=True):
            outer.inner, outer.part = (inner,), part  # a tuple: no child

    def order(self) -> Any:
        """The outer ones."""
        return list(self.layers)[::2]


@on_ranks()
@each_setting
def test_a_weight_that_a_layer_gives_to_another_is_its_own(context: RankContext, settings: str) -> None:
    """Although its slot goes to others while the inner layer runs."""
    assert_trains_like_plain(context, _PairsThatGive, stack_step, checked=(0, 1, 3), **SETTINGS[settings])


@on_ranks(2)
def test_a_part_of_a_weight_that_a_layer_gives_to_another_raises(context: RankContext) -> None:
    """It is a view of the slot, and nothing can stand for it."""
    model = StreamShard(_PairsThatGive(part=True), precision=FP32)
    with pytest.raises(
        ShardingError, match=r"'layers\.0' gives another layer a view of one of its weights, \(16, 16\)"
    ):
        model(vector_batch(0, context.rank))


@on_ranks(1)
def test_on_one_rank_too_a_weight_that_was_read_and_changed_since_raises(context: RankContext) -> None:
    """There is no slot there, and the layer's own graph has nothing to do with it."""
    model: Any = StreamShard(Keeping(), precision=FP32)
    stack_step(model, Call(0, 0, 1, 1.0))
    model(vector_batch(1, 0))
    before = model.penalty
    with torch.no_grad():
        model.layers[0].linear.weight.mul_(0.5)
    loss = model(vector_batch(1, 0)).square().mean()
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' was modified by an inplace operation"):
        (loss + before).backward()


class Scaled(torch.autograd.Function):
    """x @ w.T with a backward of its own, as fused kernels have: autograd calls it with the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, DIM], [DIM, DIM] -> [rows, DIM]"""
        ctx.save_for_backward(x, weight.clone())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the input, and of the weight"""
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Lending(Stack):
    """The root gives weights of two layers to a Function, besides calling the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        x = Scaled.apply(x, self.layers[2].linear.weight)
        x = super().forward(Scaled.apply(x, self.layers[0].linear.weight))
        return x


@on_ranks()
@each_setting
def test_a_function_of_the_users_gives_gradients_to_the_weights_that_it_is_given(
    context: RankContext, settings: str
) -> None:
    """Although they are another layer's by the time it is called; added to those that the layers' own forwards give."""
    assert_trains_like_plain(context, Lending, stack_step, **SETTINGS[settings])


class OfTwo(torch.autograd.Function):
    """x @ (a + b).T, whose backward needs both weights at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """[rows, DIM], [DIM, DIM], [DIM, DIM] -> [rows, DIM]"""
        ctx.save_for_backward(x, a, b)
        return x @ (a + b).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the input, and of the weights"""
        x, a, b = ctx.saved_tensors
        return grads[0] @ a + grads[0] @ b, grads[0].t() @ x, grads[0].t() @ x


class KeepingTwo(Layer):
    """Gives weights that others have kept to a Function that keeps them as they are."""

    others: tuple[KeepingTwo, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        self.kept = [self.linear.weight]
        if self.others:
            x = torch.tanh(OfTwo.apply(x, *(other.kept[0] for other in self.others)))
        return super().forward(x)


class KeepingTwoStack(Stack):
    """Layers that take turns in one slot, or in two, are kept by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KeepingTwo() for _ in range(6))
        self.layers[4].others = (self.layers[0], self.layers[2])
        self.layers[5].others = (self.layers[1], self.layers[2])


@on_ranks()
@each_setting
def test_a_function_of_the_users_may_keep_weights_of_two_layers(context: RankContext, settings: str) -> None:
    """In backward it has both, although they take turns in one slot."""
    assert_trains_like_plain(context, KeepingTwoStack, stack_step, **SETTINGS[settings])
