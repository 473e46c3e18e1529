"""Layers that do not run once each in registration order: unused, repeated, reordered, different on each rank."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    SETTINGS,
    Call,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    case,
    counted_collectives,
    engine_inside,
    sharded_model,
    stack_step,
)
from tests.scenarios import RoutedStack, over_sockets


def planned_step(plans: dict[tuple[int, int], list[int]]) -> Any:
    """Step function that runs `plans[step, rank]`; a missing key means registration order."""

    def step(model: nn.Module, call: Call) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        inner.route = plans.get((call.step, call.rank), list(range(len(inner.layers))))
        return stack_step(model, call)

    return step


def same_on_all_ranks(*plans: list[int]) -> dict[tuple[int, int], list[int]]:
    """The plans of steps 0, 1, ... on every rank."""
    return {(step, rank): plan for step, plan in enumerate(plans) for rank in range(4)}


def _dropped_layers() -> dict[tuple[int, int], list[int]]:
    """Every rank drops layers at random in every step."""
    generator = torch.Generator().manual_seed(5)
    keys = [(step, rank) for step in range(4) for rank in range(3)]
    return {key: [layer for layer in range(4) if torch.rand((), generator=generator) > 0.4] for key in keys}


DIFFERENT = {
    "a different layer on each rank": {(step, rank): [0, 1 + rank, 3] for step in range(4) for rank in range(2)},
    "rank 1 uses no layer": {(step, 1): [] for step in range(4)},
    "another order first, then different layers": {
        **same_on_all_ranks([2, 0, 3, 1], [2, 0, 3, 1]),
        **{(2, 0): [2, 0], (2, 1): [0, 3, 1], (3, 0): [3], (3, 1): [2, 1]},
    },
    "ranks contradict each other at first": {
        **same_on_all_ranks(*[[1, 3]] * 4),
        **{(0, 0): [3, 2, 1, 0, 1], (0, 1): [1, 0, 3, 3, 2]},
    },
    "dropped layers": _dropped_layers(),
}


@on_ranks(2, 3)
def test_ranks_may_run_different_layers(context: RankContext) -> None:
    """A rank without a gradient contributes zeros; the numbers are those of DDP with `find_unused_parameters`."""
    for name, plans in DIFFERENT.items():
        if context.world_size == 2 or name == "dropped layers":
            with case(name):
                assert_trains_like_ddp(context, lambda: RoutedStack(4), planned_step(plans))


class _InPairs(RoutedStack):
    """Each reentrant checkpoint has two layers."""

    def order(self) -> Any:
        layers = list(self.layers)
        for pair in zip(layers[::2], layers[1::2], strict=True):
            yield lambda x, pair=pair: checkpoint(lambda y: pair[1](pair[0](y)), x, use_reentrant=True)


@on_ranks(2)
def test_layers_of_one_reentrant_checkpoint_are_reduced_once(context: RankContext) -> None:
    """Backward comes to the second layer first, although the first one is recomputed first."""
    model = sharded_model(lambda: _InPairs(4))

    def step(number: int) -> None:
        model(vector_batch(number, context.rank).requires_grad_()).square().mean().backward()

    step(0)
    with counted_collectives(model) as counts:
        step(1)
    assert counts["reduce_scatter"] == len(engine_inside(model).units)


class Placeholders(nn.Module):
    """A layer whose parameters have no elements; one trains, one is frozen in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 16))
        self.frozen = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same, plus sums of nothing."""
        return x + self.weight.sum() + self.frozen.sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("sockets", [False, True])
def test_units_of_empty_parameters_train_like_any_other(context: RankContext, sockets: bool) -> None:
    """Streamed and resident ones, and a layer with other parameters too."""

    def build() -> nn.Module:
        stack = Stack()
        stack.layers.insert(1, Placeholders())
        stack.layers.append(nn.Sequential(Layer(), Placeholders()))
        return stack

    units = ["layers.0", "layers.1", "layers.5"]
    with over_sockets() if sockets else contextlib.nullcontext():
        for settings in (*SETTINGS.values(), {"resident": ["layers.1"]}):
            with case(settings):
                assert_trains_like_plain(context, build, stack_step, steps=3, units=units, **settings)


class EncoderDecoder(nn.Module):
    """Two stacks that users call one after the other themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack((16, 16, 16, 16))
        self.encoder.head = nn.Linear(16, 16)
        self.decoder = Stack((16, 16, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        out: Tensor = self.decoder(self.encoder(x))
        return out


@on_ranks(2)
@pytest.mark.parametrize("from_step", [0, 2])
def test_training_through_submodules_without_the_roots_forward(context: RankContext, from_step: int) -> None:
    """`model.decoder(model.encoder(x))` trains like `model(x)`, from the start and after ordinary steps."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank)
        out = model.decoder(model.encoder(x)) if call.step >= from_step else model(x)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, EncoderDecoder, step, units=[Layer])
