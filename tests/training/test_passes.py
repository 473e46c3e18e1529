"""Passes that are not one forward and one backward: recomputation, retained graphs, several forwards, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
)

from streamshard import StreamShard
from tests import families
from tests.models import Block, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    assert_same,
    assert_trains_like_plain,
    case,
    full_grads,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)

# ---------------------------------------------------------------------------------------------- recomputation


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
    """A `TinyLM` that recomputes `span` blocks at a time (0: none), with blocks of the class `inside`."""

    span = 1
    reentrant = False
    inside: type[nn.Module] | None = None

    def __init__(self) -> None:
        super().__init__(TinyConfig(dropout=0.3))
        if self.inside is not None:
            self.blocks = nn.ModuleList(self.inside() for _ in range(4))

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The blocks, `span` of them in one checkpoint."""
        if self.span == 0:
            return super().run_blocks(x, mask)
        for first in range(0, 4, self.span):
            blocks = list(self.blocks)[first : first + self.span]

            def run(y: Tensor, blocks: list[nn.Module] = blocks) -> Tensor:
                for block in blocks:
                    y = block(y, mask=mask)
                return y

            out: Any = checkpoint(run if self.span > 1 else blocks[0], x, use_reentrant=self.reentrant)
            x = out
        return x


def _recomputed(**attributes: Any) -> type[Recomputed]:
    return type("Recomputed", (Recomputed,), attributes)


RECOMPUTED: dict[str, Callable[[], nn.Module]] = {
    "inside a unit": _recomputed(span=0, inside=RecomputedInside),
    "each unit": _recomputed(),
    "each unit, reentrant": _recomputed(reentrant=True),
    "two units at a time": _recomputed(span=2),
    "three units, then one, reentrant": _recomputed(span=3, reentrant=True),
    "a checkpoint in a checkpoint": _recomputed(span=2, inside=RecomputedInside),
}


@on_ranks(2, 3)
def test_recomputed_activations_give_the_same_numbers(context: RankContext) -> None:
    """Checkpoints inside, around and across units; dropout falls the same way in the recomputation."""
    for name, build in RECOMPUTED.items():
        with case(name):
            assert_trains_like_plain(context, build, lm_step)


class Segments(Stack):
    """PyTorch's own helper over the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        y: Any = checkpoint_sequential(list(self.layers), 2, x.clone().requires_grad_(), use_reentrant=False)
        out: Tensor = self.head(y)
        return out


@on_ranks(2)
def test_other_ways_to_checkpoint_give_the_same_numbers(context: RankContext) -> None:
    """`checkpoint_sequential`, and the whole model."""

    def whole(model: nn.Module, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        out: Any = checkpoint(model, x, use_reentrant=False)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, Segments, stack_step)
    assert_trains_like_plain(context, Stack, whole)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_a_transformers_model(context: RankContext, reentrant: bool) -> None:
    """Switched on after sharding, as Trainer does, and off again."""

    def switch(model: Any, to: str) -> Any:
        return getattr(model, f"activation_checkpointing_{to}", None) or getattr(model, f"gradient_checkpointing_{to}")

    def prepare(model: Any, number: int) -> None:
        if number == 0:
            switch(model, "enable")({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        if number == 2:
            switch(model, "disable")()

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        return call.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

    assert_trains_like_plain(context, families.llama, step, prepare=prepare)


# ---------------------------------------------------------------------------------------------- several backwards


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


def _kept_without_backward(model: Any, call: Call) -> Tensor:
    """A forward whose output is kept for long but never used, and one whose graph is thrown away."""
    model.kept = model(vector_batch(call.step + 100, call.rank))
    model(vector_batch(call.step + 200, call.rank)).square().mean()
    return stack_step(model, call)


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
    "a kept forward without backward": _kept_without_backward,
    "evaluation between forward and backward": _evaluation_between,
    "a partial backward first": _partial_backward,
}


@on_ranks(1, 2, 3)
def test_forwards_and_backwards_in_any_number_and_order(context: RankContext) -> None:
    """Gradients of all of them add up as in plain PyTorch."""
    for name, step in BACKWARDS.items():
        with case(name):
            assert_trains_like_plain(context, Stack, step, checked=(0, 2))


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_with_several_forwards_and_backwards(context: RankContext, reentrant: bool) -> None:
    """Checkpoints and repeated passes together. Those of the old kind give each pass's gradients by themselves."""

    class CheckpointedStack(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for layer in self.layers:
                y: Any = checkpoint(layer, x, use_reentrant=reentrant)
                x = y
            out: Tensor = self.head(x)
            return out

    for name in ("backwards in reverse", "two losses"):
        with case(name):
            assert_trains_like_plain(context, CheckpointedStack, BACKWARDS[name])


def _gradient_penalty(model: nn.Module, call: Call) -> Tensor:
    """The loss contains a gradient: backward through a backward."""
    x = vector_batch(call.step, call.rank).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
    return call.backward(out.square().mean() + 0.1 * slope.square().mean())


@on_ranks(1, 2)
def test_a_backward_through_a_backward_is_right_or_raises(context: RankContext) -> None:
    """Gradient penalties need second derivatives; a wrong gradient must not come out quietly."""
    try:
        assert_trains_like_plain(context, Stack, _gradient_penalty, checked=(0, 2))
    except RuntimeError as error:
        assert "create_graph" in str(error) or "layers." in str(error)


# ---------------------------------------------------------------------------------------------- evaluation


@on_ranks(1, 2)
@pytest.mark.parametrize(("mode", "is_first"), [(torch.no_grad, False), (torch.inference_mode, True)])
def test_evaluation_between_training_steps(context: RankContext, mode: Any, is_first: bool) -> None:
    """It sees the weights of the last step, disturbs nothing, and may come before the first training step."""
    torch.manual_seed(7)
    plain = TinyLM(TinyConfig(dropout=0.2))
    torch.manual_seed(7)
    model = StreamShard(TinyLM(TinyConfig(dropout=0.2)), precision=FP32)
    optimizers = sgd(plain), sgd(model)
    size = context.world_size
    for number in range(3):
        if number > 0 or is_first:
            plain.eval(), model.eval()
            for rows in (3, 1):
                tokens = token_batch(number + 50, context.rank, rows=rows)
                with mode():
                    assert_same({"logits": model(tokens)}, {"logits": plain(tokens)}, f"evaluation {number}")
                    assert not model(tokens).requires_grad
            plain.train(), model.train()
        for rank in range(size):
            torch.manual_seed(number * 10 + rank)
            lm_step(plain, Call(number, rank, size, 1 / size))
        torch.manual_seed(number * 10 + context.rank)
        lm_step(model, Call(number, context.rank, size, 1.0))
        assert_same(full_grads(model), full_grads(plain), f"gradients of step {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights")


def _tiny_llama() -> Any:
    torch.manual_seed(7)
    return families.llama(eos_token_id=None, bos_token_id=1)


@on_ranks(2)
@pytest.mark.parametrize("how", ["sample", "beams"])
def test_generate_gives_the_tokens_of_plain_pytorch(context: RankContext, how: str) -> None:
    """Before and after training steps; every rank has its own prompt."""
    plain, model = _tiny_llama(), StreamShard(_tiny_llama(), precision=FP32)
    size = context.world_size
    options = {"sample": {"do_sample": True, "top_k": 5}, "beams": {"num_beams": 2, "do_sample": False}}[how]
    optimizers = sgd(plain), sgd(model)
    for number in range(2):
        prompt = token_batch(number, context.rank, rows=1, length=4)
        out = []
        for trained in (plain, model):
            trained.eval()
            torch.manual_seed(number)
            mask = torch.ones_like(prompt)
            out.append(trained.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=5, **options))
            trained.train()
        assert torch.equal(out[0], out[1])
        for rank in range(size):
            tokens = token_batch(number, rank)
            (plain(input_ids=tokens, labels=tokens).loss / size).backward()
        tokens = token_batch(number, context.rank)
        model(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_autocast_computes_in_bf16_from_fp32_weights(context: RankContext) -> None:
    """With a warning: the weights are gathered in fp32, twice the bytes."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model(tokens), tokens)
        return call.backward(loss)

    with pytest.warns(UserWarning, match="autocast around layers that compute with fp32 weights") as said:
        assert_trains_like_plain(context, TinyLM, step)
    assert len(said) == 1
    assert said[0].filename == __file__
