"""``torch.autograd.grad`` and ``backward(inputs=...)``: of sharded parameters refused, of anything else as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamshard import StreamShard
from streamshard.errors import ShardingError
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, assert_trains_like_plain, full_grads, full_weights, sgd, stack_step


def _loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _of_all(model: Any, loss: Tensor) -> None:
    torch.autograd.grad(loss, list(model.parameters()))


@on_ranks(2)
def test_autograd_grad_of_a_sharded_parameter_raises(context: RankContext) -> None:
    """With the alternative; and the next step is right."""

    def step(model: Any, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step == 1:
            loss = _loss(model, vector_batch(call.step, call.rank))
            with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight'.* call loss\.backward"):
                _of_all(model, loss)
        return stack_step(model, call)

    assert_trains_like_plain(context, Stack, step)


@on_ranks(1, 2)
def test_backward_of_sharded_inputs_raises(context: RankContext) -> None:
    """At once if torch asks (2.13 does) and a parameter is a piece, else at the step. The next step is right."""
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = sgd(model)
    before, x = full_weights(model), vector_batch(0, context.rank)
    asked = [list(model.parameters()), [x.requires_grad_(), *model.parameters()]]
    for inputs in asked[: context.world_size]:
        with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight'.* call loss\.backward\(\) without"):
            _loss(model, x).backward(inputs=inputs)
            optimizer.step()
    assert_same(full_weights(model), before, "weights")
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    optimizer.step()


@on_ranks(1, 2)
def test_gradients_of_inputs_and_activations_are_plain_pytorchs(context: RankContext) -> None:
    """Through all layers, before a backward of the same graph, which reduces as ever."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        outputs: list[Tensor] = []
        hook = model.layers[1].register_forward_hook(lambda *given: outputs.append(given[-1]))
        loss = _loss(model, x) * call.weight
        hook.remove()
        of_input, of_activation = torch.autograd.grad(loss, [x, outputs[0]], retain_graph=True)
        assert x.grad is None
        loss.backward()  # type: ignore[no-untyped-call]
        assert torch.equal(x.grad, of_input)  # type: ignore[arg-type]  # there is one
        return (of_input.square().sum() + of_activation.square().sum()).detach() / call.weight**2

    assert_trains_like_plain(context, Stack, step)


@on_ranks(1, 2)
def test_gradients_of_parameters_that_can_be_differentiated_again_are_refused(context: RankContext) -> None:
    """Of large and of small parameters, in layers whose weights stay."""
    for trained in ("weight", "bias"):
        model = StreamShard(Stack(), precision=FP32, weight_slots="all")
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(trained))
        with pytest.raises(ShardingError, match=f"{trained}' cannot be differentiated again"):
            model(vector_batch(0, context.rank)).square().mean().backward(create_graph=True)


@on_ranks(2)
def test_create_graph_through_a_sharded_model_raises(context: RankContext) -> None:
    """A penalty on the gradient of the input, taken outside: weights have left their slots."""
    model = StreamShard(Stack(), precision=FP32)
    x = vector_batch(0, context.rank).requires_grad_()
    with pytest.raises(ShardingError, match="create_graph=True.*with weight_slots='all'"):
        torch.autograd.grad(_loss(model, x), x, create_graph=True)
    model.zero_grad()
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    assert all(grad is not None for grad in full_grads(model).values())


@on_ranks(1, 2)
def test_a_penalty_on_gradients_of_inputs_trains_with_slots_for_all_layers(context: RankContext) -> None:
    """As the error says; taken outside of the forward."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        loss = _loss(model, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return call.backward(loss + 0.1 * slope.square().sum())

    assert_trains_like_plain(context, Stack, step, weight_slots="all")
