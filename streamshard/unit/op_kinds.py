"""What torch's operations do to a piece of a gradient or weight: which keep it a piece, and which need other ranks.

Only the name of an operation is looked at, once; torch itself says which ones work element by element.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OpKind", "is_attribute", "kind_of"]


class OpKind(enum.Enum):
    """What an operation makes of pieces."""

    ELEMENTWISE = "an element for each of the piece's, that depends on no other"
    VIEW = "the same elements in another shape"
    FORM = "a question about shape"
    QUESTION = "another, about dtype, autograd or memory; nothing is computed"
    GRADIENT = "gradients, of pieces"
    HOOK = "called with a gradient"
    RANDOM = "every element is drawn anew, whatever it was"
    NORM = "a vector norm of one piece"
    FOREACH_NORM = "one norm for each of several pieces"
    NON_FINITE_CHECK = "a loss scaler's"
    REDUCTION = "one number of all elements, that ranks can put together from their own"
    JOIN = "pieces one behind the other"
    PART = "some elements, by place"
    ASSIGNMENT = "some elements are overwritten"
    NUMBER = "the value of the only element, or its text"
    OTHER = "elements are mixed, or leave torch"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DUNDERS = {
    "__eq__": "eq",
    "__ne__": "ne",
    "__rsub__": "sub",
    "__rdiv__": "div",
    "__rpow__": "pow",
    "__floordiv__": "div",
    "__rfloordiv__": "div",
    "__rmod__": "remainder",
    "__ipow__": "pow",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__pos__": "positive",
    "__get__": "data",
    "__set__": "data",
}
# Those that torch's tag leaves out: other names, copies, views that keep all elements, what draws by what it is given.
_ELEMENTWISE = _names(
    """
    absolute alias arccos arccosh arcsin arcsinh arctan arctan2 arctanh bfloat16 bool clone conj constant contiguous
    copy cpu cuda data detach divide double empty_like fill float floor_divide full_like greater greater_equal half int
    isclose isreal less less_equal logical_and long multiply negative not_equal ones_like pin_memory requires_grad
    resolve_conj resolve_neg subtract to to_dense type type_as where zero zeros_like
    """
)
_VIEWS = _names(
    """
    adjoint expand expand_as flatten moveaxis movedim permute ravel reshape reshape_as squeeze swapaxes swapdims t
    transpose unflatten unsqueeze view view_as H T mH mT
    """
)
_RANDOM = _names(
    """
    bernoulli_ cauchy_ exponential_ geometric_ kaiming_normal_ kaiming_uniform_ log_normal_ normal_ rand_like
    randint_like randn_like random_ uniform_
    """
)
_QUESTIONS = _names(
    """
    __dir__ __hash__ __repr__ __str__ _has_compatible_shallow_copy_type _is_view _is_zerotensor
    data_ptr dim_order element_size get_device has_names is_coalesced is_complex is_conj is_contiguous is_cuda
    is_floating_point is_inference is_neg is_pinned is_quantized is_set_to is_shared is_signed is_sparse new_empty
    new_full new_ones new_tensor new_zeros record_stream register_post_accumulate_grad_hook result_type
    retain_grad share_memory_ storage storage_offset untyped_storage
    """
)
_QUESTIONED = _names(  # attributes; those that are tensors are elementwise
    """
    _backward_hooks _cdata _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch _version device
    dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_xla is_xpu itemsize layout name output_nr requires_grad retains_grad
    """
)
_FORMS = _names("__len__ dim is_same_size nbytes ndim ndimension nelement numel shape size stride")
_NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm))
_REDUCTIONS = _names("sum nansum mean max min amax amin any all count_nonzero dot vdot equal allclose")
_JOINS = frozenset(("cat", "concat", "concatenate", "hstack"))
_NUMBERS = _names("item __float__ __int__ __bool__ __index__ __format__")
_PARTS = _names("__getitem__ chunk narrow select split split_with_sizes unbind")

_kinds: dict[Callable[..., Any], OpKind] = {}


def kind_of(func: Callable[..., Any]) -> OpKind:
    """The kind of a function that ``__torch_function__`` is given."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _kind_by_name(func, getattr(func, "__name__", ""))
    return kind


def is_attribute(func: Callable[..., Any], *names: str) -> bool:
    """Whether `func` reads an attribute of one of these names."""
    return _attribute(func) in names


def _attribute(func: Callable[..., Any]) -> str:
    """Which attribute is read, if one is."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else ""


def _kind_by_name(func: Callable[..., Any], name: str) -> OpKind:
    if func is torch.autograd.grad:
        return OpKind.GRADIENT
    if func is torch.autograd.backward:
        return OpKind.QUESTION
    if name == "register_hook":
        return OpKind.HOOK
    if name in _RANDOM:
        return OpKind.RANDOM
    if func in _NORMS:
        return OpKind.NORM
    if func is torch._foreach_norm:
        return OpKind.FOREACH_NORM
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        return OpKind.NON_FINITE_CHECK
    if name in _QUESTIONS or _attribute(func) in _QUESTIONED:
        return OpKind.QUESTION
    if name in _FORMS or _attribute(func) in _FORMS:
        return OpKind.FORM
    if name.rstrip("_") in _VIEWS or _attribute(func) in _VIEWS:
        return OpKind.VIEW
    if name in _REDUCTIONS:
        return OpKind.REDUCTION
    if name in _JOINS:
        return OpKind.JOIN
    if name in _PARTS:
        return OpKind.PART
    if name == "__setitem__":
        return OpKind.ASSIGNMENT
    if name in _NUMBERS:
        return OpKind.NUMBER
    if name.startswith("_fused_"):  # torch's fused optimizers
        return OpKind.ELEMENTWISE
    base = _DUNDERS.get(name, name).removeprefix("_foreach_").rstrip("_")
    is_list_reduction = name.startswith("_foreach_") and base in _REDUCTIONS
    if not is_list_reduction and (base in _ELEMENTWISE or _is_pointwise(base)):
        return OpKind.ELEMENTWISE
    return OpKind.OTHER


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
