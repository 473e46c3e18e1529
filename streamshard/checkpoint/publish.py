"""Puts a complete export in the place of an earlier one. One rank does it; nothing here communicates.

[Note: publishing]
Files are written under ``*.partial`` names, which nothing takes for weights, and get their own by renaming. Which files
count, readers learn from the *front*: ``model.safetensors`` or, where that is missing, the index. So one system call
turns the earlier export into the new one: renaming the new front over the old, or, where ``model.safetensors`` gives
way to several files, removing it once the new index stands beside it. Before that call nothing that the old front leads
to is touched, after it everything that the new one leads to is there, and the directory is synced between the two.
Killed anywhere, or without power, a run leaves the one or the other.

Numbered files of which an earlier export has some by the same name cannot be put in place before that call. They get
second names first (hard links, copies where there are none), and an index that leads to those replaces the old one.
Then the names are free, and the index that is wanted follows.

Checksums are in a file of their own, which is replaced before that call by one that has those of both exports, and
after it by one that has the new one's. A reader accepts any of those that it has for a name.

What no order of calls can do: the config beside the weights has a name of its own. It is replaced right before the
weights, if it differs at all. After an error it is put back; a run killed between the two leaves the new config
beside the old weights.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import zlib
from collections.abc import Sequence
from errno import EINVAL
from functools import partial
from pathlib import Path

from streamshard.checkpoint.checksum import shown
from streamshard.checkpoint.safetensors_file import (
    INDEX_NAME,
    SINGLE_NAME,
    SUMS_NAME,
    FileLayout,
    encode_index,
    files_of_index,
    parse_sums,
)
from streamshard.errors import CheckpointError

__all__ = [
    "BESIDE",
    "PARTIAL",
    "check_free",
    "publish",
    "remove_partials",
    "sweep",
    "sync_directory",
    "write_all",
    "write_synced",
]

PARTIAL = ".partial"
BESIDE = "config" + PARTIAL  # a directory: what goes beside the weights, until it is published

_EARLIER = "earlier"  # a directory in it: what that replaces
_SECOND = ".next.safetensors"  # readers go by the ending
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}(\.next)?\.safetensors")


def publish(root: Path, files: Sequence[FileLayout], total_parameters: int | None, sums: Sequence[int]) -> None:
    """Make the export that lies under partial names what readers of `root` find. See [Note: publishing].

    Args:
        root: holds each of `files` under its partial name, complete; several files' index too.
        files: one, or several and their index.
        total_parameters: for the index.
        sums: the CRC-32 of each of `files`.

    Raises:
        OSError: of any call. Readers find the earlier export then, or the new one.
    """
    live = _live(root)
    earlier = _front(root)
    undo = contextlib.ExitStack()
    second = [file._replace(name=_second_name(file)) for file in files]
    new = {(file.name, shown(each)) for file, each in zip(files, sums, strict=True)}
    if len(files) > 1:
        new.add((INDEX_NAME, shown(zlib.crc32(encode_index(files, total_parameters)))))
    between = new | {(file.name, shown(each)) for file, each in zip(second, sums, strict=True)}
    between.add((INDEX_NAME, shown(zlib.crc32(encode_index(second, total_parameters)))))
    try:
        _place_sums(root, between, undo)
        _place_beside(root, undo)
        if len(files) == 1:
            _place_single(root)
        elif INDEX_NAME in live and not live.isdisjoint(file.name for file in files):
            _place_over(root, files, total_parameters, undo)
        else:
            _place_numbered(root, files, SINGLE_NAME in live, undo)
    except BaseException:
        if _front(root) == earlier:  # network file systems report errors of calls that were carried out
            undo.close()
        raise
    _replace_sums(root, new)
    sweep(root)
    sync_directory(root)
    shutil.rmtree(root / BESIDE, ignore_errors=True)


def check_free(root: Path, files: Sequence[FileLayout]) -> None:
    """Raise a CheckpointError where a directory is in the way of a file."""
    names = [
        SINGLE_NAME,
        INDEX_NAME,
        SUMS_NAME,
        *(file.name for file in files),
        *(_second_name(file) for file in files),
    ]
    names.extend(path.name for path in _beside(root))
    for name in names:
        if (root / name).is_dir() and not (root / name).is_symlink():
            raise CheckpointError(f"{root / name} is a directory, and the export has a file of that name")


def remove_partials(root: Path) -> None:
    """Remove what a run that was killed has left under partial names."""
    for path in root.glob(f"model*{PARTIAL}"):
        _remove(path)
    if (root / BESIDE).is_symlink() or (root / BESIDE).is_file():
        _remove(root / BESIDE)
    shutil.rmtree(root / BESIDE, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove numbered files that belong to no export: of one that was replaced, or of a run that was killed."""
    live = _live(root)
    if not live:
        return
    for path in list(root.iterdir()):
        if _NUMBERED.fullmatch(path.name) and path.name not in live and not path.is_dir():
            _remove(path)


def write_synced(path: Path, content: bytes) -> None:
    """A new file with this content, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`, at byte `offset` of the file; the system may take it in parts."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _place_single(root: Path) -> None:
    sync_directory(root)
    os.replace(root / (SINGLE_NAME + PARTIAL), root / SINGLE_NAME)
    sync_directory(root)
    _remove(root / INDEX_NAME)
    sync_directory(root)


def _place_numbered(root: Path, files: Sequence[FileLayout], replaces_single: bool, undo: contextlib.ExitStack) -> None:
    """Files with names that no live export has."""
    if replaces_single:
        _remove(root / INDEX_NAME)  # not the front beside model.safetensors; what it leads to is about to be replaced
        undo.callback(_remove, root / INDEX_NAME)
        sync_directory(root)
    for file in files:
        undo.callback(_remove, root / file.name)
        os.replace(root / (file.name + PARTIAL), root / file.name)
    sync_directory(root)
    os.replace(root / (INDEX_NAME + PARTIAL), root / INDEX_NAME)
    sync_directory(root)
    _remove(root / SINGLE_NAME)
    sync_directory(root)


def _place_over(
    root: Path, files: Sequence[FileLayout], total_parameters: int | None, undo: contextlib.ExitStack
) -> None:
    """Files with names of which the live export has some."""
    for file in files:
        undo.callback(_remove, root / _second_name(file))
        _duplicate(root / (file.name + PARTIAL), root / _second_name(file))
    to_second = root / (INDEX_NAME + _SECOND + PARTIAL)
    write_synced(to_second, encode_index([file._replace(name=_second_name(file)) for file in files], total_parameters))
    sync_directory(root)
    os.replace(to_second, root / INDEX_NAME)
    sync_directory(root)
    for file in files:
        os.replace(root / (file.name + PARTIAL), root / file.name)
    sync_directory(root)
    os.replace(root / (INDEX_NAME + PARTIAL), root / INDEX_NAME)
    sync_directory(root)


def _place_sums(root: Path, new: set[tuple[str, str]], undo: contextlib.ExitStack) -> None:
    """Those of the earlier export, and `new` ones. None if the earlier one has none: `new` ones would not be its."""
    path = root / SUMS_NAME
    known: set[tuple[str, str]] = set()
    with contextlib.suppress(FileNotFoundError, CheckpointError):  # damaged ones are as good as none
        known = {(name, each) for name, several in parse_sums(root, path.read_bytes()).items() for each in several}
    if not _live(root).issubset(name for name, _ in known):
        _remove(path)
        return
    undo.callback(partial(_replace_sums, root, known) if known else partial(_remove, path))
    _replace_sums(root, known | new)
    sync_directory(root)


def _replace_sums(root: Path, sums: set[tuple[str, str]]) -> None:
    unfinished = root / (SUMS_NAME + PARTIAL)
    _remove(unfinished)
    write_synced(unfinished, "".join(f"{name} {crc32}\n" for name, crc32 in sorted(sums)).encode())
    os.replace(unfinished, root / SUMS_NAME)


def _place_beside(root: Path, undo: contextlib.ExitStack) -> None:
    """The config and other small files, those that differ from what is there."""
    for path in _beside(root):
        target, kept = root / path.name, root / BESIDE / _EARLIER / path.name
        if not target.is_file():
            undo.callback(_remove, target)
        elif target.read_bytes() == path.read_bytes():
            continue
        else:
            kept.parent.mkdir(exist_ok=True)
            shutil.copyfile(target, kept)
            undo.callback(os.replace, kept, target)
        _sync_file(path)
        os.replace(path, target)


def _beside(root: Path) -> list[Path]:
    return sorted(path for path in (root / BESIDE).glob("*") if path.is_file())


def _second_name(file: FileLayout) -> str:
    return file.name.removesuffix(".safetensors") + _SECOND


def _live(root: Path) -> set[str]:
    """The front and what it leads to; empty where there is none."""
    if (root / SINGLE_NAME).is_file():
        return {SINGLE_NAME}
    try:
        text = (root / INDEX_NAME).read_bytes()
    except FileNotFoundError:
        return set()
    try:
        return {INDEX_NAME, *files_of_index(text).values()}
    except ValueError:  # it leads nowhere
        return {INDEX_NAME}


def _front(root: Path) -> tuple[str, int, int] | None:
    """Which file is the front, so that it is not taken for another of that name."""
    for name in (SINGLE_NAME, INDEX_NAME):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(root / name)
            if stat.S_ISREG(status.st_mode):
                return name, status.st_dev, status.st_ino
    return None


def _duplicate(path: Path, second: Path) -> None:
    """Another name for the same file; where the file system has no hard links, a copy."""
    try:
        os.link(path, second)
    except FileExistsError:
        raise
    except OSError:
        with contextlib.suppress(shutil.SameFileError):  # it was linked in spite of the error
            shutil.copyfile(path, second)
        _sync_file(second)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != EINVAL:  # some file systems have no such thing for directories
            raise
    finally:
        os.close(descriptor)
