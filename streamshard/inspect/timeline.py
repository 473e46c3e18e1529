"""A recorded stretch of training on one rank: its spans, what they say, and how they are drawn.

`streamshard.inspect.trace` records it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from streamshard.comm.streams import StreamName
from streamshard.errors import ConfigError

FOR_WEIGHTS, FOR_GRADS, FOR_OWNERS = "wait for weights", "wait for gradients", "wait for whole parameters"


class _Look(NamedTuple):
    """How an activity is drawn: in which row, in words, and its color."""

    row: str
    words: str
    color: str


_DRAWN = {
    "cast": _Look("compute", "casts weights", "#c7b95a"),
    "forward": _Look("compute", "computes forward", "#74a9cf"),
    "loss": _Look("compute", "computes the loss", "#a6cfe0"),
    "backward": _Look("compute", "computes backward", "#2b6ca8"),
    "optimizer": _Look("compute", "optimizer", "#b5a8d5"),
    FOR_WEIGHTS: _Look("compute", "waits for weights", "#d62728"),
    FOR_GRADS: _Look("compute", "waits for gradients", "#ff9f1c"),
    FOR_OWNERS: _Look("compute", "waits for whole parameters", "#8c564b"),
    "all_gather": _Look("all-gather", "all-gather", "#3a9d5d"),
    "reduce_scatter": _Look("reduction", "reduction", "#7f4fa3"),
    "all_reduce": _Look("reduction", "average over replicas", "#b07cc6"),
    "flags": _Look("reduction", "which gradients exist", "#999999"),
    "all_to_all": _Look("all-to-all", "exchange of whole parameters", "#a0785a"),
}
_WIDTH_IN, _LETTER_IN = 15.0, 0.11
_SPANS_WITH_EDGES = 200  # of a lane with more, white edges would hide the spans


class Span(NamedTuple):
    """A stretch of time of one stream.

    Attributes:
        stream: whose time.
        activity: what takes it, a key of `_DRAWN`.
        unit: index of the unit; None if the activity belongs to no unit.
        name: the activity and the unit (of a wait, the guarded object), in words.
        start_us, stop_us: microseconds since the trace began; stamps (see `_Recorder`) while the trace is recorded.
        n_bytes: of a collective: what it reads and writes on this rank.
    """

    stream: StreamName
    activity: str
    unit: int | None
    name: str
    start_us: float
    stop_us: float
    n_bytes: int = 0

    @property
    def length_us(self) -> float:
        """How long it takes."""
        return self.stop_us - self.start_us


@dataclass
class Trace:
    """Recorded steps of one rank. `trace` fills it when its body ends.

    Attributes:
        rank: this rank, among all ranks that train the model.
        about: the rank and its device, in words.
        units: names of the units, by index.
        first_step: number of the first step.
        spans: in order of their start.
        total_us: how long all steps took.
        host_us: the sum over all steps of ``host_s``, see `summary`; None on the CPU.
    """

    rank: int
    about: str
    units: list[str]
    first_step: int = 1
    spans: list[Span] = field(default_factory=list)
    total_us: float = 0.0
    host_us: float | None = None

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step, both included. The first optimizer step behind a backward ends a step."""
        ends = sorted(
            (span.stop_us, span.activity) for span in self.spans if span.activity in ("backward", "optimizer")
        )
        count = sum((before[1], after[1]) == ("backward", "optimizer") for before, after in itertools.pairwise(ends))
        return self.first_step, self.first_step + max(count, 1) - 1

    def summary(self) -> dict[str, float]:
        """Where the time goes: seconds per step, means over the traced steps.

        ``step_s`` is the sum of ``compute_s``, both exposed times, ``optimizer_s`` and ``other_s``.

        - ``step_s``: a step.
        - ``compute_s``: cast of weights, forward, loss and backward, without waits.
        - ``exposed_all_gather_s``: the compute stream (on the CPU: the host) waits for weights.
        - ``exposed_reduction_s``: it waits for reductions of gradients.
        - ``optimizer_s``: steps of all optimizers, with the exchanges of a `WholeParameterOptimizer`.
        - ``other_s``: everything else: data, ``zero_grad``, clipping, logging.
        - ``host_s``, on accelerators only: the host is inside forwards, backwards and optimizer steps. If this is about
          ``step_s``, the device waits for the host. On the CPU the host computes.
        - ``communication_s``, on accelerators only: what the step's collectives would take one after another, if each
          had the highest bandwidth of its kind in the trace. On the CPU nobody knows when a collective ends before it
          is needed.
        - ``lower_bound_s``: the larger of ``compute_s + optimizer_s`` and ``communication_s``.
        """
        own, (first, last) = self._own_us(), self.steps
        found = {
            "step_s": self.total_us,
            "compute_s": own["cast"] + own["forward"] + own["loss"] + own["backward"],
            "exposed_all_gather_s": own[FOR_WEIGHTS],
            "exposed_reduction_s": own[FOR_GRADS],
            "optimizer_s": own["optimizer"] + own[FOR_OWNERS],
            "other_s": self.total_us - sum(own.values()),
        }
        if self.host_us is not None:
            found |= {"host_s": self.host_us, "communication_s": self._communication_us()}
        found["lower_bound_s"] = max(found["compute_s"] + found["optimizer_s"], found.get("communication_s", 0.0))
        return {name: value / 1e6 / (last - first + 1) for name, value in found.items()}

    def __str__(self) -> str:
        found, lines = self.summary(), [f"{self.about}, steps {self.steps[0]} to {self.steps[1]}, per step:"]
        for name, seconds in found.items():
            words, share = name.removesuffix("_s").replace("_", " "), seconds / (found["step_s"] or 1.0)
            lines.append(f"  {words:<20}{seconds * 1e3:>10.1f} ms {share:>7.1%}")
        return "\n".join(lines)

    def _own_us(self) -> dict[str, float]:
        """By activity of the compute stream, its time without that of the activities inside it."""
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

    def _communication_us(self) -> float:
        """See `summary`. Streams run side by side."""
        kinds: dict[tuple[StreamName, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.n_bytes:
                kinds[span.stream, span.activity].append(span)
        needed = dict.fromkeys(StreamName, 0.0)
        for (stream, _), own in kinds.items():
            needed[stream] += min(each.length_us / each.n_bytes for each in own) * sum(each.n_bytes for each in own)
        return max(needed.values())

    # -- files ------------------------------------------------------------------------------------------------------

    def _lanes(self) -> list[tuple[str, list[Span]]]:
        """The rows of the picture, each once for every lane. Collectives of a lane do not overlap."""
        rows: dict[str, list[list[Span]]] = {look.row: [] for look in _DRAWN.values()}
        for span in self.spans:
            lanes, nests = rows[_look(span).row], span.stream is StreamName.COMPUTE
            lane = next((each for each in lanes if nests or each[-1].stop_us <= span.start_us), None)
            if lane is None:
                lanes.append(lane := [])
            lane.append(span)
        return [(row, lane) for row, lanes in rows.items() for lane in lanes]

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format of Perfetto and chrome://tracing. Each rank is a process, each lane a thread."""
        pid = {"pid": self.rank}
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", **pid, "args": {"name": self.about}}]
        for number, (row, lane) in enumerate(self._lanes()):
            pid["tid"] = number
            events.append({"ph": "M", "name": "thread_name", **pid, "args": {"name": row}})
            for span in lane:
                times = {"ts": span.start_us, "dur": span.length_us}
                events.append({"ph": "X", "name": span.name, "cat": span.activity, **pid, **times})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw when this rank computes, waits and communicates. The suffix of `path` says the format, such as ".png".

        Raises:
            ConfigError: matplotlib is not installed, or does not know the format.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ConfigError("a picture needs matplotlib: pip install matplotlib") from error
        lanes = self._lanes()
        figure: Any = Figure((_WIDTH_IN, 1.8 + 0.4 * len(lanes)), dpi=110, layout="constrained")
        title = f"{self.about}: {self.summary()['step_s'] * 1e3:.1f} ms a step"
        axes = figure.add_subplot(
            title=title, xlabel="ms", xlim=(0, self.total_us / 1e3), ylim=(len(lanes) - 0.5, -0.5)
        )
        rows = {row: height for height, (row, _) in reversed([*enumerate(lanes)])}  # by the height of the first lane
        axes.set_yticks([*rows.values()], [*rows])
        axes.spines[["left", "right", "top"]].set_visible(False)
        for height, (_, lane) in enumerate(lanes):
            starts, lengths = [span.start_us / 1e3 for span in lane], [span.length_us / 1e3 for span in lane]
            edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6 if len(lane) < _SPANS_WITH_EDGES else 0.0}
            axes.barh([height] * len(lane), lengths, left=starts, color=[_look(span).color for span in lane], **edges)
            for span, start, length in zip(lane, starts, lengths, strict=True):
                label = self.units[span.unit].rpartition(".")[2] if span.unit else ""
                if len(label) * _LETTER_IN < length * 1e3 / self.total_us * _WIDTH_IN:
                    axes.text(start + length / 2, height, label, ha="center", va="center", fontsize=8, color="white")
        looks = dict.fromkeys(map(_look, self.spans))
        patches = [Patch(color=look.color, label=look.words) for look in looks]
        figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
        try:
            figure.savefig(path)
        except ValueError as error:
            raise ConfigError(f"the picture {os.fspath(path)!r}: {error}") from error


def _look(span: Span) -> _Look:
    return _DRAWN[span.activity]
