"""A rank's file: what is written is what is read, chunk by chunk, and what its checksum says."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from streamshard.checkpoint import piece_file
from streamshard.checkpoint.piece_file import Piece, plan_piece_file, read_range, write_piece_file
from streamshard.checkpoint.stored_files import read_file
from streamshard.errors import CheckpointError


def test_files_are_written_and_read_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever dtype, in ranges, converted or not."""
    monkeypatch.setattr(piece_file, "CHUNK_BYTES", 16)
    data = {"a": torch.randn(13), "b": torch.arange(7), "c": torch.randn(9).bfloat16()}
    layout = plan_piece_file("rank", [Piece(name, (20,), 0, each) for name, each in data.items()])
    written: list[int] = []
    record = write_piece_file(tmp_path, layout, data.__getitem__, written.append)
    path = tmp_path / "rank"
    assert sum(written) == record.size_bytes == path.stat().st_size
    assert record.crc32 == f"{zlib.crc32(path.read_bytes()):08x}"
    with read_file(path) as stored:
        for name, each in data.items():
            for dtype in (each.dtype, torch.float64):
                target = torch.zeros(6, dtype=dtype)
                read_range(stored.tensors[name], 1, target)
                assert torch.equal(target, each[1:7].to(dtype)), (name, dtype)


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    """While it is read."""
    layout = plan_piece_file("rank", [Piece("a", (4,), 0, torch.ones(4))])
    write_piece_file(tmp_path, layout, lambda name: torch.ones(4), lambda count: None)
    with read_file(tmp_path / "rank") as stored:
        with open(tmp_path / "rank", "rb+") as file:
            file.truncate(layout.size_bytes - 4)
        with pytest.raises(CheckpointError, match="rank became shorter while it was read"):
            read_range(stored.tensors["a"], 0, torch.empty(4))


def test_two_pieces_of_one_name_are_refused() -> None:
    """One of them would be lost."""
    piece = Piece("a", (4,), 0, torch.ones(4))
    with pytest.raises(CheckpointError, match="two tensors are called 'a'"):
        plan_piece_file("rank", [piece, piece])
