"""A user with plain torch.profiler finds the work of each unit by its name."""

from __future__ import annotations

from collections import Counter

from torch.profiler import ProfilerActivity, profile

from streamshard import StreamShard
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
