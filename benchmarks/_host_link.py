"""What state in host memory rests on: the link in both directions, a step of an optimizer, the time to pin memory.

Run by `host_memory`. Each fact is told as soon as it is known, the most useful one first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from _measure import Clock, summary
from torch import nn

from streamshard import StreamShard, pinned
from streamshard.core.late_step import CHUNK_NUMEL
from streamshard.pinned import PinnedMemory
from streamshard.tools.speed import link_gb_s

__all__ = ["SIZES", "TINY", "Sizes", "measure"]

Tell = Callable[[str, dict[str, Any]], None]


class Sizes(NamedTuple):
    """How much is pinned and stepped.

    Attributes:
        pinned: by name, the buffers in bytes that are pinned one after the other.
        width, layers: of the model that is stepped.
        chunk_numel: parameters that an optimizer's kernels step at once.
        repeats: of steps.
    """

    pinned: dict[str, list[int]]
    width: int
    layers: int
    chunk_numel: int
    repeats: int


_GIB = 1 << 30
SIZES = Sizes(
    pinned={"1 GiB": [_GIB], "4 GiB": [4 * _GIB], "4 GiB in 16 blocks": [_GIB // 4] * 16},
    width=4096,
    layers=16,
    chunk_numel=CHUNK_NUMEL,
    repeats=5,
)
TINY = Sizes({"1 MiB": [1 << 20]}, 16, 2, 1 << 10, 2)


def measure(device: torch.device, sizes: Sizes, tell: Tell) -> None:
    """Find all facts.

    Args:
        device: on which StreamShard can keep state in host memory.
        sizes: how much of everything.
        tell: is called with the name of a group of facts, and some of its facts.
    """
    ways = ("to the device", "to the host", "each way, both at once")
    tell("link_gb_s", dict(zip(ways, link_gb_s(device), strict=True)))
    for kind in ("fused", "foreach"):
        tell("step_ns_per_param", {f"late step, {kind} AdamW": _late_step(device, sizes, {kind: True})})
    tell("step_ns_per_param", {"kernel on the device, fused AdamW": _kernel(device, sizes)})
    tell("pin_s", _pin_times(device, sizes.pinned))
    for threads in (len(os.sched_getaffinity(0)), 1):
        name = f"CPU, fused AdamW, {threads} thread{'s' * (threads > 1)}"
        tell("step_ns_per_param", {name: _cpu_step(sizes, threads)})


def _pin_times(device: torch.device, pinned_buffers: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """By name, the times of `_pin`; also of the first buffers in shared memory, whose pages have 4 KiB."""
    found = {name: _pin(device, buffers) for name, buffers in pinned_buffers.items()}
    name, buffers = next(iter(pinned_buffers.items()))
    with mock.patch.multiple(pinned, _FLAGS=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, _ADVICE=()):
        return {**found, f"{name} in pages of 4 KiB": _pin(device, buffers)}


def _pin(device: torch.device, buffers: list[int]) -> dict[str, float]:
    """Seconds to pin `buffers`, and to free them."""
    memory = PinnedMemory(device)
    moments = [time.perf_counter()]
    held = [memory.allocate(n_bytes, torch.uint8) for n_bytes in buffers]
    moments.append(time.perf_counter())
    del held, memory
    moments.append(time.perf_counter())
    return {"pin": moments[1] - moments[0], "free": moments[2] - moments[1]}


def _cpu_step(sizes: Sizes, threads: int) -> dict[str, float]:
    """Nanoseconds per parameter of torch's fused AdamW on the CPU, as summary."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    params = [nn.Parameter(torch.ones(sizes.width, sizes.width)) for _ in range(sizes.layers)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)
    found = _ns_per_param(torch.device("cpu"), optimizer.step, sizes.layers * sizes.width**2, sizes.repeats)
    torch.set_num_threads(before)
    return found


def _kernel(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """Nanoseconds per parameter of one chunk on the device, copies left out."""
    param = nn.Parameter(torch.ones(sizes.chunk_numel, device=device))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    return _ns_per_param(device, optimizer.step, sizes.chunk_numel, sizes.repeats)


def _ns_per_param(device: torch.device, run: Callable[[], object], numel: int, repeats: int) -> dict[str, float]:
    run()  # makes the moments
    clock = Clock(device)
    clock.lap()
    for _ in range(repeats):
        run()
        clock.lap()
    return summary([1e6 * lap_ms / numel for lap_ms in clock.laps_ms()])


def _late_step(device: torch.device, sizes: Sizes, options: dict[str, Any]) -> dict[str, float]:
    """Nanoseconds per parameter of StreamShard's own late step, all copies included, with nothing beside it."""
    layers = [nn.Linear(sizes.width, sizes.width, bias=False, device=device) for _ in range(sizes.layers)]
    model: Any = StreamShard(nn.Sequential(*layers), offload="state")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    batch = torch.ones(1, sizes.width, device=device)
    found = []
    for _ in range(1 + sizes.repeats):  # the first one makes the moments
        model(batch).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        optimizer.state_dict()  # carries the step out, and waits for the copies
        found.append(1e9 * (time.perf_counter() - start) / (sizes.layers * sizes.width**2))
        optimizer.zero_grad()
    return summary(found[1:])
