"""Passes that are not one forward and one backward: recomputation, retained graphs, several forwards, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import families
from tests.models import Block, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, assert_trains_like_plain, case, lm_step


class RecomputedInside(Block):
    """A block that recomputes its own attention."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[rows, length, dim] -> the same"""
        mixed: Any = checkpoint(
            lambda y: self.attention(self.attention_norm(y), mask=mask), x, use_reentrant=self.reentrant
        )
        x = x + mixed
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.mlp_norm(x)))))
        return out


class Recomputed(TinyLM):
    """A `TinyLM` that recomputes `span` blocks at a time, with blocks of the class `inside`."""

    span = 1
    reentrant = False
    context_fn: Any = None
    inside: type[nn.Module] | None = None

    def __init__(self) -> None:
        super().__init__(TinyConfig(dropout=0.3))
        if self.inside is not None:
            self.blocks = nn.ModuleList(self.inside() for _ in range(4))

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The blocks, `span` of them in one checkpoint."""
        for first in range(0, 4, self.span):
            blocks = list(self.blocks)[first : first + self.span]

            def run(y: Tensor, blocks: list[nn.Module] = blocks) -> Tensor:
                for block in blocks:
                    y = block(y, mask=mask)
                return y

            options = {} if self.context_fn is None else {"context_fn": type(self).context_fn}
            out: Any = checkpoint(run if self.span > 1 else blocks[0], x, use_reentrant=self.reentrant, **options)
            x = out
        return x


def _keeping_matmuls() -> Any:
    """Selective checkpointing: what matmuls give is kept, the rest is computed again."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _recomputed(**attributes: Any) -> type[Recomputed]:
    return type("Recomputed", (Recomputed,), attributes)


RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    "three units, then one, reentrant": _recomputed(span=3, reentrant=True),
    "a checkpoint in a checkpoint": _recomputed(span=2, inside=RecomputedInside),
    "some operations only": _recomputed(context_fn=_keeping_matmuls),
}


@on_ranks(2)
def test_recomputed_activations_give_the_same_numbers(context: RankContext) -> None:
    """Checkpoints inside, around and across units, and of the whole model; dropout falls the same way again."""
    for name, build in RECOMPUTED.items():
        with case(name):
            assert_trains_like_plain(context, build, lm_step)

    def whole(model: nn.Module, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        out: Any = checkpoint(model, x, use_reentrant=False)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, Stack, whole)


def _two_losses(model: nn.Module, call: Call) -> Tensor:
    """Two losses on one forward, backward one after the other."""
    out = model(vector_batch(call.step, call.rank))
    call.backward(out.square().mean(), retain_graph=True)
    return call.backward(out.abs().mean())


def _backwards_in_reverse(model: nn.Module, call: Call) -> Tensor:
    """Two forwards, then their backwards in reverse order."""
    first = model(vector_batch(call.step, call.rank)).square().mean()
    second = model(vector_batch(call.step + 100, call.rank)).abs().mean()
    return call.backward(second) + call.backward(first)


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
    "two losses": _two_losses,
    "backwards in reverse": _backwards_in_reverse,
    "evaluation between forward and backward": _evaluation_between,
    "a partial backward first": _partial_backward,
}


@on_ranks(1, 2)
def test_forwards_and_backwards_in_any_number_and_order(context: RankContext) -> None:
    """Gradients of all of them add up as in plain PyTorch."""
    for name, step in BACKWARDS.items():
        with case(name):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2))


@on_ranks(2)
def test_generate_gives_the_tokens_of_plain_pytorch(context: RankContext) -> None:
    """Before and after training steps; every rank has its own prompt."""

    def step(model: Any, call: Call) -> Tensor:
        total = torch.zeros(())
        prompt = token_batch(call.step, call.rank, rows=1, length=4)
        model.eval()
        for options in ({"do_sample": True, "top_k": 5}, {"num_beams": 2, "do_sample": False}):
            out = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, **options)
            total = total + (out * torch.arange(out.shape[1])).sum()
        model.train()
        tokens = token_batch(call.step, call.rank)
        return total + call.backward(model(input_ids=tokens, labels=tokens).loss)

    assert_trains_like_plain(context, lambda: families.llama(eos_token_id=None, bos_token_id=1), step, steps=2)


@on_ranks(2)
def test_autocast_computes_in_bf16_from_fp32_weights(context: RankContext) -> None:
    """As plain PyTorch does. The weights are gathered in fp32, twice the bytes."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model(tokens), tokens)
        return call.backward(loss)

    assert_trains_like_plain(context, TinyLM, step)
