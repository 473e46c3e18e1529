"""CPU ranks over gloo: chunks are exchanged between pairs of ranks, and summed where they arrive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import Kind
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import AllToAll, Reduction, Transport, sum_in_rank_order
from streamshard.config import ReductionMode

__all__ = ["PairwiseTransport", "sum_in_pieces"]

_SUM_BLOCK = 1 << 17  # elements
# A unit's gathers, its reductions and gathers of full tensors must never be taken for each other: gloo ends the process
# where a message is longer than the memory for it.
_TAGS_PER_UNIT = 3
_ALL_TO_ALL_TAG = 1 << 30  # behind those of all units
# Messages without a wait (of a model that was deleted, say), as long as their group lives. gloo frees a receive with
# its work object. The message for it would then block the connection between the two ranks for good.
_abandoned: weakref.WeakKeyDictionary[dist.ProcessGroup, list[dist.Work]] = weakref.WeakKeyDictionary()


class PairwiseTransport(Transport):
    """CPU ranks over gloo: every pair of ranks exchanges its chunks directly, without staging copies."""

    def start_gather(
        self, shard: torch.Tensor, slot: torch.Tensor, tag: int, *, is_published: bool = True
    ) -> Work | None:
        """See `Transport.start_gather`. Other ranks' shards are received in place; this rank's is copied."""
        self.ranks.board.log.add(Kind.GATHER if is_published else Kind.GATHER_FULL, tag)
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
        """See `Transport.start_reduce`. In all modes: sums in rank order, in fp32, when the work is waited for."""
        chunks = reduction.slot.view(self.ranks.world_size, -1)
        received = reduction.scratch.view(self.ranks.world_size - 1, -1)
        self.streams.declare(
            self.stream,
            Collective.REDUCE_SCATTER,
            reduction.tag,
            reads=(reduction.slot,),
            writes=(reduction.scratch, reduction.out),
        )
        self.ranks.board.log.add(Kind.REDUCE, reduction.tag)
        messages = []
        for index, peer in enumerate(self._peers()):
            tag = reduction.tag * _TAGS_PER_UNIT + 1
            messages.append(self.ranks.group.send([chunks[peer]], peer, tag))
            messages.append(self.ranks.group.recv([received[index]], peer, tag))
        return _Exchange(self.ranks.group, messages, lambda: self._sum(chunks[self.ranks.rank], received, reduction))

    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        """See `Transport.start_average`. The backend's own sum; divided when it is waited for."""
        self.streams.declare(self.stream, Collective.ALL_REDUCE, tag, writes=(tensor,))
        self.ranks.board.log.add(Kind.AVERAGE)
        work = dist.all_reduce(tensor, group=self.ranks.group, async_op=True)

        def divide() -> None:
            with self.streams.on(self.stream), torch.no_grad():
                tensor.div_(self.ranks.world_size)

        return _Exchange(self.ranks.group, [work], divide)

    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """See `Transport.start_all_to_all`. gloo delivers messages of one tag in the order in which they were sent."""
        self.streams.declare(
            self.stream, Collective.ALL_TO_ALL, None, reads=(exchange.send,), writes=(exchange.received,)
        )
        self.ranks.board.log.add(Kind.ALL_TO_ALL)
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
        """Every other rank's chunk is received before the sum."""
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
    """Messages under way in gloo's threads, and what to do once all have arrived.

    Args:
        group: whose messages they are: they are kept as long as it lives if nobody waits for them.
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
    """`sum_in_rank_order` for a CPU, whose cache keeps a piece of `out` between the addends.

    If `out` is one of the chunks (main grads that lie in the grad slot), that one comes first: it is overwritten.
    """
    first = [chunk for chunk in chunks if chunk.data_ptr() == out.data_ptr()]
    ordered = [*first, *(chunk for chunk in chunks if chunk.data_ptr() != out.data_ptr())]
    with torch.no_grad():
        for piece, *parts in zip(*(tensor.split(_SUM_BLOCK) for tensor in (out, *ordered)), strict=True):
            sum_in_rank_order(parts, piece, accumulate=accumulate)
