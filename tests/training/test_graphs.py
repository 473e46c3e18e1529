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
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    case,
    each_setting,
    engine_inside,
    full_grads,
    full_weights,
    no_sync,
    sgd,
    stack_step,
)
from tests.scenarios import RoutedStack


def _loss(model: nn.Module, call: Call, part: int = 0) -> Tensor:
    loss: Tensor = model(vector_batch(3 * call.step + part, call.rank)).square().mean()
    return loss


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


def _discriminating(model: Any, call: Call) -> Tensor:
    """A discriminator accumulates; the generator's turn, for which it is frozen, comes between."""
    with no_sync(model):
        call.backward(_loss(model, call))
        with _frozen(model):
            x = vector_batch(call.step, call.rank).requires_grad_()
            call.backward(model(x).square().mean())
            assert x.grad is not None and bool(x.grad.any())
    return call.backward(_loss(model, call, 1))


def _first_in_first_out(model: Any, call: Call) -> Tensor:
    """Micro-batches as a pipeline has them: two forwards ahead."""
    losses = [_loss(model, call, part) for part in range(3)]
    total = call.backward(losses[0])
    losses.append(_loss(model, call, 3))
    return total + sum(call.backward(loss) for loss in losses[1:])


PROGRAMS: dict[str, Callable[[Any, Call], Tensor]] = {
    "frozen in the backward": _frozen_in_backward,
    "frozen while gradients accumulate": _discriminating,
    "first in, first out": _first_in_first_out,
}


@on_ranks()
@each_setting
def test_graphs_decide_which_parameters_get_gradients_and_add_them_up(context: RankContext, settings: str) -> None:
    """Gradients are present exactly where plain PyTorch has them so; none is lost or counted twice."""
    for name, step in PROGRAMS.items():
        with case(name):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2), **SETTINGS[settings])


@on_ranks()
@each_setting
def test_a_model_is_freed_with_the_last_reference_to_it(context: RankContext, settings: str) -> None:
    """At once, as a plain module, without help of the garbage collector: its buffers are most of a device's memory."""
    gc.collect()
    gc.disable()
    model: Any = StreamShard(RoutedStack(), precision=FP32, **SETTINGS[settings])
    optimizer = sgd(model)
    for number in range(2):
        stack_step(model, context.call(number))
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


@on_ranks()
@each_setting
def test_weights_changed_between_a_forward_and_its_backward_raise(context: RankContext, settings: str) -> None:
    """As in torch: old activations and new weights make no gradient. All ranks raise."""
    model: Any = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    whole = model.full_state_dict(rank0_only=False)
    parts = (model.parameters(), model.head.parameters(), model.layers[2].parameters(), [model.layers[2].linear.bias])
    steps = {n: torch.optim.SGD(part, 1.0).step for n, part in enumerate(parts)}  # a rank may own no piece of a bias
    changes: dict[Any, Callable[[], object]] = {**steps, "load": lambda: model.load_state_dict(whole)}
    for name, change in changes.items():
        with case(name):
            stack_step(model, context.call(0))
            loss = model(vector_batch(1, context.rank)).square().mean()
            change()
            model.zero_grad()
            said = r"'(layers\.\d\.linear|head)\.\w+' was modified by an inplace operation"
            with pytest.raises(ShardingError, match=said):
                loss.backward()
    stack_step(model, context.call(2))


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
            call = context.call(number)
            call.backward(_loss(model, call))
            with no_sync(model, is_inside):
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
    for where in ("in all", "before each", "alone"):

        def step(model: Any, call: Call, where: str = where) -> Tensor:
            losses = []
            for part in range(3):
                with no_sync(model, part < 2):
                    early = _penalty(model) if where == "before each" else 0.0  # its nodes run last
                    loss = _loss(model, call, part)
                    call.backward(loss + early + (_penalty(model) if where == "in all" else 0.0))
                    if where == "alone" and part == 1:
                        call.backward(_penalty(model))
                    losses.append(loss.detach())
            return torch.stack(losses).sum()

        with case(where):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2), **SETTINGS[settings])


class EnergyLayer(Layer):
    """A layer that descends an energy of its input; the descent is part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.requires_grad_() if x.is_leaf else x
        energy = super().forward(y).square().sum()
        (slope,) = torch.autograd.grad(energy, y, create_graph=True)
        return super().forward(x) - 0.1 * slope


class ForceStack(Stack):
    """Forces: the model's forward differentiates through all its layers, with respect to its input."""

    def forward(self, x: Tensor) -> Tensor:
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
    stack_step(model, context.call(0))


# -- torch.autograd.grad and backward(inputs=...): of sharded parameters refused, of anything else as ever ------------


def _loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@on_ranks(1, 2)
def test_gradients_that_sharded_parameters_cannot_give_are_refused(context: RankContext) -> None:
    """With the alternative, and the next step is right. Torch 2.13 asks parameters before a backward of them."""
    model: Any = StreamShard(Stack(), precision=FP32)
    params, optimizer = list(model.parameters()), sgd(model)
    before, x = full_weights(model), vector_batch(0, context.rank).requires_grad_()
    said = r"'layers\.0\.linear\.weight'.* call loss\.backward"
    for inputs in (params, [x, *params])[: context.world_size]:
        with pytest.raises(ShardingError, match=said):
            _loss_of(model, x).backward(inputs=inputs)
            optimizer.step()
    if context.world_size > 1:
        with pytest.raises(ShardingError, match=said):
            torch.autograd.grad(_loss_of(model, x), params)
        with pytest.raises(ShardingError, match="create_graph=True.*with weight_slots='all'"):  # outside of the model
            torch.autograd.grad(_loss_of(model, x), x, create_graph=True)
    assert_same(full_weights(model), before, "weights")
    model.zero_grad()
    stack_step(model, context.call(0))
    assert all(grad is not None for grad in full_grads(model).values())
    for trained in ("weight", "bias"):  # a large one and a small one, in layers whose weights stay
        model = StreamShard(Stack(), precision=FP32, weight_slots="all")
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(trained))
        with pytest.raises(ShardingError, match=f"{trained}' cannot be differentiated again"):
            _loss_of(model, x).backward(create_graph=True)


@on_ranks(1, 2)
def test_gradients_of_inputs_and_activations_are_plain_pytorchs(context: RankContext) -> None:
    """Through all layers, before a backward of the same graph, which reduces as ever."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        outputs: list[Tensor] = []
        hook = model.layers[1].register_forward_hook(lambda *given: outputs.append(given[-1]))
        loss = _loss_of(model, x) * call.weight
        hook.remove()
        of_input, of_activation = torch.autograd.grad(loss, [x, outputs[0]], retain_graph=True)
        assert x.grad is None
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.equal(x.grad, of_input)  # type: ignore[arg-type]  # there is one
        return (of_input.square().sum() + of_activation.square().sum()).detach() / call.weight**2

    assert_trains_like_plain(context, Stack, step)


@on_ranks(1, 2)
def test_a_penalty_on_gradients_of_inputs_trains_with_slots_for_all_layers(context: RankContext) -> None:
    """As the error says; taken outside of the forward."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        loss = _loss_of(model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return call.backward(loss + 0.1 * slope.square().sum())

    assert_trains_like_plain(context, Stack, step, weight_slots="all")
