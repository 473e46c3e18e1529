"""The save in the background, at most one per process: its thread, its handle, and the end of its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module

from streamshard.checkpoint.storage import Location
from streamshard.errors import log


class Saving:
    """The handle that `save_checkpoint` returns. With ``wait=False`` the save runs in the background.

    The checkpoint holds the state at the call. On devices the host does not wait for the copies: later work on the
    current stream comes behind them. Another stream that changes weights or moments must wait for this stream first.

    When Python exits, also after an error or Ctrl-C, it waits for the save. If the save fails, the log says so; only
    ``wait()``, or the next save or load, raises the error: call ``wait()`` at the end. SIGTERM ends the process at
    once: the checkpoint is not finished, earlier checkpoints stay whole, and the next save removes the leftovers.
    `StopOnSignal` lets all ranks finish the save.

    Attributes:
        path: the checkpoint's path or URL. If another run saves the same number, and on object storage, the path
            changes until the save is done.
    """

    def __init__(self, path: Location, write: Callable[[], Location] | None = None) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:  # not a daemon: Python waits for it at exit
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path}")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, with success or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Location:
        """Wait until the checkpoint is complete, and return its path.

        Raises:
            CheckpointError: the checkpoint could not be written; names the rank and the cause. If a rank has died or
                was interrupted, the others raise when they notice, after at most 30 minutes.
        """
        global _running
        if self._thread is not None:
            self._thread.join()
        if _running is self:
            _running = None
        if self._error is not None:
            raise self._error
        return self.path

    def _run(self, write: Callable[[], Location]) -> None:
        try:
            self.path = write()
        except BaseException as error:
            self._error = error
            log.error("%s", error)  # nobody may call `wait`


_running: Saving | None = None


def start_saving(path: Location, write: Callable[[], Location]) -> Saving:
    """Let a thread call `write`, which writes the checkpoint `path`. The save before has ended."""
    global _running
    _running = Saving(path, write)
    return _running


def finish_running() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        Exception: the save's error, unless ``wait()`` has raised it on this rank before.
    """
    if _running is not None:
        _running.wait()


def _wait_at_exit() -> None:
    """Wait for the save before Python ends the executors: many stores of fsspec use one for each connection."""
    if _running is not None and _running._thread is not None:
        _running._thread.join()


# Handlers run in reverse order. There is no public function for this moment; Python's executors use the same.
import_module("concurrent.futures.thread")
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
