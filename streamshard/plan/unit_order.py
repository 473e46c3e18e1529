"""The order in which a pass all-gathers units, learnt from the first training passes.

After each pass with gradients the ranks agree on the order in which they have used units. Once every streamed unit was
used, or no order contains those of all ranks, ranks stop exchanging orders. See [Note: one program] in
`streamshard.plan.program`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from streamshard.plan.program import Schedule


class Communicator(Protocol):
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

    def learn(self, schedule: Schedule, ranks: Communicator, *, has_failed: bool) -> None:
        """A pass with gradients is over: learn the order of units from its use, here and on other ranks. Collective.

        Ranks may have skipped units. If `join_orders` finds no order for all ranks, the order stays as it is.

        Args:
            schedule: the pass's.
            ranks: the ranks that have run the pass.
            has_failed: the forward has raised on this rank; then all ranks learn from the next pass instead.
        """
        used = None if has_failed else tuple(schedule.used)
        has_news = schedule.has_requests or used is None or not is_part_of(used, self._known)
        if ranks.any_rank(has_news):
            everywhere = dict.fromkeys(ranks.gather_objects(used))
            if None in everywhere:
                return
            known = join_orders((self._known, *everywhere), self._streamed)
            if known is None:
                self.is_settled = True
            else:
                self._known = known
                self.order = merge_order(known, self._streamed)
            if (order := join_orders(everywhere, self._streamed)) is not None:
                schedule.take_order(merge_order(order, self._streamed))
        if not self.is_settled:
            self.is_settled = all(unit in self._known for unit, streamed in enumerate(self._streamed) if streamed)


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


def join_orders(orders: Iterable[Sequence[int]], turns: Sequence[bool]) -> tuple[int, ...] | None:
    """The longest of `orders`, with the other units that `orders` use at their places as in `merge_order`.

    Args:
        orders: units in order of use; at least one order.
        turns: by unit, whether the unit is streamed.

    Returns:
        An order that contains each of `orders` as a subsequence; None if this one does not.
    """
    found = list(orders)
    longest = max(found, key=len)
    merged = merge_order(longest, turns)
    used = set(itertools.chain(*found))
    joined = tuple(unit for unit in merged if unit in used)
    return joined if all(is_part_of(order, joined) for order in found) else None
