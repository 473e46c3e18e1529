"""Logs of the collectives that each rank issues, and a watchdog: they name the rank that hangs, fails or differs.

All ranks issue the same collectives in the same order. If they do not, each rank waits for a message that never comes.
So each rank logs the collectives that it issues. A `Board` publishes the logs, and the first failure, in the store of
the process group. A rank publishes its log only while it waits or idles, so training sends nothing.

The watchdog is a thread that checks twice a second whether this rank waits:

- If the logs differ, the wait can never succeed, and the watchdog ends it.
- Otherwise a rank may only be slow. The watchdog logs a warning after 30 seconds, and again whenever the wait has
  doubled: what this rank waits for, and what the missing ranks did last. Only the process group's timeout ends such a
  wait.
- On devices no host waits for collectives. There a rank counts as waiting when it has issued nothing for 30 seconds.

A missing rank may stand in another library's collective (``accelerator.gather``, ``dist.barrier()``) and wait for this
one. torch counts the collectives of the default process group, which all ranks call in one order. So if a missing rank
has called more of them than this rank, neither can go on, and on CPUs the watchdog ends the wait.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from streamshard.errors import CommunicationError, StreamShardError, log
from streamshard.torch_private import count_collectives

__all__ = ["Board", "Guard", "RecordKind", "Log", "MismatchError", "Wait", "Watch", "describe_difference", "explain"]

_ENTRIES = 512  # a log keeps its last so many entries
_MOST_PEERS = 64  # a rank reads the logs of at most so many ranks, those with the next higher numbers
_FAILURE_KEY = "streamshard/failure"
_PATIENCE_S = 1.0  # a rank waits so long before it compares logs
_REPORT_AFTER_S = 30.0  # a wait takes so long before the first warning
_SHOW_AFTER_S = 3.0  # a rank that has issued nothing for so long shows its log
_LOGS_WITHIN_S = 5.0  # after a mismatch, how long to wait for the logs of other ranks
_END_WITHIN_S = 5.0  # at exit, how long to wait for each watchdog thread

# RuntimeErrors of this rank alone, such as out of memory. They are no sign that a collective failed.
_OWN: tuple[type[Exception], ...] = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))

_ADVICE = (
    "All of them have to call forward (evaluation and generate() too), backward, norms and everything that collects "
    "weights, and run the same layers in the same order (some may skip layers, but not reorder or repeat them). Where "
    "inputs run out on some ranks first, use Join (docs/guide/uneven_inputs.md)"
)


class RecordKind(enum.IntEnum):
    """What a log entry records."""

    FORWARD = 1
    GATHER = 2
    GATHER_FULL = 3
    REDUCE = 4
    AVERAGE = 5
    BROADCAST = 6
    SUM = 7
    MEETING = 8
    VOTE = 9
    END_OF_STEP = 10
    ALL_TO_ALL = 11


_WORDS = {
    RecordKind.FORWARD: "begins a forward",
    RecordKind.GATHER: "gathers {unit}",
    RecordKind.GATHER_FULL: "collects weights or optimizer state of {unit} (full_state_dict, summon_full_params)",
    RecordKind.REDUCE: "reduces the gradients of {unit}",
    RecordKind.AVERAGE: "averages over replicas",
    RecordKind.BROADCAST: "sends or receives a tensor of rank 0",
    RecordKind.SUM: "sums over all ranks (a norm, a check)",
    RecordKind.MEETING: "exchanges objects (save_checkpoint, load_checkpoint, an export, an agreement)",
    RecordKind.VOTE: "votes (in a forward, in set-up)",
    RecordKind.END_OF_STEP: "has ended its step (Join)",
    RecordKind.ALL_TO_ALL: "exchanges parameters with their owners (a step of WholeParameterOptimizer)",
}


class _Entry(NamedTuple):
    """The `number`-th entry of a rank's log: what was issued, and the tag of its unit."""

    number: int
    kind: int
    tag: int


class _Shown(NamedTuple):
    """A log as other ranks see it.

    Attributes:
        entries: the entries that the log still has, by number.
        total: how many entries were added in all.
        time_s: Unix time of the last entry.
        others: how many collectives the rank has called on the default process group, other libraries' included.
    """

    entries: Mapping[int, _Entry]
    total: int
    time_s: float
    others: int = 0


class Log:
    """The last collectives that this rank has issued.

    Attributes:
        count: how many collectives have been issued in all.
        digest: a hash of all of them, in order.
        time_s: Unix time of the last one.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self.time_s = time.time()
        self._entries: list[_Entry | None] = [None] * _ENTRIES

    def add(self, kind: RecordKind, tag: int = 0) -> None:
        """Record that this rank issues `kind`, for the unit of `tag`."""
        self.digest = hash((self.digest, int(kind), tag))  # of integers: the same in every process
        self._entries[self.count % _ENTRIES] = _Entry(self.count, int(kind), tag)
        self.count += 1
        self.time_s = time.time()

    def show(self) -> _Shown:
        """The log as it is now. Any thread may call this."""
        entries = [entry for entry in list(self._entries) if entry is not None]
        return _Shown({entry.number: entry for entry in entries}, self.count, self.time_s, count_collectives())


def describe_difference(logs: Mapping[int, _Shown], names: Sequence[str]) -> str | None:
    """The first entry in which the logs differ, in words; None if they agree so far.

    Args:
        logs: the known logs, by rank.
        names: names of units, by tag.
    """
    for number in sorted({number for shown in logs.values() for number in shown.entries}):
        found = {rank: shown.entries[number] for rank, shown in sorted(logs.items()) if number in shown.entries}
        if len(set(found.values())) > 1:
            did = ", ".join(f"rank {rank} {_say(entry, names)}" for rank, entry in found.items())
            return f"ranks do not do the same: {did}"
    return None


def _say(entry: _Entry | None, names: Sequence[str]) -> str:
    if entry is None:
        return "has issued nothing so far"
    if entry.kind == RecordKind.GATHER and entry.tag == len(names):
        return "ends a backward"  # it gathers the flags of used parameters
    unit = repr(names[entry.tag]) if entry.tag < len(names) else f"unit {entry.tag}"
    return _WORDS[RecordKind(entry.kind)].format(unit=unit)


class Board:
    """Publishes each rank's log and the first failure, in the store of the group. Any thread may call its methods.

    Args:
        group: all ranks of a model.
        rank: this rank's number in `group`.
        world_size: number of ranks in `group`.

    Attributes:
        log: this rank's log.
        names: names of units, by tag; for messages.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.log = Log()
        self.names: Sequence[str] = ()
        number = _boards.get(group, 0)  # the same on all ranks: they create boards in the same order
        _boards[group] = number + 1
        self._store = group.get_group_store() if world_size > 1 else None
        self._key = f"streamshard/{number}/"
        self._rank = rank
        self._world_size = world_size
        self._peers = [(rank + 1 + step) % world_size for step in range(min(world_size - 1, _MOST_PEERS))]
        self._shown: tuple[int, int] | None = None  # `total` and `others` of the log in the store

    def show(self) -> None:
        """Write this rank's log to the store, if it has changed."""
        shown = self.log.show()
        if self._store is not None and (shown.total, shown.others) != self._shown:
            with contextlib.suppress(RuntimeError):  # the rank that hosts the store may have ended
                self._store.set(self._key + str(self._rank), json.dumps([*shown.entries.values(), *shown[1:]]))
            self._shown = shown.total, shown.others

    def show_if_idle(self) -> None:
        """Show the log when this rank has issued nothing for a while. Remove it when the rank goes on."""
        if self.idle_s >= _SHOW_AFTER_S:
            self.show()
        elif self._store is not None and self._shown is not None and self._shown[0] != self.log.count:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._key + str(self._rank))
            self._shown = None

    @property
    def idle_s(self) -> float:
        """Seconds since this rank last issued something."""
        return max(0.0, time.time() - self.log.time_s)

    def _read(self) -> dict[int, _Shown]:
        self.show()
        logs = {self._rank: self.log.show()}
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                for peer in self._peers:
                    if self._store.check([key := self._key + str(peer)]):
                        *entries, total, time_s, others = json.loads(self._store.get(key))
                        logs[peer] = _Shown({entry[0]: _Entry(*entry) for entry in entries}, total, time_s, others)
        return logs

    def find_difference(self, *, within_s: float = 0.0) -> str | None:
        """The first difference between the logs that are in the store within `within_s`, in words; None if none."""
        deadline = time.monotonic() + within_s
        while (found := describe_difference(self._read(), self.names)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def find_other_collective(self) -> str | None:
        """A message that names a missing rank which waits in another library's collective; None: there is none."""
        logs = self._read()
        own = logs[self._rank]
        for peer, shown in sorted(logs.items()):
            if shown.total < own.total and shown.others > own.others:
                return (
                    f"rank {peer} has not come: it waits in another library's collective on the default process group "
                    "(dist.barrier(), accelerator.gather()), which this rank has not called"
                )
        return None

    def describe_missing(self, *, among_shown: bool = False) -> str | None:
        """The ranks that have issued less than this one, and what each did last; None if there are none.

        Args:
            among_shown: leave out ranks without a log in the store: they may be computing.
        """
        logs = self._read()
        ranks_of: dict[str, list[int]] = {}
        for peer in sorted(self._peers):
            shown = logs.get(peer)
            if shown is not None and shown.total < self.log.count:
                idle_s = max(0.0, time.time() - shown.time_s)
                last = _say(shown.entries.get(shown.total - 1), self.names)
                ranks_of.setdefault(f"has issued nothing for {idle_s:.0f} s (last: it {last})", []).append(peer)
            elif shown is None and not among_shown:
                ranks_of.setdefault("shows no log", []).append(peer)
        missing = [f"rank {', '.join(map(str, ranks))} has not come: it {did}" for did, ranks in ranks_of.items()]
        return "; ".join([*missing, "it may be in another library's collective, asleep, or gone"]) if missing else None

    def describe_last(self) -> str:
        """What this rank issued last, in words."""
        shown = self.log.show()
        return _say(shown.entries.get(shown.total - 1), self.names)

    def describe_rank(self) -> str:
        """This rank in words: ``rank 0 of 8``."""
        return f"rank {self._rank} of {self._world_size}"

    def post_failure(self, text: str) -> None:
        """Publish how this rank has failed, to all ranks and models of the group. Only the first failure is kept."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FAILURE_KEY, "", f"{self._rank}:{text}")

    def read_failure(self) -> str | None:
        """Which other rank has failed, and how; None if the store says of none."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([_FAILURE_KEY]):
                    rank, _, text = self._store.get(_FAILURE_KEY).decode().partition(":")
                    return f"rank {rank} has failed: {text}" if int(rank) != self._rank else None
        return None


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


# -- the watchdog -------------------------------------------------------------------------------------------------


class Wait:
    """One wait for other ranks.

    Args:
        what: the collective or exchange, for messages.

    Attributes:
        what: see above.
        since: `time.monotonic` at the start of the wait.
        report_at_s: the watchdog logs its next warning when the wait has taken so long.
    """

    __slots__ = ("report_at_s", "since", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.since = time.monotonic()
        self.report_at_s = _REPORT_AFTER_S


class Watch:
    """The current wait of one rank of one model. Owns the watchdog thread, which ends with this object.

    Args:
        board: this rank's board.
        has_streams: ranks are on devices, so no host waits for collectives.
        abort: a method that ends the waits of this rank's host. The thread does not keep the method's object alive.

    Attributes:
        wait: what this rank's host waits for; None: it does not wait.
        difference: why the wait can never succeed; None: the watchdog has found no reason.
    """

    def __init__(self, board: Board, *, has_streams: bool = False, abort: Callable[[], None] | None = None) -> None:
        self.wait: Wait | None = None
        self.difference: str | None = None
        self._board = board
        self._has_streams = has_streams
        self._abort = None if abort is None else weakref.WeakMethod(abort)
        self._on_device: Wait | None = None
        thread = threading.Thread(target=_run, args=(weakref.ref(self),), name="streamshard watchdog", daemon=True)
        _threads.add(thread)
        thread.start()

    def look(self) -> None:
        """Compare logs if the wait has taken long enough; end the wait or log a warning. The thread calls this."""
        self._board.show_if_idle()
        wait = self.wait or self._wait_on_device()
        if wait is None:
            return
        waited_s = time.monotonic() - wait.since
        reports = waited_s >= wait.report_at_s
        if waited_s < _PATIENCE_S or (self._has_streams and not reports):
            return
        if reports:
            wait.report_at_s = 2 * waited_s
        difference = self._board.find_difference()
        if difference is None and not self._has_streams:
            difference = self._board.find_other_collective()
        if difference is None:
            if reports:
                self._report(wait, waited_s)
            return
        self.difference = difference
        self._board.post_failure(f"{wait.what}: {difference}. {_ADVICE}")
        if reports:  # nothing can end a wait on a device, so at least log the reason
            log.error("%s: %s. %s", wait.what, difference, _ADVICE)
        if self._abort is not None and (abort := self._abort()) is not None:
            abort()

    def _wait_on_device(self) -> Wait | None:
        idle_s = self._board.idle_s
        if not self._has_streams or idle_s < _REPORT_AFTER_S:
            self._on_device = None
        elif self._on_device is None:
            self._on_device = Wait("what it has issued on its device")
            self._on_device.since -= idle_s
        return self._on_device

    def _report(self, wait: Wait, waited_s: float) -> None:
        missing = self._board.describe_missing(among_shown=wait is self._on_device)
        if missing is None and wait is self._on_device:
            return  # no rank is behind: this rank computes, or runs code of the user's
        log.warning(
            "%s has waited for %.0f s in %s (last: it %s): %s. All ranks have to call norms, forward, generate() and "
            "everything that collects weights",
            self._board.describe_rank(),
            waited_s,
            wait.what,
            self._board.describe_last(),
            missing or "all ranks have come, so a rank or the network is slow",
        )


def _run(watch_of: weakref.ref[Watch]) -> None:
    while not _is_over.wait(_PATIENCE_S / 2):
        watch = watch_of()
        if watch is None:
            return
        watch.look()
        del watch


def _end_threads() -> None:
    """End the threads at exit: Python aborts if it ends a daemon thread inside a C++ call, such as one of the store."""
    if alive := [thread for thread in list(_threads) if thread.is_alive()]:  # a forked child has none
        _is_over.set()
        for thread in alive:
            thread.join(_END_WITHIN_S)


_is_over = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
atexit.register(_end_threads)


class Guard:
    """A context around a wait for other ranks. Turns a backend's error into a `CommunicationError` that names the wait.

    Args:
        ranks: `Communicator`, or another object with ``board``, ``watch``, ``failure`` and ``fail()``. After an error
            `ranks` is marked as failed and issues nothing more: other ranks may be gone.
        action: what happens inside, such as "the gather of".
        subject: what `action` is about, such as a unit's name; "" if nothing.

    Raises:
        CommunicationError: on entry, if `ranks` has failed before.
    """

    __slots__ = ("_outer", "_ranks", "_what")

    def __init__(self, ranks: Any, action: str, subject: str = "") -> None:
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
        message = f"{self._what} failed on {ranks.board.describe_rank()}: {explain(error, ranks.board)}"
        ranks.fail(message)
        raise CommunicationError(message) from error


def explain(error: Exception, board: Board) -> str:
    """Why a collective ended with `error`, from the logs and the failure in the store."""
    is_mismatch = isinstance(error, MismatchError)
    if (difference := board.find_difference(within_s=_LOGS_WITHIN_S if is_mismatch else 0.0)) is not None:
        return f"{difference}. {_ADVICE}"
    if (failure := board.read_failure()) is not None:
        return failure
    missing = board.describe_missing()
    details = f"{error}. {missing}" if missing else str(error)
    return f"{details}. Either another rank has died, or ranks do not do the same. {_ADVICE}"


class MismatchError(RuntimeError):
    """Ranks issued different collectives before they came to the same count."""
