"""Layers that do not run once each in registration order, and passes that are not one forward and one backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.models import Block, Layer, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    Call,
    assert_trains_like_plain,
    case,
    lm_step,
)


@on_ranks(2)
def test_training_through_submodules_without_the_roots_forward(context: RankContext) -> None:
    """`model[1](model[0](x))` trains like `model(x)`, from the start and after ordinary steps."""

    def build() -> nn.Module:
        encoder = Stack((16, 16, 16, 16))
        encoder.head = nn.Linear(16, 16)
        return nn.Sequential(encoder, Stack((16, 16, 16, 16)))

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank)
        out = model(x) if call.step == 1 else model[1](model[0](x))
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, build, step, units=[Layer])


# -- recomputation, retained graphs, evaluation ------------------------------------------------------------------------


class RecomputedInside(Block):
    """A block that recomputes its own attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed: Any = checkpoint(lambda y: self.attention(self.attention_norm(y), mask=mask), x, use_reentrant=False)
        x = x + mixed
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.mlp_norm(x)))))
        return out


class InPairs(TinyLM):
    """A checkpoint around each two blocks, which have others inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecomputedInside(dropout=0.3) for _ in range(4))

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for pair in (self.blocks[:2], self.blocks[2:]):
            out: Any = checkpoint(nn.Sequential(*pair), x, use_reentrant=False)
            x = out
        return x


class Selective(TinyLM):
    """Keeps what matmuls give; the rest is computed again."""

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        options = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            out: Any = checkpoint(block, x, use_reentrant=False, context_fn=options)
            x = out
        return x


@on_ranks(2)
def test_recomputed_activations_give_the_same_numbers(context: RankContext) -> None:
    """Checkpoints inside, around and across units, and of the whole model; dropout falls the same way again."""
    for build in (InPairs, lambda: Selective(TinyConfig(dropout=0.3))):
        assert_trains_like_plain(context, build, lm_step)

    def whole(model: nn.Module, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        out: Any = checkpoint(model, x, use_reentrant=False)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, Stack, whole)


def _evaluation_between(model: nn.Module, call: Call) -> Tensor:
    """Forwards without gradients between forward and backward."""
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(vector_batch(call.step + 100, call.rank, rows=7))
    return call.backward(loss)


def _partial_backward(model: Any, call: Call) -> Tensor:
    """Backward of a loss on half of the layers, then of one on all."""
    x = vector_batch(call.step, call.rank)
    hidden: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: hidden.append(out))
    out = model(x)
    hook.remove()
    call.backward(hidden[0].square().mean(), retain_graph=True)
    return call.backward(out.square().mean())


BACKWARDS: dict[str, Callable[[Any, Call], Tensor]] = {
    "evaluation between forward and backward": _evaluation_between,
    "a partial backward first": _partial_backward,
}


@on_ranks(1, 2)
def test_forwards_and_backwards_in_any_number_and_order(context: RankContext) -> None:
    """Gradients of all of them add up as in plain PyTorch."""
    for name, step in BACKWARDS.items():
        with case(name):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2))
