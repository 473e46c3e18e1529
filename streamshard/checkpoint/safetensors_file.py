"""Safetensors files: the format, writing one, and reading tensors from several. No communication.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered as the safetensors library orders them, widest dtype first and then by
name: every start is aligned to its dtype, and equal tensors give equal files (safetensors/src/tensor.rs, `prepare`).

[Note: checksums]
Each file has one CRC-32 for each `CHUNK_BYTES` of it, the last chunk being shorter. So ranks can verify equal shares of
all bytes, however few files there are. Against damage, which is what they are for, 32 bits are enough: one flipped bit,
or any 32 in a row, always change them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EINVAL
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from streamshard.errors import CheckpointError

__all__ = [
    "CHUNK_BYTES",
    "DTYPES",
    "INDEX_NAME",
    "PARTIAL",
    "SINGLE_NAME",
    "SUMS_NAME",
    "FileLayout",
    "FileRecord",
    "OpenFiles",
    "StoredTensor",
    "TensorSpec",
    "bytes_of",
    "checksums",
    "encode_sums",
    "files_of_index",
    "lay_out",
    "parse_sums",
    "share_of_chunks",
    "sync_directory",
    "write_all",
    "write_file",
    "write_synced",
]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUMS_NAME = "model.safetensors.crc32.json"
"""Checksums of the weights and their index, beside them. See [Note: checksums]."""

PARTIAL = ".partial"
"""What the name of a directory ends in until it is complete."""

CHUNK_BYTES = 8 << 20
"""What one checksum is of; and the memory that copying to or from a device, or in another dtype, takes."""

_OPENED_AT_MOST = 64  # files; `ulimit -n` is often 1024 or 256, for the whole process
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones
_MOST_DIMS = 64  # as many as torch has

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
DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


# ------------------------------------------------------------------------------------------------ layout


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


class FileRecord(NamedTuple):
    """A file that was written. See [Note: checksums]."""

    name: str
    size_bytes: int
    crc32: list[str]


def lay_out(name: str, specs: Sequence[TensorSpec]) -> FileLayout:
    """One file that holds all of `specs`, as `save_pretrained` would write it.

    Raises:
        CheckpointError: two tensors have one name, a dtype has no name in the format, or the header becomes longer
            than readers accept.
    """
    contents: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for spec in specs:
        if spec.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{spec.name!r} is {spec.dtype}, which safetensors cannot hold")
    for spec in sorted(specs, key=lambda spec: (_DTYPE_ORDER[spec.dtype], spec.name)):
        if spec.name in starts:
            raise CheckpointError(f"several tensors are named {spec.name!r}")
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


def files_of_index(text: bytes) -> dict[str, str]:
    """The file of each tensor, according to the text of a Hugging Face index.

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


# ------------------------------------------------------------------------------------------------ checksums


def checksums(data: bytes) -> list[str]:
    """Of a file with these bytes. See [Note: checksums]."""
    return [_shown(zlib.crc32(data[start : start + CHUNK_BYTES])) for start in range(0, len(data), CHUNK_BYTES)]


def encode_sums(records: Sequence[FileRecord]) -> bytes:
    """The content of `SUMS_NAME`."""
    return (json.dumps({"chunk_bytes": CHUNK_BYTES, "files": records}, separators=(",", ":")) + "\n").encode()


def parse_sums(path: Path) -> dict[str, FileRecord]:
    """What `encode_sums` was given, by name, from the file `path`.

    Raises:
        CheckpointError: it holds something else.
    """
    try:
        content = json.loads(path.read_bytes().decode())
        records = {
            name: FileRecord(str(name), int(size), list(map(str, sums))) for name, size, sums in content["files"]
        }
        if content["chunk_bytes"] != CHUNK_BYTES or len(records) != len(content["files"]):
            raise ValueError("it is of other files")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {str(error):.90}") from error
    return records


def share_of_chunks(sizes_bytes: Sequence[int], part: int, parts: int) -> Iterator[tuple[int, range]]:
    """What one of `parts` ranks looks at of files of these sizes: the numbers of files, and of their chunks."""
    counts = [-(-size // CHUNK_BYTES) for size in sizes_bytes]
    first, last = sum(counts) * part // parts, sum(counts) * (part + 1) // parts
    before = 0  # chunks of the files in front of this one
    for number, count in enumerate(counts):
        chunks = range(max(first - before, 0), min(last - before, count))
        if chunks:
            yield number, chunks
        before += count


def _shown(crc32: int) -> str:
    """As it is written down: eight hexadecimal digits."""
    return f"{crc32:08x}"


# ------------------------------------------------------------------------------------------------ writing


def write_file(
    directory: Path,
    layout: FileLayout,
    data_of: Callable[[str], torch.Tensor],
    advance: Callable[[int], object],
) -> FileRecord:
    """Write a new file, which is on the disk when this returns. Extra memory: `CHUNK_BYTES`, for devices only.

    Nothing is read again: the checksums are made of the bytes that are written.

    Args:
        directory: where to.
        layout: made by `lay_out`.
        data_of: a tensor's data, [n] 1-D contiguous, by its name; asked for once each, and let go before the next.
        advance: is told how many bytes were written, now and then.

    Raises:
        CheckpointError: names the file that cannot be written.
    """
    path = directory / layout.name
    sums, crc32, position = [], 0, 0
    try:
        with _created(path) as descriptor:
            for data in _contents(layout, data_of):
                write_all(descriptor, data, position)
                while data:
                    part = data[: CHUNK_BYTES - position % CHUNK_BYTES]
                    crc32 = zlib.crc32(part, crc32)
                    data, position = data[len(part) :], position + len(part)
                    if position % CHUNK_BYTES == 0 or position == layout.size_bytes:
                        sums.append(_shown(crc32))
                        crc32 = 0
                    advance(len(part))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return FileRecord(layout.name, layout.size_bytes, sums)


def _contents(layout: FileLayout, data_of: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    """The file's bytes. Each part is to be used before the next is asked for."""
    yield memoryview(layout.header)
    staging: torch.Tensor | None = None
    for name in layout.offsets:
        data = part = torch.empty(0)  # not the one before while the next is made
        data = data_of(name).detach()
        numel = CHUNK_BYTES // data.dtype.itemsize
        for done in range(0, data.numel(), numel):
            part = data[done : done + numel]
            if part.device.type != "cpu":
                if staging is None:
                    staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
                part = staging.view(data.dtype)[: part.numel()].copy_(part)
            yield bytes_of(part)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of whatever dtype."""
    if not tensor.numel():
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


@contextlib.contextmanager
def _created(path: Path) -> Iterator[int]:
    """A new file, which is on the disk behind the context."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes) -> None:
    """A new file with this content, on the disk when this returns."""
    with _created(path) as descriptor:
        write_all(descriptor, memoryview(content), 0)


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`, at byte `offset` of the file; the system may take it in parts."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync_directory(root: Path) -> None:
    """Return once the names in `root` are on the disk."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != EINVAL:  # some file systems have no such thing for directories
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------ reading


class StoredTensor(NamedTuple):
    """A tensor found in a file.

    Attributes:
        file: its number among `OpenFiles`.
        offset: byte in the file of the first element.
        shape: in the file.
        dtype: in the file.
    """

    file: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Identity(NamedTuple):
    """What tells a file from others on the same storage. Hosts number a shared device differently."""

    inode: int
    size_bytes: int
    modified_ns: int


_Files = TypeVar("_Files", bound="OpenFiles")


class OpenFiles:
    """Files of one directory, opened when they are needed, a bounded number at a time. Leaving it closes them.

    Where all of them are open, whoever deletes or replaces them changes nothing in what is read. Where there are more,
    a file that has to be opened again must still be the same one.

    Args:
        root: the directory.
        names: of the files in it.
    """

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.names = names
        self._identities: dict[int, _Identity] = {}  # of all files that were opened
        self._headers: dict[int, dict[str, StoredTensor]] = {}
        self._opened: dict[int, FileIO] = {}  # the one that was used last comes last

    def __enter__(self: _Files) -> _Files:
        return self

    def __exit__(self, *args: object) -> None:
        for file in self._opened.values():
            file.close()

    def path(self, number: int) -> Path:
        """Of file `number`."""
        return self.root / self.names[number]

    def identity(self, number: int) -> _Identity:
        """Of file `number`, as it was when it was opened first."""
        self.open(number)
        return self._identities[number]

    def open(self, number: int) -> int:
        """A descriptor, which is valid until `_OPENED_AT_MOST` others have been asked for.

        Raises:
            CheckpointError: there is no such file (caused by a FileNotFoundError), or not any more.
        """
        file = self._opened.pop(number, None)
        if file is None:
            while len(self._opened) >= _OPENED_AT_MOST:
                oldest = next(iter(self._opened))
                self._check_unchanged(oldest)
                self._opened.pop(oldest).close()
            file = _open(self.path(number))
            found = _identity(file)
            if self._identities.setdefault(number, found) != found:
                file.close()
                raise CheckpointError(f"{self.path(number)} was replaced while it was read: load again")
        self._opened[number] = file
        return file.fileno()

    def tensors(self, number: int) -> Mapping[str, StoredTensor]:
        """What file `number` holds, by name.

        Raises:
            CheckpointError: it is damaged, or not a safetensors file.
        """
        if number not in self._headers:
            try:
                self._headers[number] = _parse_header(number, self.open(number), self.identity(number).size_bytes)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{self.path(number)} is damaged: {reason:.200}") from error
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path(number)}: {error}") from error
        return self._headers[number]

    def read(self, stored: StoredTensor, start: int, target: torch.Tensor) -> None:
        """Fill `target` by elements [start, start + target.numel()) of `stored` flattened, converted.

        Args:
            stored: a tensor in one of the files.
            start: first element.
            target: [n] 1-D contiguous, any device and dtype; autograd hears of the change.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        target = target.detach()
        is_direct = target.device.type == "cpu" and target.dtype == stored.dtype
        if is_direct:
            chunk = target
            torch.autograd.graph.increment_version(target)
        else:
            chunk = torch.empty(min(CHUNK_BYTES // stored.dtype.itemsize, target.numel()), dtype=stored.dtype)
        for done in range(0, target.numel(), max(chunk.numel(), 1)):
            part = target[done : done + chunk.numel()]
            offset = stored.offset + (start + done) * stored.dtype.itemsize
            self._read_bytes(stored.file, offset, bytes_of(chunk[: part.numel()]))
            if not is_direct:
                part.copy_(chunk[: part.numel()])

    def read_all(self, number: int) -> bytes:
        """The content of file `number`."""
        content = bytearray(self.identity(number).size_bytes)
        self._read_bytes(number, 0, memoryview(content))
        return bytes(content)

    def sums_of(self, number: int, chunks: range, advance: Callable[[int], object]) -> list[str]:
        """Checksums of some chunks of file `number`, as it is now. See [Note: checksums].

        Args:
            number: of the file.
            chunks: of consecutive ones.
            advance: is told how many bytes were read.
        """
        size_bytes, sums = self.identity(number).size_bytes, []
        buffer = memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
        for chunk in chunks:
            data = buffer[: size_bytes - chunk * CHUNK_BYTES]
            self._read_bytes(number, chunk * CHUNK_BYTES, data)
            sums.append(_shown(zlib.crc32(data)))
            advance(len(data))
        return sums

    def verify(self, records: Sequence[FileRecord], part: int, parts: int, advance: Callable[[int], object]) -> None:
        """Compare files with their checksums, as one of `parts` readers that share all bytes evenly.

        Args:
            records: of the files, in their order.
            part: this reader's number.
            parts: how many there are.
            advance: is told how many bytes were read.

        Raises:
            CheckpointError: names the file that is not as it was written.
        """
        for number, chunks in share_of_chunks([record.size_bytes for record in records], part, parts):
            record = records[number]
            if (found := self.identity(number).size_bytes) != record.size_bytes:
                raise CheckpointError(f"{self.path(number)} has {found} bytes, was written with {record.size_bytes}")
            if self.sums_of(number, chunks, advance) != record.crc32[chunks.start : chunks.stop]:
                raise CheckpointError(f"{self.path(number)} is damaged: it is not what its checksums say")

    def check_unchanged(self) -> None:
        """Raise a CheckpointError if somebody has written into one of the files since they were opened."""
        for number in self._opened:
            self._check_unchanged(number)

    def _check_unchanged(self, number: int) -> None:
        if _identity(self._opened[number]) != self._identities[number]:
            raise CheckpointError(f"{self.path(number)} was written to while it was read")

    def _read_bytes(self, number: int, offset: int, target: memoryview) -> None:
        descriptor = self.open(number)
        try:
            while target:
                count = os.preadv(descriptor, [target], offset)
                if not count:
                    raise CheckpointError(f"{self.path(number)} became shorter while it was read")
                target, offset = target[count:], offset + count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path(number)}: {error}") from error


def _open(path: Path) -> FileIO:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise FileNotFoundError(f"{path} is not a file")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return file


def _identity(file: FileIO) -> _Identity:
    status = os.fstat(file.fileno())
    return _Identity(status.st_ino, status.st_size, status.st_mtime_ns)


def _parse_header(file: int, descriptor: int, size_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of a file, among which there are no gaps.

    Raises:
        ValueError, among others: the header contradicts itself or the file.
    """
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if length > min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise ValueError(f"its header would take {length} bytes")
    header = json.loads(os.pread(descriptor, length, _LENGTH_BYTES).decode())
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    position = 0
    for name, record in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, dtype = record["shape"], record["dtype"]
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} has dtype {dtype}, which cannot be loaded")
        if len(shape) > _MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has the shape {str(shape):.80}")
        stored = StoredTensor(file, _LENGTH_BYTES + length + position, tuple(shape), DTYPES[dtype])
        if record["data_offsets"] != [position, position + stored.n_bytes]:
            raise ValueError(f"{name!r} is not where it should be")
        tensors[name] = stored
        position += stored.n_bytes
    if _LENGTH_BYTES + length + position != size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, but its header describes {_LENGTH_BYTES + length + position}")
    return tensors
