"""A user with plain torch.profiler finds the work of each unit by its name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, engine_inside, stack_step

LAYERS = [f"layers.{index}" for index in range(4)]


def _names(profiled: profile) -> Counter[str]:
    return Counter(event.name for event in profiled.events() if event.name.startswith("StreamShard::"))


@on_ranks(1, 2)
def test_torch_profiler_shows_each_part_of_each_units_step(context: RankContext) -> None:
    """All-gather, which casts, forward, backward and reduction once; the first layers are all-gathered again."""
    model = StreamShard(Stack(), precision="bf16")
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        stack_step(model, Call(1, context.rank, context.world_size, 1.0))
    found = _names(profiled)
    for part in ("forward", "backward", "reduce_scatter"):
        names = {
            name.partition(" ")[2]: count for name, count in found.items() if name.startswith(f"StreamShard::{part} ")
        }
        assert {name: names.pop(name) for name in LAYERS} == dict.fromkeys(LAYERS, 1), part
        assert set(names) <= {"root"}
    twice = [] if context.world_size == 1 else LAYERS[:-2]
    assert {name: found[f"StreamShard::all_gather {name}"] for name in LAYERS} == {
        name: 1 + (name in twice) for name in LAYERS
    }


@on_ranks(2)
def test_names_end_with_the_profiler_and_change_no_number(context: RankContext) -> None:
    """A checkpointed layer's second forward has a name of its own."""
    outputs: list[torch.Tensor] = []
    for profiles in (False, True):
        torch.manual_seed(0)
        model: Any = StreamShard(Stack(), precision=FP32)
        x = vector_batch(0, context.rank).requires_grad_()
        for _ in range(2):
            if profiles:
                with profile(activities=[ProfilerActivity.CPU]) as profiled:
                    out = checkpoint(model.layers[1], model.layers[0](x), use_reentrant=False)
                    out.square().mean().backward()
                assert _names(profiled)["StreamShard::recomputation layers.1"] == 1
            else:
                out = checkpoint(model.layers[1], model.layers[0](x), use_reentrant=False)
                out.square().mean().backward()
        outputs.append(out.detach())
        model(vector_batch(1, context.rank))
        assert engine_inside(model).streams.observers == ()
    assert torch.equal(*outputs)


@on_ranks(1)
def test_a_failed_backward_leaves_no_range_open(context: RankContext) -> None:
    """The ranges of later work do not lie inside those of the failed layer."""
    model: Any = StreamShard(Stack(), precision=FP32)
    stack_step(model, Call(0, 0, 1, 1.0))

    def fail(*_: Any) -> None:
        raise ValueError("in backward")

    hook = model.layers[2].register_full_backward_hook(fail)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with pytest.raises(ValueError, match="in backward"):
            stack_step(model, Call(1, 0, 1, 1.0))
        with record_function("later"):
            torch.ones(1)
    hook.remove()
    later = next(event for event in profiled.events() if event.name == "later")
    for event in profiled.events():
        if event.name.startswith("StreamShard::"):
            assert event.time_range.end <= later.time_range.start, event.name
