"""What optimizers see of gradients while they step.

Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip what stands before an empty tensor, or write
beside it, and most pieces are empty where there are many ranks. So a piece without elements has no gradient while an
optimizer steps, and is skipped, as a parameter that nobody used is. At all other times it has an empty one: whoever
takes a norm of each gradient in turn issues a collective for each, and ranks must issue the same. See decision 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.unit.first_step import unwatched
from streamshard.unit.pieces import piece_of
from streamshard.unit.sharded_grad import ShardedGrad

__all__ = ["put_back", "set_aside", "show_in"]

_aside: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()  # parameters' gradients, of steps under way


def set_aside(params: Iterable[torch.Tensor], *, plain: bool) -> None:
    """Leave the optimizer of `params` with gradients that have elements. What it is about to write counts as written.

    Also where a rank has no elements, or a kernel does not say so: a backward of an earlier forward raises everywhere.

    Args:
        params: its parameters; those that are no pieces stay as they are.
        plain: what it is given are plain tensors, which kernels and compilers take that know of no others.
    """
    written = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if not param.numel():
            if piece_of(param) is not None:
                written.append(param)
                _aside[param] = grad
                param.grad = None
        elif isinstance(grad, ShardedGrad):
            written.append(param)
            if plain:
                _aside[param] = grad
                param.grad = grad.as_subclass(torch.Tensor)
    torch.autograd.graph.increment_version(written)


def put_back(params: Iterable[torch.Tensor]) -> None:
    """What was set aside is ``.grad`` again: after the step; if it has failed, when somebody asks, or a backward."""
    if not _aside:
        return
    for param in params:
        grad = _aside.pop(param, None)
        if grad is not None and (param.grad is not None or not param.numel()):
            param.grad = grad


def show_in(closure: Callable[[], Any], params: Iterable[torch.Tensor], *, plain: bool) -> Callable[[], Any]:
    """`closure`, which makes gradients inside a step, sees and makes them all."""
    mine = list(params)

    def shown() -> Any:
        put_back(mine)
        try:
            with unwatched():
                return closure()
        finally:
            set_aside(mine, plain=plain)

    return shown
