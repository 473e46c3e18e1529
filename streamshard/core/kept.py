"""Saved tensors that hooks hold as autograd does without hooks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Kept(NamedTuple):
    """A saved tensor, held as autograd does without hooks. Detached, because an output would hold its own graph."""

    tensor: torch.Tensor
    version: int


def keep(tensor: torch.Tensor) -> Kept:
    """Hold a saved tensor."""
    return Kept(tensor.detach(), tensor._version)


def kept(held: Kept) -> torch.Tensor:
    """The tensor that `keep` holds.

    Raises:
        RuntimeError: it was changed in place since.
    """
    tensor, version = held
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"{list(tensor.shape)} of {tensor.dtype} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def saved_as_it_is(saved: Any) -> torch.Tensor | None:
    """The tensor in `saved`, a raw saved tensor of a graph node; None if hooks of other code have packed it.

    To unpack it there would recompute a checkpoint, which lets nobody unpack a tensor twice. torch 2.11 does not say
    who has packed it: None.
    """
    data = getattr(saved, "data", None)
    if isinstance(data, tuple) and data and isinstance(data[0], Kept):  # inside `streamshard.core.saved_tensors`
        data = data[0]
    if isinstance(data, Kept):
        return data.tensor
    is_plain = isinstance(data, torch.Tensor) and getattr(saved, "unpack_hook", data) is None
    return data if is_plain else None
