"""Thousands of ranks, parameters or layers: a rank's work does not grow with the ranks, and in proportion to the rest.

One rank is here: torch's "fake" backend, whose collectives do nothing, is the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import streamshard
from streamshard import (
    ConfigError,
    Precision,
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    load_safetensors,
    plan,
    save_checkpoint,
)
from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Collective
from streamshard.optim import WholeParameterOptimizer
from tests.counts import Operators, engine_inside, heard_collectives
from tests.models import DIM, Layer, NormStack, Stack
from tests.ranks import RankContext, on_ranks
from tests.scenarios import BF16
from tests.simulated import simulated_device
from tests.test_meta_device import on_meta


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
            model: Any = StreamShard(Stack((64,) * 6), precision=precision)
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
        assert report.held_bytes["main weights"] < 4 * (report.numel / world_size + 6 * 16)  # as far as padding lets
        return {
            "construction": sum(building.counts.values()),
            "step": dict(step.counts),
            "collectives": {collective: len(units) for collective, units in heard.items() if units},
            "slots": engine.plan,
            "buffers": Counter(category for category, _ in engine.ledger.buffers),
        }


@pytest.mark.parametrize("precision", [BF16, Precision(sums_in_rank_order=True)])
def test_nothing_that_a_rank_does_grows_with_the_number_of_ranks(precision: Precision) -> None:
    """Operators of construction and of a step, collectives, slots, buffers. Shards shrink with the number of ranks.

    Only a sum in rank order has an addition for each rank.
    """
    _counts_of_a_step(8, precision)  # what is made once in a process
    counts = _counts_of_a_step(8, precision)
    on_many = _counts_of_a_step(4096, precision)
    of_step, of_step_on_many = (cast(dict[str, int], each["step"]) for each in (counts, on_many))
    if precision.sums_in_rank_order:  # six units; the first chunk is copied
        of_step["aten.add_.Tensor"] += 6 * (4096 - 8)
    for operator, count in of_step_on_many.items():  # smaller shards are reduced in fewer parts
        assert count <= of_step[operator], operator
    del on_many["step"]
    assert on_many == {name: count for name, count in counts.items() if name != "step"}
    # Six units are gathered in forward; in backward the last layers are still there. Flags are reduced.
    assert counts["collectives"] == {
        Collective.ALL_GATHER: 6 + 3,
        Collective.REDUCE_SCATTER: 6,
        Collective.ALL_REDUCE: 1,
    }


@pytest.mark.parametrize("has_statistics", [False, True])
def test_no_host_waits_for_another_one_in_a_steady_step(has_statistics: bool) -> None:
    """No objects, no votes. Batch norm's statistics take two broadcasts, on the device. A layer is never used."""
    with _one_of(4096), simulated_device():
        stack: Any = NormStack() if has_statistics else Stack()
        stack.unused = Layer()
        stack.register_buffer("table", torch.ones(DIM), persistent=False)
        model: Any = StreamShard(stack, precision=BF16)
        recorder = engine_inside(model).ranks.recorder
        sent: Counter[RecordKind] = Counter()
        for step in range(14):
            if step == 12:
                sent.clear()
            with mock.patch.object(recorder.log, "add", lambda kind, tag=0: sent.update([kind])):
                model(torch.ones(2, DIM)).float().sum().backward()
            if step == 0:
                assert sent[RecordKind.MEETING] > 0
    control = {kind: sent[kind] for kind in (RecordKind.MEETING, RecordKind.BROADCAST, RecordKind.SUM) if sent[kind]}
    assert control == ({RecordKind.BROADCAST: 4} if has_statistics else {})


def test_sums_in_16_bits_over_more_than_256_ranks_are_refused() -> None:
    """A sum of more than 256 equal bf16 numbers stops growing."""
    precision = Precision(reduce_dtype=torch.bfloat16)
    with _one_of(256), simulated_device():
        StreamShard(Stack((8,) * 3), precision=precision)
    with _one_of(257), simulated_device(), pytest.raises(ConfigError, match=r"bfloat16 on 257 ranks.*float32"):
        StreamShard(Stack((8,) * 3), precision=precision)


FEW = 14
# Loops in comm/ ask until other ranks have come. torch's load_state_dict looks at all names for each layer.
NOT_COUNTED = (str(Path(streamshard.__file__).parent / "comm"), nn.modules.module.__file__)


class _Layer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(count)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.stack(list(self.scales)).sum(0)


def _parameters(count: int) -> nn.Module:
    return nn.Sequential(*[_Layer(count) for _ in range(2)])


def _layers(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])


class _Calls(dict[str, Counter[str]]):
    """By action, counts calls of each function, of Python and C, by where it is, or its caller."""

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        counts = self[name] = Counter[str]()

        def count(frame: Any, event: str, argument: Any) -> None:
            code = frame.f_code
            if event in ("call", "c_call") and not code.co_filename.startswith(NOT_COUNTED):
                called = getattr(argument, "__name__", "") if event == "c_call" else ""
                counts[f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {called}"] += 1

        sys.setprofile(count)
        try:
            return action()
        finally:
            sys.setprofile(None)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _everything(build: Callable[[int], nn.Module], count: int, directory: Path) -> dict[str, Counter[str]]:
    calls = _Calls()
    model: Any = calls("shard", lambda: StreamShard(build(count)))
    optimizers = [torch.optim.AdamW(model.parameters()), WholeParameterOptimizer(model.parameters(), torch.optim.AdamW)]
    for number, optimizer in enumerate(optimizers):
        kind, path = type(optimizer).__name__, directory / f"{count}-{number}"
        _step(model, optimizer)
        calls(f"{kind}: step", lambda: _step(model, optimizer))  # noqa: B023  # called at once
        calls(f"{kind}: save", lambda: save_checkpoint(path, model, optimizer))  # noqa: B023
        calls(f"{kind}: load", lambda: load_checkpoint(path, model, optimizer))  # noqa: B023
        state = calls(f"{kind}: collect", lambda: full_optimizer_state_dict(model, optimizer))  # noqa: B023
        calls(f"{kind}: scatter", lambda: load_optimizer_state_dict(model, optimizer, state))  # noqa: B023
    calls("collect", lambda: model.load_state_dict(model.full_state_dict(rank0_only=False)))
    calls("export", lambda: export_safetensors(model, directory / f"{count}-files"))
    fresh: Any = calls("shard on meta", lambda: StreamShard(on_meta(lambda: build(count))))
    calls("fill", lambda: load_safetensors(fresh, directory / f"{count}-files"))
    calls("print", lambda: repr(fresh))
    calls("plan", lambda: plan(lambda: build(count), 8))
    return calls


@on_ranks()
@pytest.mark.parametrize(("world_size", "build"), [(1, _layers), (2, _layers), (2, _parameters)])
def test_twice_the_parameters_take_less_than_three_times_the_calls(
    context: RankContext, tmp_path: Path, build: Callable[[int], nn.Module]
) -> None:
    """Of any function, so that a loop inside a loop shows before it takes time."""
    few, many = (_everything(build, count, tmp_path) for count in (FEW, 2 * FEW))
    for action, counts in many.items():
        grown = {each: (few[action][each], counts[each]) for each in counts}
        too_many = {each: two for each, two in grown.items() if two[1] > max(3 * two[0], 4 * FEW)}
        assert not too_many, f"{action}: {too_many}"
