"""`load_safetensors`: a directory in the Hugging Face layout into a sharded model, each rank reading its own bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.directory import HUGGING_FACE, what_is
from streamshard.checkpoint.disk_layout import DiskTensor, LocalPiece, Run, local_pieces, overlaps, plan_loading
from streamshard.checkpoint.safetensors_file import (
    INDEX_NAME,
    SINGLE_NAME,
    SUMS_NAME,
    FileRecord,
    OpenFiles,
    StoredTensor,
    files_of_index,
    parse_sums,
)
from streamshard.comm.objects import RankGroup, gather_from_all_ranks, run_on_all_ranks
from streamshard.errors import CheckpointError
from streamshard.integrations import huggingface
from streamshard.log import log, progress
from streamshard.unit.shard import ParamShard

__all__ = ["Difference", "Loaded", "StoredDirectory", "load_shards", "put_back_buffers", "read_directory"]

_NAMES_SHOWN = 8
_CHARACTERS_SHOWN = 200
_OPENED_AT_MOST = 10  # times in a row that a directory may be replaced while it is being opened
_SAMPLE_BYTES = 256


# ------------------------------------------------------------------------------------------------ directories


class StoredDirectory(OpenFiles):
    """The tensors of a Hugging Face directory at one moment. Leaving the context closes its files.

    Attributes:
        stored: tensors by name.
        records: checksums of the files, in their order; None if there are none.
    """

    stored: dict[str, StoredTensor]
    records: list[FileRecord] | None = None

    @property
    def sizes_bytes(self) -> list[int]:
        """Of the files."""
        return [self.identity(number).size_bytes for number in range(len(self.names))]

    def digest(self, *, samples: bool) -> str:
        """Says whether two ranks see the same files.

        Args:
            samples: of names, shapes, and some bytes of every tensor: of copies, or after a step of training, it is
                the same or another. Otherwise of what tells files from any others on the same storage.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self.stored.items()):
            digest.update(repr((name, self.names[tensor.file], tensor)).encode())
            if samples and tensor.n_bytes:
                numel = tensor.n_bytes // tensor.dtype.itemsize
                sample = torch.empty(
                    min(_SAMPLE_BYTES // tensor.dtype.itemsize, numel - numel // 2), dtype=tensor.dtype
                )
                self.read(tensor, numel // 2, sample)
                digest.update(sample.view(torch.uint8).numpy().tobytes())
        if not samples:
            digest.update(repr([self.identity(number) for number in range(len(self.names))]).encode())
        return digest.hexdigest()

    def verify_share(self, part: int, parts: int, advance: Callable[[int], object]) -> None:
        """Compare files with their checksums, where there are such, as one of `parts` readers.

        Raises:
            CheckpointError: names the file that is not what its checksum says, or has none.
        """
        advice = "if it is as it should be, delete " + SUMS_NAME
        if self.records is not None:
            try:
                self.verify(self.records, part, parts, advance)
            except CheckpointError as error:
                replaced = "or it was replaced by something that does not keep checksums"
                raise CheckpointError(f"{error}; {replaced}: {advice}") from error

    def find_tensors(self) -> None:
        """All tensors in the files, which must be what the index says, the first of the files."""
        if self.names[0] == SINGLE_NAME:
            self.stored = dict(self.tensors(0))
            return
        index = self.path(0)
        try:
            weight_map = files_of_index(self.read_all(0))
            for name in sorted(set(weight_map.values())):
                if Path(name).name != name:
                    raise ValueError(f"it names {name!r}, which is not a file of its own directory")
        except ValueError as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
        self.names = [INDEX_NAME, *sorted(set(weight_map.values()))]
        self.stored = {}
        for number in range(1, len(self.names)):
            try:
                inside = self.tensors(number)
            except CheckpointError as error:
                raise CheckpointError(f"{error} ({INDEX_NAME} names it)") from error
            for tensor, stored in inside.items():
                if weight_map.get(tensor) != self.names[number]:
                    raise CheckpointError(
                        f"{self.path(number)} holds {tensor!r}, which {INDEX_NAME} does not say: they do not belong "
                        "together"
                    )
                self.stored[tensor] = stored
        if lost := weight_map.keys() - self.stored.keys():
            raise CheckpointError(f"{index} says {min(lost)!r} is in {weight_map[min(lost)]}, which does not have it")

    def find_checksums(self) -> None:
        """Take over what lies beside the files; called once the tensors are found."""
        try:
            records = parse_sums(self.root / SUMS_NAME)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"cannot read {self.root / SUMS_NAME}: {error}") from error
        if without := next((name for name in self.names if name not in records), None):
            raise CheckpointError(
                f"{self.root / SUMS_NAME} has no checksums of {without}: it is damaged, or {without} was put there by "
                f"something that does not keep checksums; if {without} is as it should be, delete {SUMS_NAME}"
            )
        self.records = [records[name] for name in self.names]


def read_directory(directory: str | os.PathLike[str]) -> StoredDirectory:
    """Open a Hugging Face directory and find every tensor in it; of files, headers only are read.

    An export may replace another meanwhile. No name of a numbered file ever stands for different bytes, so an index
    leads to its own files or, once they are gone, to none; then the directory is opened again.

    Raises:
        CheckpointError: there is nothing to read, what is there is damaged or contradicts itself, or it is replaced
            again and again.
    """
    root = Path(directory)
    for _ in range(_OPENED_AT_MOST):
        front = _front(root)
        if front is None:
            if _front(root) is not None:  # came while it was looked for, and the index went
                continue
            raise CheckpointError(what_is(root, HUGGING_FACE) or f"{root} has neither {SINGLE_NAME} nor {INDEX_NAME}")
        with contextlib.ExitStack() as opened:
            stored = opened.enter_context(StoredDirectory(root, front[:1]))
            try:
                stored.find_tensors()
                stored.find_checksums()
            except CheckpointError:
                if _front(root) == front:
                    raise
                continue
            if _front(root) == front:  # so these checksums are its own
                opened.pop_all()
                return stored
    raise CheckpointError(f"{root} was replaced {_OPENED_AT_MOST} times while it was being opened")


def _front(root: Path) -> tuple[str, int, int, int] | None:
    """The file at which readers begin, and which one it is."""
    for name in (SINGLE_NAME, INDEX_NAME):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(root / name)
            if stat.S_ISREG(status.st_mode):
                return name, status.st_ino, status.st_size, status.st_mtime_ns
    return None


# ------------------------------------------------------------------------------------------------ loading


def load_shards(
    model: nn.Module,
    shards: Sequence[ParamShard],
    group: RankGroup,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
) -> Loaded:
    """What `streamshard.load_safetensors` does, with the model's parameters and ranks given."""
    root, doing = Path(directory), f"load {directory}"
    began = time.perf_counter()
    with contextlib.ExitStack() as opened:
        stored, is_shared = _open_together(group, root, opened)
        # Where each host has its own, each rank reads all of it.
        part, parts = (group.number, group.total_size) if is_shared else (0, 1)
        total = sum(stored.sizes_bytes) // parts
        with progress(f"verifying {root.name}", total, shows=group.is_first and stored.records is not None) as advance:
            run_on_all_ranks(group, doing, lambda: stored.verify_share(part, parts, advance))
        plan = run_on_all_ranks(group, doing, lambda: _plan(model, shards, stored))
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


def _open_together(group: RankGroup, root: Path, opened: contextlib.ExitStack) -> tuple[StoredDirectory, bool]:
    """The directory as all ranks see it; an export may put another in its place between one rank's look and the next's.

    Copies on disks of different hosts are equal if their headers are, and some bytes of each tensor. Then the second
    result is False.
    """
    doing = f"load {root}"
    for _ in range(_OPENED_AT_MOST):
        stored = run_on_all_ranks(group, doing, lambda: opened.enter_context(read_directory(root)))
        for is_shared in (True, False):
            seen = gather_from_all_ranks(group, doing, lambda: stored.digest(samples=not is_shared))  # noqa: B023
            if all(each == seen[0] for each in seen):
                return stored, is_shared
        opened.close()
    other = next(rank for rank, found in enumerate(seen) if found != seen[0])
    raise CheckpointError(
        f"could not load {root}: rank {other} sees other files there than rank 0, which are being replaced, or are "
        "different copies on the disks of different hosts"
    )


def _plan(model: nn.Module, shards: Sequence[ParamShard], stored: StoredDirectory) -> _Plan:
    """Everything that may be wrong with the files or the model is found here, before anything is changed."""
    matches, difference = _compare(model, shards, stored.stored)
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


def _read(model: nn.Module, plan: _Plan, files: StoredDirectory, advance: Callable[[int], object]) -> None:
    for wanted, stored in sorted(plan.matches, key=lambda match: match.stored[:2]):
        for start, _, data in overlaps(wanted, plan.pieces):
            files.read(stored, start, data)
        advance(stored.n_bytes)
    files.check_unchanged()
    put_back_buffers(model, plan.pieces)


def put_back_buffers(model: nn.Module, pieces: Mapping[str, LocalPiece]) -> None:
    """Where a buffer was not contiguous, what was read is still in a copy of it."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            piece = pieces.get(name)
            if piece is not None and piece.data.data_ptr() != buffer.data_ptr():
                buffer.copy_(piece.data.view(buffer.shape))
