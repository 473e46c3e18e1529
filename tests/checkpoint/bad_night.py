"""A run that is disturbed at given moments, and started again until it has come to its last step.

A moment is the call of a function, not a time, so the machine's speed does not matter.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from streamshard import StopOnSignal, latest, load_checkpoint, save_checkpoint
from streamshard.comm import flight_recorder
from tests.checkpoint import runs
from tests.launched import Launched, run_by_torchrun

LAST = 8
SAVES_EVERY = 3


class Moment(NamedTuple):
    """In start `start` of its run (from 0), `rank` sends `signal` in call `number` (from 0) of `function`.

    To itself, or to its launcher.
    """

    start: int
    rank: int
    number: int
    function: str
    signal: signal.Signals
    to_launcher: bool = False


@contextlib.contextmanager
def _disturbed(moments: list[Moment]) -> Iterator[None]:
    """Inside, the moments come."""
    counts: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_name
        counts[name] += 1
        for moment in moments:
            if moment.function == name and counts[name] - 1 == moment.number:
                os.kill(os.getppid() if moment.to_launcher else os.getpid(), moment.signal)

    sys.settrace(look)  # of calls alone, because it returns nothing
    threading.settrace(look)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # clears it


def _note(file: Path, line: str) -> None:
    """Append a line. It outlives the process."""
    with open(file, "a") as notes:
        notes.write(line + "\n")


def train(directory: Path, moments: list[Moment]) -> None:
    """A rank's program, as the guide to restarts says."""
    flight_recorder._LOGS_WITHIN_S = 0.2  # how long a rank waits for the log of one that was killed
    rank, checkpoints = int(os.environ["RANK"]), directory / "checkpoints"
    starts = directory / f"starts of rank {rank}"
    start = len(starts.read_text().splitlines()) if starts.exists() else 0
    _note(starts, str(start))
    with _disturbed([moment for moment in moments if (moment.start, moment.rank) == (start, rank)]):
        random.seed(rank)
        numpy.random.seed(rank)
        run = runs.start(0)
        extra, step = run.extra, 0
        if latest(checkpoints):
            step = load_checkpoint(checkpoints, run.model, run.optimizer, extra)["step"]
        with StopOnSignal(run.model) as stop:
            while step < LAST:
                (loss,) = runs.steps(run, step, step + 1)
                step += 1
                _note(directory / f"losses of rank {rank}", f"{step} {loss!r}")
                is_asked = stop.requested()
                if is_asked or step % SAVES_EVERY == 0 or step == LAST:
                    saves = {**extra, "step": step}
                    wait = is_asked or step % 2 == 0
                    save_checkpoint(checkpoints, run.model, run.optimizer, saves, keep=2, step=step, wait=wait)
                if is_asked:
                    stop.exit()


def _torchrun(directory: Path, moments: list[Moment]) -> None:
    """Exits with the code of the rank that has failed once too often."""
    try:
        run_by_torchrun(2, train, directory, moments)
    except ChildFailedError as error:
        sys.exit(max(failure.exitcode for _, failure in error.failures.items()))


class Night(NamedTuple):
    """What is left of a run that has come to its last step.

    Attributes:
        losses: of each rank, lines of a step and its loss, in the order in which they were computed.
        starts: of each rank, how often it was started.
        codes: exit codes of the launchers; the last is 0.
    """

    losses: list[list[str]]
    starts: list[int]
    codes: list[int | None]


def run_night(directory: Path, moments: list[Moment]) -> Night:
    """Start the run again until it ends by itself, as a scheduler does."""
    directory.mkdir()
    codes: list[int | None] = []
    while not codes or codes[-1] != 0:
        ((code, output),) = Launched(0, directory, _torchrun, directory, moments).end()
        codes.append(code)
        assert len(codes) <= len(moments) + 1, f"the run does not end: {codes}\n{output}"
    losses, starts = (
        [(directory / f"{what} of rank {rank}").read_text().splitlines() for rank in range(2)]
        for what in ("losses", "starts")
    )
    return Night(losses, [len(each) for each in starts], codes)
