"""Training loops around forward and backward: clipping, `zero_grad`, ranks out of step."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from streamshard import RankMismatchError
from tests.models import Stack, TinyLM, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import (
    EXACT,
    adamw,
    assert_same,
    assert_trains_like_plain,
    built,
    full_grads,
    full_weights,
    lm_step,
    piece_of,
    sgd,
    sharded_model,
    stack_step,
)
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
