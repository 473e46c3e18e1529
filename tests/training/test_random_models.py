"""Random models and random programs against plain PyTorch: depth, widths, sharing, freezing, order, ranks, dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from tests.models import Layer, vector_batch
from tests.programs import (
    Program,
    programs,
    run_program,
)
from tests.ranks import RankContext, RankPool
from tests.reference import EXACT, Call, Tolerance, adamw, assert_same, assert_trains_like_plain, full_weights, sgd
from tests.scenarios import BF16

STEPS = 3


@dataclass(frozen=True)
class Model:
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
        min_unit_size: in bytes; layers below are put together.
    """

    widths: tuple[int, ...]
    frozen: frozenset[int]
    tied_to_first: frozenset[int]
    recomputed: frozenset[int]
    orders: tuple[tuple[int, ...], ...]
    skipped: tuple[int, ...]
    micro_batches: int
    is_adam: bool
    min_unit_size: int


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
    """The layers that `model` describes, a gain used directly by the root, and a head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.recomputed = model.recomputed
        self.order: tuple[int, ...] = model.orders[0]
        self.layers = nn.ModuleList(Inner(width) for width in model.widths)
        self.gain = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 1)
        layers: Any = self.layers
        for index in model.tied_to_first:
            if model.widths[index] == model.widths[0]:
                layers[index].up.weight = layers[0].up.weight
        for index in model.frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        x = x * self.gain
        for index in self.order:
            layer = self.layers[index]
            out: Any = checkpoint(layer, x, use_reentrant=False) if index in self.recomputed else layer(x)
            x = out
        result: Tensor = self.head(x)
        return result


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any model of one to five layers."""
    depth = draw(st.integers(1, 5))
    indices = st.integers(0, depth - 1)
    subsets = st.frozensets(indices, max_size=depth)
    orders = st.lists(indices, max_size=depth + 2).map(tuple)
    registration = tuple(range(depth))
    return Model(
        widths=tuple(draw(st.lists(st.sampled_from([1, 5, 16, 40]), min_size=depth, max_size=depth))),
        frozen=draw(subsets),
        tied_to_first=draw(subsets),
        recomputed=draw(subsets),
        orders=tuple(draw(st.lists(st.just(registration) | orders, min_size=1, max_size=STEPS))),
        skipped=tuple(draw(st.lists(st.integers(-1, depth - 1), min_size=3, max_size=3))),
        micro_batches=draw(st.integers(1, 2)),
        is_adam=draw(st.booleans()),
        min_unit_size=draw(st.sampled_from([0, 0, 2000, 6000, 10**6])),
    )


def _step_of(plan: Model) -> Callable[[Any, Call], Tensor]:
    """All micro-batches of one rank's step. Ranks may skip layers if no order reorders or repeats any."""
    may_skip = all(order == tuple(sorted(set(order))) for order in plan.orders)

    def step(model: Any, call: Call) -> Tensor:
        order = plan.orders[min(call.step, len(plan.orders) - 1)]
        if may_skip:
            order = tuple(index for index in order if index != plan.skipped[call.rank])
        model.order = order
        total = torch.zeros(())
        for number in range(plan.micro_batches):
            x = vector_batch(call.step * 10 + number, call.rank)
            total = total + call.backward(model(x).float().square().mean() / plan.micro_batches)
        return total

    return step


def _trains_like_plain(context: RankContext, plan: Model) -> None:
    assert_trains_like_plain(
        context,
        lambda: RandomModel(plan),
        _step_of(plan),
        steps=STEPS,
        checked=(0, STEPS - 1),
        optimizer=adamw if plan.is_adam else sgd,
        units=[Inner],
        min_unit_size=plan.min_unit_size,
        tolerance=Tolerance(relative=5e-5, absolute=1e-6),
    )


def _is_deterministic_in_bf16(context: RankContext, plan: Model) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        model = StreamShard(RandomModel(plan), units=[Inner], precision=BF16, min_unit_size=plan.min_unit_size)
        optimizer = (adamw if plan.is_adam else sgd)(model)
        for number in range(STEPS):
            _step_of(plan)(model, Call(number, context.rank, context.world_size, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        found.append(full_weights(model))
    assert_same(*found, "second run", EXACT)


QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], print_blob=True)


@settings(QUIET, max_examples=14)
@given(plan=models(), world_size=st.integers(1, 3))
def test_random_models_train_like_plain_pytorch(ranks: RankPool, plan: Model, world_size: int) -> None:
    """Losses, gradients (None where there are none) and weights, in fp32."""
    ranks(world_size).run(_trains_like_plain, plan)


@settings(QUIET, max_examples=5)
@given(plan=models(), world_size=st.integers(1, 3))
def test_random_models_train_alike_bit_by_bit_when_run_twice(ranks: RankPool, plan: Model, world_size: int) -> None:
    """Nothing depends on timing."""
    ranks(world_size).run(_is_deterministic_in_bf16, plan)


# ---------------------------------------------------------------------------------------------- programs


@settings(QUIET, max_examples=20)
@given(program=programs())
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, refusals, gradients (None where there are none), weights. More by hand: ``python -m tests.programs``."""
    ranks(program.ranks).run(run_program, program)
