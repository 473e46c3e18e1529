"""Safetensors files that exist, and the Hugging Face directories of them: what is where, without reading tensors' data.

Whether a file is sound is for the safetensors library to say; which bytes are whose is arithmetic then.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from streamshard.checkpoint.checksum import Extent, join_extents, read_extent, share_of, shown
from streamshard.checkpoint.foreign import HUGGING_FACE, what_is
from streamshard.checkpoint.safetensors_file import (
    DTYPES,
    INDEX_NAME,
    LENGTH_BYTES,
    SINGLE_NAME,
    SUMS_NAME,
    files_of_index,
    parse_sums,
)
from streamshard.errors import CheckpointError

__all__ = ["StoredDirectory", "StoredTensor", "read_directory", "read_file"]

_OPENED_AT_MOST = 10  # times in a row that a directory may be replaced while it is being opened
_SAMPLE_BYTES = 256


class StoredTensor(NamedTuple):
    """A tensor found in a file.

    Attributes:
        file: open for reading until the `StoredDirectory` is closed.
        offset: byte in the file of the first element.
        shape: in the file.
        dtype: in the file.
    """

    file: FileIO
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredDirectory(contextlib.AbstractContextManager["StoredDirectory"]):
    """The tensors of a Hugging Face directory at one moment. Owns the open files; leaving the context closes them.

    Who puts other files in their place later changes nothing in what is read from these.

    Attributes:
        tensors: by name.
        sums: the CRC-32 of files by name, as hexadecimal digits; several, while one is replaced by another. None if
            there are no checksums.
        layout: a digest of names, files, shapes, dtypes and offsets.
        sizes_bytes: of the files.
        identity: what tells the files from any others on the same storage, also those of the same layout.
    """

    def __init__(
        self,
        files: Sequence[_OpenFile],
        tensors: Mapping[str, StoredTensor],
        sums: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        self._files = files
        self.tensors = tensors
        self.sums = sums
        digest = hashlib.sha256()
        for name, stored in sorted(tensors.items()):
            entry = (name, Path(os.fsdecode(stored.file.name)).name, stored.offset, stored.shape, str(stored.dtype))
            digest.update(repr(entry).encode())
        self.layout = digest.hexdigest()
        self.sizes_bytes = [file.identity.size_bytes for file in files]
        self.identity = tuple(file.identity[1:] for file in files)  # hosts number a shared device differently

    def __exit__(self, *args: object) -> None:
        for file in self._files:
            file.opened.close()

    def sample(self) -> str:
        """A digest of some bytes of every tensor: after a step of training it is another."""
        digest = hashlib.sha256()
        for _, stored in sorted(self.tensors.items()):
            size_bytes = math.prod(stored.shape) * stored.dtype.itemsize
            middle = stored.offset + size_bytes // 2
            end = min(middle + _SAMPLE_BYTES, stored.offset + size_bytes)
            digest.update(os.pread(stored.file.fileno(), end - middle, middle))
        return digest.hexdigest()

    def read_share(self, part: int, parts: int, advance: Callable[[int], object]) -> list[Extent]:
        """What one of `parts` readers reads for `verify`; nothing where there are no checksums."""
        if self.sums is None:
            return []
        return [
            read_extent(self._files[number].opened, number, start, stop, self.sizes_bytes[number], advance)
            for number, start, stop in share_of(self.sizes_bytes, part, parts)
        ]

    def verify(self, shares: Iterable[Sequence[Extent]]) -> None:
        """Compare files with their checksums, where there are such.

        Args:
            shares: what each of the readers got of `read_share`.

        Raises:
            CheckpointError: names the file that is not what its checksum says, or has none.
        """
        if self.sums is None:
            return
        found = join_extents(itertools.chain(*shares), self.sizes_bytes)
        for file, crc32 in zip(self._files, found, strict=True):
            known = self.sums.get(file.path.name)
            if known is None or shown(crc32) not in known:
                raise CheckpointError(
                    f"{file.path} is not what its checksum in {SUMS_NAME} says"
                    + (", which has none of it" if known is None else "")
                    + ": it is damaged, or was replaced by something that does not keep checksums; if it is as it "
                    f"should be, delete {SUMS_NAME}"
                )

    def check_unchanged(self) -> None:
        """Raise a CheckpointError if somebody has written into one of the files since they were opened."""
        for file in self._files:
            now = _identity(os.fstat(file.opened.fileno()))
            if now != file.identity:
                raise CheckpointError(f"{file.path} was written to while it was read")


def read_directory(directory: str | os.PathLike[str]) -> StoredDirectory:
    """Open a Hugging Face directory and find every tensor in it; of files, headers only are read.

    An export may replace another meanwhile. No name of a numbered file ever stands for different bytes, so an index
    leads to its own files or, once they are gone, to none; then the directory is opened again. The safetensors library
    must accept each file, and the files must hold what the index says.

    Raises:
        CheckpointError: there is nothing to read, what is there is damaged or contradicts itself, or it is replaced
            again and again.
    """
    root = Path(directory)
    for _ in range(_OPENED_AT_MOST):
        with contextlib.ExitStack() as opened:
            try:
                stored = _open_directory(root, opened)
            except _Replaced:
                continue
            opened.pop_all()
            return stored
    raise CheckpointError(f"{root} was replaced {_OPENED_AT_MOST} times while it was being opened")


def read_file(path: Path) -> StoredDirectory:
    """Open one file and find every tensor in it; its header only is read.

    Raises:
        CheckpointError: there is none, or the safetensors library does not accept it.
    """
    with contextlib.ExitStack() as opened:
        file = _open(path, opened)
        if file is None:
            raise CheckpointError(f"cannot read {path}: there is no such file")
        try:
            stored = StoredDirectory([file], _read_header(file))
        except _Replaced as error:
            raise CheckpointError(f"{path} was replaced while it was being opened") from error
        opened.pop_all()
        return stored


class _Replaced(Exception):
    """Another file has taken the place of one that is open."""


class _Identity(NamedTuple):
    device: int
    inode: int
    size_bytes: int
    modified_ns: int


class _OpenFile(NamedTuple):
    """A file, and what it was when it was opened."""

    path: Path
    opened: FileIO
    identity: _Identity

    def check_in_place(self) -> None:
        """Raise _Replaced unless its path still leads to it."""
        try:
            found = _identity(os.stat(self.path))
        except OSError as error:
            raise _Replaced from error
        if found != self.identity:
            raise _Replaced


def _open_directory(root: Path, opened: contextlib.ExitStack) -> StoredDirectory:
    single = _open(root / SINGLE_NAME, opened)
    front = single or _open(root / INDEX_NAME, opened)
    if front is None:
        if (root / SINGLE_NAME).is_file():  # came while it was looked for, and the index went
            raise _Replaced
        raise CheckpointError(what_is(root, HUGGING_FACE) or f"{root} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    try:
        files, tensors = ([front], _read_header(front)) if single else _open_indexed(root, front, opened)
        sums = _read_sums(root)
    except CheckpointError:
        front.check_in_place()
        raise
    front.check_in_place()  # so these checksums, which are always those of the export that is in place, are its own
    return StoredDirectory(files, tensors, sums)


def _open_indexed(
    root: Path, index: _OpenFile, opened: contextlib.ExitStack
) -> tuple[list[_OpenFile], dict[str, StoredTensor]]:
    """`index`, all files that it names, and the tensors in them."""
    try:
        weight_map = files_of_index(index.opened.readall())
    except ValueError as error:
        raise CheckpointError(f"{index.path} is not an index of safetensors files: {error}") from error
    files, tensors = [index], {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index.path} names {name!r}, which is not a file of its own directory")
        file = _open(root / name, opened)
        if file is None:
            raise CheckpointError(f"cannot read {root / name}, which {INDEX_NAME} names: there is no such file")
        inside = _read_header(file)
        stray = next((tensor for tensor in inside if weight_map.get(tensor) != name), None)
        if stray is not None:
            raise CheckpointError(
                f"{file.path} holds {stray!r}, which {INDEX_NAME} does not say: they do not belong together"
            )
        files.append(file)
        tensors.update(inside)
    lost = next((tensor for tensor in weight_map if tensor not in tensors), None)
    if lost is not None:
        raise CheckpointError(f"{index.path} says {lost!r} is in {weight_map[lost]}, which does not have it")
    return files, tensors


def _read_sums(root: Path) -> dict[str, frozenset[str]] | None:
    try:
        return parse_sums(root, (root / SUMS_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {root / SUMS_NAME}: {error}") from error


def _open(path: Path, opened: contextlib.ExitStack) -> _OpenFile | None:
    """None where there is no such file, nor a link to one."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    opened.enter_context(file)
    status = os.fstat(file.fileno())
    return _OpenFile(path, file, _identity(status)) if stat.S_ISREG(status.st_mode) else None


def _identity(status: os.stat_result) -> _Identity:
    return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _read_header(file: _OpenFile) -> dict[str, StoredTensor]:
    """The tensors of `file`, as the safetensors library understands its header once it has accepted it.

    The library opens files by name only, and maps them whole: with "np" for reading, with "pt" for writing too, which
    systems refuse for files larger than their memory.
    """
    try:
        with safe_open(file.path, framework="np") as library:
            file.check_in_place()  # so it is this one that the library has opened
            slices = [(name, library.get_slice(name)) for name in library.offset_keys()]
            found = [(name, tuple(each.get_shape()), str(each.get_dtype())) for name, each in slices]
        length = int.from_bytes(os.pread(file.opened.fileno(), LENGTH_BYTES, 0), "little")
    except (SafetensorError, OSError) as error:
        file.check_in_place()
        _check_can_open(file.path)
        raise CheckpointError(f"cannot read {file.path}, or it is damaged: {error}") from error
    tensors = {}
    position = LENGTH_BYTES + length
    for name, shape, dtype in found:  # in the order of their bytes, among which the library allows no gaps
        if dtype not in DTYPES:
            raise CheckpointError(f"{file.path}: {name!r} has dtype {dtype}, which cannot be loaded")
        tensors[name] = StoredTensor(file.opened, position, shape, DTYPES[dtype])
        position += math.prod(shape) * DTYPES[dtype].itemsize
    if position != file.identity.size_bytes:
        raise CheckpointError(f"{file.path} has {file.identity.size_bytes} bytes, but its header describes {position}")
    return tensors


def _check_can_open(path: Path) -> None:
    """Say why a file cannot be opened. The safetensors library says that there is none, whatever the reason is."""
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
