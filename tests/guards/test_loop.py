"""Gradients that no optimizer uses are warned about; whatever trains is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from streamshard import StreamShard
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32

_Step = Callable[[int], None]


def _warnings_of(model: nn.Module, step: _Step, context: RankContext) -> list[str]:
    """What 12 backwards warn about, each followed by `step`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(12):
            model(vector_batch(number, context.rank)).square().mean().backward()
            step(number)
    return [str(each.message) for each in caught]


def _stepping(*optimizers: Optimizer) -> _Step:
    def step(number: int) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


_ELSEWHERE: dict[str, Callable[[nn.Module, nn.Module], Iterable[Tensor]]] = {
    "a copy": lambda plain, model: copy.deepcopy(plain).parameters(),
    "detached tensors": lambda plain, model: [p.detach().clone().requires_grad_() for p in model.parameters()],
    "another model": lambda plain, model: nn.Linear(2, 2).parameters(),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("params", _ELSEWHERE)
def test_gradients_that_no_optimizer_steps_are_warned_about_once(context: RankContext, params: str) -> None:
    plain = Stack()
    model = StreamShard(copy.deepcopy(plain), precision=FP32)
    found = _warnings_of(model, _stepping(SGD(_ELSEWHERE[params](plain, model), lr=0.1)), context)
    assert len(found) == (context.rank == 0)
    assert all("SGD has stepped after them, and no optimizer has stepped a parameter of" in each for each in found)


@elementwise
class _Kernel(SGD):
    """Writes weights as kernels do: their version counters stay on a single rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        for p in self.param_groups[0]["params"]:
            p.data.sub_(0.1 * p.grad if p.grad is not None else 0.0)


@on_ranks(1, 2)
def test_models_that_train_are_not_warned_about(context: RankContext) -> None:
    """With several optimizers, in turns, by hand, on some parameters only; frozen; or without any optimizer's step."""
    other = SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    def by_hand(model: nn.Module) -> _Step:
        def step(number: int) -> None:
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)  # type: ignore[operator]  # each has one
            model.zero_grad()
            other.step()

        return step

    def in_turns(model: nn.Module) -> _Step:
        optimizer = SGD(model.parameters(), lr=0.1)
        return lambda number: (optimizer if number % 5 == 4 else other).step()

    def accumulating_beside_another(model: nn.Module) -> _Step:
        """As an actor does whose critic steps after each micro-batch."""
        model.set_requires_gradient_sync(False)  # type: ignore[operator]  # sharded

        return lambda number: other.step()

    def frozen(model: nn.Module) -> _Step:
        model.requires_grad_(False)
        list(model.parameters())[-1].requires_grad_(True)
        return _stepping(other, SGD(list(model.parameters())[-1:], lr=0.1))

    loops: dict[str, Callable[[nn.Module], _Step]] = {
        "after many steps of another": lambda model: _stepping(*12 * [other], SGD(model.parameters(), lr=0.1)),
        "a kernel": lambda model: _stepping(_Kernel(model.parameters(), lr=0.1)),
        "whole parameters": lambda model: _stepping(other, WholeParameterOptimizer(model.parameters(), Adam, lr=0.1)),
        "some parameters": lambda model: _stepping(other, SGD(list(model.parameters())[:1], lr=0.1)),
        "by hand": by_hand,
        "in turns": in_turns,
        "frozen": frozen,
        "accumulating": lambda model: lambda number: None,
        "accumulating beside another": accumulating_beside_another,
    }
    for name, loop in loops.items():
        model = StreamShard(Stack(), precision=FP32)
        assert not _warnings_of(model, loop(model), context), name
