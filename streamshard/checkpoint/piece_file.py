"""One rank's file of a checkpoint: the pieces of tensors that it owns, one after another, in the safetensors format.

Written once from front to back. Its checksum is made of the bytes that are written: nothing is read again.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from streamshard.checkpoint.checksum import shown
from streamshard.checkpoint.manifest import FileRecord
from streamshard.checkpoint.publish import write_all
from streamshard.checkpoint.safetensors_file import FileLayout, TensorSpec, lay_out
from streamshard.checkpoint.stored_files import StoredTensor
from streamshard.checkpoint.writer import CHUNK_BYTES
from streamshard.errors import CheckpointError

__all__ = ["Piece", "plan_piece_file", "read_range", "write_piece_file"]


class Piece(NamedTuple):
    """Elements [start, start + data.numel()) of the flattened tensor `name`.

    Attributes:
        name: of the tensor; on all ranks that have some of it the same.
        shape: of the whole.
        start: first element.
        data: [n] 1-D contiguous, any device.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()


def plan_piece_file(name: str, pieces: Sequence[Piece]) -> FileLayout:
    """Where in the file each of `pieces` will be.

    Raises:
        CheckpointError: the format has no name for a dtype, or two pieces are of one tensor.
    """
    specs = {piece.name: TensorSpec(piece.name, (piece.data.numel(),), piece.data.dtype) for piece in pieces}
    if len(specs) != len(pieces):
        repeated = next(
            piece.name for place, piece in enumerate(pieces) if piece.name in {p.name for p in pieces[:place]}
        )
        raise CheckpointError(f"two tensors are called {repeated!r}")
    return lay_out(name, list(specs.values()), {"format": "pt"})


def write_piece_file(
    directory: Path,
    layout: FileLayout,
    data_of: Callable[[str], torch.Tensor],
    advance: Callable[[int], object],
) -> FileRecord:
    """Write a new file, which is on the disk when this returns. Extra memory: `CHUNK_BYTES`, for devices only.

    Args:
        directory: where to.
        layout: made by `plan_piece_file`.
        data_of: a piece's data, by the name of its tensor; asked for once each, and let go before the next.
        advance: is told how many bytes were written, now and then.

    Raises:
        CheckpointError: names the file that cannot be written.
    """
    path = directory / layout.name
    checksum = position = 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for chunk in _chunks(layout, data_of):
                checksum = zlib.crc32(chunk, checksum)
                write_all(descriptor, chunk, position)
                position += len(chunk)
                advance(len(chunk))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return FileRecord(layout.name, layout.size_bytes, shown(checksum))


def read_range(stored: StoredTensor, start: int, target: torch.Tensor) -> None:
    """Fill `target` by elements [start, start + target.numel()) of `stored`, converted.

    Args:
        stored: 1-D.
        start: first element.
        target: [n] 1-D contiguous, any device and dtype; autograd hears of the change.

    Raises:
        CheckpointError: the file has become shorter.
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
        _read(stored, start + done, chunk[: part.numel()])
        if not is_direct:
            part.copy_(chunk[: part.numel()])


def _read(stored: StoredTensor, start: int, target: torch.Tensor) -> None:
    stored.file.seek(stored.offset + start * stored.dtype.itemsize)
    view = bytes_of(target)
    while view:
        count = stored.file.readinto(view)
        if not count:
            raise CheckpointError(f"{stored.file.name} became shorter while it was read")
        view = view[count:]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of whatever dtype."""
    if not tensor.numel():
        return memoryview(b"")
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _chunks(layout: FileLayout, data_of: Callable[[str], torch.Tensor]) -> Iterator[memoryview]:
    """The file's bytes. Each chunk is to be used before the next is asked for."""
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
