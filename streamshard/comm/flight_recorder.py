"""What each rank has issued, in order, so that a rank that waits can say what the others do.

All ranks issue the same exchanges in the same order (the program's). If they do not, each waits for a message that the
other never sends. So each rank keeps a log of what it has issued, and a `Board` shows the logs of all ranks to each.
Ranks on one machine read each other's memory. The others put their logs up in the store that the process group met at:
when they wait, and when they have issued nothing for a while. So nothing is sent while training runs, and a rank that
sleeps or waits for something else than StreamShard can still be described.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

from streamshard.comm.foreign import collective_counter

__all__ = ["Board", "Failure", "Kind", "Log", "describe_difference", "describe_missing"]

_SIZE = 1024  # entries that are kept
_COUNT, _TIME = _SIZE, _SIZE + 1  # words behind the entries
_TAG_BITS, _CODE_BITS = 20, 24
_MOST_PEERS = 64  # logs that one rank reads: among more ranks, those of the ranks behind it
_FAILURE_KEY = "streamshard/failure"


class Kind(enum.IntEnum):
    """What is issued."""

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


class _Entry(NamedTuple):
    kind: Kind
    tag: int


class Failure(NamedTuple):
    """The first failure in a process group: the rank's number, and its error's text."""

    rank: int
    text: str


class Log:
    """The last exchanges that a rank has issued. Entry n says that it is the n-th, so one that was overwritten shows.

    Attributes:
        words: [Log.WORDS] int64: the entries, how many have been issued, and when the last one was (Unix time in ms).
        digest: stands for all entries, from the first one on.
    """

    WORDS = _SIZE + 2

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * self.WORDS)).cast("q")
        self.digest = 0
        self._count = 0
        self._count_collectives = collective_counter()
        self._collectives = [self._count_collectives()] * _SIZE  # before each entry; other libraries' are among them
        self.words[_TIME] = _now_ms()

    def add(self, kind: Kind, tag: int = 0) -> None:
        """`kind` is being issued, on what `tag` says."""
        entry = self._count << _CODE_BITS | kind << _TAG_BITS | tag
        self.digest = hash((self.digest, entry))  # of integers: the same in every process
        self.words[self._count % _SIZE] = entry
        self._collectives[self._count % _SIZE] = self._count_collectives()
        self._count += 1
        self.words[_TIME] = _now_ms()
        self.words[_COUNT] = self._count

    def move_to(self, words: memoryview) -> None:
        """Keep the entries in `words`, [Log.WORDS] int64, from now on, where other ranks may read them."""
        words[:] = self.words
        self.words = words

    @property
    def idle_s(self) -> float:
        """How long this rank has issued nothing."""
        return _idle_s(self.words)

    @property
    def count(self) -> int:
        """How many entries have been issued."""
        return self._count

    def collectives_before(self, number: int) -> int | None:
        """How many collectives this rank has issued on the default group between two entries.

        Args:
            number: the later entry. `count`: the one that is issued next.

        Returns:
            Those since entry ``number - 1``, its own among them; None if that is too long ago.
        """
        if not self._count - _SIZE < number <= self._count:
            return None
        now = self._count_collectives() if number == self._count else self._collectives[number % _SIZE]
        return now - self._collectives[(number - 1) % _SIZE]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _idle_s(words: Sequence[int]) -> float:
    return max(0.0, (_now_ms() - words[_TIME]) / 1000)


def describe_difference(logs: Mapping[int, Sequence[int]], names: Sequence[str]) -> str | None:
    """The first exchange that ranks have not issued alike, in words; None if there is none so far.

    Args:
        logs: `Log.words` by rank, of the ranks whose logs are known.
        names: of units, by tag.
    """
    counts = [log[_COUNT] for log in logs.values()]
    for number in range(max(0, max(counts) - _SIZE), sorted(counts)[-2] if len(counts) > 1 else 0):
        known = {rank: entry for rank, log in logs.items() if (entry := _entry(log, number)) is not None}
        if len(set(known.values())) > 1:
            stories = [f"rank {rank} {_say(entry, names)}" for rank, entry in sorted(known.items())]
            return f"ranks do not do the same: {', '.join(stories)}"
    return None


def describe_missing(own: int, logs: Mapping[int, Sequence[int] | None], names: Sequence[str]) -> str | None:
    """Which ranks have not issued as much as this one, and what each did last; None if there are none.

    Args:
        own: this rank.
        logs: `Log.words` by rank; None: not known.
        names: of units, by tag.
    """
    count = 0 if (mine := logs[own]) is None else mine[_COUNT]
    behind = {rank: log for rank, log in sorted(logs.items()) if log is None or log[_COUNT] < count}
    ranks_of: dict[str, list[int]] = {}
    for rank, log in behind.items():
        ranks_of.setdefault("it shows no log" if log is None else f"last: {_say_last(log, names)}", []).append(rank)
    stories = []
    for last, ranks in ranks_of.items():
        idle = [_idle_s(log) for rank in ranks if (log := behind[rank]) is not None]
        nothing = f", and has issued nothing for {min(idle):.0f} s" if idle else ""
        stories.append(f"rank {_list_ranks(ranks)} has not come{nothing} ({last})")
    return (
        f"{'; '.join(stories)}. It may be in another library's collective, in a loop, asleep, or gone"
        if stories
        else None
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _say_last(log: Sequence[int], names: Sequence[str]) -> str:
    entry = _entry(log, log[_COUNT] - 1)
    return "nothing so far" if entry is None else f"it {_say(entry, names)}"


def _entry(log: Sequence[int], number: int) -> _Entry | None:
    word = log[number % _SIZE]
    code = word & ((1 << _CODE_BITS) - 1)
    if word >> _CODE_BITS != number or code == 0:
        return None
    return _Entry(Kind(code >> _TAG_BITS), code & ((1 << _TAG_BITS) - 1))


def _say(entry: _Entry, names: Sequence[str]) -> str:
    if entry.kind is Kind.GATHER and entry.tag == len(names):  # of which parameters were used
        return "ends a backward"
    unit = repr(names[entry.tag]) if entry.tag < len(names) else f"unit {entry.tag}"
    return {
        Kind.FORWARD: "begins (or, in fp32, ends) a forward",
        Kind.GATHER: f"gathers {unit}",
        Kind.GATHER_FULL: f"collects weights or optimizer state of {unit} (full_state_dict, summon_full_params)",
        Kind.REDUCE: f"reduces the gradients of {unit}",
        Kind.AVERAGE: "averages over replicas",
        Kind.BROADCAST: "sends or receives a tensor that is rank 0's",
        Kind.SUM: "sums over all ranks (a norm, a check)",
        Kind.VOTE: "asks whether anything has changed that ranks share, at the start or the end of a forward",
        Kind.END_OF_STEP: "has ended its step (under Join: in its loop, or by repeat=)",
        Kind.ALL_TO_ALL: "exchanges parameters with their owners (a step of WholeParameterOptimizer)",
        Kind.MEETING: "meets the others (save_checkpoint, load_checkpoint, an export, or to agree on something)",
    }[entry.kind]


class Board:
    """Where the ranks of a group see each other's logs, and the first failure.

    Any thread may call its methods.

    Args:
        group: all ranks of a model; its store is used.
        rank, world_size: of this rank in it.

    Attributes:
        log: this rank's.
        names: of units, by tag; for messages.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        self.log = Log()
        self.names: Sequence[str] = ()
        number = _boards.get(group, 0)  # the same on all ranks, which make boards together
        _boards[group] = number + 1
        self._store = group.get_group_store() if world_size > 1 else None
        self._key = f"streamshard/{number}/"
        self._rank = rank
        self._world_size = world_size
        self._peers = [(rank + 1 + step) % world_size for step in range(min(world_size - 1, _MOST_PEERS))]
        self._shared: Mapping[int, Sequence[int]] = {}
        self._shown_count = -1
        self._shown_call: str | None = None
        self._verdict: str | None = None

    def share(self, logs: Mapping[int, Sequence[int]]) -> None:
        """These ranks' logs lie in memory that this rank can read: `Log.words` by rank."""
        self._shared = logs

    def show(self) -> None:
        """Put up this rank's log, if it has changed."""
        count = self.log.words[_COUNT]
        if self._store is None or count == self._shown_count or all(peer in self._shared for peer in self._peers):
            return
        shown = base64.b85encode(zlib.compress(bytes(self.log.words), 1)).decode()
        with contextlib.suppress(RuntimeError):  # the store may have gone with its rank
            self._store.set(f"{self._key}{self._rank}", shown)
        self._shown_count = count

    def show_if_idle(self, after_s: float) -> None:
        """Put up this rank's log once it has issued nothing for so long, and take it back when it goes on."""
        if self.log.idle_s >= after_s:
            self.show()
        elif self._store is not None and self._shown_count not in (-1, self.log.words[_COUNT]):
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._key}{self._rank}")
            self._shown_count = -1

    def find_difference(self, *, among_shared: bool = False) -> str | None:
        """What this rank and others have issued that is not the same; None if all is, as far as one can know.

        Args:
            among_shared: look at the ranks only whose memory this rank can read: sends nothing.
        """
        if self._verdict is not None:
            return self._verdict
        logs = self._read(among_shared=among_shared)
        return describe_difference({rank: log for rank, log in logs.items() if log is not None}, self.names)

    def show_call(self, call: str | None) -> None:
        """Put up that this rank is in another library's collective: `call`, or None: in none (any more)."""
        shown = None if call is None else f"{self.log.count}:{self.log.collectives_before(self.log.count)}:{call}"
        if self._store is None or shown == self._shown_call:
            return
        with contextlib.suppress(RuntimeError):
            if shown is None:
                self._store.delete_key(self._call_key(self._rank))
            else:
                self._store.set(self._call_key(self._rank), shown)
        self._shown_call = shown

    def find_foreign(self) -> str | None:
        """A rank that is in another library's collective, which this rank has not called; None if there is none.

        All ranks issue the same collectives between the same two entries. So if that rank has issued more of them
        since its last entry than this rank before its next one, this rank never joins it: it waits for that rank.
        From then on `find_difference` says the same, to whatever waits.
        """
        if self._store is None:
            return None
        with contextlib.suppress(RuntimeError):
            for peer in self._peers:
                if not self._store.check([key := self._call_key(peer)]):
                    continue
                count, collectives, call = self._store.get(key).decode().split(":", 2)
                own = self.log.collectives_before(int(count)) if int(count) < self.log.count else None
                if own is not None and int(collectives) > own:
                    own_last = self.describe_last().removeprefix("it ")
                    self._verdict = f"ranks do not do the same: rank {self._rank} {own_last}, rank {peer} is in {call}"
                    return self._verdict
        return None

    def _call_key(self, rank: int) -> str:
        return f"{self._key}{rank}/call"

    def describe_missing(self, *, among_shown: bool = False) -> str | None:
        """See `describe_missing`.

        Args:
            among_shown: leave out ranks that show no log, which may be at work.
        """
        logs = {rank: log for rank, log in self._read().items() if log is not None or not among_shown}
        return describe_missing(self._rank, logs, self.names)

    def describe_last(self) -> str:
        """What this rank has issued last: ``it gathers 'layers.0'``."""
        return _say_last(self.log.words, self.names)

    def describe_rank(self) -> str:
        """This rank: ``rank 0 of 8``."""
        return f"rank {self._rank} of {self._world_size}"

    def _read(self, *, among_shared: bool = False) -> dict[int, Sequence[int] | None]:
        logs: dict[int, Sequence[int] | None] = dict.fromkeys((self._rank, *self._peers))
        logs.update(self._shared)
        logs[self._rank] = self.log.words
        if self._store is not None and not among_shared:
            self.show()
            with contextlib.suppress(RuntimeError):
                for peer in self._peers:
                    if peer not in self._shared and self._store.check([key := f"{self._key}{peer}"]):
                        packed = base64.b85decode(self._store.get(key))
                        logs[peer] = memoryview(zlib.decompress(packed)).cast("q")
        return logs

    def post_failure(self, text: str) -> None:
        """Tell the other ranks, and other models of the group, how this rank has failed. The first failure counts."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_FAILURE_KEY, "", f"{self._rank}:{text}")

    def read_failure(self) -> Failure | None:
        """How another rank has failed; None if none has, as far as one can know."""
        failure = None
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([_FAILURE_KEY]):
                    rank, _, text = self._store.get(_FAILURE_KEY).decode().partition(":")
                    failure = Failure(int(rank), text)
        return None if failure is None or failure.rank == self._rank else failure


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
