"""Where the time of a training step goes: spans of compute, communication and waits on one rank.

    with streamshard.trace(model) as found:      # enter it between steps, for one step or several
        model(batch).loss.backward()
        optimizer.step()
    print(found)                                 # means per step; found.summary() returns them for a tracker

On an accelerator, times are the device's, from events on its streams. On the CPU, times are the host's: the span of a
collective ends when the host has waited for the collective. A wait is a span of the compute stream: it is the exposed
part of communication. Nothing is measured outside of `trace`. torch.profiler shows units by name
(`streamshard.core.profiler`), but no waits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.comm.streams import Collective, Fence, Observer, Rule, StepEvent, StreamName, Work
from streamshard.core.engine import ROOT_UNIT, Engine
from streamshard.core.module_state import engine_of
from streamshard.torch_private import skip

FOR_WEIGHTS, FOR_GRADS, FOR_OWNERS = "wait for weights", "wait for gradients", "wait for whole parameters"


class Span(NamedTuple):
    """A stretch of time of one stream.

    Attributes:
        stream: the stream.
        activity: "cast" (in host memory), "forward", "loss", "backward", "optimizer", a wait (`FOR_WEIGHTS`,
            `FOR_GRADS`, `FOR_OWNERS`), a collective ("all_gather", ..), or "flags" (which parameters have gradients).
        unit: index of the unit; None if the activity belongs to no unit.
        start_us, stop_us: microseconds since the trace began; stamps (see `_Recorder`) while the trace is recorded.
    """

    stream: StreamName
    activity: str
    unit: int | None
    start_us: float
    stop_us: float


@dataclass
class Trace:
    """Recorded steps of one rank. `trace` fills it when its body ends.

    Attributes:
        about: the rank and its device, in words.
        units: names of the units, by index.
        spans: all spans, in order of their start.
        total_us: microseconds of all steps.
        host_us: microseconds of the host in all steps (``host_s`` of `summary`); None on the CPU.
    """

    about: str
    units: list[str]
    spans: list[Span] = field(default_factory=list)
    total_us: float = 0.0
    host_us: float | None = None

    @property
    def steps(self) -> int:
        """The number of steps, at least 1. The first optimizer step after a backward ends a step."""
        step = "backward", "optimizer"
        ends = sorted((span.stop_us, span.activity) for span in self.spans if span.activity in step)
        count = sum((before[1], after[1]) == step for before, after in itertools.pairwise(ends))
        return max(count, 1)

    def summary(self) -> dict[str, float]:
        """Seconds per step by kind of activity, means over the traced steps.

        ``step_s`` is the sum of ``compute_s``, both exposed times, ``optimizer_s`` and ``other_s``.

        - ``step_s``: a step.
        - ``compute_s``: forward, loss and backward, without waits; casts in host memory too.
        - ``exposed_all_gather_s``: the compute stream (on the CPU: the host) waits for weights.
        - ``exposed_reduction_s``: the compute stream waits for reductions of gradients.
        - ``optimizer_s``: steps of all optimizers, with the exchanges of a `WholeParameterOptimizer`.
        - ``other_s``: data, ``zero_grad``, clipping, logging and all other time.
        - ``host_s``, on accelerators only: the host is inside forwards, backwards and optimizer steps. If ``host_s`` is
          about ``step_s``, the device waits for the host.
        """
        own, steps = self._own_us(), self.steps
        found = {
            "step_s": self.total_us,
            "compute_s": own["cast"] + own["forward"] + own["loss"] + own["backward"],
            "exposed_all_gather_s": own[FOR_WEIGHTS],
            "exposed_reduction_s": own[FOR_GRADS],
            "optimizer_s": own["optimizer"] + own[FOR_OWNERS],
            "other_s": self.total_us - sum(own.values()),
        }
        if self.host_us is not None:
            found["host_s"] = self.host_us
        return {name: value / 1e6 / steps for name, value in found.items()}

    def __str__(self) -> str:
        found, lines = self.summary(), [f"{self.about}, {self.steps} step{'s' * (self.steps > 1)}, per step:"]
        for name, seconds in found.items():
            words, share = name.removesuffix("_s").replace("_", " "), seconds / (found["step_s"] or 1.0)
            lines.append(f"  {words:<20}{seconds * 1e3:>10.1f} ms {share:>7.1%}")
        return "\n".join(lines)

    def _own_us(self) -> dict[str, float]:
        """By activity of the compute stream: its microseconds, without those of activities inside it."""
        own: dict[str, float] = defaultdict(float)
        around: list[Span] = []
        for span in self.spans:
            if span.stream is StreamName.COMPUTE:
                while around and around[-1].stop_us <= span.start_us:
                    around.pop()
                length_us = span.stop_us - span.start_us
                own[span.activity] += length_us
                if around:
                    own[around[-1].activity] -= length_us
                around.append(span)
        return own


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
    hooks = [
        register_optimizer_step_pre_hook(skip(lambda *_: recorder.on_event(StepEvent.OPTIMIZER_BEGINS, None))),
        register_optimizer_step_post_hook(skip(lambda *_: recorder.on_event(StepEvent.OPTIMIZER_ENDS, None))),
    ]
    try:
        with recorder.streams.observed_by(recorder):
            yield recorder.trace
    finally:
        for hook in hooks:
            hook.remove()
    recorder.finish()


# By the first word of the `StepEvent`s at which an activity begins and ends.
_ACTIVITIES = {
    "RECOMPUTATION": "forward",
    **{each.upper(): each for each in ("cast", "forward", "backward", "optimizer")},
}


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
        self.trace = Trace(about, [unit.name for unit in engine.units])
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
        if self._issued is None or self._issued[:3] != found[:3]:
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

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        """See `Observer`."""
        word, _, edge = moment.name.partition("_")
        activity = _ACTIVITIES.get(word, "")
        if edge == "ENDS" or activity == "backward":  # one unit's backward ends where the next one's begins
            self._close(activity)
        if unit == ROOT_UNIT:
            self._between(moment)
        if edge == "BEGINS" and activity:
            self._open(activity, unit)

    def _between(self, moment: StepEvent) -> None:
        """The model's forward or backward begins or ends. The time between forward and backward is the loss."""
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
