"""The order of collectives: the same on every rank, whatever each rank's own forward does. Pure Python.

A *visit* is one use of a unit during a pass. `plan_steps` derives the one order of operations from a list of visits and
each unit's slot. A `Schedule` hands out these operations: reaching a visit issues everything before the visit, and the
end of the pass issues the rest. So a rank that skips units still takes part in every collective, in the same order as
the others. See [Note: one program].

[Note: one program]
Step k of a schedule holds the operations that become possible once all visits before k are over: all-gathers into the
slots that these visits have freed (rule 2), and reductions of units after their last visit (rule 4). Prefetch means:
step k is issued as soon as visit k - 1 is over. So prefetch does not depend on how far the host runs ahead.
Whether an all-gather is needed is decided when it is issued, from what the slot holds. What the slot holds follows from
the operations issued before, so all ranks decide alike.

A visit is over when another unit is asked for, or the pass ends. So the program does not depend on which of a unit's
layers run, in which order, or how often.

[Note: out of order]
A unit is used *out of order* if the program has no visit of the unit left. In passes with gradients, until the order of
all units is known, a single rank may do so: it first issues the rest of the program, and then requests the unit, which
all ranks all-gather. In every other pass the rank all-gathers the unit itself, so all ranks must use it there.

A resident unit does not share its slot: once all-gathered, any rank can use it at any time in the pass, without a
collective. If a rank calls it several times, the rank's backward does not issue the unit's reduction before it has come
to the first of these calls (`Backward._advance`). Until the order is known, resident units are all-gathered first,
and ranks may use them in any order.

[Note: learning the order]
After each training pass the ranks agree on the order in which they have used units (`UnitOrder`). Each exchange lets
hosts wait for each other, so ranks stop it once every streamed unit was used, after `_QUIET_PASSES` passes in a row
without news, or when the orders of ranks contradict each other.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from streamshard.planning.memory import SlotPlan

_QUIET_PASSES = 10


class Op(NamedTuple):
    """One collective of a schedule: an all-gather of the unit with index `unit`, or the reduction of its gradients."""

    unit: int
    is_reduction: bool = False


def plan_steps(visits: Sequence[int], plan: SlotPlan, *, reduce: bool) -> list[list[Op]]:
    """Order the operations of one schedule, step by step.

    Each all-gather is in the first step in which its slot is free, behind those of earlier visits (rule 2).
    A reduction from a weight slot comes before the all-gather into the slot. If gradients have slots of their own, the
    all-gather comes first, because compute waits for it.

    Args:
        visits: unit indices in order of use; a unit may occur more than once.
        plan: which unit uses which slot, and which ones need no weights in backward.
        reduce: whether each unit's gradients are reduced after its last visit (backward).

    Returns:
        ``len(visits) + 1`` lists; list k may be issued once all visits before k are over.
    """
    steps: list[list[Op]] = [[]]
    step = 0
    free_at: dict[int, int] = {}  # by slot, the step at which it is free
    for visit, unit in enumerate(visits):
        steps.append([])
        if reduce and unit in plan.weightless:
            continue
        slot = plan.weights[unit]
        step = max(step, free_at.get(slot, 0))  # not before the all-gather of an earlier visit
        free_at[slot] = visit + 1
        steps[step].append(Op(unit))
    if reduce:
        # A dict keeps a unit's last visit.
        behind_last = dict(zip(visits, range(1, len(steps)), strict=True))
        for unit, step in behind_last.items():
            steps[step].insert(0 if plan.grads_take_weight_slots else len(steps[step]), Op(unit, is_reduction=True))
    return steps


class Schedule:
    """Hands out the operations of one pass in one direction, each exactly once, in order.

    Args:
        visits, plan, reduce: see `plan_steps`.

    Attributes:
        visits: see above.
        log: units visited so far, those out of order included. Backward is planned from the log.
        used: the units that this rank has really used, in order.
        position: all visits before this one are over.
        current: the unit whose visit is under way, in the program or out of order; None: no visit has begun.
    """

    def __init__(self, visits: Sequence[int], plan: SlotPlan, *, reduce: bool) -> None:
        self.visits = tuple(visits)
        self.log: list[int] = []
        self.used: list[int] = []
        self.position = 0
        self._is_streamed = plan.is_streamed
        self.current: int | None = None
        self._has_inner_uses = False  # which keep their places in the log
        self._steps = plan_steps(self.visits, plan, reduce=reduce)
        self._issued_steps = 0

    def find(self, unit: int) -> int | None:
        """The next visit of `unit` that is not over; None if there is none."""
        try:
            return self.visits.index(unit, self.position)
        except ValueError:
            return None

    @property
    def following(self) -> int:
        """The first visit that has not begun."""
        return self.position + (self.visits[self.position : self.position + 1] == (self.current,))

    def is_last(self, unit: int) -> bool:
        """Whether the visit of `unit` is under way or still to come, and no other streamed unit has one to come."""
        left = self.visits[self.following :]
        others = (other for other in left if other != unit)
        return (self.current == unit or unit in left) and not any(self._is_streamed[other] for other in others)

    def is_out_of_order(self, unit: int) -> bool:
        """Whether `unit`, which is used now, has no visit left in the program, and its weights are not in place."""
        is_there = self.current == unit or self.find(unit) is not None
        return not is_there and (self._is_streamed[unit] or unit not in self.visits)

    def reach(self, unit: int) -> list[Op]:
        """This rank uses `unit` now, so the visit of another unit is over.

        Returns:
            The operations that have become possible, `unit`'s all-gather included.
        """
        if self.used[-1:] != [unit]:  # layers of a unit share a visit
            self.used.append(unit)
        visit = self.find(unit)
        if visit is None:
            if not self.is_out_of_order(unit):
                return []
            ops = self.advance_to(self.following)
            self.log.append(unit)
        else:
            ops = self.advance_to(visit)
        self.current = unit
        return ops

    def add_request(self, unit: int) -> None:
        """The program is over, and all ranks all-gather `unit`, because a rank has requested it."""
        self.log.append(unit)
        self.current = unit

    def read(self, unit: int, *, is_inside: bool) -> None:
        """Note that weights of the resident `unit` are read. No visit is over.

        A read before the pass's first visit counts as out of order, because backward would come to it last. Later reads
        do not.

        Args:
            unit: the unit whose weights are read.
            is_inside: a running layer reads the weights, so that layer's backward makes a part of `unit`'s gradients.
        """
        # Before the layer that reads: backward then comes to `unit` behind it, with all parts of its gradients.
        position = len(self.used) - is_inside
        if unit not in self.used[max(position - 1, 0) : position + 1]:
            self.used.insert(position, unit)
        if unit in self.log:
            return
        visit = self.find(unit)
        if visit is None or is_inside or any(self._is_streamed[other] for other in self.visits[self.following : visit]):
            self.log.append(unit)
            self._has_inner_uses = True

    def advance_to(self, visit: int | None = None) -> list[Op]:
        """All visits before `visit` are over. None: the pass is over.

        Returns:
            The operations that have become possible, in the order in which to issue them.
        """
        visit = len(self.visits) if visit is None else visit
        if visit > self.position:
            # Skipped visits too: backward is planned from the log, which must be the same on all ranks.
            self.log.extend(self.visits[self.position : visit])
            self.position = visit
        ops: list[Op] = []
        for step in self._steps[self._issued_steps : self.position + 1]:
            ops += step
        self._issued_steps = self.position + 1
        return ops

    def adopt_order(self, order: Iterable[int]) -> None:
        """Let backward visit each unit once, in `order`, which ranks have learnt from this pass.

        Without this, a unit that was also requested is in the log twice, and its gradients leave their slot until the
        second visit. The log also begins with the resident units.

        Args:
            order: contains the order of units of each rank as a subsequence.
        """
        if not self._has_inner_uses:
            self.log = [unit for unit in order if unit in self.visits]


# -- learning the order -------------------------------------------------------------------------------------------


class UnitOrder:
    """The order of units, the same on all ranks. See [Note: learning the order].

    Args:
        is_streamed: by unit; the others are resident. The first unit is resident, and every pass uses it first.

    Attributes:
        order: all units.
        is_settled: nothing will change it.
    """

    def __init__(self, is_streamed: Sequence[bool]) -> None:
        self._is_streamed = is_streamed
        # 0 is `ROOT_UNIT` of `streamshard.core.engine`, which lies above this module.
        self._known: tuple[int, ...] = (0,)  # of the units that training passes have used so far
        self.order = merge_order(self._known, is_streamed)
        self.is_settled = False
        self._quiet_passes = 0  # in a row, that have brought no news

    def learn(self, schedule: Schedule, gather: Callable[[str, object], list[Any]], *, has_failed: bool) -> None:
        """A pass with gradients is over: learn the order of units from its use, here and on other ranks. Collective.

        Ranks may have skipped units. If the orders of ranks contradict each other, the order stays as it is.

        Args:
            schedule: the pass's.
            gather: returns the object of every rank that has run the pass. See `RankGroup.gather_objects`.
            has_failed: the forward has raised on this rank; then all ranks learn from the next pass instead.
        """
        used = None if has_failed else tuple(schedule.used)
        self._quiet_passes += 1
        everywhere = dict.fromkeys(gather("learn the order of units", used))
        if None in everywhere:
            # A failed forward has shown no order, so this pass does not count as quiet.
            self._quiet_passes = 0
            return
        if not all(is_part_of(each, self._known) for each in everywhere):
            self._quiet_passes = 0
            known = join_orders((self._known, *everywhere), self.order)
            if known is None:
                # No order fits all ranks: further exchanges would only let hosts wait.
                self.is_settled = True
            else:
                self._known = known
                self.order = merge_order(known, self._is_streamed)
            # Backward follows this pass, even if its order contradicts those of earlier passes.
            if (order := join_orders(everywhere, self.order)) is not None:
                schedule.adopt_order(merge_order(order, self._is_streamed))
        if not self.is_settled:
            is_known = set(self._known).issuperset(itertools.compress(itertools.count(), self._is_streamed))
            self.is_settled = is_known or self._quiet_passes == _QUIET_PASSES


def merge_order(used: Iterable[int], is_streamed: Sequence[bool]) -> tuple[int, ...]:
    """The order in which units were used, with unused units put in between.

    An unused streamed unit comes after the streamed unit that is registered before it. Unused resident units come after
    the first unit, because ranks may use them at any time. So if one rank uses such a unit later, the other ranks
    all-gather it too.

    Args:
        used: in order; units may occur more than once.
        is_streamed: by unit.
    """
    order = list(used)
    before: int | None = None
    missing = []
    for unit, takes_turns in enumerate(is_streamed):
        if takes_turns:
            if unit not in order:
                first = next((position for position, other in enumerate(order) if is_streamed[other]), len(order))
                order.insert(first if before is None else order.index(before) + 1, unit)
            before = unit
        elif unit not in order:
            missing.append(unit)
    return (*order[:1], *missing, *order[1:])


def is_part_of(used: Iterable[int], order: Iterable[int]) -> bool:
    """Whether `used` is `order` with some units left out."""
    # `in` moves the iterator behind the unit that it finds, so the next one has to come later.
    left = iter(order)
    return all(unit in left for unit in used)


def join_orders(orders: Iterable[Sequence[int]], otherwise: Sequence[int]) -> tuple[int, ...] | None:
    """The order that contains each of `orders` as a subsequence; None if they contradict each other.

    Args:
        orders: units in order of use. The n-th use of a unit in one order is its n-th use in the others.
        otherwise: an order of all units, for pairs that `orders` leave open.
    """
    # Reversed: the first place of a unit counts.
    place = {unit: position for position, unit in reversed(list(enumerate(otherwise)))}
    sorter = TopologicalSorter[tuple[int, int]]()  # of uses: (unit, n) is the unit's n-th use
    for order in orders:
        times = Counter[int]()
        uses = []
        for unit in order:
            uses.append((unit, times[unit]))
            times[unit] += 1
            sorter.add(uses[-1])
        for before, use in itertools.pairwise(uses):
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
