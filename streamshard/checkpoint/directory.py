"""Checkpoints of a run, side by side in one directory: their names, which is the latest, which are deleted.

A directory is a checkpoint once it holds a manifest. It is written under a name that ends in ``.partial`` and gets its
own by renaming, when everything in it is on the disk; it is deleted under such a name again (`partial.py`). So one that
is not whole is never taken for a checkpoint, whenever a run is killed.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint import partial as partials
from streamshard.checkpoint.foreign import CHECKPOINT, what_is
from streamshard.checkpoint.manifest import LARGEST, MANIFEST_NAME, Manifest, check_sizes, read_manifest
from streamshard.checkpoint.partial import PARTIAL, Partial, delete, place
from streamshard.checkpoint.publish import sync_directory, write_all
from streamshard.config import parse_path
from streamshard.errors import CheckpointError
from streamshard.log import log, printable

__all__ = [
    "checkpoint_name",
    "checkpoints_in",
    "create_partial",
    "find_checkpoint",
    "latest",
    "newest_last",
    "next_number",
    "no_checkpoint",
    "publish_checkpoint",
]

_NAME = re.compile(r"checkpoint-(\d+)")


class _Found(NamedTuple):
    path: Path
    manifest: Manifest


class _Seen(NamedTuple):
    """What is in a directory.

    Attributes:
        whole: checkpoints, the newest last.
        others: of those that are not whole, or that this version does not read, why.
    """

    whole: list[_Found]
    others: list[str]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, of those that are whole; None where there is none.

    Whole means: the manifest is what its checksum says, and all files are there and as long as they were. Their
    contents are verified when it is loaded. Which was saved last does not depend on clocks: a save counts on from what
    is in its directory.

    Raises:
        CheckpointError: `directory` cannot be read.
        ConfigError: `directory` is no path.
    """
    seen = _look_into(parse_path("directory", directory))
    for why in seen.others:
        log.warning("passed over: %s", printable(why))
    return seen.whole[-1].path if seen.whole else None


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


def no_checkpoint(directory: Path) -> CheckpointError:
    """What to raise for a directory that holds no whole checkpoint: says what it, or one in it, is instead."""
    wanted = "wanted a directory that save_checkpoint has written to, or a checkpoint in it"
    if not os.path.isdir(directory):
        return CheckpointError(f"{directory} is no directory: {wanted}")
    if told := what_is(directory, CHECKPOINT):
        return CheckpointError(told)
    none = f"{directory} holds no whole checkpoint"
    if others := _look_into(directory).others:
        return CheckpointError(f"{none}: {'; '.join(others)}")
    inside = [
        path for path in sorted(_children(directory)) if os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK)
    ]
    if below := [seen.whole[-1] for seen in map(_look_into, inside) if seen.whole]:
        newest = max(below, key=lambda found: found.manifest.versions["saved_at"]).path  # they are of several runs
        return CheckpointError(f"{none}, but {newest.parent} in it does, the latest being {newest}")
    if told := next(filter(None, (what_is(path, CHECKPOINT) for path in inside)), None):
        return CheckpointError(f"{none}; {told}")
    return CheckpointError(f"{none}: {wanted}")


def checkpoints_in(directory: Path) -> list[Path]:
    """`directory` if it is a checkpoint, and those in it, whole or not."""
    return [
        path for path in [directory, *_children(directory)] if not path.name.endswith(PARTIAL) and _holds_manifest(path)
    ]


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


def create_partial(directory: Path, number: int) -> Partial:
    """A directory to write checkpoint `number` into, which the caller removes after an error. See `partial.create`."""
    return partials.create(directory / checkpoint_name(number))


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
    replaced = place(partial, path)
    try:
        partial.manifest.close()
        sync_directory(path.parent)
        if os.path.lexists(replaced):
            delete(replaced)
        if keep is not None:
            _delete_all_but(keep, path)
    except Exception as error:  # there is a checkpoint, which no error may hide
        log.warning("%s is saved; what should follow is left to the next save: %s", path, error)
    return path


def _delete_all_but(keep: int, new: Path) -> None:
    own = [found.path for found in _look_into(new.parent).whole if _is_own_name(found.path)]
    for old in own[:-keep]:
        if old != new and delete(old):
            log.info("deleted %s: keep=%d", old, keep)


def _is_own_name(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and path.name == checkpoint_name(int(match[1])) and not path.is_symlink()


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error


def _holds_manifest(path: Path) -> bool:
    try:
        os.stat(path / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # one that may not be entered, such as lost+found; a link to itself
        if _NAME.fullmatch(path.name):
            return True  # and whoever reads it is told why that cannot be done
        log.debug("passed over: %s", error)
        return False
    return True


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


def _look_into(directory: Path) -> _Seen:
    whole, others = [], []
    for path in checkpoints_in(directory):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except CheckpointError as error:
            _raise_unless_about_files(error)
            others.append(str(error))
            continue
        whole.append(_Found(path, manifest))
    return _Seen(sorted(whole, key=lambda found: newest_last(*found)), others)
