"""Where the time of a step goes: what computed, what was communicated, and what waited for what.

    from streamshard.inspect.trace import trace_step

    with trace_step(model) as trace:
        model(batch).loss.backward()
        optimizer.step()
    trace.save_json("step.json")           # open it in https://ui.perfetto.dev or chrome://tracing
    trace.save_picture("step.png")         # needs matplotlib

Public names: `trace_step`, which yields a `Trace` (see `streamshard.inspect.timeline`).
On CUDA times are those of the device, by events on both streams. On the CPU they are the host's: a collective reaches
from its start to the end of the wait that needed it, of which the host saw no more, and what that wait cost shows as a
span of its own. The engine is left as it is; its methods are wrapped for as long as the trace lasts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import Fence, Observer, StreamName, Streams, Work
from streamshard.engine.engine import Engine, in_backward
from streamshard.engine.passes import Backward
from streamshard.inspect import engine_inside
from streamshard.inspect.timeline import Kind, Mark, Span, Trace
from streamshard.unit.unit import Member, StreamedUnit

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
    outer, engine.streams.observer = engine.streams.observer, recorder
    recorder.outer = outer
    try:
        with recorder.attached():
            yield trace
    finally:
        engine.streams.observer = outer
    recorder.fill(trace)


def _slots(engine: Engine) -> list[int | None]:
    slots = engine.plan.weights
    return [slot if unit.weight_slot.is_shared else None for slot, unit in zip(slots, engine.units, strict=True)]


# -- recording ----------------------------------------------------------------------------------------------------

_Stamp = Any  # float seconds, or a torch.cuda.Event
_SHORTEST_US = 20.0  # shorter waits are left out: most find their collective done


class _Clock:
    """Stamps points of a stream's time. Owns the events that mark them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._start = self.now(StreamName.COMPUTE)

    def now(self, stream: StreamName) -> _Stamp:
        if not self._streams.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams.cuda_stream(stream))
        return event

    def microseconds(self, stamp: _Stamp) -> float:
        """Since the clock was made. On CUDA once the device is idle."""
        if isinstance(stamp, float):
            return (stamp - float(self._start)) * 1e6
        return float(self._start.elapsed_time(stamp)) * 1e3


class _Open(NamedTuple):
    """A span that has begun."""

    kind: Kind
    unit: StreamedUnit
    start: _Stamp


class _TimedWork:
    """Work that reports how long the first wait for it took."""

    def __init__(self, work: Work, report: Callable[[_Stamp, _Stamp], None], clock: _Clock) -> None:
        self._work = work
        self._report: Callable[[_Stamp, _Stamp], None] | None = report
        self._clock = clock

    def wait(self) -> None:
        """See `streamshard.comm.streams.Work`."""
        report, self._report = self._report, None
        start = self._clock.now(StreamName.COMPUTE)
        self._work.wait()
        if report is not None:
            report(start, self._clock.now(StreamName.COMPUTE))


class _Recorder(Observer):
    """Wraps the engine's methods and notes when they are called. Owns the raw spans and marks."""

    def __init__(self, engine: Engine) -> None:
        self.outer: Observer | None = None
        self._engine = engine
        self._clock = _Clock(engine.streams)
        self._spans: list[tuple[StreamName, Kind, StreamedUnit | None, str, _Stamp, _Stamp]] = []
        self._marks: list[tuple[Fence, _Stamp, _Stamp]] = []
        self._recorded: dict[Fence, _Stamp] = {}
        self._pending: dict[tuple[Kind, str], tuple[StreamedUnit | None, _Stamp]] = {}  # nobody has waited for these
        self._computing: _Open | None = None  # what the compute stream is busy with
        self._recomputing: list[_Stamp] = []
        self._last_grad: _Stamp | None = None  # when the unit whose backward runs wrote its latest gradient
        self._has_weights = True  # whether what computes has done more than wait
        self._optimizing: _Stamp | None = None

    # -- Observer ---------------------------------------------------------------------------------------------------

    def on_record(self, fence: Fence) -> None:
        """See `Observer`."""
        self._recorded[fence] = self._clock.now(fence.source)
        if self.outer is not None:
            self.outer.on_record(fence)

    def on_wait(self, fence: Fence) -> None:
        """See `Observer`."""
        if fence in self._recorded:
            self._marks.append((fence, self._recorded[fence], self._clock.now(fence.target)))
        if self.outer is not None:
            self.outer.on_wait(fence)

    def on_access(self, stream: StreamName, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        """See `Observer`."""
        if self.outer is not None:
            self.outer.on_access(stream, tensor, write=write, what=what)

    # -- what is wrapped --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Wrap, and unwrap at the end."""
        engine, transport = self._engine, self._engine.ranks.transport
        wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
            (transport, "start_gather", self._start_gather),
            (transport, "start_reduce", self._start_reduce),
            (engine, "_cast", self._cast),
            (engine, "_begin_pass", self._begin_pass),
            (engine, "pre_forward", self._pre_forward),
            (engine, "post_forward", self._post_forward),
            (engine, "_end_pass", self._end_pass),
            (engine, "_open_backward", self._open_backward),
            (engine, "_advance", self._advance),
            (engine, "_acquire", self._acquire),
            (engine, "_close_all", self._close_all),
            *((unit.grads, "write", self._write_grad_of(unit)) for unit in engine.units),
        ]
        hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        for owner, name, wrapper in wrappers:
            owner.__dict__[name] = _wrapped(wrapper, getattr(owner, name))
        try:
            yield
        finally:
            for owner, name, _ in wrappers:
                del owner.__dict__[name]
            for hook in hooks:
                hook.remove()

    def _start_gather(self, original: Any, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> Work | None:
        is_flags = tag >= len(self._engine.units)
        unit = None if is_flags else self._engine.units[tag]
        return self._collective(Kind.FLAGS if is_flags else Kind.GATHER, unit, lambda: original(shard, slot, tag))

    def _start_reduce(self, original: Any, reduction: Any) -> Work | None:
        return self._collective(Kind.REDUCE, self._engine.units[reduction.tag], lambda: original(reduction))

    def _collective(self, kind: Kind, unit: StreamedUnit | None, issue: Callable[[], Work | None]) -> Work | None:
        name = kind.value if unit is None else f"{kind.value} {unit.name}"
        start = self._clock.now(StreamName.COMM)
        work = issue()
        issued = self._clock.now(StreamName.COMM)
        if work is None:
            self._add(StreamName.COMM, kind, unit, name, start, issued)
            return None
        self._add(StreamName.COMPUTE, Kind.ISSUE, unit, f"issue {name}", start, issued)

        self._pending[kind, name] = unit, start

        def report(wait_start: _Stamp, wait_stop: _Stamp) -> None:
            self._pending.pop((kind, name), None)
            self._add(StreamName.COMM, kind, unit, name, start, wait_stop)
            self._add(StreamName.COMPUTE, Kind.WAIT, unit, f"wait for {name}", wait_start, wait_stop)

        return _TimedWork(work, report, self._clock)

    def _cast(self, original: Any) -> None:
        start = self._clock.now(StreamName.COMPUTE)
        original()
        self._add(StreamName.COMPUTE, Kind.CAST, None, "cast", start, self._clock.now(StreamName.COMPUTE))

    def _begin_pass(self, original: Any, units: frozenset[int]) -> None:
        original(units)
        self._open(Kind.FORWARD, self._engine.edge)

    def _pre_forward(self, original: Any, member: Member) -> Any:
        if in_backward():
            result = original(member)
            self._recomputing.append(self._clock.now(StreamName.COMPUTE))
            return result
        self._close()
        result = original(member)
        self._open(Kind.FORWARD, member.unit)
        return result

    def _post_forward(self, original: Any, member: Member) -> None:
        if in_backward():
            name = f"recompute {member.unit.name}"
            stop = self._clock.now(StreamName.COMPUTE)
            self._add(StreamName.COMPUTE, Kind.FORWARD, member.unit, name, self._recomputing.pop(), stop)
            original(member)
            return
        self._close()
        original(member)
        self._open(Kind.FORWARD, self._engine.edge)

    def _end_pass(self, original: Any, error: BaseException | None) -> Any:
        self._close()
        return original(error)

    def _open_backward(self, original: Any) -> Backward:
        backward: Backward = original()
        self._open(Kind.BACKWARD, self._engine.edge)
        return backward

    def _advance(self, original: Any, backward: Backward, unit: StreamedUnit) -> None:
        before, now = backward.computing, self._clock.now(StreamName.COMPUTE)
        original(backward, unit)
        if backward.computing is not before:
            self._close(now)
            self._open(Kind.BACKWARD, unit)
            self._has_weights = False

    def _acquire(self, original: Any, unit: StreamedUnit) -> None:
        original(unit)
        if not self._has_weights and self._computing is not None and self._computing.unit is unit:
            self._open(self._computing.kind, unit)  # it has only waited so far

    def _close_all(self, original: Any, backward: Backward) -> None:
        self._close()
        original(backward)

    def _write_grad_of(self, unit: StreamedUnit) -> Callable[..., None]:
        """A gradient shows whose backward was running: after the last of the blocks' ones it is the edge unit's."""

        def write_grad(original: Any, place: int, grad: torch.Tensor) -> None:
            current = self._computing
            if current is not None and current.unit is not unit:
                now = self._clock.now(StreamName.COMPUTE) if self._last_grad is None else self._last_grad
                self._close(now)
                self._open(Kind.BACKWARD, unit, now)
            original(place, grad)
            self._last_grad = self._clock.now(StreamName.COMPUTE)

        return write_grad

    def _before_optimizer(self, *_: Any) -> None:
        self._optimizing = self._clock.now(StreamName.COMPUTE)

    def _after_optimizer(self, *_: Any) -> None:
        start, self._optimizing = self._optimizing, None
        if start is not None:
            stop = self._clock.now(StreamName.COMPUTE)
            self._add(StreamName.COMPUTE, Kind.OPTIMIZER, None, "optimizer", start, stop)

    # -- what is noted ----------------------------------------------------------------------------------------------

    def _open(self, kind: Kind, unit: StreamedUnit, start: _Stamp | None = None) -> None:
        self._last_grad = None
        self._has_weights = True
        self._computing = _Open(kind, unit, self._clock.now(StreamName.COMPUTE) if start is None else start)

    def _close(self, stop: _Stamp | None = None) -> None:
        current, self._computing = self._computing, None
        if current is not None:
            stop = self._clock.now(StreamName.COMPUTE) if stop is None else stop
            name = f"{current.kind.value} {current.unit.name}"
            self._add(StreamName.COMPUTE, current.kind, current.unit, name, current.start, stop)

    def _add(
        self, stream: StreamName, kind: Kind, unit: StreamedUnit | None, name: str, start: _Stamp, stop: _Stamp
    ) -> None:
        self._spans.append((stream, kind, unit, name, start, stop))

    def fill(self, trace: Trace) -> None:
        """Stamps to microseconds. What nobody has waited for ends with the trace."""
        if self._engine.streams.is_cuda:
            torch.cuda.synchronize(self._engine.streams.device)
        for (kind, name), (unit, start) in self._pending.items():
            self._add(StreamName.COMM, kind, unit, name, start, self._clock.now(StreamName.COMM))
        to_us = self._clock.microseconds
        for stream, kind, unit, name, start, stop in self._spans:
            span = Span(stream, kind, None if unit is None else unit.index, name, to_us(start), to_us(stop))
            if span.stop_us - span.start_us > (_SHORTEST_US if kind in (Kind.WAIT, Kind.ISSUE) else 0.0):
                trace.spans.append(span)
        trace.spans.sort(key=lambda span: (span.start_us, -span.stop_us))
        for fence, recorded, waited in self._marks:
            trace.marks.append(Mark(fence.rule, fence.what, fence.source, to_us(recorded), to_us(waited)))


def _wrapped(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: wrapper(original, *args)
