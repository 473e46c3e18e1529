"""Loading reads what was exported, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamshard.checkpoint.load import load_shards
from streamshard.errors import ExportError
from tests.exporting import (
    MODELS,
    Plain,
    export,
    filled,
    on_threads,
    shards_for,
    succeed,
)


def load(model: nn.Module, directory: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Load into simulated ranks of `model`; the whole parameters, put together."""
    ranks = [shards_for(model, rank, world_size) for rank in range(world_size)]
    for shards in ranks:
        for shard in shards:
            shard.piece.fill_(torch.nan)
    succeed(on_threads(world_size, lambda group: load_shards(model, ranks[group.rank], group, directory)))
    whole = {}
    for pieces in zip(*ranks, strict=True):
        flat = torch.cat([shard.main for shard in pieces])
        for name in (pieces[0].name, *pieces[0].aliases):
            whole[name] = flat.view(pieces[0].layout.shape)
    return whole


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("original_format", [True, False])
def test_load_reads_what_save_pretrained_writes(
    make: Callable[[], nn.Module], original_format: bool, tmp_path: Path
) -> None:
    """At another number of ranks, from several files, in either of the layouts transformers can write."""
    model = filled(make)
    model.save_pretrained(tmp_path, max_shard_size="3KB", save_original_format=original_format)
    whole = load(make(), tmp_path, 3)
    for name, param in model.named_parameters(remove_duplicate=False):
        assert torch.equal(whole[name], param), name


def test_load_converts_and_fills_buffers(tmp_path: Path) -> None:
    """A 16-bit file fills fp32 main weights; buffers arrive whole, also where they are not contiguous."""
    model = filled(Plain)
    model.counts.copy_(torch.randint(100, (3, 2)))
    model.norm.running_mean.copy_(torch.randn(7))
    export(model, tmp_path, 2, dtype="bfloat16")
    other: Any = Plain()
    whole = load(other, tmp_path, 2)
    assert torch.equal(whole["last.weight"], model.last.weight.bfloat16().float())
    assert torch.equal(whole["scale"], model.scale.bfloat16().float())
    assert torch.equal(other.counts, model.counts)
    assert torch.equal(other.norm.running_mean, model.norm.running_mean.bfloat16().float())


def test_load_takes_any_of_the_tied_names(tmp_path: Path) -> None:
    """Another tool may have kept another name of the same parameter."""
    model = filled(Plain)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    del tensors["first.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(Plain(), tmp_path, 2)["first.weight"], model.first.weight)


def test_load_names_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, of another kind: each is named, on every rank."""
    model = filled(Plain)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    del tensors["scale"]
    tensors["stray"] = torch.zeros(2)
    tensors["first.bias"] = torch.zeros(3)
    tensors["last.bias"] = torch.zeros(7, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    ranks = [shards_for(model, rank, 2) for rank in range(2)]
    before = [shard.main.clone() for shards in ranks for shard in shards]
    for outcome in on_threads(2, lambda group: load_shards(model, ranks[group.rank], group, tmp_path)):
        assert isinstance(outcome, ExportError)
        assert "does not fit Plain: missing scale; unexpected stray; mismatched first.bias (is [3], " in str(outcome)
        assert "last.bias (is torch.int8, wanted torch.float32)" in str(outcome)
    after = [shard.main for shards in ranks for shard in shards]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
