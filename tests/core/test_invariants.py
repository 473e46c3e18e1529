"""What the engine keeps to where numbers alone do not show it: bound units, collectives under way, state left behind.

See `tests.mutants`: each of these notices a change to the engine that all other tests let live.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard.comm.streams import Collective, Fence, Observer, StepEvent, StreamName
from streamshard.core.engine import Engine
from streamshard.core.slots import WeightSlot
from streamshard.core.unit_grads import GradState
from tests.adversary import make_adversarial
from tests.models import Layer, stack_of, vector_batch
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    engine_inside,
    full_grads,
    heard_collectives,
    sharded_model,
    stack_step,
)
from tests.scenarios import BF16, PRECISIONS, SCENARIOS, RoutedStack, over_sockets, sharded

SLOT_EACH: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}


def _call(context: RankContext, step: int) -> Call:
    return Call(step, context.rank, context.world_size, 1.0)


class Trouble(Exception):
    """What the tests raise."""


class Stop(BaseException):
    """Something like KeyboardInterrupt."""


class _Stopping(Observer):
    """Is where `Stop` comes from."""

    def __init__(self, moment: StepEvent) -> None:
        self._moment = moment

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        if moment is self._moment:
            raise Stop


class _Checks(Observer):
    """At every event a bound unit has its weights in its slot, and backward is in one block at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recomputed: WeightSlot | None = None  # of the layer whose backward follows

    def on_record(self, fence: Fence) -> None:
        """What was recomputed is in its slot until backward has been there."""
        if self._recomputed is not None:
            assert fence is not self._recomputed.released, f"{fence.what} is released before the backward"
        self._check(f"a point for rule {fence.rule} of {fence.what}")

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        self._check(f"a wait for rule {fence.rule} of {fence.what}")

    def on_event(self, moment: StepEvent, unit: int | None) -> None:
        """Some of these begin or end what is checked."""
        if moment is StepEvent.RECOMPUTATION_ENDS and unit is not None:
            self._recomputed = self._engine.units[unit].weight_slot
        elif moment in (StepEvent.BACKWARD_BEGINS, StepEvent.BACKWARD_ENDS):
            self._recomputed = None
        self._check(moment.name)
        if moment is StepEvent.GRAD_WRITTEN:
            bound = [other.name for other in self._engine.units[1:] if other.is_bound and other.is_streamed]
            assert len(bound) <= 1, f"{bound} are bound where unit {unit} has a gradient"

    def _check(self, when: str) -> None:
        for unit in self._engine.units:
            if unit.is_bound:
                assert unit.weight_slot.content == unit.index, f"{unit.name} is bound at {when}, but not in its slot"


def _assert_at_rest(engine: Engine) -> None:
    """Assert that no state of a pass or backward is left."""
    assert engine.phase is None
    assert not engine.reductions.is_open
    _assert_units_at_rest(engine)


def _assert_units_at_rest(engine: Engine) -> None:
    for unit in engine.units:
        assert not unit.is_bound, unit.name
        assert unit.grads.state is GradState.GIVEN and unit.grads.slot.content is None, unit.name
        assert not any(param.is_used or param.is_left for param in unit.params), unit.name


@on_ranks(2)
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_bound_units_are_in_their_slots_and_nothing_is_left_behind(context: RankContext, scenario: str) -> None:
    """At each event of each way of training, and after it."""
    model: Any = sharded(scenario, FP32)
    engine = engine_inside(model)
    for number in range(2):
        with engine.streams.observed_by(_Checks(engine)):
            SCENARIOS[scenario].step(model, _call(context, number))
        _assert_at_rest(engine)
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("sockets", [False, True], ids=["shared memory", "sockets"])
def test_no_all_gather_is_pending_when_weights_are_cast_or_gathered_again(context: RankContext, sockets: bool) -> None:
    """Layers that a rank has skipped were gathered all the same: its part is still being sent, or its slot written."""
    scenario = "evaluation between steps"
    with over_sockets() if sockets else contextlib.nullcontext():
        model = sharded(scenario, BF16)
    engine = engine_inside(model)
    checks = []

    class _Checks(Observer):
        def on_collective(self, stream: Any, collective: Collective, tag: int | None, reads: Any, writes: Any) -> None:
            if collective is Collective.ALL_GATHER and tag is not None and tag < len(engine.units):
                slot = engine.units[tag].weight_slot
                assert not slot.arrived.works and not slot.read.works, "a slot is cast and gathered into"
                checks.append(tag)

    with engine.streams.observed_by(_Checks()):
        for number in range(3):
            SCENARIOS[scenario].step(model, _call(context, number))
    assert len(checks) > 6 * len(engine.units)


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_whose_forward_fails_issues_the_same_collectives_as_the_others(
    context: RankContext, precision: str
) -> None:
    """Afterwards the ranks are in step."""
    model = sharded_model(precision=PRECISIONS[precision])
    stack_step(model, _call(context, 0))
    with torch.no_grad():
        model(vector_batch(0, context.rank))  # what a model writes to its weights is agreed on in the first ones
        if context.rank == 0:
            with pytest.raises(Trouble):
                _fail_in_forward(model, context, Trouble)
        else:
            model(vector_batch(1, context.rank))
    digests: list[Any] = engine_inside(model).ranks.gather_objects(
        "compare logs", engine_inside(model).ranks.recorder.log.digest
    )
    assert digests[0] == digests[1]
    stack_step(model, _call(context, 2))


def _fail_in_forward(model: Any, context: RankContext, kind: type[BaseException], before: Any = lambda: None) -> None:
    def fail(module: nn.Module, args: Any) -> None:
        before()
        raise kind

    hook = model.layers[1].register_forward_pre_hook(fail)
    try:
        model(vector_batch(1, context.rank))
    finally:
        hook.remove()


@on_ranks(2)
@pytest.mark.parametrize("what", ["interrupted", "the transport has failed"])
def test_an_interrupted_or_failed_rank_issues_nothing_more(context: RankContext, what: str) -> None:
    """Ctrl-C ends the forward at once; after a failed exchange the other ranks no longer answer."""
    model = sharded_model()
    stack_step(model, _call(context, 0))
    engine = engine_inside(model)
    counts = []

    def before() -> None:
        if what != "interrupted":
            engine.ranks.recorder.log.failure = "somebody has died"
        counts.append(engine.ranks.recorder.log.count)

    kind = Stop if what == "interrupted" else Trouble
    with pytest.raises(kind):
        _fail_in_forward(model, context, kind, before)
    assert engine.ranks.recorder.log.count == counts[0]
    engine.ranks.recorder.log.failure = None
    _assert_at_rest(engine)


@on_ranks(2)
def test_a_layer_frozen_after_its_gradient_waited_is_not_reduced(context: RankContext) -> None:
    """A layer whose gradient has waited, was reduced, and is frozen from then on."""
    model: Any = sharded_model(**SLOT_EACH)
    with model.no_sync():
        stack_step(model, _call(context, 0))
    stack_step(model, _call(context, 1))
    model.zero_grad()
    model.layers[1].requires_grad_(False)
    with heard_collectives(engine_inside(model)) as heard:
        stack_step(model, _call(context, 2))
    assert sorted(heard[Collective.REDUCE_SCATTER]) == [0, 1, 3, 4]


@on_ranks(1, 2)
@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{}, SLOT_EACH, {"weight_slots": 2}], ids=["default", "a slot each", "two slots"])
def test_weights_written_through_data_after_a_forward_inside_no_sync_are_used(
    context: RankContext, settings: dict[str, Any], precision: str, is_inside: bool
) -> None:
    """By the next forward. Contents of slots are reused inside only; an edit through ``.data`` leaves no version."""
    model = sharded_model(precision=PRECISIONS[precision], **settings)
    batch = vector_batch(0, context.rank)
    with torch.no_grad():
        with model.no_sync():
            before = model(batch)
            if is_inside:
                _zero(model)
                assert torch.equal(model(batch), torch.zeros_like(before))
        if not is_inside:
            _zero(model)  # once: at the end of the next pass contents are forgotten anyway
            assert torch.equal(model(batch), torch.zeros_like(before))


def _zero(model: Any) -> None:
    for param in model.parameters():
        param.data.zero_()


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, SLOT_EACH], ids=["default", "a slot each"])
def test_an_interrupt_while_a_failed_backward_is_left_leaves_nothing(
    context: RankContext, settings: dict[str, Any]
) -> None:
    """The next step is right: of what lies in grad slots nothing is taken for its own."""
    model = sharded_model(**settings)
    stack_step(model, _call(context, 0))
    model.zero_grad()
    engine = engine_inside(model)

    def fail(*_: Any) -> None:
        raise Trouble

    model.layers[2].register_full_backward_hook(fail)
    with pytest.raises(Trouble):
        stack_step(model, _call(context, 1))
    with engine.streams.observed_by(_Stopping(StepEvent.BACKWARD_ENDS)), pytest.raises(Stop):
        model(vector_batch(1, context.rank))
    assert engine.phase is None
    _assert_units_at_rest(engine)
    model.layers[2]._backward_hooks.clear()
    stack_step(model, _call(context, 2))
    assert_same(full_grads(model), _grads_of(context, 2, **settings), "gradients", EXACT)


def _grads_of(context: RankContext, *steps: int, **settings: Any) -> dict[str, Any]:
    model = sharded_model(**settings)
    for step in steps:
        stack_step(model, _call(context, step))
    return full_grads(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("precision", ["fp32", "16-bit wire"])
@pytest.mark.parametrize("settings", [{}, SLOT_EACH], ids=["default", "a slot each"])
def test_a_cleared_gradient_beside_kept_ones_begins_at_zero(
    context: RankContext, settings: dict[str, Any], precision: str
) -> None:
    """One of a unit's parameters loses its gradient between two micro-batches."""
    settings = {**settings, "precision": PRECISIONS[precision]}
    model = sharded_model(**settings)
    stack_step(model, _call(context, 0))
    cleared = "layers.1.linear.weight"
    model.get_parameter(cleared).grad = None
    stack_step(model, _call(context, 1))
    found = full_grads(model)
    assert_same({cleared: found[cleared]}, {cleared: _grads_of(context, 1, **settings)[cleared]}, "cleared")
    both = _grads_of(context, 0, 1, **settings)
    assert_same({**found, cleared: None}, {**both, cleared: None}, "kept", EXACT)


@on_ranks(1, 2)
@pytest.mark.parametrize("settings", [{}, SLOT_EACH], ids=["default", "a slot each"])
def test_a_gradient_frozen_between_micro_batches_stays_as_it_is(context: RankContext, settings: dict[str, Any]) -> None:
    """Its range of the grad slot has leftovers of other layers."""
    model = sharded_model(**settings)
    stack_step(model, _call(context, 0))
    wanted = {name: grad for name, grad in full_grads(model).items() if "bias" in name}
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    stack_step(model, _call(context, 1))
    found = full_grads(model)
    assert_same({name: found[name] for name in wanted}, wanted, "frozen")


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "16-bit wire"])
def test_gradients_that_wait_are_not_added_to_those_of_a_step_before(context: RankContext, precision: str) -> None:
    """The earlier step's gradients were used and cleared, and lie in the same memory."""
    settings = {**SLOT_EACH, "precision": PRECISIONS[precision]}
    found = []
    for steps in ((0,), ()):
        model = sharded_model(**settings)
        for step in steps:
            stack_step(model, _call(context, step))
            model.zero_grad()
        with model.no_sync():
            stack_step(model, _call(context, 1))
        stack_step(model, _call(context, 2))
        found.append(full_grads(model))
    assert_same(found[0], found[1], "gradients", EXACT)


class _WithoutBias(Layer):
    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        bias = self.linear.bias if self.has_bias else None
        return x + torch.tanh(nn.functional.linear(x, self.linear.weight, bias))


@on_ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "16-bit wire"])
def test_clearing_forgets_what_was_reduced_and_what_waits(context: RankContext, precision: str) -> None:
    """A reduced gradient, one that waits, and then both are cleared. What waits may lack some of its layer's."""
    settings = {**SLOT_EACH, "precision": PRECISIONS[precision]}
    for waits_with_bias in (True, False):
        model = sharded_model(stack_of(_WithoutBias), **settings)
        stack_step(model, _call(context, 0))
        with model.no_sync():
            for layer in model.layers:
                layer.has_bias = waits_with_bias
            stack_step(model, _call(context, 1))
            adamw(model).zero_grad()
        for layer in model.layers:
            layer.has_bias = True
        stack_step(model, _call(context, 2))
        fresh = sharded_model(stack_of(_WithoutBias), **settings)
        stack_step(fresh, _call(context, 2))
        assert_same(full_grads(model), full_grads(fresh), "gradients", EXACT)


@on_ranks(2)
def test_a_cleared_gradient_that_is_not_used_again_is_none(context: RankContext) -> None:
    """The layer ran only in a micro-batch whose gradients were cleared."""
    model = sharded_model(RoutedStack, **SLOT_EACH)
    with model.no_sync():
        stack_step(model, _call(context, 0))
        model.zero_grad()
    model.route = [0, 1, 3, 4]
    stack_step(model, _call(context, 1))
    assert {name for name, grad in full_grads(model).items() if grad is None} == {
        "layers.2.linear.weight",
        "layers.2.linear.bias",
    }


@on_ranks(2)
def test_a_layer_that_no_rank_ran_has_no_gradient_even_if_flags_arrive_late(context: RankContext) -> None:
    """The flags are read only after they have arrived."""
    model = sharded_model(RoutedStack)
    model.route = [0, 1, 3]
    with make_adversarial(model):
        stack_step(model, _call(context, 0))
        missing = {name.split(".")[1] for name, param in model.named_parameters() if param.grad is None}
    assert missing == {"2", "4"}


@on_ranks(2)
@pytest.mark.parametrize("route", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]], ids=["once", "twice"])
def test_gradients_in_parts_are_not_added_during_their_average(context: RankContext, route: list[int]) -> None:
    """Reentrant checkpoints, in two forwards, of layers that run twice: each recomputation delivers a part."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded_model(lambda: RoutedStack(reentrant=True), mesh=mesh)
    model.route = route
    with detect_races(model), make_adversarial(model):
        for number in range(3):
            outputs = [model(vector_batch(2 * number + k, context.rank).requires_grad_()) for k in range(2)]
            torch.cat(outputs).square().mean().backward()
            adamw(model).step()


@on_ranks(2)
def test_a_reduction_does_not_begin_in_scratch_that_another_still_uses(context: RankContext) -> None:
    """With a grad slot for each unit two reductions share scratch, which receives through sockets."""
    with over_sockets():
        model = sharded_model(**SLOT_EACH)
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
            stack_step(model, _call(context, step))
    assert begun > 2 * len({place for place, _ in under_way})
