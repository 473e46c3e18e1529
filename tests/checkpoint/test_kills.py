"""Runs that are killed while they save, again and again in one directory, lose nothing that a save had returned.

A run goes on from the latest checkpoint, checks every number of it, and saves until some of its ranks are killed. Every
number of the n-th state is n, so a mixture of two states is noticed. A rank notes what a save has returned in a file
of its own; a note outlives the process.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import random
import re
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not re-exported in stubs

from streamshard import StreamShard, latest, load_checkpoint, save_checkpoint
from streamshard.comm import flight_recorder
from streamshard.errors import StreamShardError
from streamshard.optim import elementwise
from tests.checkpoint.changes import at_change
from tests.checkpoint.objects import Kept
from tests.models import DIM, Stack
from tests.ranks import forkserver
from tests.reference import piece_of

GROUP_TIMEOUT_S = 60.0
ENDS_WITHIN_S = 30.0  # how long a rank whose peer has died may take: half of what its group would wait
KEEP = 2
HEARD = 0  # exit code of a rank that had an error that names what was wrong


class Plan(NamedTuple):
    """How a run is killed.

    Attributes:
        world_size: its number of ranks.
        waits: whether it saves with ``wait=True``.
        repeats: whether checkpoints' numbers come again.
        victims: the ranks that are killed.
        call: every victim kills itself before this change to the file system, counted from its first save; None: they
            are killed from outside.
        after_s: that long after all have begun to save.
        last: nobody is killed; it saves a few times and ends.
    """

    world_size: int
    waits: bool
    repeats: bool
    victims: tuple[int, ...]
    call: int | None
    after_s: float
    last: bool = False

    @classmethod
    def drawn(cls, generator: random.Random, world_size: int) -> Plan:
        everybody = tuple(range(world_size))
        victims = everybody if generator.random() < 0.25 else (generator.choice(everybody),)
        call = generator.randrange(120) if generator.random() < 0.5 else None
        waits, repeats = generator.random() < 0.5, generator.random() < 0.4
        return cls(world_size, waits, repeats, victims, call, generator.random() * 0.25)


@elementwise
class Fill(torch.optim.SGD):
    """Every number becomes `count` in a step.

    Attributes:
        count: what they become next.
    """

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Weights and moments."""
        for tensor in self.tensors():
            tensor.fill_(self.count)

    def tensors(self) -> list[Tensor]:
        """All there are. Of a parameter of which a rank has nothing there is no state."""
        params = [param for group in self.param_groups for param in group["params"]]
        moments = (self.state[param]["momentum_buffer"] for param in params if piece_of(param).numel())
        return [tensor.as_subclass(Tensor) for tensor in (*(param.data for param in params), *moments)]

    def become(self, count: int) -> None:
        """The state whose every number is `count`."""
        self.count = count
        self.step()


def _state(count: int) -> tuple[StreamShard, Fill]:
    model: Any = StreamShard(Stack((DIM,) * 3))
    optimizer = Fill(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    optimizer.become(count)
    return model, optimizer


def _run(rank: int, plan: Plan, directory: str, notes: Path, port: int, prefix: str, ready: Connection) -> None:
    """Go on from what is there, and save until the end comes."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False))
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size, timeout=timeout)
    flight_recorder._LOGS_WITHIN_S = 0.2
    model, optimizer = _state(-1)
    count = 0
    if latest(directory) is not None:
        # Each rank gives its own number: of another number of ranks only what was the same on all can be loaded.
        loaded = load_checkpoint(directory, model, optimizer)
        count = loaded["count"]
        for tensor in optimizer.tensors():
            assert bool((tensor == count).all()), f"{loaded.path} mixes {count} with {tensor.unique()}"
    note = os.open(notes / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ready.send(count)
    dies_at = plan.call if plan.call is not None and rank in plan.victims else -1
    try:
        dist.barrier()
        with at_change(dies_at, lambda _: os.kill(os.getpid(), signal.SIGKILL)):
            while True:
                count += 1
                optimizer.become(count)
                step = count % 3 if plan.repeats else None
                saving = save_checkpoint(
                    directory, model, optimizer, {"count": count}, keep=KEEP, step=step, wait=plan.waits
                )
                # In the background the one before is through when this one begins.
                os.write(note, b"%d\n" % (count if plan.waits else count - 1))
                if plan.last and count % 4 == 0:
                    os._exit(HEARD)
                if not plan.waits and count % 4 == 0:
                    optimizer.become(-count)
                    saving.wait()
                    os.write(note, b"%d\n" % count)
    except (StreamShardError, RuntimeError) as error:
        os.write(note, f"{type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n")
        os._exit(HEARD)  # what a launcher does to those that are left


def _returned(notes: Path) -> int:
    """The largest number that a save returned, to whichever rank."""
    lines = [line for path in notes.iterdir() for line in path.read_text().splitlines()]
    return max((int(line) for line in lines if line.isdigit()), default=0)


def _start(plan: Plan, directory: str, notes: Path, port: int, prefix: str) -> tuple[list[BaseProcess], int]:
    """A run that has begun to save, and the number that it went on from."""
    start = forkserver()
    processes, ready = [], []
    for rank in range(plan.world_size):
        ours, theirs = start.Pipe()
        args = (rank, plan, directory, notes, port, prefix, theirs)
        processes.append(start.Process(target=_run, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        ready.append(ours)
    counts = set()
    for rank, connection in enumerate(ready):
        assert connection.poll(60.0), f"rank {rank} of {plan} did not begin"
        try:
            counts.add(connection.recv())
        except EOFError:
            raise AssertionError(f"rank {rank} of {plan} did not get as far as saving") from None
    assert len(counts) == 1, f"ranks of {plan} go on from {counts}"
    return processes, counts.pop()


def _kill(plan: Plan, processes: list[BaseProcess]) -> None:
    """The survivors have to end soon."""
    if plan.call is None:
        time.sleep(plan.after_s)
        for rank in plan.victims:
            os.kill(processes[rank].pid or 0, signal.SIGKILL)
    assert wait([processes[rank].sentinel for rank in plan.victims], timeout=60.0), f"no rank of {plan} died"
    began = time.monotonic()
    for rank, process in enumerate(processes):
        process.join(max(ENDS_WITHIN_S - (time.monotonic() - began), 0.1))
        if process.exitcode is None:
            os.kill(process.pid or 0, signal.SIGUSR1)
            time.sleep(1.0)  # says where it is
            for each in processes:
                each.kill()
            raise AssertionError(f"rank {rank} of {plan} hangs after the death of another")
        # Of several victims one may hear of the death of another before its own.
        fates = {-signal.SIGKILL} if plan.victims == (rank,) else {-signal.SIGKILL, HEARD}
        assert process.exitcode in fates, f"rank {rank} of {plan} ended with {process.exitcode}"


@pytest.mark.ranks
@pytest.mark.parametrize(("scheme", "times"), [("", 4), (f"{Kept.protocol}://", 3)])
def test_runs_that_are_killed_while_saving_lose_nothing_they_had_saved(tmp_path: Path, scheme: str, times: int) -> None:
    """One rank or all, between any two changes to the file system or at any time; each checks the one before."""
    directory, world_sizes = tmp_path, [2, 3]
    generator = random.Random(4)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    saves = wanted = 0
    checkpoints = directory / "checkpoints"
    for number in range(times + 1):
        notes = directory / f"notes-{number}"
        notes.mkdir()
        plan = Plan.drawn(generator, world_sizes[number % len(world_sizes)])
        if number == times:  # a last one finds what there is, sweeps up, and ends
            plan = plan._replace(waits=True, victims=(), last=True)
        processes, found = _start(plan, f"{scheme}{checkpoints}", notes, store.port, f"run-{number}")
        assert found >= wanted, f"{plan} went on from {found}, but {wanted} had been saved"
        if number == times:
            for process in processes:
                process.join(60.0)
                assert process.exitcode == HEARD
            break
        _kill(plan, processes)
        wanted = max(_returned(notes), found)
        saves += wanted - found
    names = sorted(path.name for path in checkpoints.iterdir())
    assert len(names) == KEEP and all(re.fullmatch(r"checkpoint-\d+(-\d+|\.[0-9a-f]{8})?", name) for name in names), (
        names
    )
    assert saves > 0
