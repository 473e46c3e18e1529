"""Runs that are stopped and killed come to their last step."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from streamshard import StopOnSignal, StreamShard, latest, save_checkpoint
from streamshard.checkpoint import save
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from tests.checkpoint.bad_night import SAVES_EVERY, Moment, Night, run_night
from tests.launched import Launched
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks

KILL, TERM, USR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Night:
    """A run that nothing disturbs."""
    return run_night(tmp_path_factory.mktemp("quiet") / "run", [])


@pytest.mark.ranks
def test_a_run_that_is_killed_and_stopped_again_and_again_has_the_losses_of_an_undisturbed_run(
    quiet: Night, tmp_path: Path
) -> None:
    """In a step, while it loads, and all ranks before the rename in a stop."""
    moments = [
        Moment(0, 1, SAVES_EVERY + 1, "clip_grad_norm_", KILL),  # in the step after the first save
        Moment(1, 1, 0, "open_intact", KILL),
        Moment(2, 1, 0, "clip_grad_norm_", USR1),
        Moment(2, 0, 0, "publish_checkpoint", KILL, to_launcher=True),
    ]
    night = run_night(tmp_path / "run", moments)
    for losses, wanted in zip(night.losses, quiet.losses, strict=True):
        assert {*losses} == {*wanted}
    assert night.starts == [4, 4] and night.codes == [-KILL, 0], night


@pytest.mark.ranks
def test_a_signal_at_one_rank_stops_all_after_the_same_step_and_nothing_is_done_twice(
    quiet: Night, tmp_path: Path
) -> None:
    """Further signals come while the run saves, also to the other rank."""
    moments = [Moment(0, 1, 1, "clip_grad_norm_", TERM)]
    moments += [Moment(0, rank, 0, "write_file", TERM) for rank in range(2)]
    night = run_night(tmp_path / "run", moments)
    assert night.losses == quiet.losses
    assert night.starts == [2, 2] and night.codes == [0]


# ------------------------------------------------------------------------------------------------ one process


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
def test_a_signal_to_the_group_of_a_rank_ends_all_with_its_code_and_leaves_data_loaders_alive(
    tmp_path: Path,
) -> None:
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
def test_a_failed_save_in_the_background_is_raised_on_all_ranks_instead_of_the_exit(
    context: RankContext, tmp_path: Path
) -> None:
    model, optimizer = _model()

    def fail(*args: Any) -> Any:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch, StopOnSignal(model) as stop:
        if context.rank == 0:
            patch.setattr(save, "write_file", fail)
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
    errors: list[BaseException] = []

    def make() -> None:
        try:
            StopOnSignal(model)
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert [signal.getsignal(number) for number in (TERM, USR1)] == handlers
