"""The states of gradients and slots: which transitions there are, and that no other one goes unnoticed."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest

from streamshard import StreamShard
from streamshard.core.slots import WEIGHT_TRANSITIONS, WeightSlot, WeightState
from streamshard.core.unit_grads import GRAD_TRANSITIONS, GradState, UnitGrads
from streamshard.errors import StateError
from tests import scenarios
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, engine_inside


@on_ranks(1)
def test_each_pair_of_states_is_a_transition_or_raises(context: RankContext) -> None:
    """Of a unit's gradients and of a weight slot."""
    unit = engine_inside(StreamShard(Stack(), precision=FP32)).units[1]
    weights, grads = unit.weight_slot, unit.grads
    machines: list[tuple[Any, Any, Any, Any]] = [
        (GradState, GRAD_TRANSITIONS, grads, grads.move),
        (WeightState, WEIGHT_TRANSITIONS, weights, lambda state: weights.move(state, 1)),
    ]
    for states, table, owner, move in machines:
        assert set(table) == set(states)
        for before, after in itertools.product(states, states):
            owner.state = before
            if after in table[before]:
                move(after)
                assert owner.state is after
            else:
                with pytest.raises(StateError, match=before.name):
                    move(after)
                assert owner.state is before


class _Walked:
    """The attribute ``state`` of a class: notes each change in `seen`."""

    def __init__(self, seen: set[tuple[Any, Any]]) -> None:
        self.seen = seen

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__["state"]

    def __set__(self, owner: Any, state: Any) -> None:
        self.seen.add((owner.__dict__.get("state", state), state))
        owner.__dict__["state"] = state


@on_ranks(2)
def test_training_takes_the_transitions_of_the_tables(context: RankContext) -> None:
    """All of them, and no other ones. A backward that fails discards gradients from any state."""
    tables: dict[type, Any] = {UnitGrads: GRAD_TRANSITIONS, WeightSlot: WEIGHT_TRANSITIONS}
    seen: dict[type, set[tuple[Any, Any]]] = {kind: set() for kind in tables}
    with contextlib.ExitStack() as stack:
        for kind in tables:
            stack.enter_context(mock.patch.object(kind, "state", _Walked(seen[kind]), create=True))
        for number, scenario in enumerate(scenarios.SCENARIOS):
            settings = ({}, {"weight_slots": "all", "grad_slots": "all"})[number % 2]
            scenarios.train(scenarios.sharded(scenario, scenarios.BF16, **settings), scenario, context)
    for kind, table in tables.items():
        wanted = {(before, after) for before, afters in table.items() for after in afters}
        assert {pair for pair in seen[kind] - wanted if pair[0] is not pair[1]} == set()
        assert wanted - seen[kind] == set(), sorted(wanted - seen[kind])
