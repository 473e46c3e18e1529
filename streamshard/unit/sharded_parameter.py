"""Sharded parameters outside of passes: the user's own Parameter objects, of which this rank has a piece each.

A sharded parameter is a `ShardedTensor`. While an elementwise optimizer steps, its parameters and their gradients are
plain: torch has fast kernels for plain tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
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
    "be_sharded",
    "be_whole",
    "data_of",
    "end_step",
    "end_wait",
    "grad_of",
    "let_wait",
    "refuse_unreduced",
    "show_plain",
]

_AsTensors = torch._C.DisableTorchFunctionSubclass
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
        """What it is a piece of."""
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
            return ShardedTensor.wrap(self.detach(), untraced(_sharding_of, self))

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        self._check("data", data)
        with _AsTensors():
            _data.__set__(self, data)

    @property
    @skip
    def grad(self) -> torch.Tensor | None:
        """The gradient. What autograd has put there, of a penalty, is a `ShardedTensor` from now on."""
        if _unreduced and (unreduced := _unreduced.get(self)) is not None:
            return unreduced
        with _AsTensors():
            grad: torch.Tensor | None = _grad.__get__(self)
            if type(grad) is torch.Tensor:
                ShardedTensor.wrap(grad, Sharding.of_piece(self.piece, is_weight=False))
            return grad

    @grad.setter
    @skip
    def grad(self, grad: torch.Tensor | None) -> None:
        if isinstance(grad, UnreducedGrad):
            grad.refuse("param.grad = ...")
        if isinstance(grad, torch.Tensor):
            self._check("grad", grad)
        end_wait(self)
        with _AsTensors():
            _grad.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        end_wait(self)
        with _AsTensors():
            _grad.__delete__(self)

    def _check(self, name: str, value: torch.Tensor) -> None:
        """Raise unless `value` is a piece of the same elements."""
        sharding = self.sharding
        with _AsTensors():
            fits = value.sharding.is_like(sharding) if isinstance(value, ShardedTensor) else sharding.takes(value)
        if not fits:
            raise ShardingError(
                f".{name} of parameter {self.piece.name!r} was set to a tensor of shape {tuple(value.shape)}, which is "
                f"not this rank's {sharding}. torch.zeros_like(param) is a piece to write to. For full weights use "
                "load_state_dict, for full tensors of any kind `with model.summon_full_params(writeback=True):`"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not saved as if it were full."""
        refuse_pickle(self.piece)


def _sharding_of(param: ShardedParameter) -> Sharding:
    return param.sharding


def be_piece(param: nn.Parameter, piece: Piece) -> None:
    """`param` holds `piece` from now on, and knows it, unless that is all of it."""
    if piece.ranks.world_size > 1:
        remember_piece(param, piece)
        param.__class__ = ShardedParameter


def be_whole(param: nn.Parameter) -> None:
    """`param` is an ordinary one, for a while."""
    forget_piece(param)
    _be_plain(param)


def _be_plain(param: torch.Tensor) -> None:
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


# -- during a step ----------------------------------------------------------------------------------------------------

# Of steps under way: gradients that are plain, and those of parameters without elements, which have none meanwhile.
_plain: list[torch.Tensor] = []
_hidden: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()


def show_plain(params: Sequence[torch.Tensor]) -> None:
    """Make `params` and their gradients plain, for an optimizer's step.

    Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip what stands before an empty tensor, or
    write beside it, and most pieces are empty where there are many ranks. So a piece without elements has no gradient
    during a step. At all other times it has an empty one: ranks must take the same number of norms. See decision 14.
    """
    written = []
    for param in params:
        grad = param.grad
        _be_plain(param)
        if not isinstance(grad, ShardedTensor):
            continue
        written.append(param)
        grad.__class__ = torch.Tensor  # type: ignore[assignment]  # of which it was made
        _plain.append(grad)
        if not param.numel() and piece_of(param) is not None:
            _hidden[param] = grad
            param.grad = None
    torch.autograd.graph.increment_version(written)


def end_step(params: Iterable[torch.Tensor]) -> None:
    """Parameters and gradients are pieces again: after the step, and if the step has failed, when somebody asks."""
    while _plain:
        _plain.pop().__class__ = ShardedTensor
    for param in params:
        if type(param) is nn.Parameter:
            grad = _hidden.pop(param, None) if _hidden else None
            if grad is not None:
                param.grad = grad
            be_sharded(param)
