"""What torch's functions need to know of a tensor: its values, its shape, or neither.

``__torch_function__`` gets a function. Its name tells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm))


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


# Functions and attributes that a piece answers for the full tensor.
SHAPE = names("__len__ dim is_same_size nbytes ndim ndimension nelement numel shape size stride")
# Functions that a piece answers for itself: dtype, device, autograd. None of them reads values.
_METADATA = names(
    """
    __dir__ __hash__ _has_compatible_shallow_copy_type _is_view _is_zerotensor dim_order element_size get_device
    has_names is_coalesced is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_set_to
    is_shared is_signed new_empty new_full new_ones new_tensor new_zeros record_stream
    register_post_accumulate_grad_hook result_type retain_grad storage_offset untyped_storage
    """
)
# What a piece computes with this rank's elements: functions, methods, attributes and, without the prefix
# ``_foreach_``, functions of lists. Underscores are stripped, so a name stands for the in-place operation and the
# operator too.
ELEMENTWISE = names(
    """
    abs absolute add addcdiv addcmul alias and bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp
    clamp_max clamp_min clip clone constant contiguous copy cos cpu cuda data detach div divide double empty_like eq erf
    erfinv exp expand_as expm1 fill float floor floor_divide floordiv full_like ge grad greater greater_equal gt half
    iadd iand idiv imul int invert ior ipow isclose isfinite isinf isnan isub itruediv ixor le lerp less less_equal log
    log1p log2 logical_and logical_not logical_or logical_xor long lt masked_fill maximum minimum mul multiply
    nan_to_num ne neg negative not_equal ones ones_like or pos positive pow radd rdiv real reciprocal relu remainder
    requires_grad rfloordiv rmul round rpow rsqrt rsub rtruediv sgn sigmoid sign sin sqrt square sub subtract tanh to
    true_divide truediv trunc type view_as where xor zero zeros zeros_like
    """
)
_TENSORS = names("H T data grad imag mH mT real")  # attributes that are tensors
_ACCESS = ("__get__", "__set__", "__delete__")


def name_of(func: Callable[..., Any]) -> str:
    """The name of a function that ``__torch_function__`` gets; of an attribute's getter or setter, the attribute's."""
    name: str = getattr(func, "__name__", "")
    return str(getattr(getattr(func, "__self__", None), "__name__", "")) if name in _ACCESS else name


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether a piece answers for itself. Attributes are metadata, except tensors and questions about the shape."""
    name = name_of(func)
    is_attribute = getattr(func, "__name__", "") in _ACCESS
    return name in _METADATA or is_attribute and name not in SHAPE | _TENSORS


def is_init(func: Callable[..., Any]) -> bool:
    """Whether `func` is of torch.nn.init: it fills a parameter without a graph."""
    return getattr(func, "__module__", None) == "torch.nn.init"


@functools.cache
def answers_without_values(func: Callable[..., Any]) -> bool:
    """Whether a tensor's shape, dtype, device and place in autograd answer `func`."""
    return is_metadata(func) or name_of(func) in SHAPE


def order_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The order that a norm of all elements was asked for, in whatever dtype; None for any other norm."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    known = names("input A x ord p dtype")
    others = (*args[2:], *(value for key, value in kwargs.items() if key not in known))
    if any(value is not None and value is not False for value in others):
        return None
    if order in (None, "fro"):
        return 2.0
    is_of_elements = isinstance(order, int | float) and order > 0 and func is not torch.linalg.norm  # else of a matrix
    return float(order) if is_of_elements else None
