"""Looks after ranks that wait: when one has waited for long, whether the others do the same.

gloo ends a wait when the message comes or the process group's timeout is over, and answers no questions meanwhile. So
one thread of the process looks twice a second whether somebody has been waiting for long, and if the logs of all ranks
(`streamshard.comm.issued`) tell that it waits in vain, ends the wait.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

__all__ = ["Vigil"]

_PATIENCE_S = 1.0


class Patient(Protocol):
    """Who waits."""

    def give_up_if_in_vain(self) -> None:
        """It has been waiting for long: let that end with an error if what it waits for cannot come."""


class Vigil:
    """How long one patient has been waiting. Looked at from another thread, the patient itself only when it has to be.

    Args:
        patient: looked after as long as it lives.

    Attributes:
        since: `time.monotonic` of when it began to wait for other ranks; None: it does not wait.
    """

    def __init__(self, patient: Patient) -> None:
        self.since: float | None = None
        self.patient_of = weakref.ref(patient)
        weakref.finalize(patient, _watch.forget, self).atexit = False
        _watch.add(self)


class _Watch:
    """The thread, which ends with the last vigil."""

    def __init__(self) -> None:
        self._vigils: set[Vigil] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, vigil: Vigil) -> None:
        with self._lock:
            self._vigils.add(vigil)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="streamshard watch", daemon=True)
                self._thread.start()

    def forget(self, vigil: Vigil) -> None:
        # Without the lock: the garbage collector may call this while it is held by the same thread.
        self._vigils.discard(vigil)

    def _run(self) -> None:
        while True:
            time.sleep(_PATIENCE_S / 2)
            with self._lock:
                if not self._vigils:
                    self._thread = None
                    return
                vigils = tuple(self._vigils)
            for vigil in vigils:
                since = vigil.since
                if since is not None and time.monotonic() - since > _PATIENCE_S:
                    patient = vigil.patient_of()
                    if patient is not None:
                        patient.give_up_if_in_vain()
                    del patient


_watch = _Watch()


def _after_fork_in_child() -> None:
    global _watch
    _watch = _Watch()  # threads stay behind


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
