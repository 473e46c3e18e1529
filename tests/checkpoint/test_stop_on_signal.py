"""Runs that are stopped and killed come to their last step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.utils.data import DataLoader

from streamshard import StopOnSignal, StreamShard, latest, load_checkpoint, save_checkpoint
from streamshard.checkpoint import save
from streamshard.comm import flight_recorder
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from tests.checkpoint import runs
from tests.launched import Launched, run_by_torchrun
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks

KILL, TERM, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1


LAST, SAVES_EVERY = 8, 3


class Moment(NamedTuple):
    """In start `start` of its run (from 0), `rank` sends `signal` in call `number` (from 0) of `function`.

    To itself, or to its launcher. A moment is a call, not a time, so the machine's speed does not matter.
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


def _lines(directory: Path, what: str) -> list[list[str]]:
    """What each rank has noted."""
    return [(directory / f"{what} of rank {rank}").read_text().splitlines() for rank in range(2)]


def _train(directory: Path, moments: list[Moment]) -> None:
    """A rank's program, as the guide to restarts says."""
    flight_recorder._LOGS_WITHIN_S = 0.2  # how long a rank waits for the log of one that was killed
    rank, checkpoints = int(os.environ["RANK"]), directory / "checkpoints"
    _note(directory / f"starts of rank {rank}", "")
    start = len((directory / f"starts of rank {rank}").read_text().splitlines()) - 1
    with _disturbed([moment for moment in moments if (moment.start, moment.rank) == (start, rank)]):
        random.seed(rank)
        numpy.random.seed(rank)
        run = runs.start(0)
        step = 0
        if latest(checkpoints):
            step = load_checkpoint(checkpoints, *run)["step"]
        with StopOnSignal(run.model) as stop:
            while step < LAST:
                (loss,) = runs.steps(run, step, step + 1)
                step += 1
                _note(directory / f"losses of rank {rank}", f"{step} {loss!r}")
                is_asked = stop.requested()
                if is_asked or step % SAVES_EVERY == 0 or step == LAST:
                    wait = is_asked or step % 2 == 0
                    saves = run._replace(extra={**run.extra, "step": step})
                    save_checkpoint(checkpoints, *saves, keep=2, step=step, wait=wait)
                if is_asked:
                    stop.exit()


def _train_as_on_two_machines(directory: Path, moments: list[Moment]) -> None:
    """They count restarts apart. torchrun's store still has the addresses of dead ranks."""
    rank, restarts = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts * rank)
    if restarts and rank == 0:
        time.sleep(0.5)  # rank 1 looks for its address before rank 0 gives it
    _train(directory, moments)


def _torchrun(directory: Path, moments: list[Moment]) -> None:
    """Exits with the code of the rank that has failed once too often."""
    try:
        run_by_torchrun(2, _train_as_on_two_machines, directory, moments)
    except ChildFailedError as error:
        sys.exit(max(failure.exitcode for _, failure in error.failures.items()))


@pytest.mark.ranks
def test_a_run_that_is_killed_and_stopped_again_and_again_has_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    """In a step, while it loads, and all ranks before the rename in a stop.

    A signal at one rank stops all after the same step, and nothing is done twice. Further signals come while they save.
    """
    quiet, night = tmp_path / "quiet", tmp_path / "night"
    quiet.mkdir()
    night.mkdir()
    Launched(2, quiet, _train, quiet, []).end()
    moments = [
        Moment(0, 1, 1, "clip_grad_norm_", TERM),  # the stop saves step 2
        *(Moment(0, rank, 0, "write_file", TERM) for rank in range(2)),
        Moment(1, 1, 2, "clip_grad_norm_", KILL),  # in step 5, after the save of step 3
        Moment(2, 1, 0, "open_intact", KILL),
        Moment(3, 1, 0, "clip_grad_norm_", USR1),
        Moment(3, 0, 0, "publish_checkpoint", KILL, to_launcher=True),
    ]
    codes: list[int | None] = []
    while not codes or codes[-1] != 0:  # as a scheduler starts it again
        ((code, output),) = Launched(0, night, _torchrun, night, moments).end()
        codes.append(code)
        assert len(codes) <= len(moments) + 1, f"the run does not end: {codes}\n{output}"
    for losses, wanted in zip(_lines(night, "losses"), _lines(quiet, "losses"), strict=True):
        assert losses[:3] == wanted[:3] and {*losses} == {*wanted}
    assert [len(each) for each in _lines(night, "starts")] == [5, 5] and codes == [-KILL, 0], codes


def _model() -> tuple[Any, torch.optim.Optimizer]:
    model: Any = StreamShard(Stack())
    return model, torch.optim.SGD(model.parameters())


def _signal_group(number: int) -> None:
    """From another process: a data loader's worker leaves quietly if its parent ends it."""
    subprocess.run(["kill", f"-{number}", "--", f"-{os.getpid()}"], check=False)


def _stopped(directory: Path, number: int) -> None:
    """Read data in worker processes. torchrun signals the rank's group, with its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    rank = int(os.environ["RANK"])
    model, optimizer = _model()
    data: Any = torch.stack([vector_batch(step, rank) for step in range(20)])
    batches = DataLoader(data, num_workers=1, multiprocessing_context="fork")  # as in a script
    with StopOnSignal(model) as stop:
        for step, batch in enumerate(batches):
            model(batch[0]).sum().backward()
            optimizer.step()
            if step == 4 and rank == 1:
                _signal_group(number)
                while not stop._noted:  # the kernel may have chosen a thread that does not run yet
                    time.sleep(0.001)
            if stop.requested():
                assert step == 4
                save_checkpoint(directory, model, optimizer, wait=False)
                _signal_group(number)
                stop.exit()


@pytest.mark.ranks
def test_a_signal_to_the_group_of_a_rank_ends_all_but_data_loaders(tmp_path: Path) -> None:
    """The save in the background is finished."""
    for code, output in Launched(2, tmp_path, _stopped, tmp_path / "runs", TERM).end():
        assert code == 128 + TERM, output
    assert latest(tmp_path / "runs") == tmp_path / "runs" / "checkpoint-1"


@on_ranks(2)
def test_handlers_are_given_back_and_a_late_signal_goes_to_the_earlier_one(context: RankContext) -> None:
    model, _ = _model()
    came: list[int] = []

    def mine(number: int, frame: object) -> None:
        came.append(number)

    before = {number: signal.signal(number, mine) for number in (TERM, USR1)}
    try:
        with StopOnSignal(model) as stop:
            assert not stop.requested()
            os.kill(os.getpid(), TERM)
        assert came == [TERM] and signal.getsignal(TERM) is mine
        with pytest.raises(ZeroDivisionError), StopOnSignal(model):
            os.kill(os.getpid(), TERM)
            raise ZeroDivisionError
        assert came == [TERM]  # the error ends the run
        first, second = StopOnSignal(model), StopOnSignal(model, [USR1])  # takes its place
        first.close()
        assert signal.getsignal(TERM) is mine
        os.kill(os.getpid(), USR1)
        assert second.requested()
        second.close()
        assert came == [TERM] and signal.getsignal(USR1) is mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@on_ranks(2)
def test_a_signal_to_one_rank_stops_all(context: RankContext) -> None:
    model, _ = _model()
    with pytest.raises(SystemExit) as ended, StopOnSignal(model) as stop:
        assert not stop.requested()
        if context.rank == 1:
            os.kill(os.getpid(), USR1)
        assert [stop.requested() for _ in range(2)] == [True, True]
        stop.exit()
    stop.close()  # a process that ends keeps the handlers
    assert ended.value.code == 128 + USR1


@on_ranks(2)
def test_a_failed_save_in_the_background_is_raised_at_the_exit(context: RankContext, tmp_path: Path) -> None:
    model, optimizer = _model()
    failing = mock.patch.object(save, "write_file", side_effect=OSError("no space left"))
    with failing if context.rank == 0 else contextlib.nullcontext(), StopOnSignal(model) as stop:
        if context.rank == 0:
            os.kill(os.getpid(), TERM)
        assert stop.requested()
        save_checkpoint(tmp_path, model, optimizer, wait=False)
        with pytest.raises(CheckpointError, match="rank 0: .*no space left"):
            stop.exit()


@on_ranks(1)
def test_wrong_arguments_and_calls_are_refused(context: RankContext) -> None:
    model, _ = _model()
    handlers = [signal.getsignal(number) for number in (TERM, USR1)]
    with pytest.raises(ShardingError, match="not sharded"):
        StopOnSignal(Stack())
    for settings in ({"signals": [KILL]}, {"signals": [TERM, 99]}, {"signals": TERM}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            StopOnSignal(model, **settings)
    with StopOnSignal(model) as stop, pytest.raises(ConfigError, match="no signal has come"):
        stop.exit()
    with ThreadPoolExecutor() as pool, pytest.raises(ConfigError, match="main thread"):
        pool.submit(StopOnSignal, model).result()
    assert [signal.getsignal(number) for number in (TERM, USR1)] == handlers
