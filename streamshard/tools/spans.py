"""Recorded steps: their spans, sums of these, and a picture: an HTML page that loads nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
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
        ranks: the model's; None in a copy that another process has sent.
    """

    about: str
    units: list[str]
    spans: list[Span] = field(default_factory=list)
    total_us: float = 0.0
    host_us: float | None = None
    ranks: RankGroup | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ranks": None}

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
        own, steps = defaultdict[str, float](float), self.steps
        for (activity, _), own_us in self.own_us().items():
            own[activity] += own_us
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
        """Draw the trace as an HTML page, the ranks below each other; names the slowest layers. Rank 0 writes it.

        Args:
            path: the page's path.
            all_ranks: every rank has traced and calls this. False: this rank draws and writes its own trace.

        Raises:
            ConfigError: `path` is no path.
            StreamShardError: on every rank: rank 0 cannot write.
        """
        file, traces = parse_path("path", path), [self]
        if self.ranks is None or not all_ranks:
            file.write_text(page_of(traces))
            return
        traces = self.ranks.gather_objects("collect traces", self)
        run_on_first(self.ranks, "write a trace", lambda: file.write_text(page_of(traces)), at=file)

    def own_us(self) -> dict[tuple[str, int | None], float]:
        """By activity of the compute stream, and unit: microseconds, without those of activities inside it."""
        own: dict[tuple[str, int | None], float] = defaultdict(float)
        around: list[Span] = []
        for span in self.spans:
            if span.stream is StreamName.COMPUTE:
                while around and around[-1].stop_us <= span.start_us:
                    around.pop()
                length_us = span.stop_us - span.start_us
                own[span[1:3]] += length_us
                if around:
                    own[around[-1][1:3]] -= length_us
                around.append(span)
        return own


# -- the picture -------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """How an activity is drawn: in which row, in words, and its color."""

    row: str
    words: str
    color: str


LOOKS = {
    "cast": Look("compute", "casts weights", "#c7b95a"),
    "forward": Look("compute", "computes forward", "#74a9cf"),
    "loss": Look("compute", "computes the loss", "#a6cfe0"),
    "backward": Look("compute", "computes backward", "#2b6ca8"),
    "optimizer": Look("compute", "optimizer", "#b5a8d5"),
    FOR_WEIGHTS: Look("compute", "waits for weights", "#d62728"),
    FOR_GRADS: Look("compute", "waits for gradients", "#ff9f1c"),
    FOR_OWNERS: Look("compute", "waits for whole parameters", "#8c564b"),
    "all_gather": Look("all-gather", "all-gather", "#3a9d5d"),
    "reduce_scatter": Look("reduction", "reduction", "#7f4fa3"),
    "all_reduce": Look("reduction", "average over replicas", "#b07cc6"),
    "flags": Look("reduction", "which gradients exist", "#999999"),
    "all_to_all": Look("all-to-all", "exchange of whole parameters", "#a0785a"),
}
_SLOWEST = 5  # layers in the table
_STEP_PX, _MOST_STEPS, _LEFT_PX, _LANE_PX, _LETTER_PX, _TICKS = 1000, 8, 110, 26, 7, 10


def page_of(traces: Sequence[Trace]) -> str:
    """The page, as HTML: ``trace.html``, filled in."""
    steps, first = traces[0].steps, traces[0]
    title = f"{len(traces)} rank{'s' * (len(traces) > 1)}, {steps} step{'s' * (steps > 1)}: "
    title += f"{first.summary()['step_s'] * 1e3:.1f} ms a step"
    looks = dict.fromkeys(LOOKS[span.activity] for trace in traces for span in trace.spans)
    page = Template(files(__package__).joinpath("trace.html").read_text())
    return page.substitute(
        title=title,
        legend=" ".join(f'<span><i style="background:{look.color}"></i>{look.words}</span>' for look in looks),
        svg="\n".join(_svg(traces)),
        slowest="".join(_slowest(traces)),
        ranks="".join(f"<pre>{escape(str(trace))}</pre>" for trace in traces),
    )


def lanes_of(trace: Trace) -> list[tuple[str, list[Span]]]:
    """The rows of the picture, each once for every lane. Collectives of a lane do not overlap."""
    rows: dict[str, list[list[Span]]] = {look.row: [] for look in LOOKS.values()}
    for span in trace.spans:
        lanes, nests = rows[LOOKS[span.activity].row], span.stream is StreamName.COMPUTE
        lane = next((each for each in lanes if nests or each[-1].stop_us <= span.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return [(row, lane) for row, lanes in rows.items() for lane in lanes]


def _svg(traces: Sequence[Trace]) -> Iterator[str]:
    """The spans of all ranks, on one time axis."""
    lanes = [lanes_of(trace) for trace in traces]
    width = _STEP_PX * min(max(trace.steps for trace in traces), _MOST_STEPS)
    height = _LANE_PX * (1 + sum(1 + len(each) for each in lanes))
    total_us = max(trace.total_us for trace in traces) or 1.0
    yield f'<svg width="{_LEFT_PX + width + 60}" height="{height}" role="img">'
    for tick in range(_TICKS + 1):
        x = _LEFT_PX + width * tick / _TICKS
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_LANE_PX}" y2="{height}"/>'
        yield f'<text x="{x:.1f}" y="14">{total_us * tick / _TICKS / 1e3:.4g} ms</text>'
    top = _LANE_PX
    for trace, of_rank in zip(traces, lanes, strict=True):
        yield f'<text x="0" y="{top + 17}" font-weight="bold">{escape(trace.about)}</text>'
        for row, lane in of_rank:
            top += _LANE_PX
            yield f'<text x="0" y="{top + 17}">{row}</text>'
            for span in lane:
                yield _rect(span, trace.units, top, width / total_us)
        top += _LANE_PX
    yield "</svg>"


def _rect(span: Span, units: Sequence[str], top: int, px_per_us: float) -> str:
    x, width = _LEFT_PX + span.start_us * px_per_us, (span.stop_us - span.start_us) * px_per_us
    look, name = LOOKS[span.activity], "" if span.unit is None else escape(units[span.unit])
    told = f"{look.words} {name}: {(span.stop_us - span.start_us) / 1e3:.3f} ms"
    place = f'x="{x:.2f}" y="{top + 3}" width="{max(width, 0.3):.2f}" height="{_LANE_PX - 6}" fill="{look.color}"'
    label = name.rpartition(".")[2] if span.unit else ""
    if not label or len(label) * _LETTER_PX > width:
        return f"<rect {place}><title>{told}</title></rect>"
    text = f'<text class="in" x="{x + width / 2:.2f}" y="{top + 17}">{label}</text>'
    return f"<rect {place}><title>{told}</title></rect>{text}"


def _slowest(traces: Sequence[Trace]) -> Iterator[str]:
    """Rows of the table: the layers that compute longest."""
    sums: dict[str, list[float]] = {}
    for trace in traces:
        for (activity, unit), own_us in trace.own_us().items():
            if unit is not None and activity in ("forward", "backward"):
                sums.setdefault(trace.units[unit], [0.0, 0.0])[activity == "backward"] += own_us / trace.steps
    for name in sorted(sums, key=lambda name: -sum(sums[name]))[:_SLOWEST]:
        cells = "".join(f"<td>{own_us / 1e3 / len(traces):.3f}</td>" for own_us in sums[name])
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
