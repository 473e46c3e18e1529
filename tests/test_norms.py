"""Norms in fp64: right, and the same however elements are cut."""

from __future__ import annotations

import math

import pytest
import torch

from streamshard.norms import local_norms
from tests.counts import Operators

SIZES = [0, 1, 1000, 1 << 16, (1 << 16) + 1, 0, 1 << 17, 5, (1 << 17) + 1, 7, 0, 1 << 18, (1 << 18) + 1, 600_000]


def _values(numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_exact(order: float) -> None:
    tensors = [_values(60).bfloat16(), _values(61).double(), _values(62).half(), _values(64).view(8, 8).t()]
    tensors += [_values(numel) for numel in SIZES if numel or order != math.inf]
    for found, tensor in zip(local_norms([*tensors, tensors[-1].view(2, -1).t()], order), tensors, strict=False):
        wanted = torch.linalg.vector_norm(tensor.double(), order) if tensor.numel() else torch.tensor(0.0).double()
        assert found.dtype is torch.float64 and found.shape == ()
        assert found.item() == pytest.approx(wanted.item(), rel=1e-13)
    assert found.float() == local_norms([tensors[-1].view(2, -1).t()], order)[0].float()


def test_the_norm_of_pieces_is_the_norm_of_the_whole_to_the_bit() -> None:
    whole = _values(200_000)
    (wanted,) = local_norms([whole], 2.0)
    for size in (7, 1000, 65_537, 199_999):
        norms = torch.stack(local_norms(whole.split(size), 2.0))
        assert norms.square().sum().sqrt().float() == wanted.float()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0])
def test_norms_of_values_that_are_no_numbers(value: float) -> None:
    for size in (10, 300_000):  # converted with others, and in parts
        tensors = [torch.full((size,), value), torch.ones(4), torch.cat([torch.zeros(size), torch.tensor([value])])]
        found = torch.stack(local_norms(tensors, 2.0)).float()
        torch.testing.assert_close(found, torch.tensor([abs(value), 2.0, abs(value)]), equal_nan=True)


@pytest.mark.parametrize("others", [0, 1])
def test_norms_do_not_overflow(others: int) -> None:
    """Their squares do, in fp32."""
    large, small = (local_norms([torch.full((4,), value)] * (1 + others), 2.0)[0] for value in (1e30, 1e-30))
    assert large.item() == pytest.approx(2e30) and small.item() == pytest.approx(2e-30)


def test_many_small_tensors_take_few_calls() -> None:
    tensors = _values(300_000).split(1000)
    with Operators() as calls:
        assert len(local_norms(tensors, 2.0)) == 300
    assert calls.counts.total() < 20
    assert local_norms([], 2.0) == []
