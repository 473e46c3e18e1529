"""Safetensors files: plan a file to the byte, write it, verify it, and read tensors. No communication.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered by dtype, widest first, and then by name, as the safetensors library
orders them (safetensors/src/tensor.rs, `prepare`): equal tensors give equal files. The library writes a file in one
piece from one process. Here ranks write ranges of one file, so the writer is StreamShard's own. The library reads.

[Note: checksums]
A checkpoint records one CRC-32 for each `CHUNK_BYTES` of a file; the last chunk may be shorter. So ranks verify equal
shares of all bytes, however few files there are. 32 bits are enough against damage: one flipped bit, or any 32 in a
row, always change the checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from errno import EINVAL
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from streamshard.config import is_utf8
from streamshard.errors import CheckpointError

CHUNK_BYTES = 8 << 20
"""Bytes per checksum, and the extra memory of a copy from a device or into another dtype."""

MAX_TEXT_BYTES = 1 << 30
"""The largest manifest, index or metadata. A manifest of ten thousand ranks has 0.2 GB."""

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
"""The file names that a manifest or metadata may have: files in its own directory, not hidden."""

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"

# In the order of a file's tensors.
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


# ------------------------------------------------------------------------------------------------ layout


class FileLayout(NamedTuple):
    """A file, down to the byte.

    Attributes:
        name: its name in the directory.
        header: its first bytes, with the header's length.
        places: by tensor, the byte of its first element in the file, and its dtype.
        size_bytes: of the whole file.
    """

    name: str
    header: bytes
    places: dict[str, tuple[int, torch.dtype]]
    size_bytes: int


Held = Mapping[str, Sequence[tuple[int, torch.Tensor]]]
"""By tensor, a rank's ranges of it: the first element, and the data, 1-D contiguous, on any device."""


class FileRecord(NamedTuple):
    """A file of a checkpoint. See [Note: checksums].

    Attributes:
        name: its name in the directory.
        size_bytes: of the whole file.
        crc32: one checksum for each chunk, in eight hexadecimal digits.
    """

    name: str
    size_bytes: int
    crc32: list[str]


def lay_out(name: str, tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """Plan a file with all of `tensors`, as `save_pretrained` would write it.

    Args:
        name: of the file.
        tensors: by name. Only their shapes and dtypes count, so they may be on the meta device.

    Raises:
        CheckpointError: safetensors has no such dtype, or cannot hold a name.
    """
    contents: dict[str, Any] = {_METADATA: {"format": "pt"}}
    places: dict[str, tuple[int, torch.dtype]] = {}
    position = 0
    for each, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{each!r} is {tensor.dtype}, which safetensors cannot hold")
        if each == _METADATA or not is_utf8(each):
            limits = f"safetensors files take names in UTF-8, except {_METADATA!r}"
            raise CheckpointError(f"a tensor is named {each!r}: {limits}. Give it another name in the model")
    order = [*_DTYPE_NAMES]
    for each, tensor in sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        offsets = [position, position + tensor.nbytes]
        contents[each] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        places[each], position = (position, tensor.dtype), offsets[1]
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    places = {tensor: (len(header) + start, dtype) for tensor, (start, dtype) in places.items()}
    return FileLayout(name, header, places, len(header) + position)


# ------------------------------------------------------------------------------------------------ writing


def write_file(directory: Path, layout: FileLayout, held: Held) -> FileRecord:
    """Write a file and sync it to the disk. Extra memory: see `in_chunks`.

    Args:
        directory: the file's directory.
        layout: made by `lay_out`.
        held: all tensors of the file, with all their elements.

    Raises:
        CheckpointError: the file cannot be written.
    """
    sums, crc32 = [], 0
    with opened(directory / layout.name) as descriptor:
        for position, data in in_chunks(layout, held):
            write_all(descriptor, data, position)
            while data:
                part = data[: CHUNK_BYTES - position % CHUNK_BYTES]
                crc32 = zlib.crc32(part, crc32)
                data, position = data[len(part) :], position + len(part)
                if position % CHUNK_BYTES == 0 or position == layout.size_bytes:
                    sums.append(f"{crc32:08x}")
                    crc32 = 0
    return FileRecord(layout.name, layout.size_bytes, sums)


def write_ranges(directory: Path, layout: FileLayout, held: Held, *, is_first: bool) -> int:
    """Write this rank's ranges of a file, and sync them to the disk. Extra memory: see `in_chunks`.

    Args:
        directory: the file's directory. Another rank may have made the file.
        layout: made by `lay_out`.
        held: this rank's ranges of the file's tensors.
        is_first: write the header too.

    Returns:
        The number of written bytes.
    """
    total = 0
    if is_first or any(held[name] for name in layout.places):
        with opened(directory / layout.name) as descriptor:
            for position, data in in_chunks(layout, held, has_header=is_first):
                write_all(descriptor, data, position)
                total += len(data)
    return total


def in_chunks(layout: FileLayout, held: Held, *, has_header: bool = True) -> Iterator[tuple[int, memoryview]]:
    """The bytes to write to a file, in order: the place of each chunk, and its bytes, which the next chunk overwrites.

    Extra memory: `CHUNK_BYTES` for data on a device or in another dtype than the file's, else none.
    """
    if has_header:
        yield 0, memoryview(layout.header)
    for name, (offset, dtype) in layout.places.items():
        for start, data in held[name]:
            numel, position = CHUNK_BYTES // dtype.itemsize, offset + start * dtype.itemsize
            is_ready = data.device.type == "cpu" and data.dtype is dtype
            staging = None if is_ready else torch.empty(min(numel, data.numel()), dtype=dtype)
            for part in data.detach().split(numel):
                yield position, bytes_of(part if staging is None else staging[: part.numel()].copy_(part))
                position += part.numel() * dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def digest_of(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of `tree`, which is JSON, and of the names, dtypes, shapes and values of `tensors`."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of a file for writing, made if it is not there. Synced to the disk when the context ends.

    Raises:
        CheckpointError: the system has raised an error, inside the context too; names the file.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
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
        if error.errno != EINVAL:  # some file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------ reading


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Opening a pipe would wait for its writer, and a device may have no end.

    Raises:
        CheckpointError: `path` is a pipe, a device or a directory, or a link to one.
        OSError: the system cannot open it.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")

    return open(path, "rb", opener=opener)


def read_text(path: Path) -> bytes:
    """The content of a manifest, an index or metadata. A sparse file of a petabyte takes no space on the disk.

    Raises:
        CheckpointError: `path` is not a regular file, or too large.
        OSError: the system cannot read it.
    """
    with open_regular(path) as file:
        if (n_bytes := os.fstat(file.fileno()).st_size) > MAX_TEXT_BYTES:
            raise CheckpointError(f"{path} has {n_bytes} bytes, wanted at most {MAX_TEXT_BYTES}")
        return file.read(n_bytes)


class OpenFiles:
    """The safetensors files of a directory. The library maps each file into memory at the first read.

    A mapped file stays readable if another process replaces or deletes it, and takes no file descriptor.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._opened: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """The library's ``safe_open`` of a file.

        Raises:
            CheckpointError: the file is missing, damaged, or not a safetensors file.
        """
        if name not in self._opened:
            path = self.root / name
            try:
                open_regular(path).close()  # `safe_open` would wait for the writer of a pipe
                self._opened[name] = safe_open(path, framework="pt")
            except (OSError, ValueError, SafetensorError) as error:  # from None: a traceback may hold commands
                raise CheckpointError(f"cannot read {path}: {error}") from None
        return self._opened[name]

    def stored(self, file: str, name: str) -> torch.Tensor:
        """A tensor as stored: a view of the mapped file, for reading only.

        Raises:
            CheckpointError: the file does not have the tensor, or torch does not have its dtype.
        """
        opened = self.open(file)
        try:
            tensor: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, AttributeError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"cannot read {name!r} of {self.root / file}: {error}") from None
        return tensor


def copy_range(stored: torch.Tensor, start: int, target: torch.Tensor) -> None:
    """Copy elements [start, start + n) of `stored`, flattened, into `target`. Extra memory: `CHUNK_BYTES`.

    Args:
        stored: a view of a mapped file.
        start: first element.
        target: [n] 1-D contiguous, any device and dtype.
    """
    flat, target = stored.view(-1), target.detach()
    numel = CHUNK_BYTES // stored.dtype.itemsize
    for done in range(0, target.numel(), numel):
        part = target[done : done + numel]
        part.copy_(flat[start + done : start + done + part.numel()])


def verify_files(root: Path, records: Sequence[FileRecord], part: int, parts: int) -> None:
    """Compare an equal share of the files' bytes, number `part` of `parts`, with their checksums.

    Raises:
        CheckpointError: names a file whose bytes have changed.
        OSError: the system cannot read a file.
    """
    chunks = [(record, number) for record in records for number in range(len(record.crc32))]
    for record, number in chunks[len(chunks) * part // parts : len(chunks) * (part + 1) // parts]:
        path = root / record.name
        with open_regular(path) as file:
            file.seek(number * CHUNK_BYTES)
            found = f"{zlib.crc32(file.read(CHUNK_BYTES)):08x}"
        if found != record.crc32[number]:
            raise CheckpointError(f"{path} is damaged: its checksums differ from those in the manifest")
