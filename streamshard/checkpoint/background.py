"""Saving beside training: a thread that copies and writes, steps that wait for it, and a group over which ranks talk.

Owns the save that is running, of which there is one in a process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.checkpoint.host_copies import HostCopies
from streamshard.comm.arena import Process
from streamshard.comm.groups import close_connections
from streamshard.comm.objects import describe, gather_bytes
from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.errors import CheckpointError
from streamshard.log import log

__all__ = [
    "BackgroundGroup",
    "Saving",
    "background_group",
    "finish_running",
    "has_connections",
    "run_in_background",
]


MADE_WITHIN = datetime.timedelta(seconds=20)  # a group, once ranks have met
WRITTEN_WITHIN = datetime.timedelta(minutes=30)  # how long the fastest rank waits for the slowest one's disk
ANSWERED_WITHIN_S = 5.0  # how long ranks wait, after a failure, for others to say that they are alive
_ANSWER = "streamshard/answer/"  # keys of the group's store


class Saving:
    """A checkpoint that is being written while training goes on, as it was at the call.

    The optimizer's moments are copied while the next forward and backward run; the next ``step()`` waits until they
    are. They may be replaced at any time. Writing to them in place before that step, ``wait()`` or ``done``, makes the
    save fail with a `CheckpointError` that names them; writes that autograd does not count (``.data``, numpy) it cannot
    see. Everything else is the caller's again at once.

    An interpreter that ends, after an error or Ctrl-C too, waits for the save. SIGTERM ends the process at once, as
    always: the checkpoint is not finished then, earlier ones are whole, and the next save removes what is left. To
    finish it, call ``wait()`` in a handler of your own and exit after that; Python calls handlers once the main thread
    is not in a collective.

    Attributes:
        path: where it will be.
    """

    def __init__(self, path: Path, copies: HostCopies, write: Callable[[], None]) -> None:
        self.path = path
        self._copies: HostCopies | None = copies
        self._error: BaseException | None = None
        self._is_told = False
        self._write = write
        # No daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._run, name=f"save {path}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, done={self.done})"

    @property
    def done(self) -> bool:
        """Whether it is over, for good or ill."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return where the checkpoint is, once it is there.

        Raises:
            CheckpointError: it could not be written; names the rank and the cause. A rank that dies meanwhile is an
                error on all others as soon as they notice, after 30 minutes of silence at the latest.
        """
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.path

    def finish(self) -> None:
        """Wait, and raise what went wrong unless it has been raised here: once."""
        self._thread.join()
        if self._error is not None and not self._is_told:
            self.wait()

    def let_step(self) -> None:
        """Return when a step may change the state of optimizers."""
        copies = self._copies
        if copies is not None and not self.done:  # in a forked process no thread copies
            copies.let_step()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            log.error("%s", error)
        finally:
            del self._write  # what it holds
            self._copies = None


_running: Saving | None = None


def run_in_background(saving: Saving) -> Saving:
    """Remember `saving`, which runs, for the next call to wait for."""
    global _running
    _running = saving
    return saving


def finish_running() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        Exception: what went wrong, unless ``wait()`` has raised it on this rank. The caller tells the other ranks.
    """
    global _running
    saving = _running
    if saving is not None:
        saving.finish()
        _running = None


@skip
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps, of whichever: those that are not saved wait as well."""
    if _running is not None:
        untraced(_running.let_step)


register_optimizer_step_pre_hook(before_step)


class _Connections:
    """Connections between all ranks that only saves in the background use. Made once, and again after a failure.

    Args:
        group: of gloo.
        processes: the other ranks on this host, by number.

    Attributes:
        are_broken: whether something has failed: nothing goes over them any more.
    """

    def __init__(self, group: dist.ProcessGroup, processes: Mapping[int, Process]) -> None:
        # Weak: destroy_process_group() has to end gloo's threads, which must not outlive Python (they take its lock).
        self.group_of = weakref.ref(group)
        self.processes = processes
        self.are_broken = False


_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, _Connections] = weakref.WeakKeyDictionary()


class BackgroundGroup:
    """The ranks, as a thread beside training talks to them: over a group that nobody else uses, nor destroys.

    Args:
        ranks: all that save.
        connections: between them; None: this is the only rank.
    """

    def __init__(self, ranks: Ranks, connections: _Connections | None) -> None:
        self.is_first = ranks.is_first
        self.replica = ranks.replica
        self.number = ranks.number
        self.world_size = ranks.world_size
        self.total_size = ranks.total_size
        self._connections = connections
        self._group = None if connections is None else connections.group_of()

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Every rank's `data`, in rank order.

        Raises:
            CheckpointError: a rank has died, has failed or does not answer; names the rank. No later call works.
        """
        assert self._group is not None and self._connections is not None
        if self._connections.are_broken:
            raise CheckpointError("the connections for saves in the background are closed, the error before says why")
        try:
            return gather_bytes(self._group, data, WRITTEN_WITHIN)
        except RuntimeError as error:
            self._hang_up("")
            raise CheckpointError(f"saving in the background failed: {self._find_cause(error)}") from error

    def give_up(self, error: BaseException) -> None:
        """This rank cannot go on, and no other rank has been told: all others end with `error` in words."""
        if self._connections is not None and not self._connections.are_broken:
            self._hang_up(f"rank {self.number}: {describe(error)}")

    def _hang_up(self, cause: str) -> None:
        """Say that this rank is alive and why it fails, where the others look, and end their waits for this rank."""
        assert self._group is not None and self._connections is not None
        self._connections.are_broken = True
        self._answer(cause)
        close_connections(self._group)

    def _find_cause(self, error: Exception) -> str:
        """Why `error` was raised here, for all ranks to hear: which rank has died or failed.

        Other ranks answer once they find their connections closed, which is at once if they wait for somebody. This
        rank stays until all of them know the cause: it may be the one that keeps the store.
        """
        deadline = time.monotonic() + ANSWERED_WITHIN_S
        others = [rank for rank in range(self.total_size) if rank != self.number]
        cause = ""
        while True:
            is_late = time.monotonic() > deadline
            answers = {rank: self._answer_of(rank) for rank in others}
            # A process closes its connections a moment before it has ended.
            dead = [rank for rank, answer in answers.items() if not answer and self._is_dead(rank)]
            if cause and (is_late or all(answer or rank in dead for rank, answer in answers.items())):
                return cause
            silent = [rank for rank, answer in answers.items() if answer is None]
            if not cause:
                if dead:
                    cause = ", ".join(f"rank {rank} has died" for rank in dead)
                elif any(answers.values()):
                    cause = next(filter(None, answers.values()))
                elif not silent:
                    cause = f"rank {self.number}: {error}"
                elif is_late:
                    cause = ", ".join(f"rank {rank} does not answer" for rank in silent)
                if cause:
                    self._answer(cause)
            time.sleep(0.02)

    def _is_dead(self, rank: int) -> bool:
        assert self._connections is not None
        process = self._connections.processes.get(rank)
        return process is not None and not process.is_running()

    def _answer(self, cause: str) -> None:
        assert self._group is not None
        with contextlib.suppress(RuntimeError):  # the store may have gone with its rank
            self._group.get_group_store().set(f"{_ANSWER}{self.number}", cause)

    def _answer_of(self, rank: int) -> str | None:
        """Why `rank` has failed; "" if it does not know, None if it has not answered."""
        assert self._group is not None
        with contextlib.suppress(RuntimeError):
            store = self._group.get_group_store()
            if store.check([f"{_ANSWER}{rank}"]):
                return store.get(f"{_ANSWER}{rank}").decode()
        return None


def has_connections(ranks: Ranks) -> bool:
    """Whether this rank need not make connections for a save in the background."""
    connections = _connections.get(ranks.all_ranks)
    return connections is not None and connections.group_of() is not None and not connections.are_broken


def background_group(ranks: Ranks, *, connects: bool) -> BackgroundGroup:
    """The ranks, for one save in the background.

    To be called where ranks have just met: to make a group they meet at the store, which does not say that one of them
    has died on the way there.

    Args:
        ranks: all that save.
        connects: make new connections, which is collective: a rank has none, see `has_connections`.

    Raises:
        CommunicationError: another rank did not come.
    """
    if ranks.total_size == 1:
        return BackgroundGroup(ranks, None)
    if connects:
        with ranks.guard("making a group for saves in the background"):
            members = dist.get_process_group_ranks(ranks.all_ranks)
            group = dist.new_group(members, MADE_WITHIN, backend="gloo", use_local_synchronization=True)
            places = [json.loads(place) for place in gather_bytes(group, json.dumps(_place()).encode())]
        here, _ = places[ranks.number]
        neighbours = {
            rank: _process(number)
            for rank, (system, number) in enumerate(places)
            if system == here is not None and rank != ranks.number
        }
        _connections[ranks.all_ranks] = _Connections(group, neighbours)
    return BackgroundGroup(ranks, _connections[ranks.all_ranks])


def _place() -> tuple[str | None, int]:
    """Where this process can be looked at, None if nowhere, and its number there."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None, 0
    return system, os.getpid()


def _process(number: int) -> Process:
    directory = os.open(f"/proc/{number}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return Process(directory)
    finally:
        os.close(directory)
