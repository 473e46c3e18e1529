"""What torch's allocator for CUDA would keep of a device's memory, told by what a program allocates on the CPU.

    with recorded() as recording:
        model = StreamShard(build())
    reserved = replay(recording.events)

Blocks are cut out of segments, which go back to the device whole or not at all: one small tensor that lives on keeps
all of its segment. Sizes and rules: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch (kSmallSize and what follows).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["MIB", "Memory", "Recording", "empty_cache", "peak_bytes", "recorded", "replay"]

MIB = 1 << 20
_MARK = 7_919  # bytes; who allocates so many empties the cache


class Event(NamedTuple):
    """Memory that a program took (a positive size) or gave back."""

    address: int
    size_bytes: int


class Recording:
    """Filled when the context is left."""

    def __init__(self) -> None:
        self.events: list[Event] = []


class Memory(NamedTuple):
    """At the end. All in bytes."""

    used: int
    reserved: int


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record what is allocated and freed inside, in all threads."""
    recording = Recording()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield recording
    kind = torch._C._profiler._EventType.Allocation
    found = [event for event in _walk(profiled.profiler.kineto_results.experimental_event_tree()) if event.tag == kind]
    found.sort(key=lambda event: event.start_time_ns)
    recording.events = [Event(event.extra_fields.ptr, event.extra_fields.alloc_size) for event in found]


def empty_cache() -> None:
    """What ``torch.cuda.empty_cache`` is there."""
    torch.empty(_MARK, dtype=torch.uint8)


def replay(events: Sequence[Event]) -> Memory:
    """What a device's memory would be after `events`."""
    segments: list[_Segment] = []
    where: dict[int, tuple[_Segment, int]] = {}
    for address, size_bytes in events:
        if size_bytes == _MARK:
            segments = [segment for segment in segments if segment.used]
        if size_bytes <= 0:
            if address in where:  # what was there before is not known
                segment, start = where.pop(address)
                del segment.used[start]
            continue
        size = -(-size_bytes // 512) * 512
        is_small = size <= MIB
        fits = [
            (gap, start, segment)
            for segment in segments
            if segment.is_small == is_small
            for start, gap in segment.gaps()
            if gap >= size
        ]
        if fits:
            _, start, segment = min(fits, key=lambda fit: fit[0])
        else:
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            segment, start = _Segment(whole, is_small), 0
            segments.append(segment)
        segment.used[start] = size
        where[address] = segment, start
    used = sum(size for segment in segments for size in segment.used.values())
    return Memory(used, sum(segment.size for segment in segments))


def peak_bytes(events: Sequence[Event]) -> int:
    """The most that was in use at once, of what `events` tell of."""
    live: dict[int, int] = {}
    peak = used = 0
    for address, size_bytes in events:
        if size_bytes > 0:
            live[address] = size_bytes
            used += size_bytes
        else:
            used -= live.pop(address, 0)  # what was there before is not known
        peak = max(peak, used)
    return peak


class _Segment:
    def __init__(self, size: int, is_small: bool) -> None:
        self.size = size
        self.is_small = is_small
        self.used: dict[int, int] = {}  # start to size, of blocks in use

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Start and size of what is free."""
        end = 0
        for start in sorted(self.used):
            if start > end:
                yield end, start - end
            end = start + self.used[start]
        if self.size > end:
            yield end, self.size - end


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)
