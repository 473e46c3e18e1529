"""Muon without its rounding to bf16, for comparisons with sums in another order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.optim import _muon


@contextlib.contextmanager
def muon_in_fp32() -> Iterator[None]:
    """In this context, or in a function that it decorates, `torch.optim.Muon` orthogonalises in fp32.

    Its own iterations round to bf16: the last bit of a gradient may be 1.6e-4 of a weight at a learning rate of 0.02.
    """
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", _orthogonalise):
        yield


def _orthogonalise(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The iterations of `torch.optim.Muon` on [rows, columns] fp32, with no other dtype on the way."""
    a, b, c = coefficients
    is_tall = grad.size(0) > grad.size(1)
    found = grad.T if is_tall else grad
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
