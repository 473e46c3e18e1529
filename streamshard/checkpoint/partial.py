"""The directory that a save writes to until it is a checkpoint, and what killed runs leave of such directories.

[Note: two runs in one directory]
A job that was requeued may start while the one before it still saves. So each save writes to a directory of a name that
nothing else has, and holds a lock (flock) on the manifest in it. The system releases the lock when the process ends,
however it ends. A partial directory whose lock is held belongs to a live run and stays; one whose lock is free was left
by a killed run and is deleted. A run takes the lock before it writes to such a directory or deletes it, and then checks
that the directory is still there. Of two runs that publish the same number, one replaces the other's checkpoint whole.
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
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint.manifest import MANIFEST_NAME
from streamshard.checkpoint.publish import PARTIAL
from streamshard.errors import CheckpointError
from streamshard.log import log

__all__ = ["PARTIAL", "Partial", "create", "delete", "place", "remove"]

_REPLACED = ".replaced"  # a whole checkpoint, until the one that takes its name is in place
_LEFT = re.compile(r"(checkpoint-\d+)(\.\w+)?(\.partial|\.replaced)")
_ATTEMPTS = 10  # times in a row that other runs get in between
_ADVICE = "give each run a directory of its own"


class Partial(NamedTuple):
    """A directory that one save writes to. See [Note: two runs in one directory].

    Attributes:
        path: its name ends in ``.partial``.
        manifest: a file in it, open and locked; empty until the checkpoint is published. Closing it is up to those
            who have called `create`.
    """

    path: Path
    manifest: FileIO

    def is_at(self, path: Path) -> bool:
        """Whether `path` leads to this directory now."""
        try:
            return os.path.samestat(os.stat(path / MANIFEST_NAME), os.fstat(self.manifest.fileno()))
        except OSError:
            return False


def create(path: Path) -> Partial:
    """An empty directory to write the checkpoint `path` into. Whatever killed runs have left beside it is removed.

    Raises:
        CheckpointError: `path` is something that is no checkpoint, and would be lost.
        OSError: it cannot be made.
    """
    os.makedirs(path.parent, exist_ok=True)
    _check_free(path)
    for left in path.parent.iterdir():
        if match := _LEFT.fullmatch(left.name):
            _sweep(left, left.with_name(match[1]))
    for _ in range(_ATTEMPTS):
        directory = _unused(path, PARTIAL)
        try:
            os.mkdir(directory)
            descriptor = os.open(directory / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except (FileExistsError, FileNotFoundError):  # another run took it for a leftover
            continue
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        partial = Partial(directory, FileIO(descriptor, "r+"))
        if _lock(descriptor) is not False and partial.is_at(directory):
            return partial
        partial.manifest.close()
    raise CheckpointError(f"{path}: other runs deleted what this one made, again and again; {_ADVICE}")


def remove(partial: Partial) -> None:
    """After an error: leave nothing of it, unless it is a checkpoint by now."""
    if not partial.manifest.closed and partial.is_at(partial.path):
        shutil.rmtree(partial.path, ignore_errors=True)
    partial.manifest.close()


def place(partial: Partial, path: Path) -> Path:
    """Rename `partial` to `path`.

    If a checkpoint has that name it gets another one first, under which readers find it if this run is killed between
    the two calls.

    Returns:
        The other name, whether or not there was anything to rename.

    Raises:
        CheckpointError: another run has deleted `partial`, or something that is no checkpoint is in the way.
        OSError: nothing has changed.
    """
    for _ in range(_ATTEMPTS):
        if not partial.is_at(partial.path):
            raise CheckpointError(f"{partial.path} was deleted or replaced while it was written; {_ADVICE}")
        _check_free(path)
        replaced = _unused(path, _REPLACED)
        try:
            if os.path.lexists(path):
                os.replace(path, replaced)
            os.replace(partial.path, path)
            return replaced
        except BaseException as error:
            if isinstance(error, OSError) and partial.is_at(path):
                return replaced  # network file systems report errors of calls that were carried out
            _put_back(replaced, path)
            # Between any two calls here, another run may have renamed or published something.
            if not isinstance(error, OSError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            if os.path.lexists(replaced):  # and another run's is in its place
                delete(replaced)
    raise CheckpointError(f"{path}: other runs published theirs in its place, again and again; {_ADVICE}")


def delete(path: Path) -> bool:
    """Whether `path` is gone. It is no checkpoint from the first step on; what is left of it, the next save deletes."""
    try:
        if path.is_symlink():  # in the place of a checkpoint, which is another's
            os.unlink(path)
            return True
        if os.path.exists(path) and not os.access(path, os.W_OK):
            _warn_once(f"{path} stays, because it is write-protected")
            return False
        if not path.name.endswith(PARTIAL):
            gone = _unused(path, PARTIAL)
            os.replace(path, gone)
            path = gone
        shutil.rmtree(path)
    except OSError as error:
        if os.path.lexists(path):
            log.warning("could not delete %s: %s", path, error)
            return False
    return True


def _check_free(path: Path) -> None:
    """Raise a CheckpointError if `path` is something that must not be replaced."""
    if os.path.lexists(path) and not os.path.exists(path / MANIFEST_NAME) and not _is_empty(path):
        raise CheckpointError(
            f"{path} is there already, and is no checkpoint of this package, or not one that may be read: nothing is "
            "written over it; save with another step=, or to another directory"
        )


def _is_empty(path: Path) -> bool:
    try:
        return not os.listdir(path)
    except OSError:
        return False


def _unused(path: Path, ending: str) -> Path:
    """A name beside `path`, for the checkpoint that `path` is or was called after."""
    return path.with_name(f"{path.name.partition('.')[0]}.{secrets.token_hex(4)}{ending}")


def _put_back(replaced: Path, path: Path) -> None:
    if os.path.lexists(replaced) and not os.path.lexists(path):
        with contextlib.suppress(OSError):  # another run may have published its own meanwhile
            os.replace(replaced, path)


def _sweep(left: Path, own: Path) -> None:
    """Put back, or delete, what a run has left; `own` is the name of its checkpoint."""
    if left.name.endswith(_REPLACED):
        _put_back(left, own)
        if os.path.lexists(left) and os.path.exists(own / MANIFEST_NAME):
            delete(left)
    elif left.is_symlink():
        delete(left)
    elif os.path.isdir(left):
        _delete_unless_alive(left)


def _delete_unless_alive(partial: Path) -> None:
    """See [Note: two runs in one directory]."""
    try:
        # Without a manifest, a run was killed right after it made the directory, or will find this one in it.
        manifest = FileIO(os.open(partial / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except FileNotFoundError:  # another run has just deleted it
        return
    except OSError as error:
        _warn_once(f"{partial} stays, because it cannot be locked: {error.strerror}")
        return
    with manifest:
        is_free = _lock(manifest.fileno())
        if is_free:
            delete(partial)
        elif is_free is False:
            _warn_once(f"another run is saving to {partial}: two runs replace and delete each other's; {_ADVICE}")
        else:
            _warn_once(
                f"{partial} stays: this file system has no locks, so it may be what another run is writing; if there "
                "is no other run, delete it"
            )


def _lock(descriptor: int) -> bool | None:
    """Whether this process has the lock now; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)
