"""A directory of checkpoints or an export in a file system. See `storage.py`.

[Note: two runs in one directory]
A requeued job may start while its predecessor still saves. On a file system each save holds a lock (flock) on the
manifest in its partial directory. The manifest is created first and filled last. The system releases the lock when the
process ends, in any way. A save deletes partial directories whose lock is free: killed runs have left them.
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
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from streamshard.checkpoint.storage import MANIFEST_NAME, Partial, Storage, Write, number_in
from streamshard.errors import CheckpointError, log

PARTIAL = ".partial"
"""The end of a local directory's name until the directory is complete."""

_LEFT = re.compile(r"(checkpoint-\d+(-\d+|\.[0-9a-f]{8})?|model)\.[0-9a-f]{8}\.partial")


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

    def is_link(self, name: str) -> bool:
        return (self.path / name).is_symlink()

    def size(self, name: str) -> int:
        with open_regular(self.path / name) as file:  # opened, which shows whether it may be read
            return os.fstat(file.fileno()).st_size

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
        with open_for_writing(self.path / name) as descriptor:
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
                if (path / MANIFEST_NAME).exists():  # else another run has deleted it meanwhile
                    undo.pop_all()
                    return Partial(path, manifest)

    def leftovers(self) -> list[str]:
        return [name for name in os.listdir(self.path) if _LEFT.fullmatch(name)]

    def sweep(self, name: str) -> bool:
        left = self.path / name
        try:
            with open(left / MANIFEST_NAME, "r+b") as manifest:  # for writing: NFS gives no exclusive lock else
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
        with open_for_writing(directory / MANIFEST_NAME) as descriptor:
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
        # `access` asks for the real user otherwise, and the rename below for the effective one.
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
            if not os.path.lexists(free):  # a rename would replace an empty directory
                os.rename(partial, free)
                return free
        except OSError as error:  # another run has just published one with this name
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        place += 1
        free = path.with_name(f"{path.name}-{place}")


@contextlib.contextmanager
def open_for_writing(path: Path) -> Iterator[int]:
    """The descriptor of a file for writing, made if it is not there. Synced to the disk when the context ends.

    Raises:
        CheckpointError: the system has raised an error, inside the context too; names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)  # not truncated: ranks write parts of one file
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
        if error.errno != errno.EINVAL:  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Opening a pipe would wait for its writer, and a device may have no end.

    Raises:
        CheckpointError: `path` is a pipe, a device or a directory, or a link to one.
        OSError: the system cannot open it.
    """

    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return open(path, "rb")
