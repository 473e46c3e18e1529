"""Checkpoints that strangers may make: their manifest says something else, and has a checksum that fits. Few files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from streamshard.checkpoint.manifest import MANIFEST_NAME, sealed


def write_body(checkpoint: Path, body: bytes) -> None:
    """A manifest of any text, in the place of the one that is there."""
    (checkpoint / MANIFEST_NAME).write_bytes(sealed(body))


def rewrite(checkpoint: Path, change: Callable[[Any], object]) -> None:
    """`change` changes the manifest's JSON."""
    content = json.loads((checkpoint / MANIFEST_NAME).read_bytes())["content"]
    change(content)
    write_body(checkpoint, json.dumps(content).encode())


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
