"""Whether what forwards and backwards prepare is used: by a backward, and by a step of an optimizer."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError, warn_user
from streamshard.unit.sharded_tensor import CALL_BACKWARD, piece_of

_MOST_UNUSED = 10  # backwards whose gradients no optimizer uses, while others step


@dataclasses.dataclass(eq=False)
class _Unused:
    """Gradients of a model that no optimizer has stepped so far.

    Attributes:
        version: of the parameters at first, added up: code may step them without an optimizer.
        given: the parameters to which the last backward has given gradients; weak.
        is_new: no optimizer has stepped since.
        number: of backwards after which other optimizers have stepped.
    """

    version: int
    given: list[weakref.ref[nn.Parameter]]
    is_new: bool = True
    number: int = 0


# A model is known by its communicator.
_unreached: WeakSet[Communicator] = WeakSet()  # has run forward with gradients, and not backward since
_unused: WeakKeyDictionary[Communicator, _Unused] = WeakKeyDictionary()  # has run backward
_stepped: WeakSet[Communicator] = WeakSet()  # an optimizer has stepped it; or a warning says that none has


def note_forward(ranks: Communicator) -> None:
    """The model of `ranks` has run forward with gradients."""
    _unreached.add(ranks)


def note_backward(ranks: Communicator) -> None:
    """A backward has come to the model of `ranks`."""
    _unreached.discard(ranks)


def note_gradients(ranks: Communicator, given: Sequence[nn.Parameter]) -> None:
    """A backward has given gradients to the parameters `given` of the model of `ranks`."""
    if given and ranks not in _stepped:
        unused = _unused.setdefault(ranks, _Unused(_version_of(given), []))
        unused.given, unused.is_new = [weakref.ref(param) for param in given], True


def note_step(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """`optimizer`, any of the process, is about to step `params`. Warns once if no optimizer ever steps a model.

    Models trained in turns (GANs) make gradients that are not used, but not ten times before their first step.
    """
    ids = {id(param) for param in params} if _unused else ()
    for ranks, unused in list(_unused.items()):
        given = [param for of in unused.given if (param := of()) is not None]
        is_own = any(id(param) in ids for param in given)
        unused.number += unused.is_new
        unused.is_new = False
        if not is_own and unused.number < _MOST_UNUSED:
            continue
        _stepped.add(ranks)
        del _unused[ranks]
        if not is_own and _version_of(given) == unused.version and ranks.is_first:
            such = [f", such as {piece.name!r}" for param in given[:1] if (piece := piece_of(param)) is not None]
            warn_user(
                f"{_MOST_UNUSED} backwards have made gradients of a sharded model, {type(optimizer).__name__} has "
                f"stepped after them, and no optimizer has stepped a parameter of the model{''.join(such)}: it does "
                "not train. Was the optimizer made from a copy of the model, or of its tensors? Make it from "
                "model.parameters(). If the model is not to train, freeze it: model.requires_grad_(False)"
            )


def refuse_step_without_backward(params: Sequence[torch.Tensor]) -> None:
    """Raise if no parameter has a gradient, and the last forward with gradients was followed by no backward."""
    pieces = [piece for param in params if param.requires_grad and (piece := piece_of(param)) is not None]
    if pieces and pieces[0].ranks in _unreached and all(param.grad is None for param in params):
        raise ShardingError(
            f"an optimizer steps, and neither {pieces[0].name!r} nor any other of its parameters has a gradient, "
            "although the model has run forward: no backward has come to it. backward(inputs=...) does not find "
            f"sharded parameters, because layers compute with all-gathered copies: {CALL_BACKWARD}"
        )


def _version_of(params: Sequence[nn.Parameter]) -> int:
    return sum(param._version for param in params)
