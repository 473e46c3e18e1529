"""An exception in the middle of a step reaches the user as it is, and the next step is right again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from streamshard.core import backward
from streamshard.errors import ShardingError, log
from tests.models import Stack, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, adamw, assert_trains_like_plain, case, lm_step


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
    def hook(module: nn.Module, args: Any) -> None:
        raise kind("forward")

    return functools.partial(_hooked, lambda model: model.get_submodule(name).register_forward_pre_hook(hook))


def _in_backward_of(name: str) -> Callable[[nn.Module, Call], None]:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        raised: Tensor = _RaiseInBackward.apply(out)  # type: ignore[no-untyped-call]
        return raised

    return functools.partial(_hooked, lambda model: model.get_submodule(name).register_forward_hook(hook))


def _in_a_gradient_hook(model: nn.Module, call: Call) -> None:
    """A hook on an activation between two blocks is interrupted in backward."""

    def interrupt(grad: Tensor) -> Tensor:
        raise Stop("hook")

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(interrupt)

    _hooked(lambda model: model.get_submodule("blocks.2").register_forward_hook(hook), model, call)


def _hooked(register: Callable[[nn.Module], Any], model: nn.Module, call: Call) -> None:
    handle = register(model)
    try:
        lm_step(model, call)
    finally:
        handle.remove()


def _in_the_loss_with_output_kept(model: Any, call: Call) -> None:
    model.kept = model(token_batch(call.step, call.rank))
    raise Trouble("loss")


def _in_an_evaluation(model: nn.Module, call: Call) -> None:
    with torch.no_grad():
        _in_forward_of("blocks.2")(model, call)


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

    model.run_blocks = run_blocks  # type: ignore[assignment]
    try:
        _hooked(lambda model: model.get_submodule("blocks.1.up").register_forward_pre_hook(hook), model, call)
    finally:
        model.run_blocks = original


IN_BACKWARD: dict[str, Callable[[nn.Module, Call], None]] = {
    "at the start of backward": _in_backward_of("head"),
    "in the middle of backward": _in_backward_of("blocks.1"),
    "interrupted in backward": _in_a_gradient_hook,
    "in recomputation": _in_recomputation,
}
TROUBLES: dict[str, Callable[[nn.Module, Call], None]] = {
    **IN_BACKWARD,
    "inside a block": _in_forward_of("blocks.1.up"),
    "interrupted in forward": _in_forward_of("blocks.2", Stop),
    "at the end of backward": _in_backward_of("embedding"),
    "in the loss, output kept": _in_the_loss_with_output_kept,
    "in evaluation": _in_an_evaluation,
}


def _fail(model: nn.Module, call: Call, where: str) -> None:
    with pytest.raises((Trouble, Stop)):
        TROUBLES[where](model, call._replace(step=call.step + 70))


@on_ranks(1, 2)
def test_after_an_exception_the_next_step_is_right(context: RankContext) -> None:
    """On all ranks, from the very first step on; the user clears gradients and goes on.

    Meanwhile layers hold the shards: the user may edit or freeze them, and the engine hears nothing of it.
    """
    names = list(TROUBLES)

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            _fail(model, call, names[call.step])
            held = {param for module in model.modules() for param in module._parameters.values()} - {None}
            assert held == set(model.parameters())
            model.zero_grad()
        return lm_step(model, call)

    every = range(len(names))
    assert_trains_like_plain(context, TinyLM, step, steps=len(names), checked=every, optimizer=adamw)


def _fail_and_clear(model: nn.Module, call: Call, where: str) -> None:
    """The list of parameters was made before: the model hears nothing until its next forward."""
    params = list(model.parameters())
    _fail(model, call, where)
    for param in params:
        param.grad = None


@on_ranks(1, 2)
def test_after_an_exception_the_optimizer_alone_may_clear_gradients(context: RankContext) -> None:
    """Then the next step is right, or a backward of an earlier forward, although no forward comes between."""
    names = list(IN_BACKWARD)
    for has_forward_before in (False, True):

        def step(model: nn.Module, call: Call, has_forward_before: bool = has_forward_before) -> Tensor:
            tokens = token_batch(call.step, call.rank)
            loss = next_token_loss(model(tokens), tokens) if has_forward_before else None
            if isinstance(model, StreamShard):
                _fail_and_clear(model, call, names[call.step])
            return lm_step(model, call) if loss is None else call.backward(loss)

        with case(has_forward_before):
            assert_trains_like_plain(context, TinyLM, step, steps=len(names), checked=(0, 3))


class _Penalised(TinyLM):
    """Each forward leaves a penalty, whose backward reaches a parameter before any node of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        self.penalty = self.offset.sum()
        return super().forward(tokens)


@on_ranks(1, 2)
def test_a_backward_that_begins_with_a_small_gradient_keeps_it(context: RankContext) -> None:
    """Behind a backward that has ended, and behind one that an exception has ended."""

    def step(model: Any, call: Call) -> Tensor:
        model(token_batch(call.step, call.rank))
        penalty: Tensor = model.penalty
        if isinstance(model, StreamShard) and call.step == 1:
            _fail_and_clear(model, call, "in the middle of backward")
        return call.backward(penalty)

    assert_trains_like_plain(context, _Penalised, step)


@on_ranks(2)
def test_ranks_that_fail_at_different_points_of_a_backward_stay_in_step(context: RankContext) -> None:
    """The interrupted rank issues the other's collectives before its next forward."""

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and call.step == 1:
            _fail_and_clear(model, call, ("interrupted in backward", "at the start of backward")[call.rank])
        return lm_step(model, call)

    assert_trains_like_plain(context, TinyLM, step)


@on_ranks()
@pytest.mark.parametrize(("world_size", "slots"), [(1, {"weight_slots": 2}), (2, {"grad_slots": "all"})])
def test_when_a_backward_fails_earlier_gradients_are_discarded(context: RankContext, slots: dict[str, Any]) -> None:
    """With a warning; gradients that wait inside `no_sync` too, whether the user clears them or not."""
    for waits, clears in ((False, False), (True, False), (True, True)):

        def step(model: nn.Module, call: Call, waits: bool = waits, clears: bool = clears) -> Tensor:
            if isinstance(model, StreamShard):
                params = list(model.parameters())
                with model.no_sync() if waits else contextlib.nullcontext():
                    lm_step(model, call._replace(step=call.step + 30))
                    _fail(model, call, "in the middle of backward")
                for param in params if clears else ():
                    param.grad = None
            return lm_step(model, call)

        with case((waits, clears)), mock.patch.object(log, "warning") as warned:
            assert_trains_like_plain(context, TinyLM, step, **slots)
        assert "all gradients of the model are discarded" in warned.call_args.args[0]


@on_ranks(2)
def test_the_users_exception_is_raised_unchanged(context: RankContext) -> None:
    """Torch's error for a bad input, not one of the engine's; an exception inside `no_sync` leaves the context."""
    model = StreamShard(TinyLM(), precision=FP32)
    with pytest.raises(IndexError):
        model(torch.full((2, 6), 10_000))
    with pytest.raises(TypeError, match="forward"):
        model()
    with pytest.raises(Trouble), model.no_sync():
        raise Trouble
    lm_step(model, Call(0, context.rank, 2, 1.0))
    assert model.head.weight.grad.norm() > 0


@on_ranks(1, 2)
def test_another_thread_cannot_use_the_model_during_a_backward(context: RankContext) -> None:
    """Its call raises, and the backward goes on."""
    calls: dict[str, Callable[[Any], object]] = {
        "state_dict() of": lambda model: model.state_dict(),
        "a forward begins in one thread": lambda model: model(vector_batch(1, 0)),
    }

    def step(model: Any, call: Call) -> Tensor:
        def ask(grad: Tensor) -> None:
            raised: list[str] = []
            for what in calls if isinstance(model, StreamShard) else ():
                thread = threading.Thread(target=_note_refusal, args=(calls[what], model, raised))
                thread.start()
                thread.join()
                assert what in raised[-1]

        listening = model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(ask) and None)
        out = model(vector_batch(call.step, call.rank))
        listening.remove()
        return call.backward(out.square().mean())

    with mock.patch.object(backward, "_LETS_GO_WITHIN_S", 0.05):
        assert_trains_like_plain(context, Stack, step, steps=2)


def _note_refusal(call: Callable[[Any], object], model: Any, raised: list[str]) -> None:
    try:
        call(model)
        raised.append("nothing")
    except ShardingError as error:
        raised.append(str(error))
