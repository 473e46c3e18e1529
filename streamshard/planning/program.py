"""The order of collectives: the same on every rank, whatever each rank's own forward does. Pure Python.

A *visit* is one use of a unit during a pass. `plan_steps` derives the one order of operations from a list of visits and
each unit's slot. A `Schedule` hands out these operations: reaching a visit issues everything before the visit, and the
end of the pass issues the rest. So a rank that skips units still takes part in every collective, in the same order as
the others. See [Note: one program].

[Note: one program]
Step k of a schedule holds the operations that become possible once all visits before k are released: all-gathers into
the slots that those visits have freed (rule 2), and reductions of units after their last visit (rule 4). Prefetch is
nothing but issuing step k as soon as visit k - 1 is released, so it does not depend on how far the host runs ahead.
Whether an all-gather is needed is decided when it is issued, from what the slot holds. What the slot holds follows from
the operations issued before, so all ranks decide alike.

A visit is over when another unit is asked for, or the pass ends. So the program does not depend on which of a unit's
layers run, in which order, or how often.

A unit is used *out of order* if the program has no visit of the unit left. Until the order of all units is known, a
single rank may do so: it first issues the rest of the program, and then requests the unit, which all ranks all-gather.

A resident unit does not share its slot: once all-gathered, any rank can use it at any time in the pass, without a
collective. If a rank calls it several times, the rank's backward does not issue the unit's reduction before it has come
to the first of these calls (`Backward._waits_before`). Until the order is known, resident units are all-gathered first,
and ranks may use them in any order (`streamshard.planning.unit_order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Op(NamedTuple):
    """One collective of a schedule: an all-gather of the unit with index `unit`, or the reduction of its gradients."""

    unit: int
    is_reduction: bool = False


def plan_steps(visits: Sequence[int], slot_of: Sequence[int], *, reduce: bool) -> list[list[Op]]:
    """Order the operations of one schedule, step by step.

    Args:
        visits: unit indices in order of use; a unit may occur more than once.
        slot_of: the weight slot of each unit, by unit index.
        reduce: whether each unit's gradients are reduced after its last visit (backward).

    Returns:
        ``len(visits) + 1`` lists; list k may be issued once all visits before k are released.
    """
    steps: list[list[Op]] = [[] for _ in range(len(visits) + 1)]
    step = 0
    free_at: dict[int, int] = {}  # by slot, the step at which it is free
    for visit, unit in enumerate(visits):
        step = max(step, free_at.get(slot_of[unit], 0))
        free_at[slot_of[unit]] = visit + 1
        steps[step].append(Op(unit))
    last_visit = {unit: visit for visit, unit in enumerate(visits)} if reduce else {}
    for unit, visit in last_visit.items():
        steps[visit + 1].append(Op(unit, is_reduction=True))
    return steps


def gathers_of_step(slot_of: Sequence[int]) -> list[int]:
    """The units that one step all-gathers, in order, if forward visits all units in turn and backward in reverse.

    Args:
        slot_of: the weight slot of each unit, by unit index.
    """
    content: dict[int, int] = {}  # by slot, the unit whose weights it holds
    gathered = []
    for visits in (range(len(slot_of)), range(len(slot_of))[::-1]):
        for op in itertools.chain.from_iterable(plan_steps(visits, slot_of, reduce=False)):
            if content.get(slot_of[op.unit]) != op.unit:
                content[slot_of[op.unit]] = op.unit
                gathered.append(op.unit)
    return gathered


class Schedule:
    """Hands out the operations of one pass in one direction, each exactly once, in order.

    Args:
        visits, slot_of, reduce: see `plan_steps`.
        turns: by unit, whether the unit is streamed; the others are resident.

    Attributes:
        visits: see above.
        log: units visited so far, those out of order included. Backward is planned from the log.
        used: the units that this rank has really used, in order.
        has_requests: ranks have requested units after the program was over.
        released: all visits before this one are released.
    """

    def __init__(self, visits: Sequence[int], slot_of: Sequence[int], turns: Sequence[bool], *, reduce: bool) -> None:
        self.visits = tuple(visits)
        self.log: list[int] = []
        self.used: list[int] = []
        self.has_requests = False
        self.released = 0
        self._has_inner_uses = False  # which keep their places in the log
        self._turns = turns
        self._current: int | None = None  # the unit that was asked for last
        self._steps = plan_steps(self.visits, slot_of, reduce=reduce)
        self._issued_steps = 0
        self._is_outside = True  # the unit that was asked for last is out of order

    def reach(self, unit: int) -> list[Op]:
        """This rank uses `unit` now, so the visit of another unit is over.

        Returns:
            The operations that have become possible, `unit`'s all-gather included.
        """
        self._note_use(unit)
        if self._current == unit:
            return []
        visit = self.find(unit)
        if visit is None and not self._turns[unit] and unit in self.visits:
            return []  # resident, and all-gathered before
        self._current = unit
        if visit is not None:
            self._is_outside = False
            return self.release_before(visit)
        ops = [] if self._is_outside else self.release_before(self.released + 1)
        self._is_outside = True
        self.log.append(unit)
        return ops

    def is_out_of_order(self, unit: int) -> bool:
        """Whether `unit`, which is used now, has no visit left in the program, and its weights are not in place."""
        is_there = self._current == unit or self.find(unit) is not None
        return not is_there and (self._turns[unit] or unit not in self.visits)

    def add_request(self, unit: int) -> None:
        """The program is over, and all ranks all-gather `unit`, because a rank has requested it."""
        self.log.append(unit)
        self.has_requests = True

    def take_order(self, order: Iterable[int]) -> None:
        """Let backward visit each unit once, in `order`, which ranks have learnt from this pass.

        Without this, a unit that was also requested is in the log twice, and its gradients leave their slot until the
        second visit. The log also begins with the resident units.

        Args:
            order: contains the order of units of each rank as a subsequence.
        """
        if not self._has_inner_uses:
            self.log = [unit for unit in order if unit in self.visits]

    def reach_requested(self, unit: int) -> None:
        """This rank uses `unit` now, the unit that was requested last."""
        self._note_use(unit)
        self._current = unit
        self._is_outside = True

    def read(self, unit: int, *, is_inside: bool) -> None:
        """Note that weights of the resident `unit` are read. No visit is over.

        Only a read before the first visit counts as out of order: backward would reach it last.

        Args:
            unit: the unit whose weights are read.
            is_inside: a running layer reads the weights, so that layer's backward makes a part of `unit`'s gradients.
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
            self._has_inner_uses = True

    def _note_use(self, unit: int) -> None:
        if self.used[-1:] != [unit]:
            self.used.append(unit)

    def find(self, unit: int) -> int | None:
        """The next visit of `unit` that is not released; None if there is none."""
        left = (visit for visit in range(self.released, len(self.visits)) if self.visits[visit] == unit)
        return next(left, None)

    def release_before(self, visit: int) -> list[Op]:
        """Release all visits before `visit`.

        Returns:
            The operations that have become possible, in the order in which to issue them.
        """
        if visit > self.released:
            self.log.extend(self.visits[self.released : visit])
            self.released = visit
        ops = [op for step in self._steps[self._issued_steps : self.released + 1] for op in step]
        self._issued_steps = max(self._issued_steps, self.released + 1)
        return ops

    def finish(self) -> list[Op]:
        """The pass is over: the operations that are left."""
        return self.release_before(len(self.visits))
