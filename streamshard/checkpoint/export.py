"""Export a sharded model's weights to a directory that `from_pretrained` loads.

    plan -> create (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)

All ranks synchronise at each arrow. If one rank fails, all ranks raise a `CheckpointError` that names it. Each rank
writes its own byte ranges into the same files. Nothing is gathered.

[Note: publishing an export]
All files are written into a partial directory inside the export's directory, and synced.
Its lock refuses a second process that exports there: see [Note: two runs in one directory] in `directory.py`. Readers
begin at the *front*: ``model.safetensors``, or the index if there is no such file. The index names the other files. So
renaming a new front over the old one replaces the whole export:

1. Several files get their names. In a directory without weights these are save_pretrained's, such as
   ``model-00001-of-00003.safetensors``. In any other directory the names contain the export's random token, such as
   ``model-89abcdef-00001-of-00003.safetensors``. So no name of a numbered file ever stands for different bytes: a
   program that has read the old index opens the old files, or gets FileNotFoundError. It never opens new ones.
2. The config is replaced, then the front. If an index replaces ``model.safetensors``, that file is removed after the
   index is in place.
3. Numbered files that the front does not name are removed.

After a kill or a power failure, readers find the old weights or the new ones. The next export removes other files. The
config cannot be replaced in the same rename as the weights: an error or a kill between the two leaves the new config
beside the old weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from streamshard.checkpoint.directory import Partial, remove_partial, write_together
from streamshard.checkpoint.disk_layout import local_pieces, overlaps, plan_disk
from streamshard.checkpoint.manifest import MANIFEST_NAME
from streamshard.checkpoint.safetensors_file import (
    MODEL_FILES,
    FileLayout,
    FileNames,
    Held,
    TensorSpec,
    lay_out,
    opened,
    read_text,
    sync_directory,
    write_all,
    write_ranges,
)
from streamshard.comm.ranks import RankGroup, run_on_all_ranks
from streamshard.config import parse_bytes
from streamshard.conventions import conventions
from streamshard.core.params import Param
from streamshard.errors import CheckpointError, ConfigError, log


def export_shards(
    model: nn.Module,
    shards: Sequence[Param],
    ranks: RankGroup,
    root: Path,
    dtype: torch.dtype | str | None,
    max_shard_size: int | str,
) -> list[str]:
    """Write a Hugging Face safetensors directory from all ranks. Extra memory is one chunk of `CHUNK_BYTES` on each.

    Args:
        model: the model.
        shards: all of its parameters. Together the ranks' pieces cover each parameter, and do not overlap.
        ranks: all ranks; each calls this function.
        root: the directory, on storage that all ranks share. Made if it does not exist.
        dtype, max_shard_size: see `streamshard.export_safetensors`.

    Returns:
        The names of the files written, the index last.

    Raises:
        CheckpointError: on every rank, if any rank fails; names the rank and the cause. The directory then has the
            earlier export, or the new one, complete.
    """
    wanted, max_file_bytes = floating_dtype(dtype), parse_bytes("max_shard_size", max_shard_size)
    names = FileNames(conventions().file_stem(model))

    def plan() -> tuple[list[FileLayout], Held, torch.dtype | None]:
        # Replicas hold the same, or in local SGD nearly the same: one of them writes.
        pieces = {} if ranks.replica else local_pieces(model, shards, buffers=ranks.is_first)
        runs_of = plan_disk(model, shards, wanted)
        held = {spec.name: list(overlaps(runs, pieces)) for spec, runs in runs_of.items()}
        floating = (spec.dtype for spec in runs_of if spec.dtype.is_floating_point)
        return plan_files(list(runs_of), max_file_bytes, names), held, next(floating, None)

    def prepare(partial: Path) -> None:
        _sweep(root, names)
        for file in files:
            with opened(partial / file.name, "xb") as descriptor:
                write_all(descriptor, file.header, 0)
                os.ftruncate(descriptor, file.size_bytes)
        conventions().write_config(model, partial, first_dtype)

    def write(partial: Path) -> int:
        return sum(write_ranges(partial, file, held) for file in files)

    def publish(partial: Partial, written: list[int]) -> list[str]:
        if sum(written) != sum(file.size_bytes - len(file.header) for file in files):
            raise CheckpointError(f"ranks did not write every byte of {root} once")
        named = _name(root, partial.path, files, names)
        _publish(partial, root, names, encode_index(named, sum(shard.layout.numel for shard in shards)))
        return [file.name for file in named] + ([names.index] if len(named) > 1 else [])

    files, held, first_dtype = run_on_all_ranks(ranks, "plan the export", plan)
    doing = f"export to {root}"
    written = write_together(ranks, doing, root, "model", prepare=prepare, write=write, publish=publish, alone=True)
    log.info("exported %s", root)
    return written


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that the user passed, as a dtype or as text.

    Raises:
        ConfigError: `dtype` is not a floating-point dtype.
    """
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ConfigError(f'dtype={dtype!r}: wanted a floating-point torch.dtype, its name such as "bfloat16", or None')
    return found


# ------------------------------------------------------------------------------------------------ writing


def plan_files(specs: Sequence[TensorSpec], max_file_bytes: int, names: FileNames = MODEL_FILES) -> list[FileLayout]:
    """Distribute tensors over files as huggingface_hub does, with the same file names and contents.

    One pass in order. A tensor that is too large for any file gets its own file, numbered before the file that is being
    filled (huggingface_hub/serialization/_base.py).

    Args:
        specs: the tensors, in the order of the state dict.
        max_file_bytes: the largest number of tensor bytes in a file, unless the file has only one tensor.
        names: of the files.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.
    """
    files: list[list[TensorSpec]] = []
    last: list[TensorSpec] = []
    room = max_file_bytes
    for spec in specs:
        if spec.size_bytes > max_file_bytes:
            files.append([spec])
            continue
        room -= spec.size_bytes
        if room < 0:
            files.append(last)
            last, room = [], max_file_bytes - spec.size_bytes
        last.append(spec)
    if last or not files:
        files.append(last)
    if len(files) == 1:
        return [lay_out(names.single, files[0])]
    return [lay_out(f"{names.stem}-{i:05d}-of-{len(files):05d}.safetensors", each) for i, each in enumerate(files, 1)]


def encode_index(files: Sequence[FileLayout], total_parameters: int) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    total_bytes = sum(file.size_bytes - len(file.header) for file in files)
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": {name: file.name for file in files for name in file.places},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _name(root: Path, partial: Path, files: Sequence[FileLayout], names: FileNames) -> list[FileLayout]:
    """Rename the files in `partial` to the names that they will have in `root`. See [Note: publishing an export]."""
    has_weights = any(name in (names.single, names.index) or names.is_numbered(name) for name in os.listdir(root))
    token = f"{names.stem}-{partial.suffixes[-2][1:]}-" if has_weights else f"{names.stem}-"
    named = [file._replace(name=file.name.replace(f"{names.stem}-", token, 1)) for file in files]
    for old, new in zip(files, named, strict=True):
        os.rename(partial / old.name, partial / new.name)
    return named


def _publish(partial: Partial, root: Path, names: FileNames, index: bytes) -> None:
    """Move the files from `partial` to `root`, so that readers find them. See [Note: publishing an export].

    Args:
        partial: has all files except the index.
        root: the export's directory.
        names: of its files.
        index: the index's content; not needed for a single file.
    """
    own, front, other = partial.path, names.single, names.index
    if not (own / front).exists():
        front, other = other, front
        with opened(own / front, "xb") as descriptor:
            write_all(descriptor, index, 0)
    others = sorted(set(os.listdir(own)) - {front, MANIFEST_NAME})
    for name in others:
        with open(own / name, "rb") as file:
            os.fsync(file.fileno())
    for name in others:
        os.replace(own / name, root / name)
    sync_directory(root)
    os.replace(own / front, root / front)
    sync_directory(root)
    (root / other).unlink(missing_ok=True)
    _sweep(root, names)
    sync_directory(root)
    remove_partial(partial)  # before other ranks go on


def _sweep(root: Path, names: FileNames) -> None:
    """Remove numbered files of exports that were replaced or killed.

    Keeps files that the index names. Keeps all files if there is neither an index nor a single file, or if the index
    cannot be read.
    """
    named: set[str] = set()
    try:
        named.update(json.loads(read_text(root / names.index))["weight_map"].values())
    except FileNotFoundError:
        if not (root / names.single).is_file():
            return
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, CheckpointError):
        return
    for name in os.listdir(root):
        if names.is_numbered(name) and name not in named and not (root / name).is_dir():
            (root / name).unlink()
