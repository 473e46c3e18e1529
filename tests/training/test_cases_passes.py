"""Passes that are not one forward and one backward: recomputation, retained graphs, several forwards, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential

from streamshard import StreamShard
from tests import families
from tests.models import Block, Layer, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)
from tests.scenarios import SCENARIOS, RoutedStack

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


class RecomputedInsideReentrant(RecomputedInside):
    """The same with the old kind of checkpoint."""

    reentrant = True


class Recomputed(TinyLM):
    """A `TinyLM` that recomputes `span` blocks at a time, or its own inside."""

    span = 1
    reentrant = False
    inside: type[nn.Module] | None = None

    def __init__(self) -> None:
        super().__init__(TinyConfig(dropout=0.3))
        if self.inside is not None:
            self.blocks = nn.ModuleList(self.inside() for _ in range(4))

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The blocks, `span` of them in one checkpoint."""
        if self.inside is not None:
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
    "inside a unit": _recomputed(inside=RecomputedInside),
    "inside a unit, reentrant": _recomputed(inside=RecomputedInsideReentrant),
    "each unit": _recomputed(),
    "each unit, reentrant": _recomputed(reentrant=True),
    "two units at a time": _recomputed(span=2),
    "two units at a time, reentrant": _recomputed(span=2, reentrant=True),
    "three units, then one": _recomputed(span=3),
    "three units, then one, reentrant": _recomputed(span=3, reentrant=True),
    "all units": _recomputed(span=4),
    "all units, reentrant": _recomputed(span=4, reentrant=True),
}


@on_ranks(2)
@pytest.mark.parametrize("what", RECOMPUTED)
def test_recomputed_activations_give_the_same_numbers(context: RankContext, what: str) -> None:
    """Checkpoints inside, around and across units; dropout falls the same way in the recomputation."""
    assert_trains_like_plain(context, RECOMPUTED[what], lm_step)


@on_ranks(1, 3)
@pytest.mark.parametrize("what", ["each unit", "two units at a time, reentrant"])
def test_recomputed_activations_at_other_numbers_of_ranks(context: RankContext, what: str) -> None:
    """The same at 1 and 3 ranks."""
    assert_trains_like_plain(context, RECOMPUTED[what], lm_step)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_model_may_be_recomputed(context: RankContext, reentrant: bool) -> None:
    """A checkpoint around the root's forward."""

    def step(model: nn.Module, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        out: Any = checkpoint(model, x, use_reentrant=reentrant)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, Stack, step)


@on_ranks(2)
def test_a_checkpoint_inside_a_checkpoint(context: RankContext) -> None:
    """Blocks that recompute their attention inside a checkpoint of two blocks."""

    class Nested(Recomputed):
        span = 2

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(RecomputedInside() for _ in range(4))

    assert_trains_like_plain(context, Nested, lm_step)


class Listing(Stack):
    """Has a parameter in a list too, and recomputes what is made with it."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.listed = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        y: Any = checkpoint(lambda z: torch.tanh(z * self.listed[0]), x.requires_grad_(), use_reentrant=self.reentrant)
        return super().forward(y)


@on_ranks(1, 2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_in_lists_are_whole_in_a_recomputation(context: RankContext, reentrant: bool) -> None:
    """Those of the root, which no layer brings with it."""
    assert_trains_like_plain(context, type("Listing", (Listing,), {"reentrant": reentrant}), stack_step)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(context: RankContext, reentrant: bool) -> None:
    """PyTorch's own helper over the layers."""

    class Segments(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            y: Any = checkpoint_sequential(list(self.layers), 2, x, use_reentrant=reentrant)
            out: Tensor = self.head(y)
            return out

    assert_trains_like_plain(context, Segments, stack_step)


@on_ranks(2)
def test_selective_checkpoints(context: RankContext) -> None:
    """Matmuls are kept, the rest is recomputed."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y: Any = checkpoint(
                    layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
                )
                x = y
            out: Tensor = self.head(x)
            return out

    assert_trains_like_plain(context, Selective, stack_step)


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


@on_ranks(2)
def test_a_layer_recomputed_only_now_and_then(context: RankContext) -> None:
    """Which layers are checkpointed changes from step to step."""

    class Sometimes(Stack):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                if (index + self.step) % 2:
                    y: Any = checkpoint(layer, x, use_reentrant=False)
                    x = y
                else:
                    x = layer(x)
            out: Tensor = self.head(x)
            return out

    def step(model: Any, call: Call) -> Tensor:
        model.step = call.step
        return stack_step(model, call)

    assert_trains_like_plain(context, Sometimes, step)


# ---------------------------------------------------------------------------------------------- several backwards


def _retained(model: nn.Module, call: Call) -> Tensor:
    """The same graph twice."""
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    call.backward(loss, retain_graph=True)
    return call.backward(loss)


def _two_losses(model: nn.Module, call: Call) -> Tensor:
    """Two losses on one forward, backward one after the other."""
    out = model(vector_batch(call.step, call.rank))
    call.backward(out.square().mean(), retain_graph=True)
    return call.backward(out.abs().mean())


def _two_forwards(model: nn.Module, call: Call) -> Tensor:
    """Two forwards, one backward through both."""
    a = model(vector_batch(call.step, call.rank))
    b = model(vector_batch(call.step + 100, call.rank, rows=3))
    return call.backward(a.square().mean() + b.abs().mean())


def _three_forwards(model: nn.Module, call: Call) -> Tensor:
    """Each forward takes the former's output, one backward through all."""
    x = vector_batch(call.step, call.rank)
    for _ in range(3):
        x = x * 0.5 + model(x)
    return call.backward(x.square().mean())


def _forward_forward_backward_backward(model: nn.Module, call: Call) -> Tensor:
    """Two forwards, then their backwards in the same order."""
    first = model(vector_batch(call.step, call.rank)).square().mean()
    second = model(vector_batch(call.step + 100, call.rank)).abs().mean()
    return call.backward(first) + call.backward(second)


def _backwards_in_reverse(model: nn.Module, call: Call) -> Tensor:
    """Two forwards, then their backwards in reverse order."""
    first = model(vector_batch(call.step, call.rank)).square().mean()
    second = model(vector_batch(call.step + 100, call.rank)).abs().mean()
    return call.backward(second) + call.backward(first)


def _forward_without_backward(model: nn.Module, call: Call) -> Tensor:
    """A forward whose graph is thrown away, then an ordinary step."""
    model(vector_batch(call.step + 100, call.rank)).square().mean()
    return stack_step(model, call)


def _kept_without_backward(model: Any, call: Call) -> Tensor:
    """A forward whose output is kept for long but never used."""
    model.kept = model(vector_batch(call.step + 100, call.rank))
    return stack_step(model, call)


def _evaluation_between(model: nn.Module, call: Call) -> Tensor:
    """A forward under `no_grad` between forward and backward."""
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    with torch.no_grad():
        model(vector_batch(call.step + 100, call.rank, rows=7))
    return call.backward(loss)


def _inference_between(model: nn.Module, call: Call) -> Tensor:
    """A forward in inference mode between forward and backward."""
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    with torch.inference_mode():
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


def _gradient_penalty(model: nn.Module, call: Call) -> Tensor:
    """The loss contains a gradient: backward through a backward."""
    x = vector_batch(call.step, call.rank).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
    return call.backward(out.square().mean() + 0.1 * slope.square().mean())


BACKWARDS: dict[str, Callable[[Any, Call], Tensor]] = {
    "retain_graph": _retained,
    "two losses": _two_losses,
    "two forwards, one backward": _two_forwards,
    "three forwards, one backward": _three_forwards,
    "forward forward backward backward": _forward_forward_backward_backward,
    "backwards in reverse": _backwards_in_reverse,
    "a forward without backward": _forward_without_backward,
    "a kept forward without backward": _kept_without_backward,
    "no_grad between forward and backward": _evaluation_between,
    "inference mode between forward and backward": _inference_between,
    "a partial backward first": _partial_backward,
}


@on_ranks(2)
@pytest.mark.parametrize("what", BACKWARDS)
def test_forwards_and_backwards_in_any_number_and_order(context: RankContext, what: str) -> None:
    """Gradients of all of them add up as in plain PyTorch."""
    assert_trains_like_plain(context, Stack, BACKWARDS[what], checked=(0, 2))


@on_ranks(1, 3)
@pytest.mark.parametrize("what", ["two forwards, one backward", "backwards in reverse", "retain_graph"])
def test_forwards_and_backwards_at_other_numbers_of_ranks(context: RankContext, what: str) -> None:
    """The same at 1 and 3 ranks."""
    assert_trains_like_plain(context, Stack, BACKWARDS[what])


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["two forwards, one backward", "retain_graph", "two losses"])
def test_recomputed_layers_with_several_forwards_and_backwards(
    context: RankContext, what: str, reentrant: bool
) -> None:
    """Checkpoints and repeated passes together. Those of the old kind give each pass's gradients by themselves."""

    class CheckpointedStack(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            for layer in self.layers:
                y: Any = checkpoint(layer, x, use_reentrant=reentrant)
                x = y
            out: Tensor = self.head(x)
            return out

    assert_trains_like_plain(context, CheckpointedStack, BACKWARDS[what])


@on_ranks(1, 2)
def test_a_backward_through_a_backward_is_right_or_raises(context: RankContext) -> None:
    """Gradient penalties need second derivatives; a wrong gradient must not come out quietly."""
    try:
        assert_trains_like_plain(context, Stack, _gradient_penalty, checked=(0, 2))
    except RuntimeError as error:
        assert "create_graph" in str(error) or "layers." in str(error)  # says what is the matter


# ---------------------------------------------------------------------------------------------- evaluation


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("mode", "first"), [(torch.no_grad, True), (torch.inference_mode, True), (torch.no_grad, False)]
)
def test_evaluation_between_training_steps(context: RankContext, mode: Any, first: bool) -> None:
    """It sees the weights of the last step, disturbs nothing, and may come before the first training step."""
    torch.manual_seed(7)
    plain = TinyLM(TinyConfig(dropout=0.2))
    torch.manual_seed(7)
    model = StreamShard(TinyLM(TinyConfig(dropout=0.2)), precision=FP32)
    optimizers = sgd(plain), sgd(model)
    size = context.world_size
    for number in range(3):
        if number > 0 or first:
            tokens = token_batch(number + 50, context.rank, rows=3)
            plain.eval(), model.eval()
            with mode():
                assert_same({"logits": model(tokens)}, {"logits": plain(tokens)}, f"evaluation before step {number}")
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


@on_ranks(2)
def test_evaluation_only_needs_no_optimizer_and_no_backward(context: RankContext) -> None:
    """Many forwards in a row, with batches of changing sizes."""
    torch.manual_seed(7)
    plain = TinyLM()
    torch.manual_seed(7)
    model = StreamShard(TinyLM(), precision=FP32)
    with torch.no_grad():
        for number in range(5):
            tokens = token_batch(number, context.rank, rows=1 + number, length=8 - number)
            assert_same({"logits": model(tokens)}, {"logits": plain(tokens)}, f"forward {number}")


def _tiny_llama() -> Any:
    torch.manual_seed(7)
    return families.llama(eos_token_id=None, bos_token_id=1)


@on_ranks()
@pytest.mark.parametrize(("world_size", "how"), [(1, "greedy"), (2, "greedy"), (2, "sample"), (2, "beams")])
def test_generate_gives_the_tokens_of_plain_pytorch(context: RankContext, how: str) -> None:
    """Before and after training steps; every rank has its own prompt."""
    plain, model = _tiny_llama(), StreamShard(_tiny_llama(), precision=FP32)
    size = context.world_size
    options = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "top_k": 5},
        "beams": {"num_beams": 2, "do_sample": False},
    }[how]
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
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_an_encoder_decoder_generates(context: RankContext) -> None:
    """`generate` calls the encoder by itself, outside the root's forward."""
    torch.manual_seed(7)
    plain: Any = families.t5().eval()
    torch.manual_seed(7)
    model: Any = StreamShard(families.t5().eval(), precision=FP32)
    prompt = token_batch(0, context.rank, rows=1, length=4)
    mask = torch.ones_like(prompt)
    wanted, found = (
        m.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=4, min_new_tokens=4) for m in (plain, model)
    )
    assert torch.equal(found, wanted)


@on_ranks(2)
def test_functional_evaluation_with_dropout_off_is_repeatable(context: RankContext) -> None:
    """The same input gives the same bits, whatever was in the slots before."""
    model = StreamShard(Stack((16, 8, 32, 16, 16)), precision=FP32)
    x = vector_batch(0, context.rank)
    with torch.no_grad():
        first = model(x)
        model(vector_batch(1, context.rank))
        assert_same({"out": model(x)}, {"out": first}, "second time", EXACT)


@on_ranks(2)
def test_the_random_state_is_the_users(context: RankContext) -> None:
    """Sharding, forward and backward draw no random numbers of their own."""
    model = Stack()
    before = torch.get_rng_state()
    sharded = StreamShard(model, precision=FP32, units=[Layer])
    stack_step(sharded, Call(0, context.rank, 2, 1.0))
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_a_step_with_autocast(context: RankContext) -> None:
    """`torch.autocast` around forward computes in bf16 from fp32 weights, with gradients close to fp32's."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model(tokens), tokens)
        return call.backward(loss)

    with pytest.warns(UserWarning, match="autocast around layers that compute with fp32 weights") as said:
        assert_trains_like_plain(context, TinyLM, step)
    assert len(said) == 1
    assert said[0].filename == __file__


@on_ranks(1, 2, 3)
def test_a_kept_graph_can_join_a_later_backward(context: RankContext) -> None:
    """Gradients of one unit come in several parts: of the later forward first, then of the kept one."""

    def step(model: nn.Module, call: Call) -> Tensor:
        SCENARIOS["a kept graph"].step(model, call)
        return torch.zeros(())

    assert_trains_like_plain(context, RoutedStack, step)
