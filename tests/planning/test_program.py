"""The order of collectives: the same for every rank, whatever a rank skips; no slot is taken before it is free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.planning.memory import SlotPlan
from streamshard.planning.program import Op, Schedule, is_part_of, join_orders, merge_order, plan_steps

UNITS = 7
visits_lists = st.lists(st.integers(0, UNITS - 1), max_size=12)
slots_lists = st.lists(st.integers(0, 3), min_size=UNITS, max_size=UNITS)
streamed_lists = st.lists(st.booleans(), min_size=UNITS, max_size=UNITS)


def plan_of(
    slots: Sequence[int], is_streamed: Sequence[bool] = (), *, grads_take_weight_slots: bool = True
) -> SlotPlan:
    return SlotPlan(tuple(is_streamed), tuple(slots), (), (), grads_take_weight_slots, False, False)


# -- the plan -----------------------------------------------------------------------------------------------------


@given(visits_lists, slots_lists, st.booleans())
def test_steps_have_every_operation_once_and_as_early_as_the_rules_allow(
    visits: list[int], slots: list[int], grads_take_weight_slots: bool
) -> None:
    """Gathers in order, once the slot's earlier visits are released (rule 2); reductions after last visits (rule 4)."""
    steps = plan_steps(visits, plan_of(slots, grads_take_weight_slots=grads_take_weight_slots), reduce=True)
    assert len(steps) == len(visits) + 1
    gathers = [(k, op.unit) for k, ops in enumerate(steps) for op in ops if not op.is_reduction]
    assert [unit for _, unit in gathers] == visits
    free_at = [
        max((k + 1 for k in range(visit) if slots[visits[k]] == slots[unit]), default=0)
        for visit, unit in enumerate(visits)
    ]
    assert [step for step, _ in gathers] == list(accumulate(free_at, max))
    reductions = {op.unit: k for k, ops in enumerate(steps) for op in ops if op.is_reduction}
    assert sum(op.is_reduction for ops in steps for op in ops) == len(set(visits))
    assert reductions == {unit: k + 1 for k, unit in enumerate(visits)}
    for ops in steps:
        assert ops == sorted(ops, key=lambda op: op.is_reduction is not grads_take_weight_slots)
    gathers_only = [[op for op in ops if not op.is_reduction] for ops in steps]
    assert plan_steps(visits, plan_of(slots), reduce=False) == gathers_only


# -- the schedule -------------------------------------------------------------------------------------------------


@given(visits_lists, slots_lists, streamed_lists, st.booleans(), st.data())
def test_ranks_that_skip_visits_issue_the_same_operations_in_the_same_order(
    visits: list[int], slots: list[int], is_streamed: list[bool], reduce: bool, data: st.DataObject
) -> None:
    """Each exactly once, whatever is asked for and released, in whatever portions."""
    schedule = Schedule(visits, plan_of(slots, is_streamed), reduce=reduce)
    issued: list[Op] = []
    for unit in data.draw(st.lists(st.integers(0, UNITS - 1), max_size=15), label="used"):
        issued += schedule.reach(unit)
    issued += schedule.advance_to()
    assert issued == [op for ops in plan_steps(visits, plan_of(slots), reduce=reduce) for op in ops]
    assert schedule.advance_to() == []


READS: dict[str, tuple[list[int], int, bool, list[int]]] = {  # units that ran, what is read, by a layer; the log
    "before its turn": ([0], 4, False, [4, 0, 1, 2, 3, 4]),
    "in its turn": ([0, 1, 2, 3], 4, False, [0, 1, 2, 3, 4]),
    "after its turn": ([0, 1, 2], 0, False, [0, 1, 2, 3, 4]),
    "by the layer before its turn": ([0, 1, 2, 3], 4, True, [0, 1, 2, 4, 3, 4]),
    "by a layer, after its turn": ([0, 1], 0, True, [0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("what", READS)
def test_a_unit_that_is_read_before_its_visit_is_reduced_after_its_readers(what: str) -> None:
    """Backward comes by there later. Reading it again changes nothing, and the order is learnt from the first."""
    ran, read, is_inside, log = READS[what]
    schedule = Schedule([0, 1, 2, 3, 4], plan_of([2, 0, 1, 0, 3], [False, True, True, True, False]), reduce=False)
    for unit in ran:
        schedule.reach(unit)
    for _ in range(3):
        schedule.read(read, is_inside=is_inside)
    schedule.advance_to()
    assert schedule.log == log
    before, last = ran[: len(ran) - is_inside], ran[len(ran) - is_inside :]
    assert schedule.used == [*before, *([] if before[-1:] == [read] else [read]), *last]


def test_a_unit_that_a_rank_requests_is_visited_once_more() -> None:
    """All ranks have issued the rest of the program, and have all-gathered the unit."""
    schedule = Schedule([0, 1, 2], plan_of([2, 0, 1], [False, True, True]), reduce=False)
    for unit in (0, 2):
        schedule.reach(unit)
    assert schedule.is_out_of_order(1)
    schedule.advance_to()
    schedule.add_request(1)
    assert schedule.reach(1) == []
    assert (schedule.log, schedule.used) == ([0, 1, 2, 1], [0, 2, 1])


# -- learning the order -------------------------------------------------------------------------------------------


def test_an_unused_unit_is_placed_early_enough_in_the_program() -> None:
    """Streamed units: after the registered predecessor, or before all streamed ones. Resident: after the first."""
    is_streamed = [False, True, True, True, True]
    assert merge_order([0, 3, 1, 4], is_streamed) == (0, 3, 1, 2, 4)
    assert merge_order([0, 3], is_streamed) == (0, 1, 2, 3, 4)
    # What takes images, and the layers 3 and 4 for text, with embedding 5 and head 6: this batch has no images.
    is_streamed = [False, True, True, True, True, False, False, False]
    assert merge_order([0, 5, 3, 4, 6], is_streamed) == (0, 7, 5, 1, 2, 3, 4, 6)


def test_orders_of_use_of_all_ranks_are_joined_into_one() -> None:
    """Each rank has used a part of the units. Units that no rank used together keep their place in the program."""
    program = (0, 1, 2, 3, 4, 5)
    assert join_orders([], program) == ()
    assert join_orders([(0, 4, 5), (0, 2, 1, 3, 4, 5)], program) == (0, 2, 1, 3, 4, 5)
    assert join_orders([(0, 2, 4), (0, 1, 3)], program) == (0, 1, 2, 3, 4)
    assert join_orders([(0, 4, 1), (0, 3, 4)], program) == (0, 3, 4, 1)
    assert join_orders([(0, 1, 2, 1), (1, 1), (2, 1)], program) is None  # which of the two uses of 1?
    assert join_orders([(0, 1, 2, 1), (1, 1), (1, 2)], program) == (0, 1, 2, 1)
    assert join_orders([(0, 1, 2), (0, 2, 1)], program) is None
    assert join_orders([(1, 2), (2, 3), (3, 1)], program) is None


@given(
    st.lists(st.integers(0, UNITS - 1), max_size=12),
    st.lists(st.sets(st.integers(0, UNITS - 1)), min_size=1, max_size=4),
)
def test_parts_of_an_order_are_parts_of_what_they_make(order: list[int], used: list[set[int]]) -> None:
    """Units that are skipped are skipped altogether, so each use is the same one in all."""
    parts = [[unit for unit in order if unit in units] for units in used]
    joined = join_orders(parts, range(UNITS))
    assert joined is not None
    assert all(is_part_of(part, joined) for part in parts)
    assert sorted(joined) == sorted(unit for unit in order if any(unit in units for units in used))
    assert not is_part_of([*joined, 0], joined)
