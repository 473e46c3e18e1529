"""Export weights to a directory that `from_pretrained` loads: of a sharded model, or of a checkpoint.

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
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from streamshard.checkpoint.directory import Partial, create_partial, open_checkpoint, remove_partial
from streamshard.checkpoint.disk_layout import Run, local_pieces, overlaps, plan_disk, saved_names
from streamshard.checkpoint.manifest import MANIFEST_NAME, CheckpointFiles, Read, dtype_named
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
from streamshard.config import parse_bytes, parse_path
from streamshard.errors import CheckpointError, ConfigError, log
from streamshard.integrations import huggingface
from streamshard.unit.shard import ParamShard

__all__ = [
    "Exported",
    "TensorEntry",
    "encode_index",
    "export_checkpoint",
    "export_shards",
    "floating_dtype",
    "model_dtype",
    "plan_files",
    "write_sharded",
]

_NUMBERED = re.compile(r"model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")


# ------------------------------------------------------------------------------------------------ of a model


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
    entries = run_on_all_ranks(group, "plan the export", lambda: _entries_of_model(model, shards, group, wanted))

    def write_beside(staging: Path) -> None:
        if huggingface.is_transformers_model(model):
            huggingface.write_config(model, staging, model_dtype(model, shards, wanted))

    began = time.perf_counter()
    names = write_sharded(
        entries,
        directory,
        group,
        max_shard_size=max_shard_size,
        total_parameters=sum(shard.layout.numel for shard in shards),
        write_beside=write_beside,
    )
    log.info("exported %s in %.1f s", directory, time.perf_counter() - began)
    return names


def _entries_of_model(
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
        for overlap in overlaps(tensor, pieces):
            fill = functools.partial(_copy, overlap.data.detach())
            entries.append(TensorEntry(tensor.name, tensor.shape, tensor.dtype, overlap.start, overlap.stop, fill))
    return entries


def _copy(data: torch.Tensor, start: int, target: torch.Tensor) -> None:
    target.copy_(data[start : start + target.numel()])


def model_dtype(model: nn.Module, shards: Sequence[ParamShard], dtype: torch.dtype | None) -> torch.dtype | None:
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


# ------------------------------------------------------------------------------------------------ of a checkpoint


class Exported(NamedTuple):
    """What `export_checkpoint` has done.

    Attributes:
        path: of the checkpoint.
        files: names of those written, the index last.
    """

    path: Path
    files: list[str]


def export_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    model: str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> Exported:
    """Write, from a checkpoint, exactly the files that `export_safetensors` would have written at the time of the save.

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
    files = open_checkpoint(directory)
    models = files.manifest.state["models"]
    name = _model_called(model, list(models), files.root)
    plan = models[name]["export"]
    if "error" in plan:
        raise CheckpointError(f"{files.root}: {name!r} cannot be exported: {plan['error']}")
    files.verify_together(RankGroup())
    entries = list(_entries_of_checkpoint(files, name, plan["tensors"], wanted))

    def write_beside(staging: Path) -> None:
        for file, text in plan["files"].items():
            if Path(file).name != file:  # a stranger may have made the checkpoint
                raise CheckpointError(
                    f"{files.root} names the file {file!r:.80}, which is not one of its own directory"
                )
            if file == "config.json" and wanted is not None:
                text = huggingface.with_dtype(text, wanted)
            write_synced(staging / file, text.encode())

    names = write_sharded(
        entries,
        root,
        RankGroup(),
        max_shard_size=max_shard_size,
        total_parameters=files.manifest.numel_of_params(name),
        write_beside=write_beside,
    )
    return Exported(files.root, names)


def _model_called(name: str | None, models: Sequence[str], path: Path) -> str:
    """The name of a model in the manifest, given with or without the ``model.`` of one of several."""
    found = models if name is None else [each for each in models if each in (name, f"model.{name}")]
    if len(found) != 1:
        given = f"model={name!r}" if name is not None else "no model was named"
        raise ConfigError(f"{given}: {path} holds {', '.join(map(repr, models))}; name one of them")
    return found[0]


def _entries_of_checkpoint(
    files: CheckpointFiles, model: str, tensors: Sequence[Sequence[Any]], dtype: torch.dtype | None
) -> Iterator[TensorEntry]:
    def fill(tensor: str, first: int, start: int, target: torch.Tensor) -> None:
        files.read_tensor(Read(tensor, first + start, target))

    for name, shape, own, runs in tensors:
        stored = dtype_named(own)
        spec = name, tuple(shape), dtype if dtype is not None and stored.is_floating_point else stored
        yield TensorEntry(*spec, 0, 0, None)
        for run in (Run(*each) for each in runs):
            elements = functools.partial(fill, f"{model}/{run.source}", run.source_start)
            yield TensorEntry(*spec, run.start, run.start + run.numel, elements)


# ------------------------------------------------------------------------------------------------ writing


class TensorEntry(NamedTuple):
    """This rank's part of one tensor: elements [start, stop) of the flattened whole.

    A tensor that a rank has several ranges of has several entries, one that it has nothing of has one without `fill`.

    Attributes:
        name: the tensor's name in the file.
        shape: of the whole tensor.
        dtype: in the file.
        start: first element that this rank writes.
        stop: one past the last.
        fill: given a place counted from `start` and a target, [n] 1-D on the CPU in `dtype`, fills the target by the
            elements from that place on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    fill: Callable[[int, torch.Tensor], object] | None


def write_sharded(
    entries: Sequence[TensorEntry],
    directory: str | os.PathLike[str],
    group: RankGroup,
    *,
    max_shard_size: int | str = "5GB",
    total_parameters: int | None = None,
    write_beside: Callable[[Path], None] = lambda directory: None,
) -> list[str]:
    """Write a Hugging Face safetensors directory from all ranks. Extra memory is one chunk of `CHUNK_BYTES` on each.

    Every rank passes the same tensors in the same order, and the same settings. Together their ranges cover each
    tensor, and do not overlap.

    Args:
        entries: this rank's part of every tensor, tensors in the order of the state dict.
        directory: on storage that all ranks share; made if it is not there.
        group: the ranks that call this, all of them.
        max_shard_size: tensor bytes a file may hold, as a number or ``"5GB"``.
        total_parameters: number of parameters, for the index.
        write_beside: writes further files (a config) into the directory it is given; called on rank 0 only. They
            are published together with the weights.

    Returns:
        The names of the files written, the index last.

    Raises:
        ConfigError: `max_shard_size` cannot be read.
        CheckpointError: on every rank, when any rank failed: names the rank and the cause. What was in the directory
            before is still there then, or the new export is, whole.
    """
    max_file_bytes, root = parse_bytes("max_shard_size", max_shard_size), Path(directory)
    specs = {entry.name: TensorSpec(entry.name, entry.shape, entry.dtype) for entry in entries}
    files = run_on_all_ranks(group, "plan the export", lambda: plan_files(list(specs.values()), max_file_bytes))
    mine: list[Partial] = []  # the first rank's, which alone deletes and renames it
    try:
        name, names = gather_from_all_ranks(
            group,
            f"create files in {root}",
            lambda: _create(root, files, write_beside, mine) if group.is_first else ("", []),
        )[0]
        files = [file._replace(name=own) for file, own in zip(files, names, strict=True)]
        written = gather_from_all_ranks(group, f"write to {root}", lambda: _write(root / name, files, entries))

        def publish() -> None:
            if group.is_first:
                if sum(written) != sum(file.size_bytes - len(file.header) for file in files):
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


def encode_index(files: Sequence[FileLayout], total_parameters: int | None) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    metadata = {} if total_parameters is None else {"total_parameters": total_parameters}
    metadata["total_size"] = sum(file.size_bytes - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


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


def _write(partial: Path, files: Sequence[FileLayout], entries: Sequence[TensorEntry]) -> int:
    """Write this rank's ranges, file by file. Returns the number of bytes."""
    staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    memory = bytes_of(staging)
    total = 0
    by_name: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    for file in files:
        mine = [(offset, entry) for name, offset in file.offsets.items() for entry in by_name[name] if entry.fill]
        if not mine:
            continue
        with _opened(partial / file.name) as descriptor:
            for offset, (_, _, dtype, start, stop, fill) in mine:
                chunk = staging.view(dtype)
                for done in range(0, stop - start, chunk.numel()):
                    part = chunk[: stop - start - done]
                    fill(done, part)  # type: ignore[misc]  # it is not None
                    write_all(descriptor, memory[: part.nbytes], offset + (start + done) * dtype.itemsize)
                    total += part.nbytes
            os.fsync(descriptor)
    return total


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file that rank 0 has created."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there, though rank 0 created it: the directory must be on storage all ranks share"
        ) from error
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
