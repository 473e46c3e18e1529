"""GPU ranks over NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Reduction, Transport, sum_in_rank_order

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
        """See `Transport.start_reduce`. fp32 straight into main grads when nothing is there to add to."""
        scratch, out = reduction.scratch, reduction.out
        self.streams.declare(Collective.REDUCE_SCATTER, reduction.tag, reads=(reduction.slot,), writes=(scratch, out))
        with self.streams.on_comm(), torch.no_grad():
            if scratch.numel() > out.numel():
                self._exchange(reduction, scratch)
            elif reduction.slot.dtype is out.dtype and not reduction.accumulate:
                _reduce_scatter_single(out, reduction.slot, op=dist.ReduceOp.AVG, group=self.ranks.group)
            else:
                _reduce_scatter_single(scratch, reduction.slot, op=dist.ReduceOp.AVG, group=self.ranks.group)
                out.add_(scratch) if reduction.accumulate else out.copy_(scratch)
        return None

    def start_average(self, tensor: torch.Tensor) -> Work | None:
        """See `Transport.start_average`."""
        self.streams.declare(Collective.ALL_REDUCE, None, writes=(tensor,))
        with self.streams.on_comm():
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=self.ranks.group)
        return None

    def scratch_numel(self, shard_numel: int, wire: torch.dtype, accumulate: torch.dtype, *, adds: bool) -> int:
        """N chunks where a 16-bit wire is summed in fp32, one shard to add from, or to convert from."""
        if wire is not accumulate:
            return shard_numel * self.ranks.world_size
        return shard_numel if adds or wire is not torch.float32 else 0

    def _exchange(self, reduction: Reduction, scratch: torch.Tensor) -> None:
        dist.all_to_all_single(scratch, reduction.slot, group=self.ranks.group)
        chunks = scratch.view(self.ranks.world_size, -1)  # in rank order, this rank's among them
        sum_in_rank_order(list(chunks), reduction.out, accumulate=reduction.accumulate)
