"""Models that are too large for a rank: peak memory of ranks while they get their weights, measured by the kernel."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from streamshard import StreamShard, init_weights, load_safetensors
from streamshard.checkpoint.safetensors_file import CHUNK_BYTES
from tests.launched import Launched
from tests.models import Stack
from tests.ranks import warnings_are_errors
from tests.reference import FP32
from tests.test_meta_device import on_meta

RANKS = 8
WIDTH, LAYERS = 1024, 28
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
MODEL_BYTES = LAYERS * LAYER_BYTES
ALLOWED_BYTES = MODEL_BYTES // RANKS + LAYER_BYTES + CHUNK_BYTES  # a shard, a unit, a chunk
SLACK = 1.5  # of allocators, threads and what is compiled at the first call


def make() -> Any:
    """The model. Frozen, because room for gradients is not what this is about."""
    return Stack((WIDTH,) * (LAYERS + 1)).requires_grad_(False)


def memory_bytes() -> int:
    """The memory of this process, without mapped files, whose pages the system can reclaim."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, found)) * 1024


@contextlib.contextmanager
def sampling_peak() -> Iterator[list[int]]:
    """The most memory that this process has inside, by samples."""
    peak, is_over = [memory_bytes()], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.0005):
            peak[0] = max(peak[0], memory_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def train(way: str, directory: Path) -> None:
    """One rank's process: prints how much more memory it had at most than at the start."""
    warnings_are_errors()
    torch.set_num_threads(1)
    init_weights(StreamShard(on_meta(Stack)))  # what is imported, connected and started once
    before = memory_bytes()
    with sampling_peak() as peak:
        if way == "rank 0":
            torch.manual_seed(0)
            model: Any = StreamShard(make() if os.environ["RANK"] == "0" else on_meta(make), precision=FP32)
        else:
            model = StreamShard(on_meta(make), precision=FP32)
            load_safetensors(model, directory)
            init_weights(model, seed=0)
    print(peak[0] - before)
    assert not any(param.isnan().any() for param in model.parameters())
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["loaded and initialised", "rank 0"])
def test_a_rank_needs_memory_for_its_shard_one_unit_and_one_chunk(way: str, tmp_path: Path) -> None:
    """While a model several times larger is loaded from files, initialised, or received from rank 0."""
    assert MODEL_BYTES > 4 * ALLOWED_BYTES
    if way != "rank 0":
        save_file(
            {name: torch.ones(p.shape) for name, p in on_meta(make).named_parameters()}, tmp_path / "model.safetensors"
        )
    ended = Launched(RANKS, tmp_path, train, way, tmp_path).end()
    assert {code for code, _ in ended} == {0}, ended
    first, *others = (int(told) for _, told in ended)
    assert max(others) < SLACK * ALLOWED_BYTES
    if way == "rank 0":
        assert MODEL_BYTES <= first < MODEL_BYTES + SLACK * ALLOWED_BYTES
    else:
        assert first < SLACK * ALLOWED_BYTES
