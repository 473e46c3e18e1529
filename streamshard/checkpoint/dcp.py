"""Convert checkpoints from and to torch.distributed.checkpoint (DCP), as FSDP2 writes it: weights and optimizer state.

torch reads and writes DCP's files. Here names are translated. Tensors pass one at a time.

FSDP2's way is ``dcp.save({"model": ..., "optimizer": ...})`` of what ``get_state_dict`` gives. Keys are
``model.<name>``, ``optimizer.state.<name>.exp_avg`` and ``optimizer.param_groups.0.lr``; with
``flatten_optimizer_state_dict`` the last is ``optimizer.param_groups.<name>.lr``. Accelerate has models and optimizers
in directories of their own.

DCP pickles its metadata, and values that are no tensors. Unpickling can run code, so our unpicklers know data only.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from streamshard.checkpoint.directory import PARTIAL, next_number, open_checkpoint
from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.json_codec import decode, encode
from streamshard.checkpoint.manifest import CheckpointFiles
from streamshard.checkpoint.optimizer_state import is_moment
from streamshard.checkpoint.run_parts import Collected
from streamshard.checkpoint.safetensors_file import bytes_of, sync_directory
from streamshard.checkpoint.save import write_checkpoint
from streamshard.comm.objects import SingleProcess
from streamshard.config import parse_path
from streamshard.errors import CheckpointError, ConfigError
from streamshard.unit.optimizer_hooks import NUMBERS

__all__ = ["Converted", "Source", "from_dcp", "to_dcp"]

_METADATA_NAME = ".metadata"
_RECORDS = (*records.__all__, "_MEM_FORMAT_ENCODING")
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_OTHERS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_CPU = torch.device("cpu")


class Source:
    """A DCP directory, or Accelerate's two, read key by key.

    Attributes:
        readers: by key, in which of the directories it is.
    """

    def __init__(self, root: Path) -> None:
        candidates = [root, root / "pytorch_model_fsdp_0", root / "optimizer_0"]
        found = [path for path in candidates if (path / _METADATA_NAME).is_file()]
        if not found:
            raise CheckpointError(
                f"{root} is no directory of torch.distributed.checkpoint: there is no {_METADATA_NAME} in it, nor in "
                "pytorch_model_fsdp_0 in it"
            )
        self.readers = {key: reader for reader in map(_Reader, found) for key in reader.metadata.state_dict_metadata}

    def metadata_of(self, key: str) -> Any:
        return self.readers[key].metadata.state_dict_metadata[key]

    def tensor_metadata(self, key: str) -> TensorStorageMetadata:
        metadata = self.metadata_of(key)
        if not isinstance(metadata, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is no tensor")
        return metadata

    def meta_tensor(self, key: str) -> torch.Tensor:
        """On the meta device."""
        metadata = self.tensor_metadata(key)
        return torch.empty(metadata.size, dtype=metadata.properties.dtype, device="meta")

    def tensor(self, key: str) -> torch.Tensor:
        """In new CPU memory."""
        return cast(torch.Tensor, self._read(key, torch.empty_like(self.meta_tensor(key), device=_CPU)))

    def value(self, key: str) -> Any:
        """A small tensor, or another value."""
        return self.tensor(key) if isinstance(self.metadata_of(key), TensorStorageMetadata) else self._read(key, None)

    def _read(self, key: str, target: Any) -> Any:
        try:
            return self.readers[key].read(key, target)
        except Exception as error:  # torch raises whatever it runs into
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(f"cannot read {key!r} of {self.readers[key].path}: {reason}") from error


class _Reader(FileSystemReader):
    """Reads one key at a time, and unpickles nothing but data.

    Attributes:
        metadata: of all keys.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with open(path / _METADATA_NAME, "rb") as file:
                self.metadata: Metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # unpicklers raise whatever they run into
            raise CheckpointError(f"cannot read {path / _METADATA_NAME}: {error}") from error
        self.set_up_storage_reader(self.metadata, is_coordinator=True)

    def read(self, key: str, target: Any) -> Any:
        """The value of `key`: `target`, filled, if it is a tensor."""
        state = {key: target}
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        plan = self.prepare_global_plan(planner.create_global_plan([plan]))[0]
        self.read_data(planner.finish_plan(plan), planner).wait()
        return state[key]


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows DCP's own records, and what they are made of."""

    def find_class(self, module: str, name: str) -> Any:
        is_record = module == "torch.distributed.checkpoint.metadata" and name in _RECORDS
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.partition(".")[0] == "pathlib" and name in _PATHS
        if is_record or is_dtype or is_path or (module, name) in _OTHERS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata need; it may be an attack")


# ------------------------------------------------------------------------------------------------ to DCP


def to_dcp(directory: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Convert a checkpoint's models and optimizers to a DCP directory, which ``dcp.load`` reads into those of FSDP2.

    Its keys begin with ``model.`` and ``optimizer.``; of several models, with ``model.policy.`` and so on. Schedulers,
    random states, `extra` and extra state of modules are left out. The checkpoint's checksums are verified first.

    The files are written into a directory beside `out`, such as ``out.89abcdef.partial``, which is renamed to `out`
    when it is complete. An error or an interrupt removes it. A run that is killed leaves it.

    Args:
        directory: a checkpoint, or a directory of them, of which the latest that is whole is taken.
        out: where to; a new directory.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: the checkpoint is damaged, or `out` exists or cannot be written to.
    """
    root = parse_path("out", out).resolve()
    if os.path.lexists(root):
        raise CheckpointError(f"{root} exists: convert into a new directory")
    partial = root.with_name(f"{root.name}.{secrets.token_hex(4)}{PARTIAL}")
    files = open_checkpoint(directory)
    files.verify_together(SingleProcess())
    state = {name: _model_out(files, name) for name in files.manifest.state["models"]}
    state |= {name: _optimizer_out(files, name) for name in files.manifest.state["optimizers"]}
    try:
        partial.mkdir(parents=True)
        _write(files, partial, root, state)
        sync_directory(partial)
        os.rename(partial, root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(root.parent)
    return files.root


class _Saved(torch.Tensor):
    """Stands for a tensor in the checkpoint: on the meta device, of its shape and dtype."""

    saved_name: str


def _stand_in(files: CheckpointFiles, name: str) -> torch.Tensor:
    record = files.manifest.tensors[name]
    data = torch.empty(record.shape, dtype=record.torch_dtype, device="meta").as_subclass(_Saved)
    data.saved_name = name
    return data


def _model_out(files: CheckpointFiles, name: str) -> dict[str, Any]:
    saved = files.manifest.state["models"][name]
    state: dict[str, Any] = {}
    for param, own in saved["params"].items():
        for each in (param, *own["aliases"]):  # state dicts have all names
            state[each] = _stand_in(files, f"{name}/{param}")
    return {**{buffer: _stand_in(files, f"{name}/{buffer}") for buffer in saved["buffers"]}, **state}


def _optimizer_out(files: CheckpointFiles, name: str) -> dict[str, Any]:
    saved = files.manifest.state["optimizers"][name]
    models: Mapping[str, Any] = files.manifest.state["models"]
    fqns: dict[str, str] = {f"{model}/{param}": param for model, each in models.items() for param in each["params"]}

    def fqn(param: str) -> str:
        """DCP's name of a parameter, which has its model's name in front where there are several."""
        return fqns.get(param, param)

    state: dict[str, Any] = {}
    for param, values in saved["state"].items():
        state[fqn(param)] = {
            key: _stand_in(files, value["tensor"]) if is_moment(value) else decode(value, files.read_whole, _CPU)
            for key, value in values.items()
        }
    groups = [
        {
            **decode(group["options"], files.read_whole, _CPU),
            "params": [fqn(param) for param in group["params"]],
            **({"param_names": group["param_names"]} if "param_names" in group else {}),
        }
        for group in saved["groups"]
    ]
    flattened = {
        f"param_groups.{param}.{key}": value
        for group in groups
        for param in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"state": state, "param_groups": groups, **flattened}  # the reader asks for one of the two


class _SavePlanner(DefaultSavePlanner):
    """Reads a tensor when it is written, and frees the one before, which torch's writer goes on holding."""

    def __init__(self, files: CheckpointFiles) -> None:
        super().__init__()
        self._files = files
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, _Saved):
            return found
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._written = self._files.read_whole(found.saved_name)
        return self._written


def _write(files: CheckpointFiles, target: Path, final: Path, state: dict[str, Any]) -> None:
    """Write `state` into `target`, which messages call `final`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)  # it is not needed
        # Without copying ahead, which it does where there is a GPU, one is written before the next is asked for.
        writer = FileSystemWriter(target, per_thread_copy_ahead=0)
        try:
            state_dict_saver.save(state, storage_writer=writer, planner=_SavePlanner(files), no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            behind: BaseException | None = cause
            while behind is not None:  # an interrupted writer of torch may raise an error of its own on top
                if not isinstance(behind, Exception):
                    raise behind from None
                behind = behind.__context__
            raise CheckpointError(f"cannot write {final}: {cause}") from error


# ------------------------------------------------------------------------------------------------ from DCP


class Converted(NamedTuple):
    """What `from_dcp` has done.

    Attributes:
        path: of the new checkpoint.
        left_out: keys of the DCP directory that are not in it.
    """

    path: Path
    left_out: list[str]


def from_dcp(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: str = "model",
    optimizer: str = "optimizer",
    step: int | None = None,
) -> Converted:
    """Make a checkpoint of FSDP2's, from which `load_checkpoint(out, model, optimizer)` goes on.

    DCP's files hold pickles, with which others could run code on this machine. They are read by unpicklers that know
    tensors, numbers, strings, lists, dicts and DCP's own records, and refuse anything else.

    Args:
        directory: a DCP directory, or one of Accelerate's with ``pytorch_model_fsdp_0`` in it.
        out: a directory of checkpoints.
        model: what the keys of weights begin with, such as ``"app.model"``; empty: with nothing.
        optimizer: what those of the optimizer begin with. It may be missing.
        step: the checkpoint's number; None is one more than the largest that is there.

    Raises:
        CheckpointError: it is no DCP directory, it is damaged, or holds what StreamShard could not load.
        ConfigError: no key begins so.
    """
    source, root = Source(parse_path("directory", directory)), parse_path("out", out)
    own, prefix = f"{optimizer}.", f"{model}." if model else ""
    of_model = [key for key in source.readers if key.startswith(prefix) and (model or not key.startswith(own))]
    tensors_of_model = [key for key in of_model if isinstance(source.metadata_of(key), TensorStorageMetadata)]
    names = {key.removeprefix(prefix): key for key in tensors_of_model if "_extra_state" not in key.split(".")}
    if not names:
        shown = sorted({key.partition(".")[0] for key in source.readers})
        raise ConfigError(
            f"model={model!r}: no key of {directory} begins so; they begin with {', '.join(shown)}: "
            "say what those of weights begin with (--model-key)"
        )
    others = source.readers.keys() - set(names.values())
    tensors: dict[str, torch.Tensor] = {}
    keys = {f"model/{name}": key for name, key in names.items()}
    optimizers: dict[str, Any] = {}
    if any(key.startswith(own) for key in others):
        optimizers["optimizer"] = _optimizer_in(source, own, names, others, tensors, keys)
    stepped = {name for each in optimizers.values() for group in each["groups"] for name in group["params"]}
    metas = {name: source.meta_tensor(key) for name, key in keys.items()}
    pieces = [Piece.whole(name, each) for name, each in {**metas, **tensors}.items()]
    number = next_number(root) if step is None else step
    state = {"models": {"model": _model_in(source, names, stepped)}, "optimizers": optimizers, "trees": {}}

    def data_of(name: str) -> torch.Tensor:
        return source.tensor(keys[name]).view(-1) if name in keys else tensors[name].contiguous().view(-1)

    path = write_checkpoint(root, number, None, SingleProcess(), Collected(state, {}, pieces), data_of)
    return Converted(path, sorted(others))


def _model_in(source: Source, names: Mapping[str, str], stepped: set[str]) -> dict[str, Any]:
    """DCP does not tell parameters from buffers: a tensor that no optimizer steps is listed as both."""
    return {
        "class": None,
        "params": {
            name: {"dtype": str(source.tensor_metadata(key).properties.dtype).removeprefix("torch."), "aliases": []}
            for name, key in names.items()
        },
        "buffers": [name for name in names if name not in stepped],
        "equal": _equal_ones(source, names, stepped),
        "extra_state": {},
        "export": {"error": "it comes from DCP, which does not say what its files would be: load it and export that"},
    }


def _equal_ones(source: Source, names: Mapping[str, str], stepped: set[str]) -> list[list[str]]:
    """Names with the same bytes, among which tied ones are: DCP has each of these, the optimizer one of them."""
    alike: dict[Any, list[str]] = {}
    for name, key in names.items():
        metadata = source.tensor_metadata(key)
        alike.setdefault((metadata.size, metadata.properties.dtype), []).append(name)
    found: dict[bytes, list[str]] = {}
    for group in alike.values():
        if len(group) > 1 and not stepped.issuperset(group):
            for name in group:
                tensor = source.tensor(names[name])
                found.setdefault(hashlib.sha256(bytes_of(tensor)).digest(), []).append(name)
                del tensor  # before the next is read
    return [group for group in found.values() if len(group) > 1]


def _optimizer_in(
    source: Source,
    own: str,
    names: Mapping[str, str],
    others: set[str],
    tensors: dict[str, torch.Tensor],
    keys: dict[str, str],
) -> dict[str, Any]:
    """The optimizer's JSON.

    Args:
        source: the files.
        own: what its keys begin with.
        names: of the model's tensors, with their keys.
        others: keys that are not taken yet; loses those of the optimizer.
        tensors: gains small ones.
        keys: gains those of moments, by the names they are saved under.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for key in [key for key in source.readers if key in others and key.startswith(own)]:
        what, _, rest = key.removeprefix(own).partition(".")
        name, _, each = rest.rpartition(".")
        if what == "state" and name in names:
            state.setdefault(name, {})[each] = _value_in(
                source, key, f"optimizer/{name}/{each}", names[name], tensors, keys
            )
        elif what == "param_groups" and (name.isdecimal() or name in names):
            groups.setdefault(int(name) if name.isdecimal() else name, {})[each] = source.value(key)
        else:
            continue
        others.discard(key)
    numbered = {place: options for place, options in groups.items() if isinstance(place, int)}
    groups = numbered or _joined(groups)
    return {
        "class": None,
        "groups": [
            {
                "params": list(options.pop("params", [])),
                "options": encode(options, f"optimizer/param_groups[{place}]", tensors),
            }
            for place, (_, options) in enumerate(sorted(groups.items()))
        ],
        "state": state,
        "others": {},
        "shared": {},
    }


def _value_in(
    source: Source, key: str, name: str, param: str, tensors: dict[str, torch.Tensor], keys: dict[str, str]
) -> Any:
    """JSON of one value of the state of the parameter with key `param`, to be saved as `name`."""
    found, wanted = source.metadata_of(key), source.tensor_metadata(param).size
    if isinstance(found, TensorStorageMetadata):
        if found.size == wanted and key.rpartition(".")[2] not in NUMBERS:
            keys[name] = key
            return {"$": "moment", "tensor": name}
        if found.size.numel() > 1:
            raise CheckpointError(
                f"{key!r} has shape {list(found.size)}, its parameter {list(wanted)}: StreamShard loads only state "
                "with one number for each element"
            )
    return encode(source.value(key), name, tensors)


def _joined(options_of: Mapping[str, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Param groups of parameters that have the same options."""
    groups: list[dict[str, Any]] = []
    for name, options in options_of.items():
        group = next((each for each in groups if {**each, "params": None} == {**options, "params": None}), None)
        if group is None:
            groups.append({**options, "params": [name]})
        else:
            group["params"].append(name)
    return dict(enumerate(groups))
