"""The speed of a device, of host memory and its link, and of collectives alone.

Training's own transport moves buffers of a unit's size. Beside compute collectives take longer: both share memory
bandwidth and cores, and through shared memory the rank itself copies. `streamshard.tools.trace` measures both at once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.comm.transport import Gather, Reduction
from streamshard.config import Precision
from streamshard.device import has_streams, module_of
from streamshard.pinned import PinnedMemory
from streamshard.planning.layout import kind_of

_SECONDS = 1.0  # for each measurement, if one repeat does not take longer
_MOST_REPEATS = 30
_COPIED_BYTES = 1 << 27  # more than the caches of a CPU


@dataclass(frozen=True)
class CollectiveSpeed:
    """A collective of one unit, alone.

    Attributes:
        name: "all-gather" or "reduction".
        unit_bytes: bytes of the whole unit: weights in the wire dtype, or gradients in the dtype that is sent. A rank
            sends (N - 1)/N of them.
        median_ms: from start to end.
        gb_s: 1e9 bytes of the unit per second.
    """

    name: str
    unit_bytes: int
    median_ms: float
    gb_s: float


def measure(ranks: Communicator, numels: Sequence[int], precision: Precision) -> list[CollectiveSpeed]:
    """Time each unit's collectives. Collective.

    Args:
        ranks: connected.
        numels: by unit, the number of elements.
        precision: the dtypes.

    Raises:
        CommunicationError: on every rank: a rank has failed.
    """
    # An upper bound: a shard and all gradients in fp32 take 8 bytes for each element, and padding.
    ranks.share_memory(sum(16 * (numel + 64 * ranks.world_size) for numel in numels), len(numels))
    ranks.recorder.names = ["a measured unit"] * len(numels)
    speeds = []
    for parts in [_collectives(ranks, tag, numel, precision) for tag, numel in enumerate(numels)]:
        times = medians_ms(ranks, ranks.streams.device, *(run for *_, run in parts))
        for (name, n_bytes, _), ms in zip(parts, times, strict=True):
            speeds.append(CollectiveSpeed(name, n_bytes, ms, n_bytes / ms / 1e6))
    return speeds


def _collectives(
    ranks: Communicator, tag: int, numel: int, precision: Precision
) -> list[tuple[str, int, Callable[[], None]]]:
    """The collectives of one unit with buffers as in the engine: name, bytes, and a call for which compute waits.

    Args:
        ranks: the ranks.
        tag: the unit's number; messages of different units must not be mixed up.
        numel: its elements.
        precision: the dtypes.
    """
    kind = kind_of(torch.float32, precision, trains=True, in_fp32=False)
    kind = kind._replace(grad_dtype=kind.compute_dtype)  # as in slots that units share
    shard = -(-numel // ranks.world_size)
    transport, device = ranks.transport, ranks.streams.device
    slot = torch.zeros(ranks.world_size * shard, dtype=kind.wire_dtype, device=device)
    gather = Gather(transport.allocate_visible(shard, kind.wire_dtype), slot, tag)
    grads = transport.allocate_visible(ranks.world_size * shard, kind.grad_dtype)
    scratch_numel = transport.scratch_numel(shard, kind.mode, kind.grad_dtype, grads.nbytes)
    scratch = torch.zeros(scratch_numel, dtype=kind.grad_dtype, device=device)
    reduction = Reduction(grads, torch.zeros(shard, device=device), scratch, kind.mode, False, tag, 1.0)
    done = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "a measured unit")

    def run(start: Callable[[], Work | None]) -> None:
        done.record(start())
        done.wait()

    sent = transport.sent_dtype(kind.mode, kind.grad_dtype)
    return [
        ("all-gather", numel * kind.wire_dtype.itemsize, partial(run, partial(transport.start_gather, gather))),
        ("reduction", numel * sent.itemsize, partial(run, partial(transport.start_reduce, reduction))),
    ]


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The speed of a square matmul, in 1e12 operations per second."""
    width = 1024 if device.type == "cpu" else 4096
    matrix = torch.randn(width, width, device=device).to(dtype)
    (ms,) = medians_ms(RankGroup(), device, lambda: matrix @ matrix)
    return float(2 * width**3 / ms / 1e9)


def host_gb_s() -> float:
    """1e9 bytes per second that torch's copies read and write in host memory, on all cores of this process."""
    threads, source = torch.get_num_threads(), torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device="cpu")
    to = source.clone()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        (ms,) = medians_ms(RankGroup(), source.device, lambda: to.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return 2 * _COPIED_BYTES / ms / 1e6


def link_gb_s(device: torch.device) -> list[float]:
    """1e9 bytes per second between pinned host memory and `device`: to the device, to the host, each way at once.

    Raises:
        HostMemoryError: memory cannot be pinned.
    """
    module, memory = module_of(device), PinnedMemory(device)
    on_host = [memory.allocate(_COPIED_BYTES, torch.uint8) for _ in range(2)]
    on_device = [torch.zeros_like(buffer, device=device) for buffer in on_host]
    ways = list(
        zip((on_device[0], on_host[1]), (on_host[0], on_device[1]), map(module.Stream, [device] * 2), strict=True)
    )

    def copy(*directions: int) -> None:
        for to, source, stream in (ways[direction] for direction in directions):
            with module.stream(stream):
                to.copy_(source, non_blocking=True)

    times = medians_ms(RankGroup(), device, partial(copy, 0), partial(copy, 1), partial(copy, 0, 1))
    return [_COPIED_BYTES / ms / 1e6 for ms in times]


def medians_ms(ranks: RankGroup, device: torch.device, *parts: Callable[[], object]) -> list[float]:
    """Run `parts` one after the other, several times, as often on all ranks. Returns each part's median time."""

    def once() -> list[float]:
        times = []
        for part in parts:
            start = time.perf_counter()
            with ranks.waiting("a measurement"):
                part()
                if has_streams(device):
                    module_of(device).synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    once()
    # The first call of `once` warms up, the second says how long one takes.
    repeats = ranks.of_first("agree on repeats", max(1, min(_MOST_REPEATS, int(1e3 * _SECONDS / sum(once())))))
    return [statistics.median(times) for times in zip(*(once() for _ in range(repeats)), strict=True)]
