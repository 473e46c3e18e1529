"""An exception in the middle of a step reaches the user as it is, and the next step is right again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from streamshard.log import log
from tests.models import Stack, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    lm_step,
    stack_step,
)


class Trouble(Exception):
    """What the tests raise."""


class Stop(BaseException):
    """Something like KeyboardInterrupt."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise Trouble("backward")


def _in_forward_of(name: str, kind: type[BaseException] = Trouble) -> Callable[[nn.Module, Call], None]:
    def fail(model: nn.Module, call: Call) -> None:
        def hook(module: nn.Module, args: Any) -> None:
            raise kind("forward")

        handle = model.get_submodule(name).register_forward_pre_hook(hook)
        try:
            lm_step(model, call)
        finally:
            handle.remove()

    return fail


def _in_backward_of(name: str) -> Callable[[nn.Module, Call], None]:
    def fail(model: nn.Module, call: Call) -> None:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            raised: Tensor = _RaiseInBackward.apply(out)  # type: ignore[no-untyped-call]
            return raised

        handle = model.get_submodule(name).register_forward_hook(hook)
        try:
            lm_step(model, call)
        finally:
            handle.remove()

    return fail


def _in_the_loss(model: nn.Module, call: Call) -> None:
    model(token_batch(call.step, call.rank))
    raise Trouble("loss")


def _in_the_loss_with_output_kept(model: Any, call: Call) -> None:
    model.kept = model(token_batch(call.step, call.rank))
    raise Trouble("loss")


def _in_an_evaluation(model: nn.Module, call: Call) -> None:
    with torch.no_grad():
        _in_forward_of("blocks.2")(model, call)


def _in_inference(model: nn.Module, call: Call) -> None:
    with torch.inference_mode():
        _in_forward_of("blocks.1.mlp_norm")(model, call)


def _in_recomputation(model: nn.Module, call: Call) -> None:
    """The second run of a checkpointed block raises."""
    runs = []

    def hook(module: nn.Module, args: Any) -> None:
        runs.append(None)
        if len(runs) == 2:
            raise Trouble("recomputation")

    original = model.run_blocks

    def run_blocks(x: Tensor, mask: Tensor | None) -> Tensor:
        for block in model.blocks:  # type: ignore[union-attr]
            y: Any = checkpoint(block, x, use_reentrant=False)
            x = y
        return x

    handle = model.get_submodule("blocks.1.up").register_forward_pre_hook(hook)
    model.run_blocks = run_blocks  # type: ignore[assignment]
    try:
        lm_step(model, call)
    finally:
        handle.remove()
        model.run_blocks = original


def _in_a_gradient_hook(model: Any, call: Call, kind: type[BaseException] = Trouble) -> None:
    """A hook on an activation between two blocks raises in backward."""

    def attach(module: nn.Module, args: Any, out: Tensor) -> None:
        def raise_it(grad: Tensor) -> Tensor:
            raise kind("hook")

        out.register_hook(raise_it)

    handle = model.blocks[2].register_forward_hook(attach)
    try:
        lm_step(model, call)
    finally:
        handle.remove()


def _bad_input(model: nn.Module, call: Call) -> None:
    try:
        model(torch.full((2, 6), 10_000))
    except IndexError as error:
        raise Trouble("bad token") from error


def _second_backward(model: nn.Module, call: Call) -> None:
    """Backward twice without retain_graph."""
    tokens = token_batch(call.step, call.rank)
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise Trouble("second backward") from error


TROUBLES: dict[str, Callable[[nn.Module, Call], None]] = {
    "before the first block": _in_forward_of("blocks.0"),
    "in the middle of forward": _in_forward_of("blocks.2"),
    "inside a block": _in_forward_of("blocks.1.up"),
    "in the head": _in_forward_of("head"),
    "no Exception": _in_forward_of("blocks.2", Stop),
    "at the start of backward": _in_backward_of("head"),
    "in the middle of backward": _in_backward_of("blocks.1"),
    "inside a block's backward": _in_backward_of("blocks.2.up"),
    "at the end of backward": _in_backward_of("embedding"),
    "in a gradient hook": _in_a_gradient_hook,
    "interrupted in backward": functools.partial(_in_a_gradient_hook, kind=Stop),
    "in the loss": _in_the_loss,
    "in the loss, output kept": _in_the_loss_with_output_kept,
    "in evaluation": _in_an_evaluation,
    "in inference mode": _in_inference,
    "in recomputation": _in_recomputation,
    "bad input": _bad_input,
    "a second backward": _second_backward,
}


IN_BACKWARD = ["at the start of backward", "in the middle of backward", "interrupted in backward"]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "where"), [*((2, where) for where in TROUBLES), *((1, where) for where in list(TROUBLES)[1::3])]
)
def test_after_an_exception_the_next_step_is_right(context: RankContext, where: str) -> None:
    """On all ranks, in the very first step and later; the user clears gradients and goes on."""
    trouble = TROUBLES[where]

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step in (0, 2):
            with pytest.raises((Trouble, Stop)):
                trouble(model, call._replace(step=call.step + 70))
            model.zero_grad()
        return lm_step(model, call)

    assert_trains_like_plain(context, TinyLM, step)


@on_ranks(1, 2)
@pytest.mark.parametrize("where", [*IN_BACKWARD, "in recomputation"])
def test_after_an_exception_the_optimizer_alone_may_clear_gradients(context: RankContext, where: str) -> None:
    """From a list of parameters made before: nobody asks the model for anything until its next forward."""

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step == 1:
            params = list(model.parameters())
            with pytest.raises((Trouble, Stop)):
                TROUBLES[where](model, call._replace(step=call.step + 70))
            for param in params:
                param.grad = None
        return lm_step(model, call)

    assert_trains_like_plain(context, TinyLM, step)


@on_ranks(2)
def test_ranks_that_fail_at_different_points_of_a_backward_stay_in_step(context: RankContext) -> None:
    """One of them by an interrupt: it issues what the other has before its next forward."""

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step == 1:
            params = list(model.parameters())
            where = ("interrupted in backward", "at the start of backward")[call.rank]
            with pytest.raises((Trouble, Stop)):
                TROUBLES[where](model, call._replace(step=call.step + 70))
            for param in params:
                param.grad = None
        return lm_step(model, call)

    assert_trains_like_plain(context, TinyLM, step)


@on_ranks(1, 2)
@pytest.mark.parametrize("where", IN_BACKWARD)
def test_after_an_exception_an_earlier_forward_may_be_differentiated(context: RankContext, where: str) -> None:
    """The backward that follows is another one, although no forward comes between."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        loss = next_token_loss(model(tokens), tokens)
        if isinstance(model, StreamShard) and call.step == 1:
            params = list(model.parameters())
            with pytest.raises((Trouble, Stop)):
                TROUBLES[where](model, call._replace(step=call.step + 70))
            for param in params:
                param.grad = None
        return call.backward(loss)

    assert_trains_like_plain(context, TinyLM, step)


@on_ranks()
@pytest.mark.parametrize(("world_size", "slots"), [(1, 2), (2, 2), (2, "all"), (3, "all")])
@pytest.mark.parametrize("waits", [False, True], ids=["reduced", "inside no_sync"])
@pytest.mark.parametrize("clears", [False, True], ids=["not cleared", "cleared"])
def test_when_a_backward_fails_gradients_of_before_are_discarded(
    context: RankContext, slots: Any, waits: bool, clears: bool
) -> None:
    """Plain PyTorch keeps them, and adds to some; whoever goes on with the next batch clears them."""

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            params = list(model.parameters())
            with model.no_sync() if waits else contextlib.nullcontext():
                lm_step(model, call._replace(step=call.step + 30))
                with pytest.raises(Trouble):
                    _in_backward_of("blocks.1")(model, call._replace(step=call.step + 70))
            for param in params if clears else ():
                param.grad = None
        return lm_step(model, call)

    with mock.patch.object(log, "warning") as warned:
        assert_trains_like_plain(context, TinyLM, step, grad_slots=slots)
    assert "all gradients of the model are discarded" in warned.call_args.args[0]


@on_ranks(2)
@pytest.mark.parametrize("where", ["in the middle of forward", "in the middle of backward"])
def test_after_an_exception_parameters_are_the_shards_again(context: RankContext, where: str) -> None:
    """The optimizer and the state dict find what they found before."""
    model = StreamShard(TinyLM(), precision=FP32)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(Trouble):
        TROUBLES[where](model, Call(0, context.rank, 2, 1.0))
    assert set(model.blocks[1].parameters()) <= {p for p, _ in before.values()}
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (p, value) in before.items():
        assert after[name] is p, name
        assert torch.equal(p, value), name
    assert {name: value.shape for name, value in model.state_dict().items() if name in before} == {
        name: value.shape for name, (_, value) in before.items()
    }


@on_ranks(2)
@pytest.mark.parametrize("where", ["in the middle of backward", "in a gradient hook", "in the middle of forward"])
def test_after_an_exception_the_optimizers_parameters_keep_their_own_gradients(
    context: RankContext, where: str
) -> None:
    """Whatever a broken backward left: each gradient fits its parameter, so stepping cannot crash or mix layers."""
    model = StreamShard(TinyLM(), precision=FP32)
    optimizer = adamw(model)
    with pytest.raises(Trouble):
        TROUBLES[where](model, Call(0, context.rank, 2, 1.0))
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.shape == p.shape, name
    optimizer.step()


@on_ranks(2)
def test_many_exceptions_in_a_row(context: RankContext) -> None:
    """Each kind once, then two ordinary steps."""
    torch.manual_seed(7)
    plain = TinyLM()
    torch.manual_seed(7)
    model = StreamShard(TinyLM(), precision=FP32)
    for number, trouble in enumerate(TROUBLES.values()):
        with pytest.raises((Trouble, Stop)):
            trouble(model, Call(number, context.rank, 2, 1.0))
    model.zero_grad()
    for number in range(2):
        for rank in range(2):
            lm_step(plain, Call(number, rank, 2, 0.5))
        lm_step(model, Call(number, context.rank, 2, 1.0))
        assert_same(full_grads(model), full_grads(plain), f"gradients of step {number}")
        plain.zero_grad(), model.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_an_exception_in_no_sync_leaves_it(context: RankContext) -> None:
    """The context manager restores synchronisation."""

    def step(model: Any, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step == 1:
            with pytest.raises(Trouble), model.no_sync():
                raise Trouble
        return stack_step(model, call)

    assert_trains_like_plain(context, Stack, step)


@on_ranks(2)
def test_the_users_own_exception_is_what_comes_out(context: RankContext) -> None:
    """Not one of the engine's in its place."""
    model = StreamShard(Stack(), precision=FP32)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(4, 5))
    stack_step(model, Call(0, context.rank, 2, 1.0))
    with pytest.raises(TypeError, match="forward"):
        model()
    assert model(vector_batch(0, 0)).shape == (4, 1)
