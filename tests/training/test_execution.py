"""Layers that do not run once each in registration order, and passes that are not one forward and one backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import families
from tests.models import Block, Layer, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    SETTINGS,
    Call,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    case,
    counted_collectives,
    engine_inside,
    lm_step,
    sharded_model,
    stack_step,
)
from tests.scenarios import RoutedStack, over_sockets


def planned_step(plans: dict[tuple[int, int], list[int]]) -> Any:
    """Step function that runs `plans[step, rank]`; a missing key means registration order."""

    def step(model: nn.Module, call: Call) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        inner.route = plans.get((call.step, call.rank), list(range(len(inner.layers))))
        return stack_step(model, call)

    return step


def same_on_all_ranks(*plans: list[int]) -> dict[tuple[int, int], list[int]]:
    """The plans of steps 0, 1, ... on every rank."""
    return {(step, rank): plan for step, plan in enumerate(plans) for rank in range(4)}


def _dropped_layers() -> dict[tuple[int, int], list[int]]:
    """Every rank drops layers at random in every step."""
    generator = torch.Generator().manual_seed(5)
    keys = [(step, rank) for step in range(4) for rank in range(3)]
    return {key: [layer for layer in range(4) if torch.rand((), generator=generator) > 0.4] for key in keys}


DIFFERENT = {
    "a different layer on each rank": {(step, rank): [0, 1 + rank, 3] for step in range(4) for rank in range(2)},
    "rank 1 uses no layer": {(step, 1): [] for step in range(4)},
    "another order first, then different layers": {
        **same_on_all_ranks([2, 0, 3, 1], [2, 0, 3, 1]),
        **{(2, 0): [2, 0], (2, 1): [0, 3, 1], (3, 0): [3], (3, 1): [2, 1]},
    },
    "ranks contradict each other at first": {
        **same_on_all_ranks(*[[1, 3]] * 4),
        **{(0, 0): [3, 2, 1, 0, 1], (0, 1): [1, 0, 3, 3, 2]},
    },
    "dropped layers": _dropped_layers(),
}


@on_ranks(2, 3)
def test_ranks_may_run_different_layers(context: RankContext) -> None:
    """A rank without a gradient contributes zeros; the numbers are those of DDP with `find_unused_parameters`."""
    for name, plans in DIFFERENT.items():
        if context.world_size == 2 or name == "dropped layers":
            with case(name):
                assert_trains_like_ddp(context, lambda: RoutedStack(4), planned_step(plans))


class _InPairs(RoutedStack):
    """Each reentrant checkpoint has two layers."""

    def order(self) -> Any:
        layers = list(self.layers)
        for pair in zip(layers[::2], layers[1::2], strict=True):
            yield lambda x, pair=pair: checkpoint(lambda y: pair[1](pair[0](y)), x, use_reentrant=True)


@on_ranks(2)
def test_layers_of_one_reentrant_checkpoint_are_reduced_once(context: RankContext) -> None:
    """Backward comes to the second layer first, although the first one is recomputed first."""
    model = sharded_model(lambda: _InPairs(4))

    def step(number: int) -> None:
        model(vector_batch(number, context.rank).requires_grad_()).square().mean().backward()

    step(0)
    with counted_collectives(model) as counts:
        step(1)
    assert counts["reduce_scatter"] == len(engine_inside(model).units)


class Placeholders(nn.Module):
    """A layer whose parameters have no elements; one trains, one is frozen in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 16))
        self.frozen = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same, plus sums of nothing."""
        return x + self.weight.sum() + self.frozen.sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("sockets", [False, True])
def test_units_of_empty_parameters_train_like_any_other(context: RankContext, sockets: bool) -> None:
    """Streamed and resident ones, and a layer with other parameters too."""

    def build() -> nn.Module:
        stack = Stack()
        stack.layers.insert(1, Placeholders())
        stack.layers.append(nn.Sequential(Layer(), Placeholders()))
        return stack

    units = ["layers.0", "layers.1", "layers.5"]
    with over_sockets() if sockets else contextlib.nullcontext():
        for settings in (*SETTINGS.values(), {"resident": ["layers.1"]}):
            with case(settings):
                assert_trains_like_plain(context, build, stack_step, steps=3, units=units, **settings)


class EncoderDecoder(nn.Module):
    """Two stacks that users call one after the other themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack((16, 16, 16, 16))
        self.encoder.head = nn.Linear(16, 16)
        self.decoder = Stack((16, 16, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        out: Tensor = self.decoder(self.encoder(x))
        return out


@on_ranks(2)
@pytest.mark.parametrize("from_step", [0, 2])
def test_training_through_submodules_without_the_roots_forward(context: RankContext, from_step: int) -> None:
    """`model.decoder(model.encoder(x))` trains like `model(x)`, from the start and after ordinary steps."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank)
        out = model.decoder(model.encoder(x)) if call.step >= from_step else model(x)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, EncoderDecoder, step, units=[Layer])


# -- recomputation, retained graphs, evaluation ------------------------------------------------------------------------


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
