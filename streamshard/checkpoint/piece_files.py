"""The files of one checkpoint, read by slices of the tensors that are spread over them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import torch

from streamshard.checkpoint.checksum import Extent, join_extents, read_extent, share_of, shown
from streamshard.checkpoint.manifest import Manifest, PieceRecord, read_manifest
from streamshard.checkpoint.piece_file import read_range
from streamshard.checkpoint.restore import Read
from streamshard.checkpoint.stored_files import StoredDirectory, read_file
from streamshard.checkpoint.writer import Alone, gather_from_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.errors import CheckpointError
from streamshard.log import progress

__all__ = ["PieceFiles"]


_OPENED_AT_MOST = 64  # files; `ulimit -n` is often 1024 or 256, for the whole process


class PieceFiles(contextlib.AbstractContextManager["PieceFiles"]):
    """The files of one checkpoint, opened when they are needed, a bounded number at a time. Leaving it closes them.

    Where all of them are open, whoever deletes or replaces the checkpoint changes nothing in what is read. Where there
    are more, a file that has to be opened again must still be the same one.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._headers: dict[int, StoredDirectory] = {}  # of all files that were opened; closed
        self._opened: dict[int, FileIO] = {}  # the one that was used last comes last

    def __exit__(self, *args: object) -> None:
        for file in self._opened.values():
            file.close()

    def verify(self, ranks: Ranks | Alone) -> None:
        """Compare the files with their checksums; each rank reads an equal share of all bytes.

        Raises:
            CheckpointError: on all ranks, names the file that is damaged.
        """
        records = self._manifest.files
        sizes = [record.size_bytes for record in records]

        def read() -> list[Extent]:
            found = []
            for number, start, stop in share_of(sizes, ranks.number, ranks.total_size):
                with _open(self._path / records[number].name) as file:
                    found.append(read_extent(file, number, start, stop, sizes[number], advance))
            return found

        total = sum(sizes) // ranks.total_size
        with progress(f"verifying {self._path.name}", total, shows=ranks.is_first) as advance:
            shares = gather_from_all_ranks(ranks, f"verify {self._path}", read)
        for record, crc32 in zip(records, join_extents(itertools.chain(*shares), sizes), strict=True):
            if shown(crc32) != record.crc32:
                raise CheckpointError(f"{self._path / record.name} is damaged: it is not what its checksum says")

    def read(self, read: Read) -> None:
        """Fill its target.

        Raises:
            CheckpointError: names what is not where the manifest says.
        """
        for piece, first, last in self._overlaps(read):
            file = self._file(piece.file)
            stored = self._headers[piece.file].tensors.get(read.name)
            wanted = (piece.stop - piece.start,), self._manifest.tensors[read.name].torch_dtype
            if stored is None or (stored.shape, stored.dtype) != wanted:
                raise CheckpointError(f"{os.fsdecode(file.name)} does not hold what it should of {read.name!r}")
            stored = stored._replace(file=file)
            read_range(stored, first - piece.start, read.target[first - read.start : last - read.start])

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, in new CPU memory."""
        record = self._manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.torch_dtype)
        self.read(Read(name, 0, whole.view(-1)))
        return whole

    def open(self, reads: Iterable[Read]) -> None:
        """Open what will be read, as far as that many files may be open.

        Raises:
            CheckpointError: something was put in the checkpoint's place since its manifest was read.
        """
        for read in reads:
            for piece, _, _ in self._overlaps(read):
                self._file(piece.file)
        if read_manifest(self._path) != self._manifest:
            raise CheckpointError(f"{self._path} was replaced while it was being loaded: load again")

    def _overlaps(self, read: Read) -> Iterator[tuple[PieceRecord, int, int]]:
        """Pieces that hold some of what is read, and which elements [first, last) of the whole."""
        stop = read.start + read.target.numel()
        for piece in self._manifest.tensors[read.name].pieces:
            first, last = max(piece.start, read.start), min(piece.stop, stop)
            if first < last:
                yield piece, first, last

    def check_unchanged(self) -> None:
        """Raise a CheckpointError if somebody has written into one of the files."""
        for number in self._opened:
            self._check_unchanged(number)

    def _file(self, number: int) -> FileIO:
        """Open until `_OPENED_AT_MOST` others have been asked for."""
        file = self._opened.pop(number, None)
        if file is None:
            while len(self._opened) >= _OPENED_AT_MOST:
                oldest = next(iter(self._opened))
                self._check_unchanged(oldest)
                self._opened.pop(oldest).close()
            path = self._path / self._manifest.files[number].name
            if number not in self._headers:
                with read_file(path) as header:
                    self._headers[number] = header
            file = self._opened[number] = _open(path)
            if _identity(file) != self._headers[number].identity[0]:
                raise CheckpointError(f"{self._path} was replaced while it was being loaded: load again")
        self._opened[number] = file
        return file

    def _check_unchanged(self, number: int) -> None:
        if _identity(self._opened[number]) != self._headers[number].identity[0]:
            raise CheckpointError(f"{self._path / self._manifest.files[number].name} was written to while it was read")


def _identity(file: FileIO) -> tuple[int, int, int]:
    """As in `StoredDirectory.identity`."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} was deleted while the checkpoint was being read") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
