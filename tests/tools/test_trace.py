"""The trace of steps: all computations, collectives and waits are in it, with their times; it changes no number."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streamshard import StreamShard
from streamshard import trace as record
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Fence, Observer, StepPart, StreamName, Work
from streamshard.errors import ShardingError
from streamshard.tools.spans import Span
from tests.compare import EXACT, assert_same, full_weights
from tests.counts import engine_inside
from tests.models import DIM, Stack, TinyConfig, TinyLM
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, lm_step, stack_step, train_stack
from tests.scenarios import BF16, sharded, train
from tests.simulated import SimulatedDevice, simulated_device

DEPTH = 5
COMM = StreamName.COMM


@on_ranks(2)
def test_the_trace_has_every_computation_and_every_collective_in_order(context: RankContext) -> None:
    """Each unit waits for its gather, and is reduced after its backward. The next gather is under way meanwhile."""
    model = StreamShard(TinyLM(TinyConfig(depth=DEPTH)), precision=BF16)
    optimizer = adamw(model)
    for number in range(3):
        with record(model) as trace:
            train_stack(model, optimizer, context, first=number, steps=1, step=lm_step)
    found = defaultdict[str, list[int | None]](list)
    for span in trace.spans:
        found[span.activity].append(span.unit)
    assert trace.units == ["the root unit", *(f"blocks.{k}" for k in range(DEPTH))]
    assert found["forward"] == list(range(DEPTH + 1)) and found["backward"] == [0, *range(DEPTH, 0, -1)]
    # The last two blocks are still in their slots when backward begins.
    assert Counter(found["all_gather"]) == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    assert sorted(found["reduce_scatter"]) == [*range(DEPTH + 1)]  # type: ignore[type-var]
    assert [len(found[one]) for one in ("optimizer", "flags")] == [1, 1]
    first: dict[str, dict[int | None, Span]] = {}
    for span in reversed(trace.spans):
        first.setdefault(span.activity, {})[span.unit] = span
    for unit in range(1, DEPTH + 1):
        gather, forward, backward, reduction = (
            first[one][unit] for one in ("all_gather", "forward", "backward", "reduce_scatter")
        )
        assert gather.stop_us <= forward.stop_us <= backward.start_us
        assert backward.stop_us <= reduction.start_us
        if unit > 1:
            assert gather.start_us < first["forward"][unit - 1].stop_us < forward.start_us
    for span in trace.spans:
        assert (span.stream is COMM) is (span.activity in ("all_gather", "reduce_scatter", "flags"))
        assert 0 <= span.start_us <= span.stop_us


# Ways of training in which what is traced begins, ends or is given up in another order.
UNEVEN = ("layers unused on some ranks", "evaluation between steps", "a backward that fails")


@on_ranks(2)
def test_tracing_changes_no_number(context: RankContext) -> None:
    for scenario in UNEVEN:
        plain, model = sharded(scenario, BF16), sharded(scenario, BF16)
        train(plain, scenario, context, steps=2)
        with record(model) as trace:
            train(model, scenario, context, steps=2)
        assert_same(full_weights(model), full_weights(plain), scenario, EXACT)
        assert {span.activity for span in trace.spans} >= {"forward", "backward", "reduce_scatter"}


@on_ranks(2)
def test_a_saved_trace_shows_all_ranks_in_chromes_format(context: RankContext, tmp_path: Path) -> None:
    """A process for each rank, a thread for each lane, all spans. A rank can also write its trace alone."""
    model = StreamShard(TinyLM(), precision=BF16)
    with record(model) as found:
        lm_step(model, context.call(0))
    found.save(tmp_path / "step.json")
    found.save(tmp_path / f"{context.rank}.json", all_ranks=False)
    both, own = (json.loads((tmp_path / f"{n}.json").read_text())["traceEvents"] for n in ("step", context.rank))
    processes = [(event["pid"], event["args"]["name"]) for event in both if event["name"] == "process_name"]
    assert processes == [(0, "rank 0 of 2 on cpu"), (1, "rank 1 of 2 on cpu")]
    threads = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    spans = [event for event in own if event["ph"] == "X"]
    assert [event for event in both if event["ph"] == "X" and event["pid"] == context.rank] == [
        {**event, "pid": context.rank} for event in spans
    ]
    rows = Counter("compute" if s.stream is StreamName.COMPUTE else s.activity for s in found.spans)
    assert Counter(threads[event["tid"]] for event in spans) == rows
    (backward,) = (event for event in spans if event["name"] == "backward blocks.0")
    (span,) = (span for span in found.spans if (span.activity, span.unit) == ("backward", 1))
    assert (backward["ts"], backward["dur"]) == (span.start_us, span.stop_us - span.start_us)


@on_ranks(1)
def test_a_saved_trace_shows_what_state_in_host_memory_needs(context: RankContext, tmp_path: Path) -> None:
    """Copies, the late step's chunks, and norms have rows of their own."""
    with simulated_device():
        model: Any = StreamShard(Stack((DIM,) * 4), precision=BF16, offload="state")
        optimizer = adamw(model)
        with record(model) as found:
            for number in range(2):
                stack_step(model, context.call(number))
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"compute", "copy", "step", "norms"}


def test_a_model_that_is_not_sharded_is_refused() -> None:
    for instrument in (record, detect_races):
        with pytest.raises(ShardingError, match="Stack is not sharded"), instrument(Stack()):  # type: ignore[operator]
            pass


FORWARD_MS, BACKWARD_MS, FAST_MS = 10.0, 20.0, 4.0


class _Costs(Observer):
    """Lets `clock` pass when a layer has computed, before observers that are added later hear of it."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.backward = 0

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        if part is StepPart.BACKWARD:
            self.clock.clock_ms += BACKWARD_MS if self.backward else 0.0
            self.backward = unit or 0
        elif part is StepPart.FORWARD and not begins and unit:
            self.clock.clock_ms += FORWARD_MS


@contextlib.contextmanager
def _taking(device: SimulatedDevice, collective: str, milliseconds: float) -> Iterator[None]:
    start = getattr(NcclTransport, collective)

    def started(self: NcclTransport, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.streams.device_stream(self.stream).clock_ms += milliseconds

    with mock.patch.object(NcclTransport, collective, started):
        yield


@on_ranks(2)
def test_what_a_device_waits_for_is_exposed(context: RankContext) -> None:
    """Fast collectives hide behind computing, but for the first all-gathers and the last reductions of a step."""
    with (
        simulated_device() as device,
        _taking(device, "start_gather", FAST_MS),
        _taking(device, "start_reduce", FAST_MS),
    ):
        model = StreamShard(Stack((DIM,) * 6), precision=BF16)
        optimizer = adamw(model)

        def step() -> None:
            stack_step(model, context.call(0))
            optimizer.step()

        step()
        with engine_inside(model).streams.observed_by(_Costs(device.compute)), record(model) as trace:
            step()
            step()
    assert trace.steps == 2
    found = {name.removesuffix("_s"): 1e3 * value for name, value in trace.summary().items()}
    assert found.pop("host") > 0.0
    computing = 5 * (FORWARD_MS + BACKWARD_MS)
    exposed = {"exposed_all_gather": 2 * FAST_MS, "exposed_reduction": 2 * FAST_MS}  # of the root unit and a layer
    wanted = {"step": computing + 4 * FAST_MS, "compute": computing, **exposed}
    assert found == pytest.approx({**wanted, "optimizer": 0.0, "other": 0.0})


class _Clock(_Costs):
    def __init__(self) -> None:
        super().__init__(self)
        self.clock_ms = 0.0

    def __call__(self) -> float:
        return self.clock_ms / 1e3


class _Waits(Observer):
    """Lets `clock` pass when the host has begun to wait for weights (1 ms) or for something else (100 ms)."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.found = Counter[str]()

    def on_block(self, fence: Fence, target: StreamName, works: Sequence[Work]) -> None:
        self.clock.clock_ms += 1.0 if "weight slot" in fence.what else 100.0
        self.found[fence.what] += 1


@on_ranks(2)
def test_what_the_host_waits_for_is_exposed(context: RankContext) -> None:
    """On the CPU: each wait is counted once, as a wait for weights or for gradients, and is no part of computing."""
    clock = _Clock()
    waiting = _Waits(clock)
    model = StreamShard(Stack((DIM,) * 6), precision=BF16)
    optimizer, streams = adamw(model), engine_inside(model).streams
    with mock.patch("streamshard.tools.trace.perf_counter", clock), contextlib.ExitStack() as stack:
        stack.enter_context(streams.observed_by(clock))
        found = stack.enter_context(record(model))
        stack.enter_context(streams.observed_by(waiting))
        for number in range(2):
            stack_step(model, context.call(number))
            optimizer.step()
            optimizer.zero_grad()
            clock.clock_ms += 7.0
    summary = {name: 1e3 * value for name, value in found.summary().items()}
    assert found.steps == 2
    computing = 5 * (FORWARD_MS + BACKWARD_MS)
    assert (summary["compute_s"], summary["other_s"]) == pytest.approx((computing, 7.0))
    waits = waiting.found
    assert waits.total() == sum(span.activity.startswith("wait for") for span in found.spans)
    for_weights = sum(count for what, count in waits.items() if "weight slot" in what)
    for_grads = waits.total() - for_weights
    assert for_weights >= 2 * 6 and for_grads >= 2
    assert summary["exposed_all_gather_s"] == pytest.approx(for_weights / 2)
    assert summary["exposed_reduction_s"] == pytest.approx(100.0 * for_grads / 2)
    assert summary["step_s"] == pytest.approx(clock.clock_ms / 2)
    assert "host_s" not in summary  # the host computes
    assert f"{computing:.1f} ms" in str(found)
