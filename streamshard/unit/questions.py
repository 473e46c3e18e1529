"""The functions of torch that ask about a tensor and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SHAPE", "is_metadata", "name_of", "names"]


def names(text: str) -> frozenset[str]:
    """Of a list with spaces between."""
    return frozenset(text.split())


# Functions and attributes that a piece answers for the full tensor.
SHAPE = names("__len__ dim is_same_size nbytes ndim ndimension nelement numel shape size stride")
# Functions that a piece answers for itself: dtype, device, autograd. None of them reads values.
_METADATA = names(
    """
    __dir__ __hash__ _has_compatible_shallow_copy_type _is_view _is_zerotensor dim_order element_size get_device
    has_names is_coalesced is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_set_to
    is_shared is_signed new_empty new_full new_ones new_zeros record_stream register_post_accumulate_grad_hook
    result_type retain_grad storage_offset untyped_storage
    """
)
_TENSORS = names("H T data grad imag mH mT real")  # attributes that are tensors
_ACCESS = ("__get__", "__set__", "__delete__")


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function that ``__torch_function__`` gets; of an attribute's getter or setter, the attribute's."""
    name: str = getattr(func, "__name__", "")
    return str(getattr(getattr(func, "__self__", None), "__name__", "")) if name in _ACCESS else name


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether a piece answers for itself; every attribute that is neither a tensor nor about the shape is metadata."""
    name = name_of(func)
    is_attribute = getattr(func, "__name__", "") in _ACCESS
    return name in _METADATA or is_attribute and name not in SHAPE | _TENSORS
