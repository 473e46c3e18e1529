"""Uneven inputs: with torch.distributed.algorithms.Join training gives what DDP's join gives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from streamshard import ConfigError, RankMismatchError, ShardingError, StreamShard
from tests.compare import EXACT, NEAR, assert_same, full_grads, full_weights
from tests.counts import engine_inside
from tests.models import NormStack, Stack, TinyLM
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import (
    ALL_SLOTS,
    Call,
    Step,
    adamw,
    built,
    lm_step,
    mesh_2d,
    sgd,
    sharded_model,
    stack_step,
    train_stack,
)
from tests.scenarios import RoutedStack

ALL_DIFFER = (4, 2, 3, 1)

After = Callable[[nn.Module, Optimizer], None]


def _step_only(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def _clip_and_step(model: nn.Module, optimizer: Optimizer, largest: float = math.inf) -> None:
    is_sharded = isinstance(model, StreamShard)
    norm = model.clip_grad_norm_(0.05) if is_sharded else nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if norm > largest:
        model.zero_grad()
    optimizer.step()


def _skip_large(model: nn.Module, optimizer: Optimizer) -> None:
    _clip_and_step(model, optimizer, 0.3)


def _train(
    model: nn.Module,
    optimizer: Any,
    step: Step,
    context: RankContext,
    length: int,
    after: After = _step_only,
    repeat: After | None = None,
    **options: Any,
) -> None:
    """Take `length` steps of this rank, each followed by `after`; ranks without inputs do `repeat`, or the same."""
    repeated = repeat or after
    # A Joinable but for its metaclass.
    with Join([model], repeat=lambda: repeated(model, optimizer), **options):  # type: ignore[list-item]
        for number in range(length):
            step(model, context.call(number))
            after(model, optimizer)
            optimizer.zero_grad()


def _check(
    context: RankContext, lengths: Any, build: Any, step: Step, kind: Any = sgd, settings: Any = None, **options: Any
) -> None:
    """Train as DDP does; ranks have the same weights to the bit."""
    wanted, found = DistributedDataParallel(built(build)), sharded_model(build, **(settings or {}))
    for model, inner in ((wanted, wanted.module), (found, found)):
        _train(model, kind(inner), step, context, lengths[context.rank], **options)
    assert_same(full_weights(found), dict(wanted.module.state_dict()), "weights", NEAR)
    everyone = everywhere(full_weights(found))
    for other in everyone:
        assert_same(other, everyone[0], "weights on another rank", EXACT)


def _assert_even(model: nn.Module) -> None:
    assert engine_inside(model).inputs is None
    assert "_join_config" not in vars(model)


def _micro_batches(model: Any, call: Call) -> Tensor:
    """A rank that has run out follows no_sync()."""
    with model.no_sync():
        stack_step(model, call._replace(step=3 * call.step))
        stack_step(model, call._replace(step=3 * call.step + 1))
    return stack_step(model, call._replace(step=3 * call.step + 2))


@on_ranks(3)
@pytest.mark.parametrize(
    ("lengths", "build", "step", "options"),
    [
        (ALL_DIFFER, NormStack, stack_step, {}),
        ((3, 3, 4, 3), Stack, stack_step, {"kind": adamw, "after": _clip_and_step}),
        ((1, 4, 4, 4), NormStack, stack_step, {"after": _skip_large}),
        ((0, 3, 1, 2), Stack, stack_step, {"kind": adamw, "after": _skip_large}),
        (ALL_DIFFER, Stack, _micro_batches, {}),
        (ALL_DIFFER, Stack, _micro_batches, {"settings": ALL_SLOTS}),
    ],
)
def test_training_equals_ddp_join(context: RankContext, lengths: Any, build: Any, step: Step, options: Any) -> None:
    """Momentum, decay and statistics of batch norm continue without inputs, as those of DDP's last joiner do."""
    _check(context, lengths, build, step, **options)


@on_ranks(4)
@pytest.mark.parametrize("by_all", [True, False])
def test_means_are_over_all_ranks_or_over_those_with_inputs(context: RankContext, by_all: bool) -> None:
    settings = {"mesh": mesh_2d(2, 2)}
    _check(context, ALL_DIFFER, TinyLM, lm_step, settings=settings, divide_by_initial_world_size=by_all)


@on_ranks(2)
def test_gradients_that_wait_are_divided_by_the_ranks_with_inputs_in_their_own_pass(context: RankContext) -> None:
    """As gradients that each micro-batch reduces."""
    found: list[dict[str, Any]] = []
    for slots in ({}, ALL_SLOTS):
        model = sharded_model(Stack, **slots)

        def finish(model: nn.Module = model) -> None:
            found.append(full_grads(model))

        with Join([model], repeat=finish, divide_by_initial_world_size=False):
            with model.no_sync():
                stack_step(model, context.call(0))
            if context.rank == 0:
                stack_step(model, context.call(1))
                finish()
    assert_same(found[1], found[0], "gradients", NEAR)


@on_ranks(2)
def test_training_without_repeat_is_refused_on_all_ranks(context: RankContext) -> None:
    """At the first forward that trains, before anybody has run out, and if it is one rank that forgot it."""
    model = sharded_model(Stack)
    optimizer = sgd(model)
    for repeats in ((None, None), (optimizer.step, None)):
        with (
            pytest.raises(ConfigError, match=r"rank [01] has no repeat=.*repeat=optimizer\.step"),
            Join([model], repeat=repeats[context.rank]),
        ):
            stack_step(model, context.call(0))
        _assert_even(model)
    with Join([model], others_argument=3), torch.no_grad():
        for _ in range(1 + context.rank):
            assert model(torch.ones(2, 16)).isfinite().all()


@on_ranks(3)
def test_layers_that_run_in_another_order_are_shadowed(context: RankContext) -> None:
    """A rank that has run out issues what the program says; layers nobody else uses stay without gradient."""

    def step(model: Any, call: Call) -> Tensor:
        (getattr(model, "module", model)).route = [[3, 1, 0, 2], [3, 0]][call.step % 2]
        return stack_step(model, call)

    lengths = ALL_DIFFER[: context.world_size]
    found = sharded_model(RoutedStack)
    _train(found, sgd(found), step, context, lengths[context.rank])
    # DDP's join gives parameters that nobody uses a gradient of zero, which moves them by momentum and decay.
    wanted = built(RoutedStack)
    optimizer = sgd(wanted)
    for number in range(max(lengths)):
        for rank in range(context.world_size):
            if number < lengths[rank]:
                step(wanted, Call(number, rank, context.world_size, 1.0 / context.world_size))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_weights(found), dict(wanted.state_dict()), "weights", NEAR)


@on_ranks(2)
def test_a_loss_scaler_skips_the_same_steps_on_ranks_without_inputs(context: RankContext) -> None:
    """The second of four steps overflows on rank 0, when rank 1 has run out; the scale is the same on both."""
    wanted, found = Stack(), sharded_model(Stack)
    wanted.load_state_dict(full_weights(found))
    plain_optimizer, scaler = sgd(wanted), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def scaled(model: nn.Module, call: Call) -> Tensor:
        scale = float(scaler.scale(torch.ones(())))
        return stack_step(model, call._replace(weight=torch.inf if call.step == 1 else scale))

    def finish(model: nn.Module, optimizer: Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    _train(found, sgd(found), scaled, context, (4, 1)[context.rank], finish)
    for number in (0, 2, 3):
        for rank in range(2 if number == 0 else 1):
            stack_step(wanted, Call(number, rank, 2, 0.5))
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_same(full_weights(found), dict(wanted.state_dict()), "weights", NEAR)
    assert scaler.get_scale() == 8.0 / 2 * 2


@on_ranks(2)
def test_evaluation_inside_the_context_is_shadowed(context: RankContext) -> None:
    def evaluating(model: nn.Module, call: Call) -> Tensor:
        if call.step:
            with torch.no_grad():
                assert model(torch.ones(2, 16)).isfinite().all()
        return stack_step(model, call)

    results = []
    for step in (stack_step, evaluating):
        model = sharded_model(Stack)
        _train(model, sgd(model), step, context, (4, 2)[context.rank])
        results.append(full_weights(model))
    assert_same(results[1], results[0], "weights", EXACT)


def _fail() -> None:
    raise ZeroDivisionError


@on_ranks(2)
@pytest.mark.parametrize(("divides_by_all", "is_kept"), [(True, False), (False, False), (False, True)])
def test_an_exception_ends_the_context_too(context: RankContext, divides_by_all: bool, is_kept: bool) -> None:
    """Join does not report the exception. Passes are no longer announced, and gradients are means over all ranks.

    If something keeps the context, the next one ends it.
    """
    wanted, found = sharded_model(Stack), sharded_model(Stack)
    joins = [Join([found], repeat=_fail, divide_by_initial_world_size=divides_by_all)]
    with contextlib.suppress(ZeroDivisionError), joins[0] if is_kept else joins.pop():
        if context.rank == 0:
            found(torch.ones(2, 16)).sum().backward()
            _fail()
    found.zero_grad()
    if not is_kept:
        _assert_even(found)
    with Join([found], repeat=print) if is_kept else contextlib.nullcontext():
        for model in (wanted, found):
            train_stack(model, sgd(model), context, steps=2)
    assert_same(full_weights(found), full_weights(wanted), "weights", EXACT)


@on_ranks(3)
@pytest.mark.parametrize("more", [0, 3])
def test_steps_that_repeat_lacks_are_found(context: RankContext, more: int) -> None:
    """In the next backward, and after the last one at the end."""
    model = sharded_model(Stack)
    length = (2 + more, 1, 2)[context.rank]
    with pytest.raises(RankMismatchError, match="out of step.*Under Join, repeat="):
        _train(model, sgd(model), stack_step, context, length, _step_only, print)
    _assert_even(model)
    stack_step(model, context.call(0))
    with (
        pytest.raises(ShardingError, match=r"rank 0 begins JoinPass\(gradients=False, .*rank 1 JoinPass\("),
        Join([model], repeat=print),
        torch.set_grad_enabled(context.rank == 1),
    ):
        model(torch.ones(2, 16))
