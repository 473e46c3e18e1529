"""`set_gradient_divide_factor`: gradients are the sum over all ranks, divided by a number of the user's choice."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from streamshard import ConfigError, LocalSGD, RankMismatchError, ShardingError, StreamShard
from tests.compare import EXACT, NEAR, assert_same, full_weights
from tests.counts import engine_inside
from tests.faults import case
from tests.models import Stack, vector_batch
from tests.races import detect_races
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import (
    ALL_SLOTS,
    Step,
    adamw,
    assert_trains_like_plain,
    mesh_2d,
    no_sync,
    only_sharded,
    sgd,
    sharded_model,
    stack_step,
)
from tests.scenarios import PRECISIONS, sharded, train
from tests.simulated import backward_elsewhere, checking_streams, late, simulated_device


def _two_micro_batches(model: Any, call: Call) -> Tensor:
    """The second one outside of ``no_sync()``, and then another one, which adds to main grads."""
    with no_sync(model):
        total = stack_step(model, call._replace(step=3 * call.step))
    for part in (1, 2):
        total = total + stack_step(model, call._replace(step=3 * call.step + part))
    return total


def _penalised(model: Any, call: Call) -> Tensor:
    """A loss that each rank adds its own part of a norm to."""
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    norms = torch.stack([param.norm() for param in model.parameters()])
    return call.backward(loss + 0.1 * (1 + call.rank) * norms.sum())


def _assert_divides(context: RankContext, step: Step, factor: float, **settings: Any) -> None:
    """Training equals plain PyTorch, which divides the losses of all ranks by `factor`."""

    prepare = only_sharded(lambda model: model.set_gradient_divide_factor(factor))

    def divided(model: nn.Module, call: Call) -> Tensor:
        weight = 1.0 if isinstance(model, StreamShard) else 1.0 / factor
        return step(model, call._replace(weight=weight))

    assert_trains_like_plain(context, Stack, divided, prepare=prepare, optimizer=sgd, tolerance=NEAR, **settings)


@on_ranks(1, 2)
def test_gradients_are_the_sum_of_all_ranks_over_the_factor(context: RankContext) -> None:
    """Accumulated ones; between ranks also of a norm of the weights, whose gradient takes another way."""
    for step in (_two_micro_batches, _penalised)[: context.world_size]:
        for factor, slots in ((1, {}), (3.0, ALL_SLOTS)):
            with case((step.__name__, factor, slots)):
                _assert_divides(context, step, factor, **slots)


@on_ranks(4)
def test_the_factor_divides_the_sum_over_replicas_too(context: RankContext) -> None:
    """As FSDP2's does; one replica on each rank, and two on two ranks each. In local SGD each stands for all."""

    def local(model: Any) -> Any:
        return LocalSGD(adamw(model), model, period=2, warmup_steps=1)

    for shape, slots, precision, make in (
        ((2, 2), {}, "fp32", local),
        ((2, 2), ALL_SLOTS, "16-bit wire", adamw),
        ((4, 1), {}, "bf16", adamw),
    ):
        mesh = mesh_2d(*shape)
        with case((shape, slots, precision)):
            if make is adamw:
                _assert_divides(context, _two_micro_batches, 3.0, mesh=mesh, **slots)
            _assert_sums_are_as_precise(context, "no_sync", precision, make, mesh=mesh, **slots)


def _assert_sums_are_as_precise(
    context: RankContext,
    scenario: str,
    precision: str,
    make: Callable[[Any], Any] = adamw,
    *,
    is_late: bool = False,
    **settings: Any,
) -> None:
    """Sums of losses divided by N, a power of two, give the bits that means give."""
    weights = []
    for weight in (1.0, 1.0 / context.world_size):
        model: Any = sharded(scenario, PRECISIONS[precision], **settings)
        if weights:
            model.set_gradient_divide_factor(1.0)
        with late(model) if is_late else contextlib.nullcontext():
            train(model, scenario, context, make=make, weight=weight)
            weights.append(full_weights(model))
    assert_same(weights[1], weights[0], "weights", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sum_is_as_precise_as_a_mean_in_every_reduction_mode(context: RankContext, precision: str) -> None:
    """Half of a loss summed over two ranks gives the bits of the mean; on a device as late as allowed, too."""
    with case("no_sync"):
        _assert_sums_are_as_precise(context, "no_sync", precision, **ALL_SLOTS)
    with simulated_device(), backward_elsewhere(), case("on a device"):
        _assert_sums_are_as_precise(context, "a kept graph", precision, is_late=True)


@on_ranks(1)
def test_one_rank_divides_each_gradient_once(context: RankContext) -> None:
    """Main grads lie in the slots, and move out when a reduction that divides adds to them; they stay for sums."""
    for number, scenario in enumerate(("no_sync", "a kept graph", "layers used twice")):
        with case(scenario):
            precision = PRECISIONS[("fp32", "16-bit wire")[number % 2]]
            models: list[Any] = [sharded(scenario, precision) for _ in range(3)]
            models[1].set_gradient_divide_factor(4.0)
            models[2].set_gradient_divide_factor(1.0)
            for model, weight in zip(models, (0.25, 1.0, 0.25), strict=True):
                with detect_races(model):
                    train(model, scenario, context, weight=weight)
            wanted, divided, summed = map(full_weights, models)
            assert_same(divided, wanted, "weights", NEAR)
            assert_same(summed, wanted, "weights of sums", EXACT)
            held = [model.memory_report().held_bytes for model in models]
            assert held[2] == held[0]
    with simulated_device() as device, checking_streams(device) as checker:
        model = sharded("a kept graph", PRECISIONS["fp32"])
        model.set_gradient_divide_factor(4.0)
        with checker.of(model):
            train(model, "a kept graph", context)


@on_ranks(1, 2)
def test_factors_that_divide_nothing_are_refused(context: RankContext) -> None:
    """On all ranks, also if the others have given a good one, and the setting stays."""
    model = sharded_model()
    for factor in (0, -1.0, math.nan, math.inf, "2", None):
        given = factor if context.rank == context.world_size - 1 else 1.0
        with pytest.raises(ConfigError, match=rf"divide factor: .*factor={factor!r}: wanted a positive, finite number"):
            model.set_gradient_divide_factor(given)
        assert engine_inside(model).ranks.grad_divisor == context.world_size


@on_ranks(2)
def test_the_factor_is_one_for_all_ranks_and_for_all_gradients_of_a_step(context: RankContext) -> None:
    """A rank's own number of tokens, a change between micro-batches, in a forward, and beside Join's own divisor."""
    model = sharded_model(grad_slots="all", weight_slots="all")
    with pytest.raises(RankMismatchError, match=r"ranks have given \[10\.0, 11\.0\]"):
        model.set_gradient_divide_factor(10.0 + context.rank)
    model.set_gradient_divide_factor(2)
    for synced in (True, False):
        with contextlib.nullcontext() if synced else model.no_sync():
            stack_step(model, context.call(0))
        model.set_gradient_divide_factor(2.0)  # the same
        with pytest.raises(ConfigError, match=r"parameter 'head\.weight' has a gradient.*after zero_grad"):
            model.set_gradient_divide_factor(1.0)
        model.zero_grad()
    model.set_gradient_divide_factor(1.0)
    hook = model.layers[1].register_forward_pre_hook(lambda *_: model.set_gradient_divide_factor(2.0))
    with pytest.raises(ShardingError, match="set_gradient_divide_factor inside a forward"):
        stack_step(model, context.call(0))
    hook.remove()
    with (
        pytest.raises(ConfigError, match="divide_by_initial_world_size=False and set_gradient_divide_factor"),
        Join([model], repeat=print, divide_by_initial_world_size=False),
    ):
        stack_step(model, context.call(0))
    assert engine_inside(model).inputs is None
