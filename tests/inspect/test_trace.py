"""The trace of a step: everything that happened is in it, in its row, and the engine is left as it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from streamshard import StreamShard
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.engine.engine import Engine
from streamshard.errors import ConfigError, ShardingError
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import make_adversarial
from streamshard.inspect.races import detect_races
from streamshard.inspect.timeline import Kind, Mark, Span, Trace
from streamshard.inspect.trace import trace_step
from tests.models import Stack, TinyConfig, TinyLM
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, Call, adamw, assert_same, full_weights, lm_step
from tests.scenarios import BF16, dropping, sharded, train

DEPTH = 5
COMPUTE, COMM = StreamName.COMPUTE, StreamName.COMM


def _traced(context: RankContext, traced_step: int) -> Trace:
    """One step of a language model."""
    torch.manual_seed(2)
    model = StreamShard(TinyLM(TinyConfig(depth=DEPTH)), precision=BF16)
    optimizer = adamw(model)
    for number in range(traced_step + 1):
        call = Call(number, context.rank, context.world_size, 1.0)
        if number < traced_step:
            _step(model, optimizer, call)
        else:
            with trace_step(model) as trace:
                _step(model, optimizer, call)
    return trace


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, call: Call) -> None:
    lm_step(model, call)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module", params=[0, 2], ids=["first step", "third step"])
def trace(ranks: RankPool, request: pytest.FixtureRequest) -> Trace:
    """Of rank 1 of 2. What overlaps does so from the first step on."""
    found = ranks(2).run(_traced, request.param)[1]
    assert isinstance(found, Trace)
    return found


def _of(trace: Trace, kind: Kind) -> list[Span]:
    return [span for span in trace.spans if span.kind is kind]


def test_every_unit_has_its_forward_and_its_backward(trace: Trace) -> None:
    """In the order in which they ran; the root unit before and behind."""
    forward = [span.unit for span in _of(trace, Kind.FORWARD) if span.unit != 0]
    backward = [span.unit for span in _of(trace, Kind.BACKWARD) if span.unit != 0]
    assert forward == list(range(1, DEPTH + 1))
    assert backward == list(range(DEPTH, 0, -1))
    assert _of(trace, Kind.FORWARD)[0].unit == _of(trace, Kind.FORWARD)[-1].unit == 0
    assert _of(trace, Kind.BACKWARD)[0].unit == _of(trace, Kind.BACKWARD)[-1].unit == 0
    assert trace.units == ["the root unit", *(f"blocks.{k}" for k in range(DEPTH))]
    assert trace.slots == [None, 0, 1, 0, 1, 0]
    assert trace.rank == 1


def test_every_collective_is_in_the_trace(trace: Trace) -> None:
    """Two gathers of each block but for the two that are still in their slots at the turn; one of the root unit."""
    gathers = Counter(span.unit for span in _of(trace, Kind.GATHER))
    assert gathers == Counter({0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1})
    assert Counter(span.unit for span in _of(trace, Kind.REDUCE)) == Counter(range(DEPTH + 1))
    assert len(_of(trace, Kind.CAST)) == len(_of(trace, Kind.OPTIMIZER)) == 1
    assert len(_of(trace, Kind.FLAGS)) == 1  # nobody waits for it in a step in which this rank has used everything


def test_a_unit_computes_after_its_gather_and_is_reduced_after_its_backward(trace: Trace) -> None:
    """Rules 1 and 4 can be seen."""
    for unit in range(1, DEPTH + 1):
        first_gather = next(span for span in _of(trace, Kind.GATHER) if span.unit == unit)
        forward = next(span for span in _of(trace, Kind.FORWARD) if span.unit == unit)
        backward = next(span for span in _of(trace, Kind.BACKWARD) if span.unit == unit)
        reduction = next(span for span in _of(trace, Kind.REDUCE) if span.unit == unit)
        assert first_gather.stop_us <= forward.start_us < forward.stop_us <= backward.start_us
        assert backward.stop_us <= reduction.start_us < reduction.stop_us


def test_gathers_are_issued_ahead(trace: Trace) -> None:
    """The next unit's weights are under way while a unit computes: prefetch can be seen."""
    starts = {span.unit: span.start_us for span in reversed(_of(trace, Kind.GATHER))}
    forwards = {span.unit: span for span in _of(trace, Kind.FORWARD) if span.unit != 0}
    for unit in range(2, DEPTH + 1):
        assert starts[unit] <= forwards[unit - 1].start_us


def test_spans_are_on_their_stream_and_within_the_step(trace: Trace) -> None:
    """Collectives on comm, all else on compute, in order of their start."""
    for span in trace.spans:
        assert (span.stream is COMM) is (span.kind in (Kind.GATHER, Kind.REDUCE, Kind.FLAGS))
        assert 0 <= span.start_us <= span.stop_us
    assert trace.spans == sorted(trace.spans, key=lambda span: span.start_us)


def test_lanes_hold_every_span_once_and_none_overlap_in_comm(trace: Trace) -> None:
    """What a viewer needs of rows."""
    lanes = trace.lanes()
    assert lanes[0][0] == "compute"
    assert Counter(span for _, spans in lanes for span in spans) == Counter(trace.spans)
    for _, spans in lanes[1:]:
        assert all(a.stop_us <= b.start_us for a, b in zip(spans, spans[1:], strict=False))


def test_waits_of_every_rule_are_marked(trace: Trace) -> None:
    """With when they were recorded, which is before."""
    assert {mark.rule for mark in trace.marks} == set(Rule)
    assert all(0 <= mark.recorded_us <= mark.waited_us for mark in trace.marks)
    assert {mark.source for mark in trace.marks if mark.rule is Rule.WEIGHTS_ARRIVED} == {COMM}
    assert {mark.source for mark in trace.marks if mark.rule is Rule.SLOT_RELEASED} == {COMPUTE}


# -- files --------------------------------------------------------------------------------------------------------


def test_the_json_file_is_what_perfetto_reads(trace: Trace, tmp_path: Path) -> None:
    """Complete events with times in microseconds, named rows, the rank as process, fences as instants."""
    trace.save_json(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(trace.spans)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [rows[row] for row in range(3)] == ["compute", "comm: gathers 1", "comm: gathers 2"]
    assert {event["tid"] for event in complete} == set(rows)
    gather = next(event for event in complete if event["name"] == "gather blocks.2")
    assert rows[gather["tid"]].startswith("comm: gathers")
    assert gather["args"] == {"weight slot": 0}
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert len(instants) == len(trace.marks)
    assert "rule 1 WEIGHTS_ARRIVED: weight slot 0" in instants


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_shows_both_rows_and_the_units(trace: Trace, tmp_path: Path, suffix: str) -> None:
    """Something is drawn; what the text says is in the vector format."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"step.{suffix}"
    trace.save_picture(path, title="one step")
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
    else:
        text = data.decode()
        for words in ("compute", "comm: gathers", "comm: reductions", "one step", "weight slot 1", "rule 5"):
            assert f"<!-- {words} -->" in text


def test_the_picture_can_be_read_on_a_page(trace: Trace) -> None:
    """All letters are ten pixels high at least, where it is shown 800 pixels wide."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    from streamshard.inspect.picture import draw

    figure = draw(trace, "one step")
    pixels_per_point = 800 / figure.get_figwidth() / 72
    sizes = {text.get_text(): text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}
    assert {"compute", "ms", "one step", "weight slot 1", "rule 5"} < set(sizes)
    assert min(sizes.values()) * pixels_per_point >= 10


def test_a_trace_of_nothing_can_be_saved(tmp_path: Path) -> None:
    """Such as one whose body did not run the model."""
    empty = Trace(rank=0, units=["the root unit"], slots=[None])
    empty.save_json(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    pytest.importorskip("matplotlib")
    empty.save_picture(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 0


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package does not require it."""
    monkeypatch.setitem(sys.modules, "streamshard.inspect.picture", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        Trace(rank=0, units=[], slots=[]).save_picture(tmp_path / "step.png")


def test_lanes_are_as_few_as_overlaps_allow() -> None:
    """A collective takes the first lane that is free."""
    times = [(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (3.5, 5.0), (4.0, 6.0)]
    spans = [Span(COMM, Kind.GATHER, 1, f"gather {start}", start, stop) for start, stop in times]
    mark = Mark(Rule.WEIGHTS_ARRIVED, "weight slot 0", COMM, COMPUTE, 0.0, 1.0)
    lanes = Trace(0, ["edge", "block"], [None, 0], spans, [mark]).lanes()
    assert [name for name, _ in lanes] == ["compute", "comm: gathers 1", "comm: gathers 2"]
    assert [span.start_us for span in lanes[1][1]] == [0.0, 4.0]
    assert [span.start_us for span in lanes[2][1]] == [1.0, 2.0, 3.5]


# -- the engine is left as it was -----------------------------------------------------------------------------------


# Where what is traced begins, ends or is given up in another order.
UNEVEN = (
    "tied",
    "no_sync",
    "reentrant checkpointing",
    "layers unused on some ranks",
    "layers used twice",
    "evaluation between steps",
    "a kept graph",
    "freezing",
    "clipping",
    "summoning",
    "a backward that fails",
    "a forward that fails",
    "weights read elsewhere",
    "layers in layers",
)


@on_ranks(2)
@pytest.mark.parametrize("scenario", UNEVEN)
def test_tracing_changes_no_number(context: RankContext, scenario: str) -> None:
    """Whatever is trained, and bit by bit."""
    plain = sharded(scenario, BF16)
    train(plain, scenario, context, steps=2)
    model = sharded(scenario, BF16)
    with trace_step(model) as trace:
        train(model, scenario, context, steps=2)
    assert_same(full_weights(model), full_weights(plain), "weights", EXACT)
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.GATHER, Kind.REDUCE):
        assert _of(trace, kind)


@on_ranks(1)
def test_one_rank_alone_has_a_trace_without_communication(context: RankContext) -> None:
    """Its compute row is the same."""
    trace = _traced(context, 2)
    assert {span.stream for span in trace.spans} == {COMPUTE}
    assert {span.kind for span in trace.spans} >= {Kind.FORWARD, Kind.BACKWARD, Kind.CAST, Kind.OPTIMIZER}


@on_ranks(2)
def test_nothing_of_the_trace_is_left_behind(context: RankContext) -> None:
    """No observer, no hook: after an error neither."""
    model = sharded("plain", BF16)
    engine = engine_inside(model)
    with pytest.raises(ZeroDivisionError), trace_step(model) as trace:
        train(model, "plain", context, steps=1)
        raise ZeroDivisionError
    assert engine.streams.observers == ()
    train(model, "plain", context, steps=1)
    assert trace.spans == []  # filled only by a body that ended well


def _methods(engine: Engine) -> list[tuple[str, str, Any]]:
    """What is called by name on what makes a step: of the objects themselves, and of their classes."""
    reductions = engine.reductions
    things: list[Any] = [engine, engine.streams, engine.ranks, engine.ranks.transport, engine.buffers]
    things += [reductions, reductions.used, *engine.units, *(unit.grads for unit in engine.units)]
    things += [fence for thing in things for fence in vars(thing).values() if isinstance(fence, Fence)]
    owned = [(type(thing).__name__, name, value) for thing in things for name, value in vars(thing).items()]
    classes = {owner for thing in things for owner in type(thing).__mro__}
    return [found for found in owned if callable(found[2])] + [
        (owner.__name__, name, value)
        for owner in sorted(classes, key=lambda owner: owner.__name__)
        for name, value in vars(owner).items()
        if callable(value)
    ]


@on_ranks(2)
@pytest.mark.parametrize("late", [False, True], ids=["as it is", "late"])
def test_no_method_is_replaced_while_a_step_is_observed(context: RankContext, late: bool) -> None:
    """Neither on an object nor on a class, nor is the transport another one."""
    model = sharded("plain", BF16)
    engine = engine_inside(model)
    with make_adversarial(model) if late else contextlib.nullcontext():
        train(model, "plain", context, steps=1)
        transport, before = engine.ranks.transport, _methods(engine)
        with trace_step(model) as trace, detect_races(model):
            train(model, "plain", context, steps=1)
            assert _methods(engine) == before
            assert engine.ranks.transport is transport
    assert trace.spans


@on_ranks(2)
@pytest.mark.parametrize("order", list(itertools.permutations(["trace", "races", "late"])), ids="-".join)
def test_instruments_are_used_together_in_any_order(context: RankContext, order: tuple[str, ...]) -> None:
    """None has to know of the others: all hear the same step, and its numbers are what they are without."""
    plain, model = sharded("plain", BF16), sharded("plain", BF16)
    for _ in range(2):
        train(plain, "plain", context, steps=1)
    found: dict[str, Any] = {}
    make: dict[str, Any] = {"trace": trace_step, "races": detect_races, "late": make_adversarial}
    train(model, "plain", context, steps=1)
    with contextlib.ExitStack() as stack:
        for name in order:
            found[name] = stack.enter_context(make[name](model))
        train(model, "plain", context, steps=1)
    units = range(len(engine_inside(model).units))
    assert Counter(span.unit for span in _of(found["trace"], Kind.REDUCE)) == Counter(units)
    assert {span.unit for span in _of(found["trace"], Kind.GATHER)} == set(units)
    assert {mark.rule for mark in found["trace"].marks} == set(Rule)
    assert found["races"].accesses > 100
    assert_same(full_weights(model), full_weights(plain), "weights", EXACT)


@on_ranks(2)
def test_what_is_left_out_is_seen_by_both(context: RankContext) -> None:
    """A wait that is missing is a race to the one and no mark to the other."""
    model = sharded("plain", BF16)
    with (
        dropping(model, Rule.GRADS_DRAINED),
        detect_races(model, raise_at_exit=False) as races,
        trace_step(model) as trace,
    ):
        train(model, "plain", context, steps=1)
    assert {race.rule for race in races.found} == {Rule.GRADS_DRAINED}
    assert Rule.GRADS_DRAINED not in {mark.rule for mark in trace.marks}


def _units_of_forwards(context: RankContext, scenario: str) -> list[int | None]:
    model = sharded(scenario, BF16)
    train(model, scenario, context, steps=1)
    with trace_step(model) as trace:
        train(model, scenario, context, steps=1)
    return [span.unit for span in _of(trace, Kind.FORWARD)]


@on_ranks(1, 2)
def test_who_has_called_a_layer_goes_on_afterwards(context: RankContext) -> None:
    """The outer layer, or what is outside of all layers."""
    units = _units_of_forwards(context, "layers in layers")
    assert [unit for unit, _ in itertools.groupby(units)] == [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]


@on_ranks(1, 2)
def test_what_backward_runs_again_is_in_the_trace(context: RankContext) -> None:
    """In the order in which backward needs it."""
    units = _units_of_forwards(context, "checkpointing")
    assert [unit for unit in units if unit] == [1, 2, 3, 4, 5, 5, 4, 3, 2, 1]


def test_a_model_that_is_not_sharded_is_refused() -> None:
    """There is no engine to look at."""
    with pytest.raises(ShardingError, match="Stack is not sharded"), trace_step(Stack()):
        pass
