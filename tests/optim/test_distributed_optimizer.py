"""`DistributedOptimizer`: steps take turns, errors reach all ranks, and it is an optimizer like any other."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from streamshard import DistributedOptimizer, StreamShard
from streamshard.errors import ConfigError, OptimizerError, ShardingError
from streamshard.optim import elementwise
from tests.models import Stack, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import assert_same, assert_trains_like_plain, built, full_weights, sgd, sharded_model, stack_step

# -- threads ------------------------------------------------------------------------------------------------------


@elementwise
class Hesitant(torch.optim.SGD):
    """Lets other threads run in the middle of a step; counts steps, also those that meet another one."""

    steps = overlaps = 0
    is_stepping = False

    def step(self, closure: Any = None) -> Any:
        self.overlaps += self.is_stepping
        self.is_stepping = True
        time.sleep(0.01)
        super().step()
        self.steps, self.is_stepping = self.steps + 1, False


@on_ranks(2)
def test_concurrent_steps_take_turns(context: RankContext) -> None:
    """The threads have two optimizers to share."""
    model = sharded_model()
    stack_step(model, context.call(0))
    hesitant = Hesitant(model.parameters(), lr=0.1)
    optimizers = [DistributedOptimizer(hesitant, model) for _ in range(2)]
    start = threading.Barrier(4)

    def step(number: int) -> None:
        start.wait(timeout=30)
        optimizers[number % 2].step()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(step, range(4)))
    assert (hesitant.steps, hesitant.overlaps) == (4, 0)


# -- errors -------------------------------------------------------------------------------------------------------


@elementwise
class Fallible(torch.optim.SGD):
    failure: str | None = None

    def step(self, closure: Any = None) -> Any:
        if self.failure is not None:
            raise ValueError(self.failure)
        return super().step(closure)


@on_ranks(2)
def test_an_error_on_one_rank_reaches_all_and_training_goes_on(context: RankContext) -> None:
    """It names the rank and the error; afterwards steps are those of plain torch from the weights as they are."""
    model = sharded_model()
    fallible = Fallible(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(fallible, model)
    stack_step(model, context.call(0))
    fallible.failure = "out of luck" if context.rank == 1 else None
    with pytest.raises(OptimizerError, match="step the optimizer: rank 1: ValueError: out of luck$") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, ValueError) is (context.rank == 1)

    fallible.failure = None
    optimizer.zero_grad()
    plain = built()
    plain.load_state_dict(full_weights(model))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    for rank in range(2):
        stack_step(plain, Call(1, rank, 2, 0.5))
    stack_step(model, context.call(1))
    for each in (theirs, optimizer):
        each.step()
    assert_same(full_weights(model), full_weights(plain), "weights")


# -- an optimizer like any other ------------------------------------------------------------------------------------


@on_ranks(2)
def test_schedulers_drive_the_inner_optimizer(context: RankContext) -> None:
    """Five steps as on the unsharded model; a scheduler that did not see the steps would warn, which is an error."""
    schedulers: dict[int, Any] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizer = sgd(model)
        if isinstance(model, StreamShard):
            optimizer = DistributedOptimizer(optimizer, model)
        schedulers[id(model)] = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)  # asks for defaults
        return optimizer

    def prepare(model: nn.Module, number: int) -> None:
        if number:
            schedulers[id(model)].step()

    assert_trains_like_plain(context, Stack, stack_step, steps=5, checked=(1, 4), optimizer=build, prepare=prepare)


@on_ranks(2)
def test_grad_scaler_unscales_through_the_wrapper(context: RankContext) -> None:
    """A fused optimizer unscales inside its step when GradScaler tells it to, which the wrapper must not hide."""
    plain, model = built(), sharded_model()
    fused, theirs = (torch.optim.SGD(each.parameters(), lr=0.05, fused=True) for each in (model, plain))
    optimizer = DistributedOptimizer(fused, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(2):
        for rank in range(2):
            stack_step(plain, Call(number, rank, 2, 0.5))
        scaler.scale(model(vector_batch(number, context.rank)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.step()
        for each in (optimizer, theirs):
            each.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_param_groups_are_the_inner_ones_after_loading_state(context: RankContext) -> None:
    """Loading puts new groups into an optimizer: a wrapper that kept the old ones would set nobody's learning rate."""
    model = sharded_model()
    inner = sgd(model)
    optimizer = DistributedOptimizer(inner, model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state is inner.state
    optimizer.param_groups = copy.copy(inner.param_groups)
    assert optimizer.param_groups is inner.param_groups


@on_ranks(1)
def test_wrapping_or_copying_an_unsupported_optimizer_raises(context: RankContext) -> None:
    """Arguments in the wrong order, an unsharded model, deepcopy, pickle."""
    model = sharded_model()
    with pytest.raises(ConfigError, match=r"optimizer is a Stack: wanted a torch\.optim\.Optimizer"):
        DistributedOptimizer(model, sgd(model))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ShardingError, match="Stack is not sharded"):
        DistributedOptimizer(sgd(model), built())
    optimizer = DistributedOptimizer(sgd(model), model)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ShardingError, match="full_optimizer_state_dict"):
            copying(optimizer)
