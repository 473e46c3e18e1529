"""Embedding, head and other large modules beside the layers: units, which begin with slots of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.errors import CommunicationError, ShardingError
from tests.models import DIM, Block, Layer, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    assert_trains_like_plain,
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
def test_the_head_can_be_called_by_itself(context: RankContext) -> None:
    """In a pass of its own, as losses do that want the layers' output first."""

    class Headless(LargeLM):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
            return self.norm(self.run_blocks(x, mask))  # type: ignore[no-any-return]

    def step(model: Any, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
        return call.backward(next_token_loss(model.head(model(tokens)), tokens))

    assert_trains_like_plain(context, Headless, step)


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


class Seeing(nn.Module):
    """Images and text: what takes images is registered first, and asked after the embedding, if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(40, 4 * DIM)
        self.seers = nn.ModuleList(Layer(4 * DIM) for _ in range(3))
        self.projector = nn.Linear(4 * DIM, 4 * DIM)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, image: Tensor | None) -> Tensor:
        """[rows, length] tokens, [rows, 40] image or none -> [rows, length, vocabulary] logits"""
        x = self.embedding(tokens)
        if image is not None:
            seen = self.patches(image)
            for layer in self.seers:
                seen = layer(seen)
            x = x + self.projector(seen).view(len(tokens), -1, DIM).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


IMAGES: dict[str, Sequence[Sequence[int]]] = {  # ranks that have images, by step
    "one": ((0,), (0,), (1,), (0, 1)),
    "none, then one": ((), (), (1,), (0,)),
    "all, then one": ((0, 1), (0,), (1,), ()),
}


@on_ranks(2)
def test_ranks_may_have_batches_with_or_without_images(context: RankContext) -> None:
    """Whether they do in the pass that the order is learnt from, or not: large modules are in place in time."""
    for name, images in IMAGES.items():

        def step(model: nn.Module, call: Call, images: Any = images) -> Tensor:
            tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
            has_image = call.rank in images[call.step]
            image = vector_batch(call.step, call.rank, rows=len(tokens), dim=40) if has_image else None
            return call.backward(next_token_loss(model(tokens, image), tokens))

        with case(name):
            assert_trains_like_plain(context, Seeing, step, steps=4)
