"""What happens around every exchange: waiting is watched, an error says what failed and reaches the other ranks."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from streamshard.comm.watch import Vigil
from streamshard.errors import CommunicationError, StreamShardError

__all__ = ["Guard"]


# This rank's own errors, which say nothing of others, although they are RuntimeErrors as those of backends are.
_OWN: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


class Guarded(Protocol):
    """What a guard needs of `Ranks`; see there."""

    rank: int
    world_size: int
    failure: str | None
    vigil: Vigil

    def find_difference(self) -> str | None:
        """See `Transport.find_difference`."""

    def fail(self, failure: str) -> None:
        """See `Ranks.fail`."""


class Guard:
    """Turns a backend's error into a `CommunicationError` that says what was waited for.

    Args:
        ranks: marked as failed, so that nothing more is issued to those that may be gone.
        action: what goes on inside, such as "the gather of".
        subject: whose it is, such as a unit's name; "" if nobody's.

    Raises:
        CommunicationError: when entered, if something has failed before.
    """

    __slots__ = ("_action", "_outer", "_subject", "_ranks")

    def __init__(self, ranks: Guarded, action: str, subject: str) -> None:
        self._ranks = ranks
        self._action = action
        self._subject = subject

    def __enter__(self) -> None:
        ranks = self._ranks
        if ranks.failure is not None:
            raise CommunicationError(f"{self._what()} is not possible any more: {ranks.failure}")
        self._outer, ranks.vigil.since = ranks.vigil.since, time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ranks = self._ranks
        ranks.vigil.since = self._outer
        if error is None or (ranks.failure is not None and isinstance(error, StreamShardError)):
            return
        if not isinstance(error, RuntimeError) or isinstance(error, (StreamShardError, *_OWN)):
            ranks.fail(f"{self._what()} ended with {type(error).__name__}: {error}")
            return
        difference = ranks.find_difference()
        message = f"{self._what()} failed on rank {ranks.rank} of {ranks.world_size}: {difference or error}"
        if "has died" not in message:
            which = "All" if difference else "Either another rank has died, or ranks do not do the same: all"
            message += (
                f". {which} of them have to call forward (evaluation and generate() too), backward and everything that "
                "collects weights, and run the same layers in the same order (some may skip layers, but not reorder "
                "or repeat them). Where inputs run out on some ranks first, use Join (docs/guide/uneven_inputs.md)"
            )
        ranks.fail(message)
        raise CommunicationError(message) from error

    def _what(self) -> str:
        return f"{self._action} {self._subject!r}" if self._subject else self._action
