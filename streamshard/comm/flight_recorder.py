"""Compares ranks' logs of issued collectives, to name the rank that hangs, fails or differs.

All ranks issue the same collectives in the same order. If they do not, each rank waits for a message that never comes.
So each rank logs the collectives that it issues (`IssueLog`). A `FlightRecorder` shows the log, and the first failure,
to the other ranks, in the store of the process group. A rank shows its log only while it waits or idles, so training
sends nothing.

The watchdog, a thread (`streamshard.comm.watchdog`), looks twice a second whether this rank waits:

- If the logs differ, the wait can never succeed, and the watchdog ends it.
- Otherwise a rank may only be slow. The watchdog logs a warning after 30 seconds, and again whenever the wait has
  doubled. The warning names this rank's wait, and the missing ranks with their last collectives. Only the process
  group's timeout ends such a wait.
- On devices no host waits for collectives. There a rank counts as waiting when it has issued nothing for 30 seconds.

A missing rank may stand in a collective of another model, and wait for this one there. All ranks call the collectives
of all models in one order. So if a missing rank has started another model, neither can go on, and the watchdog ends the
wait. So it does if the missing rank has waited for 30 seconds in another model, of which it has issued more collectives
than this rank, or as many if this rank's host has to read them (shared memory); on devices hosts do not wait. (If a
rank skips layers, orders may differ for a while in a backward through two models.)

A missing rank may stand in another library's collective (``accelerator.gather``, ``dist.barrier()``) and wait for this
one. torch counts the collectives of the default process group, which all ranks call in one order. So if a missing rank
stands in one, and has called more of them than this rank, neither can go on, and on CPUs the watchdog ends the wait.
The missing rank's watchdog reads and logs this failure: the other library's error would not tell it.

A save in the background waits in a thread of its own, so a rank that has not come to it may be anywhere: its main
thread may be ahead in another model, or in another library's collective.
"""

from __future__ import annotations

import enum
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from streamshard.comm.groups import connection_advice
from streamshard.comm.host_groups import log_store, state_of_default
from streamshard.comm.streams import Entry, IssueLog
from streamshard.errors import line_reached, log
from streamshard.torch_private import count_collectives

# Else 1000 ranks that wait would read a million logs in one store.
_MOST_PEERS = 64  # a rank reads at most 64 logs: of the ranks with the next higher numbers
_FAILURE_KEY = "failure"
PATIENCE_S = 1.0  # length of a wait before ranks compare logs
_REPORT_AFTER_S = 30.0  # length of a wait before the first warning
_SHOW_AFTER_S = 3.0  # a rank that has issued nothing for this time shows its log
_LOGS_WITHIN_S = 1.5  # after an error, the longest wait for the logs of other ranks

# A rank there waits for all ranks. torch counts messages between two ranks, and calls of other threads, too.
_COLLECTIVE = re.compile(r"dist\.(?!i?send|i?recv|batch_isend_irecv|monitored_barrier)\w+\(\)")

# One entry for each `RankGroup` of this process with other ranks: a function that returns its method `abort`, or None
# once the `RankGroup` is gone; and its recorder.
watched: tuple[tuple[Callable[[], Callable[..., None] | None], FlightRecorder], ...] = ()

_ADVICE = (
    "All ranks have to call forward (evaluation and generate() too), backward, norms, and functions that collect or "
    "save weights (so not inside `if accelerator.is_main_process`), and run layers in the same order; they may skip "
    "layers. So conditions, such as the best loss so far, have to be the same on all ranks: reduce their numbers over "
    "ranks. If some ranks alone repeat or reorder the layers of a module, such as an image tower or a recurrent cell: "
    "StreamShard(model, resident=['visual']). If inputs run out on some ranks first: "
    "torch.distributed.algorithms.Join([model])"
)


class RecordKind(enum.IntEnum):
    """The kind of a log entry, with `words` for errors."""

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
    AVERAGE = "reduces over replicas"
    BROADCAST = "sends or receives a tensor of rank 0"
    SUM = "sums over all ranks (a norm, a check)"
    MEETING = "exchanges objects (set-up, an agreement in a forward, save_checkpoint, load_checkpoint, an export)"
    ALL_TO_ALL = "exchanges parameters with their owners (a step of WholeParameterOptimizer)"


class Shown(NamedTuple):
    """A rank's log as other ranks read it.

    Attributes:
        entries: the last entries of the log, by number.
        total: the number of all entries so far.
        time_s: Unix time of the last entry.
        others: the number of collectives on the default process group so far, other libraries' included.
        place: the line of its script that the rank has reached, see `line_reached`.
        has_left: the rank's model is gone, so that nothing follows.
        models: the number of models that the rank has started on these ranks.
        is_waiting: its host waits for other ranks.
    """

    entries: Mapping[int, Entry]
    total: int
    time_s: float
    others: int
    place: str = ""
    has_left: bool = False
    models: int = 0
    is_waiting: bool = False

    @classmethod
    def of(cls, log: IssueLog) -> Shown:
        """The log as it is now. Any thread may call this."""
        total = log.count  # first: an entry may come meanwhile, and the last one counted has to be among them
        return cls(log.entries(), total, log.time_s, count_collectives())

    def last(self, names: Sequence[str]) -> str:
        """The last entry in words."""
        entry = self.entries.get(self.total - 1)
        return "has issued nothing so far" if entry is None else _say(entry, names)


def describe_difference(logs: Mapping[int, Shown], names: Sequence[str]) -> str | None:
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


def _say(entry: Entry, names: Sequence[str]) -> str:
    _, kind, tag = entry
    if kind == RecordKind.GATHER and tag == len(names):
        return "ends a backward"  # ranks gather the flags of used parameters
    return tuple(RecordKind)[kind].words.format(unit=repr(names[tag]) if tag < len(names) else f"unit {tag}")


class FlightRecorder:
    """This rank's log, the logs of the other ranks, and the first failure. Any thread may call the methods.

    Args:
        group: all ranks of a model; None: there is one rank.
        has_streams: ranks are on devices, so no host waits for collectives.
        is_beside_training: ranks wait in a thread of their own.

    Attributes:
        log: this rank's log.
        rank: this rank's number.
        number: of this recorder among those of the group, the same on all ranks.
        names: names of units, by tag, for messages.
        difference: why this rank's wait can never succeed; None: the watchdog has found no reason.
        has_left: `leave` was called.
        needs_hosts: a collective that all ranks have issued may wait for what their hosts do: for copies, or sums.
    """

    needs_hosts = False

    def __init__(
        self, group: dist.ProcessGroup | None, *, has_streams: bool = False, is_beside_training: bool = False
    ) -> None:
        self.log = IssueLog()
        self.names: Sequence[str] = ()
        self.difference: str | None = None
        self.rank, self._world_size = (0, 1) if group is None else (group.rank(), group.size())
        others = range(1, min(self._world_size, _MOST_PEERS + 1))
        self._peers = sorted((self.rank + step) % self._world_size for step in others)
        self._has_streams, self._is_beside_training = has_streams, is_beside_training
        self._shown: tuple[int, int] | None = None  # `total` and `others` of the log in the store
        self.has_left = False
        self._reports = 0  # warnings of this wait so far: after 30, 60, 120, .. seconds
        self.number = 0
        self._store: Any = None  # None: there is one rank, or the process that hosts the store has ended
        self._members: tuple[int, ...] = ()
        self._started = Counter[tuple[int, ...]]()
        if group is not None and self._world_size > 1:
            self._store, self.number = log_store(group)
            self._members = tuple(dist.get_process_group_ranks(group))
            self._started = state_of_default().started
        if self._members and not is_beside_training:
            self._started[self._members] += 1

    # -- logs in the store ------------------------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any) -> Any:
        """The result of a method of the store; None if the process that hosts the store has ended."""
        store = self._store
        if store is not None:
            try:
                return getattr(store, method)(*args)
            except RuntimeError:
                self._store = None
        return None

    def _get(self, key: str) -> str:
        """The text under `key` in the store; "" if there is none."""
        # `get` would wait for a key that is not there.
        return (self._ask("get", key) or b"").decode() if self._ask("check", [key]) else ""

    def _show(self) -> None:
        """Write this rank's log to the store, if it has changed."""
        shown = Shown.of(self.log)
        if (shown.total, shown.others) != self._shown:
            self._shown = shown.total, shown.others
            self._write(shown)

    def _write(self, shown: Shown) -> None:
        shown = shown._replace(
            place=line_reached(), models=self._started[self._members], is_waiting=bool(self.log.waits)
        )
        self._ask("set", f"{self.number}/{self.rank}", json.dumps([[*shown.entries.values()], *shown[1:]]))

    def leave(self) -> None:
        """Tell the other ranks that this rank's model is gone: its last entry alone. A second call does nothing."""
        if self.has_left:
            return
        if self.log.failure is None:  # else others read the failure, and compare the whole log
            shown = Shown.of(self.log)
            last = {number: entry for number, entry in shown.entries.items() if number + 1 == shown.total}
            self._write(shown._replace(entries=last, has_left=True))
        self._store = None
        self.has_left = True

    def _show_if_idle(self) -> None:
        """Show the log when this rank has issued nothing for a while. Remove it when the rank goes on."""
        if time.time() - self.log.time_s >= _SHOW_AFTER_S:
            self._show()
        elif self._shown is not None and self._shown[0] != self.log.count:
            self._shown = None
            self._ask("set", f"{self.number}/{self.rank}", "")  # without the key, a read under way would wait for it

    def _read(self) -> dict[int, Shown]:
        """The logs in the store, by rank, and this rank's own."""
        self._show()
        logs = {self.rank: Shown.of(self.log)}
        for peer in self._peers:
            if text := self._get(f"{self.number}/{peer}"):
                entries, *others = json.loads(text)
                logs[peer] = Shown({entry[0]: tuple(entry) for entry in entries}, *others)
        return logs

    def _find_difference(self, logs: Mapping[int, Shown]) -> str | None:
        """Why this wait can never succeed: logs differ; a missing rank is gone, or in another library's collective."""
        if found := describe_difference(logs, self.names):
            return found
        own = logs[self.rank]
        for peer, shown in sorted(logs.items()):
            if shown.total < own.total and shown.has_left:
                did = f"its model is gone (last: it {shown.last(self.names)}), and it is at {shown.place}"
                return f"rank {peer} has not come: {did}. Has it caught an error that it alone met? {_ADVICE}"
            if shown.total >= own.total or self._is_beside_training:
                continue
            if not self._has_streams and shown.others > own.others and _COLLECTIVE.match(shown.place):
                where = f"another library's collective on the default process group, which rank {self.rank}"
                return f"rank {peer} has not come: it is in {where} has not called: {shown.place}. {_ADVICE}"
            if does := self._found_elsewhere(peer, shown, own.total):
                return f"rank {peer} has not come: it {does}, unlike rank {self.rank}, at {shown.place}. {_ADVICE}"
        return None

    def _found_elsewhere(self, peer: int, shown: Shown, total: int) -> str | None:
        """What `peer` does with another model, before this rank; `shown` has less than `total` entries of its log."""
        if shown.models > self._started[self._members]:
            return "has started another StreamShard(model)"
        for _, other in watched:
            if other is self or other._is_beside_training or other._members != self._members:
                continue
            theirs, later = other._read().get(peer), self._read().get(peer)  # in this order: `peer` may go on meanwhile
            if theirs is None or later is None or not theirs.is_waiting:
                continue
            idle_s = time.time() - max(theirs.time_s, later.time_s)
            is_ahead = theirs.total > other.log.count - other.needs_hosts
            if is_ahead and later.total < total and idle_s > _REPORT_AFTER_S:
                return f"{theirs.last(other.names)} of another model"
        return None

    def _describe_missing(self, logs: Mapping[int, Shown], *, among_shown: bool = False) -> str | None:
        """The ranks that have issued less than this rank, each with its last collective; None: there are none.

        Args:
            logs: the known logs, by rank.
            among_shown: leave out ranks without a log in the store: they may be computing.
        """
        ranks_of: dict[str, list[int]] = {}
        for peer in self._peers:
            shown = logs.get(peer)
            if shown is not None and shown.total < logs[self.rank].total:
                idle_s, last = max(0.0, time.time() - shown.time_s), shown.last(self.names)
                did = f"has issued nothing for {idle_s:.0f} s (last: it {last}), and is at {shown.place}"
                ranks_of.setdefault(did, []).append(peer)
            elif shown is None and not among_shown:
                ranks_of.setdefault("has published no log of its collectives", []).append(peer)
        missing = [f"rank {', '.join(map(str, ranks))} has not come: it {did}" for did, ranks in ranks_of.items()]
        return "; ".join([*missing, "it may be in another library's collective, asleep, or gone"]) if missing else None

    def post_failure(self, text: str) -> None:
        """Write this rank's failure to the store, for all ranks and models of the group. The first failure stays."""
        self._ask("compare_set", _FAILURE_KEY, "", f"{self.rank}:{text}")

    def read_failure(self) -> str | None:
        """The failure of another rank, in words; None: the store has none."""
        rank, _, text = self._get(_FAILURE_KEY).partition(":")
        return f"rank {rank} has failed: {text}" if rank not in ("", str(self.rank)) else None

    def explain(self, error: Exception) -> str:
        """Why a collective ended with `error`, by the logs and the failure in the store.

        Waits up to `_LOGS_WITHIN_S` for the other ranks' logs, unless the watchdog has found a difference.
        """
        if self.difference is not None:
            return self.difference
        deadline = time.monotonic() + _LOGS_WITHIN_S
        while True:
            logs = self._read()
            missing = self._describe_missing(logs)
            if found := self._find_difference(logs) or self.read_failure():
                return found
            if missing is None or self._store is None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # gloo's is: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [..]. This is typically caused by ..
        text = re.sub(r"^\[\S*gloo\S*\] ", "", str(error)).partition(". This is typically caused")[0]
        if text.endswith("has died"):  # the shared memory transport knows
            return f"{text}: its own output may say why"
        details = f"{text}. {missing}" if missing else text
        if "connecting" in details or "connectFullMesh" in details:
            return f"{details}. Another rank may have died{connection_advice()}"
        return f"{details}. Either another rank has died, or ranks do not do the same. {_ADVICE}"

    # -- the watchdog -----------------------------------------------------------------------------------------------

    def look(self, abort: Callable[..., None]) -> None:
        """Compare logs if the wait has taken long enough; end the wait or log a warning. The watchdog calls this.

        Args:
            abort: ends the waits of this rank's host, with ``users_too=True`` also other libraries' waits.
        """
        self._show_if_idle()
        waits = self.log.waits[-1:]
        if not waits:
            self._look_for_failure(abort)
            if not self._has_streams:
                return
        what = waits[0] if waits else "what it has issued on its device"
        waited_s = time.time() - (self.log.waiting_since_s if waits else self.log.time_s)
        reports = int(waited_s / _REPORT_AFTER_S).bit_length()  # 1, 2, 3 after 30, 60, 120 s
        is_due, self._reports = reports > self._reports, reports
        if waited_s < PATIENCE_S or (self._has_streams and not is_due):
            return
        logs = self._read()
        self.difference = self._find_difference(logs) or self.read_failure()
        if self._store is None and is_due and waits:
            self.difference = "rank 0, or the launcher, which hosts the store of the process group, has ended"
        if self.difference is not None:
            self.post_failure(f"{what}: {self.difference}")
            if is_due:  # nothing can end a wait on a device, so at least log the reason
                log.error("%s: %s", what, self.difference)
            abort()
        elif is_due:
            missing = self._describe_missing(logs, among_shown=not waits)
            if missing is not None or waits:  # else this rank computes, or runs the user's code
                missing = missing or f"all ranks have come, so a rank or the network is slow{connection_advice()}"
                last = logs[self.rank].last(self.names)
                log.warning("waited for %.0f s in %s (last: it %s): %s", waited_s, what, last, missing)

    def _look_for_failure(self, abort: Callable[..., None]) -> None:
        """While this rank is idle: log the failure of another rank, and end other libraries' waits.

        Their errors would not tell the failure.
        """
        if self.difference is None and time.time() - self.log.time_s >= _SHOW_AFTER_S:
            self.difference = self.read_failure()
            if self.difference is not None:
                log.error("%s", self.difference)
                time.sleep(PATIENCE_S)  # the rank that has failed raises first: launchers end ranks when one has ended
                abort(users_too=True)
