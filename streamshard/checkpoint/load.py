"""`load_safetensors`: a directory in the Hugging Face layout into a sharded model, each rank reading its own bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.disk_layout import DiskTensor, LocalPiece, local_pieces, overlaps, plan_loading
from streamshard.checkpoint.rearrange import Run
from streamshard.checkpoint.stored_files import StoredDirectory, StoredTensor, read_directory
from streamshard.checkpoint.writer import CHUNK_BYTES, RankGroup, gather_from_all_ranks, run_on_all_ranks
from streamshard.errors import CheckpointError
from streamshard.log import log, progress
from streamshard.unit.shard import ParamShard

__all__ = ["Difference", "Loaded", "load_shards"]

_NAMES_SHOWN = 8
_CHARACTERS_SHOWN = 200
_OPENED_AT_MOST = 5  # times that ranks open a directory before they say that they see different files


def load_shards(
    model: nn.Module,
    shards: Sequence[ParamShard],
    group: RankGroup,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
) -> Loaded:
    """What `streamshard.load_safetensors` does, with the model's parameters and ranks given."""
    root = Path(directory)
    began = time.perf_counter()
    with contextlib.ExitStack() as opened:
        stored, is_shared = _open_together(group, root, opened)
        # Where each host has its own, each rank reads all of it.
        part, parts = (group.number, group.total_size) if is_shared else (0, 1)
        with progress(
            f"verifying {root.name}", sum(stored.sizes_bytes) // parts, shows=group.is_first and stored.sums is not None
        ) as advance:
            shares = gather_from_all_ranks(group, f"load {root}", lambda: stored.read_share(part, parts, advance))
        seen = shares if is_shared else [shares[group.number]]
        run_on_all_ranks(group, f"load {root}", lambda: stored.verify(seen))
        plan = run_on_all_ranks(group, f"load {root}", lambda: _plan(model, shards, root, stored))
        if strict and plan.difference.size:
            raise plan.difference.error(root, model)  # on every rank: they have read the same headers
        # From here on only the storage itself can fail.
        half = f"finish loading {root}, and the model holds some of its weights now: load again before using it"
        n_bytes = sum(match.stored.n_bytes for match in plan.matches)
        with progress(f"loading {root.name}", n_bytes, shows=group.is_first) as advance:
            run_on_all_ranks(group, half, lambda: _read(model, plan, stored, advance))
    log.info("loaded %s in %.1f s", root, time.perf_counter() - began)
    return Loaded(plan.difference, {run.source for match in plan.matches for run in match.wanted.runs})


class Difference(NamedTuple):
    """What files and a model do not have in common. All names, in their order in the model or of the alphabet.

    Attributes:
        missing: the model wants them, and the files do not have them.
        unexpected: the files have them, and the model does not.
        mismatched: of another shape or kind, and what these are.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def size(self) -> int:
        """How many names there are."""
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)

    def error(self, root: Path, model: nn.Module) -> CheckpointError:
        """What is raised for it. Its message shows some of the names, it has all of them."""
        parts = [f"{kind} {_listed(names)}" for kind, names in zip(self._fields, self, strict=True) if names]
        what = f"{root} does not fit {type(model).__name__}: {'; '.join(parts)}"
        if self.size > sum(min(len(names), _NAMES_SHOWN) for names in self):
            what += ". The error has all names, in its attributes missing, unexpected and mismatched"
        return CheckpointError(what, **self._asdict())


class Loaded(NamedTuple):
    """What came of it.

    Attributes:
        difference: what was left out.
        names: of parameters and buffers that have what was in the files.
    """

    difference: Difference
    names: set[str]


class _Match(NamedTuple):
    """A tensor the model wants and where the files have it."""

    wanted: DiskTensor
    stored: StoredTensor


class _Plan(NamedTuple):
    """What is read, and where to: this rank's memory by parameter or buffer."""

    matches: list[_Match]
    pieces: dict[str, LocalPiece]
    difference: Difference


def _seen(stored: StoredDirectory, *, samples: bool) -> tuple[object, object]:
    """What has to be the same on all ranks: of one directory, or of copies."""
    return stored.layout, stored.sample() if samples else stored.identity


def _open_together(group: RankGroup, root: Path, opened: contextlib.ExitStack) -> tuple[StoredDirectory, bool]:
    """The directory as all ranks see it; an export may put another in its place between one rank's look and the next's.

    Copies on disks of different hosts are equal if their headers are, and some bytes of each tensor. Then the second
    result is False.
    """
    for _ in range(_OPENED_AT_MOST):
        stored = run_on_all_ranks(group, f"load {root}", lambda: opened.enter_context(read_directory(root)))
        if _are_equal(gather_from_all_ranks(group, f"load {root}", functools.partial(_seen, stored, samples=False))):
            return stored, True
        seen = gather_from_all_ranks(group, f"load {root}", functools.partial(_seen, stored, samples=True))
        if _are_equal(seen):
            return stored, False
        opened.close()
    other = next(rank for rank, found in enumerate(seen) if found != seen[0])
    raise CheckpointError(
        f"could not load {root}: rank {other} sees other files there than rank 0, which are being replaced, or are "
        "different copies on the disks of different hosts"
    )


def _are_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def _plan(model: nn.Module, shards: Sequence[ParamShard], root: Path, stored: StoredDirectory) -> _Plan:
    """Everything that may be wrong with the files or the model is found here, before anything is changed."""
    matches, difference = _compare(model, shards, stored.tensors)
    pieces = local_pieces(model, shards, buffers=True)
    names = {run.source for match in matches for run in match.wanted.runs}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        spread = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        if name in names and (spread or buffer.is_inference()):
            how = "is expanded, several of its elements share memory" if spread else "was made in inference mode"
            raise CheckpointError(f"buffer {name!r} {how}: it cannot be written to; replace it by its clone() first")
    return _Plan(matches, pieces, difference)


def _compare(
    model: nn.Module, shards: Sequence[ParamShard], stored: Mapping[str, StoredTensor]
) -> tuple[list[_Match], Difference]:
    """What fits, by tensor in the files, and what does not."""
    metas = {name: torch.empty(there.shape, dtype=there.dtype, device="meta") for name, there in stored.items()}
    made = plan_loading(model, shards, metas)
    difference = Difference([], [], [])
    runs: dict[str, list[Run]] = {}
    left_out = huggingface.ignored_on_save(model)
    for source, names in made.wanted.items():  # of tied names one is enough, and the first counts
        found = next((tensor for tensor in names if tensor.name in made.tensors), None)
        failed = next((tensor.name for tensor in names if tensor.name in made.failed), None)
        if found is None and failed is not None:
            difference.mismatched.append(f"{failed} ({made.failed[failed]})")
        elif found is None:
            if not left_out.intersection(tensor.name for tensor in names):
                difference.missing.append(names[0].name)
        elif problem := _problem_with(made.tensors[found.name], found):
            difference.mismatched.append(f"{found.name} ({problem})")
        else:
            for run in made.tensors[found.name].runs:
                runs.setdefault(run.source, []).append(Run(source, run.start, run.source_start, run.numel))
    extra = sorted(set(stored) - made.used)
    ignored = huggingface.ignored_on_load(model, extra)
    difference.unexpected.extend(name for name in extra if name not in ignored)
    layouts = (DiskTensor(name, stored[name].shape, stored[name].dtype, tuple(own)) for name, own in runs.items())
    return [_Match(layout, stored[layout.name]) for layout in layouts], difference


def _problem_with(there: DiskTensor, wanted: DiskTensor) -> str:
    """Why what is there is not what is wanted; "" if it is."""
    if there.shape != wanted.shape:
        return f"is {list(there.shape)}, wanted {list(wanted.shape)}"
    if there.dtype.is_floating_point != wanted.dtype.is_floating_point:
        return f"is {there.dtype}, wanted {wanted.dtype}"
    return ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    shown = (
        name if len(name) <= _CHARACTERS_SHOWN else f"{name[:_CHARACTERS_SHOWN]}.." for name in names[:_NAMES_SHOWN]
    )
    return ", ".join(shown) + more


def _read(model: nn.Module, plan: _Plan, stored: StoredDirectory, advance: Callable[[int], object]) -> None:
    staging = bytearray(CHUNK_BYTES)
    for match in sorted(plan.matches, key=lambda match: (str(match.stored.file.name), match.stored.offset)):
        _read_tensor(match, plan.pieces, staging)
        advance(match.stored.n_bytes)
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
            raise CheckpointError(f"{file.name} became shorter while it was read")
        target = target[count:]


def put_back_buffers(model: nn.Module, pieces: Mapping[str, LocalPiece]) -> None:
    """Where a buffer was not contiguous, what was read is still in a copy of it."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            piece = pieces.get(name)
            if piece is not None and piece.data.data_ptr() != buffer.data_ptr():
                buffer.copy_(piece.data.view(buffer.shape))
