"""What state in host memory rests on: the time to pin memory, the link in both directions, and a step of an optimizer.

Run by `host_memory`. Each group of facts is told as soon as it is known.
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

__all__ = ["SIZES", "TINY", "Sizes", "measure"]

Tell = Callable[[str, dict[str, Any]], None]


class Sizes(NamedTuple):
    """How much is pinned, copied and stepped.

    Attributes:
        pinned: by name, the buffers in bytes that are pinned one after the other.
        copied_bytes: in each direction, in pieces of `piece_bytes`. StreamShard copies pieces of this size.
        width, layers: of the model that is stepped.
        chunk_numel: parameters that an optimizer's kernels step at once.
        repeats: of steps.
    """

    pinned: dict[str, list[int]]
    copied_bytes: int
    piece_bytes: int
    width: int
    layers: int
    chunk_numel: int
    repeats: int


_GIB = 1 << 30
SIZES = Sizes(
    pinned={"1 GiB": [_GIB], "16 GiB": [16 * _GIB], "16 GiB in 64 blocks": [_GIB // 4] * 64},
    copied_bytes=4 * _GIB,
    piece_bytes=_GIB // 8,
    width=4096,
    layers=16,
    chunk_numel=CHUNK_NUMEL,
    repeats=5,
)
TINY = Sizes({"1 MiB": [1 << 20]}, 1 << 20, 1 << 18, 16, 2, 1 << 10, 2)


def measure(device: torch.device, sizes: Sizes, tell: Tell) -> None:
    """Find all facts.

    Args:
        device: on which StreamShard can keep state in host memory.
        sizes: how much of everything.
        tell: is called with the name of a group of facts, and the facts.
    """
    if device.type == "cuda":
        tell("link_gb_s", _link(device, sizes))
    tell("pin_s", _pin_times(device, sizes.pinned))
    cpu = {threads: _cpu_step(sizes, threads) for threads in (len(os.sched_getaffinity(0)), 1)}
    found = {f"CPU, fused AdamW, {threads} thread{'s' * (threads > 1)}": ns for threads, ns in cpu.items()}
    found["kernel on the device, fused AdamW"] = _kernel(device, sizes)
    for kind, options in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        found[f"late step, {kind} AdamW"] = _late_step(device, sizes, options)
    tell("step_ns_per_param", found)


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


def _link(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """GB/s between pinned memory and the device: each direction alone, and each while the other one is busy too."""
    memory = PinnedMemory(device)
    hosts = [memory.allocate(sizes.piece_bytes, torch.uint8) for _ in range(2)]
    ours = [torch.empty(sizes.piece_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = {"to the device": (ours[0], hosts[0]), "to the host": (hosts[1], ours[1])}
    streams = {name: torch.cuda.Stream(device) for name in ways}
    found = {}
    for names in (["to the device"], ["to the host"], ["to the device", "to the host"]):
        for _ in range(2):  # the first time warms up
            rates = _rates(sizes, {name: (streams[name], *ways[name]) for name in names})
        found |= {f"{name}{', both at once' if len(names) > 1 else ''}": rate for name, rate in rates.items()}
    return found


def _rates(sizes: Sizes, ways: dict[str, tuple[Any, torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """GB/s of each way, counted until the first one has ended: afterwards the other one is alone."""
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    ends: dict[str, list[Any]] = {name: [] for name in ways}
    for stream, _, _ in ways.values():
        stream.wait_event(start)
    for _ in range(sizes.copied_bytes // sizes.piece_bytes):
        for name, (stream, to, source) in ways.items():
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
                ends[name].append(torch.cuda.Event(enable_timing=True))
                ends[name][-1].record()
    torch.cuda.synchronize()
    ends_ms = {name: [start.elapsed_time(end) for end in events] for name, events in ends.items()}
    common_ms = min(each[-1] for each in ends_ms.values())
    return {name: _rate(sizes, [end for end in each if end <= common_ms]) for name, each in ends_ms.items()}


def _rate(sizes: Sizes, ends_ms: list[float]) -> float:
    """GB/s of pieces that have ended at these times."""
    return len(ends_ms) * sizes.piece_bytes / ends_ms[-1] / 1e6 if ends_ms else 0.0


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
