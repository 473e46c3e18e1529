"""What a compute view is while its unit is not in place: it answers questions, and has no values.

[Note: absent weights]
A unit that takes turns has its weights in a slot only while one of its layers runs. Between two turns its compute views
are of another class, `AbsentWeight`: whoever has looked one up, or kept one, can ask for its shape, dtype and device.
Everything else needs the unit, and asks for it: a unit that takes turns refuses, by the weight's name; a resident one
arrives. A compute view stays one object, in graphs and in Python, so whoever keeps one never has another layer's
weight. Whether it trains is the sharded parameter's affair. It costs an assignment per parameter and turn, 30 ns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.compiling import skip, untraced
from streamshard.unit.compute_view import ComputeView

__all__ = ["AbsentWeight", "advice", "be_absent", "be_present", "let_be_absent", "name_of"]

# Answered without the values: functions, and attributes.
_QUESTIONS = frozenset(
    name
    for line in (
        "size dim numel nelement ndimension stride storage_offset element_size is_floating_point is_complex",
        "is_contiguous is_signed is_inference get_device __len__ __hash__ has_names is_shared _is_view new_empty",
        "new_full new_ones new_zeros",
        "shape dtype device ndim layout itemsize nbytes names is_cuda is_cpu is_meta is_xpu is_mps is_sparse is_nested",
        "is_sparse_csr is_quantized is_mkldnn is_leaf grad_fn _version _base",
    )
    for name in line.split()
)


class AbsentWeight(nn.Parameter):
    """A compute view whose unit is not in place. See [Note: absent weights]."""

    @classmethod
    @skip  # compiled functions break here: a unit that is asked for is no graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Questions are answered; anything else asks for the unit first."""
        kwargs = kwargs or {}
        called = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if called in ("__get__", "__set__") else called
        if name in ("requires_grad", "requires_grad_") or (name == "grad" and called == "__get__"):
            param: Any = _known[args[0]].param_of()  # whose the view has only while its unit is in place
            if called == "__get__":
                return getattr(param, name)
            return setattr(param, name, args[1]) if called == "__set__" else param.requires_grad_(*args[1:], **kwargs)
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "__repr__":
            with torch._C.DisableTorchFunctionSubclass():
                return f"AbsentWeight({_known[args[0]].name!r}, {tuple(args[0].shape)}, {args[0].dtype})"
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, AbsentWeight):
                untraced(_known[value].ask)
        if called == "__get__":
            return getattr(args[0], name)
        return setattr(args[0], name, args[1]) if called == "__set__" else func(*args, **kwargs)


class _Known(NamedTuple):
    """What an absent weight knows.

    Attributes:
        param_of: the sharded parameter.
        name: fully qualified.
        ask: puts its unit in place, so that the view is an ordinary one, or raises.
    """

    param_of: Callable[[], nn.Parameter | None]
    name: str
    ask: Callable[[], None]


_known: MutableMapping[torch.Tensor, _Known] = WeakIdKeyDictionary()


def let_be_absent(view: ComputeView, param: nn.Parameter, name: str, ask: Callable[[], None]) -> None:
    """`view` is absent from now on, until `be_present`.

    Args:
        view: a compute view.
        param: the sharded parameter that it is computed with for.
        name: fully qualified, for messages.
        ask: see `_Known`.
    """
    _known[view] = _Known(weakref.ref(param), name, ask)
    be_absent((view,))


def name_of(view: torch.Tensor) -> str | None:
    """The name of the weight that `view` is, fully qualified; None if it is no compute view that may be absent."""
    known = _known.get(view)
    return None if known is None else known.name


def advice(name: str) -> str:
    """How to keep the layer of weight `name` in place, for messages."""
    return f"StreamShard(model, resident=[{name.rpartition('.')[0]!r}])"


def be_absent(views: Iterable[ComputeView]) -> None:
    """The unit of `views` has left its slot, or may leave it."""
    for view in views:
        view.__class__ = AbsentWeight  # type: ignore[assignment]  # of the same memory layout


def be_present(views: Iterable[ComputeView]) -> None:
    """The unit of `views` is in place."""
    for view in views:
        view.__class__ = ComputeView
