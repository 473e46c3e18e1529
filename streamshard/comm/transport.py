"""`Transport`: the interface of the backends that move units' bytes between ranks.

`streamshard.comm.gloo` serves CPUs, `streamshard.comm.nccl` GPUs, `streamshard.comm.shared_memory` the CPU ranks of one
machine. The tests add one that delays messages on purpose (`tests/adversary.py`).

[Note: reductions]
Every reduction writes the sum over ranks, divided, to main grads. It divides in fp32: the sum, or in rank order each
rank's part; sums in fp16 see [Note: sums] in `streamshard.comm.nccl`. The divisor is the number of ranks, or follows
from `set_gradient_divide_factor`. `ReductionMode` says what is sent and summed. Where chunks are exchanged (`IN_ORDER`,
and all modes on gloo), rank r receives its chunk from every other rank and sums in rank order, so results depend
neither on a ring's rounding nor on timing. gloo's own reduce_scatter was 4 to 14 times slower than this exchange
(docs/internals/log.md).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.host_groups import alive, state_of
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import Collective, Work
from streamshard.config import Precision, ReductionMode

_SUM_BLOCK = 1 << 17  # elements: 512 KiB in fp32, which stay in a core's cache
_Tensors = Sequence[torch.Tensor]


class Gather(NamedTuple):
    """One all-gather: each rank's shard into the slots of all ranks.

    Attributes:
        shard: [shard_numel] this rank's.
        slot: [N * shard_numel] receives the shards of all ranks, in rank order.
        tag: number of the flat parameter.
        cast_to: this rank's range of `slot`: the shard is cast to its dtype there, and sent from there. None: the shard
            has the dtype of `slot`, and is sent as it is.
        is_of_step: the all-gather belongs to a unit's step; False: to something else.
    """

    shard: torch.Tensor
    slot: torch.Tensor
    tag: int
    cast_to: torch.Tensor | None = None
    is_of_step: bool = True


class Reduction(NamedTuple):
    """One reduction: the sum over ranks of each rank's slice of a slot of gradients, divided, into main grads.

    Attributes:
        slot: [padded_numel] grad_dtype, this rank's gradients of the whole flat parameter.
        out: [shard_numel] fp32, this rank's main grads.
        scratch: [`Transport.scratch_numel`] grad_dtype, temporary.
        mode: says what is sent and summed; the same for all reductions of a flat parameter.
        accumulate: add to `out` instead of overwriting it.
        tag: number of the flat parameter; separates its reductions from other messages.
        divisor: the sum over ranks is divided by it; N for the mean.
    """

    slot: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor
    mode: ReductionMode
    accumulate: bool
    tag: int
    divisor: float


class AllToAll(NamedTuple):
    """One all-to-all: each rank sends a chunk, which may be empty, to each rank. Chunks lie in rank order.

    Attributes:
        send: [sum of send_numels] 1-D contiguous.
        send_numels: elements for each rank, this one included.
        received: [sum of received_numels], same dtype; does not overlap `send`.
        received_numels: elements from each rank: that rank's `send_numels` for this rank.
    """

    send: torch.Tensor
    send_numels: list[int]
    received: torch.Tensor
    received_numels: list[int]


class Transport(abc.ABC):
    """Moves a unit's bytes between ranks.

    The `start_` methods return at once. On CUDA the result is complete when the transport's stream gets to the point of
    return; on the CPU, when the returned work has been waited for. The caller owns the buffers and must not use them
    until then.

    Args:
        ranks: the ranks that exchange data. They hold this transport, so it does not keep them: models are freed at
            once, not by the collector.

    Attributes:
        rank, world_size, streams, recorder: those of the ranks.
        stream: the stream on which collectives run.
        is_serial: collectives run one after the other, so a reduction from a slot holds up the next all-gather into it
            no more than any other. False: they run side by side.
        parts: of each all-gather and each reduction of a flat parameter. Part p of number n has the tag n * parts + p.
    """

    is_serial = True
    parts = 1

    def __init__(self, ranks: RankGroup) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.streams, self.stream = ranks.streams, ranks.stream
        self.recorder = ranks.recorder
        self._group_of = ranks.group_of

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks. Raises as `RankGroup.group` does."""
        return alive(self._group_of)

    def meet(self) -> None:  # noqa: B027  # gloo connects when its group is made
        """Connect the ranks now instead of in the first collective. Collective."""

    @abc.abstractmethod
    def start_gather(self, gather: Gather) -> Work | None:
        """Start an all-gather."""

    @abc.abstractmethod
    def start_reduce(self, reduction: Reduction) -> Work | None:
        """Start a reduce-scatter. See [Note: reductions]."""

    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        """Start to replace `tensor` [n] fp32 by its mean over the ranks of the group.

        Args:
            tensor: any fp32 tensor.
            tag: index of the flat parameter whose main grads `tensor` holds; None: it holds something else.
        """
        self._issue(RecordKind.AVERAGE, Collective.ALL_REDUCE, tag, writes=(tensor,))
        # Not `ReduceOp.AVG`, see [Note: sums] in `streamshard.comm.nccl`.
        return self._start(partial(dist.all_reduce, tensor), lambda: tensor.div_(self.world_size))

    def start_flags(self, flags: torch.Tensor, gathered: torch.Tensor, tag: int) -> Work | None:
        """Start to let each rank know the flags of all ranks.

        Args:
            flags: [F] uint8, this rank's.
            gathered: [`flags_numel`] uint8; the maximum over its rows of F is that of all ranks.
            tag: of the message.
        """
        return self.start_gather(Gather(flags, gathered, tag))

    def flags_numel(self, count: int) -> int:
        """The length of `gathered` in `start_flags`, for `count` flags."""
        return count * self.world_size

    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """Start an all-to-all. Several may be pending."""
        send, send_numels, received, received_numels = exchange
        self._issue(RecordKind.ALL_TO_ALL, Collective.ALL_TO_ALL, None, reads=(send,), writes=(received,))
        return self._start(partial(dist.all_to_all_single, received, send, received_numels, send_numels))

    def _start(self, collective: Callable[..., Any], finish: Callable[[], object] = lambda: None) -> Work | None:
        """Start a collective of torch's on the stream. `finish` runs behind it; on the CPU in the first wait."""

        def finish_on_stream() -> None:
            with self.streams.on(self.stream), torch.no_grad():
                finish()

        with self.streams.on(self.stream), torch.no_grad():
            work = collective(group=self.group, async_op=not self.streams.has_streams)  # devices order by streams
            if work is None:
                finish()
                return None
        return Exchange(finish_on_stream, [work], self.group)

    @abc.abstractmethod
    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        """Number of scratch elements for a reduction, which may add to main grads.

        Args:
            shard_numel: elements of the unit's shard.
            mode: mode of the reductions.
            dtype: of the gradients in the slot, and of the scratch.
            limit: bytes that a scratch need not exceed if the reduction can be made in parts.
        """

    def sent_dtype(self, mode: ReductionMode, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a reduction sends gradients, which have `dtype` in their slot."""
        return dtype

    def check_precision(self, precision: Precision) -> None:  # noqa: B027  # most sum in fp32
        """Check that sums over so many ranks are accurate in `precision`.

        Raises:
            ConfigError: they are not.
        """

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] of zeros on the streams' device, in memory that other ranks can read if there is such."""
        return torch.zeros(numel, dtype=dtype, device=self.streams.device)

    def free_visible(self, buffer: torch.Tensor) -> None:  # noqa: B027  # torch frees a tensor's memory
        """Free the memory of `buffer`, of `allocate_visible` or not. No rank uses it any more."""

    def readers(self, works: Sequence[Work | None]) -> Sequence[Work | None]:
        """Works to wait for before the shards of the last all-gathers are overwritten. On devices streams order this.

        Args:
            works: returned by the starts of these all-gathers on this rank; other transports may have started some.
        """
        return works

    def advance(self) -> None:  # noqa: B027  # backends with threads of their own need no help
        """Advance pending collectives without waiting. Called with every gradient."""

    def _issue(
        self, kind: RecordKind | None, what: Collective, tag: int | None, *, reads: _Tensors = (), writes: _Tensors
    ) -> None:
        """Log a collective, and tell the observers. For the other arguments see `Observer.on_collective`.

        Args:
            kind: what the log records; None: no other rank takes part, or another transport logs it.
        """
        if kind is not None:
            # The log is read with `FlightRecorder.names`, which has an entry per flat parameter, not per part.
            self.recorder.log.add(kind, (tag or 0) // self.parts)
        for observer in self.streams.observers:
            observer.on_collective(self.stream, what, tag, reads, writes)

    def before_talk(self) -> None:  # noqa: B027  # only shared memory, and the adversary, have something to do
        """Called before ranks communicate without this transport."""

    def leave(self) -> None:  # noqa: B027  # closed connections tell most backends
        """This rank has failed: end the waits of other ranks for it."""


@dataclasses.dataclass(eq=False)
class Exchange:
    """Pending messages in gloo's threads, and a function to call when all have arrived.

    Args:
        finish: called at the end of the first wait.
        messages: sends and receives.
        group: the group of the messages. It keeps messages that nobody waits for.
    """

    finish: Callable[[], None] | None
    messages: Sequence[dist.Work]
    group: dist.ProcessGroup

    def __del__(self) -> None:
        self._abandon()

    def wait(self) -> None:
        """See `streamshard.comm.streams.Work`."""
        try:
            for message in self.messages:
                message.wait()
        except BaseException:
            self._abandon()
            raise
        self.messages = ()
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def _abandon(self) -> None:
        """Keep messages that nobody has waited for, for example of a deleted model, as long as their group.

        gloo cancels a receive when its work object is freed. The message would then block the connection between the
        two ranks for good.
        """
        if self.messages:
            state_of(self.group).abandoned.extend(self.messages)
            self.messages = ()


class AloneTransport(Transport):
    """One rank. Its shards are the whole units, so data only move between buffers, if they are not one and the same."""

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`."""
        shard, slot, tag, *_ = gather
        if slot.data_ptr() != shard.data_ptr():
            self._issue(None, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
            with self.streams.on(self.stream), torch.no_grad():
                slot.copy_(shard)
        return None

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`."""
        slot, out, _, _, accumulate, tag, divisor = reduction
        # With a slot for each unit's gradients main grads are the slot.
        if out.data_ptr() != slot.data_ptr() or divisor != 1.0:
            self._issue(None, Collective.REDUCE_SCATTER, tag, reads=(slot,), writes=(out,))
            with self.streams.on(self.stream), torch.no_grad():
                out.add_(slot, alpha=1.0 / divisor) if accumulate else out.copy_(slot)
                if divisor != 1.0 and not accumulate:
                    out.mul_(1.0 / divisor)  # in `out`: the slot's dtype would round again
        return None

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        """No scratch."""
        return 0


def sum_in_rank_order(chunks: Sequence[torch.Tensor], out: torch.Tensor, *, accumulate: bool, divisor: float) -> None:
    """``out (+)= sum of chunks / divisor``: adds one chunk after the other, in fp32.

    Args:
        chunks: N tensors [n], every rank's, in rank order.
        out: [n] fp32; may be one of `chunks`.
        accumulate: add to `out` instead of overwriting it; `out` is none of `chunks` then.
        divisor: N for the mean.
    """
    # Each chunk is divided, not the sum: `out` may hold earlier quotients, to which chunks are added.
    share = 1.0 / divisor
    blocks: Iterable[Sequence[torch.Tensor]] = [(out, *chunks)]
    if out.is_cpu and out.numel() > _SUM_BLOCK:  # a block of `out` stays in the cache
        blocks = zip(*(tensor.split(_SUM_BLOCK) for tensor in (out, *chunks)), strict=True)
    with torch.no_grad():
        for block, first, *others in blocks:
            if accumulate:
                block.add_(first, alpha=share)
            else:
                for place, other in enumerate(others):
                    if other.data_ptr() == block.data_ptr():  # `first` overwrites it below
                        others[place] = other.clone()
                block.copy_(first).mul_(share)  # torch.mul(first, share, out=block) would round to first's dtype
            for other in others:
                block.add_(other, alpha=share)
