"""The order of collectives: the same for every rank, whatever a rank skips; no slot is taken before it is free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from streamshard.plan.program import Op, OpKind, Sweep, merge_order, plan_steps

UNITS = 7
visits_lists = st.lists(st.integers(0, UNITS - 1), max_size=12)
slots_lists = st.lists(st.integers(0, 3), min_size=UNITS, max_size=UNITS)


def _gathers(steps: Sequence[Sequence[Op]]) -> list[tuple[int, int]]:
    """(step, unit) of each gather in order: the j-th is for visit j."""
    return [(k, op.unit) for k, ops in enumerate(steps) for op in ops if op.kind is OpKind.GATHER]


# -- the plan -----------------------------------------------------------------------------------------------------


@given(visits_lists, slots_lists, st.booleans())
def test_every_visit_is_gathered_once_in_order_and_in_time(visits: list[int], slots: list[int], reduce: bool) -> None:
    """At the latest when it is asked for, which issues all steps up to its own."""
    steps = plan_steps(visits, slots, reduce=reduce)
    assert len(steps) == len(visits) + 1
    gathers = _gathers(steps)
    assert [unit for _, unit in gathers] == visits
    assert all(step <= visit for visit, (step, _) in enumerate(gathers))


@given(visits_lists, slots_lists, st.booleans())
def test_no_gather_is_planned_into_a_slot_whose_earlier_visit_is_not_released(
    visits: list[int], slots: list[int], reduce: bool
) -> None:
    """Rule 2: step k comes when all visits before k are released."""
    for visit, (step, unit) in enumerate(_gathers(plan_steps(visits, slots, reduce=reduce))):
        earlier = [k for k in range(visit) if slots[visits[k]] == slots[unit]]
        assert all(k < step for k in earlier)


@given(visits_lists, slots_lists)
def test_every_gather_is_planned_as_early_as_its_slot_and_the_order_allow(visits: list[int], slots: list[int]) -> None:
    """Prefetch: the step after its slot's latest visit, or that of the gather before it if that is later."""
    gathers = _gathers(plan_steps(visits, slots, reduce=True))
    free_at = [
        max((k + 1 for k in range(visit) if slots[visits[k]] == slots[unit]), default=0)
        for visit, unit in enumerate(visits)
    ]
    assert [step for step, _ in gathers] == list(accumulate(free_at, max))


@given(visits_lists, slots_lists)
def test_every_unit_is_reduced_once_right_after_its_last_visit(visits: list[int], slots: list[int]) -> None:
    """Rule 4: a unit used twice gets its gradients only with its last use."""
    steps = plan_steps(visits, slots, reduce=True)
    reductions = {op.unit: k for k, ops in enumerate(steps) for op in ops if op.kind is OpKind.REDUCE}
    assert sum(op.kind is OpKind.REDUCE for ops in steps for op in ops) == len(set(visits))
    assert reductions == {unit: k + 1 for k, unit in enumerate(visits)}


@given(visits_lists, slots_lists)
def test_a_forward_reduces_nothing(visits: list[int], slots: list[int]) -> None:
    """Its plan is the backward's without the reductions."""
    with_reductions = plan_steps(visits, slots, reduce=True)
    gathers_only = [[op for op in ops if op.kind is OpKind.GATHER] for ops in with_reductions]
    assert plan_steps(visits, slots, reduce=False) == gathers_only


def test_an_example_by_hand() -> None:
    """The edge unit and four blocks in two slots, backward: two gathers ahead, reductions behind the gathers."""
    gather, reduce = OpKind.GATHER, OpKind.REDUCE
    steps = plan_steps([4, 3, 2, 1, 0], [2, 0, 1, 0, 1], reduce=True)
    assert steps == [
        [Op(gather, 4), Op(gather, 3)],
        [Op(gather, 2), Op(reduce, 4)],
        [Op(gather, 1), Op(gather, 0), Op(reduce, 3)],
        [Op(reduce, 2)],
        [Op(reduce, 1)],
        [Op(reduce, 0)],
    ]


# -- the sweep ----------------------------------------------------------------------------------------------------


@given(visits_lists, slots_lists, st.booleans(), st.data())
def test_ranks_that_skip_visits_issue_the_same_operations_in_the_same_order(
    visits: list[int], slots: list[int], reduce: bool, data: st.DataObject
) -> None:
    """Each exactly once, whatever is asked for and released, in whatever portions."""
    sweep = Sweep(visits, slots, reduce=reduce)
    issued: list[Op] = []
    for unit in data.draw(st.lists(st.integers(0, UNITS - 1), max_size=15), label="used"):
        issued += sweep.reach(unit)
    issued += sweep.finish()
    assert issued == [op for ops in plan_steps(visits, slots, reduce=reduce) for op in ops]
    assert sweep.finish() == []


@given(visits_lists, slots_lists, st.data())
def test_being_asked_for_a_visit_issues_its_gather(visits: list[int], slots: list[int], data: st.DataObject) -> None:
    """And all before it."""
    sweep = Sweep(visits, slots, reduce=False)
    issued: list[Op] = []
    for unit in data.draw(st.lists(st.sampled_from(visits or [0]), max_size=15), label="used"):
        visit = sweep.find(unit)
        issued += sweep.reach(unit)
        if visit is not None:
            assert [op.unit for op in issued][: visit + 1] == visits[: visit + 1]
            assert visits[visit] == unit


@given(visits_lists, slots_lists, st.lists(st.integers(0, UNITS - 1), max_size=15))
def test_asking_again_for_the_same_unit_changes_nothing(visits: list[int], slots: list[int], used: list[int]) -> None:
    """It is one stay, in which any of the unit's layers may run, any number of times."""
    once, often = (Sweep(visits, slots, reduce=False) for _ in range(2))
    for unit in used:
        ops = once.reach(unit)
        assert often.reach(unit) == ops
        assert often.reach(unit) == []
    assert (often.finish(), often.log, often.used) == (once.finish(), once.log, once.used)


@given(visits_lists, slots_lists, st.lists(st.integers(0, UNITS - 1), max_size=15))
def test_a_unit_is_left_before_another_is_used(visits: list[int], slots: list[int], used: list[int]) -> None:
    """Also for one outside of the program: backward must see them in the order in which they ran."""
    sweep = Sweep(visits, slots, reduce=False)
    for unit in used:
        sweep.reach(unit)
    sweep.finish()
    places = iter(sweep.log)
    stays = [unit for place, unit in enumerate(used) if used[place - 1 : place] != [unit]]
    assert all(unit in places for unit in stays)


@given(visits_lists, slots_lists, st.integers(0, 12))
def test_a_released_visit_is_not_found_again(visits: list[int], slots: list[int], released: int) -> None:
    """The next one is, if there is one."""
    sweep = Sweep(visits, slots, reduce=False)
    sweep.release_before(min(released, len(visits)))
    for unit in range(UNITS):
        wanted = next((k for k in range(min(released, len(visits)), len(visits)) if visits[k] == unit), None)
        assert sweep.find(unit) == wanted


def test_the_log_has_what_was_passed_and_what_was_used_beside_the_program() -> None:
    """In order: backward is planned from it."""
    sweep = Sweep([0, 1, 2, 3], [0, 1, 0, 1], reduce=False)
    sweep.reach(1)
    sweep.reach(6)
    sweep.reach(0)  # its turn is over
    sweep.finish()
    assert sweep.log == [0, 1, 6, 0, 2, 3]
    assert sweep.used == [1, 6, 0]


# -- learning the order -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, UNITS - 1), max_size=12))
def test_merging_keeps_what_was_used_and_adds_each_of_the_rest_once(used: list[int]) -> None:
    """So that a rank which uses a skipped unit later finds the others taking part."""
    merged = merge_order(range(UNITS), used)
    assert [unit for unit in merged if unit in used] == used
    assert sorted(unit for unit in merged if unit not in used) == [u for u in range(UNITS) if u not in used]


def test_an_unused_unit_stands_behind_its_registered_predecessor() -> None:
    """Or first, if it is the first."""
    assert merge_order(range(5), [3, 1, 4]) == (0, 3, 1, 2, 4)
    assert merge_order(range(3), []) == (0, 1, 2)
