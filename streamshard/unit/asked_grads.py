"""Sharded parameters that somebody asks autograd for by name: refused.

Layers compute with compute views, so a graph leads to those and never to the user's parameters.
``torch.autograd.grad`` asks its inputs, which raise. ``backward(inputs=...)`` asks nobody, and runs no code of ours: it
leaves no gradients, and the optimizer's step that follows raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch

from streamshard.comm.ranks import Ranks
from streamshard.errors import ShardingError
from streamshard.unit.pieces import piece_of

__all__ = ["graph_is_made", "graph_is_reached", "refuse_grad", "refuse_step_without_backward"]

_INSTEAD = (
    "call loss.backward() without inputs=, and read .grad afterwards; set requires_grad_(False) before the forward on "
    "what is to get no gradient"
)
_unreached: WeakSet[Ranks] = WeakSet()  # of models


def graph_is_made(ranks: Ranks) -> None:
    """A forward of the model that `ranks` train has made a graph."""
    _unreached.add(ranks)


def graph_is_reached(ranks: Ranks) -> None:
    """A backward has come to a graph of that model."""
    _unreached.discard(ranks)


def refuse_grad(inputs: Any) -> None:
    """``torch.autograd.grad`` with respect to `inputs`.

    Raises:
        ShardingError: one of them is a sharded parameter; names it.
    """
    for given in (inputs,) if isinstance(inputs, torch.Tensor) else inputs:
        if isinstance(given, torch.Tensor) and (piece := piece_of(given)) is not None:
            raise ShardingError(
                f"torch.autograd.grad with respect to {piece.name!r}: layers compute with gathered copies, so a "
                f"sharded parameter is in no graph. {_INSTEAD[0].upper()}{_INSTEAD[1:]}"
            )


def refuse_step_without_backward(params: Iterable[torch.Tensor]) -> None:
    """An optimizer of `params` is about to step.

    Raises:
        ShardingError: it has nothing to step, and the last forward with gradients was followed by no backward.
    """
    pieces = []
    for param in params:
        if param.grad is not None:
            return
        if param.requires_grad and (piece := piece_of(param)) is not None:
            pieces.append(piece)
    if pieces and pieces[0].ranks in _unreached:
        raise ShardingError(
            f"an optimizer steps, and neither {pieces[0].name!r} nor any other of its parameters has a gradient, "
            "although the model has run forward: no backward has come to it. backward(inputs=...) does not find "
            f"sharded parameters, because layers compute with gathered copies: {_INSTEAD}"
        )
