"""Commands that are run one after the other, each within its own time, and one file that always says how far they are.

Owns ``results.json`` and ``output.log`` in the directory it is given. Imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Job", "Results", "ending", "run_jobs", "what_is_known"]

ROOT = Path(__file__).parent.parent
TICK_S = 2.0  # how long what a running job has found may be missing in the results
LEAST_S = 10.0  # a job is not begun with less
GRACE_S = 5.0  # between asking a job to end and ending it
KEPT_CHARS = 6000  # of what a job that failed has printed, from its end: the whole is in output.log
_DATE = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command.

    Attributes:
        name: "what", or "what.which".
        command: its words; run in the root of the repository, which need not be installed.
        limit_s: it is ended after so many seconds.
        environment: beside this process's own.
        found: the file in which it writes what it has found: .json, rewritten as a whole, or .jsonl, by tests.
        brief: says what was found in a line.
        needs: the name of a job without which, if it has failed, there is no use in this one.
        instead_of: the name of a job; this one is run only if that one has failed.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    found: Path
    brief: Callable[[dict[str, Any]], str]
    needs: str | None = None
    instead_of: str | None = None

    def read(self) -> dict[str, Any] | None:
        """What it has found so far; None: nothing."""
        try:
            text = self.found.read_text()
            if self.found.suffix == ".json":
                found: dict[str, Any] = json.loads(text)
                return found
        except (OSError, ValueError):  # not there, or half of it
            return None
        tests = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for test in tests:
            counts[test["outcome"]] += 1
        return {**counts, "tests": tests}


class Results:
    """What is known so far. Owns ``results.json``, which is whole at every moment.

    Args:
        directory: results of other jobs that lie there are kept.
        about: what is told of the run as a whole.
    """

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self._path = directory / "results.json"
        earlier = json.loads(self._path.read_text()) if self._path.exists() else {}
        if earlier and earlier.get("is_rehearsal") != about.get("is_rehearsal"):
            raise SystemExit(
                f"{self._path} is of a rehearsal and this run is not, or the other way round: name another"
            )
        self.all: dict[str, Any] = {**about, "environment": earlier.get("environment"), "targets": []}
        self.all["jobs"] = earlier.get("jobs", {})

    def has_failed(self, name: str | None) -> bool:
        """Whether the job of that name was run, and did not end well."""
        return bool(self.all["jobs"].get(name, {}).get("exit_code", 0) != 0)

    def skip(self, job: Job, why: str) -> dict[str, Any]:
        """`job` is not run: what an earlier call has found of it stays."""
        entry = {"not_run": why, "brief": ""}
        self.all["jobs"].setdefault(job.name, {**entry, "found": None})
        self._write()
        return entry

    def note(self, job: Job, **facts: Any) -> dict[str, Any]:
        """Replace what is known of `job`, and write everything."""
        found = job.read()
        brief = "found nothing" if found is None else _briefly(job, found)
        said = {"command": shlex.join(job.command), "limit_s": job.limit_s, "date": time.strftime(_DATE, time.gmtime())}
        entry = {**said, **facts, "brief": brief, "found": found}
        self.all["jobs"][job.name] = entry
        if found is not None and self.all["environment"] is None:
            self.all["environment"] = found.get("environment")
        self.all["targets"] = [
            {"job": name, **target}
            for name, each in self.all["jobs"].items()
            for target in (each["found"] or {}).get("targets", [])
        ]
        self._write()
        return entry

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.all, indent=1) + "\n")
        temporary.replace(self._path)


def _briefly(job: Job, found: dict[str, Any]) -> str:
    try:
        return job.brief(found)
    except (KeyError, TypeError):
        return "not complete"


def run_jobs(jobs: Sequence[Job], directory: Path, about: dict[str, Any], within_s: float) -> bool:
    """Run them in order; a job for which no time is left is told as not run.

    Args:
        jobs: which.
        directory: gets ``results.json`` and ``output.log``.
        about: told of the run as a whole.
        within_s: all of them together.

    Returns:
        Whether all ended well.
    """
    directory.mkdir(parents=True, exist_ok=True)
    results, end = Results(directory, about), time.monotonic() + within_s
    is_well = True
    with (directory / "output.log").open("ab", buffering=0) as log:
        for job in jobs:
            left_s = end - time.monotonic()
            if job.instead_of and not results.has_failed(job.instead_of):
                entry, is_needed = results.skip(job, f"only if {job.instead_of} fails"), False
            elif left_s < LEAST_S:
                entry, is_needed = results.skip(job, f"{left_s:.0f} s were left"), True
            elif results.has_failed(job.needs):
                entry, is_needed = results.skip(job, f"{job.needs} has failed"), True
            else:
                log.write(f"\n=== {job.name}: {shlex.join(job.command)}\n".encode())
                entry, is_needed = _run(job, log, min(job.limit_s, left_s), results), True
            is_well = is_well and (entry.get("exit_code") == 0 or not is_needed)
            print(f"{job.name:22} {ending(entry):22} {what_is_known(entry)}", flush=True)
    return is_well


def ending(entry: dict[str, Any]) -> str:
    """How a job of ``results.json`` ended, in words."""
    if "not_run" in entry:
        return f"not run: {entry['not_run']}"
    code, name = entry["exit_code"], "FAILED"
    if entry["timed_out"]:
        name = "out of time"
    elif code == 0:
        name = "ended well"
    elif code is None:
        name = "running"
    elif code < 0:
        name = f"FAILED: {signal.Signals(-code).name}"
    return f"{name} ({entry['seconds']:.0f} s)"


def what_is_known(entry: dict[str, Any]) -> str:
    """What a job of ``results.json`` has found, and why it failed, in a line."""
    return "; ".join(filter(None, [entry["brief"], entry.get("reason", "")]))


def _reason(output: str) -> str:
    """The line that says why a job failed: where its main thread was when it was stopped, or its last error."""
    lines = [re.sub(r"^\[rank\d+\]: *", "", line).rstrip() for line in output.splitlines() if line.strip()]
    for line, following in pairwise(lines):
        if line.startswith("Current thread"):
            return f"it was at {following.strip()}"
    errors = [line for line in lines if re.match(r"(E +)?[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["no output"])[-1][:300]


def _run(job: Job, log: BinaryIO, limit_s: float, results: Results) -> dict[str, Any]:
    start, said = time.monotonic(), os.fstat(log.fileno()).st_size
    started = subprocess.Popen(
        job.command,
        cwd=ROOT,
        env={**os.environ, **job.environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=_set_apart,
    )
    has_stacks = "PYTHONFAULTHANDLER" in job.environment
    with _ended_with_us(started, signal.SIGABRT if has_stacks else signal.SIGTERM) as process:
        while process.poll() is None and (left_s := start + limit_s - time.monotonic()) > 0.0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(TICK_S, left_s))
            results.note(job, seconds=round(time.monotonic() - start, 1), exit_code=None, timed_out=False)
        timed_out = process.poll() is None
    facts = {"seconds": round(time.monotonic() - start, 1), "exit_code": process.returncode, "timed_out": timed_out}
    if process.returncode != 0:
        with open(log.name, "rb") as file:
            file.seek(said)
            output = file.read().decode(errors="replace")
        facts |= {"reason": _reason(output), "output": output[-KEPT_CHARS:]}
    return results.note(job, **facts)


def _set_apart() -> None:
    """In a job's process: what it starts is ended with it, and nobody waits for the memory of an ended one."""
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes], first: signal.Signals) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever ends the body, nothing of `process` goes on behind it.

    Args:
        first: asks it to end. At SIGABRT, Python's faulthandler prints where each thread is.
    """
    try:
        yield process
    finally:
        for number, grace_s in ((first, GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
