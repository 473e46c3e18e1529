"""A checkpoint without the run it is of: no process group, no model's class, no GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.directory import find_checkpoint
from streamshard.checkpoint.export import floating_dtype
from streamshard.checkpoint.huggingface import with_dtype
from streamshard.checkpoint.manifest import Manifest, check_sizes, read_manifest
from streamshard.checkpoint.piece_files import PieceFiles
from streamshard.checkpoint.publish import write_synced
from streamshard.checkpoint.rearrange import Run
from streamshard.checkpoint.restore import Read
from streamshard.checkpoint.tree import dtype_named
from streamshard.checkpoint.writer import Alone, TensorEntry, write_sharded
from streamshard.config import parse_bytes, parse_path
from streamshard.errors import CheckpointError, ConfigError
from streamshard.log import progress

__all__ = ["Exported", "Opened", "export_checkpoint", "numel_of_params", "open_checkpoint"]


class Opened(NamedTuple):
    """A checkpoint whose files are all there.

    Attributes:
        path: its directory.
        manifest: what it holds.
        files: where that lies; their contents have not been verified.
    """

    path: Path
    manifest: Manifest
    files: PieceFiles

    def model_called(self, name: str | None) -> str:
        """The name of a model in the manifest.

        Args:
            name: with or without the ``model.`` of one of several; None: the only one.

        Raises:
            ConfigError: there is no such model, or there are several.
        """
        models: list[str] = list(self.manifest.state["models"])
        found = models if name is None else [each for each in models if each in (name, f"model.{name}")]
        if len(found) != 1:
            given = f"model={name!r}" if name is not None else "no model was named"
            raise ConfigError(f"{given}: {self.path} holds {', '.join(map(repr, models))}; name one of them")
        return found[0]


@contextlib.contextmanager
def open_checkpoint(directory: str | os.PathLike[str]) -> Iterator[Opened]:
    """A checkpoint, or the latest in a directory of them.

    Raises:
        CheckpointError: there is none, or a file of it is missing or has another size.
    """
    path = find_checkpoint(parse_path("directory", directory))
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    with PieceFiles(path, manifest) as files:
        yield Opened(path, manifest, files)


class Exported(NamedTuple):
    """What `export_checkpoint` has done.

    Attributes:
        path: of the checkpoint.
        files: names of those written, the index last.
        custom_code: the model's class, if its code is the user's own and missing beside the weights.
    """

    path: Path
    files: list[str]
    custom_code: str | None


def export_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> Exported:
    """The files that `export_safetensors` would have written of a model when it was saved, to the byte.

    The checkpoint's checksums are verified first. Needs the memory of two chunks.

    Args:
        directory: a checkpoint, or a directory of them, of which the latest that is whole is taken.
        out: where to; made if it is not there. An earlier export in it is replaced once the new one is whole.
        model: its name, where several were saved.
        dtype: of floating-point tensors, such as ``"bfloat16"``; None is what each had before it was sharded.
        max_shard_size: tensor bytes a file may hold, as a number or ``"5GB"``.

    Raises:
        CheckpointError: names the file that is damaged or cannot be written, or says why such a model cannot be
            exported.
        ConfigError: an argument that cannot work.
    """
    parse_bytes("max_shard_size", max_shard_size)
    root = parse_path("out", out)
    wanted = floating_dtype(dtype)
    with open_checkpoint(directory) as opened:
        name = opened.model_called(model)
        saved = opened.manifest.state["models"][name]
        plan = saved["export"]
        if "error" in plan:
            raise CheckpointError(f"{opened.path}: {name!r} cannot be exported: {plan['error']}")
        opened.files.verify(Alone())
        entries = list(_entries(opened, name, plan["tensors"], wanted))

        def write_beside(staging: Path) -> None:
            for file, text in plan["files"].items():
                if file == "config.json" and wanted is not None:
                    text = with_dtype(text, wanted)
                write_synced(staging / file, text.encode())

        total = sum((entry.stop - entry.start) * entry.dtype.itemsize for entry in entries)
        with progress(f"exporting {opened.path.name}", total, shows=True) as advance:
            files = write_sharded(
                entries,
                root,
                Alone(),
                max_shard_size=max_shard_size,
                total_parameters=numel_of_params(opened.manifest, name),
                write_beside=write_beside,
                advance=advance,
            )
        opened.files.check_unchanged()
    return Exported(opened.path, files, plan["custom_code"])


def numel_of_params(manifest: Manifest, model: str) -> int:
    """How many numbers the parameters of a saved model are."""
    return sum(manifest.tensors[f"{model}/{param}"].numel for param in manifest.state["models"][model]["params"])


@dataclass(frozen=True)
class _Range:
    """Elements [first, first + count) of a saved tensor. See `writer.Elements`."""

    files: PieceFiles
    tensor: str
    first: int
    count: int

    def numel(self) -> int:
        return self.count

    def read(self, start: int, target: torch.Tensor) -> None:
        self.files.read(Read(self.tensor, self.first + start, target))


def _entries(
    opened: Opened, model: str, tensors: Sequence[Sequence[Any]], dtype: torch.dtype | None
) -> Iterator[TensorEntry]:
    for name, shape, own, runs in tensors:
        stored = dtype_named(own)
        spec = name, tuple(shape), dtype if dtype is not None and stored.is_floating_point else stored
        yield TensorEntry(*spec, 0, 0, None)
        for run in (Run(*each) for each in runs):
            elements = _Range(opened.files, f"{model}/{run.source}", run.source_start, run.numel)
            yield TensorEntry(*spec, run.start, run.start + run.numel, elements)
