"""The files of one checkpoint, read by slices of the tensors that are spread over them."""

from __future__ import annotations

import contextlib
import itertools
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


class PieceFiles:
    """The files of one checkpoint, opened when they are needed."""

    def __init__(self, path: Path, manifest: Manifest, opened: contextlib.ExitStack) -> None:
        self._path = path
        self._manifest = manifest
        self._opened = opened
        self._files: dict[int, StoredDirectory] = {}

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
            stored = self._file(piece.file).tensors.get(read.name)
            if stored is None or stored.shape != (piece.stop - piece.start,):
                raise CheckpointError(
                    f"{self._manifest.files[piece.file].name} does not hold what it should of {read.name!r}"
                )
            read_range(stored, first - piece.start, read.target[first - read.start : last - read.start])

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, in new CPU memory."""
        record = self._manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self.read(Read(name, 0, whole.view(-1)))
        return whole

    def open(self, reads: Iterable[Read]) -> None:
        """Open what will be read, whatever is put in its place afterwards.

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
        for file in self._files.values():
            file.check_unchanged()

    def _file(self, number: int) -> StoredDirectory:
        if number not in self._files:
            self._files[number] = self._opened.enter_context(read_file(self._path / self._manifest.files[number].name))
        return self._files[number]


def _open(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
