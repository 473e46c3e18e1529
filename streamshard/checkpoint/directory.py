"""Checkpoints of a run, side by side in one directory: which there are, which is the latest, how they come and go.

[Note: how a checkpoint appears and goes]
A directory is a checkpoint once its manifest is whole. Readers look for nothing else, so no name and no order of writes
matters. A save writes into a *partial* directory, whose name ends in ``.partial`` and is never used again. The manifest
comes last. Then the directory is renamed to ``checkpoint-N``. If ``checkpoint-N`` exists, it is renamed to a partial
name first, and deleted afterwards. A kill between the two renames leaves both checkpoints whole under partial names:
readers find the new one by its generation, and the next save gives it its name.

[Note: two runs in one directory]
A job that was requeued may start while the one before it still saves. So each save holds a lock (flock) on the manifest
in its partial directory. The system releases the lock when the process ends, however it ends. A partial directory whose
lock is held belongs to a live run and stays. One whose lock is free was left by a killed run. A run takes the lock
before it writes to such a directory or deletes it, and then checks that the directory is still there. Of two runs that
publish the same number, one replaces the other's checkpoint whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from streamshard.checkpoint.manifest import (
    LARGEST,
    MANIFEST_NAME,
    CheckpointFiles,
    Manifest,
    check_sizes,
    read_manifest,
)
from streamshard.checkpoint.safetensors_file import INDEX_NAME, PARTIAL, SINGLE_NAME, sync_directory, write_all
from streamshard.config import parse_path
from streamshard.errors import CheckpointError
from streamshard.log import log, printable

__all__ = [
    "CHECKPOINT",
    "DCP",
    "HUGGING_FACE",
    "METADATA_NAME",
    "MODEL_DIRECTORY",
    "OPTIMIZER_DIRECTORY",
    "Partial",
    "checkpoint_name",
    "checkpoints_in",
    "create_export",
    "create_partial",
    "find_checkpoint",
    "holds_weights",
    "latest",
    "newest_last",
    "next_number",
    "no_checkpoint",
    "open_checkpoint",
    "publish_checkpoint",
    "remove_partial",
    "what_is",
    "whole_checkpoints",
]

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFT = re.compile(r"(checkpoint-\d+)(\.\w+)?\.partial")
_LEFT_OF_EXPORT = re.compile(r"model\.[0-9a-f]{8}\.partial")
_ATTEMPTS = 10  # times in a row that other runs get in between
_ADVICE = "give each run a directory of its own"

METADATA_NAME = ".metadata"
"""The file that every directory of torch.distributed.checkpoint has."""

MODEL_DIRECTORY = "pytorch_model_fsdp"
"""Accelerate's directory of a model, without its number."""

OPTIMIZER_DIRECTORY = "optimizer"
"""Accelerate's directory of an optimizer, without its number."""

CHECKPOINT = "checkpoint of save_checkpoint"
DCP = "directory of torch.distributed.checkpoint"
HUGGING_FACE = "Hugging Face directory"


# ------------------------------------------------------------------------------------------------ finding


class _Found(NamedTuple):
    path: Path
    manifest: Manifest


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, of those that are whole; None where there is none.

    Whole means: the manifest is what its checksum says, and all files are there and as long as they were. Their
    contents are verified when it is loaded. Which was saved last does not depend on clocks: a save counts on from what
    is in its directory.

    Raises:
        CheckpointError: `directory` cannot be read.
        ConfigError: `directory` is no path.
    """
    whole, others = _look_into(parse_path("directory", directory))
    for why in others:
        log.warning("passed over: %s", printable(why))
    return whole[-1].path if whole else None


def find_checkpoint(directory: Path) -> Path:
    """`directory` if it is a checkpoint, else the latest one in it.

    Raises:
        CheckpointError: there is none.
    """
    if os.path.exists(directory / MANIFEST_NAME):
        return directory
    found = latest(directory)
    if found is None:
        raise no_checkpoint(directory)
    return found


def open_checkpoint(directory: str | os.PathLike[str]) -> CheckpointFiles:
    """The files of a checkpoint, or of the latest in a directory of them. Their contents have not been verified.

    Raises:
        CheckpointError: there is none, or a file of it is missing or has another size.
    """
    path = find_checkpoint(parse_path("directory", directory))
    return CheckpointFiles(path, _read_whole(path))


def no_checkpoint(directory: Path) -> CheckpointError:
    """What to raise for a directory that holds no whole checkpoint: says what it is instead."""
    wanted = "wanted a directory that save_checkpoint has written to, or a checkpoint in it"
    if not os.path.isdir(directory):
        return CheckpointError(f"{directory} is no directory: {wanted}")
    if told := what_is(directory, CHECKPOINT):
        return CheckpointError(told)
    others = _look_into(directory)[1]
    return CheckpointError(f"{directory} holds no whole checkpoint: {'; '.join(others) or wanted}")


def whole_checkpoints(directory: Path) -> list[Path]:
    """Those in `directory`, the newest first. Their files' contents have not been verified."""
    return [found.path for found in reversed(_look_into(directory)[0])]


def checkpoints_in(directory: Path) -> list[Path]:
    """`directory` if it is a checkpoint, and those in it, whole or not, but for those that are being written."""
    return [path for path in [directory, *_children(directory)] if _holds_manifest(path)]


def newest_last(path: Path, manifest: Manifest) -> tuple[int, int, bool]:
    """Key that sorts checkpoints of one directory. A copy under a name of the user's own comes before its original."""
    return manifest.generation, manifest.number, path.name == checkpoint_name(manifest.number)


def checkpoint_name(number: int) -> str:
    """Of the directory."""
    return f"checkpoint-{number}"


def next_number(directory: Path) -> int:
    """One more than the largest there is, of whatever is called like a checkpoint."""
    numbers = [int(match[1]) for path in _children(directory) if (match := _NAME.match(path.name))]
    return max(numbers, default=0) + 1


def _look_into(directory: Path) -> tuple[list[_Found], list[str]]:
    """Checkpoints that are whole, the newest last; of the others, why they are not."""
    whole, others = [], []
    for path in checkpoints_in(directory):
        try:
            whole.append(_Found(path, _read_whole(path)))
        except CheckpointError as error:
            _raise_unless_about_files(error)
            if not path.name.endswith(PARTIAL):
                others.append(str(error))
    return sorted(whole, key=lambda found: newest_last(*found)), others


def _read_whole(path: Path) -> Manifest:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    return manifest


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error


def _holds_manifest(path: Path) -> bool:
    try:
        return os.stat(path / MANIFEST_NAME).st_size > 0 or not path.name.endswith(PARTIAL)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # one that may not be entered, such as lost+found; a link to itself
        if _NAME.fullmatch(path.name):
            return True  # and whoever reads it is told why that cannot be done
        log.debug("passed over: %s", error)
        return False


def _generation_of(path: Path) -> int:
    """The generation of a checkpoint, whole or not; 0 if its manifest cannot be read."""
    try:
        status = os.stat(path / MANIFEST_NAME)
        return _read_generation(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError:
        return 0
    except CheckpointError as error:
        _raise_unless_about_files(error)
        return 0


@functools.lru_cache(maxsize=1 << 14)
def _read_generation(path: Path, identity: tuple[int, ...]) -> int:
    """Read once, as long as the manifest has this `identity`."""
    return read_manifest(path).generation


def _raise_unless_about_files(error: CheckpointError) -> None:
    """A process that has too many files open finds nothing out about checkpoints."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE):
        raise error


# ------------------------------------------------------------------------------------------------ saving


class Partial(NamedTuple):
    """A directory that one save writes to. See [Note: two runs in one directory].

    Attributes:
        path: its name ends in ``.partial``.
        manifest: a file in it, open and locked; empty until the checkpoint is published.
    """

    path: Path
    manifest: FileIO

    def is_at(self, path: Path) -> bool:
        """Whether `path` leads to this directory now."""
        try:
            return os.path.samestat(os.stat(path / MANIFEST_NAME), os.fstat(self.manifest.fileno()))
        except OSError:
            return False


def create_partial(directory: Path, number: int) -> Partial:
    """An empty directory to write checkpoint `number` into. What killed runs have left beside it is put in order.

    Raises:
        CheckpointError: what has the checkpoint's name is no checkpoint, and would be lost.
        OSError: it cannot be made.
    """
    path = directory / checkpoint_name(number)
    os.makedirs(directory, exist_ok=True)
    _check_free(path)
    for left in directory.iterdir():
        if (match := _LEFT.fullmatch(left.name)) and not _sweep(left, left.with_name(match[1])):
            _warn_once(f"another run is saving to {left}: two runs replace and delete each other's; {_ADVICE}")
    return _create(path)


def create_export(root: Path) -> Partial:
    """An empty directory in `root` to write an export into. What killed runs have left is deleted.

    Raises:
        CheckpointError: another process is exporting to `root`.
        OSError: it cannot be made.
    """
    partial = _create(root / "model")
    for left in root.iterdir():
        if _LEFT_OF_EXPORT.fullmatch(left.name) and left != partial.path and not _sweep(left, None):
            remove_partial(partial)
            raise CheckpointError(f"another process is exporting to {root}: export from one process at a time")
    return partial


def _create(path: Path) -> Partial:
    for _ in range(_ATTEMPTS):
        partial = _unused(path)
        try:
            os.mkdir(partial)
            descriptor = os.open(partial / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except (FileExistsError, FileNotFoundError):  # another run took it for a leftover
            continue
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        made = Partial(partial, FileIO(descriptor, "r+"))
        if _lock(descriptor) is not False and made.is_at(partial):
            return made
        made.manifest.close()
    raise CheckpointError(f"{path}: other runs deleted what this one made, again and again; {_ADVICE}")


def remove_partial(partial: Partial) -> None:
    """After an error: leave nothing of it, unless it is a checkpoint by now."""
    try:
        if not partial.manifest.closed and partial.is_at(partial.path):
            shutil.rmtree(partial.path, ignore_errors=True)
    finally:
        partial.manifest.close()


def publish_checkpoint(partial: Partial, manifest: Manifest, keep: int | None) -> Path:
    """`partial`, whose files are all there, becomes a checkpoint; then all but the newest `keep` are deleted.

    Of those that are called as this calls them: a copy by another name, or a link, is somebody's own. The manifest gets
    its generation here.

    An error leaves what was there before, and `partial`. Once the checkpoint has its name there is none: what fails
    then is left to the next save, with a warning.
    """
    check_sizes(partial.path, manifest)
    path = partial.path.with_name(checkpoint_name(manifest.number))
    largest = max(map(_generation_of, checkpoints_in(path.parent)), default=0)
    text = dataclasses.replace(manifest, generation=min(largest + 1, LARGEST)).encode()
    descriptor = partial.manifest.fileno()
    write_all(descriptor, memoryview(text), 0)
    os.fsync(descriptor)
    sync_directory(partial.path)
    replaced = _place(partial, path)
    try:
        partial.manifest.close()
        sync_directory(path.parent)
        if os.path.lexists(replaced):
            _delete(replaced)
        if keep is not None:
            _delete_all_but(keep, path)
    except Exception as error:  # there is a checkpoint, which no error may hide
        log.warning("%s is saved; what should follow is left to the next save: %s", path, error)
    return path


def _place(partial: Partial, path: Path) -> Path:
    """Rename `partial` to `path`, and what is there to a partial name, which is returned.

    Raises:
        CheckpointError: another run has deleted `partial`, or something that is no checkpoint is in the way.
        OSError: nothing has changed.
    """
    for _ in range(_ATTEMPTS):
        if not partial.is_at(partial.path):
            raise CheckpointError(f"{partial.path} was deleted or replaced while it was written; {_ADVICE}")
        _check_free(path)
        replaced = _unused(path)
        try:
            if os.path.lexists(path):
                os.replace(path, replaced)
            os.replace(partial.path, path)
            return replaced
        except OSError as error:
            if partial.is_at(path):
                return replaced  # network file systems report errors of calls that were carried out
            # Between any two calls here, another run may have renamed or published something.
            if os.path.lexists(replaced):
                if os.path.lexists(path):
                    _delete(replaced)
                else:
                    with contextlib.suppress(OSError):
                        os.replace(replaced, path)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
    raise CheckpointError(f"{path}: other runs published theirs in its place, again and again; {_ADVICE}")


def _delete_all_but(keep: int, new: Path) -> None:
    own = [found.path for found in _look_into(new.parent)[0] if _is_own_name(found.path)]
    for old in own[:-keep]:
        if old != new and _delete(old):
            log.info("deleted %s: keep=%d", old, keep)


def _is_own_name(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and path.name == checkpoint_name(int(match[1])) and not path.is_symlink()


def _delete(path: Path) -> bool:
    """Whether `path` is gone. What is left of it, the next save deletes."""
    try:
        if path.is_symlink():  # in the place of a checkpoint, which is another's
            os.unlink(path)
            return True
        if os.path.exists(path) and not os.access(path, os.W_OK):
            _warn_once(f"{path} stays, because it is write-protected")
            return False
        if not path.name.endswith(PARTIAL):
            gone = _unused(path)
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
    if not os.path.lexists(path) or os.path.exists(path / MANIFEST_NAME):
        return
    with contextlib.suppress(OSError):
        if not os.listdir(path):
            return
    raise CheckpointError(
        f"{path} is there already, and is no checkpoint of this package, or not one that may be read: nothing is "
        "written over it; save with another step=, or to another directory"
    )


def _unused(path: Path) -> Path:
    """A partial name for the checkpoint that `path` is or was called after."""
    return path.with_name(f"{path.name.partition('.')[0]}.{secrets.token_hex(4)}{PARTIAL}")


def _sweep(left: Path, own: Path | None) -> bool:
    """Delete what a killed run has left, or give it its name `own` if it is whole and newer than what is there.

    Returns False if another run is writing to it. See [Note: two runs in one directory].
    """
    if left.is_symlink():
        _delete(left)
    if not os.path.isdir(left):
        return True
    try:
        # Without a manifest, a run was killed right after it made the directory, or will find this one in it.
        manifest = FileIO(os.open(left / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except FileNotFoundError:  # another run has just deleted it
        return True
    except OSError as error:
        _warn_once(f"{left} stays, because it cannot be locked: {error.strerror}")
        return True
    with manifest:
        is_free = _lock(manifest.fileno())
        if is_free:
            _finish(Partial(left, manifest), own)
        elif is_free is None:
            _warn_once(
                f"{left} stays: this file system has no locks, so it may be what another run is writing; if there "
                "is no other run, delete it"
            )
        return is_free is not False


def _finish(partial: Partial, own: Path | None) -> None:
    """What the killed run would have done next, if all was there to be published. This run has the lock."""
    try:
        is_newer = own is not None and _read_whole(partial.path).generation > _generation_of(own)
    except CheckpointError as error:
        _raise_unless_about_files(error)
        is_newer = False
    if own is None or not is_newer:
        _delete(partial.path)
        return
    try:
        _delete(_place(partial, own))
    except (CheckpointError, OSError) as error:
        log.warning("%s is a whole checkpoint, and could not be renamed to %s: %s", partial.path, own, error)


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


# ------------------------------------------------------------------------------------------------ other directories


class _Kind(NamedTuple):
    """What directories have that are such.

    Attributes:
        files: patterns, one of which is there.
        kind: what they are.
        advice: what to do with one.
    """

    files: tuple[str, ...]
    kind: str
    advice: str


_KINDS = (
    _Kind(
        (MANIFEST_NAME, f"checkpoint-*/{MANIFEST_NAME}"),
        CHECKPOINT,
        "load_checkpoint reads it, streamshard export {} OUT writes its weights for from_pretrained",
    ),
    _Kind(
        (METADATA_NAME, f"{MODEL_DIRECTORY}_0/{METADATA_NAME}"),
        DCP,
        "streamshard convert {} OUT --from dcp makes a checkpoint of it",
    ),
    _Kind(
        (SINGLE_NAME, INDEX_NAME),
        HUGGING_FACE,
        "from_pretrained and load_safetensors read it, streamshard inspect {} verifies it",
    ),
    _Kind(
        ("adapter_model.safetensors", "adapter_model.bin"),
        "directory of PEFT's",
        "its from_pretrained reads them",
    ),
    _Kind(
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        "Hugging Face directory with pickled weights",
        "from_pretrained reads it",
    ),
)


def what_is(directory: Path, wanted: str) -> str | None:
    """What `directory` is instead of what is `wanted`, and what to do with it; None if that is unknown."""
    for files, kind, advice in _KINDS:
        if kind != wanted and any(os.path.isfile(path) for file in files for path in directory.glob(file)):
            return f"{directory} is a {kind}, and no {wanted}: {advice.format(directory)}"
    return None


def holds_weights(directory: Path) -> bool:
    """Whether it is a Hugging Face directory of safetensors files."""
    return any(os.path.isfile(directory / name) for name in (SINGLE_NAME, INDEX_NAME))
