"""GPU ranks over NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Reduction, Transport, sum_in_rank_order
from streamshard.config import ReductionMode

__all__ = ["NcclTransport"]

# torch 2.13 renames the two and warns about the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(Transport):
    """GPU ranks over NCCL: the backend's own collectives, on the comm stream."""

    def start_gather(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> Work | None:
        """See `Transport.start_gather`."""
        self.streams.declare(Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        with self.streams.on_comm():
            _all_gather_single(slot, shard, group=self.ranks.group)
        return None

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`."""
        slot, out, scratch, mode, accumulate, tag = reduction
        self.streams.declare(Collective.REDUCE_SCATTER, tag, reads=(slot,), writes=(scratch, out))
        with self.streams.on_comm(), torch.no_grad():
            if mode is ReductionMode.EXCHANGE_16:
                dist.all_to_all_single(scratch, slot, group=self.ranks.group)
                chunks = scratch.view(self.ranks.world_size, -1)  # in rank order, this rank's among them
                sum_in_rank_order(list(chunks), out, accumulate=accumulate)
            elif mode is ReductionMode.FP32 and not accumulate:
                _reduce_scatter_single(out, slot, op=dist.ReduceOp.AVG, group=self.ranks.group)
            else:  # something to add to, or to widen
                _reduce_scatter_single(scratch, slot, op=dist.ReduceOp.AVG, group=self.ranks.group)
                out.add_(scratch) if accumulate else out.copy_(scratch)
        return None

    def start_average(self, tensor: torch.Tensor) -> Work | None:
        """See `Transport.start_average`."""
        self.streams.declare(Collective.ALL_REDUCE, None, writes=(tensor,))
        with self.streams.on_comm():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.ranks.group)
        return None

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, *, adds: bool) -> int:
        """A chunk of each rank to sum, or one shard to add from or to widen."""
        match mode:
            case ReductionMode.FP32:
                return shard_numel if adds else 0
            case ReductionMode.EXCHANGE_16:
                return shard_numel * self.ranks.world_size
            case ReductionMode.SUM_16:
                return shard_numel
