"""Writing takes one chunk of memory, and survives failures and interruptions."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard.checkpoint import export as exports_module
from streamshard.checkpoint import safetensors_file, save
from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.export import export_shards
from streamshard.errors import CheckpointError
from streamshard.planning.layout import LocalRange
from streamshard.unit.shard import ParamShard
from tests.checkpoint.exporting import Plain, ThreadGroup, filled, names_in, on_threads, shards_for
from tests.families import llama

# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and ru_maxrss in KiB")
def test_export_needs_one_chunk_of_memory(tmp_path: Path) -> None:
    """Exporting 256 MiB in another dtype raises the peak of the process by less than three chunks."""
    numel = 64 << 20
    made = _one(numel, 0, numel)
    _write(tmp_path, _one(4, 0, 4), torch.bfloat16)  # what the first call loads is not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filler = torch.ones(max(before * 1024 - _resident_bytes(), 0) // 4 + 1)  # at the peak, so that more would show
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _write(tmp_path, made, torch.bfloat16)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert filler.numel() > 0
    assert (after - before) * 1024 <= 3 * safetensors_file.CHUNK_BYTES
    assert (tmp_path / "model.safetensors").stat().st_size > 2 * numel


def test_copies_of_pieces_share_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In few buffers, because each pinned allocation takes time and is rounded up. Copies are aligned."""
    monkeypatch.setattr(save, "_BUFFER_BYTES", 1024)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool)
    pieces = [
        Piece(f"{dtype} {numel}", (numel,), 0, torch.arange(numel).to(dtype))
        for numel in (0, 3, 1, 37, 100, 700)
        for dtype in dtypes
    ]
    copies = save.start_copies(pieces, torch.device("cpu"))()
    for piece, copy in zip(pieces, copies, strict=True):
        assert torch.equal(copy.data, piece.data)
        assert copy.data.dtype is piece.data.dtype
        assert copy.data.data_ptr() % copy.data.dtype.itemsize == 0
        piece.data.zero_()
    assert all(copy.data.any() for copy in copies if copy.data.numel() > 1)
    sizes = {copy.data.untyped_storage().data_ptr(): copy.data.untyped_storage().nbytes() for copy in copies}
    large = [piece.data.nbytes for piece in pieces if piece.data.nbytes > 1024]
    assert sum(sizes.values()) <= sum(piece.data.nbytes + 64 for piece in pieces)
    assert len(sizes) <= 2 * sum(sizes.values()) // 1024 + 1
    assert len([size for size in sizes.values() if size > 1024]) == len(large)


def _one(numel: int, start: int, stop: int) -> tuple[nn.Module, list[ParamShard]]:
    """A model of one parameter, of which a rank has a range."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(numel))
    (shard,) = shards_for(model, 0, 1)
    piece = nn.Parameter(shard.param.detach()[start:stop])
    return model, [shard._replace(local=LocalRange(start, stop, start), param=piece)]


def _write(
    directory: Path, made: tuple[nn.Module, list[ParamShard]], dtype: torch.dtype, group: ThreadGroup | None = None
) -> list[str]:
    group = group or ThreadGroup(0, threading.Barrier(1), [None])
    return export_shards(*made, group, directory, dtype, "1TB")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(("rank", "call"), [(0, "pwrite"), (1, "pwrite"), (2, "fsync"), (0, "replace")])
def test_failure_on_one_rank_is_raised_on_all(
    rank: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank's error names the rank that failed and the cause, and no file is left."""
    model = filled(llama)
    real = getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == f"rank {rank}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)

    def action(group: ThreadGroup) -> list[str]:
        return export_shards(model, shards_for(model, group.rank, 3), group, tmp_path, None, "3KB")

    outcomes = on_threads(3, action)
    monkeypatch.undo()
    for outcome in outcomes:
        assert isinstance(outcome, CheckpointError)
        assert f"rank {rank}: " in str(outcome)
        assert "No space left on device" in str(outcome)
    assert not [name for name in names_in(tmp_path) if name.endswith((".partial", "index.json", "model.safetensors"))]


def test_directory_that_other_ranks_do_not_see_is_named(tmp_path: Path) -> None:
    """Each host has a disk of its own: the message says that the directory must be shared."""
    model = filled(Plain)

    def action(group: ThreadGroup) -> list[str]:
        own = tmp_path / f"host{group.rank}"
        own.mkdir()
        return export_shards(model, shards_for(model, group.rank, 2), group, own, None, "5GB")

    for outcome in on_threads(2, action):
        assert isinstance(outcome, CheckpointError)
        assert "rank 1: " in str(outcome)
        assert "must be on storage all ranks share" in str(outcome)
    assert names_in(tmp_path / "host0") == []


def test_interrupt_removes_the_temporaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of writing leaves nothing behind, and is still an interrupt."""

    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(exports_module, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path, _one(4, 0, 4), torch.float32)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("ranges", [[(0, 2), (3, 4)], [(0, 3), (2, 4)], [(0, 3), (0, 3)]])
def test_ranges_with_a_gap_or_an_overlap_are_refused(ranges: list[tuple[int, int]], tmp_path: Path) -> None:
    """A file with a hole, or with bytes that two ranks have written, is not published."""

    def action(group: ThreadGroup) -> list[str]:
        return _write(tmp_path, _one(4, *ranges[group.rank]), torch.float32, group)

    for outcome in on_threads(2, action):
        assert isinstance(outcome, CheckpointError)
        assert "ranks did not write every byte" in str(outcome)
    assert names_in(tmp_path) == []
