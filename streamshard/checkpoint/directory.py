"""Checkpoints of a run, side by side in one directory: their names, which is the latest, which are deleted.

A directory is a checkpoint once it holds a manifest. It is written under a name that ends in ``.partial`` and gets its
own by renaming, when everything in it is on the disk; it is deleted under such a name again. So one that is not whole
is never taken for a checkpoint, whenever a run is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint.foreign import CHECKPOINT, what_is
from streamshard.checkpoint.manifest import MANIFEST_NAME, Manifest, check_sizes, read_manifest
from streamshard.checkpoint.publish import PARTIAL, sync_directory
from streamshard.config import parse_path
from streamshard.errors import CheckpointError
from streamshard.log import log, printable

__all__ = [
    "checkpoint_name",
    "checkpoints_in",
    "create_partial",
    "find_checkpoint",
    "latest",
    "next_number",
    "no_checkpoint",
    "publish_checkpoint",
    "remove_partial",
]

_REPLACED = ".replaced"  # whole, about to be deleted because another of its number takes its name
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFT = re.compile(r"checkpoint-\d+(\.deleted\.partial|\.partial|\.replaced)")  # by runs that were killed


class _Found(NamedTuple):
    path: Path
    manifest: Manifest

    @property
    def age(self) -> tuple[str, int, bool]:
        """Sorts by when they were saved."""
        return self.manifest.versions["saved_at"], self.manifest.number, not self.path.name.endswith(_REPLACED)


class _Seen(NamedTuple):
    """What is in a directory.

    Attributes:
        whole: checkpoints, by age, the newest last.
        others: of those that are not whole, or that this version does not read, why.
    """

    whole: list[_Found]
    others: list[str]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, of those that are whole; None where there is none.

    Whole means: the manifest is what its checksum says, and all files are there and as long as they were. Their
    contents are verified when it is loaded.

    Raises:
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
    if (directory / MANIFEST_NAME).exists():
        return directory
    found = latest(directory)
    if found is None:
        raise no_checkpoint(directory)
    return found


def no_checkpoint(directory: Path) -> CheckpointError:
    """What to raise for a directory that holds no whole checkpoint: says what it, or one in it, is instead."""
    wanted = "wanted a directory that save_checkpoint has written to, or a checkpoint in it"
    if not directory.is_dir():
        return CheckpointError(f"{directory} is no directory: {wanted}")
    if told := what_is(directory, CHECKPOINT):
        return CheckpointError(told)
    none = f"{directory} holds no whole checkpoint"
    if others := _look_into(directory).others:
        return CheckpointError(f"{none}: {'; '.join(others)}")
    inside = [path for path in _children(directory) if path.is_dir() and os.access(path, os.R_OK | os.X_OK)]
    inside.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    if below := [found for path in inside for found in _look_into(path).whole]:
        newest = max(below, key=lambda found: found.age).path
        return CheckpointError(f"{none}, but {newest.parent} in it does, the latest being {newest}")
    if told := next(filter(None, (what_is(path, CHECKPOINT) for path in inside)), None):
        return CheckpointError(f"{none}; {told}")
    return CheckpointError(f"{none}: {wanted}")


def checkpoints_in(directory: Path) -> list[Path]:
    """`directory` if it is a checkpoint, and those in it, whole or not."""
    return [
        path
        for path in [directory, *_children(directory)]
        if not path.name.endswith(PARTIAL) and (path / MANIFEST_NAME).exists()
    ]


def checkpoint_name(number: int) -> str:
    """Of the directory."""
    return f"checkpoint-{number}"


def next_number(directory: Path) -> int:
    """One more than the largest there is, of whatever is called like a checkpoint."""
    numbers = [int(match[1]) for path in _children(directory) if (match := _NAME.match(path.name))]
    return max(numbers, default=0) + 1


def create_partial(directory: Path, number: int) -> Path:
    """An empty directory to write checkpoint `number` into. What killed runs have left is removed.

    Raises:
        CheckpointError: what is no checkpoint has its name, and would be lost.
    """
    os.makedirs(directory, exist_ok=True)
    path = directory / checkpoint_name(number)
    if os.path.lexists(path) and not (path / MANIFEST_NAME).exists() and not (path.is_dir() and not _children(path)):
        raise CheckpointError(
            f"{path} is there already, and is no checkpoint of this package: nothing is written over it; save with "
            "another step=, or to another directory"
        )
    for left in _children(directory):
        if not _LEFT.fullmatch(left.name):
            continue
        own = left.with_name(left.name.removesuffix(_REPLACED))
        if left.name.endswith(PARTIAL) or own.exists():
            _try_to_delete(left)
        else:
            os.replace(left, own)
    partial = directory / f"{checkpoint_name(number)}{PARTIAL}"
    try:
        os.mkdir(partial)
    except OSError:
        remove_partial(partial)
        raise
    return partial


def remove_partial(partial: Path) -> None:
    """After an error: leave nothing."""
    shutil.rmtree(partial, ignore_errors=True)


def publish_checkpoint(partial: Path, manifest: Manifest, keep: int | None) -> Path:
    """`partial`, whose files are all there, becomes a checkpoint; then all but the newest `keep` are deleted.

    Of those that are called as this calls them: a copy by another name, or a link, is somebody's own.

    An error leaves what was there before, and `partial`. Once the checkpoint is whole there is none: what cannot be
    deleted then is left to the next save, with a warning.
    """
    check_sizes(partial, manifest)
    descriptor = os.open(partial / MANIFEST_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        file.write(manifest.encode())
        file.flush()
        os.fsync(descriptor)
    sync_directory(partial)
    path = partial.with_name(checkpoint_name(manifest.number))
    replaced = path.with_name(path.name + _REPLACED)
    try:
        if path.exists():
            os.replace(path, replaced)
        os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            _take_back(partial, path, replaced)
        raise
    if replaced.exists():
        _try_to_delete(replaced)
    if keep is not None:
        own = [found for found in _look_into(path.parent).whole if _is_own_name(found.path)]
        for found in own[:-keep]:
            if found.path != path and _try_to_delete(found.path):
                log.info("deleted %s: keep=%d", found.path, keep)
    return path


def _take_back(partial: Path, path: Path, replaced: Path) -> None:
    """Undo what has been done of publishing. A file system that says that a renaming has failed may have done it."""
    if not partial.exists():
        os.replace(path, partial)
    if replaced.exists() and not path.exists():
        os.replace(replaced, path)


def _is_own_name(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and path.name == checkpoint_name(int(match[1])) and not path.is_symlink()


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _look_into(directory: Path) -> _Seen:
    whole, others = [], []
    for path in checkpoints_in(directory):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except CheckpointError as error:
            others.append(str(error))
            continue
        whole.append(_Found(path, manifest))
    return _Seen(sorted(whole, key=lambda found: found.age), others)


def _try_to_delete(path: Path) -> bool:
    """Whether it is gone. It is no checkpoint from the first step on; what is left of it, the next save removes."""
    gone = path
    try:
        if not path.name.endswith(PARTIAL):
            gone = path.with_name(f"{path.name.removesuffix(_REPLACED)}.deleted{PARTIAL}")
            if gone.exists():
                shutil.rmtree(gone)
            os.replace(path, gone)
        if gone.is_symlink():  # in the place of a checkpoint, which is another's
            os.unlink(gone)
        else:
            shutil.rmtree(gone)
    except OSError as error:
        log.warning("could not delete %s: %s", gone, error)
        return False
    return True
