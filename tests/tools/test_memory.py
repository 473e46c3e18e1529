"""What a run that is out of memory says. `memory_report` itself: `tests/planning/test_memory.py`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from streamshard import CommunicationError, StreamShard
from streamshard.core import late_step
from streamshard.core.host import HostState
from streamshard.core.slots import Ledger
from streamshard.errors import log
from streamshard.tools.memory import _report_at_exit, explain_out_of_memory
from tests.counts import engine_inside
from tests.launched import Launched
from tests.models import TinyConfig, TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, lm_step
from tests.simulated import simulated_device


def _run_out_of_memory() -> None:
    """On rank 1. Then what a fresh interpreter runs at its end: forked processes end without it."""
    try:
        model, tokens = StreamShard(TinyLM()), token_batch(0, 0)
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        next_token_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        sys.last_value = error
        traceback.print_exc()
    atexit._run_exitfuncs()


@pytest.mark.ranks
def test_a_process_that_ends_out_of_memory_says_what_the_engine_holds(tmp_path: Path) -> None:
    """After the traceback: the bytes by category, and what makes room. The other rank's error names this one."""
    (_, other), (_, told) = Launched(2, tmp_path, _run_out_of_memory).end()
    assert "rank 1 has failed: its process ends with OutOfMemoryError: CUDA out of memory. Tried to" in other
    assert "gloo" not in other and "what makes room" not in other
    raised, report = told.split("Tried to allocate 2.00 GiB\n")[-2:]
    assert "OutOfMemoryError" in raised
    assert report.startswith("rank 1: out of memory. StreamShard holds:\nmemory of one rank of 2; ")
    assert "main weights" in report and "total" in report
    *_, room, plan = report.splitlines()
    assert room == "what makes room: fewer slots, more ranks, smaller batches, activation checkpointing"
    assert plan == "rank 1: out of memory: `streamshard plan` says what a rank needs and what fits"


@on_ranks(2)
def test_a_rank_without_memory_to_shard_a_model_raises_its_own_error(context: RankContext) -> None:
    """The others name this rank, and do not show what gloo says about it."""
    allocate, left = Ledger.allocate, [5]

    def allocate_little(self: Ledger, *args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0 and context.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return allocate(self, *args, **kwargs)

    with mock.patch.object(Ledger, "allocate", allocate_little), pytest.raises(RuntimeError) as caught:
        StreamShard(TinyLM(TinyConfig(depth=7)), grad_slots="all")
    if context.rank == 0:
        assert isinstance(caught.value, CommunicationError) and caught.value.__suppress_context__
        assert "rank 1 has failed: StreamShard(model) ended with OutOfMemoryError" in str(caught.value)
    else:
        assert isinstance(caught.value, torch.OutOfMemoryError)


@on_ranks(2)
def test_what_is_printed_names_the_place(context: RankContext) -> None:
    """In the report, the model and the log line. Without `offload` all is in one place, which has no name."""
    with simulated_device() as device, mock.patch.object(log, "info") as told:
        model: Any = StreamShard(TinyLM(), offload="state")
        resident: Any = StreamShard(TinyLM())
        memory = {"max_memory_allocated": lambda _: 0, "mem_get_info": lambda _: (0, 0)}
        with mock.patch.multiple(device, create=True, **memory):
            engines = engine_inside(model), engine_inside(resident)
            texts = [explain_out_of_memory(engine).splitlines()[-1] for engine in engines]
    assert ['offload="state"' in text for text in texts] == [False, True]
    report, other = model.memory_report(), resident.memory_report()
    rows = {" ".join(line.split()[:-4]): float(line.split()[-2]) for line in str(report).splitlines()[1:-1]}
    assert rows["device total"] == pytest.approx(report.total_bytes / report.numel, abs=0.005)
    assert rows["host total"] == pytest.approx(report.host_total_bytes / report.numel, abs=0.005)
    assert {line.split()[0] for line in str(other).splitlines()[1:-1]}.isdisjoint({"device", "host"})
    assert 'grad_slots=None; offload="state"; computes in' in repr(model) and "offload" not in repr(resident)
    assert len(told.call_args_list) == (2 if context.rank == 0 else 0)
    if context.rank == 0:
        (text, *values), _ = told.call_args_list[0]
        assert " 0.00 GiB per rank and 0.00 GiB of host memory; " in text % tuple(values)


@on_ranks(2)
def test_a_steps_chunks_take_the_bytes_of_the_report(context: RankContext) -> None:
    """Exactly: the two chunks that are there at once are full."""
    held, chunk = [0], HostState.chunk

    @contextlib.contextmanager
    def measured(self: HostState) -> Iterator[list[torch.Tensor]]:
        with chunk(self) as tensors:
            yield tensors
            there = {each.data_ptr(): each.nbytes for _, kept in self._chunks for each in kept}
            held.append(sum(there.values()))

    with (
        simulated_device(),
        mock.patch.object(late_step, "CHUNK_NUMEL", 100),
        mock.patch.object(HostState, "chunk", measured),
    ):
        model: Any = StreamShard(TinyLM(TinyConfig(vocabulary=160)), offload="state")  # no unit is padded
        optimizer = adamw(model)
        for step in range(3):
            lm_step(model, context.call(step))
            optimizer.step()
        assert max(held) == model.memory_report().chunk_bytes


def test_an_error_that_quotes_another_rank_is_not_this_ranks_memory() -> None:
    error = CommunicationError("rank 1 has failed: [enforce fail at alloc_cpu.cpp] can't allocate memory")
    with mock.patch.object(log, "error") as told, mock.patch.object(sys, "last_value", error, create=True):
        _report_at_exit()
    told.assert_not_called()
