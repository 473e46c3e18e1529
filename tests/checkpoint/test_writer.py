"""Writing takes one chunk of memory, and survives failures and interruptions."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from streamshard import StreamShard, export_safetensors
from streamshard.checkpoint import local_directory, storage
from streamshard.errors import CheckpointError
from tests.checkpoint.exporting import Plain, filled, names_in, sharded
from tests.families import llama
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32

# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and ru_maxrss in KiB")
@on_ranks(1)
def test_export_needs_one_chunk_of_memory(context: RankContext, tmp_path: Path) -> None:
    """Exporting 256 MiB in another dtype raises the peak of the process by less than three chunks."""
    model = _one(64 << 20)
    export_safetensors(_one(4), tmp_path, dtype=torch.bfloat16)  # what the first call loads is not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filler = torch.ones(max(before * 1024 - _resident_bytes(), 0) // 4 + 1)  # at the peak, so that more would show
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export_safetensors(model, tmp_path, dtype=torch.bfloat16)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert filler.numel() > 0
    assert (after - before) * 1024 <= 3 * storage.CHUNK_BYTES
    assert (tmp_path / "model.safetensors").stat().st_size > 2 * (64 << 20)


def _one(numel: int) -> Any:
    """A model of one parameter."""
    return StreamShard(nn.Sequential(nn.Linear(numel // 2, 2, bias=False)), ["0"], precision=FP32)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------ failures


@on_ranks(2)
@pytest.mark.parametrize(("rank", "call"), [(1, "pwrite"), (1, "fsync"), (0, "replace")])
def test_failure_on_one_rank_is_raised_on_all(context: RankContext, rank: int, call: str, tmp_path: Path) -> None:
    """Every rank's error names the rank that failed and the cause, and no file is left."""
    model = StreamShard(filled(llama))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if context.rank == rank else None
    failing = mock.Mock(wraps=getattr(os, call), side_effect=error)
    with mock.patch.object(os, call, failing), pytest.raises(CheckpointError, match=f"rank {rank}: .*No space left"):
        export_safetensors(model, tmp_path, max_shard_size="3KB")
    assert not [name for name in names_in(tmp_path) if name.endswith((".partial", "index.json", "model.safetensors"))]


@on_ranks(2)
def test_directory_that_other_ranks_do_not_see_is_named(context: RankContext, tmp_path: Path) -> None:
    """Each host has a disk of its own: the message says that the directory must be shared."""
    (tmp_path / "of rank 0").mkdir(exist_ok=True)

    def seen(self: local_directory.LocalDirectory, path: Path) -> None:
        self.path = Path(str(path).replace("of rank 0", f"of rank {context.rank}"))

    refused = pytest.raises(CheckpointError, match="rank 1: .*must be on storage all ranks share")
    with mock.patch.object(local_directory.LocalDirectory, "__init__", seen), refused:
        export_safetensors(sharded(filled(Plain)), tmp_path / "of rank 0")
    assert names_in(tmp_path / "of rank 0") == []
