"""Exports: write a sharded model's weights to a directory that `from_pretrained` loads, and load such a directory.

    plan -> create (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)

All ranks synchronise at each arrow. If one rank fails, all ranks raise a `CheckpointError` that names it. Each rank
writes its own byte ranges into the same files, and reads its own bytes. Nothing is gathered.

[Note: publishing an export]
All files are written into a partial directory inside the export's directory, and synced. Its lock refuses a second
process that exports there: see [Note: two runs in one directory] in `local_directory.py`. Readers begin at the *front*:
``model.safetensors``, or the index if there is no such file. The index names the other files. So renaming a new front
over the old one replaces the whole export:

1. Several files get their names. In a directory without weights these are save_pretrained's names, such as
   ``model-00001-of-00003.safetensors``. In any other directory the names contain the export's random token, such as
   ``model-89abcdef-00001-of-00003.safetensors``. So no name of a numbered file ever stands for different bytes: a
   program that has read the old index opens the old files, or gets FileNotFoundError. It never opens new ones.
2. The config is replaced, then the front. If an index replaces ``model.safetensors``, that file is removed after the
   index is in place.
3. All other numbered files are removed: of the old export, and of exports that were killed.

After a kill or a power failure, readers find the old weights or the new ones. The config cannot be replaced in the same
rename as the weights: an error or a kill between the two leaves the new config beside the old weights.

[Note: exports on object storage]
An object has one writer. So the ranks take turns with the files, and each uploads the ranges of other ranks' files that
it holds as one object in the partial directory. The config comes first and the front last. Several files always have
the export's token in their names, and no export deletes them: of two at once the later front counts, and its files are
there. An export that is there is not replaced: a front that is one file would stand for other bytes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.directory import write_together
from streamshard.checkpoint.disk_layout import Difference, fill_buffers, local_pieces, overlaps, plan_export, plan_load
from streamshard.checkpoint.local_directory import sync_directory
from streamshard.checkpoint.object_store import ObjectStore
from streamshard.checkpoint.safetensors_file import (
    FileLayout,
    Held,
    OpenFiles,
    Place,
    StoredTensor,
    copy_ranges,
    digest_of,
    join_ranges,
    lay_out,
    read_ranges,
    write_own_ranges,
    write_ranges,
)
from streamshard.checkpoint.saving import finish_running
from streamshard.checkpoint.storage import MANIFEST_NAME, Location, Url, parse_location, storage_of
from streamshard.comm.ranks import RankGroup, run_on_all_ranks
from streamshard.config import AnyPath, parse_bytes, parse_dtype
from streamshard.conventions import conventions
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest, not_a_layer
from streamshard.errors import CheckpointError, log
from streamshard.initialise import compute_buffers
from streamshard.planning.structure import leave_inference_mode, leave_meta_device

_SAMPLE_BYTES = 256


class FileNames:
    """The names of the files of an export.

    Args:
        stem: how all names begin: "model", or "diffusion_pytorch_model" for models of diffusers.

    Attributes:
        stem: see above.
        single: the name of the file, if one file has all tensors.
        index: the name of the index, if there are several files.
        numbered: matches the names of several files, with or without a random token.
    """

    def __init__(self, stem: str) -> None:
        self.stem, self.single = stem, f"{stem}.safetensors"
        self.index = f"{self.single}.index.json"
        self.numbered = re.compile(stem + r"-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")

    def are_in(self, there: Iterable[str]) -> bool:
        """Whether some of these names are of weights, or of an index."""
        return any(name in (self.single, self.index) or self.numbered.fullmatch(name) for name in there)

    def written(self, files: Sequence[FileLayout]) -> list[str]:
        """The names of `files`, and the index's behind several."""
        return [*(file.name for file in files), *([self.index] if len(files) > 1 else [])]


def export_safetensors(
    model: nn.Module, directory: AnyPath, dtype: torch.dtype | str | None = None, max_shard_size: int | str = "5GB"
) -> list[str]:
    """Write the weights in the Hugging Face layout, all ranks at once. Call it on every rank, with the same arguments.

    Every rank writes its own bytes of each file, chunk by chunk (8 MiB); nothing is all-gathered. Tensors are equal,
    byte for byte, to those that `save_pretrained` of the same weights writes. For transformers models the config is
    saved too. An export over an earlier one is safe: at every moment, and after a kill, readers find the old weights or
    the new ones, complete.

    A PeftModel, or a model with ``add_adapter``, raises: ``model.save_pretrained(directory)`` writes its adapters.

    Args:
        model: a model made by `StreamShard`.
        directory: on storage that all ranks share; made if it is not there. Or a URL of object storage, without an
            export.
        dtype: dtype of floating-point weights in the files, such as ``torch.bfloat16`` or ``"bfloat16"``. None: each
            parameter's dtype before sharding.
        max_shard_size: the largest size of a file, such as ``"500MB"``; more weights are split over several files.

    Returns:
        The names of the safetensors files and of their index.

    Raises:
        ConfigError: `dtype` or `max_shard_size` cannot be read.
        CheckpointError: on every rank: the files cannot be written, the model's class stores its weights as other
            values than ranges of its parameters, or a module inside it has adapters.
        RankMismatchError: on every rank: `directory` differs between ranks. Nothing is written.
    """
    root = parse_location("directory", directory)
    engine = engine_at_rest(not_a_layer(model), "export_safetensors")
    wanted = None if dtype is None else parse_dtype("dtype", dtype, "None")
    max_file_bytes = parse_bytes("max_shard_size", max_shard_size)

    def make() -> ExportPlan:
        finish_running()  # a save to the same place, for which the export would be another run
        return _plan(model, engine, root, wanted, max_file_bytes)

    ranks = engine.ranks
    plan = run_on_all_ranks(ranks, "plan the export", make)
    written = upload(ranks, root, plan) if isinstance(root, Url) else _write_together(ranks, root, plan)
    log.info("exported %s", root)
    return written


class ExportPlan(NamedTuple):
    """An export, as planned.

    Attributes:
        files: the same on all ranks.
        held: this rank's ranges of their tensors.
        names: of the files.
        n_parameters: elements of all parameters, for the index.
        write_config: writes the files beside the weights into a directory.
    """

    files: list[FileLayout]
    held: Held
    names: FileNames
    n_parameters: int
    write_config: Callable[[Path], None]


def _plan(
    model: nn.Module, engine: Engine, root: Location, dtype: torch.dtype | None, max_file_bytes: int
) -> ExportPlan:
    ranks, names = engine.ranks, FileNames(conventions().file_stem(model))
    refuse_replacing(root, names)
    # Replicas have the same weights, or in local SGD nearly the same: the first one writes.
    here = {} if ranks.replica else local_pieces(model, engine, buffers=ranks.is_first)
    pieces = {name: piece for name, piece in here.items() if not piece.is_copy}
    stored, runs_of = plan_export(model, engine, dtype)
    for param in engine.params:
        if param.form.beside(param.sharded):
            raise CheckpointError(f"{param.name!r} is quantized; only unquantized weights can be exported")
    held = {name: list(overlaps(runs, pieces)) for name, runs in runs_of.items()}
    files = plan_files(stored, max_file_bytes, names)
    n_parameters = sum(param.piece.full.numel() for param in engine.params)
    # The config has the first weight's dtype, as `save_pretrained` writes it.
    first = next((tensor.dtype for tensor in stored.values() if tensor.is_floating_point()), None)
    return ExportPlan(files, held, names, n_parameters, lambda to: conventions().write_config(model, to, first))


# ------------------------------------------------------------------------------------------------ writing


def plan_files(tensors: Mapping[str, torch.Tensor], max_file_bytes: int, names: FileNames) -> list[FileLayout]:
    """Distribute tensors over files as `save_pretrained` does, with the same file names and contents.

    Args:
        tensors: on the meta device, in the order of the state dict.
        max_file_bytes: the largest number of tensor bytes in a file, unless the file has only one tensor.
        names: of the files.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # only here: training needs none of it

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=f"{names.stem}{{suffix}}.safetensors",
        max_shard_size=max_file_bytes,
    )
    files = split.filename_to_tensors or {names.single: []}  # a model without tensors has a file too
    return [lay_out(file, {name: tensors[name] for name in own}) for file, own in files.items()]


def encode_index(files: Sequence[FileLayout], total_parameters: int) -> bytes:
    """The index as `save_pretrained` writes it: JSON with the file of each tensor."""
    total_bytes = sum(file.size_bytes - len(file.header) for file in files)
    index = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_bytes},
        "weight_map": {name: file.name for file in files for name in file.places},
    }
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def name_files(files: Sequence[FileLayout], names: FileNames, partial: Location) -> list[FileLayout]:
    """The files, with the token of `partial` in the names of several. See [Note: publishing an export]."""
    token = f"{names.stem}-{partial.name.split('.')[1]}-"
    return [file._replace(name=file.name.replace(f"{names.stem}-", token, 1)) for file in files]


def _write_together(ranks: RankGroup, root: Path, plan: ExportPlan) -> list[str]:
    """Write an export to a file system. Collective. Returns the names of its files."""
    files, names = plan.files, plan.names

    def write(partial: Path) -> int:
        if ranks.is_first:
            plan.write_config(partial)
        return sum(write_ranges(partial, file, plan.held, is_first=ranks.is_first) for file in files)

    def publish(partial: Path, n_bytes: list[int]) -> list[str]:
        if sum(n_bytes) != sum(file.size_bytes for file in files):  # each rank knows its own ranges only
            raise CheckpointError(f"ranks did not write every byte of {root} once")
        named = name_files(files, names, partial) if names.are_in(os.listdir(root)) else files
        for old, new in zip(files, named, strict=True):
            os.rename(partial / old.name, partial / new.name)
        _publish(partial, root, names, [file.name for file in named], encode_index(named, plan.n_parameters))
        return names.written(named)

    return write_together(ranks, f"export to {root}", root, "model", write=write, publish=publish, alone=True)


def _publish(partial: Path, root: Path, names: FileNames, written: Collection[str], index: bytes) -> None:
    """Move the files from `partial` to `root`, so that readers find them. See [Note: publishing an export].

    Args:
        partial: has all files except the index.
        root: the export's directory.
        names: of its files.
        written: the names of the safetensors files.
        index: the index's content; not needed for a single file.
    """
    front, other = names.single, names.index
    if not (partial / front).exists():
        front, other = other, front
        (partial / front).write_bytes(index)
    for name in os.listdir(partial):
        with open(partial / name, "rb") as file:  # the library that wrote the config has not synced it
            os.fsync(file.fileno())
    for name in sorted(set(os.listdir(partial)) - {front, MANIFEST_NAME}):  # the manifest is only a lock here
        os.replace(partial / name, root / name)
    sync_directory(root)
    # Synced before: the front must not reach the disk ahead of the files that it names.
    os.replace(partial / front, root / front)
    sync_directory(root)
    (root / other).unlink(missing_ok=True)
    for name in os.listdir(root):
        if names.numbered.fullmatch(name) and name not in written and not (root / name).is_dir():
            (root / name).unlink()
    sync_directory(root)


# ------------------------------------------------------------------------------------------------ object storage


def refuse_replacing(root: Location, names: FileNames) -> None:
    """Raise if `root` is on object storage and has an export. See [Note: exports on object storage]."""
    storage = storage_of(root)
    if isinstance(root, Url) and (front := next(filter(storage.is_file, (names.single, names.index)), None)):
        raise CheckpointError(f"{root} has an export, {front}, and object storage replaces none: name a new directory")


def upload(ranks: RankGroup, root: Url, plan: ExportPlan) -> list[str]:
    """Write an export to object storage. Collective. See [Note: exports on object storage]."""
    files, names, held = [*plan.files], plan.names, plan.held

    def write(partial: Url) -> list[list[Place]]:
        if len(files) > 1:
            files[:] = name_files(files, names, partial)  # in place: `join` and `publish` see it
        if ranks.is_first:
            with tempfile.TemporaryDirectory() as local:  # libraries write their configs to file systems only
                plan.write_config(Path(local))
                for file in Path(local).iterdir():
                    ObjectStore(root).put(file.name, file.read_bytes())
        return write_own_ranges(partial, f"rank-{ranks.total_rank:05d}", files, held) if ranks.total_size > 1 else []

    def join(partial: Url, places: list[list[list[Place]]]) -> list[list[Place]]:
        for at in range(ranks.total_rank, len(files), ranks.total_size):
            if ranks.total_size == 1:
                write_ranges(root, files[at], held, is_first=True)
            else:
                join_ranges(root, files[at], partial, chain.from_iterable(theirs[at] for theirs in places))
        return []

    def publish(_: Url, __: object) -> list[str]:
        if len(files) > 1:
            ObjectStore(root).put(names.index, encode_index(files, plan.n_parameters))
        return names.written(files)

    doing = f"export to {root}"
    return write_together(ranks, doing, root, "model", write=write, join=join, publish=publish)


# ------------------------------------------------------------------------------------------------ loading


class StoredDirectory(OpenFiles):
    """The tensors of a Hugging Face directory. The constructor reads only the files' headers.

    Args:
        root: the directory.
        names: of its files.

    Attributes:
        tensors: by name.

    Raises:
        CheckpointError: the directory has no weights, or files are damaged or contradict the index.
    """

    def __init__(self, root: Location, names: FileNames) -> None:
        super().__init__(root)
        if self.storage.is_file(names.single):  # first, as all readers look
            file_of = dict.fromkeys(self.open(names.single).keys(), names.single)
        else:
            file_of = self._read_index(names)
        self.tensors: dict[str, StoredTensor] = {name: self.stored(file, name) for name, file in file_of.items()}

    def digest(self) -> str:
        """A hash of names, shapes, dtypes and some bytes of each tensor: different for different training steps."""
        filled = {name: tensor for name, tensor in self.tensors.items() if tensor.numel}
        middles = [
            (each, each.numel // 2, min(-(-each.numel // 2), _SAMPLE_BYTES // each.dtype.itemsize))
            for each in filled.values()
        ]
        samples = dict(zip(filled, read_ranges(middles), strict=True))
        return digest_of({name: tensor.shape for name, tensor in self.tensors.items()}, samples)

    def _read_index(self, names: FileNames) -> dict[str, str]:
        """By tensor, the name of its file."""
        index = self.root / names.index
        if not self.storage.is_file(names.index):
            neither = f"{self.root} has neither {names.single} nor {names.index}"
            raise CheckpointError(f"{neither}. load_checkpoint reads checkpoints of save_checkpoint")
        try:
            file_of: dict[str, str] = dict(json.loads(self.storage.read_text(names.index))["weight_map"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error!r:.200}") from None
        for file in file_of.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index} names {file!r}, which is not a file of its own directory")
        return file_of


def load_safetensors(model: nn.Module, directory: AnyPath, *, strict: bool = True) -> Difference:
    """Load an export, or any safetensors directory in the Hugging Face layout. Call it on every rank.

    A rank reads the bytes it owns and converts them to fp32 chunk by chunk (8 MiB). The files must have exactly the
    names of the model's parameters and persistent buffers. For transformers' models tensors are converted as by
    ``from_pretrained``: renamed, merged or split, with or without the base model's prefix. Of several tied names one is
    enough; if the files have more, the first in the model's order is loaded.

    If the model was sharded on the meta device, its own initialisation computes buffers that no file has, such as
    rotary tables, as in `init_weights`.

    All ranks check each file before a weight changes. If storage fails afterwards, some weights are new and some are
    old, and the error says so.

    Args:
        model: a model made by `StreamShard`.
        directory: holds ``model.safetensors``, or numbered files and their index, or links to them (a snapshot of the
            hub), or a URL of object storage. Every rank must be able to read it, or a copy of it.
        strict: False: load the tensors that fit. Other parameters keep their values, or stay empty.

    Returns:
        The names that are ``missing``, ``unexpected`` or ``mismatched``; none if `strict`.

    Raises:
        CheckpointError: on every rank; names tensors that are missing, unexpected, or of another shape or kind, the
            file that cannot be read or is damaged, or the rank that sees other files.
    """
    root = parse_location("directory", directory)
    engine = engine_at_rest(not_a_layer(model), "load_safetensors", accepts_empty=True)
    with leave_inference_mode(), leave_meta_device():
        difference = _load(model, engine, root, strict=strict)
        compute_buffers(engine, model)
    return difference


def _load(model: nn.Module, engine: Engine, root: Location, *, strict: bool) -> Difference:
    ranks = engine.ranks
    names = FileNames(conventions().file_stem(model))
    stored = run_on_all_ranks(ranks, "load", lambda: StoredDirectory(root, names), at=root)
    if not ranks.are_equal("compare files", stored.digest()):
        causes = "another process is replacing them (load again), or disks of two hosts have different copies"
        raise CheckpointError(f"could not load {root}: ranks see different files there: {causes}")

    pieces = run_on_all_ranks(ranks, "load", lambda: local_pieces(model, engine, buffers=True), at=root)
    runs, difference = run_on_all_ranks(ranks, "load", lambda: plan_load(model, engine, stored.tensors), at=root)
    if strict and any(difference):  # on every rank: all have read the same headers
        raise difference.error(root, model)

    def read() -> None:
        with torch.no_grad():
            found = ((stored.tensors[name], overlaps(own, pieces)) for name, own in runs.items())
            copy_ranges((tensor, start, data) for tensor, own in found for start, data in own)
            fill_buffers(model, pieces)

    # From here on only the storage itself can fail.
    half = f"{root}, and the model holds some of its weights now: load again before using it"
    run_on_all_ranks(ranks, "finish loading", read, at=half)
    engine.expire_weights()
    engine.fill({run.source for own in runs.values() for run in own})
    log.info("loaded %s", root)
    return difference
