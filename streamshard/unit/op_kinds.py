"""What torch's operations do to a piece of a gradient or weight: which keep it a piece, and which need other ranks.

Only the name of an operation is looked at, once; torch itself says which ones work element by element.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OpKind", "asks_for_shape", "kind_of"]


class OpKind(enum.Enum):
    """What an operation makes of pieces."""

    ELEMENTWISE = "an element for each of the piece's, that depends on no other; or the piece in another shape"
    QUESTION = "about shape, dtype or memory; nothing is computed"
    RANDOM = "every element is drawn anew, whatever it was"
    NORM = "a vector norm of one piece"
    FOREACH_NORM = "one norm for each of several pieces"
    NON_FINITE_CHECK = "a loss scaler's"
    REDUCTION = "one number of all elements, that ranks can put together from their own"
    JOIN = "pieces one behind the other"
    PART = "some elements, by place"
    ASSIGNMENT = "some elements are overwritten"
    NUMBER = "the value of the only element"
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
    absolute adjoint alias arccos arccosh arcsin arcsinh arctan arctan2 arctanh bernoulli bfloat16 bool clone conj
    contiguous copy cpu cuda data detach divide double dropout empty_like expand expand_as fill flatten float
    floor_divide full_like greater greater_equal half int isclose isreal less less_equal logical_and long movedim
    multiply negative normal not_equal ones_like permute pin_memory ravel requires_grad reshape reshape_as resolve_conj
    resolve_neg squeeze subtract swapaxes swapdims t to to_dense transpose type type_as unflatten unsqueeze view
    view_as where zero zeros_like
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
    __dir__ __format__ __hash__ __len__ __repr__ __str__ _has_compatible_shallow_copy_type _is_view _is_zerotensor
    data_ptr dim dim_order element_size get_device has_names is_coalesced is_complex is_conj is_contiguous is_cuda
    is_floating_point is_inference is_neg is_pinned is_quantized is_same_size is_set_to is_shared is_signed
    is_sparse ndimension nelement new_empty new_full new_ones new_tensor new_zeros numel record_stream
    register_hook register_post_accumulate_grad_hook result_type retain_grad share_memory_ size storage
    storage_offset stride untyped_storage
    """
)
_QUESTIONED = _names(  # attributes; those that are tensors are elementwise
    """
    _backward_hooks _cdata _has_symbolic_sizes_strides _post_accumulate_grad_hooks _python_dispatch _version device
    dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr
    is_xla is_xpu itemsize layout name nbytes ndim output_nr requires_grad retains_grad shape
    """
)
_SHAPES = _names("__len__ dim ndim ndimension numel shape size stride")
_NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm))
_REDUCTIONS = _names("sum nansum mean max min amax amin any all count_nonzero dot vdot equal allclose")
_JOINS = frozenset(("cat", "concat", "concatenate", "hstack"))
_NUMBERS = frozenset(("item", "__float__", "__int__", "__bool__", "__index__"))
_PARTS = frozenset(("__getitem__", "narrow", "split", "split_with_sizes"))

_kinds: dict[Callable[..., Any], OpKind] = {}


def kind_of(func: Callable[..., Any]) -> OpKind:
    """The kind of a function that ``__torch_function__`` is given."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _kind_by_name(func, getattr(func, "__name__", ""))
    return kind


def asks_for_shape(func: Callable[..., Any]) -> bool:
    """Whether `func` is a question about size, or its answer depends on it."""
    return func.__name__ in _SHAPES or _attribute(func) in _SHAPES


def _attribute(func: Callable[..., Any]) -> str:
    """Which attribute is read, if one is."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else ""


def _kind_by_name(func: Callable[..., Any], name: str) -> OpKind:
    if func in (torch.autograd.grad, torch.autograd.backward):  # what they are asked of are pieces like others
        return OpKind.QUESTION
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
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
