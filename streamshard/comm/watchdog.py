"""The watchdog: a thread that looks after the ranks of all models of a process. See [Note: ranks that differ]."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from streamshard.comm import flight_recorder
from streamshard.comm.flight_recorder import FlightRecorder
from streamshard.errors import StreamShardError, describe, log, uncaught

_END_WITHIN_S = 5.0  # at exit, the longest wait for the watchdog


class WatchedRanks(Protocol):
    """Ranks that wait for each other: a `streamshard.comm.ranks.RankGroup`."""

    rank: int
    recorder: FlightRecorder

    def abort(self, *, users_too: bool = False) -> None:
        """End this rank's waits."""


class _Watchdog:
    """A thread that looks after all `WatchedRanks` of this process, twice a second. Starts with the first ones.

    Args:
        inherited: in a forked child: the `WatchedRanks` of its parents.
    """

    def __init__(self, inherited: Sequence[WatchedRanks] = ()) -> None:
        self.inherited = inherited
        self._watched: tuple[tuple[Callable[[], WatchedRanks | None], FlightRecorder], ...] = ()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, ranks: WatchedRanks) -> None:
        """Look after `ranks` too, as long as they live."""
        known = (watched for watched in self._watched if watched[0]() is not None or not watched[1].has_left)
        self._watched = (*known, (weakref.ref(ranks), ranks.recorder))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="streamshard watchdog", daemon=True)
            self._thread.start()

    def ranks(self) -> list[WatchedRanks]:
        """The `WatchedRanks` that are alive."""
        return [ranks for of, _ in self._watched if (ranks := of()) is not None]

    def _run(self) -> None:
        while not self._is_over.wait(flight_recorder.PATIENCE_S / 2):
            self._look()

    def _look(self) -> None:  # a method of its own, so that no variable keeps ranks alive between looks
        for of, recorder in self._watched:
            if of() is None:
                recorder.leave()
        for ranks in self.ranks():
            ranks.recorder.look(ranks.abort)

    def end(self) -> None:
        """Tell the other ranks which error ends this process, or log the failure of another rank. End the thread.

        Python aborts if it ends a daemon thread inside a C++ call, such as a call of the store.
        """
        if self._thread is None:
            return
        recorders = [ranks.recorder for ranks in self.ranks()]
        if (error := uncaught()) is not None:
            for recorder in recorders:
                recorder.post_failure(f"its process ends with {describe(error)}")
            if not isinstance(error, StreamShardError):
                failures = {recorder.read_failure() for recorder in recorders if recorder.difference is None}
                for failure in failures - {None}:
                    log.error("%s", failure)
        self._is_over.set()
        self._thread.join(_END_WITHIN_S)


_watchdog = _Watchdog()


def look_after(ranks: WatchedRanks) -> None:
    """Look after `ranks`, as long as they live."""
    _watchdog.watch(ranks)


atexit.register(lambda: _watchdog.end())


def _after_fork_in_child() -> None:
    """Give a forked child a new watchdog. It must not use its parent's connections, and its error is not the rank's.

    The child keeps its parent's `WatchedRanks` for ever: they would unmap memory that the child does not have.
    """
    global _watchdog
    inherited = (*_watchdog.inherited, *_watchdog.ranks())
    for ranks in inherited:
        what = f"this process was forked from rank {ranks.rank} and has no connection to other ranks"
        ranks.recorder.log.failure = f"{what}: start processes with the spawn method"
    _watchdog = _Watchdog(inherited)


os.register_at_fork(after_in_child=_after_fork_in_child)
