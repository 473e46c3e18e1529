"""Frozen parameters: whole units, parts of units, frozen and unfrozen between steps, adapters on frozen layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import StreamShard
from tests.models import Adapter, TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, adamw, assert_trains_like_ddp, assert_trains_like_plain, lm_step


def freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    """Freeze every parameter whose name starts with one of `prefixes`."""
    for name, p in model.named_parameters():
        if name.startswith(prefixes):
            p.requires_grad_(False)
    return model


FROZEN = {
    "first block": ("blocks.0.",),
    "middle blocks": ("blocks.1.", "blocks.2."),
    "last block": ("blocks.3.",),
    "all blocks": ("blocks.",),
    "all but the head": ("embedding", "positions", "blocks.", "norm"),
    "all but the embedding": ("positions", "blocks.", "norm", "head"),
    "embedding and first blocks": ("embedding", "positions", "blocks.0.", "blocks.1."),
    "attention of every block": tuple(f"blocks.{i}.attention." for i in range(4)),
    "one weight in the middle of a block": ("blocks.1.up.weight",),
    "every bias": tuple(name for name, _ in TinyLM().named_parameters() if name.endswith("bias")),
}


@on_ranks(2)
@pytest.mark.parametrize("what", FROZEN)
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(context: RankContext, what: str) -> None:
    """Whole units, parts of a unit, everything before or after some point."""
    assert_trains_like_plain(context, lambda: freeze(TinyLM(), *FROZEN[what]), lm_step, steps=3, checked=(0, 2))


@on_ranks(1, 3)
@pytest.mark.parametrize("what", ["middle blocks", "attention of every block"])
def test_frozen_parameters_at_other_numbers_of_ranks(context: RankContext, what: str) -> None:
    """A mixed unit divides into pieces that are frozen, trained, or both."""
    assert_trains_like_plain(context, lambda: freeze(TinyLM(), *FROZEN[what]), lm_step, steps=3, checked=(0, 2))


@on_ranks(2)
def test_frozen_parameters_as_in_ddp(context: RankContext) -> None:
    """The same against real DDP."""
    assert_trains_like_ddp(context, lambda: freeze(TinyLM(), *FROZEN["attention of every block"]), lm_step)


def trainable_adamw(model: nn.Module) -> Optimizer:
    """The optimizer sees only what requires a gradient, as fine-tuning scripts do."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


@on_ranks(2)
def test_an_optimizer_of_the_trainable_parameters_only(context: RankContext) -> None:
    """Frozen parameters stay as they are, weight decay included."""
    assert_trains_like_plain(
        context, lambda: freeze(TinyLM(), *FROZEN["middle blocks"]), lm_step, optimizer=trainable_adamw
    )


SCHEDULES: dict[str, dict[int, tuple[str, ...]]] = {
    "unfreeze a block": {0: ("blocks.1.",), 2: ()},
    "freeze a block": {0: (), 2: ("blocks.1.",)},
    "move up the stack": {0: ("blocks.0.",), 1: ("blocks.1.",), 2: ("blocks.2.",), 3: ("blocks.3.",)},
    "freeze part of a block and the edge": {0: (), 1: ("blocks.2.attention.", "embedding"), 3: ("head",)},
    "unfreeze everything at the end": {0: ("embedding", "positions", "blocks."), 3: ()},
}


@on_ranks(2)
@pytest.mark.parametrize("slots", [2, "all"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_trained_when_it_was_sharded_can_be_frozen_and_unfrozen(
    context: RankContext, name: str, slots: Any
) -> None:
    """`requires_grad_` takes effect at the next forward: gradual unfreezing freezes after `StreamShard(model)`."""
    schedule = SCHEDULES[name]

    def prepare(model: nn.Module, number: int) -> None:
        if number in schedule:
            model.requires_grad_(True)
            freeze(model, *schedule[number] or ("nothing",))

    settings = {"weight_slots": slots, "grad_slots": slots}
    assert_trains_like_plain(context, TinyLM, lm_step, prepare=prepare, steps=5, checked=(1, 2, 4), **settings)


@on_ranks(2)
def test_module_requires_grad_works_on_a_submodule(context: RankContext) -> None:
    """`model.blocks[2].requires_grad_(False)`, and back."""

    def prepare(model: Any, number: int) -> None:
        model.blocks[2].requires_grad_(number % 2 == 1)

    assert_trains_like_plain(context, TinyLM, lm_step, prepare=prepare, steps=5, checked=(1, 4))


@on_ranks(1, 2)
def test_a_model_frozen_throughout_says_so_at_backward(context: RankContext) -> None:
    """The error is PyTorch's own, and training goes on once something is unfrozen."""
    model = freeze(StreamShard(TinyLM(), precision=FP32), "")
    tokens = token_batch(0, context.rank)
    loss = next_token_loss(model(tokens), tokens)
    assert not loss.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()  # type: ignore[no-untyped-call]
    model.requires_grad_(True)
    lm_step(model, Call(0, context.rank, context.world_size, 1.0))
    assert all(p.grad is not None for p in model.parameters())


def with_adapters() -> nn.Module:
    """LoRA: the model frozen, low-rank updates on two projections of each block."""
    model = TinyLM()
    model.requires_grad_(False)
    for block in model.blocks:
        inner: Any = block
        inner.attention.qkv = Adapter(inner.attention.qkv)
        inner.up = Adapter(inner.up)
    return model


@on_ranks(1, 2, 3)
def test_adapters_on_a_frozen_model_train(context: RankContext) -> None:
    """Only the adapters get gradients and move."""
    model = assert_trains_like_plain(context, with_adapters, lm_step, optimizer=trainable_adamw)
    moved = {name for name, p in model.named_parameters() if p.grad is not None or p.requires_grad}
    assert all(name.endswith((".up", ".down")) for name in moved)
    assert len(moved) == 16


@on_ranks(2)
def test_adapters_train_with_checkpointed_blocks_and_inputs_that_need_gradients(context: RankContext) -> None:
    """The usual fine-tuning set-up: inputs made to require gradients, blocks recomputed."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(TinyLM):
        def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
            x = x.requires_grad_() if x.is_leaf else x
            for block in self.blocks:
                x = checkpoint(block, x, mask, use_reentrant=False)  # type: ignore[assignment]
            return x

    def build() -> nn.Module:
        model = with_adapters()
        model.__class__ = Checkpointed
        return model

    assert_trains_like_plain(context, build, lm_step, optimizer=adamw)
