"""CPU ranks over gloo: pairs of ranks exchange chunks, and each rank sums the chunks that it receives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import AllToAll, Reduction, Transport, sum_in_rank_order
from streamshard.config import ReductionMode

__all__ = ["PairwiseTransport", "sum_in_pieces"]

_SUM_BLOCK = 1 << 17  # elements
# One tag each for a unit's all-gathers, its reductions, and gathers of full tensors. gloo ends the process if a message
# is longer than the buffer of its receiver, so these messages must not be mixed up.
_TAGS_PER_UNIT = 3
_ALL_TO_ALL_TAG = 1 << 30  # higher than the tags of all units
# Messages that nothing has waited for, for example of a deleted model, kept as long as their group. gloo cancels a
# receive when its work object is freed. The message would then block the connection between the two ranks for good.
_abandoned: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = weakref.WeakKeyDictionary()


class PairwiseTransport(Transport):
    """CPU ranks over gloo: every pair of ranks exchanges its chunks directly, without intermediate copies."""

    def start_gather(
        self, shard: torch.Tensor, slot: torch.Tensor, tag: int, *, is_published: bool = True
    ) -> Work | None:
        """See `Transport.start_gather`. Other ranks' shards arrive in the slot; this rank copies its own."""
        self.ranks.board.log.add(RecordKind.GATHER if is_published else RecordKind.GATHER_FULL, tag)
        chunks = slot.view(self.ranks.world_size, -1)
        self.streams.declare(self.stream, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        messages, message_tag = [], tag * _TAGS_PER_UNIT + (0 if is_published else 2)
        for peer in self._peers():
            messages.append(self.ranks.group.send([shard], peer, message_tag))
            messages.append(self.ranks.group.recv([chunks[peer]], peer, message_tag))
        if chunks[self.ranks.rank].data_ptr() != shard.data_ptr():
            with self.streams.on(self.stream):
                chunks[self.ranks.rank].copy_(shard)
        return _Exchange(self.ranks.group, messages)

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. The first wait sums, in all modes in fp32 and in rank order."""
        chunks = reduction.slot.view(self.ranks.world_size, -1)
        received = reduction.scratch.view(self.ranks.world_size - 1, -1)
        self.streams.declare(
            self.stream,
            Collective.REDUCE_SCATTER,
            reduction.tag,
            reads=(reduction.slot,),
            writes=(reduction.scratch, reduction.out),
        )
        self.ranks.board.log.add(RecordKind.REDUCE, reduction.tag)
        messages = []
        for index, peer in enumerate(self._peers()):
            tag = reduction.tag * _TAGS_PER_UNIT + 1
            messages.append(self.ranks.group.send([chunks[peer]], peer, tag))
            messages.append(self.ranks.group.recv([received[index]], peer, tag))
        return _Exchange(self.ranks.group, messages, lambda: self._sum(chunks[self.ranks.rank], received, reduction))

    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        """See `Transport.start_average`. gloo sums; the first wait divides."""
        self.streams.declare(self.stream, Collective.ALL_REDUCE, tag, writes=(tensor,))
        self.ranks.board.log.add(RecordKind.AVERAGE)
        work = dist.all_reduce(tensor, group=self.ranks.group, async_op=True)

        def divide() -> None:
            with self.streams.on(self.stream), torch.no_grad():
                tensor.div_(self.ranks.world_size)

        return _Exchange(self.ranks.group, [work], divide)

    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """See `Transport.start_all_to_all`. All use one tag: gloo keeps the order of messages with the same tag."""
        self.streams.declare(
            self.stream, Collective.ALL_TO_ALL, None, reads=(exchange.send,), writes=(exchange.received,)
        )
        self.ranks.board.log.add(RecordKind.ALL_TO_ALL)
        messages = []
        for peer in self._peers():
            sent, received = exchange.chunks(peer)
            if sent.numel():
                messages.append(self.ranks.group.send([sent], peer, _ALL_TO_ALL_TAG))
            if received.numel():
                messages.append(self.ranks.group.recv([received], peer, _ALL_TO_ALL_TAG))
        with self.streams.on(self.stream), torch.no_grad():
            sent, received = exchange.chunks(self.ranks.rank)
            received.copy_(sent)
        return _Exchange(self.ranks.group, messages)

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, *, adds: bool) -> int:
        """One chunk from every other rank, which arrive before the sum."""
        match mode:
            case ReductionMode.FP32 | ReductionMode.EXCHANGE_16 | ReductionMode.SUM_16:
                return shard_numel * (self.ranks.world_size - 1)

    def _sum(self, own: torch.Tensor, received: torch.Tensor, reduction: Reduction) -> None:
        others = list(received)
        with self.streams.on(self.stream):
            sum_in_pieces(
                [*others[: self.ranks.rank], own, *others[self.ranks.rank :]], reduction.out, reduction.accumulate
            )

    def _peers(self) -> list[int]:
        """The other ranks, in rank order: `received` is laid out in this order."""
        return [peer for peer in range(self.ranks.world_size) if peer != self.ranks.rank]


class _Exchange:
    """Pending messages in gloo's threads, and a function to call when all have arrived.

    Args:
        group: sends the messages. Messages that nothing waits for are kept as long as the group.
        messages: sends and receives.
        finish: called at the end of the first wait.
    """

    def __init__(
        self, group: dist.ProcessGroup, messages: Sequence[dist.Work], finish: Callable[[], None] | None = None
    ) -> None:
        self._group = group
        self._messages: Sequence[dist.Work] = messages
        self._finish = finish

    def __del__(self) -> None:
        self._abandon()

    def wait(self) -> None:
        """See `streamshard.comm.streams.Work`."""
        try:
            for message in self._messages:
                message.wait()
        except BaseException:
            self._abandon()
            raise
        self._messages = ()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _abandon(self) -> None:
        if self._messages:
            _abandoned.setdefault(self._group, []).extend(self._messages)
            self._messages = ()


def sum_in_pieces(chunks: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
    """`sum_in_rank_order`, block by block, so that a block of `out` stays in the CPU's cache.

    If `out` is one of the chunks (main grads in the grad slot), that chunk is added first, because it is overwritten.
    """
    first = [chunk for chunk in chunks if chunk.data_ptr() == out.data_ptr()]
    ordered = [*first, *(chunk for chunk in chunks if chunk.data_ptr() != out.data_ptr())]
    with torch.no_grad():
        for piece, *parts in zip(*(tensor.split(_SUM_BLOCK) for tensor in (out, *ordered)), strict=True):
            sum_in_rank_order(parts, piece, accumulate=accumulate)
