"""A device's memory, played on the CPU: what is freed while collectives use it, and what building a model leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import StreamShard
from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.inspect import engine_inside
from tests.allocator import MIB, empty_cache, peak_bytes, recorded, replay
from tests.ranks import RankContext, on_ranks
from tests.scenarios import BF16, sharded, train
from tests.simulated import SimulatedDevice, simulated_device


@on_ranks(4)
@pytest.mark.parametrize("slots", [{}, {"weight_slots": "all", "grad_slots": "all"}])
def test_memory_of_collectives_is_nobodys_until_their_stream_is_done(
    context: RankContext, slots: dict[str, str]
) -> None:
    """A model may be freed in the middle of a pass, after an exception say, while gathers are under way.

    The device's allocator would give the memory to the next who asks; ``record_stream`` is what tells it to wait.
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
    """As a user's model on a device: in its own memory, 4 MiB for each matrix."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, dtype=dtype) for _ in range(12)])


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_building_leaves_no_memory_that_nobody_can_use(context: RankContext, dtype: torch.dtype) -> None:
    """Parameters go one after another; what stays must not have been cut out of the segments that they leave.

    Two segments of a device's allocator are not full, of 20 MiB each: the model's last, and that of what stays.
    """
    with recorded() as recording, simulated_device(), mock.patch.object(SimulatedDevice, "empty_cache", with_mark):
        # What is sent lives on in threads of gloo, where nobody records.
        model = StreamShard(Wide(dtype), precision=BF16, broadcast_weights=False)
    assert len(list(model.parameters())) == 24
    used, reserved = replay(recording.events)
    assert 72 * MIB < used < reserved < used + 40 * MIB


@on_ranks(1, 2)
@pytest.mark.parametrize("slots", [{}, {"weight_slots": "all", "grad_slots": "all"}])
def test_building_takes_no_more_than_what_stays_and_a_unit(context: RankContext, slots: dict[str, Any]) -> None:
    """The model's own memory goes unit by unit, before there is any for gradients: 48 MiB that are not there twice."""
    with recorded() as recording, simulated_device():
        model = StreamShard(Wide(torch.float32), precision=BF16, broadcast_weights=False, **slots)
    assert len(list(model.parameters())) == 24
    used, _ = replay(recording.events)
    assert peak_bytes(recording.events) < used + 5 * MIB


def with_mark(device: SimulatedDevice) -> None:
    empty_cache()
