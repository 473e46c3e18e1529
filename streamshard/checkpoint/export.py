"""Export a sharded model's weights to a directory that `from_pretrained` loads.

    plan -> create (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)

Between two arrows all ranks meet. A failure on one rank becomes a `CheckpointError` on all ranks that names it. Each
rank writes its own byte ranges into the same files. Nothing is gathered.

[Note: publishing an export]
All files are written into a partial directory inside of the export's, and synced. See [Note: two runs in one directory]
in `directory.py` for its lock, by which a second process that exports there is refused. Readers begin at the *front*:
``model.safetensors``, or the index where there is no such file. The index names the other files. So one rename, of a
new front over the old one, replaces the whole export:

1. Several files get their names. In a directory without weights these are save_pretrained's, such as
   ``model-00001-of-00003.safetensors``. In any other directory the names contain the export's random token, such as
   ``model-89abcdef-00001-of-00003.safetensors``. So no name of a numbered file ever stands for different bytes: a
   program that has read the old index opens the old files, or gets FileNotFoundError. It never opens new ones.
2. The config is replaced, then the front. Where the index takes over from ``model.safetensors``, that file is removed
   once the index is in place.
3. Numbered files that the front does not lead to are removed.

A run that is killed, or loses power, leaves the old weights or the new ones. The next export removes its other files.
The config cannot be replaced in the same rename as the weights: an error or a kill between the two leaves the new
config beside the old weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from streamshard.checkpoint.directory import Partial, create_partial, remove_partial
from streamshard.checkpoint.disk_layout import local_pieces, overlaps, plan_disk, saved_names
from streamshard.checkpoint.manifest import MANIFEST_NAME
from streamshard.checkpoint.safetensors_file import (
    CHUNK_BYTES,
    INDEX_NAME,
    SINGLE_NAME,
    FileLayout,
    TensorSpec,
    bytes_of,
    lay_out,
    sync_directory,
    write_all,
    write_synced,
)
from streamshard.comm.objects import RankGroup, gather_from_all_ranks, run_on_all_ranks
from streamshard.config import parse_bytes
from streamshard.errors import CheckpointError, ConfigError, log
from streamshard.integrations import huggingface
from streamshard.unit.shard import ParamShard

Held = Mapping[str, Sequence[tuple[int, torch.Tensor]]]
"""By tensor, the ranges of it that a rank holds: the first element, and the data from there on, 1-D."""

_NUMBERED = re.compile(r"model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")


def export_shards(
    model: nn.Module,
    shards: Sequence[ParamShard],
    group: RankGroup,
    directory: str | os.PathLike[str],
    dtype: torch.dtype | str | None,
    max_shard_size: int | str,
) -> list[str]:
    """What `streamshard.export_safetensors` does, with the model's parameters and ranks given."""
    began, max_file_bytes, wanted = (
        time.perf_counter(),
        parse_bytes("max_shard_size", max_shard_size),
        floating_dtype(dtype),
    )

    def plan() -> tuple[list[TensorSpec], Held]:
        huggingface.check_exportable(model)
        pieces = local_pieces(model, shards, buffers=group.is_first)
        if group.replica:  # replicas hold the same, or in local SGD nearly the same: one of them writes
            pieces = {}
        tensors = plan_disk(model, shards, wanted)
        return [each.spec for each in tensors], {spec.name: list(overlaps(runs, pieces)) for spec, runs in tensors}

    def write_beside(staging: Path) -> None:
        if huggingface.is_transformers_model(model):
            huggingface.write_config(model, staging, _model_dtype(model, shards, wanted))

    specs, held = run_on_all_ranks(group, "plan the export", plan)
    total = sum(shard.layout.numel for shard in shards)
    names = write_sharded(specs, held, Path(directory), group, max_file_bytes, total, write_beside)
    log.info("exported %s in %.1f s", directory, time.perf_counter() - began)
    return names


def _model_dtype(model: nn.Module, shards: Sequence[ParamShard], dtype: torch.dtype | None) -> torch.dtype | None:
    """``model.dtype`` of the exported model: the dtype of its first floating-point parameter."""
    by_name = {shard.name: shard.dtype for shard in shards}
    own = (by_name[source] for source in saved_names(model, shards).values() if source in by_name)
    first = next((each for each in own if each.is_floating_point), None)
    return first if dtype is None or first is None else dtype


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a user gave, perhaps as text.

    Raises:
        ConfigError: `dtype` is no floating-point dtype.
    """
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f'dtype={dtype!r}: wanted a floating-point torch.dtype, its name such as "bfloat16", or None')
    return found


# ------------------------------------------------------------------------------------------------ writing


def write_sharded(
    specs: Sequence[TensorSpec],
    held: Held,
    root: Path,
    group: RankGroup,
    max_file_bytes: int,
    total_parameters: int,
    write_beside: Callable[[Path], None],
) -> list[str]:
    """Write a Hugging Face safetensors directory from all ranks. Extra memory is one chunk of `CHUNK_BYTES` on each.

    Every rank passes the same tensors in the same order, and the same settings. Together the ranks' ranges cover each
    tensor, and do not overlap.

    Args:
        specs: all tensors, in the order of the state dict.
        held: by tensor, the ranges that this rank writes, in any dtype and on any device.
        root: on storage that all ranks share; made if it is not there.
        group: the ranks that call this, all of them.
        max_file_bytes: tensor bytes a file may hold.
        total_parameters: number of parameters, for the index.
        write_beside: writes further files (a config) into the directory it is given; called on rank 0 only. They
            are published together with the weights.

    Returns:
        The names of the files written, the index last.

    Raises:
        CheckpointError: on every rank, when any rank failed: names the rank and the cause. What was in the directory
            before is still there then, or the new export is, whole.
    """
    files = run_on_all_ranks(group, "plan the export", lambda: plan_files(specs, max_file_bytes))
    mine: list[Partial] = []  # the first rank's, which alone deletes and renames it

    def create() -> tuple[str, list[str]]:
        return _create(root, files, write_beside, mine) if group.is_first else ("", [])

    try:
        name, names = gather_from_all_ranks(group, f"create files in {root}", create)[0]
        files = [file._replace(name=own) for file, own in zip(files, names, strict=True)]
        written = gather_from_all_ranks(group, f"write to {root}", lambda: _write(root / name, files, specs, held))

        def publish() -> None:
            if group.is_first:
                if sum(written) != sum(spec.size_bytes for spec in specs):
                    raise CheckpointError(f"ranks did not write every byte of {root} once")
                _publish(mine[0], root, encode_index(files, total_parameters) if len(files) > 1 else None)

        run_on_all_ranks(group, f"publish {root}", publish)
    finally:
        for partial in mine:
            remove_partial(partial)
    return names + ([INDEX_NAME] if len(names) > 1 else [])


def plan_files(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[FileLayout]:
    """Distribute tensors over files as huggingface_hub does, so that file names and contents agree with its.

    One pass in order; what is too large for any file gets one of its own, numbered before the file that is being filled
    (huggingface_hub/serialization/_base.py).

    Args:
        specs: the tensors, in the order of the state dict.
        max_file_bytes: a file holds no more tensor bytes than this, unless it holds one tensor only.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.
    """
    by_name = {spec.name: spec for spec in specs}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda spec: spec.size_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    files = split.filename_to_tensors or {SINGLE_NAME: []}
    return [lay_out(name, [by_name[each] for each in names]) for name, names in files.items()]


def encode_index(files: Sequence[FileLayout], total_parameters: int) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    total_bytes = sum(file.size_bytes - len(file.header) for file in files)
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": {name: file.name for file in files for name in file.offsets},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _create(
    root: Path, files: Sequence[FileLayout], write_beside: Callable[[Path], None], mine: list[Partial]
) -> tuple[str, list[str]]:
    """Make every file at its full size with its header in place; ranks fill in the rest.

    Returns:
        The partial directory's name in `root`, and the files' names. See [Note: publishing an export].
    """
    mine.append(create_partial(root, "model", alone=True))
    partial = mine[0].path
    names = [file.name for file in files]
    has_weights = any(each in (SINGLE_NAME, INDEX_NAME) or _NUMBERED.fullmatch(each) for each in os.listdir(root))
    if len(files) > 1 and has_weights:
        token = partial.suffixes[-2].lstrip(".")
        names = [name.replace("model-", f"model-{token}-", 1) for name in names]
    _sweep(root)
    for name, file in zip(names, files, strict=True):
        with open(partial / name, "xb") as created:
            created.write(file.header)
            created.truncate(file.size_bytes)
            created.flush()
            os.fsync(created.fileno())
    write_beside(partial)
    return partial.name, names


def _write(partial: Path, files: Sequence[FileLayout], specs: Sequence[TensorSpec], held: Held) -> int:
    """Write this rank's ranges, file by file. Returns the number of bytes."""
    staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    memory = bytes_of(staging)
    total = 0
    dtypes = {spec.name: spec.dtype for spec in specs}
    for file in files:
        mine = [(dtypes[name], offset, *piece) for name, offset in file.offsets.items() for piece in held.get(name, ())]
        if not mine:
            continue
        with _opened(partial / file.name) as descriptor:
            for dtype, offset, start, data in mine:
                chunk = staging.view(dtype)
                for done in range(0, data.numel(), chunk.numel()):
                    part = data[done : done + chunk.numel()].detach()
                    chunk[: part.numel()].copy_(part)
                    size_bytes = part.numel() * dtype.itemsize
                    write_all(descriptor, memory[:size_bytes], offset + (start + done) * dtype.itemsize)
                    total += size_bytes
            os.fsync(descriptor)
    return total


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file that rank 0 has created."""
    try:
        with open(path, "r+b", buffering=0) as file:
            yield file.fileno()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there: the directory must be on storage all ranks share") from error
    except OSError as error:  # a failed write does not say which file it was
        raise CheckpointError(f"{path.name}: {error}") from error


def _publish(partial: Partial, root: Path, index: bytes | None) -> None:
    """Make what is in `partial` what readers of `root` find. See [Note: publishing an export]."""
    own, front, other = partial.path, SINGLE_NAME, INDEX_NAME
    if index is not None:
        front, other = INDEX_NAME, SINGLE_NAME
        write_synced(own / front, index)
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
    _sweep(root)
    sync_directory(root)
    remove_partial(partial)  # before other ranks go on


def _sweep(root: Path) -> None:
    """Remove numbered files of exports that were replaced or killed.

    Keeps what the index names. Keeps all if there is neither an index nor ``model.safetensors``, or if the index cannot
    be read.
    """
    named: set[str] = set()
    try:
        named.update(json.loads((root / INDEX_NAME).read_bytes())["weight_map"].values())
    except FileNotFoundError:
        if not (root / SINGLE_NAME).is_file():
            return
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    for name in os.listdir(root):
        if _NUMBERED.fullmatch(name) and name not in named and not (root / name).is_dir():
            (root / name).unlink()
