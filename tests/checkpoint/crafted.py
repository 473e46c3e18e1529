"""Checkpoints that strangers may make: their manifest says something else, and has a checksum that fits. Few files.

Directories of DCP too, as torch writes them, with other metadata.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from streamshard.checkpoint.directory import create_partial, open_intact, publish_checkpoint, remove_partial
from streamshard.checkpoint.disk_layout import TensorPiece
from streamshard.checkpoint.manifest import Manifest, sealed
from streamshard.checkpoint.safetensors_file import FileRecord
from streamshard.checkpoint.save import write_checkpoint
from streamshard.checkpoint.storage import MANIFEST_NAME, Location, Partial
from streamshard.comm.ranks import RankGroup

FILE = "rank-00000-of-00001.safetensors"
STATE: dict[str, Any] = {"models": {}, "optimizers": {}, "trees": {}}


def put(directory: Path, number: int, keep: int | None = None) -> Path:
    """A checkpoint with one file of four bytes."""
    return publish(begin(directory, number), number, keep)


def begin(directory: Path, number: int) -> Partial:
    partial = create_partial(directory, f"checkpoint-{number}")
    (partial.path / FILE).write_bytes(b"1234")
    return partial


def publish(partial: Partial, number: int, keep: int | None = None) -> Path:
    versions = {"streamshard": "0", "torch": "0", "saved_at": "2026-01-01"}
    manifest = Manifest(number, 1, versions, (FileRecord(FILE, 4, ["9be3e0a3"]),), {}, STATE)
    path = publish_checkpoint(partial.path, manifest, keep)
    remove_partial(partial)
    return path


def save_number(root: Location, number: int, keep: int | None = None) -> Location:
    """A checkpoint with a tensor whose every element is `number`, by one rank, with the code of `save_checkpoint`."""
    pieces = [TensorPiece.whole("t", torch.full((700,), number))]
    return write_checkpoint(root, number, keep, RankGroup(), STATE, lambda: pieces)


def loaded_number(root: Location) -> int:
    """The number of the newest intact checkpoint, all of which is read."""
    files, _ = open_intact(root, RankGroup())
    assert torch.equal(files.read_whole("t"), torch.full((700,), files.manifest.number))
    return files.manifest.number


def write_body(checkpoint: Path, body: bytes) -> None:
    """A manifest of any text, in the place of the one that is there."""
    (checkpoint / MANIFEST_NAME).write_bytes(sealed(body))


def rewrite(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """`change` changes the manifest's JSON."""
    content = json.loads((checkpoint / MANIFEST_NAME).read_bytes())["content"]
    change(content)
    write_body(checkpoint, json.dumps(content).encode())


def flip(file: Path, place: int = 0) -> None:
    """Another bit in the byte at `place`."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def write_dcp(directory: Path, state: dict[str, Any], change: Callable[[Any], object] = lambda metadata: None) -> None:
    """A directory of DCP; `change` changes its metadata."""
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        state_dict_saver.save(state, checkpoint_id=directory, no_dist=True)
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@contextlib.contextmanager
def few_files(spare: int) -> Iterator[None]:
    """Inside, this process may open `spare` files more than are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
