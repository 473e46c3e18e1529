"""A device's memory, played on the CPU: what building a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from streamshard import StreamShard
from tests.ranks import RankContext, on_ranks
from tests.scenarios import BF16
from tests.simulated import simulated_device

SLOTS = pytest.mark.parametrize("slots", [{}, {"weight_slots": "all", "grad_slots": "all"}])


class Wide(nn.Module):
    """4 MiB for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(12)])


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


@on_ranks(1, 2)
@SLOTS
def test_building_takes_no_more_than_what_stays_and_a_unit(context: RankContext, slots: dict[str, Any]) -> None:
    """The model's own memory goes unit by unit, before there is any for gradients: 48 MiB that are not there twice."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, simulated_device():
        model = StreamShard(Wide(), precision=BF16, **slots)
    assert len(list(model.parameters())) == 24
    kind = torch._C._profiler._EventType.Allocation
    events = [e for e in _walk(profiled.profiler.kineto_results.experimental_event_tree()) if e.tag == kind]
    live: dict[int, int] = {}
    peak = used = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        size = event.extra_fields.alloc_size
        used += size if size > 0 else -live.pop(event.extra_fields.ptr, 0)  # what was there before is not known
        if size > 0:
            live[event.extra_fields.ptr] = size
        peak = max(peak, used)
    model_and_slots = 12 * 2**22 + 2 * 2**21
    assert peak < max(used, model_and_slots) + 5 * 2**20
