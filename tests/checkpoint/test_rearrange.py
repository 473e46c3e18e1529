"""Following shapes through a rearrangement tells where every element comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from streamshard.checkpoint.disk_layout import Rearrangement
from streamshard.errors import CheckpointError


def _experts(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    gate, up = tensors["a"].chunk(2, dim=1)
    return [part.squeeze(0) for part in (*gate.contiguous().chunk(3, dim=0), *up.contiguous().chunk(3, dim=0))]


def _fused(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    rows = torch.cat([tensors["b"], tensors["c"]], dim=0)
    columns = torch.cat([tensors["b"], tensors["c"][:4]], dim=-1)
    return [rows, columns, torch.stack([tensors["b"], tensors["c"][:4]], dim=1)]


def _interleaved(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    swapped = tensors["a"].reshape(3, 2, 4, 5).transpose(1, 2).reshape(3, 8, 5)
    return [swapped, swapped[1:, 2:6], tensors["b"].t().contiguous().view(2, 2, 5)]


@pytest.mark.parametrize("rearrange", [_experts, _fused, _interleaved])
def test_runs_say_where_every_element_comes_from(
    rearrange: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]],
) -> None:
    """Moving elements as the runs of shapes say gives what the operations give on values."""
    shapes = {"a": (3, 8, 5), "b": (4, 5), "c": (6, 5)}
    numbers = torch.randperm(3 * 8 * 5 + 4 * 5 + 6 * 5).split([120, 20, 30])
    values = {name: flat.view(shape) for (name, shape), flat in zip(shapes.items(), numbers, strict=True)}
    metas = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}
    with Rearrangement(metas) as followed:
        results = rearrange(metas)
    for want, result in zip(rearrange(values), results, strict=True):
        got = torch.full((want.numel(),), -1)
        for run in followed.runs("x", result):
            source = values[run.source].reshape(-1)
            got[run.start : run.start + run.numel] = source[run.source_start : run.source_start + run.numel]
        assert torch.equal(got, want.reshape(-1))


def test_computed_values_cannot_be_exported() -> None:
    """Anything but moving elements raises, and names the tensor."""
    source = torch.empty(4, 4, device="meta")
    with Rearrangement({"a": source}) as followed:
        results = {"sum": source + 1, "cast": source.half(), "mixed": torch.cat([source, source.double()])}
    for name, result in results.items():
        with pytest.raises(CheckpointError, match=f"saving '{name}' computes new values"):
            followed.runs(name, result)


def test_element_by_element_moves_are_refused() -> None:
    """A large transposition would be millions of writes of two bytes."""
    source = torch.empty(1024, 1024, device="meta")
    with Rearrangement({"a": source}) as followed:
        result = source.t().contiguous()
    with pytest.raises(CheckpointError, match="move its elements one by one"):
        followed.runs("x", result)
