"""The adversarial transport: training does not notice it, unless a wait is missing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from streamshard import Precision
from streamshard.comm.streams import Rule, StreamName
from tests.adversary import make_adversarial
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, counted_collectives, engine_inside, full_weights
from tests.scenarios import BF16, dropping, sharded, train
from tests.simulated import CPU, simulated_device


def _has_nan(weights: dict[str, Tensor]) -> bool:
    return any(bool(value.isnan().any()) for value in weights.values())


@on_ranks(2)
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rule", [Rule.WEIGHTS_ARRIVED, Rule.GRADS_DRAINED])
def test_a_missing_wait_for_a_slot_shows_as_nan(context: RankContext, rule: Rule, precision: Precision) -> None:
    """Weights that have not arrived, and gradients written into a slot that is still to be reduced."""
    settings: dict[str, Any] = {"weight_slots": "all"} if rule is Rule.GRADS_DRAINED else {}  # gradients have own slots
    model = sharded("plain", precision, **settings)
    with make_adversarial(model), dropping(model, rule):
        train(model, "plain", context)
        assert _has_nan(full_weights(model))


@on_ranks(2)
def test_it_keeps_a_device_busy_before_each_collective_and_copy(context: RankContext) -> None:
    """On their streams: no host waits there, so only a slow device makes them late."""
    settings: dict[str, Any]
    for settings, names in (({}, ()), ({"offload": "state"}, (StreamName.FETCH, StreamName.STORE))):
        with simulated_device() as device:
            model = sharded("plain", FP32, **settings)
            streams, slept = engine_inside(model).streams, list[Any]()
            device._sleep = lambda cycles, slept=slept: slept.append(device.current_stream(CPU))  # type: ignore[attr-defined]
            with make_adversarial(model), counted_collectives(model) as counts:
                train(model, "plain", context, steps=2)
        comm, *of_copies = map(streams.device_stream, (StreamName.COMM, *names))
        assert {*of_copies} <= {*slept}
        if not names:
            assert slept == [comm] * (counts["all_gather"] + counts["reduce_scatter"])
