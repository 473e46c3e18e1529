"""What happens around every exchange: waiting is watched, an error says what failed and reaches the other ranks."""

from __future__ import annotations

import time
from typing import Protocol

from streamshard.comm.watch import Vigil
from streamshard.errors import CommunicationError, StreamShardError

__all__ = ["Guard"]


class Guarded(Protocol):
    """What a guard needs of a transport; see there."""

    rank: int
    world_size: int
    failure: str | None
    vigil: Vigil

    def find_difference(self) -> str | None:
        """See `Transport.find_difference`."""

    def fail(self, failure: str) -> None:
        """See `Transport.fail`."""


class Guard:
    """Turns a backend's error into a `CommunicationError` that says what was waited for.

    Args:
        transport: marked as failed, so that nothing more is issued to ranks that may be gone.
        action: what goes on inside, such as "the gather of".
        subject: whose it is, such as a unit's name; "" if nobody's.

    Raises:
        CommunicationError: when entered, if something has failed before.
    """

    __slots__ = ("_action", "_outer", "_subject", "_transport")

    def __init__(self, transport: Guarded, action: str, subject: str) -> None:
        self._transport = transport
        self._action = action
        self._subject = subject

    def __enter__(self) -> None:
        transport = self._transport
        if transport.failure is not None:
            raise CommunicationError(f"{self._what()} is not possible any more: {transport.failure}")
        self._outer, transport.vigil.since = transport.vigil.since, time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        transport = self._transport
        transport.vigil.since = self._outer
        if error is None or (transport.failure is not None and isinstance(error, StreamShardError)):
            return
        if not isinstance(error, RuntimeError) or isinstance(error, StreamShardError):
            transport.fail(f"{self._what()} ended with {type(error).__name__}: {error}")
            return
        difference = transport.find_difference()
        message = f"{self._what()} failed on rank {transport.rank} of {transport.world_size}: {difference or error}"
        if "has died" not in message:
            which = "All" if difference else "Either another rank has died, or ranks do not do the same: all"
            message += (
                f". {which} of them have to call forward (evaluation and generate() too), backward and everything that "
                "collects weights, and run the same layers in the same order (some may skip layers, but not reorder "
                "or repeat them)"
            )
        transport.fail(message)
        raise CommunicationError(message) from error

    def _what(self) -> str:
        return f"{self._action} {self._subject!r}" if self._subject else self._action
