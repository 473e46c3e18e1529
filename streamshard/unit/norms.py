"""Norms of pieces: each rank keeps its own while they are stacked. Reading a value sums it over ranks, once.

So `torch.nn.utils.clip_grad_norm_` takes one collective, and not one for each gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.unit.global_ops import global_norm
from streamshard.unit.questions import SHAPE, is_metadata, name_of

__all__ = ["NORMS", "PartialNorm", "full_norms", "order_of"]

NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm))
_PARTIAL = (torch.stack, torch.Tensor.to, torch.Tensor.detach)

_AsTensors = torch._C.DisableTorchFunctionSubclass


class PartialNorm(torch.Tensor):
    """The norm of one or more pieces on this rank. Reading its value makes it the norm over all ranks: a collective.

    Shape [] for one piece, [k] for k stacked ones. Its memory is nan, for what would read it without asking.
    """

    local: torch.Tensor
    order: float
    ranks: Ranks
    _full: torch.Tensor | None

    @classmethod
    def wrap(cls, local: torch.Tensor, order: float, ranks: Ranks) -> PartialNorm:
        """`local`, of order `order` over this rank's elements, still to be reduced over ranks."""
        partial = _nan(local.dtype, local.device).expand(local.shape).as_subclass(cls)
        partial.local, partial.order, partial.ranks, partial._full = local, order, ranks, None
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
        with _AsTensors():
            if is_metadata(func) or name_of(func) in SHAPE:
                return func(*_swap(args, _local_of), **_swap(kwargs, _local_of))
            parts = list(args[0]) if func is torch.stack else args[:1]
            first = parts[0] if parts else None
            if isinstance(first, cls) and all(isinstance(part, cls) and part._adds_to(first) for part in parts):
                if func in _PARTIAL:
                    local = func(*_swap(args, _local_of), **_swap(kwargs, _local_of))
                    return first if local is first.local else cls.wrap(local, first.order, first.ranks)
                if func in NORMS and order_of(args, kwargs) == first.order != 0:
                    return global_norm(torch.linalg.vector_norm(first.local, first.order), first.order, first.ranks)
            args, kwargs = full_norms(args), full_norms(kwargs)
        return func(*args, **kwargs)  # other arguments may be pieces

    def _adds_to(self, other: PartialNorm) -> bool:
        return self._full is None and self.order == other.order and self.ranks.group is other.ranks.group


def order_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The order that a norm of all elements was asked for; None for any other norm."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    others = (*args[2:], *(value for key, value in kwargs.items() if key not in ("input", "A", "x", "ord", "p")))
    if any(value is not None and value is not False for value in others):
        return None
    return 2.0 if order in (None, "fro") else order


def _local_of(norm: PartialNorm) -> torch.Tensor:
    return norm.local


def _full_of(norm: PartialNorm) -> torch.Tensor:
    """Reduced once: what is written into it stays there."""
    if norm._full is None:
        norm._full = global_norm(norm.local, norm.order, norm.ranks)
    return norm._full


def full_norms(value: Any) -> Any:
    """`value`, or a list or dictionary of values, with norms over all ranks in the place of each `PartialNorm`."""
    return _swap(value, _full_of)


def _swap(value: Any, tensor_of: Callable[[PartialNorm], torch.Tensor]) -> Any:
    if isinstance(value, PartialNorm):
        return tensor_of(value)
    if type(value) in (list, tuple):
        return type(value)(_swap(item, tensor_of) for item in value)
    if type(value) is dict:
        return {key: _swap(item, tensor_of) for key, item in value.items()}
    return value


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), math.nan, dtype=dtype, device=device)
