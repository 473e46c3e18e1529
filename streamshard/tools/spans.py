"""Recorded steps: their spans, sums of these, and a file that trace viewers show."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamshard.comm.ranks import RankGroup, run_on_first
from streamshard.comm.streams import StreamName
from streamshard.config import AnyPath, parse_path

FOR_WEIGHTS, FOR_GRADS, FOR_OWNERS = "wait for weights", "wait for gradients", "wait for whole parameters"


class Span(NamedTuple):
    """A stretch of time of one stream.

    Attributes:
        stream: the stream.
        activity: "cast" (in host memory), "forward", "loss", "backward", "optimizer", a wait (`FOR_WEIGHTS`,
            `FOR_GRADS`, `FOR_OWNERS`), the value of a `Collective`, or "flags" (which parameters have gradients).
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
        ranks: the model's; None in a copy that another process has sent.
    """

    about: str
    units: list[str]
    spans: list[Span] = field(default_factory=list)
    total_us: float = 0.0
    host_us: float | None = None
    ranks: RankGroup | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ranks": None}  # process groups cannot be sent

    @property
    def steps(self) -> int:
        """The number of steps, at least 1. The first optimizer step after a backward ends a step."""
        step = "backward", "optimizer"
        ends = sorted((span.stop_us, span.activity) for span in self.spans if span.activity in step)
        # Other backwards are of micro-batches, and other optimizers belong to the same step.
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

    def save(self, path: AnyPath, *, all_ranks: bool = True) -> None:
        """Write the trace for https://ui.perfetto.dev or chrome://tracing, in Chrome's format (JSON). Rank 0 writes it.

        Each rank is a process, whose time begins where the rank entered the trace.

        Args:
            path: of the file.
            all_ranks: every rank has traced and calls this. False: this rank writes its own trace.

        Raises:
            ConfigError: `path` is no path.
            StreamShardError: on every rank: rank 0 cannot write.
        """
        file, traces = parse_path("path", path), [self]

        def write() -> None:
            events = [event for rank, trace in enumerate(traces) for event in _events_of(trace, rank)]
            file.write_text(json.dumps({"traceEvents": events}))

        if self.ranks is None or not all_ranks:
            write()
            return
        traces = self.ranks.gather_objects("collect traces", self)
        run_on_first(self.ranks, "write a trace", write, at=file)

    def _own_us(self) -> dict[str, float]:
        """By activity of the compute stream: microseconds, without those of activities inside it."""
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


# -- the file ----------------------------------------------------------------------------------------------------------


def lanes_of(trace: Trace) -> list[tuple[str, list[Span]]]:
    """The rows, each once for every lane. Collectives of a lane do not overlap."""
    rows: dict[str, list[list[Span]]] = {"compute": []}
    for span in trace.spans:
        # Viewers put spans of one thread inside each other. Collectives of a kind may overlap.
        nests = span.stream is StreamName.COMPUTE
        lanes = rows.setdefault("compute" if nests else span.activity, [])
        lane = next((each for each in lanes if nests or each[-1].stop_us <= span.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return [(row, lane) for row, lanes in rows.items() for lane in lanes]


def _events_of(trace: Trace, rank: int) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace format: a process for the rank, a thread for each lane."""
    # M: a name; X: a span, with its start and duration.
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": trace.about}}
    for number, (row, lane) in enumerate(lanes_of(trace)):
        place = {"pid": rank, "tid": number}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": row}}
        for span in lane:
            unit = "" if span.unit is None else f" {trace.units[span.unit]}"
            times = {"ts": span.start_us, "dur": span.stop_us - span.start_us}
            yield {"ph": "X", **place, "name": f"{span.activity}{unit}", **times}
