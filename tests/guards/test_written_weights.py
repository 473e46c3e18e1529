"""In-place changes of weights in a model's own forward raise by name: what layers compute with are copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, StreamShard
from streamshard.errors import ShardingError
from tests.compare import assert_same, full_weights
from tests.faults import case, let_dynamo_look
from tests.models import DIM, Layer, Stack, stack_of, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, stack_step

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
        if self.change is not None:
            with torch.no_grad():
                self.change(self.linear.weight)
        for layer in self.inner:
            x = layer(x)
        return super().forward(x)


WritingStack = stack_of(WritingLayer)


@on_ranks(1, 2)
def test_a_layer_that_writes_to_its_weight_raises(context: RankContext) -> None:
    """Also when it does so for the first time after steps without."""
    model: Any = StreamShard(WritingStack(), precision=Precision())
    stack_step(model, context.call(0))
    before = full_weights(model)
    wanted = r"'layers\.1\.linear\.weight' was changed in place inside"
    for name, change in CHANGES.items():
        model.layers[1].change = change
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with case(name), mode(), pytest.raises(ShardingError, match=wanted):
                model(vector_batch(0, context.rank))
    model.layers[1].change = None
    assert_same(full_weights(model), before, "weights")
    stack_step(model, context.call(1))


@on_ranks(2)
def test_an_embedding_with_max_norm_raises_with_advice(context: RankContext) -> None:
    """It renormalises what it looks up, which may differ between ranks."""
    stack = Stack()
    stack.embedding = nn.Embedding(12, DIM, max_norm=0.5)
    stack.order = lambda: [stack.embedding, *stack.layers]  # type: ignore[method-assign]
    model = StreamShard(stack, precision=FP32)
    with pytest.raises(ShardingError, match=r"'embedding\.weight' .* renormalise .*max_norm=\.\.\.\) between steps"):
        model(torch.tensor([1 + context.rank]))


@on_ranks(2)
def test_a_clamp_that_changes_nothing_trains(context: RankContext) -> None:
    """Through ``.data``, as transformers' Gemma 3n has it."""

    def clamp(model: Any, number: int) -> None:
        model.layers[1].change = lambda weight: weight.data.clamp_(-100, 100)

    assert_trains_like_plain(context, WritingStack, stack_step, prepare=clamp)


def _root_writes(model: Any) -> None:
    order = model.order
    model.order = lambda: [*order(), lambda x: (model.head.bias.data.mul_(0.5), x)[1]]  # behind all layers


def _layer_writes_and_calls_another(model: Any) -> None:
    """Its slot goes to the layer inside before it is done itself."""
    model.layers[0].change, model.layers[0].inner = CHANGES["in place"], (model.layers[2],)


def _compiled_layer_writes(model: Any) -> None:
    """Its graph writes at its end."""
    let_dynamo_look()
    model.layers[1].change = CHANGES["in place"]
    model.layers[1].compile(backend="aot_eager")


def _hook_writes(model: Any) -> None:
    """It runs inside the pass, which computes with a copy of the weights."""
    model.register_forward_pre_hook(lambda module, _: (module.head.weight.data.mul_(0.75), None)[1])


def _layer_assigns(model: Any) -> None:
    model.layers[1].change = lambda weight: setattr(weight, "data", weight.data / 2)


WRITERS: dict[Callable[[Any], None], str] = {
    _root_writes: r"'head\.bias' was changed in place inside a forward",
    _layer_writes_and_calls_another: r"'layers\.0\.linear\.weight' was changed in place",
    _compiled_layer_writes: r"'layers\.1\.linear\.weight' was changed in place",
    _hook_writes: r"'head\.weight'",
    _layer_assigns: r"'layers\.1\.linear\.weight' was given other memory",
}


@on_ranks(2)
def test_writing_to_a_weight_in_a_forward_raises(context: RankContext) -> None:
    """Where a whole parameter is given other memory its own stays."""
    for write, wanted in WRITERS.items():
        model: Any = WritingStack()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        model = StreamShard(model, precision=FP32)
        write(model)
        with case(write.__name__), pytest.raises(ShardingError, match=wanted):
            model(vector_batch(0, context.rank))
        if write is _layer_assigns:
            assert_same(full_weights(model), before, "weights")
