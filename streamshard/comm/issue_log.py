"""The part of the control side that a training step touches: a log of what a rank issues, and guards of its waits."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from streamshard.errors import CommunicationError

_ENTRIES = 512  # a log keeps its last so many entries

Entry = tuple[int, int, int]
"""An entry's number in the log, the kind, the tag of the unit."""


class RecordKind(enum.IntEnum):
    """What a log entry records. `words` say it in an error."""

    words: str

    def __new__(cls, words: str) -> RecordKind:
        """A kind with the next number: logs hash numbers, which are the same in every process."""
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_, kind.words = int(kind), words
        return kind

    FORWARD = "begins a forward"
    GATHER = "gathers {unit}"
    GATHER_FULL = "collects weights or optimizer state of {unit} (full_state_dict, summon_full_params)"
    REDUCE = "reduces the gradients of {unit}"
    AVERAGE = "averages over replicas"
    BROADCAST = "sends or receives a tensor of rank 0"
    SUM = "sums over all ranks (a norm, a check)"
    MEETING = "exchanges objects (set-up, an agreement in a forward, save_checkpoint, load_checkpoint, an export)"
    ALL_TO_ALL = "exchanges parameters with their owners (a step of WholeParameterOptimizer)"


class IssueLog:
    """The last collectives that this rank has issued, and what its host waits for. Other threads read it.

    Attributes:
        count: how many collectives have been issued in all.
        digest: a hash of all of them, in order.
        time_s: Unix time of the last one.
        waits: the guards that the host is in, the innermost one last.
        waiting_since_s: Unix time at which the host entered the last guard.
        failure: how a collective has failed; None: none has. After a failure no guard lets the host in.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.time_s = self.waiting_since_s = time.time()
        self.waits: list[Guard] = []
        self.failure: str | None = None
        self._entries: list[Entry | None] = [None] * _ENTRIES

    def add(self, kind: RecordKind, tag: int = 0) -> None:
        """Record that this rank issues `kind`, for the unit of `tag`."""
        entry = (self.count, int(kind), tag)
        self.digest = hash((self.digest, entry))
        self._entries[self.count % _ENTRIES] = entry
        self.count += 1
        self.time_s = time.time()

    def entries(self) -> dict[int, Entry]:
        """The entries that the log still has, by number."""
        return {entry[0]: entry for entry in list(self._entries) if entry is not None}


class Guard:
    """A context around a wait for other ranks, which may be entered again and again.

    Args:
        log: of the ranks.
        end: called with the guard and an error that leaves it. See `streamshard.comm.ranks.Ranks.end_guard`.
        action: what happens inside, such as "the gather of".
        subject: what `action` is about, such as a unit's name; "" if nothing.

    Raises:
        CommunicationError: on entry, if a collective of the ranks has failed before.
    """

    __slots__ = ("_action", "_end", "_log", "_subject")

    def __init__(
        self, log: IssueLog, end: Callable[[Guard, BaseException], None], action: str, subject: str = ""
    ) -> None:
        self._log = log
        self._end = end
        self._action = action
        self._subject = subject

    def __str__(self) -> str:
        """The wait, in words. Made when somebody asks: each layer has several waits."""
        return f"{self._action} {self._subject!r}" if self._subject else self._action

    def __enter__(self) -> None:
        log = self._log
        if log.failure is not None:
            raise CommunicationError(f"{self} is not possible any more: {log.failure}")
        log.waits.append(self)
        log.waiting_since_s = time.time()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._log.waits.pop()
        if error is not None:
            self._end(self, error)
