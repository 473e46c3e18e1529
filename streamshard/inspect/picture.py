"""Draws a `Trace` with matplotlib. Imported only when a picture is wanted: the package does not require matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from streamshard.comm.streams import Rule, StreamName
from streamshard.engine.engine import ROOT_UNIT
from streamshard.inspect.timeline import Kind, Mark, Span, Trace

__all__ = ["draw"]

# Pages show pictures about 800 pixels wide: 9 points on 8 inches are 12 pixels high there.
_WIDTH_INCHES = 8.0
_FONT_POINTS = 9.0
_LEGEND_COLUMNS = 5
_LEAST_LABELLED = 0.02  # of the time: as wide as a letter and a number

_SLOT_COLORS = ("#3b76af", "#e8863a", "#5a9e5a", "#9467bd")
_OWN_SLOT_COLOR = "#8a8a8a"
_KIND_COLORS: dict[Kind, str] = {
    Kind.CAST: "#c9b458",
    Kind.OPTIMIZER: "#b5a7d6",
    Kind.FLAGS: "#d9d9d9",
    Kind.EXCHANGE: "#8fb8a8",
}
_THIN_COLORS = {  # what the host does beside computing
    Kind.WAIT: "#d62728",
    Kind.ISSUE: "#404040",
}
_RULE_COLORS = {
    Rule.WEIGHTS_ARRIVED: "#1a7f37",
    Rule.SLOT_RELEASED: "#0550ae",
    Rule.GRADS_DRAINED: "#bc4c00",
    Rule.GRADS_WRITTEN: "#8250df",
    Rule.SHARDS_WRITTEN: "#57606a",
    Rule.SHARDS_READ: "#b8860b",
    Rule.RESULTS_ARRIVED: "#cf222e",
}
_LETTERS = {  # of a unit's spans; its number follows
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.GATHER: "G",
    Kind.REDUCE: "R",
    Kind.AVERAGE: "A",
    Kind.EXCHANGE: "X",
}


class _Lane(NamedTuple):
    """Where a row lies: its middle and its height, in rows from the top."""

    middle: float
    height: float


def draw(trace: Trace, title: str | None) -> Figure:
    """The streams over time, units coloured by slot, and the fences between them."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    height = _draw_rows(axes, trace)
    _draw_fences(axes, trace.marks)
    handles = _legend(trace)
    legend_rows = -(-len(handles) // _LEGEND_COLUMNS)
    figure.set_size_inches(_WIDTH_INCHES, 0.9 + 0.22 * legend_rows + 0.5 * height)
    figure.legend(
        handles=handles,
        ncols=_LEGEND_COLUMNS,
        fontsize=_FONT_POINTS,
        frameon=False,
        loc="outside lower center",
        handlelength=1.5,
        columnspacing=1.2,
        labelspacing=0.3,
    )
    if title is not None:
        axes.set_title(title, loc="left", fontsize=_FONT_POINTS + 1)
    return figure


def _draw_rows(axes: Axes, trace: Trace) -> float:
    """Draw the spans and what stands around them; returns how many rows high that is."""
    rows = trace.lanes()
    end_us = max((span.stop_us for span in trace.spans), default=1.0)
    labels: dict[str, list[float]] = {}
    top = 0.0
    for name, spans in rows:
        group = name.rstrip(" 0123456789")
        if group not in labels and labels:
            top += 0.35 if len(labels) == 1 else 0.15  # between compute and comm the fences are drawn
        lane = _Lane(top + 0.5, 1.0) if not labels else _Lane(top + 0.25, 0.46)
        top += 1.0 if not labels else 0.5
        labels.setdefault(group, []).append(lane.middle)
        for span in spans:
            _draw_span(axes, trace, span, lane, end_us)
    axes.set_yticks([sum(middles) / len(middles) for middles in labels.values()], list(labels))
    axes.tick_params(labelsize=_FONT_POINTS)
    axes.set_ylim(top + 0.1, -0.1)
    axes.set_xlim(0.0, end_us / 1e3 * 1.005)
    axes.set_xlabel("ms", fontsize=_FONT_POINTS)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    return top


def _draw_fences(axes: Axes, marks: Sequence[Mark]) -> None:
    """A line from each record to the first wait for it."""
    edge = {StreamName.COMPUTE: 1.02, StreamName.COMM: 1.33, StreamName.REPLICA: 1.33}
    seen = set()
    for mark in marks:
        key = (mark.what, mark.rule, mark.recorded_us)
        if key not in seen:
            seen.add(key)
            color = _RULE_COLORS[mark.rule]
            times = (mark.recorded_us / 1e3, mark.waited_us / 1e3)
            axes.plot(times, (edge[mark.source], edge[mark.target]), color=color, linewidth=1.0, zorder=1)
            axes.plot(times[1], edge[mark.target], marker="o", markersize=2.5, color=color, zorder=4, clip_on=False)


def _draw_span(axes: Axes, trace: Trace, span: Span, lane: _Lane, end_us: float) -> None:
    is_thin = span.kind in _THIN_COLORS
    color, height = _THIN_COLORS.get(span.kind) or _KIND_COLORS.get(span.kind), lane.height
    if color is None and span.unit is not None:
        slot = trace.slots[span.unit]
        color = _OWN_SLOT_COLOR if slot is None else _SLOT_COLORS[slot % len(_SLOT_COLORS)]
    width_us = span.stop_us - span.start_us
    axes.barh(
        lane.middle + (0.35 * height if is_thin else 0.0),
        width_us / 1e3,
        left=span.start_us / 1e3,
        height=0.3 * height if is_thin else height,
        color=color,
        zorder=3 if is_thin else 2,
        edgecolor="white",
        linewidth=0.4,
        alpha=0.7 if span.kind is Kind.FORWARD else 1.0,
    )
    letter = _LETTERS.get(span.kind)
    if letter is not None and span.unit is not None and width_us > _LEAST_LABELLED * end_us:
        axes.text(
            (span.start_us + width_us / 2) / 1e3,
            lane.middle,
            f"{letter}{'e' if span.unit == ROOT_UNIT else span.unit - 1}",
            ha="center",
            va="center",
            fontsize=_FONT_POINTS - 1,
            color="white",
            zorder=5,
        )


def _legend(trace: Trace) -> list[Artist]:
    slots = sorted({slot for slot in trace.slots if slot is not None})
    colors = {f"weight slot {slot}": _SLOT_COLORS[slot % len(_SLOT_COLORS)] for slot in slots}
    colors["slot of its own (e: root unit)"] = _OWN_SLOT_COLOR
    kinds, all_colors = {span.kind for span in trace.spans}, {**_KIND_COLORS, **_THIN_COLORS}
    colors.update({kind.value: color for kind, color in all_colors.items() if kind in kinds})
    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    rules = sorted({mark.rule for mark in trace.marks})
    lines = [Line2D([], [], color=_RULE_COLORS[rule], label=f"rule {rule.value}") for rule in rules]
    return [*patches, *lines]
