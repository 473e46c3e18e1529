"""A transport for CPU ranks of one machine: they read each other's memory, without sockets.

Each rank has one anonymous memory file, its shared buffers, which holds its slots. Every peer maps the file. An
all-gather copies each peer's shard from the peer's slot, a reduction sums the gradients in all ranks' slots, and
counters in the file tell the progress of each rank ([Note: counters]). NCCL does the same between the GPUs of one
machine. Through gloo's sockets the same exchange took three to four times the CPU time (docs/internals/log.md).

A forked child does not get the mapping (MADV_DONTFORK), because it must not write to memory that other ranks read. A
child that reads weights there ends with a segmentation fault. The child never frees the inherited objects, which would
unmap other memory: its watchdog keeps them (`streamshard.comm.watchdog`).

[Note: counters]
Each rank has four counters, and only this rank increments them:

- PUBLISHED: the number of all-gathers (of flags too) that this rank has started: their inputs are written. Peers wait
  for PUBLISHED before they copy.
- READ: the number of all-gathers that this rank has copied. Peers wait for READ before they write these shards again
  (rule 6).
- WRITTEN: the number of reductions for which this rank has filled the slot. Peers wait for WRITTEN before they
  sum.
- SUMMED: the number of reductions that this rank has summed. Peers wait for SUMMED before they write these slots again
  (rule 3).

All ranks allocate the same buffers in the same order, so a buffer has the same offset in every rank's memory.

Counts suffice because all-gathers and reductions come in the same order on all ranks, and each rank copies and sums in
this order. To check this, each rank stores a digest of its log with WRITTEN, and ranks compare the digests before they
sum. A rank that waits for PUBLISHED or READ takes sums, and one that waits for WRITTEN or SUMMED copies all-gathers. So
two ranks never wait for each other's sums, nor one for an all-gather and the other one for a sum, even if they use
other slots, as a rank that runs a loop and one that runs `model.accumulate`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import mmap
import os
import platform
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.host_groups import timeout_of
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Gather, Reduction, sum_in_rank_order
from streamshard.config import SHARED_MEMORY, ReductionMode

_ORDERED = ("x86_64", "AMD64")  # processors on which stores become visible in program order, as counters need
_ALIGNMENT = 64  # bytes: buffers start at cache lines
_WORD_BYTES = 8
_YIELDS = 200  # polls before the first sleep between polls
_LONGEST_SLEEP_S = 1e-3
_LOOKS_BETWEEN_CHECKS = 64  # polls, about 60 ms, between checks whether a missing rank is gone


class Counter(enum.IntEnum):
    """See [Note: counters]."""

    PUBLISHED = 0
    READ = 1
    WRITTEN = 2
    SUMMED = 3


class Offer(NamedTuple):
    """A rank's message to its peers, with which they map the rank's memory.

    Attributes:
        system: identifies the kernel and process namespace in which `process` is valid.
        process: the rank's process number.
        descriptor: the file's descriptor in that process.
    """

    system: str
    process: int
    descriptor: int


class SharedBuffers:
    """One rank's shared memory, mapped into this process.

    Args:
        descriptor: the file.
        units: the most reductions that can be under way.
        process: a descriptor (pidfd) of the rank's process, which this object owns.

    Attributes:
        start: address of the memory in this process.
        counters: [4], by `Counter`.
        gone: [1], 1 when the rank has failed and its counters will not change any more.
        written: [units], the log's digests at the last reductions; reduction n is at n modulo units.
    """

    def __init__(self, descriptor: int, units: int, process: int) -> None:
        self._poll = select.poll()
        self._poll.register(process, select.POLLIN)
        weakref.finalize(self, os.close, process)
        self._memory = mmap.mmap(descriptor, 0)
        self._memory.madvise(mmap.MADV_DONTFORK)  # what a child wrote, other ranks would train with
        self._used = 0
        self.counters = self._words(len(Counter))
        self.gone = self._words(1)
        self.written = self._words(units)
        # Python's mmap does not tell its address.
        self.start = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()

    def has_died(self) -> bool:
        """Whether the rank's process has ended."""
        return bool(self._poll.poll(0))

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A view [numel] of the memory at byte `offset`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")  # frombuffer takes no empty buffer
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A new buffer [numel] of zeros. Only the rank that owns the memory calls this."""
        offset = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = offset + numel * dtype.itemsize
        return self.view(offset, numel, dtype)

    def free(self, buffer: torch.Tensor) -> None:
        """Give the whole pages of `buffer` back to the system. Their addresses are not used again."""
        page = mmap.PAGESIZE
        offset = buffer.data_ptr() - self.start
        first, last = -(-offset // page) * page, (offset + buffer.nbytes) // page * page
        if first < last:
            with contextlib.suppress(OSError):  # where the system refuses, the pages stay
                self._memory.madvise(mmap.MADV_REMOVE, first, last - first)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a buffer of this memory."""
        return self.start < tensor.data_ptr() < self.start + self._used  # behind the counters

    def _words(self, count: int) -> memoryview:
        start, self._used = self._used, self._used + _WORD_BYTES * count
        # Aligned words of 8 bytes: a peer never reads half of one.
        return memoryview(self._memory)[start : self._used].cast("q")


def share_memory(ranks: RankGroup, nbytes: int, units: int) -> list[SharedBuffers] | None:
    """The shared memory of all ranks of a shard group, by rank; None if a rank cannot share its own. Collective.

    Args:
        ranks: the ranks.
        nbytes: size of all buffers of a rank together. A page takes no memory before it is written.
        units: the most reductions that can be under way.
    """
    with contextlib.ExitStack() as files:  # a mapping stays valid without its file
        own = _make_memory(files, nbytes + _WORD_BYTES * (len(Counter) + 1 + units))
        offers = ranks.gather_objects("share memory", own, with_replicas=False)
        buffers = [map_memory(offer, units) for offer in offers]
        mapped = [each for each in buffers if each is not None]
        # One that cannot makes all use sockets: their transports have to match.
        all_can = all(ranks.gather_objects("map shared memory", len(mapped) == len(offers), with_replicas=False))
    return mapped if all_can else None


def _make_memory(files: contextlib.ExitStack, nbytes: int) -> Offer | None:
    """An anonymous memory file, which `files` closes; None if the system has no such files."""
    if sys.platform != "linux" or os.environ.get(SHARED_MEMORY, "1") == "0" or platform.machine() not in _ORDERED:
        return None
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create("streamshard", os.MFD_CLOEXEC)  # programs that this rank starts do not get it
        files.callback(os.close, descriptor)
        os.ftruncate(descriptor, nbytes)
        return Offer(_system(), os.getpid(), descriptor)
    return None


def map_memory(offer: Offer | None, units: int) -> SharedBuffers | None:
    """A rank's memory; None if the rank is on another machine, or its memory may not be mapped."""
    if offer is None or offer.system != _system():
        return None
    # A container may refuse, or an old kernel.
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as files:
        # So no socket has to hand the descriptor over.
        file = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        files.callback(os.close, file)
        return SharedBuffers(file, units, os.pidfd_open(offer.process))
    return None


def _system() -> str:
    """Identifies the running kernel and the process namespace: process numbers are comparable if both are equal."""
    namespace = os.stat("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {namespace.st_dev} {namespace.st_ino}"


class _Until(NamedTuple):
    """A function as a `streamshard.comm.streams.Work`: the work is done when `wait` returns."""

    wait: Callable[[], None]


class SharedMemoryTransport(PairwiseTransport):
    """CPU ranks of one machine. Made by `Communicator.share_memory`.

    Args:
        ranks: the ranks of the shard group.
        buffers: shared memory of all ranks, by rank.
    """

    is_serial = True

    def __init__(self, ranks: RankGroup, buffers: Sequence[SharedBuffers]) -> None:
        super().__init__(ranks)
        self._buffers = buffers
        self._own = buffers[ranks.rank]
        self._among: Sequence[int] = range(self.world_size)  # whose memory a collective reads, in rank order
        self._timeout_s = timeout_of(ranks.group).total_seconds()
        self._on_stream = self.streams.on(self.stream)
        self.recorder.needs_hosts = True
        # By tag, shard and slot, the copies of an all-gather; by tag and grad slot, every rank's chunk. All all-gathers
        # and reductions of a flat parameter use the same ones.
        self._copies: dict[tuple[object, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._chunks: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._gathers: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque()  # not copied yet: destination, source
        self._started: deque[tuple[list[torch.Tensor], torch.Tensor, bool, float]] = deque()  # not summed yet
        weakref.finalize(self._own, _leave, self._own.gone, os.getpid())  # of which `among` makes no copy

    def among(self, ranks: RankGroup, places: Sequence[int]) -> SharedMemoryTransport:
        """The transport of ranks that gather and reduce among themselves, while the others do so among themselves.

        All ranks issue these collectives at the same places of one order. So the counters and the log of this transport
        tell their progress too.

        Args:
            ranks: some of this transport's ranks, such as those with the same experts.
            places: their numbers in this transport.
        """
        other = copy.copy(self)
        other.rank, other.world_size, other._group_of = ranks.rank, ranks.world_size, ranks.group_of
        other._among = places
        return other

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Transport.allocate_visible`."""
        return self._own.allocate(numel, dtype)

    def free_visible(self, buffer: torch.Tensor) -> None:
        """See `Transport.free_visible`."""
        if self._own.holds(buffer):
            self._own.free(buffer)

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        """No scratch: chunks are read in place, not received."""
        return 0

    def _everywhere(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor at the place of `tensor` in the memory of each rank."""
        offset = tensor.data_ptr() - self._own.start
        with torch.inference_mode(False):  # later passes use the views
            return [self._buffers[rank].view(offset, tensor.numel(), tensor.dtype) for rank in self._among]

    # -- all-gathers ------------------------------------------------------------------------------------------------

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`. The first wait copies: the shards stay unchanged until then."""
        shard, slot, tag, cast_to, is_of_step = gather
        sent = shard if cast_to is None else cast_to
        key = tag, sent.data_ptr(), slot.data_ptr(), sent.numel(), sent.dtype
        copies = self._copies.get(key)
        if copies is None or not is_of_step:
            if not is_of_step or not self._own.holds(sent):  # send it through gloo
                return super().start_gather(gather)
            copies = self._copies[key] = self._plan_copies(sent, slot)
        self._issue(RecordKind.GATHER, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        if cast_to is not None:
            with self._on_stream:
                cast_to.copy_(shard)
        self._gathers.append(copies)
        # Behind the cast: other ranks copy when they see the count.
        self._own.counters[Counter.PUBLISHED] = count = self._own.counters[Counter.PUBLISHED] + 1
        return _Until(functools.partial(self.copy_until, count, for_all=False))

    def _plan_copies(self, shard: torch.Tensor, slot: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The copies (destination, source) of each rank's `shard` into the rank's chunk of `slot`."""
        own, count = self.rank, self.world_size
        with torch.inference_mode(False):
            chunks = slot.view(count, -1).unbind()
            if chunks[own].data_ptr() != shard.data_ptr():
                return list(zip(chunks, self._everywhere(shard), strict=True))
            sources = [each.view(count, -1)[peer] for peer, each in enumerate(self._everywhere(slot))]
            pairs = list(zip(chunks, sources, strict=True))
            return pairs[:own] + pairs[own + 1 :]  # this rank's shard is in the slot

    def readers(self, works: Sequence[Work | None]) -> Sequence[Work | None]:
        """See `Transport.readers`."""
        until = _Until(functools.partial(self.copy_until, self._own.counters[Counter.PUBLISHED], for_all=True))
        return (*works, until)  # gloo may send some of them

    def copy_until(self, count: int, *, for_all: bool) -> None:
        """Copy all-gathers in their order, until this rank has copied `count`; `for_all`: until all ranks have."""
        own = self._own.counters
        while (number := own[Counter.READ]) < count:
            self._await(Counter.PUBLISHED, number + 1)
            with self._on_stream, torch.no_grad():
                for chunk, source in self._gathers.popleft():
                    chunk.copy_(source)
            own[Counter.READ] = number + 1
        if for_all:
            self._await(Counter.READ, count)

    def before_talk(self) -> None:
        """See `Transport.before_talk`. A rank in gloo copies nothing, and others may wait until it has."""
        self.copy_until(self._own.counters[Counter.PUBLISHED], for_all=False)

    # -- reductions -------------------------------------------------------------------------------------------------

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. Sums in all modes in fp32 and in rank order, once all ranks have started it."""
        slot, out, _, _, accumulate, tag, divisor = reduction
        self._issue(RecordKind.REDUCE, Collective.REDUCE_SCATTER, tag, reads=(slot,), writes=(out,))
        key = tag, slot.data_ptr(), slot.numel(), slot.dtype
        chunks = self._chunks.get(key)
        if chunks is None:
            chunks = [each.view(self.world_size, -1)[self.rank] for each in self._everywhere(slot)]
            self._chunks[key] = chunks
        self._started.append((chunks, out, accumulate, divisor))
        own, number = self._own, self._own.counters[Counter.WRITTEN]
        own.written[number % len(own.written)] = self.recorder.log.digest
        own.counters[Counter.WRITTEN] = number + 1  # behind the digest, which others read when they see it
        return _Until(functools.partial(self.sum_until, number + 1, for_all=True))

    def advance(self) -> None:
        """See `Transport.advance`. Takes each sum once all ranks have written, so that no rank waits later."""
        while self._started:
            number, written = self._own.counters[Counter.SUMMED], self._own.written
            place = number % len(written)
            for each in self._buffers:
                if each.counters[Counter.WRITTEN] <= number or each.written[place] != written[place]:
                    return  # if ranks differ, the wait in `sum_until` raises
            self.sum_until(number + 1, for_all=False)

    def sum_until(self, count: int, *, for_all: bool) -> None:
        """Sum reductions in their order, until this rank has summed `count`; `for_all`: until all ranks have."""
        own, written = self._own.counters, self._own.written
        while (number := own[Counter.SUMMED]) < count:
            self._await(Counter.WRITTEN, number + 1)
            place = number % len(written)
            for each in self._buffers:
                if each.written[place] != written[place]:
                    raise RuntimeError("ranks have issued different collectives")
            chunks, out, accumulate, divisor = self._started.popleft()
            with self._on_stream:
                sum_in_rank_order(chunks, out, accumulate=accumulate, divisor=divisor)
            own[Counter.SUMMED] = number + 1
        if for_all:
            self._await(Counter.SUMMED, count)

    # -- counters ---------------------------------------------------------------------------------------------------

    def _await(self, counter: Counter, count: int) -> None:
        """Return once all ranks' counters have reached `count`. Raises as `_refuse` does."""
        deadline, sleep_s, looks = None, 2e-5, 0
        while True:
            missing = []
            for rank, buffers in enumerate(self._buffers):
                if buffers.counters[counter] < count:
                    missing.append(rank)
            if not missing:
                return
            # Else one rank may wait for an all-gather, and the other one for a sum.
            if self._gathers and counter > Counter.READ:
                self.copy_until(min(each.counters[Counter.PUBLISHED] for each in self._buffers), for_all=False)
            elif self._started and counter <= Counter.READ:
                self.advance()
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()  # another rank may need this core
                continue
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            deadline = deadline or time.monotonic() + self._timeout_s
            if looks % _LOOKS_BETWEEN_CHECKS == 0:
                self._refuse(counter, count, missing, is_late=time.monotonic() > deadline)

    def _refuse(self, counter: Counter, count: int, missing: Sequence[int], *, is_late: bool) -> None:
        """Raise if the counters of `missing` ranks will not reach `count`.

        Raises:
            RuntimeError: a rank has died, has failed, or issued something else; or the process group's timeout has
                passed.
        """
        for rank in missing:
            # A process that ends by itself sets `gone` before.
            has_ended, has_left = self._buffers[rank].has_died(), self._buffers[rank].gone[0]  # in this order
            # Read the counter once more: the rank may have reached the count just before it ended.
            if (has_ended or has_left) and self._buffers[rank].counters[counter] < count:
                raise RuntimeError(f"rank {rank} has {'left, or has failed' if has_left else 'died'}")
        if self.recorder.difference is not None:
            raise RuntimeError(self.recorder.difference)
        if is_late:
            raise RuntimeError(f"timed out after {self._timeout_s:g} s of waiting for ranks {list(missing)}")

    def leave(self) -> None:
        """See `Transport.leave`."""
        self._own.gone[0] = 1


def _leave(gone: memoryview, process: int) -> None:
    if process == os.getpid():  # a forked child has no mapping
        gone[0] = 1
