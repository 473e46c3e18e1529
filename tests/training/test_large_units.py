"""Embedding, head and other large modules beside the layers: units, which begin with slots of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.errors import CommunicationError, ShardingError
from tests.models import DIM, Block, TinyConfig, TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    case,
    engine_inside,
)

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
