"""Every way of training at every setting: the numbers of the default, without races, however late collectives are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.shared_memory import SharedMemoryTransport
from tests.adversary import make_adversarial
from tests.compare import EXACT, Tolerance, assert_same, full_weights
from tests.counts import engine_inside
from tests.faults import case
from tests.races import detect_races
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import ALL_SLOTS, FP32, adamw, assert_trains_like_plain
from tests.scenarios import ADDING, BF16, PRECISIONS, SCENARIOS, Scenario, over_sockets, reference, sharded, train


class Setting(NamedTuple):
    precision: Precision
    settings: dict[str, Any] = {}


# In fp32 gathers read the main weights themselves, and where each unit has a weight slot these lie in it. Main grads
# lie in the grad slots where each unit has one. A unit of several layers is bound in parts.
SETTINGS: dict[str, Setting] = {
    "ZeRO-3": Setting(BF16),
    "ZeRO-3, fp32": Setting(FP32),
    "ZeRO-1, fp32": Setting(FP32, ALL_SLOTS),
    "ZeRO-1": Setting(BF16, ALL_SLOTS),
    "3 slots": Setting(BF16, {"weight_slots": 3}),
    "several layers": Setting(BF16, {"min_unit_size": 600}),  # two layers of 16 x 16 in bf16
    "16-bit": Setting(PRECISIONS["16-bit"]),
    "16-bit wire": Setting(PRECISIONS["16-bit wire"]),
}
# Settings differ in how gradients are added: this scenario runs at all of them; the others at one each, in turn.
EVERYWHERE = ("no_sync",)
OVER_SOCKETS = ("ZeRO-1", "3 slots", "several layers", "16-bit wire")


def _cells() -> Iterator[tuple[int, str, str]]:
    names = list(SETTINGS)[:6]
    for number, scenario in enumerate(SCENARIOS):
        chosen = names if scenario in EVERYWHERE else (names[number % 6],)
        yield from ((2, scenario, setting) for setting in chosen)
    # More than two exchange with several peers.
    yield from (
        (3, "layers unused on some ranks", setting) for setting in ("ZeRO-3, fp32", "ZeRO-1", "16-bit", "16-bit wire")
    )


# Scenarios whose steps run on plain PyTorch too, where one process plays all ranks.
PLAIN = (
    *("plain", "tied", "a head that a loss reads", "unequal layers", "a unit of another kind", "micro-batches"),
    *("reentrant checkpointing", "unused layers", "layers unused on some ranks", "layers used twice"),
    *("repeats under checkpointing", "an order that changes", "two backwards", "a kept graph", "freezing"),
    *("weights read elsewhere", "layers unused on some ranks, recomputed", "resident layers repeated on some ranks"),
)


@on_ranks(2, 3)
def test_the_default_trains_like_plain_pytorch(context: RankContext) -> None:
    """Gradients, None where no rank has one, and weights, in fp32. Among three ranks, what ranks do differently."""
    for name in PLAIN if context.world_size == 2 else [each for each in PLAIN if "some ranks" in each]:
        scenario = SCENARIOS[name]

        def step(model: nn.Module, call: Call, scenario: Scenario = scenario) -> Tensor:
            scenario.step(model, call)
            return torch.zeros(())

        with case(name):
            settings = {"resident": scenario.resident, "optimizer": adamw, "checked": (0, 2)}
            assert_trains_like_plain(context, scenario.build, step, **settings)


@on_ranks()
@pytest.mark.parametrize(("world_size", "scenario", "setting"), list(_cells()))
def test_it_trains_like_the_default_without_races(context: RankContext, scenario: str, setting: str) -> None:
    """Bit by bit, although the transport is as late as the rules allow; what is read too early is NaN."""
    precision, settings = SETTINGS[setting]
    with over_sockets() if setting in OVER_SOCKETS else contextlib.nullcontext():
        model = sharded(scenario, precision, **settings)
    transport = PairwiseTransport if setting in OVER_SOCKETS else SharedMemoryTransport
    assert type(engine_inside(model).ranks.transport) is transport
    with detect_races(model) as races, make_adversarial(model):
        train(model, scenario, context)
        found = full_weights(model)
    assert races.accesses > 50
    # Sums in another order: of gradients that wait in slots, and of other units' norms.
    is_near = scenario in ADDING and settings == ALL_SLOTS or (scenario, setting) == ("clipping", "several layers")
    wanted = reference(context, scenario, precision)
    assert_same(found, wanted, "weights", Tolerance(1e-5, 1e-5) if is_near else EXACT)
