"""What happens is a function of what was differentiated: of graphs, and of nothing that Python still holds."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.errors import ShardingError
from streamshard.inspect import engine_inside
from tests.models import Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    counted_collectives,
    each_setting,
    full_grads,
    full_weights,
    sgd,
    stack_step,
)
from tests.scenarios import RoutedStack, over_sockets


def _loss(model: nn.Module, call: Call, part: int = 0) -> Tensor:
    loss: Tensor = model(vector_batch(3 * call.step + part, call.rank)).square().mean()
    return loss


def _no_sync(model: nn.Module) -> Any:
    return model.no_sync() if isinstance(model, StreamShard) else contextlib.nullcontext()


@contextlib.contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


# ---------------------------------------------------------------------------------------------- what trains


def _frozen_between(model: Any, call: Call) -> Tensor:
    """As adapters are switched off for the forward of a reference model."""
    loss = _loss(model, call)
    with _frozen(model), torch.no_grad():
        model(vector_batch(call.step, call.rank))
    return call.backward(loss)


def _frozen_in_backward(model: Any, call: Call) -> Tensor:
    """torch gives a parameter no gradient if it is frozen by the time of the backward."""
    loss = _loss(model, call)
    with _frozen(model.layers[call.step % 4]):
        return call.backward(loss)


def _frozen_in_forward(model: Any, call: Call) -> Tensor:
    """Thawed before the backward, which does not help."""
    with _frozen(model.layers[1]), _frozen(model.head):
        loss = _loss(model, call)
    return call.backward(loss)


def _frozen_for_one_graph(model: Any, call: Call) -> Tensor:
    """Two graphs in one backward, of which only one has the layer train."""
    with _frozen(model.layers[2]):
        first = _loss(model, call)
    return call.backward(first + _loss(model, call, 1))


def _discriminating(model: Any, call: Call) -> Tensor:
    """Accumulation of a discriminator with a generator's turn in between."""
    with _no_sync(model):
        call.backward(_loss(model, call))
        with _frozen(model):
            x = vector_batch(call.step, call.rank).requires_grad_()
            call.backward(model(x).square().mean())
            assert x.grad is not None and bool(x.grad.any())
    return call.backward(_loss(model, call, 1))


def _frozen_inside(model: Any, call: Call) -> Tensor:
    """Layers and the head are frozen by the model's own forward, the head for good."""
    model.freezes = True
    loss = call.backward(_loss(model, call))
    assert not model.head.weight.requires_grad
    model.freezes = False
    model.head.requires_grad_(True)
    return loss


class FreezingStack(Stack):
    """A stack that freezes its second layer for a while, and its head, in its forward."""

    freezes = False

    def order(self) -> Any:
        if not self.freezes:
            yield from self.layers
            return
        yield self.layers[0]
        with _frozen(self.layers[1]):
            yield self.layers[1]
        yield from list(self.layers)[2:]
        self.head.requires_grad_(False)


TRAINABILITY: dict[str, Callable[[Any, Call], Tensor]] = {
    "frozen for another forward": _frozen_between,
    "frozen in the backward": _frozen_in_backward,
    "frozen in the forward": _frozen_in_forward,
    "frozen for one graph of two": _frozen_for_one_graph,
    "frozen while gradients accumulate": _discriminating,
    "frozen inside the forward": _frozen_inside,
}


@on_ranks()
@each_setting
@pytest.mark.parametrize("what", TRAINABILITY)
def test_what_trains_is_a_property_of_the_graph(context: RankContext, what: str, settings: str) -> None:
    """Gradients are there, and missing, exactly where plain PyTorch has them so."""
    assert_trains_like_plain(context, FreezingStack, TRAINABILITY[what], checked=(0, 2), **SETTINGS[settings])


# ---------------------------------------------------------------------------------------------- several graphs


def _accumulated_before_two(model: Any, call: Call) -> Tensor:
    """A micro-batch is accumulated; then two graphs are in flight."""
    call.backward(_loss(model, call))
    first, second = _loss(model, call, 1), _loss(model, call, 2)
    return call.backward(first) + call.backward(second)


def _accumulated_before_two_at_once(model: Any, call: Call) -> Tensor:
    call.backward(_loss(model, call))
    return call.backward(_loss(model, call, 1) + _loss(model, call, 2))


def _first_in_first_out(model: Any, call: Call) -> Tensor:
    """Micro-batches as a pipeline has them: two forwards ahead."""
    losses = [_loss(model, call, part) for part in range(3)]
    total = call.backward(losses[0])
    losses.append(_loss(model, call, 3))
    return total + sum(call.backward(loss) for loss in losses[1:])


def _one_of_two(model: Any, call: Call) -> Tensor:
    """The other graph is kept alive and dropped only in the next step."""
    model.kept = [_loss(model, call), _loss(model, call, 1)]
    return call.backward(model.kept[call.step % 2])


def _one_into_the_other(model: Any, call: Call) -> Tensor:
    """The second forward takes the output of the first as its input, and a third graph is dropped."""
    x = vector_batch(call.step, call.rank)
    y = x + model(x)
    model(y)
    return call.backward(model(y).square().mean() + y.square().mean())


GRAPHS: dict[str, Callable[[Any, Call], Tensor]] = {
    "two in flight": _accumulated_before_two,
    "two in one backward": _accumulated_before_two_at_once,
    "first in, first out": _first_in_first_out,
    "one of two": _one_of_two,
    "one into the other": _one_into_the_other,
}


@on_ranks(2)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("what", GRAPHS)
def test_any_number_of_graphs_in_flight(context: RankContext, what: str, settings: str) -> None:
    """Nothing that was accumulated before is lost or counted twice."""
    assert_trains_like_plain(context, Stack, GRAPHS[what], checked=(0, 2), **SETTINGS[settings])


@on_ranks(2)
@pytest.mark.parametrize("sockets", [False, True])
def test_what_python_still_holds_decides_nothing(context: RankContext, sockets: bool) -> None:
    """One rank keeps an output, as a log or a debugger does; all issue the same collectives, and get the same."""
    with over_sockets() if sockets else contextlib.nullcontext():
        model = StreamShard(Stack(), precision=FP32)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    grads = []
    for keeps in (False, context.rank == 0):
        model.zero_grad()
        kept = [model(vector_batch(1, context.rank)), model(vector_batch(2, context.rank))]
        if not keeps:
            kept.clear()
        with counted_collectives(model) as counts:
            stack_step(model, Call(3, context.rank, 2, 1.0))
        heard: list[Any] = [None] * 2
        torch.distributed.all_gather_object(heard, counts)
        assert heard[0] == heard[1]
        grads.append(full_grads(model))
    assert_same(grads[1], grads[0], "gradients beside a kept output")


class _Canary(torch.autograd.Function):
    """A node whose life can be watched."""

    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Canary.alive.add(ctx)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class WatchedStack(Stack):
    """Layers save their own outputs (tanh does), behind nodes whose life can be watched."""

    def forward(self, x: Tensor) -> Tensor:
        x = _Canary.apply(x.requires_grad_())  # type: ignore[no-untyped-call]
        return super().forward(x)


def _dropped(model: Any) -> None:
    """Evaluation without `no_grad`."""
    model(vector_batch(0, 0))


def _not_all_used(model: Any) -> None:
    """The loss is made of a layer in the middle."""
    hidden: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: hidden.append(out))
    model(vector_batch(0, 0))
    hook.remove()
    hidden[0].sum().backward()


def _retained(model: Any) -> None:
    model(vector_batch(0, 0)).sum().backward(retain_graph=True)


def _raised(model: Any) -> None:
    """A batch that is skipped, as after an out-of-memory error."""
    hook = model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(vector_batch(0, 0))
    hook.remove()


@on_ranks()
@each_setting
@pytest.mark.parametrize("step", [_dropped, _not_all_used, _retained, _raised])
def test_a_graph_dies_with_what_refers_to_it(context: RankContext, step: Callable[[Any], None], settings: str) -> None:
    """At once, without help of the garbage collector, although nobody has differentiated all of it."""
    model = StreamShard(WatchedStack(), precision=FP32, **SETTINGS[settings])
    _Canary.alive.clear()
    gc.disable()
    try:
        for _ in range(3):
            step(model)
            assert not list(_Canary.alive)
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------- versions


@on_ranks()
@each_setting
@pytest.mark.parametrize("what", ["step", "load", "step of the head", "step of a layer", "data"])
def test_weights_changed_between_a_forward_and_its_backward_raise(
    context: RankContext, what: str, settings: str
) -> None:
    """As in torch: old activations and new weights make no gradient."""
    model = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    whole = model.full_state_dict(rank0_only=False)
    stepped = {"step of the head": model.head, "step of a layer": model.layers[2]}.get(what, model)
    optimizer = torch.optim.SGD(stepped.parameters(), 1.0)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    loss = model(vector_batch(1, context.rank)).square().mean()
    if what == "data" and context.world_size > 1:  # torch does not notice, and computes with the new ones
        model.layers[1].linear.weight.data.mul_(0.9)
    elif what == "load":
        model.load_state_dict(whole)
    else:
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ShardingError, match=r"'(layers\.\d\.linear|head)\.\w+' was modified by an inplace operation"):
        loss.backward()
    stack_step(model, Call(2, context.rank, context.world_size, 1.0))


@on_ranks(2, 3)
def test_a_step_is_seen_by_ranks_that_have_no_part_of_what_it_writes(context: RankContext) -> None:
    """One bias, whose piece is empty on all ranks but one: a backward of before raises on all."""
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = torch.optim.SGD([model.layers[2].linear.bias], 1.0)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    loss = model(vector_batch(1, context.rank)).square().mean()
    optimizer.step()
    with pytest.raises(ShardingError, match=r"'layers\.2\.linear\.bias' was modified by an inplace operation"):
        loss.backward()
    stack_step(model, Call(2, context.rank, context.world_size, 1.0))


@on_ranks()
@each_setting
def test_a_step_inside_no_sync_is_seen_by_the_next_forward(context: RankContext, settings: str) -> None:
    """Weights are gathered anew when they have changed, whatever the context promises."""
    found = []
    for is_inside in (True, False):
        torch.manual_seed(1)
        model = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
        optimizer = sgd(model)
        for number in range(3):
            call = Call(number, context.rank, context.world_size, 1.0)
            call.backward(_loss(model, call))
            with model.no_sync() if is_inside else contextlib.nullcontext():
                with torch.no_grad():
                    _loss(model, call)
                optimizer.step()
                optimizer.zero_grad()
                loss = _loss(model, call, 1)
            call.backward(loss)
        found.append({**full_weights(model), **{f"grad {name}": grad for name, grad in full_grads(model).items()}})
    assert_same(found[0], found[1], "steps inside")


# ---------------------------------------------------------------------------------------------- sharded parameters' own


def _penalty(model: nn.Module) -> Tensor:
    total: Tensor = sum(0.1 * param.square().sum() for param in model.parameters())  # type: ignore[assignment]
    return total


@on_ranks()
@each_setting
@pytest.mark.parametrize("where", ["in all", "in the first", "in the last", "in the second", "before each", "alone"])
def test_penalties_on_the_parameters_accumulate_with_everything_else(
    context: RankContext, where: str, settings: str
) -> None:
    """A term that autograd adds to the sharded parameters themselves, beside gradients that wait in their slots."""

    def step(model: Any, call: Call) -> Tensor:
        losses = []
        for part in range(3):
            with _no_sync(model) if part < 2 else contextlib.nullcontext():
                early = _penalty(model) if where == "before each" else 0.0  # its nodes are run last
                loss = _loss(model, call, part)
                is_on = where == "in all" or ("in the first", "in the second", "in the last")[part] == where
                call.backward(loss + early + (_penalty(model) if is_on else 0.0))
                if where == "alone" and part == 1:
                    call.backward(_penalty(model))
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    assert_trains_like_plain(context, Stack, step, checked=(0, 2), **SETTINGS[settings])


@on_ranks(2)
def test_gradients_that_wait_can_be_cleared_and_added_to(context: RankContext) -> None:
    """What was dropped stays away until something is added, a penalty too."""

    def step(model: Any, call: Call) -> Tensor:
        inner = model if isinstance(model, StreamShard) else model.module
        with model.no_sync():
            call.backward(_loss(model, call))
            inner.layers[1].zero_grad()
            call.backward(_penalty(inner.layers))
            inner.layers[2].zero_grad()
            inner.head.zero_grad()
        return call.backward(_loss(model, call, 1))

    assert_trains_like_ddp(context, Stack, step, **SETTINGS["a slot each"])


@on_ranks()
@each_setting
def test_a_gradient_that_was_let_go_of_is_not_written_again(context: RankContext, settings: str) -> None:
    """As multi-task methods keep one task's gradients while they compute the next one's."""
    model = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    params = list(model.parameters())
    kept, copies = [], []
    for number in range(3):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        kept.append([param.grad for param in params])
        copies.append([param.grad.clone() for param in params])
        model.zero_grad()
    for grads, wanted in zip(kept, copies, strict=True):
        assert all(torch.equal(grad, copy) for grad, copy in zip(grads, wanted, strict=True))
    for param, *grads in zip(params, *kept, strict=True):
        param.grad = grads[0] + grads[1] + grads[2]
    found = full_grads(model)
    model.zero_grad()
    for number in range(3):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
    assert_same(found, full_grads(model), "the sum of kept gradients")


# ---------------------------------------------------------------------------------------------- layers in layers


class Around(Layer):
    """A layer that calls what it is given in its middle, and goes on with its own weights."""

    def forward(self, x: Tensor, inner: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[rows, DIM] -> the same"""
        y = super().forward(x)
        return self.linear(y if inner is None else y + inner(y))


class Nested(Stack):
    """Layers inside layers, as deep as there are any, or each other one."""

    stride = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Around() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        out: Tensor = self.head(self.descend(0, x))
        return out

    def descend(self, place: int, x: Tensor) -> Tensor:
        """Layer `place` around those behind it."""
        if place >= len(self.layers):
            return x
        inner: Tensor = self.layers[place](x, lambda y: self.descend(place + self.stride, y))
        return inner


class NestedAndSkipping(Nested):
    """Every other layer."""

    stride = 2


class NestedAndRecomputed(Nested):
    """The outermost layer is checkpointed, with all that is inside."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        y: Any = checkpoint(lambda z: self.descend(0, z), x, use_reentrant=False)
        out: Tensor = self.head(y)
        return out


@on_ranks()
@each_setting
@pytest.mark.parametrize("build", [Nested, NestedAndSkipping, NestedAndRecomputed])
def test_layers_may_call_layers(context: RankContext, build: type[Nested], settings: str) -> None:
    """The outer one finds its own weights again when the inner ones are done."""
    assert_trains_like_plain(context, build, stack_step, **SETTINGS[settings])


class EnergyLayer(Layer):
    """A layer that descends an energy of its input, then goes on with its weights."""

    differentiable = False

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        y = x if self.differentiable else x.detach()
        y = y.requires_grad_() if y.is_leaf else y
        energy = super().forward(y).square().sum()
        (slope,) = torch.autograd.grad(energy, y, create_graph=self.differentiable)
        return super().forward(x) - 0.1 * slope


class DifferentiableEnergyLayer(EnergyLayer):
    """The descent is part of the graph: its backward needs the weights a second time."""

    differentiable = True


def _energy_stack(layer: type[Layer]) -> Stack:
    model = Stack()
    model.layers = nn.ModuleList(layer() for _ in range(4))
    return model


@on_ranks()
@each_setting
@pytest.mark.parametrize("layer", [EnergyLayer, DifferentiableEnergyLayer])
def test_a_layer_may_differentiate_inside(context: RankContext, layer: type[Layer], settings: str) -> None:
    """A backward inside a forward is served from the pass that is under way."""
    assert_trains_like_plain(context, lambda: _energy_stack(layer), stack_step, **SETTINGS[settings])


class ForceStack(Stack):
    """Forces: the model's forward differentiates through all its layers, with respect to its input."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, DIM]"""
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).sum(), x)
        return super().forward(x) + force.sum(1, keepdim=True)


@on_ranks(2)
def test_a_model_that_differentiates_through_its_layers_raises(context: RankContext) -> None:
    """In the middle of the forward, when the layers' weights have left their slots. Resident layers may be."""
    model = StreamShard(ForceStack(), precision=FP32)
    with pytest.raises(ShardingError, match=r"forward goes through 'layers\.\d'.*resident=\['layers"):
        model(vector_batch(0, context.rank))
    layers = [f"layers.{index}" for index in range(4)]
    assert_trains_like_plain(context, ForceStack, stack_step, resident=layers, precision=FP32)


@on_ranks(2)
def test_a_gradient_of_parameters_inside_a_forward_raises(context: RankContext) -> None:
    """It could be reduced only with collectives that the pass does not have."""

    class Learning(Stack):
        learns = True

        def forward(self, x: Tensor) -> Tensor:
            if self.learns:
                super().forward(x).sum().backward()
            return super().forward(x)

    model = StreamShard(Learning(), precision=FP32)
    with pytest.raises(ShardingError, match=r"inside the model's forward .* gradient of '(head|layers)"):
        model(vector_batch(0, context.rank))
    model.learns = False
    stack_step(model, Call(0, context.rank, 2, 1.0))


@on_ranks(2)
def test_after_a_backward_no_layer_is_left_bound(context: RankContext) -> None:
    """Whatever was differentiated where, the sharded parameters are back."""
    model = StreamShard(RoutedStack(), precision=FP32)
    pieces = {id(param) for param in model.parameters()}
    for step in (stack_step, _first_in_first_out, _one_of_two):
        step(model, Call(0, context.rank, 2, 1.0))
        assert not any(unit.is_bound for unit in engine_inside(model).units)
        assert {id(param) for module in model.modules() for param in module._parameters.values()} <= pieces
    optimizer = sgd(model)
    optimizer.step()
    assert all(bool(value.isfinite().all()) for value in full_weights(model).values())


@on_ranks()
@each_setting
def test_a_model_is_gone_when_nobody_has_it_any_more(context: RankContext, settings: str) -> None:
    """At once, as a plain module: its buffers are most of a device's memory."""
    model: Any = StreamShard(RoutedStack(), precision=FP32, **SETTINGS[settings])
    optimizer = sgd(model)
    for number in range(2):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
    model.route = [0, 2]
    with torch.no_grad():
        model(vector_batch(0, context.rank))
    engine = engine_inside(model)
    alive = [weakref.ref(each) for each in (model, model.layers[1], engine, *engine.units)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, engine
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
