"""Where the time of a training step goes: spans of compute, communication and waits on one rank.

    with streamshard.trace(model) as found:      # enter it between steps, for one step or several
        model(batch).loss.backward()
        optimizer.step()
    print(found)                                 # means per step; found.summary() returns them for a tracker
    found.save("step.json")                      # of all ranks, for Perfetto; call it on every rank

On an accelerator, times are the device's, from events on its streams. On the CPU, times are the host's: the span of a
collective ends when the host has waited for the collective. A wait is a span of the compute stream: it is the exposed
part of communication. Nothing is measured outside of `trace`. torch.profiler shows units by name
(`streamshard.core.profiler`), but no waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import Collective, Fence, Observer, Rule, StepPart, StreamName, Work
from streamshard.core.engine import ROOT_UNIT, Engine
from streamshard.core.module_state import engine_of
from streamshard.tools.spans import FOR_GRADS, FOR_OWNERS, FOR_WEIGHTS, Span, Trace
from streamshard.torch_private import skip


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record how the model and all optimizers spend time inside the context, on this rank. Enter it between steps.

    Not collective: one rank may trace alone. On an accelerator the host waits for the device at the end.

    Args:
        model: made by `StreamShard`.

    Yields:
        A `Trace`, which is filled when the body ends without an error.

    Raises:
        ShardingError: `model` is not sharded.
    """
    recorder = _Recorder(engine_of(model))

    def noting(*, begins: bool) -> Callable[..., None]:
        # torch.compile breaks its graph here, and does not trace the recorder.
        return skip(lambda *_: recorder.on_event(StepPart.OPTIMIZER, None, begins=begins))

    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(noting(begins=True)).remove)
        stack.callback(register_optimizer_step_post_hook(noting(begins=False)).remove)
        stack.enter_context(recorder.streams.observed_by(recorder))
        yield recorder.trace
    recorder.finish()


class _Recorder(Observer):
    """Stamps beginnings and ends: with seconds of the host's clock, or on an accelerator with events of its own.

    The trace begins now. Events after `finish` change nothing.

    Args:
        engine: see `trace`.

    Attributes:
        trace: `finish` fills it.
        streams: the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        ranks = engine.ranks
        about = f"rank {ranks.users_group.rank()} of {ranks.total_size} on {ranks.streams.device}"
        self.trace = Trace(about, [unit.name for unit in engine.units], ranks=ranks)
        self.streams = ranks.streams
        self._unit_of = [unit.index for unit in engine.units for _ in unit.flat_params]  # by tag
        self._spans: list[Span] = []
        self._issued: Span | None = None  # a collective that no fence has recorded yet
        self._under_way: dict[Work, Span] = {}  # by last work: collectives that the host has not waited for yet
        self._blocked: Any = None  # stamp: the compute stream began to wait
        self._computing: list[Span] = []  # activities that have begun; the innermost is last
        self._loss: Span | None = None  # between a forward and its backward
        self._host_s = self._host_began = 0.0
        self._start = self._now(StreamName.COMPUTE)

    # -- collectives ------------------------------------------------------------------------------------------------

    def on_collective(
        self, stream: StreamName, collective: Collective, tag: int | None, reads: Any, writes: Any
    ) -> None:
        """See `Observer`. The flat parameters of a unit share one span."""
        unit = self._unit_of[tag] if tag is not None and tag < len(self._unit_of) else None
        is_of_flags = tag is not None and unit is None
        found = self._begin(stream, "flags" if is_of_flags else collective.value, unit)
        if self._issued is None or self._issued[:3] != found[:3]:  # else the unit's next flat parameter
            self._issued = found

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

    def on_block(self, fence: Fence, target: StreamName, works: Sequence[Work]) -> None:
        """See `Observer`."""
        if works or target is StreamName.COMPUTE:
            self._blocked = self._now(StreamName.COMPUTE)

    def on_done(self, fence: Fence, works: Sequence[Work]) -> None:
        """See `Observer`."""
        for work in works:
            if work in self._under_way:
                self._end(self._under_way.pop(work))
        self._end_wait(fence)

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        """See `Observer`. On the CPU `on_done` comes first."""
        if self.streams.has_streams and target is StreamName.COMPUTE:
            self._end_wait(fence)

    def _end_wait(self, fence: Fence) -> None:
        activity = FOR_WEIGHTS if fence.rule in (Rule.WEIGHTS_ARRIVED, Rule.SHARDS_READ) else FOR_GRADS
        if self._computing and self._computing[-1].activity == "optimizer":
            activity = FOR_OWNERS
        self._end(Span(StreamName.COMPUTE, activity, None, self._blocked, 0.0))

    # -- computation ------------------------------------------------------------------------------------------------

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        """See `Observer`. One unit's backward ends where the next one's begins."""
        if part in (StepPart.ALL_GATHER, StepPart.REDUCTION):  # `on_collective` has their spans
            return
        activity = "forward" if part is StepPart.RECOMPUTATION else part.value
        if not begins or part is StepPart.BACKWARD:
            self._close(activity)
        if unit == ROOT_UNIT:
            self._between(part, begins=begins)
        if begins:
            self._open(activity, unit)

    def _between(self, part: StepPart, *, begins: bool) -> None:
        """The model's forward or backward begins or ends. The time between forward and backward is the loss."""
        is_forward = part is StepPart.FORWARD
        if is_forward and begins:  # an exception may have ended the last pass
            self._computing = [span for span in self._computing if span.activity == "optimizer"]
        if part is StepPart.BACKWARD and self._loss is not None:
            self._end(self._loss)
        self._loss = self._begin(StreamName.COMPUTE, "loss", None) if is_forward and not begins else None

    def _open(self, activity: str, unit: int | None) -> None:
        """The compute stream begins an activity."""
        if not self._computing:
            self._host_began = perf_counter()
        self._computing.append(self._begin(StreamName.COMPUTE, activity, unit))

    def _close(self, activity: str) -> None:
        """End the innermost activity, if it is `activity`."""
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
        return Span(stream, activity, unit, self._now(stream), 0.0)

    def _end(self, begun: Span) -> None:
        self._spans.append(begun._replace(stop_us=self._now(begun.stream)))

    def finish(self) -> None:
        """Fill the trace. Collectives without a wait, and a step that an error has ended, end now."""
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
