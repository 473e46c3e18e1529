"""A directory of checkpoints or an export on object storage, by fsspec. See `storage.py`.

[Note: object storage]
Objects appear at once and whole, and nothing can be renamed or locked. A save writes into a directory of its own, whose
name is never used again. The object `BEGUN` comes first and the manifest last: it makes the directory a checkpoint.
Directories with `BEGUN` and without a manifest are leftovers, or the save of a run that lives. So a save that publishes
puts the manifest, and then looks for `SWEPT`. A run that deletes leftovers puts `SWEPT`, and then looks for the
manifest. At least one of two such runs sees the other's mark, and gives up. So no checkpoint is deleted that a save has
returned. Both marks are deleted last: without them a directory is somebody else's, whatever its name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import re
import secrets
from collections.abc import Iterator
from typing import Any

from streamshard.checkpoint.storage import CHUNK_BYTES, MANIFEST_NAME, Partial, Storage, Url, Write
from streamshard.errors import CheckpointError, describe, is_shortage, log

BEGUN = "begun"
"""An object in a directory on object storage into which a save or an export writes. See [Note: object storage]."""

SWEPT = "swept"
"""The object that comes when another run deletes the directory."""

_LEFT = re.compile(r"(checkpoint-\d+|model)\.[0-9a-f]{8}")
_PART_BYTES = 64 << 20  # fsspec keeps a part in memory until it is sent
_MAX_PARTS = 9000  # of an upload; S3 takes 10,000


class ObjectStore(Storage):
    """A directory on object storage: objects whose names begin alike. See [Note: object storage].

    Args:
        path: its URL.

    Raises:
        CheckpointError: fsspec, or its package for such URLs, is missing; or fsspec knows no such URLs.
    """

    chunks_per_read = 8  # requests under way at once

    def __init__(self, path: Url) -> None:
        self.path: Url = path
        try:
            from fsspec.core import url_to_fs  # optional, and only for URLs

            self._fs, root = url_to_fs(str(path))
        except (ImportError, ValueError) as error:
            wanted = "install fsspec (`pip install streamshard[object-storage]`) and its package for such URLs"
            raise CheckpointError(f"{path}: {error}. Object storage needs fsspec: {wanted}") from error
        self._root: str = root.rstrip("/")

    @contextlib.contextmanager
    def _raising_os_errors(self, name: str = "") -> Iterator[str]:
        """Gives fsspec's path of an object. Errors of many classes become OSErrors that name the URL."""
        url, path = (self.path / name, f"{self._root}/{name}") if name else (self.path, self._root)
        try:
            yield path
        except FileNotFoundError as error:  # means damage; all others say nothing of the files
            raise FileNotFoundError(errno.ENOENT, f"No such object ({error})", url) from error
        except Exception as error:
            if is_shortage(error):
                raise
            raise OSError(f"{url}: {describe(error)}") from error

    def _entries(self) -> dict[str, int]:
        """By name, the size of each object in the directory, and -1 for each directory in it."""
        with self._raising_os_errors() as path:
            self._fs.invalidate_cache(path)
            try:
                # Without fsspec's cache: other runs write here.
                found: list[dict[str, Any]] = self._fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: -1 if each["type"] == "directory" else each["size"]
            for each in found
            if each["name"].strip("/") != self._root.strip("/")  # some stores have an object for the directory
        }

    def _inside(self, name: str) -> ObjectStore:
        return ObjectStore(self.path / name)

    def _directories(self) -> list[str]:
        return [name for name, size in self._entries().items() if size < 0]

    def names(self) -> list[str]:
        return [*self._entries()]

    def complete(self) -> list[str]:
        return [name for name in self._directories() if self._inside(name).is_file(MANIFEST_NAME)]

    def is_file(self, name: str) -> bool:
        return self._entries().get(name, -1) >= 0

    _sizes = functools.cached_property(_entries)  # one request, not one for each file

    def size(self, name: str) -> int:
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, "No such object", self.path / name)
        return self._sizes[name]

    def read(self, *ranges: tuple[str, int, int]) -> list[bytes]:
        names, starts, stops = ([*each] for each in zip(*ranges, strict=True))
        with self._raising_os_errors():
            found: list[Any] = self._fs.cat_ranges([f"{self._root}/{name}" for name in names], starts, stops)
        for (name, start, stop), data in zip(ranges, found, strict=True):
            with self._raising_os_errors(name):
                if isinstance(data, BaseException):  # fsspec returns it in the place of the bytes
                    raise data
            if len(data) != stop - start:
                raise CheckpointError(f"{self.path / name} has {len(data)} bytes from byte {start} to {stop}")
        return found

    def mapped(self, name: str) -> None:
        return None

    @contextlib.contextmanager
    def writing(self, name: str, size_bytes: int) -> Iterator[Write]:
        part_bytes = max(_PART_BYTES, -(-size_bytes // _MAX_PARTS // CHUNK_BYTES) * CHUNK_BYTES)
        with self._raising_os_errors(name) as path:
            # Without `with`, which closes the file after an error too. That publishes what was written.
            file = self._fs.open(path, "wb", block_size=part_bytes)

        done = 0

        def write(data: bytes | memoryview, position: int) -> None:
            nonlocal done
            if position != done and len(data):
                raise CheckpointError(f"{self.path / name}: ranks do not have each byte of it once")
            with self._raising_os_errors(name):
                file.write(data)
            done += len(data)

        try:
            yield write
            if done != size_bytes:
                raise CheckpointError(f"{self.path / name} would have {done} bytes of {size_bytes}")
            with self._raising_os_errors(name):
                file.close()
        except BaseException:
            _abandon(file)
            raise

    def put(self, name: str, content: bytes) -> None:
        """Write a small object. It replaces another one at once."""
        with self._raising_os_errors(name) as path:
            self._fs.pipe_file(path, content)

    def unlink(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._raising_os_errors(name) as path:
            self._fs.rm_file(path)

    def _remove_tree(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._raising_os_errors(name) as path:
            entries = self._inside(name)._entries()
            if others := [f"{path}/{each}" for each in entries if each not in (BEGUN, SWEPT)]:
                # Only if there are directories: the packages look for objects below each name, one after another.
                self._fs.rm(others, recursive=-1 in entries.values())
            for mark in filter(entries.__contains__, (BEGUN, SWEPT)):  # last: see [Note: object storage]
                self._inside(name).unlink(mark)
            self._fs.invalidate_cache(path)
            self._fs.rm(path, recursive=True)  # some stores have an object for the directory

    def begin(self, name: str) -> Partial:
        path = self.path / f"{name}.{secrets.token_hex(4)}"
        ObjectStore(path).put(BEGUN, b"A save has begun to write here.\n")
        return Partial(path)

    def leftovers(self) -> list[str]:
        inside = {name: self._inside(name)._entries() for name in filter(_LEFT.fullmatch, self._directories())}
        ours = {name: each for name, each in inside.items() if BEGUN in each or SWEPT in each}
        return [name for name, entries in ours.items() if MANIFEST_NAME not in entries]

    def sweep(self, name: str) -> bool:
        try:
            if not self._inside(name).is_file(SWEPT):  # first: a save that is alive sees it, or has published by now
                self._inside(name).put(SWEPT, b"Another run deletes this directory.\n")
            if not self._inside(name).is_file(MANIFEST_NAME):
                self._remove_tree(name)
        except OSError as error:
            log.warning("%s stays: %s", self.path / name, error)
        return True

    def publish(self, partial: str, name: str, manifest: bytes) -> Url:
        inside = self._inside(partial)
        try:
            inside.put(MANIFEST_NAME, manifest)
            if not inside._is_begun():
                raise CheckpointError(
                    f"another run writes to {self.path}, and has deleted {partial}: give each its own"
                )
        except BaseException:
            with contextlib.suppress(OSError):
                inside.unlink(MANIFEST_NAME)  # it may be there even if putting it has raised
            raise
        return inside.path

    def _is_begun(self) -> bool:
        """Whether no other run deletes the directory."""
        entries = self._entries()
        return BEGUN in entries and SWEPT not in entries

    def sync(self) -> None:
        """Objects are durable when they appear."""

    def remove(self, partial: Partial) -> None:
        try:
            if not self._inside(partial.path.name).is_file(MANIFEST_NAME):
                self._remove_tree(partial.path.name)
        except OSError as error:
            log.warning("%s stays until the next save: %s", partial.path, error)

    def delete(self, name: str) -> bool:
        self._inside(name).unlink(MANIFEST_NAME)  # first: so a kill leaves no damaged checkpoint
        self._remove_tree(name)
        return True


def _abandon(file: Any) -> None:
    """Let the store forget what was uploaded. Closing a file, also by the garbage collector, would publish a part."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):  # files that publish nothing at the end
        file.closed = True
