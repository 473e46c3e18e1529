"""Where the time of a training step goes: spans of compute, communication and waits on one rank.

    with streamshard.trace(model) as found:      # enter it between steps; one or several steps
        model(batch).loss.backward()
        optimizer.step()
    print(found)                                 # a summary, per step; found.summary() is for trackers
    found.save_json("step.json")                 # open it in https://ui.perfetto.dev or chrome://tracing

On an accelerator, times are the device's, from events on its streams. On the CPU, times are the host's: the span of a
collective ends with the wait that needed it. A wait is a span of its own, of the compute stream: it is the exposed part
of communication. Nothing is measured outside of `trace` and of the steps in ``StreamShard(model, trace_steps=...)``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import Collective, Fence, Observer, Rule, StepEvent, StreamName, Work
from streamshard.core.engine import ROOT_UNIT, Engine
from streamshard.core.module_state import engine_of
from streamshard.errors import log, warn_user
from streamshard.tools.timeline import FOR_GRADS, FOR_OWNERS, FOR_WEIGHTS, Span, Trace
from streamshard.torch_private import skip

# -- what users call --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record what the model and optimizers do inside the context, on this rank. Enter it between steps.

    Not collective: one rank may do it, or several. On an accelerator the host waits for the device at the end.

    Args:
        model: made by `StreamShard`.

    Yields:
        A `Trace`, which is complete when the body has ended without an error.

    Raises:
        ShardingError: `model` is not sharded.
    """
    recorder = _Recorder(engine_of(model))
    recorder.begin()
    with _hearing_optimizers(recorder), recorder.streams.observed_by(recorder):
        yield recorder.trace
    recorder.finish()


class StepTracer(Observer):
    """Traces some of the next steps, and writes the files that `StreamShard` documents. The engine's streams own it.

    Args:
        engine: between steps. The tracer does not keep it.
        directory: exists.
        first, last: the steps, both included. 1 is the next step.
    """

    def __init__(self, engine: Engine, directory: str | os.PathLike[str], first: int, last: int) -> None:
        self._directory, self._first, self._last = Path(directory), first, last
        self._recorder = _Recorder(engine, first)
        self._step = 0
        self._is_due = False  # a backward has ended since the last step
        self._running = contextlib.ExitStack()
        self._running.enter_context(engine.streams.observed_by(self))
        self._running.enter_context(_hearing_optimizers(self))
        if first == 1:
            self._begin()
        if self._recorder.trace.rank == 0:
            atexit.register(self._warn)

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        """See `Observer`. The recorder hears of optimizers here, of everything else from the streams."""
        if moment in (StepEvent.OPTIMIZER_BEGINS, StepEvent.OPTIMIZER_ENDS):
            if self._first <= self._step + 1 <= self._last:
                self._recorder.on_event(moment, unit)
            if self._is_due and moment is StepEvent.OPTIMIZER_ENDS:
                self._is_due = False
                self._end_step()
        elif self._step == self._last:  # not above: torch is going through the hooks that this removes
            self._running.close()
        elif moment is StepEvent.BACKWARD_ENDS:
            self._is_due = True

    def _end_step(self) -> None:
        self._step += 1
        if self._step == self._first - 1:
            self._begin()
        elif self._step == self._last:
            self._recorder.finish()
            atexit.unregister(self._warn)
            self._write(self._recorder.trace)

    def _begin(self) -> None:
        self._recorder.begin()
        self._running.enter_context(self._recorder.streams.observed_by(self._recorder))

    def _warn(self) -> None:
        why = "no trace was written: the run ended after step %d, before the last of trace_steps=(%d, %d)"
        log.warning(why, self._step, self._first, self._last)

    def _write(self, found: Trace) -> None:
        try:
            found.save_json(self._directory / f"trace-rank{found.rank}.json")
            if found.rank == 0:
                (self._directory / "summary.txt").write_text(f"{found}\n")
                log.info("the trace of steps %d to %d is in %s", self._first, self._last, self._directory.absolute())
        except OSError as error:  # training goes on
            warn_user(f"the trace of steps {self._first} to {self._last} is incomplete: {error}")


# -- recording --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hearing_optimizers(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the steps of all optimizers in this process. Not to be left inside of a step's hooks."""
    hooks = [
        register_optimizer_step_pre_hook(skip(lambda *_: observer.on_event(StepEvent.OPTIMIZER_BEGINS, None))),
        register_optimizer_step_post_hook(skip(lambda *_: observer.on_event(StepEvent.OPTIMIZER_ENDS, None))),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_BEGINS = {
    StepEvent.CAST_BEGINS: "cast",
    StepEvent.FORWARD_BEGINS: "forward",
    StepEvent.RECOMPUTATION_BEGINS: "forward",
    StepEvent.BACKWARD_BEGINS: "backward",
    StepEvent.OPTIMIZER_BEGINS: "optimizer",
}
_ENDS = {
    StepEvent.CAST_ENDS: "cast",
    StepEvent.FORWARD_ENDS: "forward",
    StepEvent.RECOMPUTATION_ENDS: "forward",
    StepEvent.BACKWARD_BEGINS: "backward",
    StepEvent.BACKWARD_ENDS: "backward",
    StepEvent.OPTIMIZER_ENDS: "optimizer",
}


class _Recorder(Observer):
    """Stamps the beginning and the end of what it observes: seconds of the host, or events of the device, its own.

    `begin` and `finish` are called once each. Events after `finish` change nothing.

    Args:
        engine: see `trace`. The recorder does not keep it.
        first_step: number of the first step.

    Attributes:
        trace: `finish` fills it.
        streams: the engine's.
    """

    def __init__(self, engine: Engine, first_step: int = 1) -> None:
        ranks = engine.ranks
        rank = ranks.users_group.rank()
        about = f"rank {rank} of {ranks.total_size} on {ranks.streams.device}"
        self.trace = Trace(rank, about, [unit.name for unit in engine.units], first_step)
        self.streams = ranks.streams
        self._unit_of = [unit.index for unit in engine.units for _ in unit.flat_params]  # by tag
        self._spans: list[Span] = []
        self._issued: Span | None = None  # a collective that no fence has recorded yet
        self._under_way: dict[Work, Span] = {}  # by last work: collectives that the host has not waited for
        self._blocked: Any = None  # when the compute stream began to wait
        self._computing: list[Span] = []  # a layer inside a layer comes last
        self._loss: Span | None = None  # between a forward and its backward
        self._host_s = self._host_began = 0.0

    def begin(self) -> None:
        """The trace begins now."""
        self._start = self._now(StreamName.COMPUTE)

    # -- collectives ------------------------------------------------------------------------------------------------

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """See `Observer`. The flat parameters of a unit share one span."""
        unit = self._unit_of[tag] if tag is not None and tag < len(self._unit_of) else None
        is_of_flags = tag is not None and unit is None
        found = self._begin(stream, "flags" if is_of_flags else collective.value, unit)
        if self._issued is None or self._issued[:4] != found[:4]:
            self._issued = found
        n_bytes = sum(tensor.nbytes for tensor in (*reads, *writes))
        self._issued = self._issued._replace(n_bytes=self._issued.n_bytes + n_bytes)

    def on_record(self, fence: Fence) -> None:
        """See `Observer`."""
        issued = self._issued
        if issued is None or fence.source is not issued.stream:
            return
        self._issued = None
        if fence.works:
            self._under_way[fence.works[-1]] = issued
        else:
            self._end(issued)

    # -- waits ------------------------------------------------------------------------------------------------------

    def on_block(self, fence: Fence, works: Sequence[Work]) -> None:
        """See `Observer`."""
        if works or fence.target is StreamName.COMPUTE:
            self._blocked = self._now(StreamName.COMPUTE)

    def on_done(self, fence: Fence, works: Sequence[Work]) -> None:
        """See `Observer`."""
        for work in works:
            if work in self._under_way:
                self._end(self._under_way.pop(work))
        self._end_wait(fence)

    def on_wait(self, fence: Fence) -> None:
        """See `Observer`. On the CPU `on_done` comes first."""
        if self.streams.has_streams and fence.target is StreamName.COMPUTE:
            self._end_wait(fence)

    def _end_wait(self, fence: Fence) -> None:
        activity = FOR_WEIGHTS if fence.rule in (Rule.WEIGHTS_ARRIVED, Rule.SHARDS_READ) else FOR_GRADS
        if self._computing and self._computing[-1].activity == "optimizer":
            activity = FOR_OWNERS
        self._end(Span(StreamName.COMPUTE, activity, None, f"{activity}: {fence.what}", self._blocked, 0.0))

    # -- computation ------------------------------------------------------------------------------------------------

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        """See `Observer`."""
        if moment in _ENDS:
            self._close(_ENDS[moment])
        if unit == ROOT_UNIT:
            self._between(moment)
        if moment in _BEGINS:
            self._open(_BEGINS[moment], unit)

    def _between(self, moment: StepEvent) -> None:
        """The model's forward or backward begins or ends. The time between the two is the loss."""
        if moment is StepEvent.FORWARD_BEGINS:  # an exception may have ended the last pass
            self._computing = [span for span in self._computing if span.activity == "optimizer"]
        if moment is StepEvent.BACKWARD_BEGINS and self._loss is not None:
            self._end(self._loss)
        self._loss = self._begin(StreamName.COMPUTE, "loss", None) if moment is StepEvent.FORWARD_ENDS else None

    def _open(self, activity: str, unit: int | None) -> None:
        """The compute stream begins an activity."""
        if not self._computing:
            self._host_began = perf_counter()
        self._computing.append(self._begin(StreamName.COMPUTE, activity, unit))

    def _close(self, activity: str) -> None:
        """The innermost activity ends, if it is this one."""
        if self._computing and self._computing[-1].activity == activity:
            self._end(self._computing.pop())
            if not self._computing:
                self._host_s += perf_counter() - self._host_began

    def _now(self, stream: StreamName) -> Any:
        if not self.streams.has_streams:
            return perf_counter()
        event = self.streams.module.Event(enable_timing=True)
        event.record(self.streams.device_stream(stream))
        return event

    def _to_us(self, stamp: Any) -> float:
        """Microseconds since the start. On an accelerator the device must be idle."""
        if isinstance(stamp, float):
            return (stamp - float(self._start)) * 1e6
        return float(self._start.elapsed_time(stamp)) * 1e3

    def _begin(self, stream: StreamName, activity: str, unit: int | None) -> Span:
        name = activity if unit is None else f"{activity} {self.trace.units[unit]}"
        return Span(stream, activity, unit, name, self._now(stream), 0.0)

    def _end(self, begun: Span) -> None:
        self._spans.append(begun._replace(stop_us=self._now(begun.stream)))

    def finish(self) -> None:
        """Fill the trace. Collectives without a wait, and an optimizer's step, end with it."""
        for begun in self._under_way.values():
            self._end(begun)
        while self._computing:
            self._close(self._computing[-1].activity)
        stop, found = self._now(StreamName.COMPUTE), self.trace
        if self.streams.has_streams:
            self.streams.module.synchronize(self.streams.device)
            found.host_us = self._host_s * 1e6
        for span in reversed(self._spans):  # outer ones first, also where times are equal
            found.spans.append(span._replace(start_us=self._to_us(span.start_us), stop_us=self._to_us(span.stop_us)))
        found.spans.sort(key=lambda span: (span.start_us, -span.stop_us))
        found.total_us = self._to_us(stop)
