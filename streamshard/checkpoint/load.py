"""`load_safetensors`: a directory in the Hugging Face layout into a sharded model, each rank reading its own bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.disk_layout import DiskTensor, LocalPiece, local_pieces, overlaps, plan_disk
from streamshard.checkpoint.rearrange import Run
from streamshard.checkpoint.safetensors_file import StoredDirectory, StoredTensor, read_directory
from streamshard.checkpoint.writer import CHUNK_BYTES, RankGroup, run_on_all_ranks
from streamshard.errors import ExportError
from streamshard.unit.shard import ParamShard

__all__ = ["load_shards"]

_NAMES_SHOWN = 8
_CHARACTERS_SHOWN = 200
_OPENED_AT_MOST = 5  # times that ranks open a directory before they say that they see different files


def load_shards(
    model: nn.Module, shards: Sequence[ParamShard], group: RankGroup, directory: str | os.PathLike[str]
) -> None:
    """What `streamshard.load_safetensors` does, with the model's parameters and ranks given."""
    root = Path(directory)
    with contextlib.ExitStack() as opened:
        stored = _open_together(group, root, opened)
        plan = run_on_all_ranks(group, f"load {root}", lambda: _plan(model, shards, root, stored))
        # From here on only the storage itself can fail.
        run_on_all_ranks(
            group,
            f"finish loading {root}, and the model holds some of its weights now: load again before using it",
            lambda: _read(model, plan, stored),
        )


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


class _Plan(NamedTuple):
    """What is read, and where to: this rank's memory by parameter or buffer."""

    matches: list[_Match]
    pieces: dict[str, LocalPiece]


def _open_together(group: RankGroup, root: Path, opened: contextlib.ExitStack) -> StoredDirectory:
    """The directory as all ranks see it; an export may put another in its place between one rank's look and the next's.

    Copies on disks of different hosts are equal if their headers are, and some bytes of each tensor.
    """
    for _ in range(_OPENED_AT_MOST):
        stored = run_on_all_ranks(group, f"load {root}", lambda: opened.enter_context(read_directory(root)))
        if _are_equal(group.gather_objects((stored.layout, stored.identity))):
            return stored
        sample = run_on_all_ranks(group, f"load {root}", stored.sample)
        seen = group.gather_objects((stored.layout, sample))
        if _are_equal(seen):
            return stored
        opened.close()
    other = next(rank for rank, found in enumerate(seen) if found != seen[0])
    raise ExportError(
        f"could not load {root}: rank {other} sees other files there than rank 0, which are being replaced, or are "
        "different copies on the disks of different hosts"
    )


def _are_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def _plan(model: nn.Module, shards: Sequence[ParamShard], root: Path, stored: StoredDirectory) -> _Plan:
    """Everything that may be wrong with the files or the model is found here, before anything is changed."""
    matches = _match(model, shards, root, stored)
    pieces = local_pieces(model, shards, buffers=True)
    names = {run.source for match in matches for run in match.wanted.runs}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        spread = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if name in names and (spread or buffer.is_inference()):
            how = "is expanded, several of its elements share memory" if spread else "was made in inference mode"
            raise ExportError(f"buffer {name!r} {how}: it cannot be written to; replace it by its clone() first")
    return _Plan(matches, pieces)


def _match(model: nn.Module, shards: Sequence[ParamShard], root: Path, stored: StoredDirectory) -> list[_Match]:
    # As the model's class saves it; failing that, as its modules have it (save_pretrained(save_original_format=False)).
    best: _Difference | None = None
    for rearrange in (True, False) if huggingface.is_transformers_model(model) else (False,):
        wanted = plan_disk(model, shards, None, drop_tied=False, rearrange=rearrange)
        matches, difference = _compare(model, wanted, stored.tensors)
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
    ignored = huggingface.ignored_on_load(model, extra)
    difference.unexpected.extend(name for name in extra if name not in ignored)
    return matches, difference


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    shown = (
        name if len(name) <= _CHARACTERS_SHOWN else f"{name[:_CHARACTERS_SHOWN]}.." for name in names[:_NAMES_SHOWN]
    )
    return ", ".join(shown) + more


def _read(model: nn.Module, plan: _Plan, stored: StoredDirectory) -> None:
    staging = bytearray(CHUNK_BYTES)
    for match in sorted(plan.matches, key=lambda match: (str(match.stored.file.name), match.stored.offset)):
        _read_tensor(match, plan.pieces, staging)
    stored.check_unchanged()
    put_back_buffers(model, plan.pieces)


def _read_tensor(match: _Match, pieces: Mapping[str, LocalPiece], staging: bytearray) -> None:
    """Read, convert and copy to the device, one chunk at a time."""
    file = match.stored.file
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


def put_back_buffers(model: nn.Module, pieces: Mapping[str, LocalPiece]) -> None:
    """Where a buffer was not contiguous, what was read is still in a copy of it."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            piece = pieces.get(name)
            if piece is not None and piece.data.data_ptr() != buffer.data_ptr():
                buffer.copy_(piece.data.view(buffer.shape))
