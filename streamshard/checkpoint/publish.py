"""Puts a complete export in the place of an earlier one. One rank does it; nothing here communicates.

[Note: publishing]
Readers begin at the *front*: ``model.safetensors``, or the index where there is no such file. The index names the other
files. So one rename, of a new front over the old one, replaces the whole export:

1. Every file is written under a partial name and synced. No reader takes a partial file for weights.
2. Several files get their final names. In a directory without weights these are save_pretrained's, such as
   ``model-00001-of-00003.safetensors``. In any other directory the names contain the export's random token, such as
   ``model-89abcdef01234567-00001-of-00003.safetensors``. So no name of a numbered file ever stands for different bytes.
   A program that has read the old index opens the old files, or gets FileNotFoundError. It never opens new ones.
3. The config is replaced, then the front. Where the index takes over from ``model.safetensors``, that file is removed
   once the index is in place.
4. Files that the front does not lead to are removed.

The directory is synced between these steps. A run that is killed, or loses power, leaves the old export or the new one.
The next export removes its other files.

Two processes may export into one directory at once, by mistake. Partial names contain the token, so neither writes into
the other's files. Whoever removes another export's files removes its partial front first. Without it the other export
cannot be published, and raises.

The checksums have a file of their own. It lists both exports from step 2 until step 4. A reader accepts each checksum
that is listed for a name.

The config cannot be replaced in the same rename as the weights. An error puts the old one back. A run that is killed
between the two renames leaves the new config beside the old weights.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Sequence
from errno import EINVAL
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint.checksum import shown
from streamshard.checkpoint.safetensors_file import (
    INDEX_NAME,
    SINGLE_NAME,
    SUMS_NAME,
    FileLayout,
    files_of_index,
    parse_sums,
)
from streamshard.errors import CheckpointError

__all__ = [
    "PARTIAL",
    "Staged",
    "check_free",
    "final_names",
    "publish",
    "remove_partials",
    "sweep",
    "sync_directory",
    "write_all",
    "write_synced",
]

PARTIAL = ".partial"

_BESIDE = "model.config"  # a directory: what goes beside the weights, until it is published
_EARLIER = "earlier"  # a directory in it: what that replaces
_TOKEN = "[0-9a-f]{16}"
_NUMBERED = re.compile(rf"model-({_TOKEN}-)?\d{{5}}-of-\d{{5}}\.safetensors")
_LEFT = re.compile(rf"(model.*\.(safetensors|json|sfv)|{re.escape(_BESIDE)})\.{_TOKEN}{re.escape(PARTIAL)}")


_Sums = set[tuple[str, str]]  # names and checksums


class Staged(NamedTuple):
    """An export whose files have partial names.

    Attributes:
        root: the directory.
        token: 16 hexadecimal digits that no other export has.
        files: with their final names.
        index_json: the index; None if there is one file.
    """

    root: Path
    token: str
    files: tuple[FileLayout, ...]
    index_json: bytes | None

    def partial(self, name: str) -> Path:
        """Where the file `name` is until the export is published."""
        return self.root / f"{name}.{self.token}{PARTIAL}"

    @property
    def beside(self) -> Path:
        """The directory of what goes beside the weights."""
        return self.partial(_BESIDE)


def final_names(root: Path, files: Sequence[FileLayout], token: str) -> list[str]:
    """The names under which the export `token` of `files` is published. See [Note: publishing]."""
    names = [file.name for file in files]
    if len(files) > 1 and any(
        name in (SINGLE_NAME, INDEX_NAME) or _NUMBERED.fullmatch(name) for name in os.listdir(root)
    ):
        names = [name.replace("model-", f"model-{token}-", 1) for name in names]
    return names


def publish(staged: Staged, sums: Sequence[int]) -> None:
    """Make `staged` what readers of its directory find. See [Note: publishing].

    Args:
        staged: all of its files are complete, under their partial names.
        sums: the CRC-32 of each of them.

    Raises:
        CheckpointError: another process has begun to export into the directory.
        OSError: of any call. Readers find the earlier export then, or the new one.
    """
    root, files = staged.root, staged.files
    new = {(file.name, shown(each)) for file, each in zip(files, sums, strict=True)}
    front, other, numbered = SINGLE_NAME, INDEX_NAME, files[:0]
    if staged.index_json is not None:
        new.add((INDEX_NAME, shown(zlib.crc32(staged.index_json))))
        front, other, numbered = INDEX_NAME, SINGLE_NAME, files
    _remove_all(each for each in _partials(root) if not _is_of(staged.token, each))
    known = _read_sums(root)
    earlier = _front(root)
    undo = contextlib.ExitStack()
    try:
        _place_sums(staged, known, new, undo)
        for file in numbered:
            if os.path.lexists(root / file.name):
                raise CheckpointError(f"another process has put {root / file.name} there: export from one process only")
            _place(staged, file.name, undo)
        _place_beside(staged, undo)
        sync_directory(root)
        # Where the front keeps its name, the earlier one has it until the new one has: there is nothing to undo.
        _place(staged, front, undo if earlier is not None and earlier[0] == other else contextlib.ExitStack())
        sync_directory(root)
        _remove(root / other)
        sync_directory(root)
    except BaseException:
        if _front(root) == earlier:  # network file systems report errors of calls that were carried out
            undo.close()
        raise
    _change_sums(staged, lambda sums: (sums | new) - (known - new))
    sweep(root)
    sync_directory(root)


def check_free(staged: Staged) -> None:
    """Raise a CheckpointError where a directory is in the way of a file."""
    for name in [SINGLE_NAME, INDEX_NAME, SUMS_NAME, *(path.name for path in _beside(staged))]:
        if (staged.root / name).is_dir() and not (staged.root / name).is_symlink():
            raise CheckpointError(f"{staged.root / name} is a directory, and the export has a file of that name")


def remove_partials(root: Path, token: str) -> None:
    """Remove the partial files of the export `token`."""
    _remove_all(each for each in _partials(root) if _is_of(token, each))


def sweep(root: Path) -> None:
    """Remove files of exports that were replaced or killed, and stop those that another process is writing.

    Keeps ``model.safetensors`` and what the index names. Keeps all numbered files if there is neither, or if the index
    cannot be read.
    """
    # In this order: an export whose numbered files are listed has been published, and the index names them, or it has
    # its partial front still, and loses it in the next line.
    numbered = [each for each in root.iterdir() if _NUMBERED.fullmatch(each.name) and not each.is_dir()]
    _remove_all(_partials(root))
    with contextlib.suppress(ValueError):
        named = _index(root)
        if named or (root / SINGLE_NAME).is_file():
            _remove_all(each for each in numbered if each.name not in named)


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


def _place(staged: Staged, name: str, undo: contextlib.ExitStack) -> None:
    """Give a file its final name."""
    source, target = staged.partial(name), staged.root / name
    try:
        os.replace(source, target)
    except FileNotFoundError as error:  # nothing to undo: a file of this name is another export's
        raise CheckpointError(
            f"{source} is gone: another process exports into {staged.root}; export from one process only"
        ) from error
    except BaseException:
        undo.callback(_remove, target)
        raise
    undo.callback(_remove, target)


def _place_sums(staged: Staged, known: _Sums, new: _Sums, undo: contextlib.ExitStack) -> None:
    """Those of the earlier export, and `new` ones. None if the earlier one has none: `new` ones would not be its."""
    if not _live(staged.root).issubset(name for name, _ in known):
        _remove(staged.root / SUMS_NAME)
        return
    undo.callback(_change_sums, staged, lambda sums: sums - (new - known))
    _change_sums(staged, lambda sums: sums | new)
    sync_directory(staged.root)


def _change_sums(staged: Staged, change: Callable[[_Sums], _Sums]) -> None:
    """Replace the checksums by what `change` makes of them, without losing those that another process has added."""
    unfinished, sums, changed = staged.partial(SUMS_NAME), None, None
    while sums is None or sums != _read_sums(staged.root):
        _remove(unfinished)
        sums = _read_sums(staged.root)
        changed = change(sums)
        write_synced(unfinished, "".join(f"{name} {crc32}\n" for name, crc32 in sorted(changed)).encode())
    if changed:
        os.replace(unfinished, staged.root / SUMS_NAME)
    else:
        _remove(staged.root / SUMS_NAME)


def _read_sums(root: Path) -> _Sums:
    """Names and checksums; none if there are none, or damaged ones."""
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        found = parse_sums(root, (root / SUMS_NAME).read_bytes())
        return {(name, each) for name, several in found.items() for each in several}
    return set()


def _place_beside(staged: Staged, undo: contextlib.ExitStack) -> None:
    """The config and other small files, those that differ from what is there."""
    for path in _beside(staged):
        target, kept = staged.root / path.name, staged.beside / _EARLIER / path.name
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


def _beside(staged: Staged) -> list[Path]:
    return sorted(path for path in staged.beside.glob("*") if path.is_file())


def _index(root: Path) -> set[str]:
    """The index and what it names; empty where there is none.

    Raises:
        ValueError: it is no index.
    """
    try:
        return {INDEX_NAME, *files_of_index((root / INDEX_NAME).read_bytes()).values()}
    except (FileNotFoundError, IsADirectoryError):
        return set()


def _live(root: Path) -> set[str]:
    """The front and what it leads to; empty where there is none."""
    if (root / SINGLE_NAME).is_file():
        return {SINGLE_NAME}
    try:
        return _index(root)
    except ValueError:
        return {INDEX_NAME}


def _front(root: Path) -> tuple[str, int, int] | None:
    """Which file is the front, so that it is not taken for another of that name."""
    for name in (SINGLE_NAME, INDEX_NAME):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(root / name)
            if stat.S_ISREG(status.st_mode):
                return name, status.st_dev, status.st_ino
    return None


def _partials(root: Path) -> list[Path]:
    """Of all exports; partial fronts first."""
    found = [each for each in root.iterdir() if _LEFT.fullmatch(each.name)]
    return sorted(found, key=lambda each: not each.name.startswith((f"{SINGLE_NAME}.", f"{INDEX_NAME}.")))


def _is_of(token: str, path: Path) -> bool:
    return path.name.endswith(f".{token}{PARTIAL}")


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            _remove(path)


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
