"""The race detector: silent about the engine as it is, and it names the rule of every wait that is taken away."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from streamshard import Precision, StreamShard
from streamshard.comm.streams import Collective, Fence, Rule, StreamName
from streamshard.planning.memory import Category
from tests.models import Stack, vector_batch
from tests.races import Race, RaceDetector, RaceError, detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, engine_inside
from tests.scenarios import BF16, dropping, sharded, train

PRECISIONS = {"fp32": FP32, "bf16": BF16}
COMPUTE, COMM = StreamName.COMPUTE, StreamName.COMM


# -- the engine with a wait taken away ----------------------------------------------------------------------------


_ELSEWHERE = (Rule.SHARDS_READ, Rule.HOST_COPIED)  # their waits have tests of their own


@on_ranks(2)
@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in _ELSEWHERE], ids=lambda rule: rule.name)
def test_the_detector_names_each_missing_rule(context: RankContext, rule: Rule) -> None:
    """It finds races of exactly that rule, on a buffer that the rule protects."""
    # Where gradients take the slots of their weights, rule 3 follows from rule 1: the reduction came before the gather.
    # Without rule 7 main grads would be freed while a reduction writes them.
    settings: dict[str, Any] = {"weight_slots": "all"} if rule is Rule.GRADS_DRAINED else {"keep_main_grads": True}
    for scenario, precision in (("plain", "fp32"), ("no_sync", "bf16")):
        model = sharded(scenario, PRECISIONS[precision], **settings)
        missing = f"missing: rule {rule.value} "
        with dropping(model, rule), pytest.raises(RaceError, match=missing), detect_races(model) as races:
            train(model, scenario, context)
        assert {race.rule for race in races.found} == {rule}
        assert {race.category for race in races.found} <= _PROTECTED[rule]


_PROTECTED = {
    Rule.WEIGHTS_ARRIVED: {Category.WEIGHT_SLOTS},
    Rule.SLOT_RELEASED: {Category.WEIGHT_SLOTS},
    Rule.GRADS_DRAINED: {Category.GRAD_SLOTS, Category.SCRATCH},
    Rule.GRADS_WRITTEN: {Category.WEIGHT_SLOTS, Category.MAIN_GRADS},
    Rule.SHARDS_WRITTEN: {Category.MAIN_WEIGHTS, Category.FLAGS},
    Rule.RESULTS_ARRIVED: {Category.MAIN_GRADS, Category.FLAGS},
}


def _races_without(context: RankContext, scenario: str, precision: Precision, *waits: Rule | str) -> list[Race]:
    model = sharded(scenario, precision, keep_main_grads=True)
    with dropping(model, *waits), detect_races(model, raise_at_exit=False) as races:
        train(model, scenario, context)
    return races.found


# -- what it says -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_race_names_buffer_bytes_operations_and_units(context: RankContext) -> None:
    """Enough to find the place without a debugger."""
    found = _races_without(context, "two layers", FP32, Rule.GRADS_WRITTEN)
    race = next(race for race in found if race.rule is Rule.GRADS_WRITTEN and race.buffer == "weight slot 0")
    numel = 16 * 16 + 16
    assert (race.start, race.stop) in {(0, 1024), (1024, 4 * numel)}  # weight or bias of the layer
    assert str(race) == (
        f"weight slot 0, bytes {race.start} to {race.stop}: aten._foreach_copy_.default writes on the "
        "compute stream, then reduce_scatter of 'layers.0' reads on the comm stream; missing: rule 4 (GRADS_WRITTEN)"
    )


# -- happens before ------------------------------------------------------------------------------------


@on_ranks(2)
def test_two_streams_a_write_and_common_bytes_make_a_race(context: RankContext) -> None:
    """Ranges of bytes count, not tensors. A fence orders what was before its record."""
    model = StreamShard(Stack(), precision=FP32)
    model(vector_batch(0, context.rank))
    detector = RaceDetector(engine_inside(model))
    slot = detector.engine.units[1].flat_params[0].weights
    fence = Fence(detector.engine.streams, Rule.SHARDS_WRITTEN, COMM, "bench")
    detector.on_collective(COMM, Collective.ALL_GATHER, None, (), (slot[60:64],))
    detector.on_record(fence)
    detector.on_collective(COMM, Collective.ALL_GATHER, None, (), (slot[64:128],))
    detector.on_wait(fence, fence.target)
    for view in (slot[:64], slot[128:], slot[64:64], slot[64:128].clone()):
        detector.on_operation(view, write=False, what="op")
        assert not detector.found
    for number, view in enumerate((slot[:65], slot[127:], slot[96:160].view(8, 8).t(), slot[0:200:100])):
        detector.on_operation(view, write=False, what=f"op {number}")
        assert len(detector.found) == number + 1


@on_ranks(2)
@pytest.mark.parametrize("passes_on", [True, False])
def test_a_wait_of_one_stream_orders_another_only_through_a_fence(context: RankContext, passes_on: bool) -> None:
    """Compute has waited for comm; the replica stream knows of it if compute tells."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = StreamShard(Stack(), precision=FP32, mesh=mesh, weight_slots=2)
    model(vector_batch(0, context.rank)).sum().backward()
    detector = RaceDetector(engine_inside(model))
    streams, main = detector.engine.streams, detector.engine.units[1].flat_params[0].main_grads
    arrived = Fence(streams, Rule.RESULTS_ARRIVED, COMM, "bench")
    read = Fence(streams, Rule.SHARDS_WRITTEN, COMPUTE, "bench", StreamName.REPLICA)
    detector.on_collective(COMM, Collective.REDUCE_SCATTER, 1, (), (main,))
    detector.on_record(arrived)
    detector.on_wait(arrived, arrived.target)
    detector.on_operation(main, write=False, what="op")
    detector.on_record(read)
    if passes_on:
        detector.on_wait(read, read.target)
    detector.on_collective(StreamName.REPLICA, Collective.ALL_REDUCE, 1, (), (main,))
    assert [race.first.stream for race in detector.found] == ([] if passes_on else [COMPUTE, COMM])
    assert [race.rule for race in detector.found] == ([] if passes_on else [Rule.GRADS_WRITTEN, Rule.RESULTS_ARRIVED])
