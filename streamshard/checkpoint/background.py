"""Save in the background: copies in host memory, the thread that writes them, and a process group for these threads.

Owns the running save (at most one per process) and the groups.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamshard.checkpoint.disk_layout import Piece
from streamshard.comm.communicator import Communicator
from streamshard.comm.groups import is_closed, make_host_group
from streamshard.comm.objects import RankGroup
from streamshard.device import has_streams, module_of, on_device
from streamshard.errors import CheckpointError, CommunicationError, log

MADE_WITHIN = datetime.timedelta(seconds=20)  # timeout for making a group, after ranks have met
WRITTEN_WITHIN = datetime.timedelta(minutes=30)  # how long the fastest rank waits for the slowest one's disk


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
        self._thread: threading.Thread | None = None
        if write is not None:  # not a daemon: Python waits for it at exit
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path}")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, in success or failure."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the checkpoint's path, once the checkpoint is there.

        Raises:
            CheckpointError: the checkpoint could not be written; names the rank and the cause. If a rank has died or
                was interrupted, the others raise as soon as they notice, after 30 minutes at the latest.
        """
        global _running
        if self._thread is not None:
            self._thread.join()
        if _running is self:
            _running = None
        if self._error is not None:
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
    if _running is not None:
        _running.wait()


# Groups that only saves in the background use, by the group of all ranks. Weak: destroy_process_group() has to end
# gloo's threads, which must not outlive Python (they take its lock).
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def background_ranks(ranks: Communicator) -> RankGroup:
    """The ranks, for one save in the background. They have a process group that nothing else uses. Collective.

    Making the group waits at the store, which does not notice that a rank has died: so all ranks meet right before.

    Raises:
        CommunicationError: another rank did not come.
    """
    if ranks.total_size == 1:
        return RankGroup()
    group_of = _groups.get(ranks.users_group)
    group = None if group_of is None else group_of()
    if not all(ranks.gather_objects(group is not None and not is_closed(group))):
        with ranks.guard("making a group for saves in the background"):
            group = make_host_group(ranks.users_group, MADE_WITHIN)
            _groups[ranks.users_group] = weakref.ref(group)
    return RankGroup(
        group,
        world_size=ranks.world_size,
        replica=ranks.replica,
        meeting="saving in the background",
        timeout=WRITTEN_WITHIN,
    )
