"""Watches every wait for other ranks: reports long ones, ends those that are in vain, and says how a wait failed.

A backend ends a wait when the message comes or the process group's timeout is over, and says nothing meanwhile. So one
thread of the process looks twice a second at what its ranks wait for. If the logs of all ranks
(`streamshard.comm.flight_recorder`) show that a wait is in vain, the thread ends it. Otherwise it logs a warning after
half a minute, and again whenever the wait has doubled: what this rank waits for, for which ranks, and what these did
last. They may be inside another library's collective, or asleep: then nothing is certain, and nothing is raised before
the group's timeout.

On devices the host does not wait for collectives, so a rank counts as waiting there as well when it has issued nothing
for so long and others have issued less.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from streamshard.comm.flight_recorder import Board, Failure
from streamshard.comm.foreign import find_call
from streamshard.errors import CommunicationError, StreamShardError, log

__all__ = ["Guard", "Wait", "Watch", "explain"]

_PATIENCE_S = 1.0  # until logs are compared
_REPORT_AFTER_S = 30.0  # until the first warning
_END_WITHIN_S = 5.0  # at exit
_SHOW_AFTER_S = 10.0  # without anything issued, until a rank puts up its log
_CALL_AFTER_S = 3.0  # in another library's collective, until a rank puts that up, and until others ask for it

# This rank's own errors, which say nothing of others, although they are RuntimeErrors as those of backends are.
_OWN: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

_ADVICE = (
    "of them have to call forward (evaluation and generate() too), backward, norms and everything that collects "
    "weights, and run the same layers in the same order (some may skip layers, but not reorder or repeat them). Where "
    "inputs run out on some ranks first, use Join (docs/guide/uneven_inputs.md)"
)


class Wait:
    """One wait for other ranks.

    Args:
        what: is waited for.
        waited_s: so far.

    Attributes:
        what: see above.
        since: `time.monotonic` of when it began.
        report_at_s: after so long it is reported (again).
    """

    __slots__ = ("report_at_s", "since", "what")

    def __init__(self, what: str, waited_s: float = 0.0) -> None:
        self.what = what
        self.since = time.monotonic() - waited_s
        self.report_at_s = _REPORT_AFTER_S


class Watch:
    """What one rank of one model waits for. The thread looks at it as long as it lives.

    Args:
        board: of the rank.
        has_streams: ranks are on devices, for whose collectives no host waits.
        abort: ends the waits of this rank's host; a method of an object that the thread must not keep alive.

    Attributes:
        wait: what the rank's host waits for; None: for nothing.
    """

    def __init__(self, board: Board, *, has_streams: bool = False, abort: Callable[[], None] | None = None) -> None:
        self.wait: Wait | None = None
        self._board = board
        self._has_streams = has_streams
        self._abort = None if abort is None else weakref.WeakMethod(abort)
        self._on_device: Wait | None = None
        self._failure: Failure | None = None
        self._user = threading.get_ident()
        _thread.add(self)

    def look(self) -> None:
        """Called by the thread."""
        self._board.show_if_idle(_SHOW_AFTER_S)
        self._look_at_user()
        wait = self.wait or self._wait_on_device()
        if wait is None:
            return
        waited_s = time.monotonic() - wait.since
        reports = waited_s >= wait.report_at_s
        if waited_s < _PATIENCE_S or (self._has_streams and not reports):
            return
        difference = self._board.find_difference()
        if difference is None and waited_s >= _CALL_AFTER_S:
            difference = self._board.find_foreign()
        if difference is not None and self._abort is not None:
            self._board.post_failure(f"{wait.what}: {difference}. All {_ADVICE}")
            if reports:  # where nobody can end the wait, on a device
                log.error("%s: %s. All %s", wait.what, difference, _ADVICE)
                wait.report_at_s = 2 * waited_s
            self._end_waits()
        elif reports:
            self._report(wait, waited_s)

    def _look_at_user(self) -> None:
        """Whether this rank is in another library's collective, and whether that waits for a rank that has failed."""
        is_elsewhere = self.wait is None and self._board.log.idle_s >= _CALL_AFTER_S
        call = find_call(self._user) if is_elsewhere else None
        self._board.show_call(call)
        if call is not None and (failure := self._board.read_failure()) is not None:
            if failure != self._failure:
                log.error("%s ends %s: rank %d has failed: %s", self._board.describe_rank(), call, *failure)
            self._failure = failure
            self._end_waits()

    def _end_waits(self) -> None:
        if self._abort is not None and (abort := self._abort()) is not None:
            abort()

    def _wait_on_device(self) -> Wait | None:
        idle_s = self._board.log.idle_s
        if not self._has_streams or idle_s < _REPORT_AFTER_S:
            self._on_device = None
        elif self._on_device is None:
            self._on_device = Wait("what it has issued on its device", idle_s)
        return self._on_device

    def _report(self, wait: Wait, waited_s: float) -> None:
        wait.report_at_s = 2 * waited_s
        missing = self._board.describe_missing(among_shown=wait is self._on_device)
        if missing is None and wait is self._on_device:
            return  # it computes, or does something that is its own
        log.warning(
            "%s has waited for %.0f s in %s (last: %s): %s. Norms, forward, generate() and everything "
            "that collects weights have to be called on all ranks, not on one alone",
            self._board.describe_rank(),
            waited_s,
            wait.what,
            self._board.describe_last(),
            missing or "all ranks have come, so a rank or the network is slow",
        )


class _Thread:
    """Looks at watches, and ends with the last one."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="streamshard watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(_PATIENCE_S / 2):
            with self._lock:
                watches = list(self._watches)
                if not watches:
                    self._thread = None
                    return
            while watches:
                watches.pop().look()

    def end(self) -> None:
        """At exit. Python ends a daemon thread that is in a C++ call, such as one of the store, by aborting."""
        self._is_over.set()
        if (thread := self._thread) is not None:
            thread.join(_END_WITHIN_S)


_thread = _Thread()


atexit.register(lambda: _thread.end())


def _after_fork_in_child() -> None:
    global _thread
    _thread = _Thread()  # threads stay behind


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Guarded(Protocol):
    """What a guard needs of `Ranks`; see there."""

    number: int
    total_size: int
    failure: str | None
    board: Board
    watch: Watch

    def fail(self, failure: str) -> None:
        """See `Ranks.fail`."""


class Guard:
    """A context around a wait for other ranks. Turns a backend's error into a `CommunicationError` that names the wait.

    Args:
        ranks: marked as failed, so that nothing more is issued to those that may be gone.
        action: what goes on inside, such as "the gather of".
        subject: whose it is, such as a unit's name; "" if nobody's.

    Raises:
        CommunicationError: when entered, if something has failed before.
    """

    __slots__ = ("_outer", "_ranks", "_what")

    def __init__(self, ranks: Guarded, action: str, subject: str) -> None:
        self._ranks = ranks
        self._what = f"{action} {subject!r}" if subject else action

    def __enter__(self) -> None:
        ranks = self._ranks
        if ranks.failure is not None:
            raise CommunicationError(f"{self._what} is not possible any more: {ranks.failure}")
        self._outer, ranks.watch.wait = ranks.watch.wait, Wait(self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ranks = self._ranks
        ranks.watch.wait = self._outer
        if error is None or (ranks.failure is not None and isinstance(error, StreamShardError)):
            return
        if not isinstance(error, RuntimeError) or isinstance(error, (StreamShardError, *_OWN)):
            ranks.fail(f"{self._what} ended with {type(error).__name__}: {error}")
            return
        reason = explain(error, ranks.board)
        message = f"{self._what} failed on rank {ranks.number} of {ranks.total_size}: {reason}"
        ranks.fail(message)
        raise CommunicationError(message) from error


def explain(error: Exception, board: Board) -> str:
    """Why a collective ended with `error`, as far as this rank can know."""
    if (difference := board.find_difference()) is not None:
        return f"{difference}. All {_ADVICE}"
    if (failure := board.read_failure()) is not None:
        return f"rank {failure.rank} has failed: {failure.text}"
    if "has died" in str(error):
        return str(error)
    missing = board.describe_missing()
    told = f"{error}. {missing}" if missing else str(error)
    return f"{told}. Either another rank has died, or ranks do not do the same: all {_ADVICE}"
