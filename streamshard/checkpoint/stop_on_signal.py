"""`StopOnSignal`: end a run at a signal, on all ranks after the same step. Owns the process's handlers of the signals.

A handler only notes the signal, so nothing is interrupted: neither a step nor a save. At the end of each step the ranks
exchange what they have noted. A second signal is noted as well, and changes nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from streamshard.checkpoint.saving import finish_running
from streamshard.comm.ranks import run_on_all_ranks
from streamshard.core.module_state import engine_of
from streamshard.errors import ConfigError, log


class StopOnSignal:
    """Ends a run at SIGTERM or SIGUSR1, on all ranks after the same step. Use it as a context around the steps::

        with StopOnSignal(model) as stop:
            while step < last:
                ...  # one step
                if stop.requested():
                    save_checkpoint("runs/llama", model, optimizer, {"step": step}, step=step)
                    stop.exit()

    It is enough if one rank gets a signal. Further signals change nothing. A rank in a collective notes a signal when
    the collective ends. SIGKILL cannot be noted: the other ranks raise an error, and earlier checkpoints stay.

    Data loaders' workers and other processes that are forked inside leave this process's group. So a launcher that
    signals the group, as torchrun does, does not end them before the save. They handle SIGTERM as before, and ignore
    the other signals.

    Args:
        model: made by `StreamShard`; its ranks stop together.
        signals: their numbers. Their handlers are replaced until the context ends, or until `close`. An object that is
            made later takes the place of an earlier one.

    Raises:
        ConfigError: an argument has a wrong value, or this is not the main thread, which alone can handle signals.
        ShardingError: `model` is not sharded.
    """

    def __init__(self, model: nn.Module, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._ranks = engine_of(model).ranks
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StopOnSignal handles signals, which Python allows in the main thread only: make it there"
            )
        self._noted = 0  # the largest number of a signal that has come to this rank
        self._agreed = 0  # the same, of all ranks
        self._before: dict[int, Any] = {}
        global _open
        if _open is not None:
            _open.close()  # so that `_before` gets the user's own handlers
        _open = self
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.close()
            raise ConfigError(
                f"signals={signals!r}: wanted numbers of signals that can be handled ({error})"
            ) from error

    def requested(self) -> bool:
        """Whether a signal has come to any rank. The same on all ranks. Call it on every rank after the same steps.

        Ranks wait for each other, without using a device, until one call has returned True.

        Raises:
            CommunicationError: a rank is missing.
        """
        if not self._agreed:
            noted = self._ranks.gather_objects("ask for signals", self._noted)
            self._agreed = max(noted)  # one number, so that all ranks exit with one status
            if self._agreed and self._ranks.is_first:
                came_to = [rank for rank, each in enumerate(noted) if each]
                log.warning("%s came to ranks %s: all ranks stop", signal.Signals(self._agreed).name, came_to)
        return self._agreed > 0

    def exit(self) -> NoReturn:
        """Wait for a save in the background, then end this process. Call it on every rank.

        Raises:
            SystemExit: with 128 + the number of the signal, as shells have it: 143 for SIGTERM, 138 for SIGUSR1.
            CheckpointError: on every rank: the save in the background has failed.
            ConfigError: `requested` has not returned True.
        """
        if not self._agreed:
            raise ConfigError("exit() was called, and no signal has come: call it after requested() has returned True")
        run_on_all_ranks(self._ranks, "finish the save in the background", finish_running)
        raise SystemExit(128 + self._agreed)

    def close(self) -> None:
        """Give the signals their earlier handlers. A second call changes nothing."""
        global _open
        if _open is self:
            _open = None
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not of Python's

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. A signal that came after the last step goes to the earlier handler, which usually ends the process."""
        if kind is SystemExit and self._agreed:
            return  # further signals are noted until the process has ended
        self.close()
        if kind is None and self._noted and not self._agreed:
            finish_running()  # the handler usually ends the process
            signal.raise_signal(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = max(self._noted, number)


_open: StopOnSignal | None = None


def _after_fork_in_child() -> None:
    global _open
    if _open is not None:
        os.setpgid(0, 0)  # torchrun signals the group, and torch raises where a worker was killed
        for number, handler in _open._before.items():
            if number != signal.SIGTERM:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _open = None


os.register_at_fork(after_in_child=_after_fork_in_child)
