"""The order in which a pass all-gathers units, learnt from the first training passes.

After each pass with gradients the ranks agree on the order in which they have used units. Each exchange lets hosts wait
for each other, so ranks stop it once every streamed unit was used, after `_QUIET_PASSES` passes in a row without news,
or when the orders of ranks contradict each other. See [Note: one program] in `streamshard.planning.program`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, Protocol

from streamshard.planning.program import Schedule

_QUIET_PASSES = 10


class Agreement(Protocol):
    """The two collectives by which ranks agree."""

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`."""


class UnitOrder:
    """The order of units, the same on all ranks.

    Args:
        streamed: by unit, whether it is streamed.

    Attributes:
        order: all units.
        is_settled: nothing will change it.
    """

    def __init__(self, streamed: Sequence[bool]) -> None:
        self._streamed = streamed
        self.order = first_order(streamed)
        self._known: tuple[int, ...] = ()  # of the units that training passes have used so far
        self.is_settled = False
        self._quiet_passes = 0  # in a row, that have brought no news

    def learn(self, schedule: Schedule, ranks: Agreement, *, has_failed: bool) -> None:
        """A pass with gradients is over: learn the order of units from its use, here and on other ranks. Collective.

        Ranks may have skipped units. If the orders of ranks contradict each other, the order stays as it is.

        Args:
            schedule: the pass's.
            ranks: the ranks that have run the pass.
            has_failed: the forward has raised on this rank; then all ranks learn from the next pass instead.
        """
        used = None if has_failed else tuple(schedule.used)
        has_news = schedule.has_requests or used is None or not is_part_of(used, self._known)
        self._quiet_passes += 1
        if ranks.any_rank(has_news):
            self._quiet_passes = 0
            everywhere = dict.fromkeys(ranks.gather_objects(used))
            if None in everywhere:
                return
            known = join_orders((self._known, *everywhere), self.order)
            if known is None:
                self.is_settled = True
            else:
                self._known = known
                self.order = merge_order(known, self._streamed)
            if (order := join_orders(everywhere, self.order)) is not None:
                schedule.take_order(merge_order(order, self._streamed))
        if not self.is_settled:
            is_known = all(unit in self._known for unit, streamed in enumerate(self._streamed) if streamed)
            self.is_settled = is_known or self._quiet_passes == _QUIET_PASSES


def first_order(turns: Sequence[bool]) -> tuple[int, ...]:
    """The order before one is known: resident units, which ranks may use at any time, then streamed units."""
    return tuple(sorted(range(len(turns)), key=turns.__getitem__))


def merge_order(used: Iterable[int], turns: Sequence[bool]) -> tuple[int, ...]:
    """The order in which units were used, with unused units put in between.

    An unused streamed unit comes after the streamed unit that is registered before it. Unused resident units come after
    the first unit, as in `first_order`. So if one rank uses such a unit later, the other ranks all-gather it too.

    Args:
        used: in order; units may occur more than once.
        turns: by unit, whether the unit is streamed.
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
    """Whether `used` is `order` with some units left out."""
    left = iter(order)
    return all(unit in left for unit in used)


def join_orders(orders: Iterable[Sequence[int]], otherwise: Sequence[int]) -> tuple[int, ...] | None:
    """The order that contains each of `orders` as a subsequence; None if they contradict each other.

    Args:
        orders: units in order of use. The n-th use of a unit in one order is its n-th use in the others.
        otherwise: an order of all units, for pairs that `orders` leave open.
    """
    place = {unit: position for position, unit in reversed(list(enumerate(otherwise)))}
    sorter = TopologicalSorter[tuple[int, int]]()  # of uses: (unit, n) is the unit's n-th use
    for order in orders:
        times = Counter[int]()
        uses = []
        for unit in order:
            uses.append((unit, times[unit]))
            times[unit] += 1
            sorter.add(uses[-1])
        for before, use in pairwise(uses):
            sorter.add(use, before)
    try:
        sorter.prepare()
    except CycleError:
        return None
    joined: list[int] = []
    ready: list[tuple[int, int]] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()], key=lambda use: (place[use[0]], use))
        use = ready.pop(0)
        joined.append(use[0])
        sorter.done(use)
    return tuple(joined)
