"""Which programs there are, and how often what is tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.programs.model import Plan
from tests.programs.operations import Backward, Check, Clip, Direct, Edit, Forward, Freeze, NoSync, Step, ZeroGrad
from tests.programs.players import Operation


@dataclass(frozen=True)
class Program:
    """Operations, in order, and the model, ranks and settings that they are tried with.

    Attributes:
        is_tied: the first and the last layer share their weight.
        optimizer: "sgd" (with momentum) or "adamw".
        units: "layers", "layers and head", or "found": by StreamShard.
        sockets: between ranks, not shared memory.
        device_budget: of state, where the rest of it lies in host memory.
    """

    ops: tuple[Operation, ...] = ()
    ranks: int = 2
    depth: int = 3
    is_tied: bool = False
    optimizer: str = "sgd"
    units: str = "layers"
    weight_slots: int | str = 2
    grad_slots: str | None = None
    min_unit_size: int = 0
    align_pieces_to: int | str = 1
    sockets: bool = False
    device_budget: str | int = 0


PARTS = st.none() | st.integers(-1, 3)
PLACES = st.integers(0, 3)
FACTORS = st.sampled_from([0.5, 0.9, 1.1])
ROUTES = st.lists(PLACES, max_size=5).map(tuple)
PICKS = st.lists(PLACES, min_size=1, max_size=3).map(tuple)
SELDOM = st.sampled_from([False, False, False, False, True])


def _rarely(values: st.SearchStrategy[Any], otherwise: Any = None) -> st.SearchStrategy[Any]:
    """The latter, more often than not."""
    return st.integers(0, 4).flatmap(lambda number: values if number == 4 else st.just(otherwise))


PLANS = _rarely(st.builds(Plan, route=ROUTES), Plan()) | st.builds(
    Plan,
    route=_rarely(ROUTES),
    left_out=_rarely(st.tuples(*[st.integers(-1, 3)] * 3), ()),
    recomputes=_rarely(st.sampled_from(["once more", "reentrant", "all once more", "all reentrant"]), ""),
    seen=_rarely(PLACES),
    hooked=_rarely(PLACES),
    breaks_at=_rarely(_rarely(PLACES)),
)
FORWARDS = st.builds(
    Forward,
    plan=PLANS,
    has_graph=st.sampled_from([True, True, True, False]),
    is_kept=st.sampled_from([True, True, True, False]),
    raises_in=_rarely(_rarely(PLACES)),
)
BACKWARDS = st.builds(Backward, picks=PICKS, retains=SELDOM)
STEPS = st.tuples(st.just(Step()), st.builds(ZeroGrad, to_none=st.booleans(), by_optimizer=st.booleans()))
FREEZES = st.builds(Freeze, part=PARTS, name=st.sampled_from([None, "weight", "bias"]), trains=st.booleans())

# What is tried alone, and how often: one line for each.
OTHERS: Sequence[tuple[int, st.SearchStrategy[Operation]]] = [
    (3, st.builds(ZeroGrad, part=PARTS, to_none=st.booleans(), by_optimizer=st.booleans())),
    (5, st.just(NoSync())),
    (5, FREEZES),
    (3, st.builds(Direct, layer=PLACES)),
    (3, st.builds(Clip, by_model=st.booleans())),
    (3, st.builds(Edit, part=PARTS, factor=FACTORS)),
    (3, st.builds(Check, has_gradients=st.booleans())),
]
EACH = [number for number, (weight, _) in enumerate(OTHERS) for _ in range(weight)]


@st.composite
def _phrases(draw: st.DrawFn) -> tuple[Operation, ...]:
    """One operation, or a few that make sense one after another. By number, as `one_of` would weigh them alike."""
    kind = draw(st.integers(0, 15))
    if kind < 6:
        return (draw(OTHERS[draw(st.sampled_from(EACH))][1]),)
    if kind < 8:
        return (draw(FORWARDS),)
    if kind < 10:
        return (draw(BACKWARDS),)
    if kind < 11:
        return draw(STEPS)
    if kind < 12:
        return draw(FORWARDS), draw(BACKWARDS)
    if kind < 13:  # two losses of one forward
        first, second = Backward(picks=(draw(PLACES),), retains=True), Backward(picks=(draw(PLACES),))
        return Forward(plan=Plan(seen=draw(PLACES), route=draw(_rarely(ROUTES)))), first, second
    if kind < 14:
        return draw(FORWARDS), draw(FREEZES), draw(BACKWARDS)
    return draw(FORWARDS), draw(BACKWARDS), *draw(STEPS)


@st.composite
def programs(draw: st.DrawFn, longest: int = 16) -> Program:
    """Any program of up to `longest` phrases."""
    at_least = draw(st.sampled_from([1, longest // 4, longest // 2]))
    ops = [op for phrase in draw(st.lists(_phrases(), min_size=at_least, max_size=longest)) for op in phrase]
    slots: st.SearchStrategy[Any] = st.sampled_from([2, 3, "all"])
    depth = draw(st.integers(1, 4))
    units = ["layers", "layers", "layers and head", "found" if depth > 1 else "layers"]  # a layer alone is not found
    return Program(
        ops=tuple(ops),
        ranks=draw(st.sampled_from([2, 2, 2, 3])),
        depth=depth,
        is_tied=draw(st.sampled_from([False, False, True])),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        units=draw(st.sampled_from(units)),
        weight_slots=draw(slots),
        grad_slots=draw(st.sampled_from([None, None, "all"])),
        min_unit_size=draw(st.sampled_from([0, 0, 1500])),
        align_pieces_to=draw(_rarely(st.just(4), 1)),
        sockets=draw(st.booleans()),
        device_budget=draw(st.sampled_from([0, "9KB"])),
    )
