"""A user with plain torch.profiler finds the work of each unit by its name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from streamshard import ShardingError, StreamShard
from tests.counts import engine_inside
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import stack_step

LAYERS = [f"layers.{index}" for index in range(4)]


@on_ranks(1, 2)
def test_torch_profiler_shows_each_part_of_each_units_step(context: RankContext) -> None:
    """All-gather, which casts, forward, backward and reduction once; the first layers are all-gathered again."""
    model = StreamShard(Stack(), precision="bf16")
    stack_step(model, context.call(0))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        stack_step(model, context.call(1))
    found = Counter(event.name.removeprefix("StreamShard::") for event in profiled.events())
    for part in ("forward", "backward", "reduce_scatter"):
        names = {name.partition(" ")[2]: count for name, count in found.items() if name.startswith(f"{part} ")}
        assert {name: names.pop(name) for name in LAYERS} == dict.fromkeys(LAYERS, 1), part
        assert set(names) <= {"root"}
    twice = [] if context.world_size == 1 else LAYERS[:-2]
    assert [found[f"all_gather {name}"] for name in LAYERS] == [1 + (name in twice) for name in LAYERS]


@on_ranks(1)
def test_ranges_end_with_a_forward_that_raises(context: RankContext) -> None:
    """Those of a layer that was refused too."""
    model: Any = StreamShard(Stack(), weight_slots=2)
    handle = model.layers[0].register_forward_pre_hook(lambda layer, args: model.layers[1](*args) and None)
    with profile(activities=[ProfilerActivity.CPU]):
        with pytest.raises(ShardingError, match="calls a layer of 'layers.1'"):
            stack_step(model, context.call(0))
        handle.remove()
        assert not engine_inside(model).profiler._open
        stack_step(model, context.call(0))
