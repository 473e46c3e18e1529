"""Malicious checkpoints: their manifests are changed, with a matching checksum."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from streamshard.checkpoint.manifest import MANIFEST_NAME, PieceRecord, TensorRecord, read_manifest, sealed
from streamshard.checkpoint.safetensors_file import FileRecord


def write_body(checkpoint: Path, body: bytes) -> None:
    """A manifest of any text, in the place of the one that is there."""
    (checkpoint / MANIFEST_NAME).write_bytes(sealed(body))


def rewrite(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """`change` changes the manifest's JSON."""
    content = json.loads((checkpoint / MANIFEST_NAME).read_bytes())["content"]
    change(content)
    write_body(checkpoint, json.dumps(content).encode())


def split(checkpoint: Path, count: int) -> None:
    """Make a checkpoint of one rank what `count` ranks would have saved. Its files are smaller than a chunk."""
    manifest = read_manifest(checkpoint)
    (file,) = manifest.files
    data = load_file(checkpoint / file.name)
    os.unlink(checkpoint / file.name)
    contents: list[dict[str, Any]] = [{} for _ in range(count)]
    tensors = {}
    for name, record in manifest.tensors.items():
        flat, numel, pieces = data[name].view(-1), math.prod(record.shape), []
        for rank in range(count):
            start, stop = numel * rank // count, numel * (rank + 1) // count
            if start < stop:
                contents[rank][name] = flat[start:stop].clone()
                pieces.append(PieceRecord(rank, start, stop))
        tensors[name] = TensorRecord(record.shape, record.dtype, tuple(pieces))
    files = []
    for rank, each in enumerate(contents):
        raw, name = save(each, {"format": "pt"}), f"rank-{rank:05d}-of-{count:05d}.safetensors"
        (checkpoint / name).write_bytes(raw)
        files.append(FileRecord(name, len(raw), [f"{zlib.crc32(raw):08x}"]))
    new = manifest._replace(world_size=count, files=tuple(files), tensors=tensors)
    (checkpoint / MANIFEST_NAME).write_bytes(new.encode())
