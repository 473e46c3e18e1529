"""Norms of pieces: local while they are stacked, summed over ranks once somebody looks at the value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.unit.global_ops import global_norm
from streamshard.unit.op_kinds import OpKind, kind_of

__all__ = ["PartialNorm", "local_norm", "look_at_norms"]

_AsTensors = torch._C.DisableTorchFunctionSubclass
_PARTIAL = (torch.stack, torch.Tensor.to, torch.Tensor.detach)
_PRINTING = ("__repr__", "__str__", "__format__")  # questions, but about the value


class PartialNorm(torch.Tensor):
    """The norm of one or more pieces on this rank. Looking at its value makes it the norm over all ranks: a collective.

    Shape [] for one piece, [k] for k stacked ones. Its memory is nan, for what would read it without asking.
    """

    local: torch.Tensor
    order: float
    ranks: Ranks
    _whole: torch.Tensor | None

    @classmethod
    def wrap(cls, local: torch.Tensor, order: float, ranks: Ranks) -> PartialNorm:
        """`local`, of order `order` over this rank's elements, still to be reduced over ranks."""
        partial = _nan(local.dtype, local.device).expand(local.shape).as_subclass(cls)
        partial.local, partial.order, partial.ranks, partial._whole = local, order, ranks, None
        return partial

    @classmethod
    @skip  # compiled functions break here: what other ranks have is not in their graphs
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stacks and moves stay partial; the norm of norms is reduced once; anything else sees the reduced value."""
        return untraced(cls._answer, func, args, kwargs or {})

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        kind = kind_of(func)
        with _AsTensors():
            if kind is OpKind.QUESTION and func.__name__ not in _PRINTING:  # of its form
                return func(*_swap(args, _local_of), **_swap(kwargs, _local_of))
            parts = list(args[0]) if func is torch.stack else args[:1]
            first = parts[0] if parts else None
            if isinstance(first, cls) and all(isinstance(part, cls) and part._adds_to(first) for part in parts):
                if func in _PARTIAL:
                    local = func(*_swap(args, _local_of), **_swap(kwargs, _local_of))
                    return first if local is first.local else cls.wrap(local, first.order, first.ranks)
                if kind is OpKind.NORM and _is_norm_of_all(func, args, kwargs):
                    return global_norm(torch.linalg.vector_norm(first.local, first.order), first.order, first.ranks)
            args, kwargs = _swap(args, _whole_of), _swap(kwargs, _whole_of)
        return func(*args, **kwargs)  # what it is put together with may be pieces

    def _adds_to(self, other: PartialNorm) -> bool:
        return self._whole is None and self.order == other.order and self.ranks.group is other.ranks.group


def _is_norm_of_all(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    return len(args) <= 2 and kwargs.get("dim") is None and (2.0 if order is None else order) == args[0].order != 0


def _local_of(norm: PartialNorm) -> torch.Tensor:
    return norm.local


def _whole_of(norm: PartialNorm) -> torch.Tensor:
    """Reduced once: what is written into it stays there."""
    if norm._whole is None:
        norm._whole = global_norm(norm.local, norm.order, norm.ranks)
    return norm._whole


def look_at_norms(value: Any) -> Any:
    """`value`, or a list or dictionary of values, with what norms are over all ranks."""
    return _swap(value, _whole_of)


def _swap(value: Any, tensor_of: Callable[[PartialNorm], torch.Tensor]) -> Any:
    if isinstance(value, PartialNorm):
        return tensor_of(value)
    if type(value) in (list, tuple):
        return type(value)(_swap(item, tensor_of) for item in value)
    if type(value) is dict:
        return {key: _swap(item, tensor_of) for key, item in value.items()}
    return value


def local_norm(piece: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of this rank's piece; of an empty one what does not count in a sum or a maximum."""
    if piece.numel():
        norm: torch.Tensor = torch.linalg.vector_norm(piece, order)
        return norm
    return piece.sum() + (math.inf if order < 0 else 0.0)  # in a graph where that of other ranks is


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), math.nan, dtype=dtype, device=device)
