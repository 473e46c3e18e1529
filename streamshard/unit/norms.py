"""Norms of pieces: local while they are stacked, summed over ranks once somebody looks at the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from streamshard.comm.ranks import Ranks
from streamshard.unit.grad_ops import OpKind, kind_of

__all__ = ["PartialNorm", "local_norm", "maximum", "reduce_norms"]


class PartialNorm(torch.Tensor):
    """The norm of one or more pieces on this rank. Looking at its value makes it the norm over all ranks: a collective.

    Shape [] for one piece, [k] for k stacked ones.
    """

    ranks: Ranks
    order: float

    @classmethod
    def wrap(cls, norm: torch.Tensor, order: float, ranks: Ranks) -> PartialNorm:
        """`norm`, of order `order` over this rank's elements, still to be reduced over ranks."""
        partial = norm.as_subclass(cls)
        partial.ranks = ranks
        partial.order = order
        return partial

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stacks and moves stay partial; the norm of norms is reduced once; anything else sees the reduced value."""
        kwargs = kwargs or {}
        if func in (torch.stack, torch.Tensor.to, torch.Tensor.detach):
            parts = list(args[0]) if func is torch.stack else [args[0]]
            if all(isinstance(part, cls) and part._adds_to(parts[0]) for part in parts):
                with torch._C.DisableTorchFunctionSubclass():
                    return cls.wrap(func(*args, **kwargs), parts[0].order, parts[0].ranks)
        if kind_of(func) is OpKind.NORM and isinstance(args[0], cls) and _is_norm_of_all(func, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                local = torch.linalg.vector_norm(args[0], args[0].order)
                return reduce_norms(local, args[0].order, args[0].ranks)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_reduced(args), **{key: _reduced_one(value) for key, value in kwargs.items()})

    def _adds_to(self, other: PartialNorm) -> bool:
        return self.order == other.order and self.ranks.group is other.ranks.group


def _is_norm_of_all(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    return len(args) <= 2 and kwargs.get("dim") is None and (2.0 if order is None else order) == args[0].order != 0


def _reduced_one(value: Any) -> Any:
    if isinstance(value, PartialNorm):
        plain = value.as_subclass(torch.Tensor)
        return reduce_norms(plain, value.order, value.ranks)
    if isinstance(value, list | tuple):
        return type(value)(_reduced(value))
    return value


def _reduced(values: Iterable[Any]) -> list[Any]:
    return [_reduced_one(value) for value in values]


def reduce_norms(local: torch.Tensor, order: float, ranks: Ranks) -> torch.Tensor:
    """The norm over all ranks from each rank's own.

    Args:
        local: norms of order `order` over this rank's elements, any shape.
        order: any real number; ``inf`` is the maximum, ``0`` counts nonzeros.
        ranks: its shard group is summed over. One collective.

    Returns:
        Norms of the same shape, equal on all ranks.
    """
    if math.isinf(order):
        return maximum(local, ranks) if order > 0 else -maximum(-local, ranks)
    total = local.clone() if order == 0 else local.pow(order)
    ranks.all_reduce(total)
    return total if order == 0 else total.pow(1.0 / order)


def maximum(local: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The maximum over ranks; nan counts as the largest, as torch has it, whatever a backend makes of it."""
    is_nan = local.isnan()
    both = torch.stack([local.masked_fill(is_nan, -math.inf), is_nan.to(local.dtype)])
    ranks.all_reduce(both, maximum=True)
    return both[0].masked_fill(both[1] > 0, math.nan)


def local_norm(piece: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of this rank's piece; of an empty one what does not count in a sum or a maximum."""
    if piece.numel():
        norm: torch.Tensor = torch.linalg.vector_norm(piece, order)
        return norm
    return piece.new_full((), math.inf if order < 0 else 0.0)
