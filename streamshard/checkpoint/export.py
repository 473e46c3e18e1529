"""`export_safetensors`: a sharded model to a directory that `from_pretrained` loads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.disk_layout import local_pieces, overlaps, plan_disk, saved_names
from streamshard.checkpoint.writer import RankGroup, TensorEntry, run_on_all_ranks, write_sharded
from streamshard.config import parse_bytes
from streamshard.errors import ConfigError
from streamshard.log import log, progress
from streamshard.unit.shard import ParamShard

__all__ = ["export_shards", "floating_dtype", "model_dtype"]


def export_shards(
    model: nn.Module,
    shards: Sequence[ParamShard],
    group: RankGroup,
    directory: str | os.PathLike[str],
    dtype: torch.dtype | str | None,
    max_shard_size: int | str,
) -> list[str]:
    """What `streamshard.export_safetensors` does, with the model's parameters and ranks given."""
    parse_bytes("max_shard_size", max_shard_size)
    wanted = floating_dtype(dtype)
    entries = run_on_all_ranks(group, "plan the export", lambda: _entries(model, shards, group, wanted))

    def write_beside(staging: Path) -> None:
        if huggingface.is_transformers_model(model):
            huggingface.write_config(model, staging, model_dtype(model, shards, wanted))

    began = time.perf_counter()
    own_bytes = sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)
    with progress(f"exporting {Path(directory).name}", own_bytes, shows=group.is_first) as advance:
        names = write_sharded(
            entries,
            directory,
            group,
            max_shard_size=max_shard_size,
            total_parameters=sum(shard.layout.numel for shard in shards),
            write_beside=write_beside,
            advance=advance,
        )
    log.info("exported %s in %.1f s", directory, time.perf_counter() - began)
    return names


def _entries(
    model: nn.Module, shards: Sequence[ParamShard], group: RankGroup, dtype: torch.dtype | None
) -> list[TensorEntry]:
    huggingface.check_exportable(model)
    pieces = local_pieces(model, shards, buffers=group.is_first)
    if group.replica:  # replicas hold the same, or in local SGD nearly the same: one of them writes
        for shard in shards:
            del pieces[shard.name]
    entries: list[TensorEntry] = []
    for tensor in plan_disk(model, shards, dtype):
        # Every rank names every tensor, so that all make the same plan.
        entries.append(TensorEntry(tensor.name, tensor.shape, tensor.dtype, 0, 0, None))
        entries.extend(
            TensorEntry(tensor.name, tensor.shape, tensor.dtype, *overlap) for overlap in overlaps(tensor, pieces)
        )
    return entries


def model_dtype(model: nn.Module, shards: Sequence[ParamShard], dtype: torch.dtype | None) -> torch.dtype | None:
    """What ``model.dtype`` would be of the exported model: that of its first floating-point parameter."""
    by_name = {shard.name: shard.dtype for shard in shards}
    own = (by_name[source] for source in saved_names(model, shards).values() if source in by_name)
    first = next((each for each in own if each.is_floating_point), None)
    return first if dtype is None or first is None else dtype


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a user means by it.

    Raises:
        ConfigError: it is none.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f'dtype={dtype!r}: wanted a floating-point torch.dtype, its name such as "bfloat16", or None')
    return found
