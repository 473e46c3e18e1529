"""Recorded steps of one rank: spans, and a summary of them. `streamshard.tools.trace` records."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from streamshard.comm.streams import StreamName

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

    @property
    def length_us(self) -> float:
        """The span's length in microseconds."""
        return self.stop_us - self.start_us


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
        - ``compute_s``: cast of weights, forward, loss and backward, without waits.
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
                own[span.activity] += span.length_us
                if around:
                    own[around[-1].activity] -= span.length_us
                around.append(span)
        return own
