"""Pages and plots of results: every JSON file of a directory becomes a table, and a plot where medians are compared.

Knows no benchmark: a result is searched for what `_measure.summary` has made. Imports torch nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._gpu_report import draw, number, table

_MEDIAN = ("median", "median_low", "median_high")
_SETTINGS = ("zero2", "zero1", "one-edge", "coalesced")  # StreamShard as well
Tables = dict[tuple[str, ...], dict[str, list[dict[str, float]]]]  # columns: row: a summary for each column


def render(directory: Path) -> Path:
    """Write ``report.md``, and a PNG for each result that has summaries.

    Args:
        directory: holds results, one JSON file each, and perhaps the ``results.json`` that says what was not run, and
            a run of ``gpu.py`` in ``gpu``; or is such a run itself.

    Returns:
        The page.
    """
    results = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}
    run = results.pop("results", {"left_out": {}, "jobs": {}})
    lines = ["# Results", ""]
    if run.get("benchmark") == "gpu":
        lines += _gpu_section(run, directory)
        run = {"left_out": {}, "jobs": {}}
    elif (path := directory / "gpu" / "results.json").exists():
        lines += _gpu_section(json.loads(path.read_text()), directory)
    for name, result in results.items():
        lines += [f"## {name}", "", *_about(result), ""]
        if tables := _tables(result):
            _plot(name, result, directory / f"{name}.png")
            lines += [f"![{name}]({name}.png)", ""]
        for columns, rows in tables.items():
            lines += [*_table(columns, rows), ""]
        lines += [f"- {system} was not run: {why}" for system, why in result.get("not_run", {}).items()] + [""]
    missing = dict(run["left_out"])
    for name, job in run["jobs"].items():
        if job.get("exit_code") != 0:
            ending = "out of time" if job.get("timed_out") else f"failed: exit code {job.get('exit_code')}"
            missing[name] = job.get("not_run") or ending
    lines += [f"- {name} is missing or not complete: {why}" for name, why in missing.items()] + [""]
    (directory / "report.md").write_text("\n".join(lines))
    return directory / "report.md"


def _gpu_section(run: dict[str, Any], directory: Path) -> list[str]:
    """A run of ``gpu.py``: one table and one picture, which is written to `directory`."""
    draw(run, directory / "gpu.png")
    where = run["environment"]  # None: no job found anything
    about = _about({} if where is None else {"environment": {**where, "command": run["command"]}})
    return ["## gpu", "", *about, "", "![gpu](gpu.png)", "", *table(run), ""]


def brief(result: dict[str, Any]) -> str:
    """What the plot of a result shows, in a line."""
    if not _tables(result):
        return "no numbers"
    what, bars = _headline(result)
    return f"{what}: " + ", ".join(f"{label} {number(each['median'])}" for label, each in list(bars.items())[:7])


def _about(result: dict[str, Any]) -> Iterator[str]:
    if where := result.get("environment"):
        changed = ", with uncommitted changes" if where.get("uncommitted_changes") else ""
        yield f"`{where['command']}`\n"
        yield f"Commit {where['commit']}{changed}, {where['date']}, torch {where['torch']}, {where['device']}"
        yield f"({where['cpu']}, {where['cpu_cores']} cores, {where['threads_per_rank']} threads per rank)."
    config = result.get("config") or result.get("settings") or {}
    yield ", ".join(f"{name} {value}" for name, value in config.items() if value is not None)
    load = result.get("foreign_cores") or result.get("noise", {}).get("foreign_cores")
    if isinstance(load, dict):
        yield f"\nOther programs used {load['median']:.2f} cores (median)."


def _tables(result: dict[str, Any]) -> Tables:
    """The summaries, else the numbers, as tables: rows with the same columns stand together."""
    leaves = [(path, each) for path, each in _leaves(result) if "foreign_cores" not in path]
    summaries = [(path, each) for path, each in leaves if isinstance(each, dict)]
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for path, each in summaries or [(path, dict.fromkeys(_MEDIAN, each)) for path, each in leaves]:
        rows.setdefault("/".join(path[:-1]), {})[path[-1]] = each
    tables: Tables = {}
    for row, cells in rows.items():
        tables.setdefault(tuple(cells), {})[row] = list(cells.values())
    return tables


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Numbers and summaries, with the names that lead to them; an element of a list is named by its first entry."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        firsts = [next(iter(each.items()), ("", "")) for each in value]
        value = {f"{name} {first}": each for (name, first), each in zip(firsts, value, strict=True)}
    if isinstance(value, dict) and "median" not in value:
        for name, each in value.items():
            if path or name not in ("environment", "config", "settings", "outcomes", "rounds", "tests"):
                yield from _leaves(each, path if name in ("systems", "cases") else (*path, name))
    elif path and isinstance(value, (dict, int, float)):
        yield path, value


def _headline(result: dict[str, Any]) -> tuple[str, dict[str, dict[str, float]]]:
    """What to plot, and its bars: the ratios of the first table, or its first column; of a single row everything."""
    columns, rows = next(iter(_tables(result).items()))
    if len(rows) == 1:
        row, cells = next(iter(rows.items()))
        return row, dict(zip(columns, cells, strict=True))
    place = next((place for place, name in enumerate(columns) if "ratio" in name), 0)
    return columns[place], {row: cells[place] for row, cells in rows.items()}


def _table(columns: tuple[str, ...], rows: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Markdown: medians, in brackets their 95 % intervals. What is too wide is turned on its side."""
    if len(rows) == 1 or len(columns) > 6:
        turned = zip(columns, zip(*rows.values(), strict=True), strict=True)
        columns, rows = tuple(rows), {name: list(cells) for name, cells in turned}
    yield "| | " + " | ".join(column.replace("_", " ") for column in columns) + " |"
    yield "| --- |" + " ---: |" * len(columns)
    for row, cells in rows.items():
        yield f"| {row} | " + " | ".join(map(_cell, cells)) + " |"


def _cell(each: dict[str, float]) -> str:
    median, low, high = (number(each[name]) for name in _MEDIAN)
    return median if low == high else f"{median} ({low} to {high})"


def _plot(name: str, result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    what, bars = _headline(result)
    medians, lows, highs = ([each[name] for each in bars.values()] for name in _MEDIAN)
    ends = [[abs(end - median) for end, median in zip(side, medians, strict=True)] for side in (lows, highs)]
    colors = ["tab:blue" if "streamshard" in label or label in _SETTINGS else "0.65" for label in bars]
    labels = [f"{label}  {number(median)}" for label, median in zip(bars, medians, strict=True)]
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.barh(labels, medians, xerr=ends, color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set(title=name, xlabel=f"{what.replace('_', ' ')} (median and its 95 % interval)", xlim=(0, None))
    if "ratio" in what:
        axes.axvline(1.0, color="0.3", linestyle="--", linewidth=1)
    figure.savefig(path, dpi=110)
