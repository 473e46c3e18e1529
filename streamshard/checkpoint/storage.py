"""Where checkpoints and exports lie: in a directory of a file system, or on object storage, by fsspec.

`storage_of` gives the `Storage` of a directory: a `LocalDirectory` or an `ObjectStore`, each in a file of its own. The
other files of this package use both alike. See decision 38.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from streamshard.config import parse_path, parse_url

MANIFEST_NAME = "checkpoint.json"

CHUNK_BYTES = 8 << 20
"""Bytes per checksum and per request, and the extra memory of a copy from a device or into another dtype."""

_NAME = re.compile(r"checkpoint-(\d+)(-\d+|\.[0-9a-f]{8})?")


class Url(str):
    """The address of a directory or an object on object storage, with what `Path` has under the same names."""

    @property
    def name(self) -> str:
        """The last part."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The address of the directory in which this one lies."""
        return Url(self.rpartition("/")[0])

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    def absolute(self) -> Url:
        """The same address."""
        return self


Location = Path | Url


def parse_location(name: str, path: object, call: str = "") -> Location:
    """Make a path or a URL from text or an ``os.PathLike`` object. Arguments and errors: see `parse_path`."""
    url = parse_url(name, path)
    return parse_path(name, path, call) if url is None else Url(url)


def storage_of(location: Location) -> Storage:
    """The storage of a directory.

    Raises:
        CheckpointError: a package is missing, or fsspec does not know the URL. Names the package.
    """
    if isinstance(location, Url):
        from streamshard.checkpoint.object_store import ObjectStore  # here: it imports this file

        return ObjectStore(location)
    from streamshard.checkpoint.local_directory import LocalDirectory

    return LocalDirectory(location)


def number_in(name: str, *, only: bool = False) -> int | None:
    """The number in a name that saves give; None in other names. `only`: nothing else follows such a name."""
    match = (_NAME.fullmatch if only else _NAME.match)(name)
    return int(match[1]) if match else None


class Partial(NamedTuple):
    """A directory into which one save writes. On a file system: and its locked manifest."""

    path: Location
    manifest: FileIO | None = None


Write = Callable[[bytes | memoryview, int], None]
"""Writes bytes at a byte of a file: in order, without gaps."""


class Storage(Protocol):
    """The operations on a directory that checkpoints and exports need. All raise OSErrors that name the file.

    Attributes:
        path: of the directory.
        chunks_per_read: chunks that one `read` should ask for.
    """

    path: Location
    chunks_per_read: int = 1

    def names(self) -> list[str]:
        """The names in the directory; none if it is not there."""

    def complete(self) -> list[str]:
        """The names of directories in here that are checkpoints, or damaged ones, under any name."""

    def is_file(self, name: str) -> bool:
        """Whether a file has this name."""

    def is_link(self, name: str) -> bool:
        """Whether the user's link has this name."""
        return False

    def size(self, name: str) -> int:
        """The bytes of a file. An `ObjectStore` lists them once. Raises FileNotFoundError if there is no such file."""

    def read(self, *ranges: tuple[str, int, int]) -> list[bytes]:
        """Bytes [start, stop) of files, given the name, start and stop of each range. No range is empty."""

    def read_text(self, name: str) -> bytes:
        """The content of a manifest, an index or metadata.

        Raises:
            CheckpointError: it is not a regular file.
        """
        n_bytes = self.size(name)
        return self.read((name, 0, n_bytes))[0] if n_bytes else b""  # `read` takes no empty range

    def mapped(self, name: str) -> Path | None:
        """The path of a regular file, for mapping it into memory; None if only `read` reads it."""

    def writing(self, name: str, size_bytes: int) -> AbstractContextManager[Write]:
        """A context in which one file of that size is written. At its end the file is durable, or an error raised."""

    def begin(self, name: str) -> Partial:
        """Make a directory in here for a save, or for an export called "model". Its name is never used again."""

    def leftovers(self) -> list[str]:
        """The names of directories that `begin` has made and that are not published."""

    def sweep(self, name: str) -> bool:
        """Delete one of the `leftovers`. False: its run lives, and goes on."""

    def publish(self, partial: str, name: str, manifest: bytes) -> Location:
        """Make a checkpoint of the directory `partial`, if possible under the name `name`. Returns its path."""

    def sync(self) -> None:
        """Make what was published durable."""

    def remove(self, partial: Partial) -> None:
        """Delete a directory of `begin`, unless it was published. A second call changes nothing."""

    def delete(self, name: str) -> bool:
        """Delete a checkpoint. It is whole until it is none any more. False: it is write-protected."""
