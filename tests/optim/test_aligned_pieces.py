"""Pieces that are whole blocks: optimizers with state in blocks train as on the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard import StreamShard
from streamshard.optim import elementwise
from tests.models import Stack, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    adamw,
    assert_same,
    assert_trains_like_plain,
    engine_inside,
    full_weights,
    lm_step,
)

WIDTHS = (24, 40, 56, 24)


@elementwise
class _Blockwise(Optimizer):
    """Scales gradients by what it keeps for each block of 32 elements, as 8-bit optimizers scale their moments."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                numel = param.numel()
                blocks = nn.functional.pad(param.grad.reshape(-1), (0, -numel % 32)).view(-1, 32)
                largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-3)
                scale = self.state[param].setdefault("scale", torch.ones_like(largest)).lerp_(largest, 0.5)
                param.view(-1).sub_(0.01 * (blocks / scale).view(-1)[:numel])


def _train_both(**settings: Any) -> Any:
    """The same batch on all ranks, whose number is a power of two: the mean of gradients is no rounding away."""
    torch.manual_seed(3)
    plain = Stack(WIDTHS)
    model: Any = StreamShard(copy.deepcopy(plain), precision=FP32, **settings)
    steps = [(each, _Blockwise(each.parameters())) for each in (plain, model)]
    for number in range(4):
        for each, stepped in steps:
            each(vector_batch(number, 0, rows=8, dim=WIDTHS[0])).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    return plain, model


@on_ranks(2)
def test_blockwise_state_is_that_of_the_unsharded_model(context: RankContext) -> None:
    """To the bit, where no block is cut; else they are others."""
    plain, model = _train_both(align_pieces_to=64)
    assert_same(full_weights(model), dict(plain.state_dict()), "weights", EXACT)
    plain, model = _train_both()
    weights = full_weights(model)
    assert any(not torch.equal(weights[name], value) for name, value in plain.state_dict().items())


@on_ranks(3)
def test_a_transformer_with_aligned_pieces_trains_like_plain_pytorch(context: RankContext) -> None:
    """Gradients are collected, and lie where their weights do."""
    model: Any = assert_trains_like_plain(context, TinyLM, lm_step, optimizer=adamw, align_pieces_to=24)
    report = model.memory_report()
    layouts = [flat_param.layout for unit in engine_inside(model).units for flat_param in unit.flat_params]
    assert report.padded_numel == sum(layout.padded_numel for layout in layouts) >= report.numel
