"""Sums, norms and extremes over the elements of all ranks, which may be differentiated.

All ranks get the same number, and each may have another loss that reads it. The gradient of a parameter is the mean
over ranks of what each loss has for it, as under DistributedDataParallel, and a piece is on one rank only: so what
flows back to such a number is averaged over ranks (a collective in backward), and goes on to this rank's elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from streamshard.comm.ranks import Ranks

__all__ = ["global_extreme", "global_mean", "global_norm", "global_sum", "part_of", "replicate"]


def global_sum(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of `local`, any shape, over the ranks of the shard group. Collective."""
    if torch.is_grad_enabled() and local.requires_grad:
        total: torch.Tensor = _GlobalSum.apply(local, ranks)  # type: ignore[no-untyped-call]
        return total
    return _sum_over_ranks(local, ranks)


def global_mean(local: torch.Tensor, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    """The mean of all elements, of which `local` are this rank's, maybe none. Collective.

    Returns:
        [] `dtype`
    """
    total = local.sum(dtype=torch.float64)
    both = global_sum(torch.stack([total, total.new_tensor(local.numel())]), ranks)
    return (both[0] / both[1]).to(dtype)


def global_norm(local: torch.Tensor, order: float, ranks: Ranks) -> torch.Tensor:
    """The norm over all ranks from each rank's own.

    Args:
        local: norms of order `order` over this rank's elements, any shape.
        order: any real number; ``inf`` is the maximum, ``0`` counts nonzeros.
        ranks: its shard group is summed over. One collective, and another one in backward.

    Returns:
        Norms of the same shape, equal on all ranks. Those of order 0 and ``inf`` are not differentiated.
    """
    if order == 0 or math.isinf(order) or not (torch.is_grad_enabled() and local.requires_grad):
        return _norm_over_ranks(local.detach(), order, ranks)
    norm: torch.Tensor = _GlobalNorm.apply(local, order, ranks)  # type: ignore[no-untyped-call]
    return norm


def global_extreme(local: torch.Tensor, *, largest: bool, ranks: Ranks) -> torch.Tensor:
    """The largest or smallest of all elements, of which `local` are this rank's, maybe none. Collective.

    Elements that share it share its gradient evenly, as in ``torch.amax``.

    Returns:
        []
    """
    if not local.is_floating_point():  # counts and masks
        return global_extreme(local.double(), largest=largest, ranks=ranks).to(local.dtype)
    signed = local.detach() if largest else -local.detach()
    own = signed.amax() if local.numel() else signed.new_full((), -math.inf)
    found = _maximum(own, ranks)
    found = found if largest else -found
    if not (torch.is_grad_enabled() and local.requires_grad):
        return found
    is_it = (local.detach() == found) | (local.detach().isnan() & found.isnan())
    count = global_sum(is_it.sum().to(local.dtype), ranks)
    share = global_sum((local * is_it).sum(), ranks) / count
    return share + (found - share.detach()).nan_to_num(0.0)  # the value itself, not a sum of many divided by many


def replicate(number: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """`number`, which is the same on all ranks, for each of this rank's elements. Collective in backward.

    What flows back is of this rank's elements alone: summed over ranks it is of all.
    """
    replicated: torch.Tensor = _Replicate.apply(number, ranks)  # type: ignore[no-untyped-call]
    return replicated


def part_of(whole: torch.Tensor, runs: Sequence[tuple[int, int]], ranks: Ranks) -> torch.Tensor:
    """Of `whole`, flattened, which every rank has, this rank's elements, in one dimension. Collective in backward.

    All elements get their gradient on all ranks, put together from what flows back to the ranks' own parts.
    """
    part: torch.Tensor = _PartOf.apply(whole, runs, ranks)  # type: ignore[no-untyped-call]
    return part


class _PartOf(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, runs: Sequence[tuple[int, int]], ranks: Ranks) -> torch.Tensor:
        ctx.shape, ctx.runs, ctx.ranks = whole.shape, runs, ranks
        flat = whole.reshape(-1)
        return torch.cat([flat[start:stop] for start, stop in runs] or [flat[:0]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = grad.new_zeros(ctx.shape)
        parts = grad.split([stop - start for start, stop in ctx.runs])
        for (start, stop), part in zip(ctx.runs, parts, strict=True):
            whole.view(-1)[start:stop] = part
        ctx.ranks.all_reduce(whole)
        return whole, None, None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return number.view_as(number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_ranks(grad, ctx.ranks), None


class _GlobalSum(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return _sum_over_ranks(local, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _mean_over_ranks(grad, ctx.ranks), None


class _GlobalNorm(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, order: float, ranks: Ranks) -> torch.Tensor:
        norm = _norm_over_ranks(local, order, ranks)
        ctx.order, ctx.ranks = order, ranks
        ctx.save_for_backward(local, norm)
        return norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        local, norm = ctx.saved_tensors
        share = torch.where(local == 0.0, 0.0, local / norm).pow(ctx.order - 1.0)
        return _mean_over_ranks(grad, ctx.ranks) * share, None, None


def _mean_over_ranks(grad: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return _sum_over_ranks(grad, ranks).div_(ranks.world_size)


def _sum_over_ranks(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(total)
    return total


def _norm_over_ranks(local: torch.Tensor, order: float, ranks: Ranks) -> torch.Tensor:
    if math.isinf(order):
        return _maximum(local, ranks) if order > 0 else -_maximum(-local, ranks)
    total = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)  # squares that 16 bits do not hold
    total = total if order == 0 else total.pow(order)
    ranks.all_reduce(total)
    return (total if order == 0 else total.pow(1.0 / order)).to(local.dtype)


def _maximum(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The maximum over ranks; nan counts as the largest, as torch has it, whatever a backend makes of it."""
    is_nan = local.isnan()
    both = torch.stack([local.masked_fill(is_nan, -math.inf), is_nan.to(local.dtype)])
    ranks.all_reduce(both, maximum=True)
    return both[0].masked_fill(both[1] > 0, math.nan)
