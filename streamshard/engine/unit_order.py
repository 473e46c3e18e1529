"""The order in which a pass all-gathers units: learnt from the forwards that training passes really run.

The first pass follows `streamshard.plan.program.first_order`. After each pass with gradients the ranks agree on what
they have used. Once every streamed unit was used, or ranks' orders contradict each other, nothing is exchanged any
more. See [Note: one program] in `streamshard.plan.program`.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamshard.comm.ranks import Ranks
from streamshard.plan.program import Schedule, first_order, is_part_of, join_orders, merge_order

__all__ = ["UnitOrder"]


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

    def learn(self, schedule: Schedule, ranks: Ranks, *, has_failed: bool) -> None:
        """A pass with gradients is over: what it used, here and on other ranks, is the order from now on. Collective.

        Ranks may have skipped units. If what ranks have used is no part of one order, the order stays as it is.

        Args:
            schedule: of the pass.
            ranks: have run it too.
            has_failed: the forward has raised here: then the next pass counts.
        """
        used = None if has_failed else tuple(schedule.used)
        has_news = schedule.has_requests or used is None or not is_part_of(used, self._known)
        if ranks.any_rank(has_news):
            everywhere = dict.fromkeys(ranks.gather_objects(used))
            if None in everywhere:
                return
            known = join_orders((self._known, *everywhere), self.order)
            if known is None:
                self.is_settled = True
            else:
                self._known = known
                self.order = merge_order(known, self._streamed)
            if schedule.has_requests and (order := join_orders(everywhere, self.order)) is not None:
                schedule.merge_requests(merge_order(order, self._streamed))
        if not self.is_settled:
            self.is_settled = all(unit in self._known for unit, streamed in enumerate(self._streamed) if streamed)
