"""A trace of one step: spans of compute, communication and waits, as a file for Perfetto.

    from _trace import trace_step

    with trace_step(model) as trace:
        model(batch).loss.backward()
        optimizer.step()
    trace.save_json("step.json")           # open it in https://ui.perfetto.dev or chrome://tracing

On CUDA, times are the device's, from events on its streams. On the CPU, times are the host's: the span of a collective
ends with the wait that needed it, and the cost of that wait is a span of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import AllWork, Collective, Fence, Observer, StepEvent, StreamName, Work
from streamshard.engine.engine import ROOT_UNIT, Engine
from streamshard.inspect import engine_inside


class Span(NamedTuple):
    """A stretch of time of one stream.

    Attributes:
        stream: whose time.
        activity: what takes it: "forward", "backward", "cast", "optimizer", "wait", the value of a `Collective`, or
            "flags", the exchange of which parameters were used.
        unit: index of the unit; None if the activity belongs to no unit.
        name: the activity and the unit, in words.
        start_us, stop_us: microseconds since the trace began; stamps (see `_Recorder`) while the trace is recorded.
    """

    stream: StreamName
    activity: str
    unit: int | None
    name: str
    start_us: float
    stop_us: float


@dataclass
class Trace:
    """A recorded step of one rank. `trace_step` fills the trace when its body ends.

    Attributes:
        rank: which rank.
        units: names of the units, by index.
        spans: in order of their start.
    """

    rank: int
    units: list[str]
    spans: list[Span] = field(default_factory=list)

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format of Perfetto and chrome://tracing. Each rank is a process, each row a thread."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        rows = list(dict.fromkeys(map(_row, self.spans)))
        for number, row in enumerate(rows):
            events.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": row}})
        for number, span in enumerate(self.spans):
            event = {"name": span.name, "cat": span.activity, "pid": self.rank, "tid": rows.index(_row(span))}
            if span.stream is StreamName.COMPUTE:
                events.append({**event, "ph": "X", "ts": span.start_us, "dur": span.stop_us - span.start_us})
            else:  # collectives overlap, which only asynchronous events may
                events.append({**event, "ph": "b", "id": number, "ts": span.start_us})
                events.append({**event, "ph": "e", "id": number, "ts": span.stop_us})
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _row(span: Span) -> str:
    return span.stream.value if span.stream is StreamName.COMPUTE else f"{span.stream.value}: {span.activity}"


@contextlib.contextmanager
def trace_step(model: nn.Module) -> Iterator[Trace]:
    """Record what the engine and the optimizer do inside. Enter the context between steps.

    Args:
        model: made by `StreamShard`.
    """
    engine = engine_inside(model)
    recorder = _Recorder(engine)
    trace = Trace(engine.ranks.rank, [unit.name for unit in engine.units])
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: recorder.open("optimizer", None)),
        register_optimizer_step_post_hook(lambda *_: recorder.close()),
    ]
    try:
        with engine.streams.observed_by(recorder):
            yield trace
    finally:
        for hook in hooks:
            hook.remove()
    recorder.fill(trace)


_BEGINS = {
    StepEvent.CAST_BEGINS: "cast",
    StepEvent.FORWARD_BEGINS: "forward",
    StepEvent.RECOMPUTATION_BEGINS: "forward",
    StepEvent.BACKWARD_BEGINS: "backward",
}
_ENDS = (StepEvent.CAST_ENDS, StepEvent.FORWARD_ENDS, StepEvent.RECOMPUTATION_ENDS)
_SHORTEST_WAIT_US = 20.0  # most waits find their collective done


class _Recorder(Observer):
    """Stamps the beginning and the end of what it observes: seconds of the host, or events of the device, its own."""

    def __init__(self, engine: Engine) -> None:
        self._streams = engine.streams
        self._units = [unit.name for unit in engine.units]
        self._unit_of = [unit.index for unit in engine.units for _ in unit.flat_params]  # by tag
        self._start = self._now(StreamName.COMPUTE)
        self._spans: list[Span] = []
        self._issued: Span | None = None  # a collective that no fence has recorded yet
        self._under_way: dict[Work, Span] = {}  # collectives that the host has not waited for
        self._blocked: Any = None  # when the host began to wait
        self._computing: list[Span] = []  # a layer inside a layer comes last

    # -- collectives ------------------------------------------------------------------------------------------------

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """See `Observer`."""
        unit = self._unit_of[tag] if tag is not None and tag < len(self._unit_of) else None
        is_of_flags = tag is not None and unit is None
        found = self._begin(stream, "flags" if is_of_flags else collective.value, unit)
        if self._issued is None or self._issued[:4] != found[:4]:  # a unit's flat parameters share one span
            self._issued = found

    def on_record(self, fence: Fence) -> None:
        """See `Observer`."""
        issued = self._issued
        if issued is None or fence.source is not issued.stream:
            return
        self._issued = None
        if fence.work is None:
            self._end(issued)
        else:
            self._under_way[fence.work] = issued

    def on_block(self, fence: Fence, work: Work) -> None:
        """See `Observer`."""
        self._blocked = self._now(StreamName.COMPUTE)

    def on_done(self, fence: Fence, work: Work) -> None:
        """See `Observer`. `work` may be several collectives at once."""
        parts = work.works if isinstance(work, AllWork) and work not in self._under_way else (work,)
        done = [self._under_way.pop(part) for part in parts if part in self._under_way]
        unit, name = (done[0].unit, done[0].name) if len(done) == 1 else (None, fence.what)
        now = self._now(StreamName.COMPUTE)
        self._spans += [issued._replace(stop_us=now) for issued in done]
        self._spans.append(Span(StreamName.COMPUTE, "wait", unit, f"wait for {name}", self._blocked, now))

    # -- computation ------------------------------------------------------------------------------------------------

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        """See `Observer`."""
        if moment in (StepEvent.BACKWARD_BEGINS, StepEvent.BACKWARD_ENDS):
            self.close("backward")
        elif moment in _ENDS:
            self.close()
        elif moment is StepEvent.FORWARD_BEGINS and unit == ROOT_UNIT:
            self._computing = []  # of a forward that has raised
        if moment in _BEGINS:
            self.open(_BEGINS[moment], unit)

    def open(self, activity: str, unit: int | None) -> None:
        """The compute stream begins an activity."""
        self._computing.append(self._begin(StreamName.COMPUTE, activity, unit))

    def close(self, activity: str | None = None) -> None:
        """The innermost activity ends, or only one of that sort."""
        if self._computing and activity in (None, self._computing[-1].activity):
            self._end(self._computing.pop())

    def _now(self, stream: StreamName) -> Any:
        if not self._streams.has_streams:
            return time.perf_counter()
        event = self._streams.module.Event(enable_timing=True)
        event.record(self._streams.device_stream(stream))
        return event

    def _to_us(self, stamp: Any) -> float:
        """Microseconds since the start. On CUDA the device must be idle."""
        if isinstance(stamp, float):
            return (stamp - float(self._start)) * 1e6
        return float(self._start.elapsed_time(stamp)) * 1e3

    def _begin(self, stream: StreamName, activity: str, unit: int | None) -> Span:
        name = activity if unit is None else f"{activity} {self._units[unit]}"
        return Span(stream, activity, unit, name, self._now(stream), 0.0)

    def _end(self, begun: Span) -> None:
        self._spans.append(begun._replace(stop_us=self._now(begun.stream)))

    def fill(self, trace: Trace) -> None:
        """Turn stamps into microseconds. Collectives without a wait end with the trace."""
        if self._streams.has_streams:
            self._streams.module.synchronize(self._streams.device)
        for begun in self._under_way.values():
            self._end(begun)
        for span in self._spans:
            timed = span._replace(start_us=self._to_us(span.start_us), stop_us=self._to_us(span.stop_us))
            if timed.activity != "wait" or timed.stop_us - timed.start_us >= _SHORTEST_WAIT_US:
                trace.spans.append(timed)
        trace.spans.sort(key=lambda span: (span.start_us, -span.stop_us))
