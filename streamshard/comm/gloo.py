"""CPU ranks over gloo: pairs of ranks exchange chunks, and each rank sums the chunks that it receives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Exchange, Gather, Reduction, Transport, sum_in_rank_order
from streamshard.config import ReductionMode

# A flat parameter has one tag for its all-gathers, one for its reductions, and one for gathers of full tensors. gloo
# ends the process if a message is longer than the buffer of its receiver, so these messages must not be mixed up.
_TAGS_EACH = 3
# Nor those of two models, which ranks may call in different orders: each has tags of its own.
_TAGS_OF_MODEL, _MOST_MODELS = 1 << 20, (1 << 11) - 1


class PairwiseTransport(Transport):
    """CPU ranks over gloo: every pair of ranks exchanges its chunks directly, without intermediate copies."""

    is_serial = False

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`. Other ranks' shards arrive in the slot; this rank copies its own."""
        shard, slot, tag, cast_to, is_of_step = gather
        kind = RecordKind.GATHER if is_of_step else RecordKind.GATHER_FULL
        self._issue(kind, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        chunks = slot.view(self.world_size, -1)
        received = [chunks[peer] for peer in self._peers()]
        if cast_to is not None:
            with self.streams.on(self.stream):
                shard = cast_to.copy_(shard)
        messages = self._swap([shard] * len(received), received, tag * _TAGS_EACH + (0 if is_of_step else 2))
        if chunks[self.rank].data_ptr() != shard.data_ptr():  # a cast puts it there
            with self.streams.on(self.stream):
                chunks[self.rank].copy_(shard)
        return Exchange(None, messages, self.group)

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. The first wait sums, in all modes in fp32 and in rank order."""
        slot, out, scratch, _, accumulate, tag, divisor = reduction
        self._issue(RecordKind.REDUCE, Collective.REDUCE_SCATTER, tag, reads=(slot,), writes=(scratch, out))
        rank, chunks = self.rank, slot.view(self.world_size, -1).unbind()
        received = scratch.view(self.world_size - 1, -1).unbind()
        messages = self._swap([*chunks[:rank], *chunks[rank + 1 :]], received, tag * _TAGS_EACH + 1)

        def sum_all() -> None:
            with self.streams.on(self.stream):
                in_order = [*received[:rank], chunks[rank], *received[rank:]]
                sum_in_rank_order(in_order, out, accumulate=accumulate, divisor=divisor)

        return Exchange(sum_all, messages, self.group)

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        """One chunk from every other rank: all arrive before the sum."""
        return shard_numel * (self.world_size - 1)

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], tag: int) -> list[dist.Work]:
        """Start to exchange tensors with the other ranks, in rank order. Empty tensors are not sent."""
        group, messages = self.group, []
        tag += self.recorder.number % _MOST_MODELS * _TAGS_OF_MODEL
        for peer, mine, theirs in zip(self._peers(), sent, received, strict=True):
            # First the receive: gloo tells the peer that it may send, and would say so behind this rank's own bytes.
            if theirs.numel():
                messages.append(group.recv([theirs], peer, tag))
            if mine.numel():
                messages.append(group.send([mine], peer, tag))
        return messages

    def _peers(self) -> list[int]:
        """The other ranks, in rank order."""
        return [peer for peer in range(self.world_size) if peer != self.rank]
