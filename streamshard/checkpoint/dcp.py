"""Checkpoints from and to torch.distributed.checkpoint (DCP), as FSDP2 has them: weights and the optimizer's state.

torch writes and reads the files; what is here is the translation of names. Tensors pass one at a time.

FSDP2's way is ``dcp.save({"model": ..., "optimizer": ...})`` of what ``get_state_dict`` gives: keys are
``model.<name>``, ``optimizer.state.<name>.exp_avg`` and ``optimizer.param_groups.0.lr``; with
``flatten_optimizer_state_dict`` it is ``optimizer.param_groups.<name>.lr``. Accelerate has the two in directories of
their own.

DCP pickles its metadata and whatever is no tensor. Unpickling can run code; the unpicklers here know data only.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._traverse import set_element  # what torch's own planner does with paths
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from streamshard.checkpoint.directory import (
    DCP,
    METADATA_NAME,
    MODEL_DIRECTORY,
    OPTIMIZER_DIRECTORY,
    next_number,
    open_checkpoint,
    what_is,
)
from streamshard.checkpoint.json_codec import decode, encode
from streamshard.checkpoint.manifest import CheckpointFiles
from streamshard.checkpoint.run_parts import Collected, Piece
from streamshard.checkpoint.safetensors_file import PARTIAL, bytes_of, sync_directory
from streamshard.checkpoint.save import plan_job
from streamshard.comm.objects import SingleProcess
from streamshard.config import parse_path
from streamshard.errors import CheckpointError, ConfigError
from streamshard.log import progress
from streamshard.unit.optimizer_hooks import NUMBERS

__all__ = ["Converted", "Source", "from_dcp", "to_dcp"]

_RECORDS = (*records.__all__, "_MEM_FORMAT_ENCODING")
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_OTHERS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


class Source:
    """A DCP directory, or Accelerate's two, read key by key.

    Attributes:
        readers: by key, in which of the directories it is.
    """

    def __init__(self, root: Path) -> None:
        candidates = [root, root / f"{MODEL_DIRECTORY}_0", root / f"{OPTIMIZER_DIRECTORY}_0"]
        found = [path for path in candidates if (path / METADATA_NAME).is_file()]
        if not found:
            raise CheckpointError(
                what_is(root, DCP)
                or f"{root} is no {DCP}: neither it nor {MODEL_DIRECTORY}_0 in it has a {METADATA_NAME}"
            )
        self.readers = {key: reader for reader in map(_Reader, found) for key in reader.metadata.state_dict_metadata}

    def metadata_of(self, key: str) -> Any:
        return self.readers[key].metadata.state_dict_metadata[key]

    def path_after(self, key: str, name: str) -> tuple[str | int, ...]:
        """Where in a nested value `key` was: what follows on that of its parents whose name ends with `name`."""
        path = (self.readers[key].metadata.planner_data or {}).get(key, (key,))
        ends = [place for place, each in enumerate(path) if str(each).rpartition(".")[2] == name]
        return tuple(path[ends[0] + 1 :]) if ends else ()

    def tensor_metadata(self, key: str) -> TensorStorageMetadata:
        metadata = self.metadata_of(key)
        if not isinstance(metadata, TensorStorageMetadata):
            raise CheckpointError(f"{key!r} is no tensor")
        return metadata

    def layout_of(self, key: str) -> tuple[tuple[int, ...], int, torch.Tensor]:
        """Shape, first element, and a meta tensor, as of a `Piece` that is all of it."""
        metadata = self.tensor_metadata(key)
        data = torch.empty(metadata.size.numel(), dtype=metadata.properties.dtype, device="meta")
        return tuple(metadata.size), 0, data

    def tensor(self, key: str) -> torch.Tensor:
        """In new CPU memory."""
        metadata = self.tensor_metadata(key)
        return cast(torch.Tensor, self._read(key, torch.empty(metadata.size, dtype=metadata.properties.dtype)))

    def value(self, key: str) -> Any:
        """A small tensor, or whatever else it is."""
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
            with open(path / METADATA_NAME, "rb") as file:
                self.metadata: Metadata = _MetadataUnpickler(file).load()
        except Exception as error:  # unpicklers raise whatever they run into
            raise CheckpointError(f"cannot read {path / METADATA_NAME}: {error}") from error
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


_EXTRA_STATE = "_extra_state"
_CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ to DCP


def to_dcp(directory: str | os.PathLike[str], out: str | os.PathLike[str], *, accelerate: bool = False) -> Path:
    """A checkpoint's models and optimizers as a DCP directory, which ``dcp.load`` reads into those of FSDP2.

    Its keys begin with ``model.`` and ``optimizer.``; of several models, ``model.policy.`` and so on. Schedulers,
    random states and `extra` are left out. The checkpoint's checksums are verified first.

    The files are written into a directory beside `out`, such as ``out.89abcdef01234567.partial``, which is renamed to
    `out` when it is complete. An error or an interrupt removes it. A run that is killed leaves it.

    Args:
        directory: a checkpoint, or a directory of them, of which the latest that is whole is taken.
        out: where to; a new or empty directory, neither a mount point nor the current directory.
        accelerate: as Accelerate has it, models and optimizers in directories of their own (``pytorch_model_fsdp_0``,
            ``optimizer_0``); ``accelerate merge-weights`` reads the former.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: the checkpoint is damaged, `out` cannot be written to, or something cannot be said in DCP.
    """
    root = parse_path("out", out).resolve()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise CheckpointError(f"{root} is there already and not an empty directory: convert into a new one")
    if root.is_mount() or root == Path.cwd():  # the result is renamed to it
        raise CheckpointError(f"{root} is a mount point, or the current directory: convert into a new one inside it")
    partial = root.with_name(f"{root.name}.{secrets.token_hex(8)}{PARTIAL}")
    with open_checkpoint(directory) as files:
        files.verify_together(SingleProcess())
        models = {name: _model_out(files, name) for name in files.manifest.state["models"]}
        optimizers = {name: _optimizer_out(files, name) for name in files.manifest.state["optimizers"]}
        targets: dict[str, dict[str, Any]] = {"": {**models, **optimizers}}
        if accelerate:
            targets = {f"{MODEL_DIRECTORY}_{n}": {"model": each} for n, each in enumerate(models.values())}
            targets |= {f"{OPTIMIZER_DIRECTORY}_{n}": {"optimizer": each} for n, each in enumerate(optimizers.values())}
        try:
            partial.mkdir(parents=True)
            for name, state in targets.items():
                _write(files, partial / name, root / name, state)
                sync_directory(partial / name)
            files.check_unchanged()
            sync_directory(partial)
            os.replace(partial, root)
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
    for buffer in saved["buffers"]:
        state.setdefault(buffer, _stand_in(files, f"{name}/{buffer}"))
    extra = decode(saved["extra_state"], files.read_whole, _CPU)
    return {**state, **{f"{module}.{_EXTRA_STATE}".lstrip("."): each for module, each in extra.items()}}


def _optimizer_out(files: CheckpointFiles, name: str) -> dict[str, Any]:
    manifest = files.manifest
    saved = manifest.state["optimizers"][name]
    models: Mapping[str, Any] = manifest.state["models"]
    shapes = {}
    for model, each in models.items():
        for param in each["params"]:
            known = f"{model}/{param}" if len(models) > 1 else param
            shapes[known] = param, manifest.tensors[f"{model}/{param}"].shape
    stray = next((param for group in saved["groups"] for param in group["params"] if param not in shapes), None)
    if stray is not None:
        raise CheckpointError(f"{name} steps {stray!r}, which is of none of the models: DCP has no name for it")
    state: dict[str, Any] = {}
    for param, values in saved["state"].items():
        fqn, shape = shapes[param]
        own = state[fqn] = {}
        for key, value in values.items():
            if not (isinstance(value, dict) and value.get("$") == "moment"):
                own[key] = decode(value, files.read_whole, _CPU)
            elif value["tensor"] in manifest.tensors:
                own[key] = _stand_in(files, value["tensor"])
            else:  # nobody had elements of it
                own[key] = torch.empty(shape)
    groups = [
        {
            **decode(group["options"], files.read_whole, _CPU),
            "params": [shapes[param][0] for param in group["params"]],
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
    return {"state": state, "param_groups": groups, **flattened}  # whichever the reader has asked for


class _SavePlanner(DefaultSavePlanner):
    """Reads a tensor when it is written, and frees the one before, which torch's writer goes on holding."""

    def __init__(self, files: CheckpointFiles, advance: Callable[[int], object]) -> None:
        super().__init__()
        self._files = files
        self._advance = advance
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, _Saved):
            return found
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._advance(found.nbytes)
        self._written = self._files.read_whole(found.saved_name)
        return self._written


def _write(files: CheckpointFiles, target: Path, final: Path, state: dict[str, Any]) -> None:
    """Write `state` into `target`, which people know as `final`."""
    total = sum(each.nbytes for each in _tensors_in(state))
    with progress(f"writing {final.name}", total, shows=True) as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)  # it is not needed
        # Without copying ahead, which it does where there is a GPU, one is written before the next is asked for.
        writer, planner = FileSystemWriter(target, per_thread_copy_ahead=0), _SavePlanner(files, advance)
        try:
            state_dict_saver.save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            behind: BaseException | None = cause
            while behind is not None:  # an interrupted writer of torch may raise an error of its own on top
                if not isinstance(behind, Exception):
                    raise behind from None
                behind = behind.__context__
            raise CheckpointError(f"cannot write {final}: {cause}") from error


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _tensors_in(each)


# ------------------------------------------------------------------------------------------------ from DCP


class Converted(NamedTuple):
    """What `from_dcp` has done.

    Attributes:
        path: the new checkpoint.
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
    """A checkpoint that `load_checkpoint(out, model, optimizer)` goes on from, made of FSDP2's.

    DCP's files hold pickles, with which others could run code on this machine; they are read by unpicklers that know
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
    own, others = f"{optimizer}.", dict(source.readers)
    names, extra = _names_in(source, f"{model}." if model else "", own, others)
    if not names:
        shown = sorted({key.partition(".")[0] for key in source.readers})
        raise ConfigError(
            f"model={model!r}: no key of {directory} begins so; they begin with {', '.join(shown)}: "
            "say what those of weights begin with (--model-key)"
        )
    tensors: dict[str, torch.Tensor] = {}
    keys = {f"model/{name}": key for name, key in names.items()}
    optimizers: dict[str, Any] = {}
    if any(key.startswith(own) for key in others):
        optimizers["optimizer"] = _optimizer_in(source, own, names, others, tensors, keys)
    stepped = {name for each in optimizers.values() for group in each["groups"] for name in group["params"]}
    models = {"model": _model_in(source, names, stepped, encode(extra, "model/_extra_state", tensors))}
    pieces = [Piece(name, *source.layout_of(key)) for name, key in keys.items()]
    pieces += [Piece(name, tuple(each.shape), 0, each.contiguous().view(-1)) for name, each in tensors.items()]
    number = next_number(root) if step is None else step
    state = {"models": models, "optimizers": optimizers, "trees": {}}
    job = plan_job(root, number, None, SingleProcess(), Collected(state, {}, pieces, set()))

    def data_of(name: str) -> torch.Tensor:
        return source.tensor(keys[name]).view(-1) if name in keys else tensors[name].contiguous().view(-1)

    return Converted(job.write(SingleProcess(), data_of), sorted(others))


def _names_in(source: Source, prefix: str, own: str, others: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """What there is of the model: keys of tensors by name, and extra state by module.

    Args:
        source: the files.
        prefix: what its keys begin with.
        own: what the optimizer's begin with.
        others: keys that nobody has taken yet; loses those of the model.
    """
    names: dict[str, str] = {}
    extra: dict[str, Any] = {}
    for key in source.readers:
        if not key.startswith(prefix) or not prefix and key.startswith(own):
            continue
        name = key.removeprefix(prefix)
        parts = name.split(".")
        if _EXTRA_STATE in parts:
            module = ".".join(parts[: parts.index(_EXTRA_STATE)])
            set_element(extra, (module, *source.path_after(key, _EXTRA_STATE)), source.value(key))
        elif isinstance(source.metadata_of(key), TensorStorageMetadata):
            names[name] = key
        else:
            continue
        del others[key]
    return names, extra


def _model_in(source: Source, names: Mapping[str, str], stepped: set[str], extra_state: Any) -> dict[str, Any]:
    """DCP does not tell parameters from buffers: what no optimizer steps may be either."""
    return {
        "class": None,
        "params": {
            name: {"dtype": str(source.tensor_metadata(key).properties.dtype).removeprefix("torch."), "aliases": []}
            for name, key in names.items()
        },
        "buffers": [name for name in names if name not in stepped],
        "equal": _equal_ones(source, names, stepped),
        "extra_state": extra_state,
        "drifts": False,
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
    others: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    keys: dict[str, str],
) -> dict[str, Any]:
    """The optimizer's JSON.

    Args:
        source: the files.
        own: what its keys begin with.
        names: of the model's tensors, with their keys.
        others: keys that nobody has taken yet; loses those of the optimizer.
        tensors: gains small ones.
        keys: gains those of moments, by the names they are saved under.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: dict[Any, dict[str, Any]] = {}
    for key in [key for key in others if key.startswith(own)]:
        what, _, rest = key.removeprefix(own).partition(".")
        name, _, each = rest.rpartition(".")
        if what == "state" and name in names:
            saved_name = f"optimizer/{name}/{each}"
            values = state.setdefault(name, {})
            found = source.metadata_of(key)
            is_tensor = isinstance(found, TensorStorageMetadata)
            if is_tensor and found.size == source.tensor_metadata(names[name]).size and each not in NUMBERS:
                values[each] = {"$": "moment", "tensor": saved_name}
                keys[saved_name] = key
            elif is_tensor and found.size.numel() > 1:
                raise CheckpointError(
                    f"{key!r} has shape {list(found.size)}, its parameter "
                    f"{list(source.tensor_metadata(names[name]).size)}: only what has one number for each element can "
                    "be loaded by StreamShard"
                )
            else:
                values[each] = encode(source.value(key), saved_name, tensors)
        elif what == "param_groups" and (name.isdecimal() or name in names):
            groups.setdefault(int(name) if name.isdecimal() else name, {})[each] = source.value(key)
        else:
            continue
        del others[key]
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
        "values": {},
        "others": {},
        "shared": {},
    }


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
