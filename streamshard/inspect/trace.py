"""Where the time of a step goes: what computed, what was communicated, and what waited for what.

    from streamshard.inspect.trace import trace_step

    with trace_step(model) as trace:
        model(batch).loss.backward()
        optimizer.step()
    trace.save_json("step.json")           # open it in https://ui.perfetto.dev or chrome://tracing
    trace.save_picture("step.png")         # needs matplotlib

Public names: `trace_step`, which yields a `Trace` (see `streamshard.inspect.timeline`).
On CUDA times are those of the device, by events on its streams. On the CPU they are the host's: a collective reaches
from its start to the end of the wait that needed it, of which the host saw no more, and what that wait cost shows as a
span of its own. The engine is left as it is: it says itself what happens, see [Note: observers] in
`streamshard.comm.streams`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import AllWork, Collective, Fence, Moment, Observer, Rule, StreamName, Streams, Work
from streamshard.engine.engine import ROOT_UNIT, Engine
from streamshard.inspect import engine_inside
from streamshard.inspect.timeline import Kind, Mark, Span, Trace

__all__ = ["trace_step"]


@contextlib.contextmanager
def trace_step(model: nn.Module) -> Iterator[Trace]:
    """Record what the engine and the optimizer do inside. Enter it between steps.

    The trace can be saved once the body is done.

    Args:
        model: made by `StreamShard`.
    """
    engine = engine_inside(model)
    recorder = _Recorder(engine)
    trace = Trace(engine.ranks.rank, [unit.name for unit in engine.units], _slots(engine))
    hooks = [
        register_optimizer_step_pre_hook(recorder.before_optimizer),
        register_optimizer_step_post_hook(recorder.after_optimizer),
    ]
    try:
        with engine.streams.observed_by(recorder):
            yield trace
    finally:
        for hook in hooks:
            hook.remove()
    recorder.fill(trace)


def _slots(engine: Engine) -> list[int | None]:
    slots = engine.plan.weights
    return [slot if unit.weight_slot.is_shared else None for slot, unit in zip(slots, engine.units, strict=True)]


# -- recording ----------------------------------------------------------------------------------------------------

_KINDS = {
    Collective.ALL_GATHER: Kind.GATHER,
    Collective.REDUCE_SCATTER: Kind.REDUCE,
    Collective.ALL_REDUCE: Kind.AVERAGE,
    Collective.ALL_TO_ALL: Kind.EXCHANGE,
}
_Stamp = Any  # float seconds, or an event of the device
_SHORTEST_US = 20.0  # shorter waits are left out: most find their collective done


class _Clock:
    """Stamps points of a stream's time. Owns the events that mark them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._start = self.now(StreamName.COMPUTE)

    def now(self, stream: StreamName) -> _Stamp:
        if not self._streams.has_streams:
            return time.perf_counter()
        event = self._streams.module.Event(enable_timing=True)
        event.record(self._streams.device_stream(stream))
        return event

    def microseconds(self, stamp: _Stamp) -> float:
        """Since the clock was made. On CUDA once the device is idle."""
        if isinstance(stamp, float):
            return (stamp - float(self._start)) * 1e6
        return float(self._start.elapsed_time(stamp)) * 1e3


class _Open(NamedTuple):
    """A span that has begun."""

    stream: StreamName
    kind: Kind
    unit: int | None
    name: str
    start: _Stamp


class _Recorder(Observer):
    """Notes when things happen. Owns the raw spans and marks."""

    def __init__(self, engine: Engine) -> None:
        self._streams = engine.streams
        self._units = [unit.name for unit in engine.units]
        self._unit_of = [unit.index for unit in engine.units for _ in unit.segments]  # by tag
        self._clock = _Clock(engine.streams)
        self._spans: list[tuple[_Open, _Stamp]] = []
        self._marks: list[tuple[Fence, _Stamp, _Stamp]] = []
        self._recorded: dict[Fence, _Stamp] = {}
        self._issuing: _Open | None = None  # a collective that no fence has recorded yet
        self._under_way: dict[Work, _Open] = {}  # collectives that the host has not waited for
        self._blocked: _Stamp = None
        self._computing: _Open | None = None  # what the compute stream is busy with
        self._awaits_weights = False  # whether that has only waited so far
        self._layers: list[int] = []  # units whose layers' forwards are running, one inside the other
        self._recomputing: list[_Stamp] = []
        self._last_grad: _Stamp | None = None  # when the unit whose backward runs wrote its latest gradient
        self._casting: _Stamp = None
        self._optimizing: _Stamp | None = None

    # -- what moves bytes -------------------------------------------------------------------------------------------

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """See `Observer`."""
        kind, unit = _KINDS[collective], None
        if tag is not None and tag < len(self._unit_of):
            unit = self._unit_of[tag]
        elif tag is not None:
            kind = Kind.FLAGS
        name = kind.value if unit is None else f"{kind.value} {self._units[unit]}"
        issuing = self._issuing
        if issuing is None or (issuing.stream, issuing.name) != (stream, name):  # one span for a unit's segments
            self._issuing = _Open(stream, kind, unit, name, self._clock.now(stream))

    def on_record(self, fence: Fence) -> None:
        """See `Observer`."""
        now = self._recorded[fence] = self._clock.now(fence.source)
        issued = self._issuing
        if issued is None or fence.source is not issued.stream:
            return
        self._issuing = None
        if fence.work is None:
            self._spans.append((issued, now))
        else:
            self._under_way[fence.work] = issued
            self._add(Kind.ISSUE, issued.unit, f"issue {issued.name}", issued.start, now)

    def on_wait(self, fence: Fence) -> None:
        """See `Observer`."""
        now = self._clock.now(fence.target)
        if fence in self._recorded:
            self._marks.append((fence, self._recorded[fence], now))
        if self._awaits_weights and fence.rule is Rule.WEIGHTS_ARRIVED and self._computing is not None:
            self._awaits_weights = False
            self._computing = self._computing._replace(start=now)

    def on_block(self, fence: Fence, work: Work) -> None:
        """See `Observer`."""
        self._blocked = self._clock.now(StreamName.COMPUTE)

    def on_done(self, fence: Fence, work: Work) -> None:
        """See `Observer`."""
        now = self._clock.now(StreamName.COMPUTE)
        unit, name = None, fence.what
        # Of the segments of one unit, or of several units.
        parts = work.works if isinstance(work, AllWork) and work not in self._under_way else (work,)
        for part in parts:
            issued = self._under_way.pop(part, None)
            if issued is not None:
                self._spans.append((issued, now))
                if part is work:
                    unit, name = issued.unit, issued.name
        self._add(Kind.WAIT, unit, f"wait for {name}", self._blocked, now)

    # -- what the compute stream does -------------------------------------------------------------------------------

    def on_moment(self, moment: Moment, unit: int | None) -> None:
        """See `Observer`."""
        now = self._clock.now(StreamName.COMPUTE)
        if moment is Moment.CAST_BEGINS:
            self._casting = now
        elif moment is Moment.CAST_ENDS:
            self._add(Kind.CAST, None, "cast", self._casting, now)
        elif moment is Moment.BACKWARD_ENDS or unit is None:
            self._close(now)
        elif moment is Moment.FORWARD_BEGINS:
            self._begin_forward(unit, now)
        elif moment is Moment.FORWARD_ENDS:
            self._end_forward(unit, now)
        elif moment is Moment.RECOMPUTATION_BEGINS:
            self._recomputing.append(now)
        elif moment is Moment.RECOMPUTATION_ENDS:
            self._add(Kind.FORWARD, unit, f"recompute {self._units[unit]}", self._recomputing.pop(), now)
        elif moment is Moment.BACKWARD_BEGINS:
            self._open(Kind.BACKWARD, unit, now, awaits_weights=True)
        elif moment is Moment.GRAD_WRITTEN:
            self._note_grad(unit, now)

    def _begin_forward(self, unit: int, now: _Stamp) -> None:
        if unit == ROOT_UNIT:
            self._layers = []
        else:
            self._layers.append(unit)
        self._open(Kind.FORWARD, unit, now, awaits_weights=True)

    def _end_forward(self, unit: int, now: _Stamp) -> None:
        """Who called the layer goes on; a layer may have to wait for its weights again."""
        self._close(now)
        if unit != ROOT_UNIT:
            while self._layers and self._layers.pop() != unit:
                pass  # an inner one that has raised
            outer = self._layers[-1] if self._layers else ROOT_UNIT
            self._open(Kind.FORWARD, outer, now, awaits_weights=outer != ROOT_UNIT)

    def _note_grad(self, unit: int, now: _Stamp) -> None:
        """A gradient shows whose backward was running: after the last of the blocks' ones it is the root unit's."""
        current = self._computing
        if current is not None and current.unit != unit:
            self._open(Kind.BACKWARD, unit, now if self._last_grad is None else self._last_grad)
        self._awaits_weights = False
        self._last_grad = now

    def before_optimizer(self, *_: Any) -> None:
        """Called by torch before an optimizer's step."""
        self._optimizing = self._clock.now(StreamName.COMPUTE)

    def after_optimizer(self, *_: Any) -> None:
        """Called by torch after it."""
        start, self._optimizing = self._optimizing, None
        if start is not None:
            self._add(Kind.OPTIMIZER, None, "optimizer", start, self._clock.now(StreamName.COMPUTE))

    # -- what is noted ----------------------------------------------------------------------------------------------

    def _open(self, kind: Kind, unit: int, start: _Stamp, *, awaits_weights: bool = False) -> None:
        self._close(start)
        self._last_grad = None
        self._awaits_weights = awaits_weights
        self._computing = _Open(StreamName.COMPUTE, kind, unit, f"{kind.value} {self._units[unit]}", start)

    def _close(self, stop: _Stamp) -> None:
        current, self._computing = self._computing, None
        if current is not None:
            self._spans.append((current, stop))

    def _add(self, kind: Kind, unit: int | None, name: str, start: _Stamp, stop: _Stamp) -> None:
        self._spans.append((_Open(StreamName.COMPUTE, kind, unit, name, start), stop))

    def fill(self, trace: Trace) -> None:
        """Stamps to microseconds. What nobody has waited for ends with the trace."""
        if self._streams.has_streams:
            self._streams.module.synchronize(self._streams.device)
        for issued in self._under_way.values():
            self._spans.append((issued, self._clock.now(issued.stream)))
        to_us = self._clock.microseconds
        for (stream, kind, unit, name, start), stop in self._spans:
            span = Span(stream, kind, unit, name, to_us(start), to_us(stop))
            if span.stop_us - span.start_us > (_SHORTEST_US if kind in (Kind.WAIT, Kind.ISSUE) else 0.0):
                trace.spans.append(span)
        trace.spans.sort(key=lambda span: (span.start_us, -span.stop_us))
        for fence, recorded, waited in self._marks:
            trace.marks.append(Mark(fence.rule, fence.what, fence.source, fence.target, to_us(recorded), to_us(waited)))
