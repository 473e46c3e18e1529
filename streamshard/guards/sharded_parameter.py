"""Sharded parameters: the user's own Parameter objects, each of which holds this rank's piece."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import torch
from torch import nn

from streamshard.errors import ShardingError
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_tensor import Life, ShardedTensor, refuse
from streamshard.torch_private import AsTensors, get_data, get_grad, set_data, set_grad, skip, swap_tensor

# Each attribute goes through __torch_function__ unless it is looked up here.

# The entry of a parameter's ``__dict__`` that ``.grad`` gives while the gradient waits in its slot (``no_sync()``,
# ``grad_slots="all"``). Under FSDP2 ``.grad`` is None then, which Optimizer.zero_grad() passes over: a micro-batch that
# the user drops would be stepped with.
_UNREDUCED = "unreduced"
# Attributes that are StreamShard's, not the user's.
_OWN = frozenset(("piece", "plain", "whole_class", "life", _UNREDUCED))
_WHY_UNREDUCED = (
    "was accumulated inside no_sync() and has not been reduced over ranks. Run the last backward outside of no_sync() "
    "before you step, clip or read gradients; zero_grad(set_to_none=True) drops what was accumulated"
)


class ShardedParameter(ShardedTensor, nn.Parameter):
    """The user's own Parameter, of which this rank has a piece.

    Attributes:
        plain: [local shape], an ordinary Parameter in the same memory, which optimizers step.
        whole_class: the parameter's class before it was sharded.
    """

    plain: nn.Parameter
    whole_class: type

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]  # no piece
        """An ordinary Parameter, for code that calls ``type(param)(data)``."""
        return nn.Parameter(data, requires_grad)

    @property
    @skip
    def data(self) -> torch.Tensor:
        """The values, as in torch; but a write into them counts as a change of the parameter.

        So a backward through weights that were changed after its forward raises.
        """
        with AsTensors():
            # A detached tensor shares the version counter; torch's own ``data`` gets a new one.
            return ShardedTensor.wrap(self.detach(), self.piece)

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        self._check("data", data)
        with AsTensors():
            set_data(self, data)

    @property
    @skip
    def grad(self) -> torch.Tensor | None:
        """The gradient. A tensor that autograd has put there (of a penalty) becomes a `ShardedTensor`."""
        if (unreduced := self.__dict__.get(_UNREDUCED)) is not None:
            return cast(ShardedTensor, unreduced)
        with AsTensors():
            grad: torch.Tensor | None = get_grad(self)
            if type(grad) is torch.Tensor:
                ShardedTensor.wrap(grad, self.piece.of_grad())
            return grad

    @grad.setter
    @skip
    def grad(self, grad: torch.Tensor | None) -> None:
        if isinstance(grad, torch.Tensor):
            self._check("grad", grad)
        self.__dict__.pop(_UNREDUCED, None)  # a waiting gradient is dropped
        with AsTensors():
            set_grad(self, grad)

    @grad.deleter
    @skip
    def grad(self) -> None:
        self.grad = None

    def __copy__(self) -> NoReturn:
        """Refused. Some classes of parameters copy in a way of their own, which a piece does not have."""
        refuse(copy.copy, self, "copy.deepcopy() and detach().clone() give pieces")

    def _check(self, name: str, value: torch.Tensor) -> None:
        """Raise unless `value` is a piece of the same elements."""
        if isinstance(value, ShardedTensor):
            value.refuse_unusable(f".{name} of parameter {self.piece.name!r}")
        with AsTensors():
            fits = value.piece.is_like(self.piece) if isinstance(value, ShardedTensor) else self.piece.takes(value)
        if not fits:
            raise ShardingError(
                f".{name} of parameter {self.piece.name!r} was set to a tensor of shape {tuple(value.shape)}, which is "
                f"not this rank's {self.piece}. torch.zeros_like(param) is a piece to write to. For full weights use "
                "load_state_dict, for full tensors of any kind `with model.summon_full_params():`"
            )


@functools.cache
def _class_of(kind: type) -> type:
    """The class of sharded parameters that were of class `kind`: libraries recognise them by name, or isinstance.

    Methods that `kind` redefines, such as ``Params4bit.to``, are those of a ShardedParameter.
    """
    if kind is nn.Parameter:
        return ShardedParameter
    # Python looks into `kind` before torch.Tensor: its methods would win over those that pieces answer or refuse.
    own = {name for name in vars(kind) if not name.startswith("__") and hasattr(ShardedParameter, name)}
    entries: dict[str, Any] = {name: getattr(ShardedParameter, name) for name in own}
    entries["__tensor_flatten__"] = property()  # torch does not find the method: a piece consists of no other tensors
    return type(kind.__name__, (ShardedParameter, kind), {"__module__": kind.__module__, **entries})


def exchange(param: nn.Parameter, other: nn.Parameter, part: str) -> None:
    """Exchange the tensors of two Parameters, which stay the same objects; with `part`, see `Form`."""
    # This leaves ``__dict__`` where it is, and the part with it.
    swap_tensor(param, other)
    mine, theirs = vars(param), vars(other)
    own, given = mine.pop(part, None), theirs.pop(part, None)
    for attributes, value in ((mine, given), (theirs, own)):
        if value is not None:
            attributes[part] = value


def be_piece(param: nn.Parameter, piece: Piece, plain: nn.Parameter | None = None) -> None:
    """Make `param` a ShardedParameter; its data are `piece`. Does nothing if it stays an ordinary one.

    Args:
        param: the parameter.
        piece: of this rank.
        plain: which `be_whole` has returned: optimizers may know it. None: `param` has never been a piece.
    """
    if not piece.is_ordinary:
        if plain is None:
            with torch.inference_mode(mode=False):
                plain = nn.Parameter(param.detach(), param.requires_grad)
        kind = type(param)
        param.__class__ = _class_of(kind)
        sharded = cast(ShardedParameter, param)
        sharded.piece, sharded.plain, sharded.whole_class = piece, plain, kind


def be_whole(param: nn.Parameter) -> nn.Parameter | None:
    """Make `param` an ordinary Parameter for a while: its data are about to be full. Returns its `plain`, if any."""
    if not isinstance(param, ShardedParameter):
        return None
    kind, plain = param.whole_class, param.plain
    del param.piece, param.plain, param.whole_class
    param.__class__ = kind
    return plain


def own_attributes(param: nn.Parameter) -> dict[str, Any]:
    """The attributes that the user has set on `param` (``p.lr_scale = 2``)."""
    return {key: value for key, value in param.__dict__.items() if key not in _OWN}


def data_of(param: torch.Tensor) -> torch.Tensor:
    """``param.data`` as torch has it: a write into it is no change of the parameter."""
    with AsTensors():
        return get_data(param)


def grad_of(param: nn.Parameter) -> torch.Tensor:
    """The gradient of `param`, which has one, as a plain tensor."""
    with AsTensors():
        return cast(torch.Tensor, get_grad(param)).as_subclass(torch.Tensor)


# -- gradients that wait in their slots -------------------------------------------------------------------------------


def keep_unreduced(param: nn.Parameter) -> None:
    """The gradient of `param` waits in its slot until `drop_unreduced`, which setting ``.grad`` calls too."""
    piece = cast(ShardedParameter, param).piece
    # It needs no memory: `Life` refuses each use of its values, and `piece` answers for its shape.
    param.__dict__[_UNREDUCED] = ShardedTensor.wrap(torch.empty(0), piece.of_grad(), Life(_WHY_UNREDUCED))


def drop_unreduced(param: torch.Tensor) -> bool:
    """Whether a gradient of `param` waited until now."""
    return param.__dict__.pop(_UNREDUCED, None) is not None


def is_unreduced(param: torch.Tensor) -> bool:
    """Whether a gradient of `param` waits."""
    return _UNREDUCED in param.__dict__


def refuse_unreduced(params: Iterable[torch.Tensor], what: str) -> None:
    """Raise if the gradient of one of `params` waits in its slot; `what` needs the reduced gradient."""
    for param in params:
        if (unreduced := param.__dict__.get(_UNREDUCED)) is not None:
            unreduced.refuse_unusable(what)
