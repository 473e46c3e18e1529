"""`load_safetensors`: a directory in the Hugging Face layout into a sharded model, each rank reading its own bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.disk_layout import DiskTensor, LocalPiece, local_pieces, overlaps, plan_disk
from streamshard.checkpoint.rearrange import Run
from streamshard.checkpoint.safetensors_file import StoredTensor, read_directory
from streamshard.checkpoint.writer import CHUNK_BYTES, RankGroup, run_on_all_ranks
from streamshard.errors import ExportError
from streamshard.shard import ParamShard

__all__ = ["load_shards"]

_NAMES_SHOWN = 8


def load_shards(
    model: nn.Module, shards: Sequence[ParamShard], group: RankGroup, directory: str | os.PathLike[str]
) -> None:
    """What `streamshard.load_safetensors` does, with the model's parameters and ranks given."""
    root = Path(directory)
    matched = run_on_all_ranks(group, f"load {root}", lambda: _match(model, shards, root))
    run_on_all_ranks(group, f"load {root}", lambda: _read(model, shards, matched))


class _Match(NamedTuple):
    """A tensor the model wants and where the files have it."""

    wanted: DiskTensor
    stored: StoredTensor


class _Difference(NamedTuple):
    """What does not fit."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def size(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)


def _match(model: nn.Module, shards: Sequence[ParamShard], root: Path) -> list[_Match]:
    stored = read_directory(root)
    # As the model's class saves it; failing that, as its modules have it (save_pretrained(save_original_format=False)).
    best: _Difference | None = None
    for rearrange in (True, False) if huggingface.is_transformers_model(model) else (False,):
        wanted = plan_disk(model, shards, None, drop_tied=False, rearrange=rearrange)
        matches, difference = _compare(model, wanted, stored)
        if not difference.size:
            return matches
        if best is None or difference.size < best.size:
            best = difference
    parts = [f"{kind} {_listed(names)}" for kind, names in zip(_Difference._fields, best or (), strict=True) if names]
    raise ExportError(f"{root} does not fit {type(model).__name__}: {'; '.join(parts)}")


def _compare(
    model: nn.Module, wanted: Sequence[DiskTensor], stored: Mapping[str, StoredTensor]
) -> tuple[list[_Match], _Difference]:
    same: dict[tuple[Run, ...], list[DiskTensor]] = {}  # names of one tied parameter
    for tensor in wanted:
        same.setdefault(tensor.runs or (Run(tensor.name, 0, 0, 0),), []).append(tensor)
    left_out = huggingface.ignored_on_save(model)
    difference = _Difference([], [], [])
    matches: list[_Match] = []
    for group in same.values():
        found = next((tensor for tensor in group if tensor.name in stored), None)
        if found is None:
            if not left_out.intersection(tensor.name for tensor in group):
                difference.missing.append(group[0].name)
            continue
        there = stored[found.name]
        if there.shape != found.shape:
            difference.mismatched.append(f"{found.name} (is {list(there.shape)}, wanted {list(found.shape)})")
        elif there.dtype.is_floating_point != found.dtype.is_floating_point:
            difference.mismatched.append(f"{found.name} (is {there.dtype}, wanted {found.dtype})")
        matches.append(_Match(found, there))
    extra = sorted(set(stored) - {tensor.name for tensor in wanted})
    difference.unexpected.extend(name for name in extra if name not in huggingface.ignored_on_load(model, extra))
    return matches, difference


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _read(model: nn.Module, shards: Sequence[ParamShard], matches: Iterable[_Match]) -> None:
    pieces = local_pieces(model, shards, buffers=True)
    staging = bytearray(CHUNK_BYTES)
    by_file: dict[Path, list[_Match]] = {}
    for match in matches:
        by_file.setdefault(match.stored.path, []).append(match)
    for path, inside in by_file.items():
        with path.open("rb", buffering=0) as file:
            for match in inside:
                _read_tensor(file, match, pieces, staging)
    _put_back_buffers(model, pieces)


def _read_tensor(file: FileIO, match: _Match, pieces: Mapping[str, LocalPiece], staging: bytearray) -> None:
    """Read, convert and copy to the device, one chunk at a time."""
    chunk = torch.frombuffer(staging, dtype=torch.uint8).view(match.stored.dtype)
    item_bytes = match.stored.dtype.itemsize
    for start, stop, data in overlaps(match.wanted, pieces):
        for done in range(0, stop - start, chunk.numel()):
            part = data[done : done + chunk.numel()]
            target = memoryview(staging)[: part.numel() * item_bytes]
            file.seek(match.stored.offset + (start + done) * item_bytes)
            _read_all(file, target)
            part.copy_(chunk[: part.numel()])


def _read_all(file: FileIO, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise ExportError(f"{file.name} became shorter while it was read")
        target = target[count:]


def _put_back_buffers(model: nn.Module, pieces: Mapping[str, LocalPiece]) -> None:
    """Where a buffer was not contiguous, what was read is still in a copy of it."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            piece = pieces.get(name)
            if piece is not None and piece.data.data_ptr() != buffer.data_ptr():
                buffer.copy_(piece.data.view(buffer.shape))
