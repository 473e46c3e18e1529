"""Ranks on accelerators: the backend's own collectives, NCCL's for GPUs.

[Note: sums]
A mean is a sum over ranks, then a multiplication by 1/N, or by the inverse of another divisor; in rank order each part
is multiplied, then added. ncclAvg is not used: it rounds 1/N to the dtype of the gradients, and multiplies before it
adds. In bf16 every gradient is then 0.2 % too large for N = 3 or 6. Also, NVLink switches (NVLS) only add. In fp16 a
sum over N ranks could overflow, and N-ths underflow. So fp16 gradients are divided by a power of two near the root of N
before the sum, which is exact, and by the rest afterwards (as in FSDP2).

[Note: sums in 16 bits]
If the backend adds up in 16 bits (`SUM_16`), each step along a ring rounds. The mean of independent gradients is off by
0.5 % at 16 ranks and by 1.9 % at 256 (bf16; the error grows with the root of N). Equal gradients are worse: the
distance between neighbours of k is k eps or half of it, so from k = 2/eps on (256 in bf16) one more gradient changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.streams import Collective, Work
from streamshard.comm.transport import Gather, Reduction, Transport, sum_in_rank_order
from streamshard.config import Precision, ReductionMode
from streamshard.errors import ConfigError
from streamshard.torch_private import AllgatherOptions, ReduceScatterOptions

# Methods of process groups: the functions of torch.distributed around them take as long again. torch 2.13 renamed both.
_all_gather_single: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter_single: Any = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
)
_GATHER, _SUM = AllgatherOptions(), ReduceScatterOptions()  # a sum is the default
_GATHER.asyncOp = _SUM.asyncOp = False  # on the current stream

# Of a reduction in parts: large enough that NCCL runs at full speed, on many ranks too.
_STAGING_BYTES, _STAGING_BYTES_EACH = 64 << 20, 512 << 10
_STAGING_ALIGNMENT = 64  # elements: in 16 bits each part begins a cache line of a GPU, 128 bytes


class NcclTransport(Transport):
    """The backend's own collectives, on one of the engine's streams."""

    def meet(self) -> None:
        """See `Transport.meet`. NCCL connects in its first collective, which takes seconds with many ranks."""
        with self.streams.on(self.stream):
            dist.all_reduce(torch.zeros(1, device=self.streams.device), group=self.group)

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`."""
        shard, slot, tag, cast_to, is_of_step = gather
        kind = RecordKind.GATHER if is_of_step else RecordKind.GATHER_FULL
        self._issue(kind, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        with self.streams.on(self.stream):
            sent = shard if cast_to is None else cast_to.copy_(shard)
            self._wait(_all_gather_single(self.group, slot, sent, _GATHER))
        return None

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`, and [Note: sums]."""
        slot, out, scratch, mode, accumulate, tag, divisor = reduction
        self._issue(RecordKind.REDUCE, Collective.REDUCE_SCATTER, tag, reads=(slot,), writes=(scratch, out, slot))
        with self.streams.on(self.stream):
            if mode is ReductionMode.IN_ORDER:
                self._exchange(reduction)
            elif mode is ReductionMode.FP32 and slot.dtype is not torch.float32:
                self._reduce_in_parts(reduction)
            elif mode is ReductionMode.FP32 and not accumulate:
                self._wait(_reduce_scatter_single(self.group, out, slot, _SUM))
                out.mul_(1.0 / divisor)
            else:  # the sum is added to main grads, or converted to fp32
                before = _share_before(self.world_size) if slot.dtype is torch.float16 else 1
                if before > 1:
                    slot.mul_(1.0 / before)
                total = slot.narrow(0, self.rank * out.numel(), out.numel())  # in place, which NCCL allows
                self._wait(_reduce_scatter_single(self.group, total, slot, _SUM))
                if accumulate:
                    out.add_(total, alpha=before / divisor)
                else:
                    # Copied first: in `total` the quotient would be rounded to 16 bits once more.
                    out.copy_(total).mul_(before / divisor)
        return None

    @staticmethod
    def _wait(work: Any) -> None:
        """Let the current stream wait. NCCL has run the collective there; other backends return its work."""
        if work is not None:
            work.wait()

    def _reduce_in_parts(self, reduction: Reduction) -> None:
        """Sum 16-bit gradients in fp32: convert a part of each rank's chunk, and reduce it, before the next part."""
        scratch, divisor = reduction.scratch, reduction.divisor
        staging = scratch.view(torch.float32)
        for chunks, part in self._parts(reduction, staging.numel()):
            sent = staging.narrow(0, 0, chunks.numel())
            sent.view_as(chunks).copy_(chunks)
            # To be added, a sum needs a place beside main grads; else it goes to main grads directly.
            total = sent.view_as(chunks)[self.rank] if reduction.accumulate else part
            self._wait(_reduce_scatter_single(self.group, total, sent, _SUM))
            part.add_(total, alpha=1.0 / divisor) if reduction.accumulate else part.mul_(1.0 / divisor)

    def _exchange(self, reduction: Reduction) -> None:
        """Exchange a part of each rank's chunk, and add what arrives to main grads in rank order, before the next."""
        sending, receiving = reduction.scratch.chunk(2)
        for chunks, part in self._parts(reduction, sending.numel()):
            sent, received = (room.narrow(0, 0, chunks.numel()) for room in (sending, receiving))
            sent.view_as(chunks).copy_(chunks)
            dist.all_to_all_single(received, sent, group=self.group)
            others = received.view_as(chunks).unbind()
            sum_in_rank_order(others, part, accumulate=reduction.accumulate, divisor=reduction.divisor)

    def _parts(self, reduction: Reduction, room: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Cut a reduction into parts: ([N, n] of the chunks of all ranks, [n] of main grads), N * n at most `room`."""
        chunks, out = reduction.slot.view(self.world_size, -1), reduction.out
        most = max(room // self.world_size, 1)
        for start in range(0, out.numel(), most):
            size = min(most, out.numel() - start)
            yield chunks.narrow(1, start, size), out.narrow(0, start, size)

    def start_flags(self, flags: torch.Tensor, gathered: torch.Tensor, tag: int) -> Work | None:
        """See `Transport.start_flags`. A tree reduces. A ring gathers: 2 ms with 1,024 ranks."""
        self._issue(RecordKind.GATHER, Collective.ALL_REDUCE, tag, reads=(flags,), writes=(gathered,))
        with self.streams.on(self.stream):
            gathered.copy_(flags)
            dist.all_reduce(gathered, op=dist.ReduceOp.MAX, group=self.group)
        return None

    def flags_numel(self, count: int) -> int:
        """See `Transport.flags_numel`."""
        return count

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        """A part of the gradients: in fp32 (`FP32`), or in their own dtype, one to send and one received."""
        if mode is ReductionMode.SUM_16 or (mode is ReductionMode.FP32 and dtype is torch.float32):
            return 0  # the slot takes the sum
        width = 2 if mode is ReductionMode.IN_ORDER else 4 // dtype.itemsize  # scratch elements per gradient
        bytes_each = min(limit, max(_STAGING_BYTES, _STAGING_BYTES_EACH * self.world_size)) // self.world_size
        part = max(bytes_each // (width * dtype.itemsize * _STAGING_ALIGNMENT), 1) * _STAGING_ALIGNMENT
        return width * self.world_size * min(part, shard_numel)

    def sent_dtype(self, mode: ReductionMode, dtype: torch.dtype) -> torch.dtype:
        """See `Transport.sent_dtype`."""
        return torch.float32 if mode is ReductionMode.FP32 else dtype

    def check_precision(self, precision: Precision) -> None:
        """See `Transport.check_precision`, and [Note: sums in 16 bits]."""
        dtype, size = precision.sent_grad_dtype, self.world_size
        if precision.reduction_mode is ReductionMode.SUM_16 and size > (most := int(2 / torch.finfo(dtype).eps)):
            what = f"reduce_dtype={dtype} on {size} ranks: a sum of more than {most} equal gradients stops growing"
            raise ConfigError(f"{what}: take reduce_dtype=torch.float32, or replicas (a mesh, replicate x shard)")


def _share_before(size: int) -> int:
    """The smallest power of two that is at least the root of `size`."""
    return 1 << ((size - 1).bit_length() + 1) // 2
