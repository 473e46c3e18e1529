"""Convert checkpoints from and to torch.distributed.checkpoint (DCP), as FSDP2 writes it: weights and optimizer state.

With FSDP2, users call ``get_state_dict`` and ``dcp.save({"model": ..., "optimizer": ...})``. Keys are then
``model.<name>``, ``optimizer.state.<name>.exp_avg`` and ``optimizer.param_groups.0.lr``; with
``flatten_optimizer_state_dict`` the last is ``optimizer.param_groups.<name>.lr``. Accelerate writes models and
optimizers to separate directories.

A directory has a pickle, ``.metadata``. It says in which part of which file each piece of a tensor, and each value,
lies. Each part is an archive as ``torch.save`` writes it.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from streamshard.checkpoint.block_state import is_part
from streamshard.checkpoint.directory import next_number, open_intact, write_together
from streamshard.checkpoint.disk_layout import TensorPiece
from streamshard.checkpoint.json_codec import CPU, decode, dtype_named, encode
from streamshard.checkpoint.local_directory import sync_directory
from streamshard.checkpoint.manifest import CheckpointFiles, are_tiles
from streamshard.checkpoint.safetensors_file import FILE_NAME, digest_of
from streamshard.checkpoint.save import write_checkpoint
from streamshard.checkpoint.storage import Location, parse_location
from streamshard.comm.ranks import RankGroup
from streamshard.config import parse_path
from streamshard.errors import CheckpointError, ConfigError, describe

_METADATA_NAME = ".metadata"


# ------------------------------------------------------------------------------------------------ to DCP


def to_dcp(directory: str | os.PathLike[str], out: str | os.PathLike[str]) -> Location:
    """Convert a checkpoint's models and optimizers to a DCP directory, for ``dcp.load`` with FSDP2.

    Its keys begin with ``model.`` and ``optimizer.``; of several models, with ``model.policy.`` and so on. Random
    states, `extra` and extra state of modules are left out. The checkpoint's checksums are verified first. All tensors
    are read into host memory.

    torch writes the files into a partial directory beside `out`. When all files are complete, they move to `out`. An
    error or an interrupt removes the partial directory. After a kill the next save or conversion does.

    Args:
        directory: a checkpoint, or a directory of checkpoints: the newest intact one is converted.
        out: a new directory.

    Returns:
        The path of the converted checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or cannot be converted, or `out` exists or cannot be written.
    """
    root = parse_path("out", out).resolve()
    if os.path.lexists(root):
        raise CheckpointError(f"{root} exists: convert into a new directory")
    files, _ = open_intact(parse_location("directory", directory), RankGroup())
    saved = files.manifest.state
    state: dict[str, Any] = {}
    for name, each in saved["models"].items():
        tensors = {source: files.read_whole(f"{name}/{source}") for source in {*each["names"].values()}}
        state[name] = {own: tensors[source] for own, source in each["names"].items()}  # with tied names
    state |= {name: _optimizer_out(files, each) for name, each in saved["optimizers"].items()}

    def write(partial: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)  # not needed
            try:
                state_dict_saver.save(state, storage_writer=FileSystemWriter(partial / root.name), no_dist=True)
            except CheckpointException as error:
                # torch's is a BaseException, and quotes tracebacks.
                raise next(iter(error.failures.values()))[0] from None
        sync_directory(partial / root.name)  # torch syncs the files, not their names

    def publish(partial: Path, _: object) -> None:
        os.rename(partial / root.name, root)
        sync_directory(root.parent)

    # After a kill the next save finds partial directories called "model.." and deletes them.
    write_together(RankGroup(), f"write {root}", root.parent, "model", write=write, publish=publish)
    return files.root


def _optimizer_out(files: CheckpointFiles, saved: Mapping[str, Any]) -> dict[str, Any]:
    if in_blocks := next(filter(is_part, files.manifest.tensors), None):
        raise CheckpointError(f"{in_blocks!r} is 8-bit, 4-bit or fp8 state: convert a checkpoint without the optimizer")
    models = files.manifest.state["models"]
    fqns = {f"{model}/{name}": name for model, each in models.items() for name in each["names"]}  # the names in DCP
    state = {fqns.get(param, param): decode(values, files.read_whole, CPU) for param, values in saved["state"].items()}
    groups = decode(saved["param_groups"], files.read_whole, CPU)
    for group in groups:
        group["params"] = [fqns.get(param, param) for param in group["params"]]
    flattened = {
        f"param_groups.{param}.{key}": value
        for group in groups
        for param in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"state": state, "param_groups": groups, **flattened}  # a reader asks for one form or the other


# ------------------------------------------------------------------------------------------------ from DCP


def from_dcp(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: str = "model",
    optimizer: str = "optimizer",
) -> tuple[Location, list[str]]:
    """Convert a DCP directory to a checkpoint, which `load_checkpoint(out, model, optimizer)` loads.

    DCP's files hold pickles. This function runs no code of theirs: it reads tensors, numbers, strings, lists, tuples,
    dicts and dtypes. All tensors are read into host memory.

    Args:
        directory: a DCP directory, or a directory of Accelerate with ``pytorch_model_fsdp_0`` in it.
        out: a directory of checkpoints. The new checkpoint gets the next number.
        model: prefix of the weights' keys, such as ``"app.model"``; empty: keys have no prefix.
        optimizer: prefix of the optimizer's keys. The directory may have no optimizer.

    Returns:
        The new checkpoint's path, and the keys of the DCP directory that were left out.

    Raises:
        CheckpointError: `directory` is no DCP directory, is damaged, or holds values that StreamShard cannot load.
        ConfigError: no key has the prefix `model`.
    """
    root = parse_location("out", out)
    files_of = {key: files for files in _files_of(parse_path("directory", directory)) for key in files.entries}
    own, prefix = f"{optimizer}.", f"{model}." if model else ""
    weights = {
        key.removeprefix(prefix): files.read(key)
        for key, files in files_of.items()
        # Without a prefix the optimizer's keys would count too.
        if files.is_tensor(key) and key.startswith(prefix) and (model or not key.startswith(own))
        if "_extra_state" not in key.split(".")  # of a module: it may be a tensor
    }
    if not weights:
        shown = sorted({key.partition(".")[0] for key in files_of})
        raise ConfigError(
            f"model={model!r}: no key of {directory} begins so; they begin with {', '.join(shown)} (--model-key)"
        )
    left_out = files_of.keys() - {f"{prefix}{name}" for name in weights}
    mine = (key for key in files_of if key in left_out and key.startswith(own))  # in the order of param groups
    state, tensors, taken = _optimizer_in({key.removeprefix(own): files_of[key].read(key) for key in mine}, weights)
    names = _names_in(weights, {name for group in state["param_groups"] for name in group["params"]})
    pieces = TensorPiece.wholes({f"model/{name}": weights[name] for name in sorted(set(names.values()))} | tensors)
    optimizers = {"optimizer": state} if taken else {}
    saved = {"models": {"model": {"class": None, "names": names}}, "optimizers": optimizers, "trees": {}}
    path = write_checkpoint(root, next_number(root), None, RankGroup(), saved, lambda: pieces)
    return path, sorted(left_out - {f"{own}{key}" for key in taken})


def _names_in(weights: Mapping[str, torch.Tensor], stepped: set[str]) -> dict[str, str]:
    """By name in DCP, the name of the saved tensor.

    DCP stores a tied parameter under each of its names; the optimizer has one of the names. So tensors with equal bytes
    are saved once, under the optimizer's name.
    """
    names: dict[str, str] = {}
    first_of: dict[str, str] = {}
    for name in sorted(weights, key=lambda name: f"model/{name}" not in stepped):
        first = first_of.setdefault(digest_of(None, {"": weights[name]}), name)
        names[name] = name if f"model/{name}" in stepped else first
    return names


def _optimizer_in(
    values: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], set[str]]:
    """The optimizer's JSON, its tensors, and the keys that were used.

    Args:
        values: by key, without the optimizer's prefix.
        weights: the model's tensors, by name.
    """
    state: dict[str, dict[str, Any]] = {}
    options_of: dict[str, dict[str, Any]] = {}  # by the group's number, or by the name of a parameter in it
    taken = set()
    for key, value in values.items():
        what, _, rest = key.partition(".")
        name, _, each = rest.rpartition(".")
        if what == "state" and name in weights:
            state.setdefault(f"model/{name}", {})[each] = value
        elif what == "param_groups" and (name.isdecimal() or name in weights):
            options_of.setdefault(name, {})[each] = value
        else:
            continue
        taken.add(key)
    numbers = sorted(filter(str.isdecimal, options_of), key=int)
    # With `flatten_optimizer_state_dict` the keys name parameters instead of groups.
    groups = [options_of[each] for each in numbers] or _joined(options_of)
    for group in groups:
        group["params"] = [f"model/{name}" for name in group.get("params", [])]
    saved, tensors = encode({"state": state, "param_groups": groups, "shared": {}}, "optimizer")
    return {"class": None, **saved}, tensors, taken


def _joined(options_of: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups from options by parameter: parameters with equal options are in one group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, options in options_of.items():
        groups.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(name)
    return list(groups.values())


# ------------------------------------------------------------------------------------------------ DCP's files


def _files_of(root: Path) -> list[DcpFiles]:
    """The files of a DCP directory, or of Accelerate's two."""
    candidates = [root, root / "pytorch_model_fsdp_0", root / "optimizer_0"]
    found = [path for path in candidates if (path / _METADATA_NAME).is_file()]
    if not found:
        raise CheckpointError(f"{root} is no directory of torch.distributed.checkpoint: it has no {_METADATA_NAME}")
    return [DcpFiles(path) for path in found]


class DcpFiles:
    """The files of a DCP directory. Their pickles run no code, and name no files outside of the directory.

    Args:
        root: the directory.

    Attributes:
        entries: by key, the metadata of a tensor or a value.

    Raises:
        CheckpointError: the metadata cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        with self._reading(_METADATA_NAME):
            found = _Unpickler(io.BytesIO((root / _METADATA_NAME).read_bytes())).load()
            self.entries: dict[str, Any] = found.state_dict_metadata
            # The index of a value, not of a tensor, is pickled without an offset.
            self._storage_data = {(i.fqn, getattr(i, "offset", None)): info for i, info in found.storage_data.items()}

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn errors about malformed files into a CheckpointError that names `what`."""
        try:
            yield
        except Exception as error:  # Python's modules and torch raise errors of many kinds about malformed files
            cause = describe(error).partition("\n")[0]
            raise CheckpointError(f"cannot read {what!r:.200} of {self._root}: {cause}") from error

    def is_tensor(self, key: str) -> bool:
        """Whether `key` is the key of a tensor, not of a value."""
        return hasattr(self.entries[key], "chunks")

    def read(self, key: str) -> Any:
        """A full tensor, in new CPU memory, or a value.

        Raises:
            CheckpointError: names the tensor or value that cannot be read.
        """
        with self._reading(key):
            if not self.is_tensor(key):
                return self._load(key, None)
            entry = self.entries[key]
            # torch's `TensorProperties` pickles as a tuple, dtype first.
            shape, dtype = entry.size, entry.properties.state[0]
            boxes = [tuple(zip(chunk.offsets, chunk.sizes, shape, strict=True)) for chunk in entry.chunks]
            filled = [box for box in boxes if all(size for _, size, _ in box)]  # ranks may have none
            if math.prod(shape) and not are_tiles(filled):  # elements of no piece would stay uninitialised
                raise CheckpointError(f"its pieces do not hold each element of a tensor of shape {list(shape)} once")
            whole = torch.empty(shape, dtype=dtype, device="cpu")
            for chunk, box in zip(entry.chunks, boxes, strict=True):
                piece = whole[tuple(slice(start, start + size) for start, size, _ in box)]
                stored = self._load(key, chunk.offsets)
                if stored.shape != piece.shape or stored.dtype != dtype:
                    raise CheckpointError(f"its file does not hold a piece of shape {list(chunk.sizes)} and {dtype}")
                piece.copy_(stored)
            return whole

    def _load(self, key: str, offset: tuple[int, ...] | None) -> Any:
        """The tensor or value in a part of a file. The offset of a value is None."""
        info = self._storage_data[key, offset]
        if not FILE_NAME.fullmatch(info.relative_path):
            raise CheckpointError(f"it is in a file {info.relative_path!r:.80}, wanted a file in the directory")
        with open(self._root / info.relative_path, "rb") as file:
            file.seek(info.offset)
            archive = io.BytesIO(file.read(info.length))
        if damaged := zipfile.ZipFile(archive).testzip():  # torch.load does not compare checksums
            raise CheckpointError(f"{damaged} in {info.relative_path} is damaged")
        archive.seek(0)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(archive):
            raise CheckpointError(f"it holds {', '.join(unsafe)}, which torch.load(weights_only=True) does not load")
        archive.seek(0)
        return torch.load(archive, map_location=CPU, weights_only=True)


class _Unpickler(pickle.Unpickler):
    """Makes a record in the place of each object, except dtypes, sizes and dicts. So pickles run no code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name != "Size":  # a pickle has a dtype as torch's attribute
            return dtype_named(name)
        return {"Size": tuple, "OrderedDict": dict}.get(name) or type(name, (_Record,), {})


class _Record:
    """Has the attributes of an object of any class."""

    def __init__(self, *arguments: Any) -> None:
        """Ignore arguments: DCP's objects get their attributes from ``__setstate__``."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})  # else a tuple: see `read`
