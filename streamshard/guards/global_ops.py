"""Sums, norms and extremes over the elements of all ranks, and the names of functions that need no elements.

Collectives of the shard group; all ranks get the same number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError
from streamshard.nested import map_tensors, tensors_in
from streamshard.torch_private import AsTensors, skip, untraced

NORMS = frozenset((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm))

# -- functions that need no elements ----------------------------------------------------------------------------------


def names(text: str) -> frozenset[str]:
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


@functools.cache
def answers_without_values(func: Callable[..., Any]) -> bool:
    """Whether a tensor's shape, dtype, device and place in autograd answer `func`."""
    return is_metadata(func) or name_of(func) in SHAPE


# -- collectives ------------------------------------------------------------------------------------------------------


class _GlobalSum(Function):
    """The sum over ranks, which may be part of a loss.

    Each rank's loss may weigh a penalty differently, and a parameter's gradient is the mean of all ranks' gradients, or
    their sum divided by another number. One rank holds each element. So backward reduces the incoming gradient as
    gradients are reduced.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.ranks = ranks
        return _sum_over_ranks(local, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_ranks(grad, ctx.ranks).div_(ctx.ranks.grad_divisor * ctx.ranks.n_parts), None


def _sum_over_ranks(local: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    total = local.clone(memory_format=torch.contiguous_format)
    ranks.all_reduce(total)
    return total


def global_sum(local: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    total: torch.Tensor = _GlobalSum.apply(local, ranks)  # type: ignore[no-untyped-call]
    return total


def global_norm(
    local: torch.Tensor,
    order: float,
    ranks: Communicator,
    counted: Callable[[torch.Tensor], torch.Tensor] = lambda power: power,
) -> torch.Tensor:
    """The norm over all ranks from each rank's own. One collective, and another one in backward.

    Args:
        local: norms of order `order` over this rank's elements, any shape.
        order: a positive number; ``inf`` is the maximum, which has no gradient.
        ranks: its shard group is summed over.
        counted: see `Piece.counted`.
    """
    if math.isinf(order):
        return global_extreme(local.detach(), largest=order > 0, ranks=ranks)
    powers = local.to(torch.promote_types(local.dtype, torch.float32))  # 16 bits do not hold squares
    total = global_sum(counted(powers.pow(order)), ranks)
    if total.requires_grad:  # torch's gradient of a norm of zeros is zero
        is_zero = total == 0.0
        return total.masked_fill(is_zero, 1.0).pow(1.0 / order).masked_fill(is_zero, 0.0).to(local.dtype)
    return total.pow(1.0 / order).to(local.dtype)


def global_extreme(local: torch.Tensor, *, largest: bool, ranks: Communicator) -> torch.Tensor:
    """The largest or smallest of `local`, any shape, over ranks. NaN wins on every backend, as in torch."""
    signed = local if largest else -local
    is_nan = signed.isnan()
    both = torch.stack([signed.masked_fill(is_nan, -math.inf), is_nan.to(signed.dtype)])
    ranks.all_reduce(both, maximum=True)
    found = both[0].masked_fill(both[1] > 0, math.nan)
    return found if largest else -found


def extreme(values: torch.Tensor, *, largest: bool, ranks: Communicator) -> torch.Tensor:
    """The largest or smallest of `values`, [n] on each rank, in fp32 or more. Without gradient."""
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    if not values.numel():
        values = values.new_full((1,), -math.inf if largest else math.inf)
    return global_extreme(values.amax() if largest else values.amin(), largest=largest, ranks=ranks)


def order_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The order that a norm of all elements was asked for; None for any other norm."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    others = (*args[2:], *(value for key, value in kwargs.items() if key not in ("input", "A", "x", "ord", "p")))
    if any(value is not None and value is not False for value in others):
        return None
    if order in (None, "fro"):
        return 2.0
    is_of_elements = isinstance(order, int | float) and order > 0 and func is not torch.linalg.norm  # else of a matrix
    return float(order) if is_of_elements else None


class PartialNorm(torch.Tensor):
    """The norm of one or more pieces on this rank. Reading its value makes it the norm over all ranks: a collective.

    So `torch.nn.utils.clip_grad_norm_`, which stacks the norms of all gradients, takes one collective. Shape [] for one
    piece, [k] for k stacked ones. Its memory is nan, for code that reads memory without asking.
    """

    local: torch.Tensor
    order: float
    ranks: Communicator
    _full: torch.Tensor | None

    @classmethod
    def wrap(
        cls, local: torch.Tensor, order: float, ranks: Communicator, device: torch.device | None = None
    ) -> PartialNorm:
        """`local`, of order `order` over this rank's elements, still to be reduced over ranks.

        The norm of a gradient in host memory says that it is there too (`device`), and stays on the device.
        """
        partial = _nan(local.dtype, device or local.device).expand(local.shape).as_subclass(cls)
        partial.local, partial.order, partial.ranks, partial._full = local, order, ranks, None
        return partial

    @classmethod
    @skip  # compiled functions break here: the elements of other ranks are not in their graphs
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stacks and moves stay partial. The norm of norms is reduced once. Anything else sees the reduced value."""
        return untraced(cls._answer, func, args, kwargs or {})

    @classmethod
    def _answer(cls, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        with AsTensors():
            if answers_without_values(func):
                return func(*args, **kwargs)
            parts = list(args[0]) if func is torch.stack else args[:1]
            first = parts[0] if parts else None
            if isinstance(first, cls) and all(isinstance(part, cls) and part._adds_to(first) for part in parts):
                if func is torch.Tensor.to and func(*args, **kwargs) is first:
                    return first
                if func in (torch.stack, torch.Tensor.to):
                    device = first.device if func is torch.stack else None
                    args = map_tensors(args, lambda t: t.local if isinstance(t, cls) else t)
                    return cls.wrap(func(*args, **kwargs), first.order, first.ranks, device)
                if func in NORMS and order_of(func, args, kwargs) == first.order:
                    return global_norm(torch.linalg.vector_norm(first.local, first.order), first.order, first.ranks)
            args, kwargs = full_norms(args), full_norms(kwargs)
        return func(*args, **kwargs)  # other arguments may be pieces

    def _adds_to(self, other: PartialNorm) -> bool:
        are_same = self.ranks.model_group is other.ranks.model_group
        return self._full is None and self.order == other.order and are_same


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((), math.nan, dtype=dtype, device=device)


def _full_of(norm: PartialNorm) -> torch.Tensor:
    """The norm over all ranks, reduced once: later writes into it stay."""
    if norm._full is None:
        norm._full = global_norm(norm.local, norm.order, norm.ranks).to(norm.device)
    return norm._full


def full_norms(values: Any) -> Any:
    """`values` with norms over all ranks in the place of each `PartialNorm`."""
    return map_tensors(values, lambda t: _full_of(t) if isinstance(t, PartialNorm) else t)


# -- graphs -----------------------------------------------------------------------------------------------------------


def without_backward(result: Any, what: str) -> Any:
    """`result`, computed from `what`, a tensor in host memory. A backward that comes to it raises.

    Autograd computes gradients of such tensors in another thread than those of layers. So collectives would be issued
    in an order that differs between ranks, and gradients be written by both.
    """

    def refuse(grad: torch.Tensor) -> NoReturn:
        raise ShardingError(
            f"a loss contains {what}, whose values lie in host memory (offload): leave this part away, and after "
            "backward() add its gradient, such as param.grad.add_(param.detach(), alpha=2 * factor) for factor * "
            "param.square().sum(), or set the optimizer's weight_decay"
        )

    with AsTensors():
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.register_hook(refuse)
    return result
