"""Save in the background: copies in host memory, the thread that writes them, and a process group for these threads.

Owns the running save (at most one per process) and the groups.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from streamshard.checkpoint.disk_layout import Piece
from streamshard.comm.communicator import Communicator
from streamshard.comm.flight_recorder import Board, Guard, RecordKind
from streamshard.comm.groups import close_connections
from streamshard.comm.objects import gather_bytes
from streamshard.device import has_streams, module_of, on_device
from streamshard.errors import CheckpointError, CommunicationError, log

__all__ = [
    "BackgroundRanks",
    "Saving",
    "background_ranks",
    "copy_to_host",
    "finish_running",
    "has_connections",
    "run_in_background",
]

MADE_WITHIN = datetime.timedelta(seconds=20)  # timeout for making a group, after ranks have met
WRITTEN_WITHIN = datetime.timedelta(minutes=30)  # how long the fastest rank waits for the slowest one's disk
SHOWN_WITHIN_S = 5.0  # how long a rank waits, after a failure, for others to show that they are alive


def copy_to_host(pieces: Sequence[Piece], device: torch.device) -> Callable[[], list[Piece]]:
    """Start to copy `pieces` into new host memory, on the current stream. Later work on this stream may change them.

    Returns:
        A function that waits for the copies, in any thread, and returns them.
    """
    copies = []
    for piece in pieces:
        copy = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=device.type != "cpu")
        copies.append(piece._replace(data=copy.copy_(piece.data, non_blocking=True)))
    event: Any = None
    if has_streams(device):
        module = module_of(device)
        event = module.Event()
        event.record(module.current_stream(device))

    def finish() -> list[Piece]:
        if event is not None:
            with on_device(device):
                event.synchronize()
        return copies

    return finish


class Saving:
    """What `save_checkpoint` returns. With ``wait=False`` the save runs in the background.

    The checkpoint holds the state at the call: everything was copied before the call returned.

    When Python exits, after an error or Ctrl-C too, it waits for the save. SIGTERM ends the process at once: the
    checkpoint is not finished, earlier checkpoints stay whole, and the next save removes the leftovers. To finish the
    save, call ``wait()`` in a SIGTERM handler of your own, then exit. Python calls handlers only while the main thread
    is not in a collective.

    Attributes:
        path: the checkpoint's path. It may change until the save is done, if another run saves the same number.
    """

    def __init__(self, path: Path, write: Callable[[], Path] | None = None) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._is_told = False
        self._thread: threading.Thread | None = None
        if write is not None:  # not a daemon: Python waits for it at exit
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path}")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, in success or failure."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, *, again: bool = True) -> Path:
        """Return the checkpoint's path, once the checkpoint is there.

        Args:
            again: raise an error that an earlier call has raised.

        Raises:
            CheckpointError: the checkpoint could not be written; names the rank and the cause. If a rank has died or
                was interrupted, the others raise as soon as they notice, after 30 minutes at the latest.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and (again or not self._is_told):
            self._is_told = True
            raise self._error
        return self.path

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self.path = write()
        except BaseException as error:
            self._error = error
            if isinstance(error, CommunicationError):
                self._error = CheckpointError(f"{self.path} was not saved: {error}")
                self._error.__cause__ = error
            log.error("%s", self._error)


_running: Saving | None = None


def run_in_background(path: Path, write: Callable[[], Path]) -> Saving:
    """Start `write` in a thread, which returns the final path. The next call of `finish_running` waits for it."""
    global _running
    _running = Saving(path, write)
    return _running


def finish_running() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        Exception: the save's error, unless ``wait()`` has raised it on this rank. The caller tells the other ranks.
    """
    global _running
    if _running is not None:
        _running.wait(again=False)
        _running = None


# Groups that only saves in the background use, by the group of all ranks. Weak: destroy_process_group() has to end
# gloo's threads, which must not outlive Python (they take its lock).
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class BackgroundRanks:
    """The `RankGroup` of a save in the background: it has a process group that nothing else uses.

    Failures are reported as in training: see `Guard`.

    Args:
        ranks: all ranks that save.
        group: connects them; None: this is the only rank.
    """

    def __init__(self, ranks: Communicator, group: dist.ProcessGroup | None) -> None:
        self.is_first = ranks.is_first
        self.replica = ranks.replica
        self.number = ranks.number
        self.world_size = ranks.world_size
        self.total_size = ranks.total_size
        self.failure: str | None = None
        self.watch: Any = SimpleNamespace(wait=None)  # nobody looks: a disk may be slow
        self._group = group
        if group is not None:
            self.board = Board(group, self.number, self.total_size)

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Every rank's `data`, in rank order.

        Raises:
            CommunicationError: a rank has died, has failed or does not answer; says which. No later call works.
        """
        assert self._group is not None
        with Guard(self, "saving in the background", ""):
            self.board.log.add(RecordKind.MEETING)
            try:
                return gather_bytes(self._group, data, WRITTEN_WITHIN)
            except RuntimeError:
                close_connections(self._group)  # so the others find out as well
                self._await_others()
                raise

    def fail(self, failure: str) -> None:
        """Make all other ranks fail with this text. Only the first failure is kept."""
        if self.failure is None:
            self.failure = failure
        if self._group is not None:
            for ranks in [ranks for ranks, group_of in _groups.items() if group_of() is self._group]:
                del _groups[ranks]
            self.board.post_failure(failure)  # before the others' waits end: they read it then
            close_connections(self._group)

    def _await_others(self) -> None:
        """Return when another rank has posted its failure, or all ranks have come as far as this one."""
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while time.monotonic() < deadline and self.board.read_failure() is None and self.board.describe_missing():
            time.sleep(0.02)


def has_connections(ranks: Communicator) -> bool:
    """Whether this rank already has a group for saves in the background."""
    group_of = _groups.get(ranks.all_ranks)
    return group_of is not None and group_of() is not None


def background_ranks(ranks: Communicator, *, connects: bool) -> BackgroundRanks:
    """The ranks, for one save in the background.

    Call it right after a collective. Making a group waits at the store, which does not notice that a rank has died.

    Args:
        ranks: all ranks that save.
        connects: make a new group (collective), because some rank has none; see `has_connections`.

    Raises:
        CommunicationError: another rank did not come.
    """
    if ranks.total_size == 1:
        return BackgroundRanks(ranks, None)
    if connects:
        with ranks.guard("making a group for saves in the background"):
            members = dist.get_process_group_ranks(ranks.all_ranks)
            group = dist.new_group(members, MADE_WITHIN, backend="gloo", use_local_synchronization=True)
        _groups[ranks.all_ranks] = weakref.ref(group)
    return BackgroundRanks(ranks, _groups[ranks.all_ranks]())
