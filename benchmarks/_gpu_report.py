"""A run of ``gpu.py`` as one table and one picture. Imports torch nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._jobs import ending, what_is_known

_COMPARED = ("llama", "small", "compiled")  # jobs that compare systems
_NAMES = {"local": "plain PyTorch", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "streamshard": "StreamShard"}
_NAMES |= {"streamshard-40": "StreamShard, 40 % kept"}
_COLORS = {
    "local": "0.75",
    "fsdp2": "0.55",
    "deepspeed": "0.35",
    "streamshard": "tab:blue",
    "streamshard-40": "tab:cyan",
    "hidden": "tab:green",
    "exposed": "tab:red",
}


class Bar(NamedTuple):
    """One bar: its words, what gives its color, its length, and how far its interval reaches down and up."""

    label: str
    kind: str
    length: float
    below: float = 0.0
    above: float = 0.0


def table(results: dict[str, Any]) -> Iterator[str]:
    """Markdown: each job, how it ended, what it found."""
    yield "| job | ended | found |"
    yield "| --- | --- | --- |"
    for name, job in results["jobs"].items():
        yield f"| {name} | {ending(job)} | {what_is_known(job).replace('|', '/').replace('; ', '<br>')} |"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a PNG: step times, peak memory, the host's time per layer, hidden communication, state in host memory."""
    from matplotlib.figure import Figure

    found = {name: job["found"] or {} for name, job in results["jobs"].items()}
    llama = found.get("llama", {}).get("systems", {})
    parts = {
        "Llama 1.1B: step, ms": [_summary(name, entry["step_ms"]) for name, entry in _measured(llama)],
        "Llama 1.1B: peak memory, GiB": [
            Bar(_NAMES[name], name, entry["memory"]["step_peak_bytes"] / 2**30) for name, entry in _measured(llama)
        ],
        "host time per layer, us": [
            _summary(name, entry["host_us_per_layer"], f"{job}: ")
            for job in _COMPARED
            for name, entry in _measured(found.get(job, {}).get("systems", {}))
        ],
        "collectives of a step, ms": list(_overlap(found.get("overlap", {}))),
        "host memory: speed, of computing alone": [
            Bar(f"{cell}: {_NAMES[name]}", name, entry["share_of_alone"])
            for cell, row in found.get("host_memory", {}).get("cells", {}).items()
            for name, entry in row.items()
            if "share_of_alone" in entry
        ],
    }
    heights = [max(len(bars), 1) for bars in parts.values()]
    figure = Figure(figsize=(8, 2.2 + 0.36 * sum(heights)), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(len(parts), height_ratios=heights), parts.items(), strict=True):
        labels = [f"{bar.label}  {number(bar.length)}" for bar in bars]
        reaches = [[bar.below for bar in bars], [bar.above for bar in bars]]
        axes.barh(labels, [bar.length for bar in bars], xerr=reaches, color=[_COLORS[bar.kind] for bar in bars])
        axes.invert_yaxis()
        axes.set(title=title if bars else f"{title}: not known", xlim=(0, None))
    where = results["environment"] or {}
    rehearsed = "a rehearsal, whose numbers mean nothing: " if results["is_rehearsal"] else ""
    figure.suptitle(f"{rehearsed}{where.get('device')}, torch {where.get('torch')}")
    figure.savefig(path, dpi=110)


def _measured(systems: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, entry) for name, entry in systems.items() if "step_ms" in entry]


def _summary(name: str, each: dict[str, float], prefix: str = "") -> Bar:
    median, low, high = (each[key] for key in ("median", "median_low", "median_high"))
    return Bar(f"{prefix}{_NAMES[name]}", name, median, median - low, high - median)


def _overlap(found: dict[str, Any]) -> Iterator[Bar]:
    """Of collectives that only take time: by torch's profile, and exposed by StreamShard's trace."""
    if found.get("profile", {}).get("collectives"):
        whole_ms, share = found["profile"]["collectives_ms"], found["profile"]["hidden_share"]
        yield Bar("profile: beside compute", "hidden", whole_ms * share)
        yield Bar("profile: alone", "exposed", whole_ms * (1.0 - share))
    if "trace" in found:
        for kind in ("all_gather", "reduction"):
            yield Bar(f"trace: exposed {kind.replace('_', '-')}", "exposed", 1e3 * found["trace"][f"exposed_{kind}_s"])
