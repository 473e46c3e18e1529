"""The manifest of a checkpoint: what lies where. A directory is a checkpoint if it holds one, because it comes last.

It is JSON, with the SHA-256 of itself in its first line and the CRC-32 of all other files inside: whatever byte of a
checkpoint changes is noticed. A checksum does not say who has written it, so `read_manifest` checks every value
(`manifest_schema.py`); its callers need not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.manifest_schema import LARGEST, check_manifest
from streamshard.checkpoint.tree import dtype_named
from streamshard.errors import CheckpointError

__all__ = [
    "LARGEST",
    "MANIFEST_NAME",
    "FileRecord",
    "Manifest",
    "PieceRecord",
    "TensorRecord",
    "check_sizes",
    "read_manifest",
]

MANIFEST_NAME = "checkpoint.json"
FORMAT = 1

_HEAD = '{{"sha256": "{}", "content":\n'
_TAIL = "\n}\n"


class FileRecord(NamedTuple):
    """One file beside the manifest."""

    name: str
    size_bytes: int
    crc32: str


class PieceRecord(NamedTuple):
    """Elements [start, stop) of a flattened tensor are in file number `file`, under the tensor's name, 1-D."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, in pieces that lie one after another.

    Attributes:
        shape: of the whole.
        dtype: name of a torch.dtype.
        pieces: by `start`.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceRecord, ...]

    @property
    def numel(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype with that name."""
        return dtype_named(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Of the whole."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. Everything in it is plain JSON.

    Attributes:
        number: of the checkpoint among those of its directory; users give the step.
        world_size: ranks that have saved, replicas included.
        replicas: how many copies of the model they held.
        versions: of streamshard and torch, and when, for people.
        files: beside the manifest, in the order in which pieces count them.
        tensors: by name.
        state: everything that is no tensor.
        generation: orders the checkpoints of a directory: each has one more than the largest that was there when it
            was published. No clock decides.
    """

    number: int
    world_size: int
    replicas: int
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any] = field(repr=False)
    generation: int = 0

    def encode(self) -> bytes:
        """The file's content."""
        content = {**asdict(self), "files": [record._asdict() for record in self.files]}
        content["tensors"] = {
            name: {"shape": record.shape, "dtype": record.dtype, "pieces": record.pieces}
            for name, record in self.tensors.items()
        }
        body = json.dumps({"format": FORMAT, **content}, allow_nan=False, separators=(",", ":")).encode()
        return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version has written it.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST_NAME}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    head_bytes = len(_HEAD.format("0" * 64))
    body = text[head_bytes : -len(_TAIL)]
    expected = _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()
    if text != expected:
        raise CheckpointError(f"{path} is damaged: it is not what its checksum says")
    try:
        content = json.loads(body)
        found = content["format"]
        if found == FORMAT:
            check_manifest(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is malformed: {error}") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        versions = content.get("versions")
        by = versions.get("streamshard", "?") if isinstance(versions, dict) else "?"
        raise CheckpointError(
            f"{path} has format {found!r:.20}, written by streamshard {by!s:.20}; this version reads format {FORMAT}: "
            "load it with that version"
        )
    tensors = {
        name: TensorRecord(
            tuple(record["shape"]), record["dtype"], tuple(PieceRecord(*piece) for piece in record["pieces"])
        )
        for name, record in content["tensors"].items()
    }
    return Manifest(
        content["number"],
        content["world_size"],
        content["replicas"],
        content["versions"],
        tuple(FileRecord(**record) for record in content["files"]),
        tensors,
        content["state"],
        content.get("generation", 0),
    )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError unless all files are there, as long as they were. Their contents are not looked at."""
    for record in manifest.files:
        try:
            size_bytes = os.stat(directory / record.name).st_size
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {directory} is not whole: {record.name}: {error.strerror}"
            ) from error
        if size_bytes != record.size_bytes:
            raise CheckpointError(
                f"the checkpoint {directory} is not whole: {record.name} has {size_bytes} bytes, was written with "
                f"{record.size_bytes}"
            )
