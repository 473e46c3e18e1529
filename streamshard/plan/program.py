"""The order of collectives: the same on every rank, whatever each rank's own forward does.

Pure Python. A *visit* is one stay in a unit during a pass; a *schedule* hands out the operations that a list of visits
needs, in one direction. From the visits and each unit's slot follows, by `plan_steps`, the only order in which they are
ever issued. Being asked for a visit issues everything before it, the end of the schedule issues what is left. Ranks
that skip units therefore still take part in every collective, in the same order as those that do not. See [Note: one
program].

[Note: one program]
Step k of a schedule holds the operations that become possible once all visits before k are released: gathers into the
slots that those visits have freed (rule 2) and reductions of the units that they were the last visit of (rule 4).
Prefetch is nothing but issuing step k as soon as visit k - 1 is released, so it does not depend on how far the host
runs ahead. Whether a gather is needed at all is decided when it is issued, from what the slot holds: that is a function
of the operations issued before, hence equal on all ranks.

A visit is over when another unit is asked for, or the pass ends. So it does not matter to the program which of a
unit's layers run, in which order, or how often.

A unit of which the program has no visit left is a departure. While nobody knows when some units are used, ranks may
depart differently: one that does issues the rest of the program, so that all are behind it, and what it asks for is
gathered by all (`serve`).

A unit that takes no turns in the block slots stays in its own: once gathered, it can be used at any time in the pass,
on any rank, without a collective. Until it is known when such units are used, they are gathered first (`first_order`):
then ranks may use them in whatever order, as they may those of the root unit.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Op", "OpKind", "Schedule", "first_order", "is_part_of", "join_orders", "merge_order", "plan_steps"]


class OpKind(enum.Enum):
    """What an operation does with a unit."""

    GATHER = "gather"
    REDUCE = "reduce"


class Op(NamedTuple):
    """One collective of a schedule: `kind` on the unit with index `unit`."""

    kind: OpKind
    unit: int


def plan_steps(visits: Sequence[int], slot_of: Sequence[int], *, reduce: bool) -> list[list[Op]]:
    """Order the operations of one schedule, step by step.

    Args:
        visits: unit indices in order of use; a unit may occur more than once.
        slot_of: the weight slot of each unit, by unit index.
        reduce: whether each unit's gradients are reduced after its last visit (backward).

    Returns:
        ``len(visits) + 1`` lists; list k may be issued once all visits before k are released.
    """
    last_visit = {unit: k for k, unit in enumerate(visits)}
    slot_free_at: list[int] = []  # the step at which visit j's slot is free
    latest_in_slot: dict[int, int] = {}
    for j, unit in enumerate(visits):
        slot_free_at.append(latest_in_slot.get(slot_of[unit], -1) + 1)
        latest_in_slot[slot_of[unit]] = j
    steps: list[list[Op]] = []
    gathered = 0
    for k in range(len(visits) + 1):
        ops = []
        while gathered < len(visits) and slot_free_at[gathered] <= k:
            ops.append(Op(OpKind.GATHER, visits[gathered]))
            gathered += 1
        if reduce and k > 0 and last_visit[visits[k - 1]] == k - 1:
            ops.append(Op(OpKind.REDUCE, visits[k - 1]))
        steps.append(ops)
    return steps


class Schedule:
    """The program of one pass in one direction, as it is issued: hands out each operation exactly once, in order.

    Args:
        visits, slot_of, reduce: see `plan_steps`.
        turns: by unit, whether it takes turns in the block slots; others stay in their own.
    """

    def __init__(self, visits: Sequence[int], slot_of: Sequence[int], turns: Sequence[bool], *, reduce: bool) -> None:
        self.visits = tuple(visits)
        self.log: list[int] = []  # visits passed so far, those outside the program included
        self.used: list[int] = []  # the units that were really used on this rank, in order
        self.has_served = False  # units that ranks asked for when the program was over
        self.has_asides = False  # units that were used beside the program
        self._turns = turns
        self._current: int | None = None  # the unit that was asked for last
        self._steps = plan_steps(self.visits, slot_of, reduce=reduce)
        self._issued_steps = 0
        self._is_outside = True  # whether what was asked for last is no visit of the program
        self.released = 0  # all visits before this one are released

    def reach(self, unit: int) -> list[Op]:
        """`unit` is used now, so a visit of another unit is over: what has become possible, `unit`'s gather included.

        If the program has no visit of `unit` left, this is a departure, after the visits released so far; unless it is
        a unit that stays.
        """
        if self.used[-1:] != [unit]:
            self.used.append(unit)
        if self._current == unit:
            return []  # still there
        visit = self.find(unit)
        if visit is None and not self._turns[unit] and unit in self.visits:
            return []
        self._current = unit
        if visit is not None:
            self._is_outside = False
            return self.release_before(visit)
        ops = [] if self._is_outside else self.release_before(self.released + 1)
        self._is_outside = True
        self.log.append(unit)
        return ops

    def departs(self, unit: int) -> bool:
        """Whether `unit`, used now, is a departure: no visit of it is left."""
        is_there = self._current == unit or self.find(unit) is not None
        return not is_there and (self._turns[unit] or unit not in self.visits)

    def serve(self, unit: int) -> None:
        """The program is over, and `unit` is gathered because some rank asked for it."""
        self.log.append(unit)
        self.has_served = True

    def tidy(self, order: Iterable[int]) -> None:
        """Backward finds units in `order`, of which each rank has used a part, not once in the program and once served.

        Else it would have their gradients wait for the last visit, beside the slots. What was used beside the program
        keeps its place, so then everything does.
        """
        if not self.has_asides:
            self.log = [unit for unit in order if unit in self.visits]

    def reach_served(self, unit: int) -> None:
        """`unit`, which was served last, is used now."""
        if self.used[-1:] != [unit]:
            self.used.append(unit)
        self._current = unit
        self._is_outside = True

    def depart(self, unit: int) -> None:
        """`unit` is used beside the program, while another unit's visit goes on: backward has to come by there."""
        self.log.append(unit)
        self.has_asides = True

    def read(self, unit: int, *, is_inside: bool) -> None:
        """Weights of `unit`, which stays, are read: nobody's visit is over.

        It departs only if it is read before its first turn has come, since backward comes by there last.

        Args:
            unit: whose.
            is_inside: by a running layer, in whose backward `unit` gets a part of its gradients. By nobody's: behind
                the layers that have run.
        """
        position = len(self.used) - is_inside
        if unit not in self.used[max(position - 1, 0) : position + 1]:
            self.used.insert(position, unit)
        if unit in self.log or unit in self.visits[: self.released]:
            return
        visit = self.find(unit)
        start = self.released + (not self._is_outside)
        if visit is None or is_inside or any(self._turns[other] for other in self.visits[start:visit]):
            self.log.append(unit)
            self.has_asides = True

    def find(self, unit: int, start: int = 0) -> int | None:
        """The next visit of `unit` that is not released, at or after visit `start`; None if there is none."""
        for k in range(max(start, self.released), len(self.visits)):
            if self.visits[k] == unit:
                return k
        return None

    def release_before(self, k: int) -> list[Op]:
        """Visits before `k` are over: the operations that have become possible, to be issued in this order."""
        if k > self.released:
            self.log.extend(self.visits[self.released : k])
            self.released = k
        ops: list[Op] = []
        while self._issued_steps <= self.released:
            ops.extend(self._steps[self._issued_steps])
            self._issued_steps += 1
        return ops

    def finish(self) -> list[Op]:
        """The pass is over: what is left to be issued."""
        return self.release_before(len(self.visits))


def first_order(turns: Sequence[bool]) -> tuple[int, ...]:
    """The order before one is known: units that stay, whenever they may be used, then those that take turns."""
    return tuple(sorted(range(len(turns)), key=turns.__getitem__))


def merge_order(used: Iterable[int], turns: Sequence[bool]) -> tuple[int, ...]:
    """The order in which units were used, with those not used put in where a rank that uses them finds them in time.

    Those that take turns come behind their registered predecessor among such, or before all of them; units that stay
    come behind the first unit, as in `first_order`. Units that were skipped stay in the program, so that a rank that
    uses one later finds the others taking part.

    Args:
        used: in order; units may occur more than once.
        turns: by unit, whether it takes turns.
    """
    order = list(used)
    before: int | None = None
    for unit in (unit for unit, is_streamed in enumerate(turns) if is_streamed):
        if unit not in order:
            first = next((position for position, other in enumerate(order) if turns[other]), len(order))
            order.insert(first if before is None else order.index(before) + 1, unit)
        before = unit
    missing = [unit for unit, is_streamed in enumerate(turns) if not is_streamed and unit not in order]
    return (*order[:1], *missing, *order[1:])


def is_part_of(used: Iterable[int], order: Iterable[int]) -> bool:
    """Whether `used` is `order`, of which some may have been skipped."""
    left = iter(order)
    return all(unit in left for unit in used)


def join_orders(orders: Iterable[Sequence[int]], otherwise: Sequence[int]) -> tuple[int, ...] | None:
    """The order of which each of `orders` is a part; None if they contradict each other.

    Args:
        orders: in which units were used. The first use of a unit in one is its first in the others, and so on.
        otherwise: has all units. Says which comes first of two of which `orders` do not.
    """
    place = {unit: position for position, unit in reversed(list(enumerate(otherwise)))}
    behind: dict[tuple[int, int], set[tuple[int, int]]] = {}  # uses, of a unit for the n-th time, behind a use
    for order in orders:
        times = Counter[int]()
        before: set[tuple[int, int]] = set()
        for unit in order:
            use = (unit, times[unit])
            times[unit] += 1
            before.add(use)
            before = behind.setdefault(use, set())
    waits = Counter(use for uses in behind.values() for use in uses)
    ready = [(place[unit], unit, time) for unit, time in behind if not waits[unit, time]]
    heapq.heapify(ready)
    joined: list[int] = []
    while ready:
        _, unit, time = heapq.heappop(ready)
        joined.append(unit)
        for use in behind[unit, time]:
            waits[use] -= 1
            if not waits[use]:
                heapq.heappush(ready, (place[use[0]], *use))
    return tuple(joined) if len(joined) == len(behind) else None
