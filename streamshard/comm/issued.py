"""What a rank has issued, in order, so that ranks which wait for each other can see whether they do the same.

Every rank issues the same exchanges in the same order (the program's). Where they do not, each would wait for what the
other never sends, until the process group's timeout. So each keeps a log of what it has issued; whoever waits for long
compares the logs, and says what differs first. Nothing is sent for it as long as nobody waits.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

__all__ = ["Board", "Kind", "Log", "describe_difference"]

_SIZE = 1024  # entries that are kept
_TAG_BITS, _CODE_BITS = 20, 24


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


class _Entry(NamedTuple):
    kind: Kind
    tag: int


class Log:
    """The last exchanges that a rank has issued. Entry n says that it is the n-th, so one that was overwritten shows.

    Args:
        words: [Log.WORDS] int64, where it is kept (other ranks may read there), zeros; None: in memory of its own.

    Attributes:
        words: see above: the entries, and how many have been issued.
        digest: stands for all of them, from the first one on.
    """

    WORDS = _SIZE + 1

    def __init__(self, words: memoryview | None = None) -> None:
        self.words = memoryview(bytearray(8 * self.WORDS)).cast("q") if words is None else words
        self.digest = 0
        self._count = 0

    def add(self, kind: Kind, tag: int = 0) -> None:
        """`kind` is being issued, on what `tag` says."""
        entry = self._count << _CODE_BITS | kind << _TAG_BITS | tag
        self.digest = hash((self.digest, entry))  # of integers: the same in every process
        self.words[self._count % _SIZE] = entry
        self._count += 1
        self.words[_SIZE] = self._count


def describe_difference(logs: Sequence[Sequence[int] | None], names: Sequence[str]) -> str | None:
    """The first thing that not all ranks have issued alike, in words; None if there is none so far.

    Args:
        logs: all ranks' `Log.words`, by rank; None: not known.
        names: of units, by tag.
    """
    counts = [log[_SIZE] for log in logs if log is not None]
    for number in range(max(0, max(counts) - _SIZE), sorted(counts)[-2] if len(counts) > 1 else 0):
        entries = [None if log is None else _entry(log, number) for log in logs]
        if len({entry for entry in entries if entry is not None}) > 1:
            stories = [f"rank {rank} {_say(entry, names)}" for rank, entry in enumerate(entries) if entry is not None]
            return f"ranks do not do the same: {', '.join(stories)}"
    return None


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
        Kind.MEETING: "meets the others (save_checkpoint, load_checkpoint, an export, or to agree on something)",
    }[entry.kind]


class Board:
    """Where the ranks of a group put up their logs: the store that they met at.

    Args:
        group: whose store.
        rank, world_size: of this rank in it.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        number = _boards.get(group, 0)  # the same on all ranks: transports are made together
        _boards[group] = number + 1
        self._store = group.get_group_store()
        self._keys = [f"streamshard/{number}/{rank}" for rank in range(world_size)]
        self._rank = rank
        self._shown = ""

    def exchange(self, log: Log) -> list[Sequence[int] | None]:
        """Put up `log`; all ranks' `Log.words`, by rank, None where there is none (yet)."""
        logs: list[Sequence[int] | None] = [None] * len(self._keys)
        logs[self._rank] = log.words
        with contextlib.suppress(RuntimeError):  # the store may have gone with its rank
            if (shown := bytes(log.words).hex()) != self._shown:
                self._store.set(self._keys[self._rank], shown)
                self._shown = shown
            for rank, key in enumerate(self._keys):
                if rank != self._rank and self._store.check([key]):
                    logs[rank] = memoryview(bytes.fromhex(self._store.get(key).decode())).cast("q")
        return logs


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
