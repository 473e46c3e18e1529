"""The watchdog: a thread that looks after the ranks of all models of a process. See [Note: ranks that differ]."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from streamshard.comm import flight_recorder
from streamshard.comm.flight_recorder import FlightRecorder
from streamshard.errors import StreamShardError, describe, log, uncaught

_END_WITHIN_S = 5.0  # at exit, the longest wait for the watchdog


class _Watchdog:
    """A thread that looks after the ranks of all `watched` recorders, twice a second. Starts with the first ones.

    Args:
        inherited: in a forked child: keeps the ranks of its parents.
    """

    def __init__(self, inherited: Sequence[object] = ()) -> None:
        self.inherited = inherited
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, recorder: FlightRecorder, abort: Callable[..., None]) -> None:
        """See `look_after`."""
        known = (each for each in flight_recorder.watched if not each[1].has_left)
        flight_recorder.watched = (*known, (weakref.WeakMethod(abort), recorder))
        if self._thread is None:
            # A daemon: Python would wait for another thread before it calls `end`.
            self._thread = threading.Thread(target=self._run, name="streamshard watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(flight_recorder.PATIENCE_S / 2):
            self._look()

    def _look(self) -> None:  # a method of its own, so that no variable keeps ranks alive between looks
        for abort_of, recorder in flight_recorder.watched:
            if (abort := abort_of()) is None:
                recorder.leave()
            else:
                recorder.look(abort)

    def end(self) -> None:
        """Tell the other ranks which error ends this process, or log the failure of another rank. End the thread.

        Python aborts if it ends a daemon thread inside a C++ call, such as a call of the store.
        """
        if self._thread is None:
            return
        recorders = [recorder for abort_of, recorder in flight_recorder.watched if abort_of() is not None]
        if (error := uncaught()) is not None:
            for recorder in recorders:
                recorder.post_failure(f"its process ends with {describe(error)}")
            if not isinstance(error, StreamShardError):  # which says itself what has failed
                # A difference was logged, or raised, before.
                failures = {recorder.read_failure() for recorder in recorders if recorder.difference is None}
                for failure in failures - {None}:
                    log.error("%s", failure)
        self._is_over.set()
        self._thread.join(_END_WITHIN_S)


_watchdog = _Watchdog()


def look_after(recorder: FlightRecorder, abort: Callable[..., None]) -> None:
    """Look after the ranks of `recorder`, as long as they live. `abort` is their method that ends their waits."""
    _watchdog.watch(recorder, abort)


atexit.register(lambda: _watchdog.end())  # a forked child has another `_watchdog`


def _after_fork_in_child() -> None:
    """Give a forked child a new watchdog. It must not use its parent's connections, and its error is not the rank's.

    The child keeps its parent's ranks for ever: they would unmap memory that the child does not have.
    """
    global _watchdog
    for _, recorder in flight_recorder.watched:
        what = f"this process was forked from rank {recorder.rank} and has no connection to other ranks"
        recorder.log.failure = f"{what}: start processes with the spawn method"
    inherited = [_watchdog.inherited, *(abort_of() for abort_of, _ in flight_recorder.watched)]
    flight_recorder.watched, _watchdog = (), _Watchdog(inherited)


os.register_at_fork(after_in_child=_after_fork_in_child)
