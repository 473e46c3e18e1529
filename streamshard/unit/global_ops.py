"""Sums, norms and extremes over the elements of all ranks.

All ranks get the same number. Sums and norms may be part of a loss: a penalty. Each rank's loss may weigh the penalty
differently, and a parameter's gradient is the mean over ranks of what each loss has for it, as under
DistributedDataParallel. A piece lies on one rank only, so backward averages what flows back to the number over ranks (a
collective), and passes the average on to this rank's elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from streamshard.comm.ranks import Ranks

__all__ = ["global_extreme", "global_norm", "global_sum"]


def global_sum(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of `local`, any shape, over the ranks of the shard group. Collective, in backward as well."""
    total: torch.Tensor = _GlobalSum.apply(local, ranks)  # type: ignore[no-untyped-call]
    return total


def global_norm(local: torch.Tensor, order: float, ranks: Ranks) -> torch.Tensor:
    """The norm over all ranks from each rank's own.

    Args:
        local: norms of order `order` over this rank's elements, any shape.
        order: any real number; ``inf`` is the maximum, ``0`` counts nonzeros.
        ranks: its shard group is summed over. One collective, and another one in backward.

    Returns:
        Norms of the same shape, equal on all ranks. Those of order 0 and ``inf`` are not differentiated.
    """
    if math.isinf(order):
        return global_extreme(local.detach(), largest=order > 0, ranks=ranks)
    powers = local.to(torch.promote_types(local.dtype, torch.float32))  # 16 bits do not hold squares
    if order == 0:
        return global_sum(powers.detach(), ranks).to(local.dtype)
    total = global_sum(powers.pow(order), ranks)
    if order > 0 and total.requires_grad:  # torch's gradient of a norm of zeros is zero
        is_zero = total == 0.0
        return total.masked_fill(is_zero, 1.0).pow(1.0 / order).masked_fill(is_zero, 0.0).to(local.dtype)
    return total.pow(1.0 / order).to(local.dtype)


def global_extreme(local: torch.Tensor, *, largest: bool, ranks: Ranks) -> torch.Tensor:
    """The largest or smallest of `local`, any shape, over ranks. Collective. NaN wins on every backend, as in torch."""
    signed = local if largest else -local
    is_nan = signed.isnan()
    both = torch.stack([signed.masked_fill(is_nan, -math.inf), is_nan.to(signed.dtype)])
    ranks.all_reduce(both, maximum=True)
    found = both[0].masked_fill(both[1] > 0, math.nan)
    return found if largest else -found


class _GlobalSum(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _sum_over_ranks(local, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_ranks(grad, ctx.ranks).div_(ctx.ranks.world_size), None


def _sum_over_ranks(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(total)
    return total
