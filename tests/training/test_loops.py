"""Training loops around forward and backward: clipping, `zero_grad`, ranks out of step, exceptions."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import RankMismatchError, StreamShard
from streamshard.core import backward
from streamshard.errors import ShardingError, log
from tests.compare import EXACT, assert_same, full_grads, full_weights, piece_of
from tests.faults import Stop, Trouble, case, failing
from tests.models import Stack, TinyConfig, TinyLM, UsingLM, next_token_loss, token_batch, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import adamw, assert_trains_like_plain, built, lm_step, no_sync, sgd, sharded_model, stack_step
from tests.simulated import simulated_device


@on_ranks(2)
def test_the_user_alone_clears_gradients(context: RankContext) -> None:
    """Without `zero_grad` steps add up; the model's and the optimizer's `zero_grad` clear the same gradients."""

    def keep(model: nn.Module) -> Optimizer:
        optimizer = sgd(model)
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return optimizer

    model = assert_trains_like_plain(context, Stack, stack_step, optimizer=keep)
    for clear in (model.zero_grad, adamw(model).zero_grad):
        for set_to_none in (True, False):
            stack_step(model, context.call(0))
            clear(set_to_none=set_to_none)
            left = [p.grad for p in model.parameters()]
            assert all(grad is None if set_to_none else not grad.any() for grad in left)  # type: ignore[union-attr]


def _in_two_steps(model: Any) -> Tensor:
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total)
    return total


_clip = functools.partial(functools.partial, nn.utils.clip_grad_norm_)  # of parameters
CLIPS: dict[str, Callable[[Any], Tensor]] = {
    "the model's method": lambda model: getattr(model, "clip_grad_norm_", _clip(model.parameters()))(0.01),
    "sum of absolute values": lambda model: getattr(model, "clip_grad_norm_", _clip(model.parameters()))(0.01, 1.0),
    "torch's": lambda model: _clip(model.parameters())(0.01),
    "one by one": lambda model: _clip(model.parameters())(0.01, foreach=False),
    "blocks only": lambda model: _clip(model.blocks.parameters())(0.01),
    "one parameter": lambda model: _clip(model.head.weight)(0.01),
    "in two steps": _in_two_steps,
}


@on_ranks(1, 3)
def test_clipping_uses_the_norm_over_all_ranks(context: RankContext) -> None:
    """The model's method and `torch.nn.utils.clip_grad_norm_`, of all parameters and of some."""
    plain, model, size = built(TinyLM), sharded_model(TinyLM), context.world_size
    for name, clip in CLIPS.items():
        plain.zero_grad()
        model.zero_grad()
        for rank in range(size):
            lm_step(plain, Call(0, rank, size, 1 / size))
        lm_step(model, context.call(0))
        wanted, found = clip(plain), clip(model)
        assert isinstance(found, Tensor) and found.shape == ()
        assert float(found) == pytest.approx(float(wanted), rel=1e-5) and wanted > 0.01, name
        assert_same(full_grads(model), full_grads(plain), name)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks(context: RankContext) -> None:
    """One bad element on one rank's piece: every rank's norm says so, and skips. Without any gradient it is zero."""
    model = sharded_model(TinyLM)
    assert float(model.clip_grad_norm_(1.0)) == float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    lm_step(model, context.call(0))
    if context.rank == 1:
        biggest = max(model.parameters(), key=lambda p: piece_of(p).numel())
        piece_of(biggest.grad).view(-1)[0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer, before = adamw(model), full_weights(model)
    if not model.clip_grad_norm_(1.0) <= 100.0:
        optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.state
    assert_same(full_weights(model), before, "weights after a skipped step", EXACT)


def _train_in_parts(model: Any, rank: int, parts: list[int]) -> int:
    """Steps of so many passes each; returns the pass in which ranks are found to be out of step, -1 if in none."""
    passes, optimizer = 0, adamw(model)
    for count in parts:
        for _ in range(count):
            loss = model(vector_batch(passes, rank)).square().mean()
            try:
                loss.backward()
            except RankMismatchError as error:
                assert re.search("out of step.* split a batch .* as many passes per step", str(error))
                return passes
            passes += 1
        optimizer.step()
        optimizer.zero_grad()
    return -1


@on_ranks(2)
def test_a_rank_that_splits_a_batch_alone_is_found_out_of_step(context: RankContext) -> None:
    """In its second half, with which other ranks begin the next step. On a device two backwards later."""
    for everyone, is_device, found in ((True, False, -1), (False, False, 3), (False, True, 5)):
        with simulated_device() if is_device else contextlib.nullcontext():
            parts = [1, 1, 2 if everyone or context.rank == 0 else 1, 1, 1, 1]
            assert _train_in_parts(sharded_model(), context.rank, parts) == found


@on_ranks(2)
def test_a_step_that_fails_on_one_rank_alone_is_found_by_the_next_backward(context: RankContext) -> None:
    """Such as out of memory, caught: this rank's pieces have not been stepped."""
    model = sharded_model()
    optimizer = adamw(model)
    for step in range(2):
        loss = model(vector_batch(step, context.rank)).square().mean()
        with pytest.raises(RankMismatchError, match="out of step") if step else contextlib.nullcontext():
            loss.backward()
        fails = mock.patch("torch.optim.adam._single_tensor_adam", side_effect=Trouble)
        with contextlib.suppress(Trouble), fails if context.rank else contextlib.nullcontext():
            optimizer.step()


# -- an exception reaches the user as it is, and the next step is right again -----------------------------------------

_small = functools.partial(TinyLM, TinyConfig(depth=3))
# By name: the module whose backward or forward fails, how, and whether in backward.
IN_BACKWARD: dict[str, tuple[str, type[BaseException], bool]] = {
    "at the start of backward": ("head", Trouble, True),
    "in the middle of backward": ("blocks.1", Trouble, True),
    "interrupted in backward": ("blocks.2", Stop, True),
}
TROUBLES: dict[str, tuple[str, type[BaseException], bool]] = {
    **IN_BACKWARD,
    "inside a block": ("blocks.1.up", Trouble, False),
    "interrupted in forward": ("blocks.2", Stop, False),
    "at the end of backward": ("embedding", Trouble, True),
    "in evaluation": ("blocks.2", Trouble, False),
}


def _fail(model: nn.Module, call: Call, where: str) -> None:
    name, error, in_backward = TROUBLES[where]
    fails = failing(model.get_submodule(name), error, backward=in_backward)
    with pytest.raises(error), fails, torch.set_grad_enabled(where != "in evaluation"):
        lm_step(model, call._replace(step=call.step + 70))


@on_ranks(1, 2)
def test_after_an_exception_the_next_step_is_right(context: RankContext) -> None:
    """On all ranks, from the first step on. Meanwhile layers hold the shards, which the user may edit or freeze."""
    names = list(TROUBLES)

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            _fail(model, call, names[call.step])
            held = {param for module in model.modules() for param in module._parameters.values()} - {None}
            assert held == set(model.parameters())
            model.zero_grad()
        return lm_step(model, call)

    every = range(len(names))
    assert_trains_like_plain(context, _small, step, steps=len(names), checked=every, optimizer=adamw)


def _fail_and_clear(model: nn.Module, call: Call, where: str) -> None:
    """The list of parameters was made before: the model hears nothing until its next forward."""
    params = list(model.parameters())
    _fail(model, call, where)
    for param in params:
        param.grad = None


def _keep_penalty(model: Any) -> float:
    model.penalty = model.offset.sum()
    return 0.0


def _penalised() -> nn.Module:
    """Each forward leaves a penalty, whose backward reaches a parameter before any node of an output."""
    model: Any = UsingLM(TinyConfig(depth=3), first=_keep_penalty)
    model.offset = nn.Parameter(torch.ones(4))
    return model  # type: ignore[no-any-return]


@on_ranks(1, 2)
def test_after_an_exception_the_optimizer_alone_may_clear_gradients(context: RankContext) -> None:
    """Then a backward of an earlier forward is right, although no forward comes between, and of a penalty alone."""
    names = list(IN_BACKWARD)
    for has_penalty in (False, True):

        def step(model: Any, call: Call, has_penalty: bool = has_penalty) -> Tensor:
            tokens = token_batch(call.step, call.rank)
            loss = next_token_loss(model(tokens), tokens)
            if has_penalty:
                loss = model.penalty
            if isinstance(model, StreamShard) and (call.step or not has_penalty):
                _fail_and_clear(model, call, names[call.step])
            return call.backward(loss)

        assert_trains_like_plain(context, _penalised, step, steps=len(names), checked=(0, 2))


@on_ranks()
@pytest.mark.parametrize(("world_size", "slots"), [(1, {"weight_slots": 2}), (2, {"grad_slots": "all"})])
def test_when_a_backward_fails_earlier_gradients_are_discarded(context: RankContext, slots: dict[str, Any]) -> None:
    """With a warning; gradients that wait inside `no_sync` too, whether the user clears them or not."""
    for waits, clears in ((False, False), (True, True)):

        def step(model: nn.Module, call: Call, waits: bool = waits, clears: bool = clears) -> Tensor:
            if isinstance(model, StreamShard):
                params = list(model.parameters())
                with no_sync(model, waits):
                    lm_step(model, call._replace(step=call.step + 30))
                    _fail(model, call, "in the middle of backward")
                for param in params if clears else ():
                    param.grad = None
            return lm_step(model, call)

        with case((waits, clears)), mock.patch.object(log, "warning") as warned:
            assert_trains_like_plain(context, _small, step, **slots)
        assert "all gradients of the model are discarded" in warned.call_args.args[0]


@on_ranks(2)
def test_another_thread_cannot_use_the_model_during_a_pass(context: RankContext) -> None:
    """Its call raises, and the pass goes on."""
    model = sharded_model()
    raised: list[str] = []

    def call_aside(call: Callable[[], object]) -> None:
        try:
            call()
        except ShardingError as error:
            raised.append(str(error))

    def ask(*calls: Callable[[], object]) -> None:
        for call in calls:
            thread = threading.Thread(target=call_aside, args=(call,))
            thread.start()
            thread.join()

    def forward() -> object:
        return model(vector_batch(1, 0))

    def hook(module: object, args: object, out: Tensor) -> None:
        ask(forward, lambda: model.layers[0](vector_batch(1, 0)))
        out.register_hook(lambda grad: ask(model.state_dict, forward))

    model.layers[1].register_forward_hook(hook)
    with mock.patch.object(backward, "_LETS_GO_WITHIN_S", 0.05):
        model(vector_batch(0, context.rank)).square().mean().backward()
    told = ["while a forward of"] * 2 + ["state_dict() of", "a forward begins in one thread while a backward of"]
    assert all(each in error for each, error in zip(told, raised, strict=True)), raised
    assert all(param.grad is not None for param in model.parameters())
