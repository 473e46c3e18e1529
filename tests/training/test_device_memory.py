"""A device's memory, played on the CPU: what is freed while collectives use it, and what building a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from streamshard import StreamShard
from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.inspect import engine_inside
from tests.ranks import RankContext, on_ranks
from tests.scenarios import BF16, sharded, train
from tests.simulated import simulated_device

SLOTS = pytest.mark.parametrize("slots", [{}, {"weight_slots": "all", "grad_slots": "all"}])


@on_ranks(4)
@SLOTS
def test_memory_of_collectives_is_not_reused_until_their_stream_is_done(
    context: RankContext, slots: dict[str, str]
) -> None:
    """A model may be freed in the middle of a pass, after an exception say, while gathers are under way.

    The device's allocator would reuse the memory at once; ``record_stream`` tells it to wait.
    """
    used: list[tuple[Tensor, StreamName, str]] = []

    class Uses(Observer):
        def on_collective(
            self,
            stream: StreamName,
            collective: Collective,
            tag: int | None,
            reads: Sequence[Tensor],
            writes: Sequence[Tensor],
        ) -> None:
            used.extend((tensor, stream, f"{collective.value} of {tag}") for tensor in (*reads, *writes))

    with simulated_device() as device:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded("plain", BF16, mesh=mesh, **slots)
        streams = engine_inside(model).streams
        with streams.observed_by(Uses()):
            train(model, "plain", context)
    assert {stream for _, stream, _ in used} == set(StreamName) - {StreamName.COMPUTE}
    for tensor, stream, what in used:
        keeping = device.kept.get(tensor.untyped_storage().data_ptr(), ())
        assert streams.device_stream(stream) in keeping, f"{what} uses {tuple(tensor.shape)} that is not kept for it"


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
    assert peak < used + 5 * 2**20
