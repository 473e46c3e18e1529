"""Sharded parameters that somebody has looked up by name, outside of all passes: `layer.weight`.

Most who do want to look, to write in place, or to hand the parameter to an optimizer; a piece does for that. Whoever
computes with it as a layer would (``F.linear(x, layer.weight)``) takes the piece for the whole: torch complains of
shapes that nobody has written, and where they happen to fit it does not complain.

So what is looked up knows from then on what it is: it becomes a `LookedUp`, the same object of another class. Being of
it costs a microsecond per operation and attribute, and optimizers take their slow path for what is no plain Parameter:
a step makes it one again (`forget_look_up`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from streamshard.errors import ShardingError
from streamshard.unit.grad_ops import OpKind, kind_of
from streamshard.unit.pieces import Piece, piece_of

__all__ = ["LookedUp", "forget_look_up", "look_up"]

# What is still the piece, or a part of it: seen in another way, or as numbers of another dtype.
_STILL_PIECES = frozenset(
    (
        *(
            "__getitem__",
            "adjoint",
            "bfloat16",
            "contiguous",
            "detach",
            "double",
            "flatten",
            "float",
            "half",
            "movedim",
        ),
        *("narrow", "permute", "ravel", "reshape", "squeeze", "swapaxes", "swapdims", "t", "to", "transpose", "type"),
        *("unsqueeze", "view"),
    )
)
_STILL_PIECES_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "data"))
_MATRIX_FUNCTIONS = frozenset(
    ("cholesky", "det", "inverse", "logdet", "matrix_exp", "matrix_power", "pinverse", "qr", "slogdet", "svd", "trace")
)


def look_up(param: Any) -> Any:
    """`param`, the same object, which refuses from now on to be computed with as if it were the whole."""
    if type(param) is nn.Parameter and piece_of(param) is not None:
        param.__class__ = LookedUp
    return param


def forget_look_up(params: Iterable[Any]) -> None:
    """Plain Parameters again, which is what optimizers have fast kernels for."""
    for param in params:
        if type(param) is LookedUp:
            param.__class__ = nn.Parameter  # type: ignore[assignment]  # of which it was made


def _answer(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    found = next(((tensor, piece) for tensor in tensors if (piece := _piece_of(tensor)) is not None), None)
    with torch._C.DisableTorchFunctionSubclass():
        if found is None:  # a parameter that is whole for a while, or one in a list
            return func(*args, **kwargs)
        tensor, piece = found
        name = getattr(func, "__name__", "")
        kind = kind_of(func)
        if kind is OpKind.OTHER and (len(tensors) > 1 or name in _MATRIX_FUNCTIONS or name.startswith("linalg_")):
            _refuse(name, piece)
        if kind is OpKind.ELEMENTWISE and name != "__set__":
            for other in tensors:
                if other.ndim and other.shape != tensor.shape:
                    _refuse(name, piece)
        result = func(*args, **kwargs)
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in _STILL_PIECES or attribute in _STILL_PIECES_ATTRIBUTES:
            return _seen_as(result, piece) if type(result) in (torch.Tensor, nn.Parameter) else result
        return result


class LookedUp(nn.Parameter):
    """A sharded parameter that was looked up."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Whatever takes the piece for the whole raises; everything else is as ever."""
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__ and (piece := _piece_of(args[0])) is not None:
            _refuse("nn.Parameter", piece)  # torch would ask for another detach()
        return _answer(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]  # torch allows contents
        """As any Parameter's."""
        forget_look_up((self,))
        try:
            return repr(self)
        finally:
            look_up(self)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """A Parameter of somebody else's, which happens to have the piece's values."""
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


class LookedUpView(torch.Tensor):
    """A `LookedUp`, transposed, detached or of another dtype.

    Attributes:
        piece: what it is one of.
    """

    piece: Piece

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `LookedUp`."""
        return _answer(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Somebody else's tensor."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In files it is a tensor like others, if torch lets it be saved at all."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _piece_of(tensor: torch.Tensor) -> Piece | None:
    if isinstance(tensor, LookedUpView):
        return tensor.piece
    return piece_of(tensor) if type(tensor) is LookedUp else None


def _seen_as(tensor: torch.Tensor, piece: Piece) -> LookedUpView:
    view: LookedUpView = tensor.as_subclass(LookedUpView)
    view.piece = piece
    return view


def _refuse(name: str, piece: Piece) -> NoReturn:
    raise ShardingError(
        f"{name.strip('_')}() takes {piece.name!r} for a whole weight outside of a forward of its model, where "
        f"StreamShard keeps only this rank's piece, {piece.local_shape} of {piece.shape}. Call the model, or the layer "
        "that is a unit (on all ranks), or compute inside `with model.summon_full_params():`"
    )
