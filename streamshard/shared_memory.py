"""Ranks of one machine read each other's memory: the CPU transport without sockets in between.

What other ranks read (compute shards, grad slots) lies in one anonymous memory file per rank, its *arena*, which every
peer maps. A gather then is one copy out of each peer's compute shard, a reduction one sum over all ranks' grad slots,
and who is how far is told by counters in the arenas ([Note: counters]). NCCL does the same between the GPUs of one
machine. Through gloo's sockets the same exchange cost three to four times the CPU time (docs/log.md).

[Note: counters]
Each rank has five counters, which only it increments:

- PUBLISHED: my compute shards are cast and may be read. Peers wait for it before they copy.
- RETRACTED: I have read all I was going to read. Peers wait for it before they cast anew (rule 5).
- WRITTEN: reductions whose grad slot I have filled. Peers wait for it before they sum.
- SUMMED: reductions that I have summed. Peers wait for it before they write that slot again (rule 3).
- VOTED: votes that I have given. A rank gives its next one when it has read all of the last, so two places are enough.

Counts say enough because passes and reductions come in the same order on all ranks (the program's). Sums are taken in
that order too, as early as possible, so no rank waits for a sum that waits for it.
"""

from __future__ import annotations

import enum
import mmap
import os
import platform
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from streamshard.streams import Work
from streamshard.transport import PairwiseTransport, Reduction, Transport, sum_in_pieces

__all__ = ["SharedMemoryTransport", "share_memory"]

_DISABLE = "STREAMSHARD_SHARED_MEMORY"  # environment variable: "0" leaves everything to gloo
_ORDERED = ("x86_64", "AMD64")  # where stores become visible in program order, which counters rely on
_ALIGNMENT = 64  # bytes, of a buffer in an arena: a cache line
_COOKIE_BYTES = 32  # at the start of an arena: it is the one meant, not some other process's file of that number
_COUNTERS_BYTES = 8 * 5
_VOTES = 2
_HEADER_BYTES = _COOKIE_BYTES + _COUNTERS_BYTES + 8 * _VOTES
_YIELDS = 200  # how often to look before sleeping between looks
_LONGEST_SLEEP_S = 1e-3


class Counter(enum.IntEnum):
    """See [Note: counters]."""

    PUBLISHED = 0
    RETRACTED = 1
    WRITTEN = 2
    SUMMED = 3
    VOTED = 4


class Arena:
    """One rank's memory as a process sees it: counters, where its compute shards are, and the buffers.

    Args:
        memory: the mapped file.
        units: how many shards are published.
    """

    def __init__(self, memory: mmap.mmap, units: int) -> None:
        self.memory = memory
        votes = _COOKIE_BYTES + _COUNTERS_BYTES
        self.counters = memoryview(memory)[_COOKIE_BYTES:votes].cast("q")
        self.votes = memoryview(memory)[votes:_HEADER_BYTES].cast("q")  # by count
        self.shards = memoryview(memory)[_HEADER_BYTES : _HEADER_BYTES + 8 * units].cast("q")  # offsets, bytes
        # The tags of its last reductions, by count: it is ahead of others by as many as it has slots at most.
        self.written = memoryview(memory)[_HEADER_BYTES + 8 * units : _HEADER_BYTES + 16 * units].cast("q")
        self._used = _HEADER_BYTES + 16 * units
        self._start = self.view(0, 1, torch.uint8).data_ptr()

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements [numel] at `offset` bytes."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def place(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new buffer [numel] of zeros. Only on the rank whose arena it is."""
        offset = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = offset + numel * dtype.itemsize
        return self.view(offset, numel, dtype)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where `tensor` lies, in bytes; None if that is somewhere else."""
        offset = tensor.data_ptr() - self._start
        return offset if 0 < offset < self._used else None


class _Once:
    """Work that is done by whoever waits for it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def wait(self) -> None:
        """See `streamshard.streams.Work`."""
        action, self._action = self._action, None
        if action is not None:
            action()


class SharedMemoryTransport(PairwiseTransport):
    """CPU ranks of one machine. Made by `share_memory`.

    Args:
        other: what ranks had before; its groups and streams are used.
        arenas: all ranks', by rank.
        processes: all ranks' process ids, by rank.
    """

    def __init__(self, other: PairwiseTransport, arenas: Sequence[Arena], processes: Sequence[int]) -> None:
        super().__init__(other.group, other.streams, other.everyone, other.replica)
        self._arenas = arenas
        self._own = arenas[self.rank]
        self._processes = processes
        self._timeout_s = _timeout_s(other.group)
        self._started: deque[Reduction] = deque()  # not summed yet

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Transport.allocate_visible`."""
        return self._own.place(numel, dtype)

    def scratch_numel(self, shard_numel: int, wire: torch.dtype, accumulate: torch.dtype, *, adds: bool) -> int:
        """Nothing is received, so there is nothing to receive it in."""
        return 0

    # -- gathers ----------------------------------------------------------------------------------------------------

    def retract_shards(self) -> Work | None:
        """See `Transport.retract_shards`."""
        count = self._advance(Counter.RETRACTED)
        return _Once(lambda: self._await(Counter.RETRACTED, count))

    def publish_shards(self, shards: Sequence[torch.Tensor]) -> None:
        """See `Transport.publish_shards`."""
        for place, shard in enumerate(shards):
            self._own.shards[place] = self._own.offset_of(shard) or 0
        self._advance(Counter.PUBLISHED)

    def start_gather(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> Work | None:
        """See `Transport.start_gather`. Copies when it is waited for: the shards stay where they are until then."""
        if self._own.offset_of(shard) is None:  # of something that is not published: sent, as between machines
            return super().start_gather(shard, slot, tag)
        self.streams.declare_access(shard, write=False, what="all_gather")
        self.streams.declare_access(slot, write=True, what="all_gather")
        return _Once(lambda: self._copy(shard, slot, tag))

    def _copy(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> None:
        self._await(Counter.PUBLISHED, self._own.counters[Counter.PUBLISHED])
        with self.streams.on_comm(), torch.no_grad():
            for arena, chunk in zip(self._arenas, slot.view(self.world_size, -1), strict=True):
                if chunk.data_ptr() != shard.data_ptr():  # a slot that is its unit's alone holds the compute shard
                    chunk.copy_(arena.view(arena.shards[tag], shard.numel(), shard.dtype))

    # -- votes ------------------------------------------------------------------------------------------------------

    def any_rank(self, value: bool) -> bool:
        """See `Transport.any_rank`. Replicas may be on other machines."""
        if self.total_size > self.world_size:
            return super().any_rank(value)
        place = self._own.counters[Counter.VOTED] % _VOTES
        self._own.votes[place] = value
        count = self._advance(Counter.VOTED)
        with self.guard("a vote of all ranks"):
            self._await(Counter.VOTED, count)
        return any(arena.votes[place] for arena in self._arenas)

    # -- reductions -------------------------------------------------------------------------------------------------

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. Sums in rank order, in fp32, once all ranks have started it."""
        self.streams.declare_access(reduction.slot, write=False, what="reduce_scatter")
        self.streams.declare_access(reduction.out, write=True, what="reduce_scatter")
        self._started.append(reduction)
        self._own.written[self._own.counters[Counter.WRITTEN] % len(self._own.written)] = reduction.tag
        count = self._advance(Counter.WRITTEN)
        return _Once(lambda: self._finish(count))

    def progress(self) -> None:
        """See `Transport.progress`. Sums what all ranks have written, so that nobody has to wait for it later."""
        while self._started and self._is_everywhere(Counter.WRITTEN, self._own.counters[Counter.SUMMED] + 1):
            self._sum_next()

    def _finish(self, count: int) -> None:
        while self._own.counters[Counter.SUMMED] < count:
            self._await(Counter.WRITTEN, self._own.counters[Counter.SUMMED] + 1)
            self._sum_next()
        self._await(Counter.SUMMED, count)

    def _sum_next(self) -> None:
        slot, out, _, accumulate, tag = self._started.popleft()
        tags = [arena.written[self._own.counters[Counter.SUMMED] % len(arena.written)] for arena in self._arenas]
        if tags != [tag] * self.world_size:
            raise RuntimeError(f"ranks reduce different layers at the same time, by index: {tags}")
        # Grad slots are allocated in the same order on all ranks, so they lie at the same place in every arena.
        start = (self._own.offset_of(slot) or 0) + self.rank * out.numel() * slot.element_size()
        with self.streams.on_comm():
            sum_in_pieces([arena.view(start, out.numel(), slot.dtype) for arena in self._arenas], out, accumulate)
        self._advance(Counter.SUMMED)

    # -- counters ---------------------------------------------------------------------------------------------------

    def _advance(self, counter: Counter) -> int:
        self._own.counters[counter] += 1
        return self._own.counters[counter]

    def _is_everywhere(self, counter: Counter, count: int) -> bool:
        return all(arena.counters[counter] >= count for arena in self._arenas)

    def _await(self, counter: Counter, count: int) -> None:
        """Return once all ranks' counters have reached `count`.

        Raises:
            RuntimeError: a rank has died, or the process group's timeout is over.
        """
        deadline, sleep_s = time.monotonic() + self._timeout_s, 2e-5
        for look in range(1 << 62):
            if self._is_everywhere(counter, count):
                return
            if look < _YIELDS:
                os.sched_yield()
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            missing = [rank for rank, arena in enumerate(self._arenas) if arena.counters[counter] < count]
            for rank in missing:
                if not _is_running(self._processes[rank]):
                    raise RuntimeError(f"rank {rank} has died")
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s of waiting for ranks {missing}")


def _is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _timeout_s(group: dist.ProcessGroup) -> float:
    # torch has no public way to ask; without an answer, its documented default.
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout is not None else 1800.0


def share_memory(transport: Transport, nbytes: int, units: int) -> Transport:
    """A transport through shared memory where a shard group's ranks can map each other's, else `transport`. Blocks.

    Args:
        transport: what ranks have now.
        nbytes: the most that will be asked for with `Transport.allocate_visible`; memory is taken only when touched.
        units: how many shards will be published.
    """
    if not isinstance(transport, PairwiseTransport) or transport.world_size == 1:
        return transport
    nbytes += _HEADER_BYTES + 16 * units
    mine = None
    if os.environ.get(_DISABLE, "1") != "0" and platform.machine() in _ORDERED:
        mine = _offer(nbytes)
    offers = transport.gather_objects(None if mine is None else mine[1:], everyone=False)
    mapped = None if mine is None else _map_all(offers, nbytes)
    all_can = all(transport.gather_objects(mapped is not None, everyone=False))
    if mine is not None:
        os.close(mine[1])  # mappings stay
    if not all_can or mapped is None:
        return transport
    arenas = [Arena(memory, units) for memory in mapped]
    return SharedMemoryTransport(transport, arenas, [offer[1] for offer in offers])


_Offer = tuple[int, int, bytes]  # file descriptor, process id, cookie


def _offer(nbytes: int) -> tuple[mmap.mmap, int, int, bytes] | None:
    """A new anonymous memory file and what peers need to map it; None where there is no such thing."""
    try:
        fd = os.memfd_create("streamshard")
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
    except (AttributeError, OSError, ValueError):
        return None
    memory[:_COOKIE_BYTES] = secrets.token_bytes(_COOKIE_BYTES)
    return memory, fd, os.getpid(), memory[:_COOKIE_BYTES]


def _map_all(offers: Iterable[_Offer | None], nbytes: int) -> list[mmap.mmap] | None:
    """All ranks' arenas; None unless all of them are memory of this machine that we may map."""
    arenas = []
    for offer in offers:
        if offer is None:
            return None
        fd, process, cookie = offer
        try:
            file = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR)
            try:
                arenas.append(mmap.mmap(file, nbytes))
            finally:
                os.close(file)
        except (OSError, ValueError):
            return None
        if arenas[-1][:_COOKIE_BYTES] != cookie:
            return None
    return arenas
