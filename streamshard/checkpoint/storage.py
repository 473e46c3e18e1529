"""Where checkpoints and exports lie: in a directory of a file system, or on object storage, by fsspec.

`storage_of` gives the `Storage` of a directory: a `LocalDirectory` or an `ObjectStore`. The other files of this package
use both alike. See decision 38.

[Note: two runs in one directory]
A requeued job may start while its predecessor still saves. On a file system each save holds a lock (flock) on the
manifest in its partial directory. The manifest is created first and filled last. The system releases the lock when the
process ends, in any way. A save deletes partial directories whose lock is free: killed runs have left them.

[Note: object storage]
Objects appear at once and whole, and nothing can be renamed or locked. A save writes into a directory of its own, whose
name is never used again. The object `BEGUN` comes first and the manifest last: it makes the directory a checkpoint.
Directories without a manifest are leftovers, or the save of a run that lives. So a save that publishes puts the
manifest, and then looks for `BEGUN`. A run that deletes leftovers deletes `BEGUN`, and then looks for the manifest. At
least one of two such runs sees the other's mark, and gives up. So no checkpoint is deleted that a save has returned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from errno import EINVAL
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from streamshard.config import parse_path, parse_url
from streamshard.errors import CheckpointError, describe, log

MANIFEST_NAME = "checkpoint.json"

PARTIAL = ".partial"
"""The end of a local directory's name until the directory is complete."""

BEGUN = "begun"
"""An object in a directory on object storage into which a save or an export writes. See [Note: object storage]."""

CHUNK_BYTES = 8 << 20
"""Bytes per checksum and per request, and the extra memory of a copy from a device or into another dtype."""

MAX_TEXT_BYTES = 1 << 30
"""The largest manifest, index or metadata. A manifest of ten thousand ranks has 0.2 GB."""

_NAME = re.compile(r"checkpoint-(\d{1,18})(?!\d)(-\d+|\.[0-9a-f]{8})?")
_LEFT = re.compile(r"(checkpoint-\d+(-\d+|\.[0-9a-f]{8})?|model)\.[0-9a-f]{8}\.partial")
_LEFT_OBJECTS = re.compile(r"(checkpoint-\d+|model)\.[0-9a-f]{8}")
_PART_BYTES = 64 << 20
_MAX_PARTS = 9000  # of an upload; S3 takes 10,000


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
    return ObjectStore(location) if isinstance(location, Url) else LocalDirectory(location)


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


class Storage(ABC):
    """The operations on a directory that checkpoints and exports need. All raise OSErrors that name the file.

    Attributes:
        path: of the directory.
        at_once: chunks that one `read` should ask for.
    """

    path: Location
    at_once = 1

    @abstractmethod
    def names(self) -> list[str]:
        """The names in the directory; none if it is not there."""

    @abstractmethod
    def complete(self) -> list[str]:
        """The names of directories in here that are checkpoints, or damaged ones, under any name."""

    @abstractmethod
    def is_file(self, name: str) -> bool:
        """Whether a file has this name."""

    def has(self, name: str) -> bool:
        """Whether something has this name, a broken link too."""
        return name in self.names()

    def is_link(self, name: str) -> bool:
        """Whether the user's link has this name."""
        return False

    @abstractmethod
    def sizes(self) -> Callable[[str], int]:
        """A function that gives the bytes of a file. It raises FileNotFoundError if there is no such file."""

    @abstractmethod
    def read(self, *ranges: tuple[str, int, int]) -> list[bytes]:
        """Bytes [start, stop) of files, given the name, start and stop of each range. No range is empty."""

    def read_text(self, name: str) -> bytes:
        """The content of a manifest, an index or metadata. A sparse file of a petabyte takes no space on the disk.

        Raises:
            CheckpointError: it is not a regular file, or too large.
        """
        if (n_bytes := self.sizes()(name)) > MAX_TEXT_BYTES:
            raise CheckpointError(f"{self.path / name} has {n_bytes} bytes, wanted at most {MAX_TEXT_BYTES}")
        return self.read((name, 0, n_bytes))[0] if n_bytes else b""

    @abstractmethod
    def mapped(self, name: str) -> Path | None:
        """The path of a regular file, for mapping it into memory; None if only `read` reads it."""

    @abstractmethod
    def writing(self, name: str, size_bytes: int) -> contextlib.AbstractContextManager[Write]:
        """A context in which one file of that size is written. At its end the file is durable, or an error raised."""

    @abstractmethod
    def begin(self, name: str) -> Partial:
        """Make a directory in here for a save, or for an export called "model". Its name is never used again."""

    @abstractmethod
    def leftovers(self) -> list[str]:
        """The names of directories that `begin` has made and that are not published."""

    @abstractmethod
    def sweep(self, name: str) -> bool:
        """Delete one of the `leftovers`. False: its run lives, and goes on."""

    @abstractmethod
    def publish(self, partial: str, name: str, manifest: bytes) -> Location:
        """Make a checkpoint of the directory `partial`, if possible under the name `name`. Returns its path."""

    @abstractmethod
    def sync(self) -> None:
        """Make what was published durable."""

    @abstractmethod
    def remove(self, partial: Partial) -> None:
        """Delete a directory of `begin`, unless it was published. A second call changes nothing."""

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Delete a checkpoint. It is whole until it is none any more. False: it is write-protected."""


# ------------------------------------------------------------------------------------------------ file systems


class LocalDirectory(Storage):
    """A directory of a file system. Safetensors files are mapped into memory.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def complete(self) -> list[str]:
        def is_checkpoint(name: str) -> bool:
            return number_in(name, only=True) is not None or os.path.lexists(self.path / name / MANIFEST_NAME)

        return [name for name in self.names() if not name.endswith(PARTIAL) and is_checkpoint(name)]

    def is_file(self, name: str) -> bool:
        return (self.path / name).is_file()

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def is_link(self, name: str) -> bool:
        return (self.path / name).is_symlink()

    def sizes(self) -> Callable[[str], int]:
        def size_bytes(name: str) -> int:
            with open_regular(self.path / name) as file:
                return os.fstat(file.fileno()).st_size

        return size_bytes

    def read(self, *ranges: tuple[str, int, int]) -> list[bytes]:
        found = []
        for name, start, stop in ranges:
            with open_regular(self.path / name) as file:
                file.seek(start)
                found.append(file.read(stop - start))
        return found

    def mapped(self, name: str) -> Path:
        open_regular(self.path / name).close()  # the safetensors library would wait for the writer of a pipe
        return self.path / name

    @contextlib.contextmanager
    def writing(self, name: str, size_bytes: int) -> Iterator[Write]:
        with opened(self.path / name) as descriptor:
            yield functools.partial(write_all, descriptor)

    def begin(self, name: str) -> Partial:
        os.makedirs(self.path, exist_ok=True)
        while True:
            path = self.path / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
            with contextlib.ExitStack() as undo:  # after an interrupt too: a lock that stays refuses the next export
                undo.callback(shutil.rmtree, path, ignore_errors=True)
                try:
                    os.mkdir(path)
                    manifest = FileIO(os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "r+")
                except FileNotFoundError:  # another run has deleted the directory before it was locked
                    continue
                undo.callback(manifest.close)
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(manifest, fcntl.LOCK_EX)  # waits while another run deletes the directory
                if (path / MANIFEST_NAME).exists():
                    undo.pop_all()
                    return Partial(path, manifest)

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _LEFT.fullmatch(name)]

    def sweep(self, name: str) -> bool:
        left = self.path / name
        try:
            with open(left / MANIFEST_NAME, "r+b") as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # a killed run had begun to delete it
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("%s stays, because its manifest cannot be locked: %s", left, error)
        return True

    def publish(self, partial: str, name: str, manifest: bytes) -> Path:
        directory = self.path / partial
        with opened(directory / MANIFEST_NAME) as descriptor:
            write_all(descriptor, manifest, 0)
        sync_directory(directory)
        return _rename_to_unused(directory, self.path / name)

    def sync(self) -> None:
        sync_directory(self.path)

    def remove(self, partial: Partial) -> None:
        with contextlib.closing(partial.manifest or contextlib.ExitStack()):
            shutil.rmtree(partial.path, ignore_errors=True)

    def delete(self, name: str) -> bool:
        old = self.path / name
        is_ours = os.access(old, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
        if not is_ours or not os.stat(old).st_mode & stat.S_IWUSR:  # root may write to any
            return False
        gone = old.with_name(f"{name}.{secrets.token_hex(4)}{PARTIAL}")
        os.rename(old, gone)  # so a kill leaves no damaged checkpoint, and the next save deletes the rest
        shutil.rmtree(gone)
        return True


def _rename_to_unused(partial: Path, path: Path) -> Path:
    free, place = path, 1
    while True:
        try:
            if not os.path.lexists(free):
                os.rename(partial, free)
                return free
        except OSError as error:  # another run has just published one with this name
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        place += 1
        free = path.with_name(f"{path.name}-{place}")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a file for writing, made if it is not there. Synced to the disk when the context ends.

    Raises:
        CheckpointError: the system has raised an error, inside the context too; names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        with FileIO(descriptor, "w"):
            yield descriptor
            os.fsync(descriptor)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there: the directory must be on storage all ranks share") from error
    except OSError as error:  # the error of a write does not name the file
        raise CheckpointError(f"{path}: {error}") from error


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset` of the file. The system may take it in parts."""
    data = memoryview(data)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync_directory(root: Path) -> None:
    """Sync the names in `root` to the disk."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != EINVAL:  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Opening a pipe would wait for its writer, and a device may have no end.

    Raises:
        CheckpointError: `path` is a pipe, a device or a directory, or a link to one.
        OSError: the system cannot open it.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")

    return open(path, "rb", opener=opener)


# ------------------------------------------------------------------------------------------------ object storage


class ObjectStore(Storage):
    """A directory on object storage: objects whose names begin alike. See [Note: object storage].

    Args:
        path: its URL.

    Raises:
        CheckpointError: fsspec, or its package for such URLs, is missing; or fsspec knows no such URLs.
    """

    at_once = 8

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
    def _telling(self, name: str = "") -> Iterator[str]:
        """Gives fsspec's path of an object. Errors of many classes become OSErrors that name the URL."""
        url, path = (self.path / name, f"{self._root}/{name}") if name else (self.path, self._root)
        try:
            yield path
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"No such object ({error})", url) from error
        except Exception as error:
            raise OSError(f"{url}: {describe(error)}") from error

    def _entries(self) -> dict[str, int]:
        """By name, the size of each object in the directory, and -1 for each directory in it."""
        with self._telling() as path:
            self._fs.invalidate_cache(path)
            try:
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

    def sizes(self) -> Callable[[str], int]:
        entries = self._entries()

        def size_bytes(name: str) -> int:
            if name not in entries:
                raise FileNotFoundError(errno.ENOENT, "No such object", self.path / name)
            return entries[name]

        return size_bytes

    def read(self, *ranges: tuple[str, int, int]) -> list[bytes]:
        names, starts, stops = ([*each] for each in zip(*ranges, strict=True))
        with self._telling():
            found: list[Any] = self._fs.cat_ranges([f"{self._root}/{name}" for name in names], starts, stops)
        for name, data in zip(names, found, strict=True):
            with self._telling(name):
                if isinstance(data, BaseException):
                    raise data
        for (name, start, stop), data in zip(ranges, found, strict=True):
            if len(data) != stop - start:
                raise CheckpointError(f"{self.path / name} has {len(data)} bytes from byte {start} to {stop}")
        return found

    def mapped(self, name: str) -> None:
        return None

    @contextlib.contextmanager
    def writing(self, name: str, size_bytes: int) -> Iterator[Write]:
        part_bytes = max(_PART_BYTES, -(-size_bytes // _MAX_PARTS // CHUNK_BYTES) * CHUNK_BYTES)
        with self._telling(name) as path:
            file = self._fs.open(path, "wb", block_size=part_bytes)

        done = 0

        def write(data: bytes | memoryview, position: int) -> None:
            nonlocal done
            if position != done and len(data):
                raise CheckpointError(f"{self.path / name}: ranks do not have each byte of it once")
            with self._telling(name):
                file.write(data)
            done += len(data)

        try:
            yield write
            if done != size_bytes:
                raise CheckpointError(f"{self.path / name} would have {done} bytes of {size_bytes}")
            with self._telling(name):
                file.close()
        except BaseException:
            _abandon(file)
            raise

    def put(self, name: str, content: bytes) -> None:
        """Write a small object. It replaces another one at once."""
        with self._telling(name) as path:
            self._fs.pipe_file(path, content)

    def unlink(self, name: str) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(FileNotFoundError), self._telling(name) as path:
            self._fs.rm_file(path)

    def _remove_tree(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._telling(name) as path:
            self._fs.invalidate_cache(path)
            self._fs.rm(path, recursive=True)

    def begin(self, name: str) -> Partial:
        path = self.path / f"{name}.{secrets.token_hex(4)}"
        ObjectStore(path).put(BEGUN, b"A save has begun to write here.\n")
        return Partial(path)

    def leftovers(self) -> list[str]:
        left = filter(_LEFT_OBJECTS.fullmatch, self._directories())
        return [name for name in left if not self._inside(name).is_file(MANIFEST_NAME)]

    def sweep(self, name: str) -> bool:
        try:
            self._inside(name).unlink(BEGUN)  # first: a save that is alive sees it, or has published by now
            if not self._inside(name).is_file(MANIFEST_NAME):
                self._remove_tree(name)
        except OSError as error:
            log.warning("%s stays: %s", self.path / name, error)
        return True

    def publish(self, partial: str, name: str, manifest: bytes) -> Url:
        inside = self._inside(partial)
        try:
            inside.put(MANIFEST_NAME, manifest)
            if not inside.is_file(BEGUN):
                raise CheckpointError(
                    f"another run writes to {self.path}, and has deleted {partial}: give each its own"
                )
        except BaseException:
            with contextlib.suppress(OSError):
                inside.unlink(MANIFEST_NAME)
            raise
        return inside.path

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
