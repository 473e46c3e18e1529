"""Random models against plain PyTorch: depth, widths, sharing, freezing, unused layers, order, ranks, dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard
from tests.models import Layer, vector_batch
from tests.ranks import RankContext, RankPool
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_plain,
    full_weights,
    sgd,
)

STEPS = 3
BF16 = Precision(param_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """A random model and how it is trained.

    Attributes:
        widths: inner width of each layer; all map 16 to 16, so any order of them fits.
        frozen: layers that do not train.
        tied_to_first: layers that use the first layer's input projection, where widths agree.
        recomputed: layers run under a checkpoint.
        orders: which layers run, per step; the last order is used for the steps that follow.
        skipped: layer that a rank leaves out, by rank.
        micro_batches: backwards per optimizer step.
        is_adam: AdamW, else SGD with momentum.
    """

    widths: tuple[int, ...]
    frozen: frozenset[int]
    tied_to_first: frozenset[int]
    recomputed: frozenset[int]
    orders: tuple[tuple[int, ...], ...]
    skipped: tuple[int, ...]
    micro_batches: int
    is_adam: bool


class Inner(nn.Module):
    """16 -> width -> 16, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, width)
        self.down = Layer(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        out: Tensor = x + 0.5 * self.down(torch.tanh(self.up(x)))
        return out


class RandomModel(nn.Module):
    """The layers of a plan, a gain used directly by the root, and a head."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.order: tuple[int, ...] = plan.orders[0]
        self.layers = nn.ModuleList(Inner(width) for width in plan.widths)
        self.gain = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 1)
        first: Any = self.layers[0]
        for index, layer in enumerate(self.layers):
            inner: Any = layer
            if index in plan.tied_to_first and plan.widths[index] == plan.widths[0]:
                inner.up.weight = first.up.weight
        for index in plan.frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        x = x * self.gain
        for index in self.order:
            layer = self.layers[index]
            out: Any = checkpoint(layer, x, use_reentrant=False) if index in self.plan.recomputed else layer(x)
            x = out
        result: Tensor = self.head(x)
        return result


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan of one to five layers."""
    depth = draw(st.integers(1, 5))
    indices = st.integers(0, depth - 1)
    subsets = st.frozensets(indices, max_size=depth)
    orders = st.lists(indices, max_size=depth + 2).map(tuple)
    registration = tuple(range(depth))
    return Plan(
        widths=tuple(draw(st.lists(st.sampled_from([1, 5, 16, 40]), min_size=depth, max_size=depth))),
        frozen=draw(subsets),
        tied_to_first=draw(subsets),
        recomputed=draw(subsets),
        orders=tuple(draw(st.lists(st.just(registration) | orders, min_size=1, max_size=STEPS))),
        skipped=tuple(draw(st.lists(st.integers(-1, depth - 1), min_size=3, max_size=3))),
        micro_batches=draw(st.integers(1, 2)),
        is_adam=draw(st.booleans()),
    )


def step_of(plan: Plan) -> Callable[[Any, Call], Tensor]:
    """All micro-batches of one rank's step; it leaves out its skipped layer where no layer runs twice."""

    def step(model: Any, call: Call) -> Tensor:
        order = plan.orders[min(call.step, len(plan.orders) - 1)]
        if len(set(order)) == len(order):  # ranks may run fewer layers than others, not the same ones more often
            order = tuple(index for index in order if index != plan.skipped[call.rank])
        model.order = order
        total = torch.zeros(())
        for number in range(plan.micro_batches):
            x = vector_batch(call.step * 10 + number, call.rank)
            total = total + call.backward(model(x).float().square().mean() / plan.micro_batches)
        return total

    return step


def _trains_like_plain(context: RankContext, plan: Plan) -> None:
    assert_trains_like_plain(
        context,
        lambda: RandomModel(plan),
        step_of(plan),
        steps=STEPS,
        checked=(0, STEPS - 1),
        optimizer=adamw if plan.is_adam else sgd,
        units=[Inner],
        tolerance=Tolerance(relative=5e-5, absolute=1e-6),
    )


def _stays_near_plain_in_bf16(context: RankContext, plan: Plan) -> None:
    """The first step's loss and every weight after it; later steps of different roundings drift apart."""
    assert_trains_like_plain(
        context,
        lambda: RandomModel(plan),
        step_of(plan),
        steps=1,
        checked=(),
        units=[Inner],
        precision=BF16,
        tolerance=Tolerance(relative=5e-2, absolute=1e-2),
    )


def _weights_after_training(context: RankContext, plan: Plan, precision: Precision) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = StreamShard(RandomModel(plan), units=[Inner], precision=precision)
    optimizer = (adamw if plan.is_adam else sgd)(model)
    for number in range(STEPS):
        step_of(plan)(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def _is_deterministic(context: RankContext, plan: Plan, precision: Precision) -> None:
    first = _weights_after_training(context, plan, precision)
    assert_same(_weights_after_training(context, plan, precision), first, "second run", EXACT)


QUIET = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])


@QUIET
@given(plan=plans(), world_size=st.integers(1, 3))
def test_random_models_train_like_plain_pytorch(ranks: RankPool, plan: Plan, world_size: int) -> None:
    """Losses, gradients (None where there are none) and weights, in fp32."""
    ranks(world_size).run(_trains_like_plain, plan)


@settings(QUIET, max_examples=5)
@given(plan=plans(), world_size=st.integers(1, 3))
def test_random_models_in_bf16_stay_near_plain_pytorch(ranks: RankPool, plan: Plan, world_size: int) -> None:
    """The loss is that of fp32 to bf16's precision."""
    ranks(world_size).run(_stays_near_plain_in_bf16, plan)


@settings(QUIET, max_examples=5)
@given(plan=plans(), world_size=st.integers(1, 3), precision=st.sampled_from([FP32, BF16]))
def test_random_models_train_alike_bit_by_bit_when_run_twice(
    ranks: RankPool, plan: Plan, world_size: int, precision: Precision
) -> None:
    """Nothing depends on timing."""
    ranks(world_size).run(_is_deterministic, plan, precision)
