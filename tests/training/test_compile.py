"""`torch.compile` of each unit and of the whole model. Backends that generate no code keep it fast."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import count_tangents

from streamshard import StreamShard
from streamshard.errors import ShardingError
from streamshard.guards.weights import explain_version
from tests.counts import engine_inside
from tests.faults import let_dynamo_look
from tests.models import DIM, Stack, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import adamw, assert_trains_like_plain, only_sharded, sharded_model, stack_step, train_stack
from tests.scenarios import RoutedStack

# Three layers, which take turns in two slots; each is compiled by itself.
SMALL = (DIM,) * 4
BACKEND = "aot_eager"  # Dynamo with AOTAutograd


def _compile_layers(model: Any) -> None:
    for layer in model.layers:
        layer.compile(backend=BACKEND)


@on_ranks(2)
def test_compiled_layers_and_models_train_like_plain_pytorch(context: RankContext) -> None:
    """Layers in checkpoints, and the whole model, whose graphs break at units; there the optimizer's step too."""
    let_dynamo_look()
    assert_trains_like_plain(
        context, lambda: RoutedStack(3, reentrant=False), stack_step, prepare=only_sharded(_compile_layers)
    )
    compiled: dict[int, Any] = {}

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            model = compiled.setdefault(id(model), torch.compile(model, backend=BACKEND))  # a module around it
        return stack_step(model, call)

    def make(model: nn.Module) -> Any:
        optimizer: Any = adamw(model)
        if isinstance(model, StreamShard):
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        return optimizer

    assert_trains_like_plain(context, lambda: Stack(SMALL), step, optimizer=make)


@on_ranks(2)
@pytest.mark.parametrize("slots", [2, "all"])
def test_weights_of_compiled_units_are_always_at_the_same_addresses(context: RankContext, slots: Any) -> None:
    """So that device graphs, which take parameters and what forward saves for static, are captured once."""
    let_dynamo_look()
    model = sharded_model(weight_slots=slots)
    slots_at = [(slot.data_ptr(), slot.nbytes) for slot in (u.weight_slot.buffer for u in engine_inside(model).units)]
    calls: list[tuple[int, ...]] = []

    def watched(graph: torch.fx.GraphModule, static: Sequence[int]) -> Any:
        def run(arguments: list[Any]) -> Any:
            weights = {
                place: argument.data_ptr()
                for place, argument in enumerate(arguments)
                if isinstance(argument, Tensor)
                and any(start <= argument.data_ptr() < start + nbytes for start, nbytes in slots_at)
            }
            assert set(weights) <= set(static)
            calls.append((id(graph), *weights.values()))
            return graph.forward(*arguments)

        return make_boxed_func(lambda *arguments: run(list(arguments)))

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced = torch._guards.TracingContext.get().fw_metadata
        assert traced is not None
        return watched(graph, traced.static_input_indices)

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, inputs: watched(graph, range(count_tangents(graph)))
    )
    for layer in model.layers:
        layer.compile(backend=backend)
    optimizer, steps = adamw(model), []
    for number in range(3):
        calls.clear()
        train_stack(model, optimizer, context, first=number, steps=1)
        steps.append(list(calls))
    assert len(steps[0]) == 2 * len(model.layers)
    assert sum(len(call) > 1 for call in steps[0]) == 2 * len(model.layers) - 1  # the first layer's backward needs none
    assert steps[1:] == steps[:1] * 2


@on_ranks(1, 2)
def test_compiled_autograd_is_refused_when_a_forward_begins(context: RankContext) -> None:
    """Around the backward alone, torch's own error comes; the line in the log names compiled autograd."""
    model = sharded_model()
    compiled = functools.partial(torch._dynamo.compiled_autograd._enable, torch.compile(backend="eager"))
    with compiled(), pytest.raises(ShardingError, match="compiled autograd is on"):
        model(vector_batch(0, context.rank))
    loss = model(vector_batch(0, context.rank)).square().mean()
    if context.world_size > 1:
        with compiled(), pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            loss.backward()
        assert "compiled autograd" in str(explain_version(raised.value))
    stack_step(model, context.call(0))
