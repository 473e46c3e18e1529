"""In-place changes of weights in a model's own forward raise by name: what layers compute with are copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, StreamShard
from streamshard.errors import ShardingError
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    SETTINGS,
    Call,
    assert_same,
    assert_trains_like_plain,
    case,
    each_setting,
    full_weights,
    let_dynamo_look,
    stack_step,
)

# Each changes what an earlier one, of a rank whose shard this rank has gathered, has written.
CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "through .data": lambda weight: weight.data.mul_(0.5),
    "a part through .data": lambda weight: weight.data.flatten()[::3].mul_(0.5),
    "through detach()": lambda weight: weight.detach().mul_(0.5),
    "as out": lambda weight: torch.mul(weight.detach().clone(), 0.5, out=weight),
    "foreach": lambda weight: torch._foreach_mul_([weight], 0.5),
    "initialised anew": nn.init.zeros_,
}


class WritingLayer(Layer):
    """Changes its weight before it computes; then calls layers inside, which are no children."""

    change: Callable[[Any], object] | None = None
    inner: tuple[Layer, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        if self.change is not None:
            with torch.no_grad():
                self.change(self.linear.weight)
        for layer in self.inner:
            x = layer(x)
        return super().forward(x)


class WritingStack(Stack):
    """Layers of these, and a root that may change the head's bias."""

    change_bias: Callable[[Any], object] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WritingLayer() for _ in range(4))

    def order(self) -> Any:
        """All layers; then the root writes."""
        yield from self.layers
        if self.change_bias is not None:
            with torch.no_grad():
                self.change_bias(self.head.bias)


def _with_change(change: Callable[[Any], object] | None, *, place: int = 1) -> Callable[[], WritingStack]:
    def build() -> WritingStack:
        model = WritingStack()
        model.layers[place].change = change  # type: ignore[assignment]  # no module
        return model

    return build


@on_ranks()
@each_setting
def test_a_layer_that_writes_to_its_weight_raises(context: RankContext, settings: str) -> None:
    """Also when it does so for the first time after steps without."""
    model: Any = StreamShard(_with_change(None)(), precision=Precision(), **SETTINGS[settings])
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    before = full_weights(model)
    wanted = r"'layers\.1\.linear\.weight' was changed in place inside"
    for name, change in CHANGES.items():
        model.layers[1].change = change
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with case(name), mode(), pytest.raises(ShardingError, match=wanted):
                model(vector_batch(0, context.rank))
    model.layers[1].change = None
    assert_same(full_weights(model), before, "weights")
    stack_step(model, Call(1, context.rank, context.world_size, 1.0))


@on_ranks(1, 2)
def test_a_root_that_writes_to_a_weight_of_its_own_raises(context: RankContext) -> None:
    """At the end of the pass."""
    for name, change in CHANGES.items():
        model: Any = StreamShard(WritingStack(), precision=FP32)
        model.change_bias = change
        with case(name), pytest.raises(ShardingError, match=r"'head\.bias' was changed in place inside a forward"):
            model(vector_batch(0, context.rank))


@on_ranks(2)
def test_a_layer_that_writes_and_calls_another_raises(context: RankContext) -> None:
    """Its slot goes to the layer inside before it is done itself."""
    model: Any = WritingStack()
    model.layers[0].change, model.layers[0].inner = CHANGES["in place"], (model.layers[2],)
    sharded = StreamShard(model, precision=FP32)
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' was changed in place"):
        sharded(vector_batch(0, context.rank))


@on_ranks(1, 2)
def test_an_embedding_with_max_norm_raises_with_advice(context: RankContext) -> None:
    """It renormalises what it looks up, which may differ between ranks."""
    stack = Stack()
    stack.embedding = nn.Embedding(12, DIM, max_norm=0.5)
    stack.order = lambda: [stack.embedding, *stack.layers]  # type: ignore[method-assign]
    model = StreamShard(stack, precision=FP32)
    with pytest.raises(ShardingError, match=r"'embedding\.weight' .* renormalise .*max_norm=\.\.\.\) between steps"):
        model(torch.tensor([1 + context.rank]))


@on_ranks(1, 2)
def test_a_clamp_that_changes_nothing_trains(context: RankContext) -> None:
    """Through ``.data``, as transformers' Gemma 3n has it."""
    build = _with_change(lambda weight: weight.data.clamp_(-100, 100))
    assert_trains_like_plain(context, build, stack_step)


@on_ranks(1, 2)
def test_weights_that_are_given_other_memory_in_a_forward_raise(context: RankContext) -> None:
    """Where it happens; their own stays."""

    def assign(weight: Any) -> None:
        weight.data = weight.data / 2

    model: Any = StreamShard(_with_change(assign)(), precision=FP32)
    before = full_weights(model)
    with pytest.raises(ShardingError, match=r"'layers\.1\.linear\.weight' was given other memory"):
        model(vector_batch(0, context.rank))
    model.layers[1].change = None
    assert_same(full_weights(model), before, "weights")
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_a_compiled_layer_that_writes_raises(context: RankContext) -> None:
    """Its graph writes at its end."""
    let_dynamo_look()
    model: Any = StreamShard(_with_change(CHANGES["in place"])(), precision=FP32)
    model.layers[1].compile(backend="aot_eager")
    with pytest.raises(ShardingError, match=r"'layers\.1\.linear\.weight' was changed in place"):
        model(vector_batch(0, context.rank))


@on_ranks(1, 2)
def test_a_forward_pre_hook_that_writes_raises(context: RankContext) -> None:
    """It runs inside the pass, which computes with a copy of the weights."""

    def shrink(module: nn.Module, args: Any) -> None:
        for param in module.parameters():
            param.data.mul_(0.75)

    model = StreamShard(Stack(), precision=FP32)
    model.register_forward_pre_hook(shrink)
    with pytest.raises(ShardingError, match=r"layers\.0\.linear\.weight|head\.weight"):
        model(vector_batch(0, context.rank))
