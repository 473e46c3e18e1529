"""The safetensors format and the Hugging Face file layout, as arithmetic: no tensors' data, no communication.

`plan_files` says which tensor lies in which file at which byte; `read_directory` finds the same of files that exist.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered as the safetensors library orders them, widest dtype first and then by
name: every start is aligned to its dtype, and equal tensors give equal files (safetensors/src/tensor.rs, `prepare`).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.errors import ExportError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "FileLayout",
    "StoredTensor",
    "TensorSpec",
    "encode_index",
    "plan_files",
    "read_directory",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
NUMBERED_PATTERN = r"model-\d{5}-of-\d{5}\.safetensors"

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones

# In the order in which a file holds them.
_DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_ORDER = {dtype: place for place, dtype in enumerate(_DTYPE_NAMES)}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class TensorSpec(NamedTuple):
    """One tensor as it will be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileLayout(NamedTuple):
    """One file, down to the byte.

    Attributes:
        name: its name in the directory.
        header: its first bytes, length included.
        offsets: byte offset in the file of each tensor's first element.
        size_bytes: of the whole file.
    """

    name: str
    header: bytes
    offsets: dict[str, int]
    size_bytes: int


class StoredTensor(NamedTuple):
    """A tensor found in a file; its bytes start at `offset` of `path`."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def plan_files(specs: Sequence[TensorSpec], max_file_bytes: int, metadata: Mapping[str, str]) -> tuple[FileLayout, ...]:
    """Distribute tensors over files as huggingface_hub does, so that file names and contents agree with its.

    Args:
        specs: the tensors, in the order of the state dict.
        max_file_bytes: a file holds no more tensor bytes than this, unless it holds one tensor only.
        metadata: strings for each file's header.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.

    Raises:
        ExportError: two tensors have one name, or a dtype has no name in the format.
    """
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise ExportError(f"several tensors are named {repeated[0]!r}")
    groups = _split(specs, max_file_bytes)
    if len(groups) <= 1:
        return (_lay_out(SINGLE_NAME, groups[0] if groups else [], metadata),)
    stem = SINGLE_NAME.removesuffix(".safetensors")
    return tuple(
        _lay_out(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for number, group in enumerate(groups, start=1)
    )


def encode_index(files: Sequence[FileLayout], total_parameters: int | None) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    metadata = {} if total_parameters is None else {"total_parameters": total_parameters}
    metadata["total_size"] = sum(file.size_bytes - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


def read_directory(directory: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Find every tensor of a Hugging Face directory, reading headers only.

    Raises:
        ExportError: there is nothing to read, or what is there contradicts itself.
    """
    root = Path(directory)
    single, index = root / SINGLE_NAME, root / INDEX_NAME
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        raise ExportError(f"{root} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        file_names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{index} is not an index of safetensors files: {error!r}") from error
    outside = [name for name in file_names if Path(name).name != name]
    if outside:
        raise ExportError(f"{index} names {outside[0]!r}, which is not a file of its own directory")
    stored = {name: _read_header(root / name) for name in file_names}
    lost = [name for name, file_name in weight_map.items() if name not in stored[file_name]]
    if lost:
        raise ExportError(f"{index} says {lost[0]!r} is in {weight_map[lost[0]]}, which does not have it")
    return {name: stored[file_name][name] for name, file_name in weight_map.items()}


def _split(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """huggingface_hub/serialization/_base.py: one pass in order; what is too large for any file gets one of its own,
    numbered before the file that is being filled."""
    groups: list[list[TensorSpec]] = []
    filling: list[TensorSpec] = []
    filled_bytes = 0
    for spec in specs:
        if spec.size_bytes > max_file_bytes:
            groups.append([spec])
            continue
        if filled_bytes + spec.size_bytes > max_file_bytes:
            groups.append(filling)
            filling, filled_bytes = [], 0
        filling.append(spec)
        filled_bytes += spec.size_bytes
    if filling:
        groups.append(filling)
    return groups


def _lay_out(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    for spec in specs:
        if spec.dtype not in _DTYPE_NAMES:
            raise ExportError(f"{spec.name!r} is {spec.dtype}, which safetensors cannot hold")
    contents: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: (_DTYPE_ORDER[spec.dtype], spec.name)):
        end = position + spec.size_bytes
        contents[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        starts[spec.name] = position
        position = end
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise ExportError(f"the header of {name} would take {len(text)} bytes: use a smaller max_shard_size")
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return FileLayout(name, header, offsets, len(header) + position)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
                raise ExportError(f"{path} is not a safetensors file, or is cut short")
            contents = json.loads(file.read(length))
        contents.pop("__metadata__", None)
        stored = {
            name: _stored_tensor(path, _LENGTH_BYTES + length, name, entry, size_bytes)
            for name, entry in contents.items()
        }
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is not a safetensors file: {error!r}") from error
    return stored


def _stored_tensor(path: Path, data_start: int, name: str, entry: Mapping[str, Any], size_bytes: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise ExportError(f"{path}: {name!r} has dtype {entry['dtype']}, which cannot be loaded")
    spec = TensorSpec(name, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    start, end = entry["data_offsets"]
    if end - start != spec.size_bytes or start < 0 or data_start + end > size_bytes:
        raise ExportError(f"{path}: {name!r} does not lie where the header says; the file is cut short or damaged")
    return StoredTensor(path, data_start + start, spec.shape, spec.dtype)
