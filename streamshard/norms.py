"""Norms of this rank's elements, in fp64, and norms, sums and extremes over the elements of all ranks.

The latter are collectives of the shard group: all its ranks get the same number.

[Note: norms]
A norm has the same bits on any number of ranks, and clipping with it. The order of a sum depends on how elements are
cut over ranks, and torch chooses it by shapes and threads. So elements are converted to fp64, and squared and added
there, over ranks too. Another order changes such a sum by about 1e-16 of it. The norm is rounded to fp32 last. Two sums
that differ so little round to two numbers about once in 10^8 norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from streamshard.comm.communicator import Communicator

_CHUNK = 1 << 18  # elements converted at once on the CPU. Smaller chunks of large tensors are slower to read
_GROUP = 1 << 17  # elements of small tensors, converted by one call


def local_norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor.

    Args:
        tensors: any shapes, floating-point, on one device, without graphs.
        order: of the norm.

    Returns:
        For each one [] fp64.
    """
    if not tensors:
        return []
    if tensors[0].device.type != "cpu":
        if math.isinf(order):  # torch has no extreme of a piece without elements
            tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
        return list(torch._foreach_norm(list(tensors), order, torch.float64))
    most = min(_CHUNK, sum(tensor.numel() for tensor in tensors))
    buffer = torch.empty(most, dtype=torch.float64, device="cpu")
    if order != 2.0:
        return [
            torch.linalg.vector_norm(tensor, order, dtype=torch.float64) if tensor.numel() else buffer.new_zeros(())
            for tensor in tensors
        ]
    norms: list[torch.Tensor] = []
    for group in _groups(tensors):
        if len(group) == 1:
            norms.append(_norm_of_one(group[0], buffer))
        else:  # one call for all of them: calls take longer than their elements
            sizes = [tensor.numel() for tensor in group]
            wide = buffer[: sum(sizes)].split(sizes)
            torch._foreach_copy_(wide, group)
            norms += torch._foreach_norm(wide, 2.0)
    return norms


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All tensors, flat and in order, by groups of at most `_GROUP` elements. A larger tensor is alone."""
    group: list[torch.Tensor] = []
    numel = 0
    for tensor in tensors:
        if group and numel + tensor.numel() > _GROUP:
            yield group
            group, numel = [], 0
        group.append(tensor if tensor.ndim == 1 else tensor.reshape(-1))
        numel += tensor.numel()
    yield group


def _norm_of_one(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Torch's own norms in fp64 take 20 times as long as in fp32 on the CPU."""
    squares = []
    for chunk in tensor.split(_CHUNK) if tensor.numel() > _CHUNK else [tensor]:
        wide = buffer[: chunk.numel()].copy_(chunk)
        squares.append(torch.dot(wide, wide))
    return (torch.stack(squares).sum() if squares[1:] else squares[0]).sqrt_()


# -- over all ranks --------------------------------------------------------------------------------------------------


class _GlobalSum(Function):
    """The sum over ranks, which may be part of a loss.

    Each rank's loss may weigh a penalty differently, and a parameter's gradient is the mean of all ranks' gradients, or
    their sum divided by another number. One rank holds each element. So backward reduces the incoming gradient as
    gradients are reduced.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.ranks = ranks
        total = local.clone(memory_format=torch.contiguous_format)  # the all-reduce is in place
        ranks.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.ranks.all_reduce(total)
        return total.div_(ctx.ranks.grad_divisor * ctx.ranks.n_parts), None  # parts share a loss: it counts once


def global_sum(local: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """The sum of `local`, any shape, over ranks: the same shape."""
    return cast(torch.Tensor, _GlobalSum.apply(local, ranks))  # type: ignore[no-untyped-call]


def global_norm(
    local: torch.Tensor,
    order: float,
    ranks: Communicator,
    counted: Callable[[torch.Tensor], torch.Tensor] = lambda power: power,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The norm over all ranks from each rank's own. One collective, and another one in backward.

    Args:
        local: fp64, norms of order `order` over this rank's elements, any shape.
        order: a positive number; ``inf`` is the maximum, which has no gradient.
        ranks: its shard group is summed over.
        counted: see `Piece.counted`.
        dtype: of the result, to which it is rounded. See [Note: norms].
    """
    if math.isinf(order):
        return global_extreme(local.detach(), largest=True, ranks=ranks).to(dtype)
    total = global_sum(counted(local.pow(order)), ranks)
    if total.requires_grad:  # torch's gradient of a norm of zeros is zero
        is_zero = total == 0.0
        return total.masked_fill(is_zero, 1.0).pow(1.0 / order).masked_fill(is_zero, 0.0).to(dtype)
    return total.pow(1.0 / order).to(dtype)


def global_extreme(local: torch.Tensor, *, largest: bool, ranks: Communicator) -> torch.Tensor:
    """The largest or smallest of `local`, any shape, over ranks. NaN wins on every backend, as in torch."""
    signed = local if largest else -local
    is_nan = signed.isnan()
    both = torch.stack([signed.masked_fill(is_nan, -math.inf), is_nan.to(signed.dtype)])
    ranks.all_reduce(both, maximum=True)
    found = both[0].masked_fill(both[1] > 0, math.nan)
    return found if largest else -found
