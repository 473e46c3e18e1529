"""`load_safetensors`: load a Hugging Face directory into a sharded model. Each rank reads its own bytes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.disk_layout import DiskTensor, LocalPiece, Run, local_pieces, overlaps, plan_loading
from streamshard.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME, OpenFiles, copy_range
from streamshard.comm.objects import RankGroup, gather_from_all_ranks, run_on_all_ranks
from streamshard.errors import CheckpointError, log
from streamshard.integrations import huggingface
from streamshard.unit.shard import ParamShard

__all__ = ["Difference", "Loaded", "StoredDirectory", "load_shards", "put_back_buffers"]

_NAMES_SHOWN = 8
_CHARACTERS_SHOWN = 200
_SAMPLE_BYTES = 256


class StoredDirectory(OpenFiles):
    """The tensors of a Hugging Face directory. Making one reads the files' headers only.

    Attributes:
        tensors: by name, views of the mapped files.
        files: names of the files.

    Raises:
        CheckpointError: there are no weights, or files are damaged or contradict each other.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(Path(directory))
        if (self.root / SINGLE_NAME).is_file():
            file_of = dict.fromkeys(self.open(SINGLE_NAME).keys(), SINGLE_NAME)
        else:
            file_of = self._read_index()
        self.files = sorted(set(file_of.values()))
        self.tensors: dict[str, torch.Tensor] = {}
        for file in self.files:
            for name in self.open(file).keys():  # noqa: SIM118  # it is no dict
                if file_of.get(name) != file:
                    raise CheckpointError(
                        f"{self.root / file} holds {name!r}, which {INDEX_NAME} does not say: they do not belong "
                        "together"
                    )
                self.tensors[name] = self.stored(file, name)
        if lost := file_of.keys() - self.tensors.keys():
            where = self.root / file_of[min(lost)]
            raise CheckpointError(f"{INDEX_NAME} says {min(lost)!r} is in {where}, which does not have it")

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """A hash of names, shapes and some bytes of each tensor. Weights of another training step have another one."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
            middle = tensor.view(-1)[tensor.numel() // 2 :][: _SAMPLE_BYTES // tensor.dtype.itemsize].clone()
            digest.update(middle.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _read_index(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self.root / INDEX_NAME
        if not index.is_file():
            raise CheckpointError(
                f"{self.root} has neither {SINGLE_NAME} nor {INDEX_NAME}. Checkpoints of save_checkpoint are read by "
                "load_checkpoint"
            )
        try:
            file_of: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error!r}") from error
        for file in file_of.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index} names {file!r}, which is not a file of its own directory")
        return file_of


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
    stored = run_on_all_ranks(group, doing, lambda: StoredDirectory(root))
    seen = gather_from_all_ranks(group, doing, stored.digest)
    other = next((rank for rank, found in enumerate(seen) if found != seen[0]), None)
    if other is not None:
        raise CheckpointError(
            f"could not load {root}: rank {other} sees other files there than rank 0. Another process is replacing "
            "them: load again; or the disks of two hosts hold different copies"
        )
    plan = run_on_all_ranks(group, doing, lambda: _plan(model, shards, stored))
    if strict and plan.difference.size:
        raise plan.difference.error(root, model)  # on every rank: they have read the same headers
    # From here on only the storage itself can fail.
    half = f"finish loading {root}, and the model holds some of its weights now: load again before using it"
    run_on_all_ranks(group, half, lambda: _read(model, plan, stored))
    log.info("loaded %s in %.1f s", root, time.perf_counter() - began)
    return Loaded(plan.difference, {run.source for match in plan.matches for run in match.runs})


class Difference(NamedTuple):
    """Names on which the files and the model differ, in the model's order or alphabetical.

    Attributes:
        missing: names that the model wants and the files do not have.
        unexpected: names that the files have and the model does not.
        mismatched: names whose shape or kind differs, each with the difference.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    @property
    def size(self) -> int:
        """How many names there are."""
        return len(self.missing) + len(self.unexpected) + len(self.mismatched)

    def error(self, root: Path, model: nn.Module) -> CheckpointError:
        """The error to raise. Its message shows some of the names, its attributes have all of them."""
        parts = [f"{kind} {_listed(names)}" for kind, names in zip(self._fields, self, strict=True) if names]
        what = f"{root} does not fit {type(model).__name__}: {'; '.join(parts)}"
        if self.size > sum(min(len(names), _NAMES_SHOWN) for names in self):
            what += ". The error has all names, in its attributes missing, unexpected and mismatched"
        return CheckpointError(what, **self._asdict())


class Loaded(NamedTuple):
    """What `load_shards` has done.

    Attributes:
        difference: what was left out.
        names: of parameters and buffers that were loaded.
    """

    difference: Difference
    names: set[str]


class _Plan(NamedTuple):
    """What is read, and where to: this rank's memory by parameter or buffer."""

    matches: list[DiskTensor]
    pieces: dict[str, LocalPiece]
    difference: Difference


def _plan(model: nn.Module, shards: Sequence[ParamShard], stored: StoredDirectory) -> _Plan:
    """Find all differences between the files and the model, before anything changes."""
    matches, difference = _compare(model, shards, stored.tensors)
    return _Plan(matches, local_pieces(model, shards, buffers=True), difference)


def _compare(
    model: nn.Module, shards: Sequence[ParamShard], stored: Mapping[str, torch.Tensor]
) -> tuple[list[DiskTensor], Difference]:
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
    matches = [DiskTensor(name, metas[name].shape, metas[name].dtype, tuple(own)) for name, own in runs.items()]
    return matches, difference


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


def _read(model: nn.Module, plan: _Plan, files: StoredDirectory) -> None:
    with torch.no_grad():
        for match in plan.matches:
            for start, data in overlaps(match, plan.pieces):
                copy_range(files.tensors[match.name], start, data)
    put_back_buffers(model, plan.pieces)


def put_back_buffers(model: nn.Module, pieces: Mapping[str, LocalPiece]) -> None:
    """Copy loaded values into buffers that are not contiguous: they were read into contiguous copies."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            piece = pieces.get(name)
            if piece is not None and piece.data.data_ptr() != buffer.data_ptr():
                buffer.copy_(piece.data.view(buffer.shape))
