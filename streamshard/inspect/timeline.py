"""A recorded step as data: spans of time and fences, as rows, as a file for Perfetto, as a picture.

Public names: `Kind` of `Span`, `Mark`, and the `Trace` that holds them. `streamshard.inspect.trace` records one.
"""

from __future__ import annotations

import enum
import json
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamshard.comm.streams import Rule, StreamName
from streamshard.errors import ConfigError

__all__ = ["Kind", "Mark", "Span", "Trace"]


class Kind(enum.Enum):
    """What takes time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CAST = "cast"
    OPTIMIZER = "optimizer"
    WAIT = "wait"
    ISSUE = "issue"
    GATHER = "gather"
    REDUCE = "reduce"
    FLAGS = "flags"
    AVERAGE = "average"
    EXCHANGE = "exchange"


class Span(NamedTuple):
    """A stretch of time of one stream.

    Attributes:
        stream: whose.
        kind: what.
        unit: index of the unit it is about; None if it is about none.
        name: the same in words.
        start_us, stop_us: microseconds since the trace began.
    """

    stream: StreamName
    kind: Kind
    unit: int | None
    name: str
    start_us: float
    stop_us: float


class Mark(NamedTuple):
    """A fence that was waited for.

    Attributes:
        rule: on whose behalf.
        what: what it guards.
        source: the stream that recorded it, at `recorded_us`.
        target: the stream that waited, at `waited_us`.
        recorded_us, waited_us: microseconds since the trace began.
    """

    rule: Rule
    what: str
    source: StreamName
    target: StreamName
    recorded_us: float
    waited_us: float


@dataclass
class Trace:
    """A recorded step of one rank. Filled when `trace_step` is left.

    Attributes:
        rank: whose.
        units: names of the units, by index.
        slots: the weight slot of each unit; None for a unit that has one of its own.
        spans: in order of their start.
        marks: in order of waits.
    """

    rank: int
    units: list[str]
    slots: list[int | None]
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def lanes(self) -> list[tuple[str, list[Span]]]:
        """The spans as rows in which none overlaps: compute, then what moves bytes, in as many as that needs."""
        rows = [("compute", [span for span in self.spans if span.stream is StreamName.COMPUTE])]
        for name, stream, kinds in (
            ("comm: gathers", StreamName.COMM, (Kind.GATHER, Kind.FLAGS)),
            ("comm: reductions", StreamName.COMM, (Kind.REDUCE, Kind.EXCHANGE)),
            ("replica: averages", StreamName.REPLICA, (Kind.AVERAGE, Kind.FLAGS)),
        ):
            lanes: list[list[Span]] = []
            for span in self.spans:
                if span.stream is stream and span.kind in kinds:
                    free = next((lane for lane in lanes if lane[-1].stop_us <= span.start_us), None)
                    if free is None:
                        lanes.append([span])
                    else:
                        free.append(span)
            rows += [(f"{name} {number}", lane) for number, lane in enumerate(lanes, 1)]
        return rows

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write the Trace Event Format that Perfetto and chrome://tracing read; ranks are processes in it."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "tid": 0, "args": {"name": f"rank {self.rank}"}}
        ]
        for row, (name, spans) in enumerate(self.lanes()):
            at = {"pid": self.rank, "tid": row}
            events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": row}})
            for span in spans:
                times = {"ts": span.start_us, "dur": span.stop_us - span.start_us}
                slot = self.slots[span.unit] if span.unit is not None else None
                events.append(
                    {"ph": "X", "name": span.name, "cat": span.kind.value, **at, **times, "args": {"weight slot": slot}}
                )
        for mark in self.marks:
            name = f"rule {mark.rule.value} {mark.rule.name}: {mark.what}"
            events.append(
                {
                    "ph": "i",
                    "name": name,
                    "cat": "fence",
                    "s": "t",
                    "pid": self.rank,
                    "tid": 0,
                    "ts": mark.waited_us,
                    "args": {"recorded_us": mark.recorded_us},
                }
            )
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def save_picture(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the streams over time, units coloured by slot, and the fences between them.

        Args:
            path: what matplotlib can write: .png, .svg, .pdf.
            title: above the picture.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from streamshard.inspect.picture import draw
        except ImportError as error:
            raise ConfigError("save_picture needs matplotlib: pip install matplotlib") from error
        draw(self, title).savefig(path, dpi=200)
