"""What a run that is out of memory says. `memory_report` itself: `tests/planning/test_memory.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from streamshard import CommunicationError, StreamShard, StreamShardError
from streamshard.core.slots import Ledger
from streamshard.errors import HostMemoryError, log
from streamshard.pinned import PinnedMemory
from streamshard.tools.memory import _report_at_exit
from tests.launched import free_port, launched_environment
from tests.models import TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.simulated import simulated_device

OUT_OF_MEMORY = """
import os, torch
from streamshard import StreamShard
from tests.models import TinyLM, next_token_loss, token_batch

def train():
    model = StreamShard(TinyLM())
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    tokens = token_batch(0, 0)
    next_token_loss(model(tokens), tokens).backward()

train()
"""


@pytest.mark.ranks
def test_a_process_that_ends_out_of_memory_says_what_the_engine_holds() -> None:
    """After the traceback: the bytes by category, and what makes room. The other rank's error names this one."""
    ranks, port = [], free_port()
    for rank in range(2):
        environment = {**os.environ, **launched_environment(rank, 2, port)}
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([sys.executable, "-c", OUT_OF_MEMORY], env=environment, **streams))
    other, told = (process.communicate()[1] for process in ranks)
    assert [process.returncode for process in ranks] == [1, 1]
    assert "rank 1 has failed: its process ends with OutOfMemoryError: CUDA out of memory. Tried to" in other
    assert "gloo" not in other and "what makes room" not in other
    raised, report = told.split("Tried to allocate 2.00 GiB\n")[-2:]
    assert "OutOfMemoryError" in raised
    assert report.startswith("rank 1: out of memory. StreamShard holds:\nmemory of one rank of 2; ")
    assert "main weights" in report and "total" in report
    assert report.endswith("what makes room: fewer slots, more ranks, smaller batches, activation checkpointing\n")


@on_ranks(2)
def test_a_rank_without_memory_to_shard_a_model_says_what_it_would_hold(context: RankContext) -> None:
    """It raises its own error. The others name this rank, and do not show what gloo says about it."""
    allocate, left = Ledger.allocate, [5]

    def allocate_little(self: Ledger, *args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0 and context.rank == 1 and self._streams.device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return allocate(self, *args, **kwargs)

    with (
        mock.patch.object(Ledger, "allocate", allocate_little),
        mock.patch.object(log, "error") as told,
        pytest.raises(RuntimeError) as caught,
    ):
        StreamShard(TinyLM(TinyConfig(depth=7)), grad_slots="all")
    if context.rank == 0:
        assert isinstance(caught.value, CommunicationError) and caught.value.__suppress_context__
        assert "rank 1 has failed: StreamShard(model) ended with OutOfMemoryError" in str(caught.value)
        told.assert_not_called()
    else:
        assert isinstance(caught.value, torch.OutOfMemoryError)
        text = told.call_args.args[1]
        assert "out of memory. StreamShard would hold:\nmemory of one rank of 2; " in text
        assert text.endswith("what makes room: fewer slots, more ranks, smaller batches, activation checkpointing")


def test_an_error_that_quotes_another_rank_is_not_this_ranks_memory() -> None:
    error = CommunicationError("rank 1 has failed: [enforce fail at alloc_cpu.cpp] can't allocate memory")
    with mock.patch.object(log, "error") as told, mock.patch.object(sys, "last_value", error, create=True):
        _report_at_exit()
    told.assert_not_called()


@on_ranks(2)
def test_a_rank_that_cannot_pin_host_memory_says_what_it_would_hold(context: RankContext) -> None:
    """The others name this rank."""
    map_block = PinnedMemory._map

    def map_little(self: PinnedMemory, n_bytes: int) -> torch.Tensor:
        if context.rank == 1:
            raise self._failure(n_bytes, "out of memory")
        return map_block(self, n_bytes)

    with (
        simulated_device(),
        mock.patch.object(PinnedMemory, "_map", map_little),
        mock.patch.object(log, "error") as told,
        pytest.raises(StreamShardError) as caught,
    ):
        StreamShard(TinyLM(), offload="state")
    if context.rank == 0:
        assert "rank 1 has failed: StreamShard(model) ended with HostMemoryError" in str(caught.value)
        assert not any("what makes room" in str(call) for call in told.call_args_list)
    else:
        assert isinstance(caught.value, HostMemoryError)
        assert "out of memory. StreamShard would hold:" in told.call_args.args[1]
