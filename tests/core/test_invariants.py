"""What the engine keeps to where numbers alone do not show it: collectives under way, state left behind.

Each of these notices a change of the engine that all other tests let live (`tests.mutants`).
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard.comm.streams import Collective, Observer, StepPart
from streamshard.core.engine import Engine
from streamshard.core.slots import WEIGHT_TRANSITIONS, WeightState
from streamshard.core.unit_grads import GRAD_TRANSITIONS, GradState
from streamshard.errors import StateError
from tests.compare import EXACT, assert_same, full_grads
from tests.counts import engine_inside, heard_collectives
from tests.faults import Stop, Trouble, failing
from tests.models import Layer, stack_of, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import ALL_SLOTS, adamw, sharded_model, stack_step
from tests.scenarios import BF16, PRECISIONS, SCENARIOS, over_sockets, sharded


def _assert_at_rest(engine: Engine) -> None:
    """Assert that no state of a pass or backward is left in units."""
    assert engine.phase is None
    for unit in engine.units:
        assert not unit.is_bound, unit.name
        assert unit.grads.state is GradState.GIVEN and unit.grads.slot.content is None, unit.name
        assert not any(param.is_used or param.is_left for param in unit.params), unit.name


class _Moments(Observer):
    """Of a step, in the host's order: a unit's all-gather (G), forward (F), backward (B) and reduction (R) begin."""

    LETTERS = dict(
        zip((StepPart.ALL_GATHER, StepPart.FORWARD, StepPart.BACKWARD, StepPart.REDUCTION), "GFBR", strict=True)
    )

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        if begins and unit:  # without the root unit, 0
            self.seen.append(f"{self.LETTERS[part]}{unit}")


MOMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "two slots": ({}, "G1 G2 F1 F2 G3 F3 G4 F4 | B4 B3 R4 G2 B2 R3 G1 B1 R2 R1"),
    "three slots": ({"weight_slots": 3}, "G1 G2 G3 F1 F2 G4 F3 F4 | B4 B3 R4 G1 B2 R3 B1 R2 R1"),
    "gradients have slots of their own": (
        {"weight_slots": 2, "grad_slots": "all"},
        "G1 G2 F1 F2 G3 F3 G4 F4 | B4 B3 G2 R4 B2 G1 R3 B1 R2 R1",
    ),
    "two layers in a unit": (
        {"min_unit_size": 2000},
        "G1 G2 F1 F1 F2 G3 F2 F3 G4 F3 F4 F4 | B4 B3 R4 G2 B2 R3 G1 B1 R2 R1",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("what", MOMENTS)
def test_collectives_begin_as_soon_as_their_slot_is_free(context: RankContext, what: str) -> None:
    settings, wanted = MOMENTS[what]
    model = sharded_model(stack_of(Layer, 8 if "min_unit_size" in settings else 4), **settings)
    moments = _Moments()
    for _ in range(3):  # the last one knows the order of layers
        moments.seen.clear()
        with engine_inside(model).streams.observed_by(moments):
            loss = model(vector_batch(0, context.rank)).sum()
            moments.seen.append("|")
            loss.backward()
    assert " ".join(moments.seen) == wanted


@on_ranks(2)
@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
def test_no_all_gather_is_pending_when_weights_are_cast_or_gathered_again(context: RankContext, sockets: bool) -> None:
    """Layers that a rank has skipped were gathered all the same: its part is still being sent, or its slot written."""
    scenario = "evaluation between steps"
    with over_sockets() if sockets else contextlib.nullcontext():
        model = sharded(scenario, BF16)
    engine, checks = engine_inside(model), []

    class _Checks(Observer):
        def on_collective(self, stream: Any, collective: Collective, tag: int | None, reads: Any, writes: Any) -> None:
            if collective is Collective.ALL_GATHER and tag is not None and tag < len(engine.units):
                slot = engine.units[tag].weight_slot
                assert not slot.arrived.works and not slot.shard_read.works, "a slot is cast and gathered into"
                checks.append(tag)

    with engine.streams.observed_by(_Checks()):
        for number in range(3):
            SCENARIOS[scenario].step(model, context.call(number))
    assert len(checks) > 6 * len(engine.units)


@on_ranks(2)
def test_a_rank_whose_forward_fails_issues_the_same_collectives_as_the_others(context: RankContext) -> None:
    """Afterwards the ranks are in step."""
    model = sharded_model(precision=BF16)
    stack_step(model, context.call(0))
    with torch.no_grad():
        model(vector_batch(0, context.rank))  # what a model writes to its weights is agreed on in the first ones
        if context.rank == 0:
            with pytest.raises(Trouble), failing(model.layers[1], backward=False):
                model(vector_batch(1, context.rank))
        else:
            model(vector_batch(1, context.rank))
    ranks = engine_inside(model).ranks
    assert len({*map(str, ranks.gather_objects("compare logs", ranks.recorder.log.digest))}) == 1
    stack_step(model, context.call(2))


@on_ranks(2)
@pytest.mark.parametrize("what", ["interrupted", "the transport has failed"])
def test_an_interrupted_or_failed_rank_issues_nothing_more(context: RankContext, what: str) -> None:
    """Ctrl-C ends the forward at once; after a failed exchange the other ranks no longer answer."""
    model = sharded_model()
    stack_step(model, context.call(0))
    engine = engine_inside(model)
    counts = []

    def note(*_: Any) -> None:
        if what != "interrupted":
            engine.ranks.recorder.log.failure = "somebody has died"
        counts.append(engine.ranks.recorder.log.count)

    kind = Stop if what == "interrupted" else Trouble
    model.layers[1].register_forward_pre_hook(note)
    with pytest.raises(kind), failing(model.layers[1], kind, backward=False):
        model(vector_batch(1, context.rank))
    assert engine.ranks.recorder.log.count == counts[0]
    engine.ranks.recorder.log.failure = None
    assert not engine.reductions.is_open
    _assert_at_rest(engine)


@on_ranks(2)
def test_a_layer_frozen_after_its_gradient_waited_is_not_reduced(context: RankContext) -> None:
    """A layer whose gradient has waited, was reduced, and is frozen from then on."""
    model = sharded_model(**ALL_SLOTS)
    with model.no_sync():
        stack_step(model, context.call(0))
    stack_step(model, context.call(1))
    model.zero_grad()
    model.layers[1].requires_grad_(False)
    with heard_collectives(engine_inside(model)) as heard:
        stack_step(model, context.call(2))
    assert sorted(heard[Collective.REDUCE_SCATTER]) == [0, 1, 3, 4]


@on_ranks(1, 2)
@pytest.mark.parametrize("where", ["inside", "behind", "summoned inside"])
@pytest.mark.parametrize("settings", [{}, ALL_SLOTS], ids=["default", "a slot each"])
def test_weights_written_through_data_after_a_forward_inside_no_sync_are_used(
    context: RankContext, settings: dict[str, Any], where: str
) -> None:
    """By the next forward. Contents of slots are reused inside only; an edit through ``.data`` leaves no version."""
    for name in ("fp32", "bf16"):
        model = sharded_model(precision=PRECISIONS[name], **settings)
        batch = vector_batch(0, context.rank)
        with torch.no_grad():
            with model.no_sync():
                model(batch)
                if where != "behind":
                    _assert_zeros_are_used(model, batch, summons=where == "summoned inside")
            if where == "behind":  # once: at the end of the next pass contents are forgotten anyway
                _assert_zeros_are_used(model, batch)


def _assert_zeros_are_used(model: Any, batch: Tensor, *, summons: bool = False) -> None:
    with model.summon_full_params() if summons else contextlib.nullcontext():
        for param in model.parameters():
            param.data.zero_()
    assert not model(batch).any()


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, ALL_SLOTS], ids=["default", "a slot each"])
def test_an_interrupt_behind_a_failed_backward_leaves_nothing(context: RankContext, settings: dict[str, Any]) -> None:
    """The next step is right: of what lies in grad slots nothing is taken for its own."""
    model = sharded_model(**settings)
    stack_step(model, context.call(0))
    model.zero_grad()
    engine = engine_inside(model)
    with pytest.raises(Trouble), failing(model.layers[2]):
        stack_step(model, context.call(1))

    class _Stopping(Observer):
        def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
            if part is StepPart.BACKWARD and not begins:
                raise Stop

    with engine.streams.observed_by(_Stopping()), pytest.raises(Stop):
        model(vector_batch(1, context.rank))
    _assert_at_rest(engine)
    stack_step(model, context.call(2))
    assert_same(full_grads(model), _grads_of(context, 2, **settings), "gradients", EXACT)


def _grads_of(context: RankContext, *steps: int, **settings: Any) -> dict[str, Any]:
    model = sharded_model(**settings)
    for step in steps:
        stack_step(model, context.call(step))
    return full_grads(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("settings", [{}, ALL_SLOTS], ids=["default", "a slot each"])
def test_a_cleared_gradient_beside_kept_ones_begins_at_zero(context: RankContext, settings: dict[str, Any]) -> None:
    """One of a unit's parameters loses its gradient between two micro-batches."""
    settings = {**settings, "precision": PRECISIONS["16-bit wire"]}
    model = sharded_model(**settings)
    stack_step(model, context.call(0))
    cleared = "layers.1.linear.weight"
    model.get_parameter(cleared).grad = None
    stack_step(model, context.call(1))
    found = full_grads(model)
    assert_same({cleared: found[cleared]}, {cleared: _grads_of(context, 1, **settings)[cleared]}, "cleared")
    both = _grads_of(context, 0, 1, **settings)
    assert_same({**found, cleared: None}, {**both, cleared: None}, "kept", EXACT)


@on_ranks(2)
def test_gradients_that_wait_are_not_added_to_those_of_a_step_before(context: RankContext) -> None:
    """The earlier step's gradients were used and cleared, and lie in the same memory."""
    settings = {**ALL_SLOTS, "precision": PRECISIONS["16-bit wire"]}
    found = []
    for has_stepped in (True, False):
        model = sharded_model(**settings)
        if has_stepped:
            stack_step(model, context.call(0))
            model.zero_grad()
        with model.no_sync():
            stack_step(model, context.call(1))
        stack_step(model, context.call(2))
        found.append(full_grads(model))
    assert_same(found[0], found[1], "gradients", EXACT)


class _WithoutBias(Layer):
    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        bias = self.linear.bias if self.has_bias else None
        return x + torch.tanh(nn.functional.linear(x, self.linear.weight, bias))


@on_ranks(2)
def test_clearing_forgets_what_was_reduced_and_what_waits(context: RankContext) -> None:
    """A reduced gradient, one that waits, and then both are cleared. What waits may lack some of its layer's."""
    settings = {**ALL_SLOTS, "precision": PRECISIONS["16-bit wire"]}
    for waits_with_bias in (True, False):
        model = sharded_model(stack_of(_WithoutBias), **settings)
        stack_step(model, context.call(0))
        with model.no_sync():
            for layer in model.layers:
                layer.has_bias = waits_with_bias
            stack_step(model, context.call(1))
            adamw(model).zero_grad()
        for layer in model.layers:
            layer.has_bias = True
        stack_step(model, context.call(2))
        fresh = sharded_model(stack_of(_WithoutBias), **settings)
        stack_step(fresh, context.call(2))
        assert_same(full_grads(model), full_grads(fresh), "gradients", EXACT)


@on_ranks(2)
def test_a_reduction_does_not_begin_in_scratch_that_another_still_uses(context: RankContext) -> None:
    """With a grad slot for each unit two reductions share scratch, which receives through sockets."""
    with over_sockets():
        model = sharded_model(**ALL_SLOTS)
    transport = engine_inside(model).ranks.transport
    start, begun = transport.start_reduce, 0
    under_way: list[tuple[int, mock.Mock]] = []

    def started(reduction: Any) -> Any:
        nonlocal begun
        begun += 1
        scratch = reduction.scratch.data_ptr()
        assert not any(place == scratch and not work.wait.called for place, work in under_way)
        work = mock.Mock(wraps=start(reduction))
        under_way.append((scratch, work))
        return work

    with mock.patch.object(transport, "start_reduce", started):
        for step in range(2):
            stack_step(model, context.call(step))
    assert begun > 2 * len({place for place, _ in under_way})


@on_ranks(1)
def test_a_move_that_is_no_transition_raises(context: RankContext) -> None:
    """Of a unit's gradients and of slots."""
    unit = engine_inside(sharded_model()).units[1]
    weights, grads = unit.weight_slot, unit.grads
    machines: list[tuple[Any, Any, Any, Any]] = [
        (GradState, GRAD_TRANSITIONS, grads, grads.move),
        (WeightState, WEIGHT_TRANSITIONS, weights, lambda state: weights.move(state, 1)),
    ]
    for states, table, owner, move in machines:
        assert set(table) == set(states)
        before = owner.state
        with pytest.raises(StateError, match=before.name):
            move(next(state for state in states if state not in table[before]))
        assert owner.state is before
    grads.slot.content = 2
    with pytest.raises(StateError, match="with gradients of unit 2"):
        grads.slot.open(1)
