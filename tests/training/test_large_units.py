"""Large modules beside the layers are units, which begin with slots of their own; small layers are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, StreamShard
from streamshard.errors import CommunicationError, ConfigError, RankMismatchError, ShardingError
from tests.models import DIM, Block, Layer, Stack, TinyConfig, TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, case, counted_collectives, engine_inside, stack_step
from tests.scenarios import BF16, RoutedStack
from tests.training.test_execution import planned_step

VOCABULARY = 160  # rows of the embedding: 2560 elements, of which a block has 2224
BLOCKS = [f"blocks.{k}" for k in range(4)]


class LargeLM(TinyLM):
    """Embedding and head are larger than a block."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(TinyConfig(vocabulary=VOCABULARY, tied=tied))


def large_step(model: nn.Module, call: Call) -> Tensor:
    """Next-token training of a `LargeLM`."""
    tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
    return call.backward(next_token_loss(model(tokens), tokens))


def _units(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


def _never_called() -> nn.Module:
    model = LargeLM()
    model.add_module("head", nn.ParameterDict({"w": torch.randn(VOCABULARY, DIM)}))
    return model


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "large": (LargeLM, ["embedding", *BLOCKS, "head"]),
    "small": (TinyLM, BLOCKS),
    "tied": (lambda: LargeLM(tied=True), BLOCKS),
    "never called": (_never_called, ["embedding", *BLOCKS]),
}


@on_ranks(1, 2)
def test_large_modules_beside_the_layers_are_units(context: RankContext) -> None:
    """If nothing else holds their parameters. Each begins with an own slot. Units that are given are all there are."""
    for name, (build, wanted) in FOUND.items():
        with case(name):
            engine = engine_inside(StreamShard(build(), precision=FP32))
            assert [unit.name for unit in engine.units[1:]] == wanted
            shared = [name in BLOCKS for name in wanted]
            assert list(engine.plan.is_streamed) == [False, *shared]
    assert _units(StreamShard(LargeLM(), units=Block, precision=FP32)) == BLOCKS


@on_ranks(2)
def test_using_the_head_early_on_some_ranks_only_raises(context: RankContext) -> None:
    """The head takes turns with the layers by then."""

    class Sometimes(LargeLM):
        reads = False

        def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return super().run_blocks(x + self.head.weight.mean() if self.reads else x, mask)

    model: Any = StreamShard(Sometimes(), precision=FP32)
    large_step(model, Call(0, context.rank, 2, 1.0))
    model.reads = context.rank == 1
    error: type[Exception] = CommunicationError
    said = "rank 1 has not come"
    if model.reads:
        error, said = ShardingError, r"'head.weight' is computed with .* resident=\['head'\]"
    with pytest.raises(error, match=said):
        large_step(model, Call(1, context.rank, 2, 1.0))


# -- small layers put together into one unit ---------------------------------------------------------------------------

LAYER_BYTES = 4 * (16 * 16 + 16)  # of a `Layer` in fp32
PAIRS = 2 * LAYER_BYTES


def _names(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


def _layers(size: int | str, precision: Precision = FP32) -> list[str]:
    return _names(StreamShard(Stack((16,) * 8), precision=precision, min_unit_size=size))


@on_ranks(2)
def test_the_size_is_in_bytes_of_param_dtype(context: RankContext) -> None:
    """A number or text, the same on all ranks. A unit is called by its first layer and its last."""
    pairs = ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.5", "layers.6"]
    assert _layers(0) == _layers(LAYER_BYTES) == _layers("1KiB") == [f"layers.{k}" for k in range(7)]
    assert _layers(LAYER_BYTES + 1) == _layers(PAIRS) == _layers("2KB") == _layers(LAYER_BYTES, BF16) == pairs
    assert _layers("1GiB") == ["layers.0 .. layers.6"]
    for size in (-1, "small", 1.5, True, None):
        with pytest.raises(ConfigError, match=f"min_unit_size={size!r}: wanted 0 or more bytes, or text"):
            _layers(size)  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match="different settings: rank 0 has min_unit_size="):
        _layers(context.rank)


class TiedPairs(Stack):
    """Eight layers: 0 and 1 share a weight, 2 and 7 another; 4 and 5 share a whole module."""

    def __init__(self) -> None:
        super().__init__((16,) * 9)
        layers: Any = self.layers
        layers[1].linear.weight = layers[0].linear.weight
        layers[7].linear.weight = layers[2].linear.weight
        layers[5].linear = layers[4].linear


@on_ranks(2)
def test_a_weight_that_layers_of_one_unit_share_lies_in_it(context: RankContext) -> None:
    """A weight that layers of several units share lies in the root unit, as it does without coalescing."""
    two_biases = 2 * 4 * 16  # shared weights do not count
    model = assert_trains_like_plain(context, TiedPairs, stack_step, min_unit_size=two_biases)
    where = {shard.name: unit.name for unit in engine_inside(model).units for shard in unit.params}
    assert _names(model) == ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.6", "layers.7"]
    assert where["layers.0.linear.weight"] == "layers.0 .. layers.1"
    assert where["layers.2.linear.weight"] == "the root unit"
    assert where["layers.4.linear.weight"] == where["layers.4.linear.bias"] == "layers.4 .. layers.6"


ORDERS = [[0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4, 7, 6], [0, 1, 0, 1, 2, 3, 4, 4, 6]]


@on_ranks(2)
def test_tiny_layers_do_not_pay_a_collective_each(context: RankContext) -> None:
    """A unit is gathered twice, but for the two that stay at the turn, and reduced once, in whatever order it runs."""
    for order in ORDERS:
        model = StreamShard(RoutedStack(8), precision=FP32, min_unit_size=PAIRS)
        for number in range(3):
            with counted_collectives(model) as counts:
                planned_step({(number, context.rank): order})(model, Call(number, context.rank, 2, 1.0))
        assert counts["all_gather"] == 2 * 4 - 2 + 1 + 1, order  # the root unit, the flags
        assert counts["reduce_scatter"] == 4 + 1, order


@on_ranks(2)
def test_a_unit_with_a_layer_of_a_kind_of_its_own_has_its_own_slots(context: RankContext) -> None:
    """A large lone layer that tiny ones were put together with must not size the others' slots."""

    def build() -> nn.Module:
        return nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(16, 500), nn.Linear(500, 1, bias=False))

    settings: dict[str, Any] = {"units": ["0", "1", "2", "3", "4"], "min_unit_size": 3 * LAYER_BYTES}
    engine = engine_inside(assert_trains_like_plain(context, build, stack_step, **settings))
    assert [unit.name for unit in engine.units[1:]] == ["0 .. 2", "3 .. 4"]
    assert engine.units[1].weight_slot.buffer.nbytes < 4 * 4 * 272 < engine.units[2].weight_slot.buffer.nbytes
