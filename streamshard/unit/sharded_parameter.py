"""Sharded parameters outside of passes: what they are computed with knows that they are pieces.

Most who look at one want to write in place, to copy, to compare, or to hand it to an optimizer; a piece does for
that. A penalty in a loss (``model.fc.weight.norm()``), or a log line, wants the whole's, and gets it; whoever computes
with it as a layer would (``F.linear(x, layer.weight)``) takes the piece for the whole, and hears so (see
`streamshard.unit.sharded_tensor`).

Optimizers take their slow path for what is no plain Parameter, so while one steps its parameters are plain (see
`streamshard.unit.step_grads`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.pieces import Piece, forget_piece, piece_of, refuse_pickle, remember_piece
from streamshard.unit.sharded_tensor import ShardedTensor
from streamshard.unit.sharding import Sharding
from streamshard.unit.unreduced_grad import UnreducedGrad

__all__ = [
    "ShardedParameter",
    "be_piece",
    "be_plain",
    "be_sharded",
    "be_whole",
    "data_of",
    "end_wait",
    "grad_of",
    "let_wait",
    "refuse_unreduced",
]

_AsTensors = torch._C.DisableTorchFunctionSubclass
_NEW_PARAMETER = nn.Parameter.__new__.__code__
# Each attribute goes through __torch_function__ unless it is looked up here; this one everybody asks for in each step.
_grad: Any = torch._C.TensorBase.grad
_data: Any = torch._C.TensorBase.data
# What `.grad` gives of those whose gradients wait in their slots.
_unreduced: MutableMapping[torch.Tensor, UnreducedGrad] = WeakIdKeyDictionary()


class ShardedParameter(ShardedTensor, nn.Parameter):
    """The user's own Parameter, of which this rank has a piece."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]  # no piece
        """Somebody else's, made by ``type(param)(data)``."""
        return nn.Parameter(data, requires_grad)

    @property
    def sharding(self) -> Sharding:  # type: ignore[override]  # others are told
        """What it is of the whole."""
        return self._sharding()

    def _sharding(self) -> Sharding:
        return Sharding.of_piece(self.piece, is_weight=True)

    @property
    def piece(self) -> Piece:
        """See `streamshard.unit.pieces`."""
        piece = piece_of(self)
        assert piece is not None
        return piece

    @property
    @skip
    def data(self) -> torch.Tensor:
        """Its values, as in torch; but what is written into them counts as a change of the parameter.

        Else nobody would notice that passes under way compute with some weights from before it.
        """
        with _AsTensors():
            return ShardedTensor.wrap(self.detach(), untraced(self._sharding))

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        with _AsTensors():
            piece = self.piece
            if isinstance(data, ShardedTensor):
                data = _formed(data, self)
            elif tuple(data.shape) == piece.shape != piece.local_shape:
                raise ShardingError(
                    f"{piece.name!r} was given whole data, {piece.shape}, of which this rank keeps "
                    f"{piece.local_shape}: copy them, p.data.copy_(whole)"
                )
            _data.__set__(self, data)

    @property
    @skip
    def grad(self) -> torch.Tensor | None:
        """The gradient. What autograd has put there knows from now on what it is."""
        if _unreduced and (unreduced := _unreduced.get(self)) is not None:
            return unreduced
        with _AsTensors():
            grad: torch.Tensor | None = _grad.__get__(self)
            if type(grad) is torch.Tensor:
                self._recognise(grad)
            return grad

    @grad.setter
    @skip
    def grad(self, grad: torch.Tensor | None) -> None:
        if isinstance(grad, UnreducedGrad):
            grad.refuse("param.grad = ...")
        end_wait(self)
        with _AsTensors():
            if type(grad) is torch.Tensor and grad.shape != self.shape:
                self._cut(grad)
            elif type(grad) is ShardedTensor and grad.shape != self.shape:
                wanted = Sharding.of_piece(self.piece, is_weight=False)
                if grad.sharding.is_like(wanted):  # else torch says what it thinks of it
                    grad.data, grad.sharding = _formed(grad, self), wanted
            _grad.__set__(self, grad)
            if type(grad) is torch.Tensor:
                self._recognise(grad)

    @grad.deleter
    def grad(self) -> None:
        end_wait(self)
        with _AsTensors():
            _grad.__delete__(self)

    def _recognise(self, grad: torch.Tensor) -> None:
        """The user may have put it there and keep it: he takes norms of it, and changes it in place."""
        if grad.shape == self.shape:
            ShardedTensor.wrap(grad, Sharding.of_piece(self.piece, is_weight=False))

    def _cut(self, grad: torch.Tensor) -> None:
        """A gradient of the whole's shape is this rank's piece of it from now on, wherever the user keeps it."""
        piece = self.piece
        if tuple(grad.shape) != piece.shape:
            return  # torch says what it thinks of it
        if grad._is_view() or grad.untyped_storage().nbytes() != grad.nbytes:
            raise ShardingError(
                f"the gradient of {piece.name!r} was set to a part of a buffer of your own, of the whole's shape "
                f"{piece.shape}: this rank keeps {piece.local_shape} of it, which would no longer be the buffer's. Set "
                "a clone() of it"
            )
        grad.data = piece.cut(grad)

    @classmethod
    @skip  # compiled functions break here: what other ranks have is not in their graphs
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As any piece's, but for what would make another parameter of it."""
        caller = sys._getframe(1)
        if caller.f_code is _NEW_PARAMETER:  # torch would ask for another detach()
            piece = args[0].piece
            raise ShardingError(
                f"nn.Parameter() of {piece.name!r}, of which StreamShard keeps only this rank's piece, "
                f"{piece.local_shape} of {piece.shape}, would not know that it is one: clone the whole inside `with "
                "model.summon_full_params():`, or keep param.detach().clone(), which knows"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch allows contents
        """As any Parameter's."""
        with _AsTensors():
            return f"Parameter containing:\n{self.as_subclass(torch.Tensor)!r}"

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        """A piece of the same, and no parameter."""
        with _AsTensors():
            copied = ShardedTensor.wrap(self.detach().clone().requires_grad_(self.requires_grad), self.sharding)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not saved as if it were whole."""
        refuse_pickle(self.piece)


def _formed(piece: ShardedTensor, param: nn.Parameter) -> torch.Tensor:
    """In the form of `param`: rows are flat where several were put one behind the other, and cut again."""
    plain: torch.Tensor = piece.as_subclass(torch.Tensor).detach()
    return plain.view(param.shape) if plain.numel() == param.numel() and piece.sharding.is_in_order else plain


def be_piece(param: nn.Parameter, piece: Piece) -> None:
    """`param` holds `piece` from now on, and knows it, unless that is all of it."""
    if piece.ranks.world_size > 1:
        remember_piece(param, piece)
        param.__class__ = ShardedParameter


def be_whole(param: nn.Parameter) -> None:
    """`param` is an ordinary one, for a while."""
    forget_piece(param)
    be_plain(param)


def be_plain(param: torch.Tensor) -> None:
    """A plain Parameter, while an optimizer steps."""
    if type(param) is ShardedParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]  # of which it was made


def be_sharded(param: torch.Tensor) -> None:
    """If it is a piece, it knows it again."""
    if type(param) is nn.Parameter and piece_of(param) is not None:
        param.__class__ = ShardedParameter


def data_of(param: torch.Tensor) -> torch.Tensor:
    """``param.data`` as torch has it: what is written into it is no change of the parameter."""
    with _AsTensors():
        data: torch.Tensor = _data.__get__(param)
        return data


def grad_of(param: torch.Tensor) -> torch.Tensor | None:
    """``param.grad`` as autograd has it, whatever waits beside it."""
    with _AsTensors():
        grad: torch.Tensor | None = _grad.__get__(param)
        return grad


def let_wait(param: nn.Parameter, name: str) -> None:
    """The gradient of `param` waits in its grad slot until `end_wait`. Setting ``.grad`` drops it."""
    _unreduced[param] = UnreducedGrad.of(name)


def end_wait(param: torch.Tensor) -> bool:
    """Whether a gradient of `param` waited, and nobody has dropped it; it does no longer."""
    return bool(_unreduced) and _unreduced.pop(param, None) is not None


def refuse_unreduced(params: Iterable[torch.Tensor], what: str) -> None:
    """Raise if the gradient of one of `params` waits: `what` needs it reduced."""
    if _unreduced:
        for param in params:
            if (unreduced := _unreduced.get(param)) is not None:
                unreduced.refuse(what)
