"""Norms of pieces that torch's functions ask for, and graphs that come to host memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError
from streamshard.guards.torch_functions import NORMS, answers_without_values, order_of
from streamshard.nested import map_tensors, tensors_in
from streamshard.norms import global_norm
from streamshard.torch_private import AsTensors, skip, untraced


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
        cls, local: torch.Tensor, order: float, ranks: Communicator, dtype: torch.dtype, device: torch.device
    ) -> PartialNorm:
        """`local`, fp64, of order `order` over this rank's elements, still to be reduced over ranks.

        It says that it has this dtype, and the gradient's device. The norm of a gradient in host memory stays on the
        accelerator.
        """
        partial = _nan(dtype, device).expand(local.shape).as_subclass(cls)
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
            parts = list(args[0]) if func is torch.stack and args else args[:1]
            first = parts[0] if parts else None
            if isinstance(first, cls) and all(isinstance(part, cls) and part._adds_to(first) for part in parts):
                if func is torch.Tensor.to:
                    # ``to`` takes its arguments in many forms: the tensor that it makes has the device and dtype.
                    shown = func(*args, **kwargs)
                    if shown is first:
                        return first
                    local = first.local.to(shown.device)
                    return cls.wrap(local, first.order, first.ranks, shown.dtype, shown.device)
                if func is torch.stack:
                    local = func([part.local for part in parts], *args[1:], **kwargs)
                    return cls.wrap(local, first.order, first.ranks, first.dtype, first.device)
                # Only of one order a norm of norms is the norm of all elements, and needs one collective.
                if func in NORMS and order_of(func, args, kwargs) == first.order:
                    local = torch.linalg.vector_norm(first.local, first.order)
                    return global_norm(local, first.order, first.ranks, dtype=kwargs.get("dtype") or first.dtype)
            args, kwargs = full_norms(args), full_norms(kwargs)
        return func(*args, **kwargs)  # other arguments may be pieces

    def _adds_to(self, other: PartialNorm) -> bool:
        # A norm that was read may have been written to since: a stack has to hold that number.
        return self._full is None and self.order == other.order and self.ranks.model_group is other.ranks.model_group


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):  # later callers share it
        return torch.full((), math.nan, dtype=dtype, device=device)


def _full_of(norm: PartialNorm) -> torch.Tensor:
    """The norm over all ranks, reduced once: later writes into it stay."""
    if norm._full is None:
        norm._full = global_norm(norm.local, norm.order, norm.ranks, dtype=norm.dtype).to(norm.device)
    return norm._full


def full_norms(values: Any) -> Any:
    """`values` with norms over all ranks in the place of each `PartialNorm`."""
    return map_tensors(values, lambda t: _full_of(t) if isinstance(t, PartialNorm) else t)


# -- graphs -----------------------------------------------------------------------------------------------------------


def no_backward(result: Any, what: str) -> Any:
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
