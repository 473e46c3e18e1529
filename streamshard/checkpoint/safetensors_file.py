"""The safetensors format and the Hugging Face file layout: no tensors' data, no communication.

`plan_files` says which tensor lies in which file at which byte, by arithmetic; `read_directory` finds the same of files
that exist. Whether such a file is sound is for the safetensors library to say.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered as the safetensors library orders them, widest dtype first and then by
name: every start is aligned to its dtype, and equal tensors give equal files (safetensors/src/tensor.rs, `prepare`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from streamshard.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "SUMS_NAME",
    "FileLayout",
    "StoredDirectory",
    "StoredTensor",
    "TensorSpec",
    "encode_index",
    "files_of_index",
    "lay_out",
    "parse_sums",
    "plan_files",
    "read_directory",
    "read_file",
    "sha256_of",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUMS_NAME = "model.safetensors.sha256"  # beside them, in the format of sha256sum

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones
_OPENED_AT_MOST = 10  # times in a row that a directory may be replaced while it is being opened
_SAMPLE_BYTES = 256
_HASHED_BYTES = 1 << 20  # at once

_SUM = re.compile(rb"([0-9a-f]{64})  (model[^/\\]*(?:safetensors|json))")
_SUM_SHOWN = 90

# In the order in which a file holds them.
_DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_ORDER = {dtype: position for position, dtype in enumerate(_DTYPE_NAMES)}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class TensorSpec(NamedTuple):
    """One tensor as it will be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class FileLayout(NamedTuple):
    """One file, down to the byte.

    Attributes:
        name: its name in the directory.
        header: its first bytes, length included.
        offsets: byte offset in the file of each tensor's first element.
        size_bytes: of the whole file.
    """

    name: str
    header: bytes
    offsets: dict[str, int]
    size_bytes: int


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
        sums: the SHA-256 of files by name, as hexadecimal digits; several, while one is replaced by another.
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
        self.sums = sums or {}
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

    def verify(self, part: int, parts: int, advance: Callable[[int], object]) -> None:
        """Compare files with their checksums, where there are such: those whose turn it is among `parts` readers.

        Raises:
            CheckpointError: names the file that is not what its checksum says.
        """
        for file in self._files[part::parts]:
            if self.sums and _sha256_of(file.opened, advance) not in self.sums.get(file.path.name, ()):
                raise CheckpointError(
                    f"{file.path} is not what its checksum in {SUMS_NAME} says: it is damaged, or was replaced by "
                    f"something that does not keep checksums; if it is as it should be, delete {SUMS_NAME}"
                )

    def check_unchanged(self) -> None:
        """Raise a CheckpointError if somebody has written into one of the files since they were opened."""
        for file in self._files:
            now = _identity(os.fstat(file.opened.fileno()))
            if now != file.identity:
                raise CheckpointError(f"{file.path} was written to while it was read")


def plan_files(specs: Sequence[TensorSpec], max_file_bytes: int, metadata: Mapping[str, str]) -> tuple[FileLayout, ...]:
    """Distribute tensors over files as huggingface_hub does, so that file names and contents agree with its.

    Args:
        specs: the tensors, in the order of the state dict.
        max_file_bytes: a file holds no more tensor bytes than this, unless it holds one tensor only.
        metadata: strings for each file's header.

    Returns:
        ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on.

    Raises:
        CheckpointError: two tensors have one name, or a dtype has no name in the format.
    """
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    if repeated:
        raise CheckpointError(f"several tensors are named {repeated[0]!r}")
    groups = _split(specs, max_file_bytes)
    if len(groups) <= 1:
        return (lay_out(SINGLE_NAME, groups[0] if groups else [], metadata),)
    stem = SINGLE_NAME.removesuffix(".safetensors")
    return tuple(
        lay_out(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for number, group in enumerate(groups, start=1)
    )


def encode_index(files: Sequence[FileLayout], total_parameters: int | None) -> bytes:
    """The JSON that says in which file each tensor is, as `save_pretrained` writes it."""
    metadata = {} if total_parameters is None else {"total_parameters": total_parameters}
    metadata["total_size"] = sum(file.size_bytes - len(file.header) for file in files)
    weight_map = {name: file.name for file in files for name in file.offsets}
    return (json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n").encode()


def files_of_index(text: bytes) -> dict[str, str]:
    """The file of each tensor, according to the text of an index.

    Raises:
        ValueError: it is no index.
    """
    try:
        weight_map = json.loads(text)["weight_map"]
        found = {str(name): file for name, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)) from error
    strange = [file for file in found.values() if not isinstance(file, str)]
    if strange:
        raise ValueError(f"{strange[0]!r} is no file name")
    return found


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with FileIO(path) as file:
        return _sha256_of(file, lambda count: None)


def _sha256_of(file: FileIO, advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_HASHED_BYTES))
    position = 0
    while count := os.preadv(file.fileno(), [buffer], position):
        digest.update(buffer[:count])
        position += count
        advance(count)
    return digest.hexdigest()


def parse_sums(root: Path, text: bytes | None) -> dict[str, frozenset[str]]:
    """Checksums by file, of the text of `SUMS_NAME` in `root`; none where there is no such file.

    Raises:
        CheckpointError: it is none.
    """
    found: dict[str, frozenset[str]] = {}
    for line in (text or b"").splitlines():
        match = _SUM.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{root / SUMS_NAME} is damaged: {line[:_SUM_SHOWN]!r} is no checksum of a file")
        name = os.fsdecode(match[2])
        found[name] = found.get(name, frozenset()) | {match[1].decode()}
    return found


def read_directory(directory: str | os.PathLike[str]) -> StoredDirectory:
    """Open a Hugging Face directory and find every tensor in it; of files, headers only are read.

    What is found was all there at one moment, also while an export replaces another: all files are opened, then the
    index must still be the one that named them. The safetensors library must accept each of them, and they must hold
    what the index says.

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


def _split(specs: Sequence[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """huggingface_hub/serialization/_base.py: one pass in order; what is too large for any file gets one of its own,
    numbered before the file that is being filled."""
    groups: list[list[TensorSpec]] = []
    filling: list[TensorSpec] = []
    filled_bytes = 0
    for spec in specs:
        if spec.size_bytes > max_file_bytes:
            groups.append([spec])
            continue
        if filled_bytes + spec.size_bytes > max_file_bytes:
            groups.append(filling)
            filling, filled_bytes = [], 0
        filling.append(spec)
        filled_bytes += spec.size_bytes
    if filling:
        groups.append(filling)
    return groups


def lay_out(name: str, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """One file that holds all of `specs`.

    Raises:
        CheckpointError: a dtype has no name in the format, or the header becomes longer than readers accept.
    """
    for spec in specs:
        if spec.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{spec.name!r} is {spec.dtype}, which safetensors cannot hold")
    contents: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: (_DTYPE_ORDER[spec.dtype], spec.name)):
        end = position + spec.size_bytes
        contents[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        starts[spec.name] = position
        position = end
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"the header of {name} would take {len(text)} bytes: use a smaller max_shard_size")
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    offsets = {tensor: len(header) + start for tensor, start in starts.items()}
    return FileLayout(name, header, offsets, len(header) + position)


def _open_directory(root: Path, opened: contextlib.ExitStack) -> StoredDirectory:
    sums = _read_sums(root)
    single = _open(root / SINGLE_NAME, opened)
    if single is not None:
        tensors = _read_header(single)
        _check_sums(root, sums)
        return StoredDirectory([single], tensors, parse_sums(root, sums))
    index = _open(root / INDEX_NAME, opened)
    if index is None:
        if (root / SINGLE_NAME).is_file():  # came while it was looked for, and the index went
            raise _Replaced
        raise CheckpointError(f"{root} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    try:
        weight_map = files_of_index(index.opened.readall())
    except ValueError as error:
        raise CheckpointError(f"{index.path} is not an index of safetensors files: {error}") from error
    files = _open_files(root, index, weight_map.values(), opened)
    tensors = {}
    for name, file in files.items():
        inside = _read_header(file)
        stray = next((tensor for tensor in inside if weight_map.get(tensor) != name), None)
        if stray is not None:
            raise CheckpointError(
                f"{file.path} holds {stray!r}, which {INDEX_NAME} does not say: they do not belong together"
            )
        tensors.update(inside)
    lost = next((tensor for tensor in weight_map if tensor not in tensors), None)
    if lost is not None:
        raise CheckpointError(f"{index.path} says {lost!r} is in {weight_map[lost]}, which does not have it")
    _check_sums(root, sums)
    return StoredDirectory([index, *files.values()], tensors, parse_sums(root, sums))


def _read_sums(root: Path) -> bytes | None:
    try:
        return (root / SUMS_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {root / SUMS_NAME}: {error}") from error


def _check_sums(root: Path, sums: bytes | None) -> None:
    """Those that were there before the files were opened have to be theirs: an export replaces them first and last."""
    if _read_sums(root) != sums:
        raise _Replaced


def _open_files(
    root: Path, index: _OpenFile, names: Iterable[str], opened: contextlib.ExitStack
) -> dict[str, _OpenFile]:
    """All files that `index` names, at a moment at which it was in place. Exports replace it before its files."""
    files = {}
    for name in sorted(set(names)):
        if Path(name).name != name:
            raise CheckpointError(f"{index.path} names {name!r}, which is not a file of its own directory")
        file = _open(root / name, opened)
        if file is None:
            index.check_in_place()
            raise CheckpointError(f"cannot read {root / name}, which {INDEX_NAME} names: there is no such file")
        files[name] = file
    index.check_in_place()
    return files


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
        length = int.from_bytes(os.pread(file.opened.fileno(), _LENGTH_BYTES, 0), "little")
    except (SafetensorError, OSError) as error:
        file.check_in_place()
        raise CheckpointError(f"cannot read {file.path}, or it is damaged: {error}") from error
    tensors = {}
    position = _LENGTH_BYTES + length
    for name, shape, dtype in found:  # in the order of their bytes, among which the library allows no gaps
        if dtype not in _DTYPES:
            raise CheckpointError(f"{file.path}: {name!r} has dtype {dtype}, which cannot be loaded")
        tensors[name] = StoredTensor(file.opened, position, shape, _DTYPES[dtype])
        position += math.prod(shape) * _DTYPES[dtype].itemsize
    if position != file.identity.size_bytes:
        raise CheckpointError(f"{file.path} has {file.identity.size_bytes} bytes, but its header describes {position}")
    return tensors
