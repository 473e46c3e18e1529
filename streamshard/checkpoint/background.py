"""Saving beside training: a thread that copies and writes, steps that wait for it, and a group over which ranks talk.

Owns the save that is running, of which there is one in a process.
"""

from __future__ import annotations

import datetime
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # not in stubs
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.checkpoint.host_copies import HostCopies
from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.errors import CheckpointError
from streamshard.log import log

__all__ = ["BackgroundGroup", "Saving", "background_group", "finish_running", "run_in_background"]


MADE_WITHIN = datetime.timedelta(seconds=20)  # a group, once ranks have met
WRITTEN_WITHIN = datetime.timedelta(minutes=30)  # how long the fastest rank waits for the slowest one's disk


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
            CheckpointError: it could not be written; names the rank and the cause.
        """
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.path

    def finish(self, ranks: Ranks) -> None:
        """Wait, and raise what went wrong, on all ranks, if there is one that has not waited. Collective then."""
        self._thread.join()
        if self._error is None:
            return
        # A `CheckpointError` is known to all ranks, but some may have waited for it and others not. After anything else
        # nobody knows whom a vote would reach.
        if not isinstance(self._error, CheckpointError) or ranks.any_rank(not self._is_told):
            raise self._error

    def let_step(self) -> None:
        """Return when a step may change the state of optimizers."""
        copies = self._copies
        if copies is not None and not self.done:  # in a forked process no thread copies
            copies.let_step()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            log.error("%s", error)
            self._error = error
        finally:
            del self._write  # what it holds
            self._copies = None


_running: Saving | None = None
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def run_in_background(saving: Saving) -> Saving:
    """Remember `saving`, which runs, for the next call to wait for."""
    global _running
    _running = saving
    return saving


def finish_running(ranks: Ranks) -> None:
    """Wait for the save in the background, if there is one, and raise its error unless all ranks have heard of it."""
    global _running
    saving, _running = _running, None
    if saving is not None:
        saving.finish(ranks)


@skip
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps, of whichever: those that are not saved wait as well."""
    if _running is not None:
        untraced(_running.let_step)


register_optimizer_step_pre_hook(before_step)


class BackgroundGroup:
    """The ranks, as a thread beside training talks to them: over a group that nobody else uses, nor destroys."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self.is_first = ranks.is_first
        self.replica = ranks.replica
        self.number = ranks.number
        self.world_size = ranks.world_size
        self.total_size = ranks.total_size
        self._group = group

    def gather_objects(self, value: Any, /) -> list[Any]:
        """Every rank's `value`, in rank order."""
        if self._group is None:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._all_gather(torch.tensor([mine.numel()]))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = self._all_gather(padded)
        return [pickle.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(gathered, sizes, strict=True)]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        results = [torch.empty_like(tensor) for _ in range(self.total_size)]
        options = AllgatherOptions()
        options.timeout = WRITTEN_WITHIN
        self._group.allgather([results], [tensor], options).wait()
        return results


def background_group(ranks: Ranks) -> BackgroundGroup:
    """Collective the first time.

    To be called where ranks have just met: to make a group they meet at the store, which does not say that one of them
    has died on the way there.

    Raises:
        CommunicationError: another rank did not come.
    """
    if ranks.total_size == 1:
        return BackgroundGroup(ranks, None)
    all_ranks = ranks.all_ranks
    group_of = _groups.get(all_ranks)
    group = None if group_of is None else group_of()
    if group is None:
        members = dist.get_process_group_ranks(all_ranks)
        with ranks.guard("making a group for saves in the background"):
            group = dist.new_group(members, MADE_WITHIN, backend="gloo", use_local_synchronization=True)
        _groups[all_ranks] = weakref.ref(group)
    return BackgroundGroup(ranks, group)
