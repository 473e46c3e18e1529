"""The safetensors format and the Hugging Face file layout: no tensors' data, no communication.

`plan_files` says which tensor lies in which file at which byte, by arithmetic. Files that exist: `stored_files.py`.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered as the safetensors library orders them, widest dtype first and then by
name: every start is aligned to its dtype, and equal tensors give equal files (safetensors/src/tensor.rs, `prepare`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.errors import CheckpointError

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "LENGTH_BYTES",
    "SINGLE_NAME",
    "SUMS_NAME",
    "FileLayout",
    "TensorSpec",
    "encode_index",
    "files_of_index",
    "lay_out",
    "parse_sums",
    "plan_files",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUMS_NAME = "model.safetensors.sfv"  # beside them: CRC-32, as programs that check SFV files read it

LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones

_SUM = re.compile(rb"(model[^/\\]*(?:safetensors|json)) ([0-9a-f]{8})")  # as written: capitals would hide a flipped bit
_SUM_SHOWN = 90

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
_DTYPE_ORDER = {dtype: position for position, dtype in enumerate(_DTYPE_NAMES)}
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


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


def plan_files(specs: Sequence[TensorSpec], max_file_bytes: int, metadata: Mapping[str, str]) -> tuple[FileLayout, ...]:
    """Distribute tensors over files as huggingface_hub does, so that file names and contents agree with its.

    Args:
        specs: the tensors, in the order of the state dict.
        max_file_bytes: a file holds no more tensor bytes than this, unless it holds one tensor only.
        metadata: strings for each file's header.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.

    Raises:
        CheckpointError: two tensors have one name, or a dtype has no name in the format.
    """
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise CheckpointError(f"several tensors are named {repeated[0]!r}")
    groups = _split(specs, max_file_bytes)
    if len(groups) <= 1:
        return (lay_out(SINGLE_NAME, groups[0] if groups else [], metadata),)
    stem = SINGLE_NAME.removesuffix(".safetensors")
    return tuple(
        lay_out(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for number, group in enumerate(groups, start=1)
    )


def encode_index(files: Sequence[FileLayout], total_parameters: int | None) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    metadata = {} if total_parameters is None else {"total_parameters": total_parameters}
    metadata["total_size"] = sum(file.size_bytes - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


def files_of_index(text: bytes) -> dict[str, str]:
    """The file of each tensor, according to the text of an index.

    Raises:
        ValueError: it is no index.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        found = {str(name): file for name, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)) from error
    strange = [file for file in found.values() if not isinstance(file, str)]
    if strange:
        raise ValueError(f"{strange[0]!r} is no file name")
    return found


def parse_sums(root: Path, text: bytes) -> dict[str, frozenset[str]]:
    """Checksums by file, of the text of `SUMS_NAME` in `root`.

    Raises:
        CheckpointError: a line is none.
    """
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{root / SUMS_NAME} is damaged: {line[:_SUM_SHOWN]!r} is no checksum of a file")
        name = os.fsdecode(match[1])
        found[name] = found.get(name, frozenset()) | {match[2].decode()}
    return found


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


def lay_out(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """One file that holds all of `specs`.

    Raises:
        CheckpointError: a dtype has no name in the format, or the header becomes longer than readers accept.
    """
    for spec in specs:
        if spec.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{spec.name!r} is {spec.dtype}, which safetensors cannot hold")
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
        raise CheckpointError(f"the header of {name} would take {len(text)} bytes: use a smaller max_shard_size")
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return FileLayout(name, header, offsets, len(header) + position)
