"""Reads files of torch.distributed.checkpoint (DCP) key by key, with torch's own reader, and runs no code in them.

DCP pickles its metadata and whatever is no tensor. Unpickling can run code; the unpicklers here know data only.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from streamshard.checkpoint.foreign import DCP, METADATA_NAME, MODEL_DIRECTORY, OPTIMIZER_DIRECTORY, what_is
from streamshard.errors import CheckpointError

__all__ = ["Source"]

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
