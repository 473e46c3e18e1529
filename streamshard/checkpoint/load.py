"""`load_safetensors`: load a Hugging Face directory into a sharded model. Each rank reads its own bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.disk_layout import (
    Rearrangement,
    Run,
    TensorPiece,
    by_source,
    local_pieces,
    overlaps,
    saved_names,
    whole_tensors,
)
from streamshard.checkpoint.safetensors_file import MODEL_FILES, FileNames, OpenFiles, bytes_of, copy_range, read_text
from streamshard.comm.ranks import RankGroup, run_on_all_ranks
from streamshard.conventions import conventions
from streamshard.core.params import Param
from streamshard.errors import CheckpointError, log

_NAMES_SHOWN = 8
_SAMPLE_BYTES = 256


class StoredDirectory(OpenFiles):
    """The tensors of a Hugging Face directory. The constructor reads only the files' headers.

    Args:
        root: the directory.
        names: of its files.

    Attributes:
        tensors: by name, views of the mapped files.

    Raises:
        CheckpointError: the directory has no weights, or files are damaged or contradict the index.
    """

    def __init__(self, root: Path, names: FileNames = MODEL_FILES) -> None:
        super().__init__(root)
        if (self.root / names.single).is_file():
            file_of = dict.fromkeys(self.open(names.single).keys(), names.single)
        else:
            file_of = self._read_index(names)
        self.tensors = {name: self.stored(file, name) for name, file in file_of.items()}

    def digest(self) -> str:
        """A hash of names, shapes and some bytes of each tensor. Weights of different training steps differ in it."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
            middle = tensor.view(-1)[tensor.numel() // 2 :][: _SAMPLE_BYTES // tensor.dtype.itemsize]
            digest.update(bytes_of(middle))
        return digest.hexdigest()

    def _read_index(self, names: FileNames) -> dict[str, str]:
        """Read which file has each tensor."""
        index = self.root / names.index
        if not index.is_file():
            raise CheckpointError(
                f"{self.root} has neither {names.single} nor {names.index}. Checkpoints of save_checkpoint are read "
                "by load_checkpoint"
            )
        try:
            file_of: dict[str, str] = dict(json.loads(read_text(index))["weight_map"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error!r:.200}") from None
        for file in file_of.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index} names {file!r}, which is not a file of its own directory")
        return file_of


def load_shards(
    model: nn.Module, shards: Sequence[Param], ranks: RankGroup, root: Path, *, strict: bool = True
) -> tuple[Difference, set[str]]:
    """Load a directory, as `streamshard.load_safetensors` documents, into `shards`.

    Returns:
        The difference between files and model, and the names of parameters and buffers that were loaded.
    """
    names = FileNames(conventions().file_stem(model))
    stored = run_on_all_ranks(ranks, f"load {root}", lambda: StoredDirectory(root, names))
    if not ranks.are_equal(stored.digest()):
        raise CheckpointError(
            f"could not load {root}: ranks see different files there. Another process is replacing them: load again; "
            "or the disks of two hosts hold different copies"
        )

    def compare() -> tuple[dict[str, list[Run]], Difference, dict[str, TensorPiece]]:
        return *_compare(model, shards, stored.tensors), local_pieces(model, shards, buffers=True)

    runs, difference, pieces = run_on_all_ranks(ranks, f"load {root}", compare)
    if strict and any(difference):
        raise difference.error(root, model)  # on every rank: they have read the same headers

    def read() -> None:
        with torch.no_grad():
            for name, own in runs.items():
                for start, data in overlaps(own, pieces):
                    copy_range(stored.tensors[name], start, data)
            put_back_buffers(model, pieces)

    # From here on only the storage itself can fail.
    run_on_all_ranks(
        ranks, f"finish loading {root}, and the model holds some of its weights now: load again before using it", read
    )
    log.info("loaded %s", root)
    return difference, {run.source for own in runs.values() for run in own}


class Difference(NamedTuple):
    """Names that differ between the files and the model, in the model's order or alphabetical.

    Attributes:
        missing: names that the model has and the files do not.
        unexpected: names that the files have and the model does not.
        mismatched: names whose shape or kind differs, each with the difference.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def error(self, root: Path, model: nn.Module) -> CheckpointError:
        """The error to raise. Its message shows some of the names, and its attributes have all names."""
        what = "; ".join(
            f"{kind} {', '.join(names[:_NAMES_SHOWN])}{' and more' if len(names) > _NAMES_SHOWN else ''}"
            for kind, names in self._asdict().items()
            if names
        )
        return CheckpointError(
            f"{root} does not fit {type(model).__name__}: {what}. The error's attributes have all names",
            **self._asdict(),
        )


def _compare(
    model: nn.Module, shards: Sequence[Param], stored: Mapping[str, torch.Tensor]
) -> tuple[dict[str, list[Run]], Difference]:
    """Match the tensors in the files with the model's parameters and buffers, and find what does not fit.

    A transformers model loads as ``from_pretrained`` does; any other model loads the tensors with its names.
    """
    names = saved_names(model, shards)
    wanted = whole_tensors(model, shards, names, None)
    metas = {name: torch.empty(there.shape, dtype=there.dtype, device="meta") for name, there in stored.items()}
    with Rearrangement(metas, "loading") as followed:
        made, failed, used, optional = conventions().rearrange_for_loading(model, metas, wanted)
    difference = Difference([], [], [])
    runs: dict[str, list[Run]] = {}
    for source, own in by_source(names).items():
        found = next((name for name in own if name in made), None)  # of tied names one is enough; the first counts
        bad = next((name for name in own if name in failed), None)
        try:
            if found is not None:
                _check_kind(made[found], wanted[found])
                for run in followed.runs(found, made[found]):
                    runs.setdefault(run.source, []).append(Run(source, run.start, run.source_start, run.numel))
            elif bad is not None:
                difference.mismatched.append(f"{bad} ({failed[bad]})")
            elif not optional.intersection(own):
                difference.missing.append(own[0])
        except CheckpointError as error:
            difference.mismatched.append(f"{found} ({error})")
    difference.unexpected.extend(sorted(set(stored) - used))
    return runs, difference


def _check_kind(there: torch.Tensor, wanted: torch.Tensor) -> None:
    if there.shape != wanted.shape:
        raise CheckpointError(f"is {list(there.shape)}, wanted {list(wanted.shape)}")
    if there.dtype.is_floating_point != wanted.dtype.is_floating_point:
        raise CheckpointError(f"is {there.dtype}, wanted {wanted.dtype}")


def put_back_buffers(model: nn.Module, pieces: Mapping[str, TensorPiece]) -> None:
    """Copy loaded values into buffers that are not contiguous, from the contiguous copies that were read."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in pieces and not buffer.is_contiguous():
            buffer.copy_(pieces[name].data.view(buffer.shape))
