"""Ranks of one machine read each other's memory: the CPU transport without sockets in between.

What other ranks read (compute shards, grad slots) lies in one anonymous memory file per rank, its *arena*, which every
peer maps. A gather then is one copy out of each peer's compute shard, a reduction one sum over all ranks' grad slots,
and who is how far is told by counters in the arenas ([Note: counters]). NCCL does the same between the GPUs of one
machine. Through gloo's sockets the same exchange cost three to four times the CPU time (docs/internals/log.md).

[Note: counters]
Each rank has five counters, which only it increments:

- PUBLISHED: my compute shards are cast and may be read. Peers wait for it before they copy.
- RETRACTED: I have read all I was going to read. Peers wait for it before they cast anew (rule 6).
- WRITTEN: reductions whose grad slot I have filled. Peers wait for it before they sum.
- SUMMED: reductions that I have summed. Peers wait for it before they write that slot again (rule 3).
- VOTED: votes that I have given. A rank gives its next one when it has read all of the last, so room for two is enough.

Counts say enough because passes and reductions come in the same order on all ranks (the program's). That they do is
compared: with each count goes what the log of all that was issued before came to (`flight_recorder.Log`). Sums are
taken in that order too, as early as possible, so no rank waits for a sum that waits for it.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from streamshard.comm.arena import Arena, Counter, State, arena_bytes, map_all, offer_memory
from streamshard.comm.flight_recorder import Kind
from streamshard.comm.gloo import PairwiseTransport, sum_in_pieces
from streamshard.comm.groups import timeout_of
from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.errors import StateError

__all__ = ["SharedMemoryTransport", "share_memory"]

_DISABLE = "STREAMSHARD_SHARED_MEMORY"  # environment variable: "0" leaves everything to gloo
_ORDERED = ("x86_64", "AMD64")  # where stores become visible in program order, which counters rely on
_YIELDS = 200  # how often to look before sleeping between looks
_LONGEST_SLEEP_S = 1e-3
_COMPARE_EVERY_S = 0.1  # while waiting: the logs of all ranks


class _Once:
    """Work that is done by whoever waits for it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def wait(self) -> None:
        """See `streamshard.comm.streams.Work`."""
        action, self._action = self._action, None
        if action is not None:
            action()


class SharedMemoryTransport(PairwiseTransport):
    """CPU ranks of one machine. Made by `share_memory`.

    Args:
        ranks: between whom; their log is kept where the others can read it from here on.
        arenas: all ranks', by rank.
    """

    def __init__(self, ranks: Ranks, arenas: Sequence[Arena]) -> None:
        super().__init__(ranks)
        self._arenas = arenas
        self._own = arenas[ranks.rank]
        ranks.log.move_to(self._own.log_words)
        ranks.board.share(dict(zip(_numbers_of(ranks), (arena.log_words for arena in arenas), strict=True)))
        self._timeout_s = timeout_of(ranks.group).total_seconds()
        self._started: deque[Reduction] = deque()  # not summed yet
        self._compared = 0  # publications
        weakref.finalize(self, _leave, self._own, os.getpid())

    def allocate_visible(self, numel: int, dtype: torch.dtype, *, is_users: bool = False) -> torch.Tensor:
        """See `Transport.allocate_visible`."""
        return self._own.allocate(numel, dtype, is_users=is_users)

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, *, adds: bool) -> int:
        """Nothing is received, so there is nothing to receive it in."""
        match mode:
            case ReductionMode.FP32 | ReductionMode.EXCHANGE_16 | ReductionMode.SUM_16:
                return 0

    # -- gathers ----------------------------------------------------------------------------------------------------

    def retract_shards(self) -> Work | None:
        """See `Transport.retract_shards`."""
        super().retract_shards()
        count = self._advance(Counter.RETRACTED)
        return _Once(lambda: self._await(Counter.RETRACTED, count))

    def publish_shards(self, shards: Sequence[torch.Tensor]) -> None:
        """See `Transport.publish_shards`."""
        self._own.forget_copy()
        for tag, shard in enumerate(shards):
            self._own.shards[tag] = self._offset_of(shard) if shard.numel() else 0
        count = self._own.counters[Counter.PUBLISHED] + 1
        self._own.published[count % len(self._own.published)] = self.ranks.log.digest
        self._advance(Counter.PUBLISHED)

    def start_gather(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> Work | None:
        """See `Transport.start_gather`. Copies when it is waited for: the shards stay where they are until then."""
        if self._own.offset_of(shard) is None:  # of something that is not published: sent, as between machines
            return super().start_gather(shard, slot, tag)
        self.streams.declare(self.stream, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        self.ranks.log.add(Kind.GATHER, tag)
        return _Once(lambda: self._copy(shard, slot, tag))

    def _copy(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> None:
        count = self._own.counters[Counter.PUBLISHED]
        if self._compared < count:
            self._await(Counter.PUBLISHED, count)
            self._compare([arena.published[count % len(arena.published)] for arena in self._arenas])
            self._compared = count
        with self.streams.on(self.stream), torch.no_grad():
            for arena, chunk in zip(self._arenas, slot.view(self.ranks.world_size, -1), strict=True):
                if chunk.data_ptr() != shard.data_ptr():  # a slot that is its unit's alone holds the compute shard
                    chunk.copy_(arena.view(arena.shards[tag], shard.numel(), shard.dtype))

    # -- votes ------------------------------------------------------------------------------------------------------

    def any_rank(self, value: bool) -> bool:
        """See `Ranks.any_rank`. Replicas may be on other machines."""
        if self.ranks.total_size > self.ranks.world_size:
            return super().any_rank(value)
        self.ranks.log.add(Kind.VOTE)
        turn = self._own.counters[Counter.VOTED] % len(self._own.votes)
        self._own.votes[turn] = value
        count = self._advance(Counter.VOTED)
        self._await(Counter.VOTED, count)
        return any(arena.votes[turn] for arena in self._arenas)

    # -- reductions -------------------------------------------------------------------------------------------------

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. In all modes: sums in rank order, in fp32, once all ranks have started it."""
        self.streams.declare(
            self.stream, Collective.REDUCE_SCATTER, reduction.tag, reads=(reduction.slot,), writes=(reduction.out,)
        )
        self._started.append(reduction)
        self.ranks.log.add(Kind.REDUCE, reduction.tag)
        self._own.written[self._own.counters[Counter.WRITTEN] % len(self._own.written)] = self.ranks.log.digest
        count = self._advance(Counter.WRITTEN)
        return _Once(lambda: self._finish(count))

    def progress(self) -> None:
        """See `Transport.progress`. Sums what all ranks have written, so that nobody has to wait for it later."""
        while self._started and self._is_everywhere(Counter.WRITTEN, self._own.counters[Counter.SUMMED] + 1):
            with self.ranks.guard("a reduction"):
                self._sum_next()

    def _finish(self, count: int) -> None:
        while self._own.counters[Counter.SUMMED] < count:
            self._await(Counter.WRITTEN, self._own.counters[Counter.SUMMED] + 1)
            self._sum_next()
        self._await(Counter.SUMMED, count)

    def _sum_next(self) -> None:
        number = self._own.counters[Counter.SUMMED]
        self._compare([arena.written[number % len(arena.written)] for arena in self._arenas])
        slot, out, _, _, accumulate, _ = self._started.popleft()
        # Grad slots are allocated in the same order on all ranks, so they lie at the same place in every arena.
        start = self._offset_of(slot) + self.ranks.rank * out.numel() * slot.element_size()
        with self.streams.on(self.stream):
            sum_in_pieces([arena.view(start, out.numel(), slot.dtype) for arena in self._arenas], out, accumulate)
        self._advance(Counter.SUMMED)

    def _offset_of(self, tensor: torch.Tensor) -> int:
        offset = self._own.offset_of(tensor)
        if offset is None:
            raise StateError("a shard or slot", "in memory of this rank alone", "in its arena")
        return offset

    # -- counters ---------------------------------------------------------------------------------------------------

    def _advance(self, counter: Counter) -> int:
        self._own.counters[counter] += 1
        return self._own.counters[counter]

    def _is_everywhere(self, counter: Counter, count: int) -> bool:
        return all(arena.counters[counter] >= count for arena in self._arenas)

    def _await(self, counter: Counter, count: int) -> None:
        """Return once all ranks' counters have reached `count`.

        Raises:
            RuntimeError: one never will, because its rank has died, has failed, has left or does something else; or the
                process group's timeout is over.
        """
        began, sleep_s = time.monotonic(), 2e-5
        compare_at = began + _COMPARE_EVERY_S
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
                self._check_takes_part(rank, counter, count)
            if time.monotonic() > compare_at:
                compare_at += _COMPARE_EVERY_S
                if (difference := self._find_difference()) is not None:
                    raise RuntimeError(difference)
            if time.monotonic() > began + self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s of waiting for ranks {missing}")

    def _check_takes_part(self, rank: int, counter: Counter, count: int) -> None:
        """Raise if `rank`, which has not reached `count`, never will."""
        arena = self._arenas[rank]
        story = _STORIES[arena.state]
        if story is None and arena.process is not None and not arena.process.is_running():
            story = "has died"
        # Its last act may have been to get there.
        if story is not None and arena.counters[counter] < count:
            raise RuntimeError(self._find_difference() or f"rank {rank} {story}")

    # -- when ranks do not do the same ------------------------------------------------------------------------------

    def _find_difference(self) -> str | None:
        return self.ranks.board.find_difference(among_shared=True)

    def on_failure(self) -> None:
        """See `Transport.on_failure`."""
        self._own.leave(State.HAS_FAILED)

    def _compare(self, digests: Sequence[int]) -> None:
        """Raise if ranks have come to the same count on different ways."""
        if any(digest != digests[self.ranks.rank] for digest in digests):
            raise RuntimeError(self._find_difference() or "ranks have not done the same, some time ago")


_STORIES = {
    State.TAKES_PART: None,
    State.HAS_LEFT: "has left: its program is over, or its model was deleted",
    State.HAS_FAILED: "has failed, its own error says how",
}


def _numbers_of(ranks: Ranks) -> list[int]:
    """The numbers of the shard group's ranks among all."""
    return [dist.get_group_rank(ranks.all_ranks, rank) for rank in dist.get_process_group_ranks(ranks.group)]


def _leave(arena: Arena, process: int) -> None:
    if process == os.getpid():  # not in a forked child
        arena.leave(State.HAS_LEFT)


def share_memory(ranks: Ranks, nbytes: int, units: int) -> None:
    """Let ranks of a shard group that can map each other's memory move bytes through it. Blocks.

    Args:
        ranks: whose transport is replaced.
        nbytes: the most that will be asked for with `Transport.allocate_visible`; memory is taken only when touched.
        units: how many shards will be published.
    """
    if not isinstance(ranks.transport, PairwiseTransport) or ranks.world_size == 1:
        return
    nbytes = arena_bytes(nbytes, units)
    mine = None
    if os.environ.get(_DISABLE, "1") != "0" and platform.machine() in _ORDERED:
        mine = offer_memory(nbytes)
    arenas = None
    try:
        offers = ranks.gather_objects(None if mine is None else mine[1], with_replicas=False)
        if mine is not None:
            arenas = map_all(offers, ranks.rank, mine[0], units)
        all_can = all(ranks.gather_objects(arenas is not None, with_replicas=False))
    finally:
        if mine is not None:
            os.close(mine[1].descriptor)  # mappings stay
    if all_can and arenas is not None:
        ranks.transport = SharedMemoryTransport(ranks, arenas)
