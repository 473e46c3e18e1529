"""Safetensors files: plan a file to the byte, write it, verify it, and read tensors. No communication.

A file is an 8-byte little-endian header length, the header (JSON, padded with blanks to 8 bytes), then the tensors one
after another without gaps. Tensors are ordered by dtype, widest first, and then by name, as the safetensors library
orders them (safetensors/src/tensor.rs, `prepare`): equal tensors give equal files. The library writes a file in one
piece from one process. Here ranks write ranges of one file, so the writer is StreamShard's own. The library reads files
that it can map into memory. Of other files `_RangedFile` reads the header, and ranges of tensors.

[Note: checksums]
A checkpoint records one CRC-32 for each `CHUNK_BYTES` of a file; the last chunk may be shorter. So ranks verify equal
shares of all bytes, however few files there are. 32 bits are enough against damage: one flipped bit, or any 32 in a
row, always change the checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from streamshard.checkpoint.storage import CHUNK_BYTES, Location, Storage, storage_of
from streamshard.config import is_utf8
from streamshard.errors import CheckpointError, is_shortage

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
"""The file names that a manifest or metadata may have: files in its own directory, not hidden."""

_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
_BATCH_BYTES = 64 << 20  # of ranges that are read at once
_HEADER_BYTES = 1 << 16  # what is asked for first; most headers are shorter
_MAX_HEADER_BYTES = 100_000_000  # as in the library

# In the order of a file's tensors. Not all of the library's: its earlier versions do not read the others.
_IDS = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
_NAMES = (
    "uint64 int64 float64 float32 uint32 int32 bfloat16 float16 uint16 int16 float8_e4m3fn float8_e5m2 int8 uint8 bool"
)
_DTYPE_NAMES: dict[Any, str] = {getattr(torch, name): id_ for name, id_ in zip(_NAMES.split(), _IDS, strict=True)}


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
        CheckpointError: a tensor is complex or of another dtype that older versions of safetensors do not read, or a
            name cannot be held.
    """
    contents: dict[str, Any] = {_METADATA: {"format": "pt"}}  # as `save_pretrained` writes it
    places: dict[str, tuple[int, torch.dtype]] = {}
    position = 0
    for each, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{each!r} is {tensor.dtype}, which not every version of safetensors reads")
        if each == _METADATA or not is_utf8(each):
            limits = f"safetensors files take names in UTF-8, except {_METADATA!r}"
            raise CheckpointError(f"a tensor is named {each!r}: {limits}. Give it another name in the model")
    order = [*_DTYPE_NAMES]
    for each, tensor in sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        offsets = [position, position + tensor.nbytes]
        contents[each] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        places[each], position = (position, tensor.dtype), offsets[1]
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False).encode()  # to the byte as the library's
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    places = {tensor: (len(header) + start, dtype) for tensor, (start, dtype) in places.items()}
    return FileLayout(name, header, places, len(header) + position)


# ------------------------------------------------------------------------------------------------ writing


def write_file(directory: Location, layout: FileLayout, held: Held) -> FileRecord:
    """Write a file and sync it to the disk. Extra memory: see `in_chunks`.

    Args:
        directory: the file's directory.
        layout: made by `lay_out`.
        held: all tensors of the file, with all their elements.

    Raises:
        CheckpointError: the file cannot be written.
    """
    sums, crc32 = [], 0
    with storage_of(directory).writing(layout.name, layout.size_bytes) as write:
        for position, data in in_chunks(layout, held):
            write(data, position)
            while data:
                part = data[: CHUNK_BYTES - position % CHUNK_BYTES]
                crc32 = zlib.crc32(part, crc32)  # on the way: nothing is read again
                data, position = data[len(part) :], position + len(part)
                if position % CHUNK_BYTES == 0 or position == layout.size_bytes:
                    sums.append(f"{crc32:08x}")
                    crc32 = 0
    return FileRecord(layout.name, layout.size_bytes, sums)


def write_ranges(directory: Location, layout: FileLayout, held: Held, *, is_first: bool) -> int:
    """Write this rank's ranges of a file, and sync them to the disk. Extra memory: see `in_chunks`.

    Args:
        directory: the file's directory, on a file system. Another rank may have made the file.
        layout: made by `lay_out`.
        held: this rank's ranges of the file's tensors.
        is_first: write the header too.

    Returns:
        The number of written bytes.
    """
    total = 0
    if is_first or any(held[name] for name in layout.places):
        with storage_of(directory).writing(layout.name, layout.size_bytes) as write:
            for position, data in in_chunks(layout, held, has_header=is_first):
                write(data, position)
                total += len(data)
    return total


Place = tuple[int, str, int, int]
"""Bytes of a file that are in another file: the first byte, the other file's name, the first byte there, the number."""


def write_own_ranges(directory: Location, name: str, layouts: Sequence[FileLayout], held: Held) -> list[list[Place]]:
    """Write this rank's ranges of several files into one file, called `name`. Returns where they are, by file."""
    tensors = ((name, dtype) for layout in layouts for name, (_, dtype) in layout.places.items())
    size_bytes = sum(data.numel() * dtype.itemsize for name, dtype in tensors for _, data in held[name])
    places: list[list[Place]] = []
    end = 0
    with storage_of(directory).writing(name, size_bytes) as write:
        for layout in layouts:
            places.append([])
            for position, data in in_chunks(layout, held, has_header=False):
                write(data, end)
                places[-1].append((position, name, end, len(data)))
                end += len(data)
    return places


def join_ranges(directory: Location, layout: FileLayout, source: Location, places: Iterable[Place]) -> None:
    """Write a file whose bytes, except the header, are at `places` in the directory `source`.

    Raises:
        CheckpointError: some bytes are at several places, or at none.
    """
    storage = storage_of(source)
    in_order = [place for place in sorted(places) if place[-1]]  # `read` takes no empty range
    with storage_of(directory).writing(layout.name, layout.size_bytes) as write:
        write(layout.header, 0)
        for first in range(0, len(in_order), storage.chunks_per_read):
            several = in_order[first : first + storage.chunks_per_read]
            found = storage.read(*((name, start, start + n_bytes) for _, name, start, n_bytes in several))
            for place, data in zip(several, found, strict=True):
                write(data, place[0])


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
            staging = None if is_ready else torch.empty(min(numel, data.numel()), dtype=dtype, device="cpu")
            for part in data.detach().split(numel):
                yield position, bytes_of(part if staging is None else staging[: part.numel()].copy_(part))
                position += part.numel() * dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data  # NumPy has no bf16


def digest_of(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of `tree`, which is JSON, and of the names, dtypes, shapes and values of `tensors`."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ reading


class StoredTensor(NamedTuple):
    """A tensor in a file, for reading only.

    Attributes:
        shape, dtype: of the tensor.
        mapped: its elements, 1-D: a view of the mapped file. None: they are read from `place`.
        place: the storage, the file's name, and the byte of the first element.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mapped: torch.Tensor | None
    place: tuple[Storage, str, int] | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def range_of(self, start: int, numel: int) -> tuple[str, int, int]:
        """The file's name, and the range of bytes of elements [start, start + numel)."""
        assert self.place is not None
        first = self.place[2] + start * self.dtype.itemsize
        return self.place[1], first, first + numel * self.dtype.itemsize


def read_ranges(ranges: Sequence[tuple[StoredTensor, int, int]]) -> list[torch.Tensor]:
    """Elements [start, start + numel) of tensors in files of one directory: each tensor, its start, and numel above 0.

    Returns:
        1-D views of mapped files, or new tensors. Object storage is asked for all of them at once.
    """
    if not ranges or (place := ranges[0][0].place) is None:
        return [stored.mapped[start : start + numel] for stored, start, numel in ranges if stored.mapped is not None]
    found = place[0].read(*(stored.range_of(start, numel) for stored, start, numel in ranges))
    # A copy, because torch warns of memory that is for reading only.
    return [torch.frombuffer(bytearray(data), dtype=each[0].dtype) for each, data in zip(ranges, found, strict=True)]


class OpenFiles:
    """The safetensors files of a directory. The library maps each local file into memory at the first read.

    A mapped file stays readable if another process replaces or deletes it, and takes no file descriptor.

    Args:
        root: the directory.
    """

    def __init__(self, root: Location) -> None:
        self.root = root
        self.storage = storage_of(root)
        self._opened: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """The library's ``safe_open`` of a file, or a `_RangedFile`.

        Raises:
            CheckpointError: the file is missing, damaged, or not a safetensors file.
            Exception: there is no memory to map it; see `is_shortage`.
        """
        if name not in self._opened:
            try:
                if (path := self.storage.mapped(name)) is not None:
                    # It maps the file: if the disk fails while weights are copied, SIGBUS ends the process.
                    self._opened[name] = safe_open(path, framework="pt")
                else:
                    self._opened[name] = _RangedFile(self.storage, name, self.storage.size(name))
            except (OSError, *_MALFORMED) as error:  # from None: a traceback may hold commands
                if is_shortage(error):  # no damage: a load must not take an older checkpoint
                    raise
                raise CheckpointError(f"cannot read {self.root / name}: {error}") from None
        return self._opened[name]

    def stored(self, file: str, name: str) -> StoredTensor:
        """A tensor as stored.

        Raises:
            CheckpointError: the file does not have the tensor, or torch does not have its dtype.
            Exception: as `open`.
        """
        opened = self.open(file)
        try:
            if isinstance(opened, _RangedFile):
                return opened.stored[name]
            tensor: torch.Tensor = opened.get_tensor(name)
        except _MALFORMED as error:
            if is_shortage(error):
                raise
            raise CheckpointError(f"cannot read {name!r} of {self.root / file}: {error}") from None
        return StoredTensor(tuple(tensor.shape), tensor.dtype, tensor.view(-1))


# Whatever the library, Python and the checks below raise for files that anybody may have written.
_MALFORMED = (SafetensorError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)


class _RangedFile:
    """A safetensors file that cannot be mapped. The header is read at once, and checked as the library does.

    Args:
        storage: of its directory.
        name: of the file.
        size_bytes: of the file.

    Attributes:
        stored: its tensors, by name.
    """

    def __init__(self, storage: Storage, name: str, size_bytes: int) -> None:
        if size_bytes < _LENGTH_BYTES:
            raise ValueError(f"it has {size_bytes} bytes")
        (head,) = storage.read((name, 0, min(_HEADER_BYTES, size_bytes)))
        begin = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
        if size_bytes < begin or begin > _MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {begin} bytes of {size_bytes}")
        if len(head) < begin:
            head += storage.read((name, len(head), begin))[0]
        header: dict[str, Any] = dict(json.loads(head[_LENGTH_BYTES:begin]))
        header.pop(_METADATA, None)
        dtypes = {text: dtype for dtype, text in _DTYPE_NAMES.items()}
        self.stored: dict[str, StoredTensor] = {}
        position = begin
        for each, told in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            start, stop = (begin + offset for offset in told["data_offsets"])
            tensor = StoredTensor(tuple(told["shape"]), dtypes[told["dtype"]], None, (storage, name, start))
            are_sizes = all(type(size) is int and size >= 0 for size in tensor.shape)
            if start != position or not are_sizes or stop - start != tensor.numel * tensor.dtype.itemsize:
                raise ValueError(f"its header gives {each!r:.80} other bytes than its shape has, or leaves gaps")
            self.stored[each], position = tensor, stop
        if position != size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, and its header names {position}")

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return [*self.stored]


Copy = tuple[StoredTensor, int, torch.Tensor]
"""A copy to make: a tensor in a file, its first element to read, and the target, [n] 1-D contiguous, on any device."""


def copy_ranges(copies: Iterable[Copy]) -> None:
    """Copy elements [start, start + n) of tensors in files of one directory, flattened, into targets of n elements.

    Extra memory: `CHUNK_BYTES` for targets on a device or in another dtype; from object storage twice `_BATCH_BYTES`.
    """
    batch: list[Copy] = []

    def copy_batch() -> None:
        found = read_ranges([(stored, start, target.numel()) for stored, start, target in batch])
        for (_, _, target), data in zip(batch, found, strict=True):
            target.copy_(data)
        batch.clear()

    batch_bytes = 0
    for stored, first, whole in copies:
        numel = CHUNK_BYTES // stored.dtype.itemsize
        for done in range(0, whole.numel(), numel):
            batch.append((stored, first + done, whole.detach()[done : done + numel]))
            batch_bytes += batch[-1][2].numel() * stored.dtype.itemsize
            if batch_bytes >= _BATCH_BYTES:
                copy_batch()
                batch_bytes = 0
    copy_batch()


def verify_files(root: Location, records: Sequence[FileRecord], share: int, shares: int) -> None:
    """Compare an equal share of the files' bytes, number `share` of `shares`, with their checksums.

    Raises:
        CheckpointError: names a file whose bytes have changed.
        OSError: the system cannot read a file.
    """
    storage = storage_of(root)
    chunks = [(record, number) for record in records for number in range(len(record.crc32))]
    mine = chunks[len(chunks) * share // shares : len(chunks) * (share + 1) // shares]
    for first in range(0, len(mine), storage.chunks_per_read):
        several = mine[first : first + storage.chunks_per_read]
        ranges = [(each.name, at * CHUNK_BYTES, min((at + 1) * CHUNK_BYTES, each.size_bytes)) for each, at in several]
        found = [f"{zlib.crc32(data):08x}" for data in storage.read(*ranges)]
        for (record, number), crc32 in zip(several, found, strict=True):
            if crc32 != record.crc32[number]:
                told = "is damaged: its checksums differ from those in the manifest"
                raise CheckpointError(f"{root / record.name} {told}")
