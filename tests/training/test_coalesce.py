"""Small layers put together into one unit: fewer collectives, the same numbers, whatever runs of a unit and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from streamshard import (
    Precision,
    StreamShard,
)
from streamshard.comm.streams import Rule
from streamshard.errors import ConfigError, RaceError, RankMismatchError, ShardingError
from streamshard.inspect import engine_inside
from streamshard.inspect.races import detect_races
from streamshard.inspect.trace import trace_step
from streamshard.plan.discovery import FoundUnit, coalesce
from streamshard.unit.absent_weight import AbsentWeight
from tests.models import Layer, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    counted_collectives,
    full_grads,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)
from tests.scenarios import BF16, dropping, sharded_in_pairs, train
from tests.training.test_execution import Planned, planned_step
from tests.training.test_passes import RECOMPUTED
from tests.training.test_random_models import Inner, Plan, RandomModel, plans, step_of

LAYER_BYTES = 4 * (16 * 16 + 16)  # of a `Layer` in fp32
PAIRS = 2 * LAYER_BYTES


def _names(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


# -- which layers form a unit -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 100))
def test_units_are_put_together_until_they_are_large_enough(sizes: list[int], at_least: int) -> None:
    """Consecutive ones and no more than it takes; what is left over is part of the last unit."""
    layers = [nn.Linear(1, 1) for _ in sizes]
    found = coalesce([FoundUnit(str(k), (layer,)) for k, layer in enumerate(layers)], sizes, at_least)
    assert [layer for unit in found for layer in unit.modules] == layers
    place = 0
    for unit in found:
        own = sizes[place : place + len(unit.modules)]
        place += len(unit.modules)
        assert sum(own) >= at_least or len(found) == 1
        assert sum(own[:-1]) < at_least or unit is found[-1] and _first_enough(own, at_least) > sum(own) - at_least


def _first_enough(sizes: Sequence[int], at_least: int) -> int:
    """The size of the shortest start of `sizes` that is large enough."""
    total = 0
    for size in sizes:
        total += size
        if total >= at_least:
            break
    return total


def _layers(size: int | str, precision: Precision = FP32, depth: int = 7) -> list[str]:
    return _names(StreamShard(Stack((16,) * (depth + 1)), precision=precision, min_unit_size=size))


@on_ranks(2)
def test_the_size_is_in_bytes_of_param_dtype(context: RankContext) -> None:
    """A number or text. A unit is called by its first layer and its last."""
    single = [f"layers.{k}" for k in range(7)]
    pairs = ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.6"]
    assert _layers(0) == _layers(1) == _layers(LAYER_BYTES) == _layers("1KiB") == single
    assert _layers(LAYER_BYTES + 1) == _layers(PAIRS) == _layers("2KB") == pairs
    assert _layers(PAIRS + 1) == ["layers.0 .. layers.2", "layers.3 .. layers.6"]
    assert _layers(LAYER_BYTES, BF16) == pairs
    assert _layers("1GiB") == ["layers.0 .. layers.6"]


@on_ranks(1, 2)
@pytest.mark.parametrize("size", [-1, "-1MiB", "small", "12", 1.5, True, False, None])
def test_sizes_that_mean_nothing_are_refused(context: RankContext, size: Any) -> None:
    """By name, before anything is changed."""
    model = Stack()
    with pytest.raises(ConfigError, match=f"min_unit_size={size!r}: wanted 0 or more bytes, or text"):
        StreamShard(model, min_unit_size=size)
    assert type(model) is Stack
    assert model.head.weight.shape == (1, 16)


@on_ranks(2)
def test_ranks_must_want_the_same_size(context: RankContext) -> None:
    """Else their collectives would differ."""
    for sizes in ((0, PAIRS), (0, 1)):  # with other units, and with the same for now
        with pytest.raises(RankMismatchError, match="different settings: rank 0 has min_unit_size="):
            StreamShard(Stack(), precision=FP32, min_unit_size=sizes[context.rank])


@on_ranks(2)
def test_a_unit_with_a_layer_of_a_kind_of_its_own_has_its_own_slots(context: RankContext) -> None:
    """A large lone layer that tiny ones were put together with must not size the others' slots."""

    def build() -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(16, 500), nn.Linear(500, 1, bias=False))

    units = ["0", "1", "2", "3", "4"]
    model = StreamShard(build(), units=units, precision=FP32, min_unit_size=3 * LAYER_BYTES)
    engine = engine_inside(model)
    assert _names(model) == ["0 .. 2", "3 .. 4"]
    assert engine.plan.shared == (False, True, False)
    assert engine.units[1].weight_slot.buffer.nbytes < 4 * 4 * 272 < engine.units[2].weight_slot.buffer.nbytes
    assert_trains_like_plain(context, build, stack_step, units=units, min_unit_size=3 * LAYER_BYTES)


class TiedPairs(Stack):
    """Eight layers: 0 and 1 share a weight, 2 and 7 another; 4 and 5 share a whole module."""

    def __init__(self) -> None:
        super().__init__((16,) * 9)
        layers: Any = self.layers
        layers[1].linear.weight = layers[0].linear.weight
        layers[7].linear.weight = layers[2].linear.weight
        layers[5].linear = layers[4].linear


@on_ranks(1, 2, 3)
def test_what_layers_of_one_unit_share_lies_in_it(context: RankContext) -> None:
    """What layers of several units share lies in the root unit, as it does without coalescing."""
    two_biases = 2 * 4 * 16  # what is shared does not count
    model = assert_trains_like_plain(context, TiedPairs, stack_step, min_unit_size=two_biases)
    where = {shard.name: unit.name for unit in engine_inside(model).units for shard in unit.params}
    assert _names(model) == ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.7"]
    assert where["layers.0.linear.weight"] == "layers.0 .. layers.1"
    assert where["layers.2.linear.weight"] == "the root unit"
    assert where["layers.4.linear.weight"] == where["layers.4.linear.bias"] == "layers.4 .. layers.7"


# -- messages -----------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("together", [1, 2, 3, 4, 12])
def test_tiny_layers_do_not_pay_a_collective_each(context: RankContext, together: int) -> None:
    """A unit is gathered twice, but for the two that stay at the turn, and reduced once; so is the root unit."""
    model = StreamShard(Stack((16,) * 13), precision=FP32, min_unit_size=together * LAYER_BYTES)
    units = 12 // together
    assert len(_names(model)) == units
    for number in range(3):
        with counted_collectives(model) as counts:
            stack_step(model, Call(number, context.rank, 2, 1.0))
        assert counts["all_gather"] == 2 * units - min(units, 2) + 1 + 1  # the root unit, the flags
        assert counts["reduce_scatter"] == units + 1


@on_ranks(2)
@pytest.mark.parametrize("route", [[7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4, 7, 6], [0, 1, 0, 1, 2, 3, 4, 4, 6]])
def test_another_order_inside_a_unit_costs_nothing(context: RankContext, route: list[int]) -> None:
    """It is one visit; after the first pass also if units run in another order."""
    model = StreamShard(Planned(8), precision=FP32, min_unit_size=PAIRS)
    for number in range(3):
        with counted_collectives(model) as counts:
            planned_step({(number, context.rank): route})(model, Call(number, context.rank, 2, 1.0))
    assert counts["all_gather"] == 2 * 4 - 2 + 1 + 1
    assert counts["reduce_scatter"] == 4 + 1


@on_ranks(2)
def test_the_next_unit_is_gathered_while_the_last_layer_of_one_computes(context: RankContext) -> None:
    """Prefetch: when a unit's first layer runs, the gather of the unit behind it has been issued."""
    model: Any = StreamShard(Stack((16,) * 9), precision=FP32, min_unit_size=PAIRS)
    engine = engine_inside(model)
    seen: list[list[int | None]] = []

    def look(*_: Any) -> None:
        seen.append([engine.units[unit].weight_slot.content for unit in (1, 2)])

    for layer in model.layers:
        layer.register_forward_pre_hook(look)
    with torch.no_grad():
        model(vector_batch(0, context.rank))
    assert seen == [[1, 2]] * 2 + [[3, 2]] * 2 + [[3, 4]] * 4


# -- what runs ----------------------------------------------------------------------------------------------------


def _everywhere(*routes: list[int]) -> dict[tuple[int, int], list[int]]:
    return {(step, rank): routes[step % len(routes)] for step in range(3) for rank in range(4)}


ALL = list(range(8))
ALIKE = {
    "every layer": _everywhere(ALL),
    "a layer of each unit never used": _everywhere([0, 3, 4, 7]),
    "the last layer only": _everywhere([7]),
    "backwards": _everywhere(ALL[::-1]),
    "repeats inside a unit": _everywhere([0, 1, 0, 1, 1, 2, 2, 3, 5, 4, 5, 6]),
    "twice, with other units between": _everywhere(ALL + ALL),
    "one layer of a unit there, the other back": _everywhere([0, 2, 4, 6, 7, 5, 3, 1]),
    "another order each step": _everywhere(ALL, [5, 0, 4, 1], [7, 6, 1, 0, 2], [2, 4, 3, 6, 0]),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "slots"), [*((what, 2) for what in ALIKE), ("twice, with other units between", "all")]
)
def test_layers_of_a_unit_run_in_any_order_any_number_of_times(context: RankContext, what: str, slots: Any) -> None:
    """Gradients of layers that did not run are None although their unit was reduced."""
    settings = {"weight_slots": slots, "grad_slots": slots, "min_unit_size": PAIRS}
    assert_trains_like_plain(context, lambda: Planned(8), planned_step(ALIKE[what]), checked=(0, 2), **settings)


DIFFERENT = {
    "a layer on rank 1 only": {(step, 0): [0, 2, 3, 4, 5, 6, 7] for step in range(4)},
    "another layer of each unit on each rank": {(s, r): ALL[r % 2 :: 2] for s in range(4) for r in range(3)},
    "a unit on rank 0 only": {(step, 1): [0, 1, 6, 7] for step in range(4)},
    "a layer here, a unit there": {(s, r): [[0, 2, 3, 6], [1, 4, 7], ALL][r] for s in range(4) for r in range(3)},
    "a layer dropped where units are interleaved": {
        (s, r): [k for k in ALL[::2] + ALL[1::2] if (s, r, k) not in ((2, 1, 5), (3, 0, 2), (3, 1, 1))]
        for s in range(4)
        for r in range(3)
    },
    "from the second step on": {(2, 0): [0, 1], (2, 1): [3, 6], (3, 0): [0, 7], (3, 1): [1]},
}


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "what"), [*((2, what) for what in DIFFERENT), (3, "a layer here, a unit there")]
)
def test_ranks_may_run_different_layers_of_a_unit(context: RankContext, what: str) -> None:
    """Also in another order or more often, as long as units come in one order."""
    assert_trains_like_ddp(context, lambda: Planned(8), planned_step(DIFFERENT[what]), min_unit_size=PAIRS)


@on_ranks(2, 3)
@pytest.mark.parametrize("size", [0, PAIRS])
def test_a_layer_may_be_missing_in_one_of_two_forwards_on_one_rank(context: RankContext, size: int) -> None:
    """Its gradient is complete too early there, and waits for the one place that its unit's reduction has."""

    def step(model: Any, call: Call) -> Tensor:
        inner = getattr(model, "module", model)
        losses = []
        for number in range(2):
            inner.plan = [k for k in ALL if number or call.rank != 1 or k not in (5, 6)]
            losses.append(model(vector_batch(call.step + 50 * number, call.rank)).square().mean())
        return call.backward(losses[0] + losses[1])

    assert_trains_like_ddp(context, lambda: Planned(8), step, min_unit_size=size)


@on_ranks(2)
@pytest.mark.parametrize("what", RECOMPUTED)
def test_recomputed_activations_give_the_same_numbers(context: RankContext, what: str) -> None:
    """Checkpoints of both kinds inside layers, around them, and across units."""
    assert_trains_like_plain(context, RECOMPUTED[what], lm_step, min_unit_size="10KB", checked=(0, 2))  # two layers


@on_ranks(2)
def test_a_layer_can_be_called_by_itself(context: RankContext) -> None:
    """Outside of the root's forward: its unit is gathered, and the layers beside it stay as they are."""
    torch.manual_seed(1)
    plain = Stack()
    torch.manual_seed(1)
    model: Any = StreamShard(Stack(), precision=FP32, min_unit_size=PAIRS)
    x = vector_batch(0, 0)
    for number in (1, 0, 3):
        assert torch.equal(model.layers[number](x), plain.layers[number](x))


class Calling(Layer):
    """Calls the layer behind it, with its own weights on both sides."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.behind = [inner]

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 16]"""
        return super().forward(self.behind[0](super().forward(x)))  # type: ignore[no-any-return]


class CallingStack(Stack):
    """Layers of which each even one calls the next."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__((16,) * (depth + 1))
        for number in range(0, depth, 2):
            self.layers[number] = Calling(self.layers[number + 1])

    def order(self) -> Any:
        """The others are called by these."""
        return [layer for layer in self.layers if isinstance(layer, Calling)]


@on_ranks(1, 2)
@pytest.mark.parametrize(("depth", "size"), [(8, PAIRS), (8, 2 * PAIRS), (8, 4 * PAIRS), (2, PAIRS)])
def test_a_layer_may_call_another_of_its_unit(context: RankContext, depth: int, size: int) -> None:
    """Its own weights are in place when that returns; two layers of two kinds are a unit that stays."""
    units = [f"layers.{number}" for number in range(depth)]
    model = assert_trains_like_plain(
        context, lambda: CallingStack(depth), stack_step, checked=(0, 2), units=units, min_unit_size=size
    )
    assert all(unit.is_streamed is (depth > 2) for unit in engine_inside(model).units[1:])


class Peeking(Stack):
    """Looks at the weights of its layers while it runs."""

    seen: list[list[Any]]

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        self.seen = []
        for layer in self.layers:
            x = layer(x)
            weights: Any = [each.linear.weight for each in self.layers]  # type: ignore[union-attr]
            self.seen.append([(type(weight), weight.numel()) for weight in weights])
        out: Tensor = self.head(x)
        return out


@on_ranks(2)
def test_between_its_layers_a_units_weights_are_absent(context: RankContext) -> None:
    """A view of the slot that is used outside of its layer would be overwritten before backward."""
    model: Any = StreamShard(Peeking(), precision=FP32, min_unit_size=PAIRS)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    assert model.seen == [[(AbsentWeight, 256)] * 4] * 4


@settings(max_examples=12)
@given(plan=plans(), world_size=st.integers(1, 3), size=st.sampled_from([500, 2000, 6000, 10**6]))
def test_random_models_train_like_plain_pytorch(ranks: RankPool, plan: Plan, world_size: int, size: int) -> None:
    """Any depth, widths, sharing, freezing, order, recomputation and layers left out."""
    ranks(world_size).run(_random_trains_like_plain, plan, size)


def _random_trains_like_plain(context: RankContext, plan: Plan, size: int) -> None:
    assert_trains_like_plain(
        context,
        lambda: RandomModel(plan),
        step_of(plan),
        steps=3,
        checked=(0, 2),
        optimizer=adamw if plan.is_adam else sgd,
        units=[Inner],
        min_unit_size=size,
        tolerance=Tolerance(relative=5e-5, absolute=1e-6),
    )


# -- order ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("rule", list(Rule))
def test_a_rule_taken_away_is_named(context: RankContext, rule: Rule) -> None:
    """Every wait is still needed, and still enough for all layers of a unit."""
    # Rule 6 is needed where a gather is not waited for by its own pass.
    scenario = "evaluation between steps" if rule is Rule.SHARDS_READ else "micro-batches"
    model = sharded_in_pairs(scenario, BF16)
    with dropping(model, rule), pytest.raises(RaceError, match=f"rule {rule.value} "), detect_races(model):
        train(model, scenario, context)


# -- what knows of units ------------------------------------------------------------------------------------------

SLOTS: dict[str, dict[str, Any]] = {
    "2": {},
    "3": {"weight_slots": 3, "grad_slots": 3},
    "all weights": {"weight_slots": "all"},
    "all": {"weight_slots": "all", "grad_slots": "all"},
}


@on_ranks(2, 3)
@pytest.mark.parametrize("slots", list(SLOTS))
def test_the_memory_report_is_right(context: RankContext, slots: str) -> None:
    """What is held is what the formula says, with slots as large as what was put together."""
    model: Any = StreamShard(TinyLM(TinyConfig(depth=8)), precision=BF16, min_unit_size="8KB", **SLOTS[slots])
    lm_step(model, Call(0, context.rank, context.world_size, 1.0))
    report = model.memory_report()
    assert dict(report.held_bytes) == dict(report.formula_bytes)


@on_ranks(2)
def test_weights_gradients_and_ranges_keep_their_names(context: RankContext) -> None:
    """Only where they lie changes."""
    models: list[Any] = []
    for size in (0, PAIRS):
        torch.manual_seed(4)
        models.append(StreamShard(Stack(), precision=FP32, min_unit_size=size))
        stack_step(models[-1], Call(0, context.rank, 2, 1.0))
    plain, model = models
    assert_same(full_grads(model), full_grads(plain), "gradients", EXACT)
    assert_same(full_weights(model), full_weights(plain), "weights", EXACT)
    ranges = model.local_ranges()
    assert list(ranges) == list(plain.local_ranges())
    whole = full_weights(model)
    for name, param in model.named_parameters():
        assert torch.equal(param.flatten(), whole[name].flatten()[ranges[name].start : ranges[name].stop])


@on_ranks(2)
def test_a_trace_names_the_units(context: RankContext) -> None:
    """By their first layer and their last; each layer's forward is a span."""
    model = StreamShard(Stack((16,) * 9), precision=FP32, min_unit_size=PAIRS)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    with trace_step(model) as trace:
        stack_step(model, Call(1, context.rank, 2, 1.0))
    assert trace.units[1:] == _names(model) == [f"layers.{k} .. layers.{k + 1}" for k in (0, 2, 4, 6)]
    spans = [span.unit for span in trace.spans if span.name.startswith("forward layers")]
    assert spans == [1, 1, 2, 2, 3, 3, 4, 4]


class WritingBefore(Calling):
    """Changes its weight before it calls the layer behind it."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 16]"""
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return super().forward(x)


class WritingStack(CallingStack):
    """Of such layers."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(0, 8, 2):
            self.layers[number] = WritingBefore(self.layers[number + 1])


@on_ranks(2)
@pytest.mark.parametrize("size", [0, PAIRS])
def test_a_layer_that_writes_to_its_weight_and_calls_another_raises(context: RankContext, size: int) -> None:
    """Of its own unit or of the next, while its weights stay in place."""
    model: Any = StreamShard(WritingStack(), precision=FP32, min_unit_size=size)
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' was changed in place"):
        stack_step(model, Call(0, context.rank, 2, 1.0))
