"""Logs of the collectives that each rank issues, and a watchdog: they name the rank that hangs, fails or differs.

All ranks issue the same collectives in the same order. If they do not, each rank waits for a message that never comes.
So each rank logs the collectives that it issues. A `FlightRecorder` publishes the logs, and the first failure, in the
store of the process group. A rank publishes its log only while it waits or idles, so training sends nothing.

The watchdog is a thread that checks twice a second whether this rank waits:

- If the logs differ, the wait can never succeed, and the watchdog ends it.
- Otherwise a rank may only be slow. The watchdog logs a warning after 30 seconds, and again whenever the wait has
  doubled: what this rank waits for, and what the missing ranks did last. Only the process group's timeout ends such a
  wait.
- On devices no host waits for collectives. There a rank counts as waiting when it has issued nothing for 30 seconds.

A missing rank may stand in another library's collective (``accelerator.gather``, ``dist.barrier()``) and wait for this
one. torch counts the collectives of the default process group, which all ranks call in one order. So if a missing rank
has called more of them than this rank, neither can go on, and on CPUs the watchdog ends the wait. The missing rank's
watchdog reads and logs this failure: the other library's error would not tell it.
"""

from __future__ import annotations

import atexit
import enum
import json
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not re-exported in stubs

from streamshard.comm.groups import MOST_CONNECTED, base_store, connection_advice, start_name
from streamshard.errors import StreamShardError, describe, line_reached, log, uncaught
from streamshard.torch_private import count_collectives

_ENTRIES = 512  # a log keeps its last so many entries
_MOST_PEERS = 64  # a rank reads the logs of at most so many ranks, those with the next higher numbers
_FAILURE_KEY = "failure"
_PATIENCE_S = 1.0  # a rank waits so long before it compares logs
_REPORT_AFTER_S = 30.0  # a wait takes so long before the first warning
_SHOW_AFTER_S = 3.0  # a rank that has issued nothing for so long shows its log
_LOGS_WITHIN_S = 1.5  # after an error, how long to wait for the logs of other ranks
_END_WITHIN_S = 5.0  # at exit, how long to wait for each watchdog thread

_ADVICE = (
    "All ranks have to call forward (evaluation and generate() too), backward, norms and everything that collects or "
    "saves weights (save_model and the like, so call these outside of `if accelerator.is_main_process`), and run the "
    "same layers in the same order. Some ranks may skip layers. If some alone repeat or reorder a module's layers, as "
    "those of an image tower, keep the module in place: StreamShard(model, resident=['visual']). Where inputs run out "
    "on some ranks first, use torch.distributed.algorithms.Join([model])"
)


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


_T = TypeVar("_T")
_Entry = tuple[int, int, int]  # its number in the log, the kind, the tag of the unit


class _Shown(NamedTuple):
    """A log as other ranks see it.

    Attributes:
        entries: the entries that the log still has, by number.
        total: how many entries were added in all.
        time_s: Unix time of the last entry.
        others: how many collectives the rank has called on the default process group, other libraries' included.
        place: the line of its script that the rank has reached, see `line_reached`.
    """

    entries: Mapping[int, _Entry]
    total: int
    time_s: float
    others: int
    place: str = ""

    def last(self, names: Sequence[str]) -> str:
        """What the rank has issued last, in words."""
        entry = self.entries.get(self.total - 1)
        return "has issued nothing so far" if entry is None else _say(entry, names)


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
        entry = (self.count, int(kind), tag)
        self.digest = hash((self.digest, entry))
        self._entries[self.count % _ENTRIES] = entry
        self.count += 1
        self.time_s = time.time()

    def show(self) -> _Shown:
        """The log as it is now. Any thread may call this."""
        entries = {entry[0]: entry for entry in list(self._entries) if entry is not None}
        return _Shown(entries, self.count, self.time_s, count_collectives())


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
            return f"ranks do not do the same: {did}. {_ADVICE}"
    return None


def _say(entry: _Entry, names: Sequence[str]) -> str:
    _, kind, tag = entry
    if kind == RecordKind.GATHER and tag == len(names):
        return "ends a backward"  # it gathers the flags of used parameters
    return tuple(RecordKind)[kind].words.format(unit=repr(names[tag]) if tag < len(names) else f"unit {tag}")


class FlightRecorder:
    """This rank's log and current wait, the logs of the other ranks, and the first failure.

    Owns the watchdog thread, which ends with this object. Any thread may call the methods.

    Args:
        group: all ranks of a model; None: there is one rank.
        has_streams: ranks are on devices, so no host waits for collectives.
        abort: a method that ends the waits of this rank's host, with ``users_too=True`` also other libraries' waits;
            None: no watchdog. The thread does not keep the method's object alive.

    Attributes:
        log: this rank's log.
        names: names of units, by tag; for messages.
        wait: what this rank's host waits for (``str()`` gives the words), and Unix time of its start; None: nothing.
        difference: why the wait can never succeed; None: the watchdog has found no reason.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, has_streams: bool = False, abort: Callable[..., None] | None = None
    ) -> None:
        self.log = Log()
        self.names: Sequence[str] = ()
        self.wait: tuple[object, float] | None = None
        self.difference: str | None = None
        self._rank, self._world_size = (0, 1) if group is None else (group.rank(), group.size())
        others = range(1, min(self._world_size, _MOST_PEERS + 1))
        self._peers = [(self._rank + step) % self._world_size for step in others]
        self._store: Any = None
        self._shown: tuple[int, int] | None = None  # `total` and `others` of the log in the store
        self._has_lost_store = False  # the rank or launcher that hosts it has ended
        self._has_streams = has_streams
        self._is_told = False  # of another rank's failure, in the last look
        self._since = 0.0  # the start of the wait that the watchdog has seen last
        self._report_at_s = _REPORT_AFTER_S
        if group is None or self._world_size == 1:
            return
        number = _recorders.get(group, 0)  # the same on all ranks: they create recorders in the same order
        _recorders[group] = number + 1
        self._key = f"{number}/"
        self._base, self._store = _connect(group)  # the first is kept because `_connections` lasts as long as it
        if abort is not None:
            self._abort = weakref.WeakMethod(abort)
            thread = threading.Thread(target=_run, args=(weakref.ref(self),), name="streamshard watchdog", daemon=True)
            _threads.add(thread)
            _alive.add(self)
            thread.start()

    def __str__(self) -> str:
        return f"rank {self._rank} of {self._world_size}"

    # -- what ranks show each other ---------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """`question()`, which uses the store; `otherwise` if the rank or launcher that hosts the store has ended."""
        if not self._has_lost_store:
            try:
                return question()
            except RuntimeError:
                self._has_lost_store = True
        return otherwise

    def _show(self) -> None:
        """Write this rank's log to the store, if it has changed."""
        shown = self.log.show()
        if (shown.total, shown.others) != self._shown:
            shown = shown._replace(place=line_reached())
            self._store.set(self._key + str(self._rank), json.dumps([*shown.entries.values(), *shown[1:]]))
            self._shown = shown.total, shown.others

    def _show_if_idle(self) -> None:
        """Show the log when this rank has issued nothing for a while. Remove it when the rank goes on."""
        if time.time() - self.log.time_s >= _SHOW_AFTER_S:
            self._show()
        elif self._shown is not None and self._shown[0] != self.log.count:
            self._store.set(self._key + str(self._rank), "")  # without the key, a read under way would wait for it
            self._shown = None

    def _read(self) -> dict[int, _Shown]:
        """The logs in the store, by rank, and this rank's own."""
        logs = {self._rank: self.log.show()}

        def read_peers() -> None:
            self._show()
            for peer in self._peers:
                if self._store.check([key := self._key + str(peer)]) and (text := self._store.get(key)):
                    *entries, total, time_s, others, place = json.loads(text)
                    logs[peer] = _Shown({entry[0]: tuple(entry) for entry in entries}, total, time_s, others, place)

        self._ask(read_peers, None)
        return logs

    def _find_difference(self, logs: Mapping[int, _Shown]) -> str | None:
        """Why the wait can never succeed: logs differ, or a missing rank waits in another library's collective."""
        if found := describe_difference(logs, self.names):
            return found
        own = logs[self._rank]
        for peer, shown in sorted(logs.items()):
            if not self._has_streams and shown.total < own.total and shown.others > own.others:
                return (
                    f"rank {peer} has not come: it is in another library's collective on the default process group, "
                    f"which rank {self._rank} has not called: {shown.place}. {_ADVICE}"
                )
        return None

    def _describe_missing(self, logs: Mapping[int, _Shown], *, among_shown: bool = False) -> str | None:
        """The ranks that have issued less than this one, and what each did last; None if there are none.

        Args:
            logs: the known logs, by rank.
            among_shown: leave out ranks without a log in the store: they may be computing.
        """
        ranks_of: dict[str, list[int]] = {}
        for peer in sorted(self._peers):
            shown = logs.get(peer)
            if shown is not None and shown.total < logs[self._rank].total:
                idle_s = max(0.0, time.time() - shown.time_s)
                last = shown.last(self.names)
                did = f"has issued nothing for {idle_s:.0f} s (last: it {last}), and is at {shown.place}"
                ranks_of.setdefault(did, []).append(peer)
            elif shown is None and not among_shown:
                ranks_of.setdefault("has published no log of its collectives", []).append(peer)
        missing = [f"rank {', '.join(map(str, ranks))} has not come: it {did}" for did, ranks in ranks_of.items()]
        return "; ".join([*missing, "it may be in another library's collective, asleep, or gone"]) if missing else None

    def post_failure(self, text: str) -> None:
        """Publish how this rank has failed, to all ranks and models of the group. Only the first failure is kept."""
        if self._store is not None:
            self._ask(lambda: self._store.compare_set(_FAILURE_KEY, "", f"{self._rank}:{text}"), None)

    def _read_failure(self) -> str | None:
        """Which other rank has failed, and how; None if the store says of none."""
        if not self._ask(lambda: self._store.check([_FAILURE_KEY]), False):
            return None
        rank, _, text = self._ask(lambda: self._store.get(_FAILURE_KEY), b"-1").decode().partition(":")
        return f"rank {rank} has failed: {text}" if int(rank) not in (-1, self._rank) else None

    def explain(self, error: Exception) -> str:
        """Why a collective ended with `error`, from the logs and the failure in the store.

        Waits a little for the other ranks' logs, if the watchdog has not read them.
        """
        if self.difference is not None:
            return self.difference
        missing, deadline = None, time.monotonic() + _LOGS_WITHIN_S
        while self._store is not None:
            logs = self._read()
            missing = self._describe_missing(logs)
            if found := describe_difference(logs, self.names) or self._read_failure():
                return found
            if missing is None or self._has_lost_store or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # gloo's is: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [..]. This is typically caused by ..
        text = re.sub(r"^\[\S*gloo\S*\] ", "", str(error)).partition(". This is typically caused")[0]
        details = f"{text}. {missing}" if missing else text
        if "connecting" in details or "connectFullMesh" in details:
            return f"{details}. Another rank may have died{connection_advice()}"
        return f"{details}. Either another rank has died, or ranks do not do the same. {_ADVICE}"

    # -- the watchdog -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Compare logs if the wait has taken long enough; end the wait or log a warning. The thread calls this."""
        self._ask(self._show_if_idle, None)
        wait = self.wait
        if wait is None:
            self._look_for_failure()
            if not self._has_streams:
                return
        what, since = wait or ("what it has issued on its device", self.log.time_s)
        if since != self._since:
            self._since, self._report_at_s = since, _REPORT_AFTER_S
        waited_s = time.time() - since
        reports = waited_s >= self._report_at_s
        if waited_s < _PATIENCE_S or (self._has_streams and not reports):
            return
        if reports:
            self._report_at_s = 2 * waited_s
        logs = self._read()
        self.difference = self._find_difference(logs) or self._read_failure()
        if self._has_lost_store and reports and wait is not None:
            self.difference = "rank 0, or the launcher, which hosts the store of the process group, has ended"
        if self.difference is not None:
            self.post_failure(f"{what}: {self.difference}")
            if reports:  # nothing can end a wait on a device, so at least log the reason
                log.error("%s: %s", what, self.difference)
            if (abort := self._abort()) is not None:
                abort()
        elif reports:
            missing = self._describe_missing(logs, among_shown=wait is None)
            if missing is not None or wait is not None:  # else this rank computes, or runs code of the user's
                missing = missing or f"all ranks have come, so a rank or the network is slow{connection_advice()}"
                last = logs[self._rank].last(self.names)
                log.warning("waited for %.0f s in %s (last: it %s): %s", waited_s, what, last, missing)

    def _look_for_failure(self) -> None:
        """While this rank is idle: log the failure of another rank, and a look later end other libraries' waits.

        Their errors would not tell the failure. A look later, so that the rank that has failed raises first: when the
        first rank ends, launchers end the others.
        """
        if self._is_told:
            self._is_told = False
            if (abort := self._abort()) is not None:
                abort(users_too=True)
        elif self.difference is None and time.time() - self.log.time_s >= _SHOW_AFTER_S:
            self.difference = self._read_failure()
            if self.difference is not None:
                self._is_told = True
                log.error("%s", self.difference)


_recorders: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _connect(group: dist.ProcessGroup) -> tuple[Any, Any]:
    """The store under the group's, and keys of the group in it that go through a second connection.

    Making a group blocks the first connection. A process has one second connection to a store while the store's object
    lives: a connection takes seconds if the network's name server does not answer. Ranks of a large group have none.
    """
    store: Any = group.get_group_store()
    base = base_store(group)
    try:
        if group.size() > MOST_CONNECTED:  # the host of the store would hold two sockets of each rank
            connection = base
        elif (connection := _connections.get(base)) is None:
            connection = _connections[base] = base.clone()
        # The same on all ranks, and another one after a restart: the store may have an earlier failure.
        name = store.compare_set(f"streamshard/{start_name()}", "", uuid.uuid4().hex).decode()
    except RuntimeError:  # not every store can do this
        return base, store
    return base, PrefixStore(f"streamshard/{name}", connection)


def _run(recorder_of: weakref.ref[FlightRecorder]) -> None:
    while not _is_over.wait(_PATIENCE_S / 2):
        recorder = recorder_of()
        if recorder is None:
            return
        recorder.look()
        del recorder


def _end() -> None:
    """Tell the other ranks which error ends this process, or log the failure before, and end the threads.

    Python aborts if it ends a daemon thread inside a C++ call, such as one of the store. A forked child has no threads:
    it must not use its parent's connection to the store, and its error is not the rank's.
    """
    if alive := [thread for thread in list(_threads) if thread.is_alive()]:
        if (error := uncaught()) is not None:
            for recorder in list(_alive):
                recorder.post_failure(f"its process ends with {describe(error)}")
            if not isinstance(error, StreamShardError):
                failures = {recorder._read_failure() for recorder in _alive if recorder.difference is None}
                for failure in failures - {None}:
                    log.error("%s", failure)
        _is_over.set()
        for thread in alive:
            thread.join(_END_WITHIN_S)


_is_over = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_alive: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()
atexit.register(_end)
