"""What optimizers that work element by element see of parameters and gradients while they step: plain pieces.

Plain ones are what they have fast kernels for.

Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip what stands before an empty tensor, or write
beside it, and most pieces are empty where there are many ranks. So a piece without elements has no gradient while such
an optimizer steps, and is skipped, as a parameter that nobody used is. At all other times it has an empty one: whoever
takes a norm of each gradient in turn issues a collective for each, and ranks must issue the same. See decision 14.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.unit.pieces import piece_of
from streamshard.unit.sharded_parameter import be_plain, be_sharded
from streamshard.unit.sharded_tensor import ShardedTensor

__all__ = ["end_step", "show_plain"]

# Of steps under way: gradients that are plain, and those of parameters without elements, which have none meanwhile.
_plain: list[torch.Tensor] = []
_hidden: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()


def show_plain(params: Sequence[torch.Tensor]) -> None:
    """Leave an optimizer with plain `params` that have elements, and their gradients. Others stay as they are."""
    written = []
    for param in params:
        grad = param.grad
        be_plain(param)
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
    """Parameters and gradients know again what they are: after the step; if it has failed, when somebody asks."""
    while _plain:
        _plain.pop().__class__ = ShardedTensor
    for param in params:
        if type(param) is nn.Parameter:
            grad = _hidden.pop(param, None) if _hidden else None
            if grad is not None:
                param.grad = grad
            be_sharded(param)
