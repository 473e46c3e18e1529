"""Thousands of ranks, one of which is here: torch's "fake" backend, whose collectives do nothing, is the rest."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamshard import ConfigError, Precision, StreamShard
from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Collective
from tests.models import Stack
from tests.reference import Operators, engine_inside, heard_collectives
from tests.scenarios import BF16
from tests.simulated import simulated_device


@contextlib.contextmanager
def _one_of(world_size: int, rank: int = 3) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _counts_of_a_step(world_size: int, precision: Precision) -> dict[str, object]:
    with _one_of(world_size), simulated_device():
        torch.manual_seed(0)
        with Operators() as building:
            model: Any = StreamShard(Stack((64,) * 9), precision=precision)
        engine = engine_inside(model)
        assert isinstance(engine.ranks.transport, NcclTransport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with Operators() as step, heard_collectives(engine) as heard:
                model(torch.ones(2, 64)).float().sum().backward()
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        report = model.memory_report()
        assert report.held_bytes["main weights"] < 4 * (report.numel / world_size + 9 * 16)  # as far as padding lets
        return {
            "construction": sum(building.counts.values()),
            "step": dict(step.counts),
            "collectives": {collective: len(units) for collective, units in heard.items() if units},
            "slots": engine.plan,
            "buffers": Counter(category for category, _ in engine.ledger.buffers),
        }


@pytest.mark.parametrize(
    "precision", [BF16, Precision(sums_in_rank_order=True)], ids=["the backend's sums", "sums in rank order"]
)
def test_nothing_that_a_rank_does_grows_with_the_number_of_ranks(precision: Precision) -> None:
    """Operators of construction and of a step, collectives, slots, buffers. Shards shrink with the number of ranks.

    Only a sum in rank order has an addition for each rank.
    """
    _counts_of_a_step(8, precision)  # what is made once in a process
    counts = _counts_of_a_step(8, precision)
    on_many = _counts_of_a_step(4096, precision)
    of_step, of_step_on_many = (cast(dict[str, int], each["step"]) for each in (counts, on_many))
    if precision.sums_in_rank_order:  # nine units; the first chunk is copied
        of_step["aten.add_.Tensor"] += 9 * (4096 - 8)
    for operator, count in of_step_on_many.items():  # smaller shards are reduced in fewer parts
        assert count <= of_step[operator], operator
    del on_many["step"]
    assert on_many == {name: count for name, count in counts.items() if name != "step"}
    # Nine units are gathered in forward; in backward the last layers are still there. Flags are reduced.
    wanted = {Collective.ALL_GATHER: 9 + 6, Collective.REDUCE_SCATTER: 9, Collective.ALL_REDUCE: 1}
    assert counts["collectives"] == wanted


class _WithBuffers(nn.Module):
    def __init__(self, *, has_statistics: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.norm = nn.BatchNorm1d(64) if has_statistics else nn.Identity()
        self.register_buffer("table", torch.ones(64), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            hidden = layer(hidden * self.table)
        return self.norm(hidden)


@pytest.mark.parametrize("has_statistics", [False, True])
def test_no_host_waits_for_another_one_in_a_steady_step(has_statistics: bool) -> None:
    """No objects, no votes. Batch norm's statistics take two broadcasts, on the device. A layer is never used."""
    with _one_of(4096), simulated_device():
        model: Any = StreamShard(_WithBuffers(has_statistics=has_statistics), precision=BF16)
        recorder = engine_inside(model).ranks.recorder
        sent: Counter[RecordKind] = Counter()
        for step in range(14):
            if step == 12:
                sent.clear()
            with mock.patch.object(recorder.log, "add", lambda kind, tag=0: sent.update([kind])):
                model(torch.ones(2, 64)).float().sum().backward()
            if step == 0:
                assert sent[RecordKind.MEETING] > 0
    control = {kind: sent[kind] for kind in (RecordKind.MEETING, RecordKind.BROADCAST, RecordKind.SUM)}
    assert {kind: count for kind, count in control.items() if count} == (
        {RecordKind.BROADCAST: 4} if has_statistics else {}
    )


def test_sums_in_16_bits_over_more_than_256_ranks_are_refused() -> None:
    """A sum of more than 256 equal bf16 numbers stops growing."""
    precision = Precision(reduce_dtype=torch.bfloat16)
    with _one_of(256), simulated_device():
        StreamShard(Stack((8,) * 3), precision=precision)
    with _one_of(257), simulated_device(), pytest.raises(ConfigError, match=r"bfloat16 on 257 ranks.*float32"):
        StreamShard(Stack((8,) * 3), precision=precision)
