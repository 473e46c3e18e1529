"""The trace of a step, ``benchmarks/_trace.py``: all computations and collectives are in it; it changes no number."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._trace import Span, Trace, trace_step
from streamshard import StreamShard
from streamshard.comm.streams import StreamName
from streamshard.errors import ShardingError
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import make_adversarial
from streamshard.inspect.races import detect_races
from tests.models import Stack, TinyConfig, TinyLM
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, Call, adamw, assert_same, full_weights, lm_step
from tests.scenarios import BF16, sharded, train

DEPTH = 5
COMM = StreamName.COMM


def _traced(context: RankContext, traced_step: int) -> Trace:
    """One step of a language model."""
    torch.manual_seed(2)
    model = StreamShard(TinyLM(TinyConfig(depth=DEPTH)), precision=BF16)
    optimizer = adamw(model)
    for number in range(traced_step + 1):
        with trace_step(model) if number == traced_step else contextlib.nullcontext() as trace:
            lm_step(model, Call(number, context.rank, context.world_size, 1.0))
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(trace, Trace)
    return trace


@pytest.fixture(scope="module", params=[0, 2], ids=["first step", "third step"])
def trace(ranks: RankPool, request: pytest.FixtureRequest) -> Trace:
    """The trace of rank 1 of 2."""
    found = ranks(2).run(_traced, request.param)[1]
    assert isinstance(found, Trace)
    return found


def _of(trace: Trace, activity: str) -> list[Span]:
    return [span for span in trace.spans if span.activity == activity]


def test_the_trace_has_every_computation_and_every_collective_in_order(trace: Trace) -> None:
    """Each unit waits for its gather, and is reduced after its backward. The next gather is under way meanwhile."""
    assert trace.units == ["the root unit", *(f"blocks.{k}" for k in range(DEPTH))]
    assert [span.unit for span in _of(trace, "forward")] == list(range(DEPTH + 1))
    assert [span.unit for span in _of(trace, "backward")] == [0, *range(DEPTH, 0, -1)]
    # The last two blocks are still in their slots when backward begins.
    assert Counter(span.unit for span in _of(trace, "all_gather")) == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    assert Counter(span.unit for span in _of(trace, "reduce_scatter")) == Counter(range(DEPTH + 1))
    assert [len(_of(trace, one)) for one in ("cast", "optimizer", "flags")] == [1, 1, 1]
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


def test_the_json_file_is_what_perfetto_reads(trace: Trace, tmp_path: Path) -> None:
    """Spans with times in microseconds, named rows, the rank as process."""
    trace.save_json(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    assert sum(event["ph"] in "Xb" for event in events) == len(trace.spans)
    assert sum(event["ph"] == "e" for event in events) == sum(span.stream is COMM for span in trace.spans)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(rows.values()) == {"compute", "comm: all_gather", "comm: reduce_scatter", "comm: flags"}
    assert {rows[event["tid"]] for event in events if event["name"] == "all_gather blocks.2"} == {"comm: all_gather"}


# Ways of training in which what is traced begins, ends or is given up in another order.
UNEVEN = (
    "reentrant checkpointing",
    "layers unused on some ranks",
    "evaluation between steps",
    "a backward that fails",
    "a forward that fails",
    "layers in layers",
)


@on_ranks(2)
def test_tracing_changes_no_number(context: RankContext) -> None:
    """Weights stay equal to the bit."""
    for scenario in UNEVEN:
        plain, model = sharded(scenario, BF16), sharded(scenario, BF16)
        train(plain, scenario, context, steps=2)
        with trace_step(model) as trace:
            train(model, scenario, context, steps=2)
        assert_same(full_weights(model), full_weights(plain), scenario, EXACT)
        assert {span.activity for span in trace.spans} >= {"forward", "backward", "reduce_scatter"}


@on_ranks(1)
def test_one_rank_alone_has_a_trace_without_communication(context: RankContext) -> None:
    """Its compute row is the same."""
    trace = _traced(context, 2)
    assert {span.stream for span in trace.spans} == {StreamName.COMPUTE}
    assert {span.activity for span in trace.spans} >= {"forward", "backward", "optimizer"}


@on_ranks(2)
def test_instruments_work_together_and_leave_nothing_behind(context: RankContext) -> None:
    """In any order, all hear the same step, and its numbers are those of a step without them."""
    make: dict[str, Any] = {"trace": trace_step, "races": detect_races, "late": make_adversarial}
    for order in (list(make), list(make)[::-1], ["late", "trace", "races"]):
        plain, model = sharded("plain", BF16), sharded("plain", BF16)
        streams = engine_inside(model).streams
        for _ in range(2):
            train(plain, "plain", context, steps=1)
        train(model, "plain", context, steps=1)
        with contextlib.ExitStack() as stack:
            found = {name: stack.enter_context(make[name](model)) for name in order}
            train(model, "plain", context, steps=1)
        units = range(len(engine_inside(model).units))
        assert Counter(span.unit for span in _of(found["trace"], "reduce_scatter")) == Counter(units)
        assert found["races"].accesses > 100
        assert_same(full_weights(model), full_weights(plain), "weights", EXACT)
    with pytest.raises(ZeroDivisionError), trace_step(model) as trace:
        raise ZeroDivisionError
    assert streams.observers == ()
    assert trace.spans == []  # only a body that ends well fills the trace


@on_ranks(2)
def test_recomputed_layers_are_in_the_trace(context: RankContext) -> None:
    """In the order in which backward needs them."""
    model = sharded("checkpointing", BF16)
    with trace_step(model) as trace:
        train(model, "checkpointing", context, steps=1)
    assert [span.unit for span in _of(trace, "forward") if span.unit] == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]


def test_a_model_that_is_not_sharded_is_refused() -> None:
    """There is no engine to look at."""
    for instrument in (trace_step, detect_races):
        with pytest.raises(ShardingError, match="Stack is not sharded"), instrument(Stack()):  # type: ignore[operator]
            pass
