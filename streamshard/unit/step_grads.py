"""What optimizers see of parameters and gradients while they step.

Parameters are plain ones, which is what torch has fast kernels for.

Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip what stands before an empty tensor, or write
beside it, and most pieces are empty where there are many ranks. So a piece without elements has no gradient while an
optimizer steps, and is skipped, as a parameter that nobody used is. At all other times it has an empty one: whoever
takes a norm of each gradient in turn issues a collective for each, and ranks must issue the same. See decision 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.unit.pieces import piece_of
from streamshard.unit.sharded_parameter import be_plain, be_sharded
from streamshard.unit.sharded_tensor import ShardedTensor, StepTensor, be_known

__all__ = ["end_step", "set_aside", "show_in"]

_aside: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()  # parameters' gradients, of steps under way


def set_aside(params: Sequence[torch.Tensor], *, plain: bool) -> None:
    """Leave an optimizer with plain `params`, and gradients that have elements. What it will write counts as written.

    Also where a rank has no elements, or a kernel does not say so: a backward of an earlier forward raises everywhere.

    Args:
        params: its parameters; those that are no pieces stay as they are.
        plain: gradients are plain tensors too, which kernels and compilers take that know of no others.
    """
    written = []
    for param in params:
        grad = param.grad
        be_plain(param)
        if grad is None:
            continue
        if not param.numel():
            if piece_of(param) is not None:
                written.append(param)
                _aside[param] = grad
                param.grad = None
        elif isinstance(grad, ShardedTensor):
            written.append(param)
            if plain:
                _aside[param] = grad
                param.grad = grad.as_subclass(torch.Tensor)
            else:
                grad.__class__ = StepTensor
    torch.autograd.graph.increment_version(written)


def end_step(params: Iterable[torch.Tensor]) -> None:
    """Parameters and gradients know again what they are: after the step; if it has failed, when somebody asks."""
    for param in params:
        if type(param) is not nn.Parameter:
            continue
        seen, grad = param.grad, _aside.pop(param, None) if _aside else None
        if grad is not None and (seen is not None or not param.numel()):
            param.grad = grad
        elif type(seen) is StepTensor:
            be_known(seen)
        be_sharded(param)


def show_in(closure: Callable[[], Any], params: Iterable[torch.Tensor], *, plain: bool) -> Callable[[], Any]:
    """`closure`, which makes gradients inside a step, sees and makes them all."""
    mine = list(params)

    def shown() -> Any:
        end_step(mine)
        try:
            return closure()
        finally:
            set_aside(mine, plain=plain)

    return shown
