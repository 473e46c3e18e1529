"""Gradients are a function of the graphs that were differentiated, and of nothing that Python still holds."""

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
from tests.models import Layer, Stack, stack_of, vector_batch
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    case,
    counted_collectives,
    each_setting,
    engine_inside,
    full_grads,
    full_weights,
    sgd,
    stack_step,
)
from tests.scenarios import RoutedStack


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


def _frozen_in_backward(model: Any, call: Call) -> Tensor:
    """Torch gives a parameter no gradient if it is frozen when the backward runs."""
    loss = _loss(model, call)
    with _frozen(model.layers[call.step % 4]):
        return call.backward(loss)


def _frozen_in_forward(model: Any, call: Call) -> Tensor:
    """Unfrozen before the backward, which makes no difference."""
    with _frozen(model.layers[1]), _frozen(model.head):
        loss = _loss(model, call)
    return call.backward(loss)


def _discriminating(model: Any, call: Call) -> Tensor:
    """A discriminator accumulates; the generator's turn, for which it is frozen, comes between."""
    with _no_sync(model):
        call.backward(_loss(model, call))
        with _frozen(model):
            x = vector_batch(call.step, call.rank).requires_grad_()
            call.backward(model(x).square().mean())
            assert x.grad is not None and bool(x.grad.any())
    return call.backward(_loss(model, call, 1))


def _accumulated_before_two(model: Any, call: Call) -> Tensor:
    """A micro-batch is accumulated; then two graphs are in flight."""
    call.backward(_loss(model, call))
    first, second = _loss(model, call, 1), _loss(model, call, 2)
    return call.backward(first) + call.backward(second)


def _first_in_first_out(model: Any, call: Call) -> Tensor:
    """Micro-batches as a pipeline has them: two forwards ahead."""
    losses = [_loss(model, call, part) for part in range(3)]
    total = call.backward(losses[0])
    losses.append(_loss(model, call, 3))
    return total + sum(call.backward(loss) for loss in losses[1:])


PROGRAMS: dict[str, Callable[[Any, Call], Tensor]] = {
    "frozen in the backward": _frozen_in_backward,
    "frozen in the forward": _frozen_in_forward,
    "frozen while gradients accumulate": _discriminating,
    "two in flight": _accumulated_before_two,
    "first in, first out": _first_in_first_out,
}


@on_ranks()
@each_setting
def test_graphs_decide_which_parameters_get_gradients_and_add_them_up(context: RankContext, settings: str) -> None:
    """Gradients are present exactly where plain PyTorch has them so; none is lost or counted twice."""
    for name, step in PROGRAMS.items():
        with case(name):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2), **SETTINGS[settings])


@on_ranks(2)
def test_outputs_that_python_keeps_alive_change_nothing(context: RankContext) -> None:
    """One rank keeps an output, as a log does; all ranks issue the same collectives and get the same gradients."""
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
        heard = everywhere(counts)
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


def _raised(model: Any) -> None:
    """A batch that is skipped, as after an out-of-memory error."""
    hook = model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        model(vector_batch(0, 0))
    hook.remove()


@on_ranks()
@each_setting
def test_a_graph_is_freed_with_the_last_reference_to_it(context: RankContext, settings: str) -> None:
    """At once, without help of the garbage collector, although not all of it was differentiated."""
    model = StreamShard(WatchedStack(), precision=FP32, **SETTINGS[settings])
    _Canary.alive.clear()
    gc.disable()
    try:
        for step in (_dropped, _raised):
            for _ in range(3):
                step(model)
                assert not list(_Canary.alive), step
    finally:
        gc.enable()


@on_ranks()
@each_setting
def test_a_model_is_freed_with_the_last_reference_to_it(context: RankContext, settings: str) -> None:
    """At once, as a plain module, without help of the garbage collector: its buffers are most of a device's memory."""
    gc.collect()
    gc.disable()
    model: Any = StreamShard(RoutedStack(), precision=FP32, **SETTINGS[settings])
    optimizer = sgd(model)
    for number in range(2):
        stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
    model.route = [0, 2]
    with torch.no_grad():
        model(vector_batch(0, context.rank))
    engine = engine_inside(model)
    parts = (model, model.layers[1], engine, *engine.units, engine.ranks, engine.ranks.transport)
    buffers = (*(buffer for _, buffer in engine.ledger.buffers), *(p.unsharded for u in engine.units for p in u.params))
    alive = [weakref.ref(each) for each in (*parts, *buffers)]
    del parts, buffers
    try:
        del model, optimizer, engine
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def _changes(model: Any) -> dict[str, Callable[[], object]]:
    whole = model.full_state_dict(rank0_only=False)
    steps = {
        name: torch.optim.SGD(part.parameters(), 1.0).step
        for name, part in (("model", model), ("head", model.head), ("layer", model.layers[2]))
    }
    one_bias = torch.optim.SGD([model.layers[2].linear.bias], 1.0).step  # a rank may own no piece of it
    return {**steps, "bias": one_bias, "load": lambda: model.load_state_dict(whole)}


@on_ranks()
@each_setting
def test_weights_changed_between_a_forward_and_its_backward_raise(context: RankContext, settings: str) -> None:
    """As in torch: old activations and new weights make no gradient. All ranks raise."""
    model = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    for name, change in _changes(model).items():
        with case(name):
            stack_step(model, Call(0, context.rank, context.world_size, 1.0))
            loss = model(vector_batch(1, context.rank)).square().mean()
            change()
            model.zero_grad()
            with pytest.raises(
                ShardingError, match=r"'(layers\.\d\.linear|head)\.\w+' was modified by an inplace operation"
            ):
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


def _penalty(model: nn.Module) -> Tensor:
    total: Tensor = sum(0.1 * param.square().sum() for param in model.parameters())  # type: ignore[assignment]
    return total


@on_ranks()
@each_setting
def test_penalties_on_the_parameters_accumulate_with_everything_else(context: RankContext, settings: str) -> None:
    """A term that autograd adds to the sharded parameters themselves, beside gradients that wait in their slots."""
    for where in ("in all", "in the second", "before each", "alone"):

        def step(model: Any, call: Call, where: str = where) -> Tensor:
            losses = []
            for part in range(3):
                with _no_sync(model) if part < 2 else contextlib.nullcontext():
                    early = _penalty(model) if where == "before each" else 0.0  # its nodes run last
                    loss = _loss(model, call, part)
                    is_on = where == "in all" or ("in the first", "in the second", "in the last")[part] == where
                    call.backward(loss + early + (_penalty(model) if is_on else 0.0))
                    if where == "alone" and part == 1:
                        call.backward(_penalty(model))
                    losses.append(loss.detach())
            return torch.stack(losses).sum()

        with case(where):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2), **SETTINGS[settings])


class EnergyLayer(Layer):
    """A layer that descends an energy of its input; the descent is part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        y = x.requires_grad_() if x.is_leaf else x
        energy = super().forward(y).square().sum()
        (slope,) = torch.autograd.grad(energy, y, create_graph=True)
        return super().forward(x) - 0.1 * slope


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


@on_ranks()
@each_setting
def test_a_layer_may_differentiate_its_activations(context: RankContext, settings: str) -> None:
    """While the layer runs its weights are in place."""
    assert_trains_like_plain(context, stack_of(EnergyLayer), stack_step, **SETTINGS[settings])


@on_ranks(2)
def test_a_gradient_of_parameters_inside_a_forward_raises(context: RankContext) -> None:
    """The pass has no collectives to reduce it."""

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
