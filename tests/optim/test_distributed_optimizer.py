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
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    Call,
    assert_same,
    assert_trains_like_plain,
    built,
    full_weights,
    sgd,
    sharded_model,
    stack_step,
)

# -- threads ------------------------------------------------------------------------------------------------------

THREADS = 4


@elementwise
class Hesitant(Optimizer):
    """Reads all weights, lets other threads run, and writes: steps at the same time overwrite each other.

    Args:
        params: as of any optimizer.
        patience: how often it lets others run, unless all threads have read before.
    """

    def __init__(self, params: Any, patience: int) -> None:
        self.patience = patience
        self.have_read = [0]  # one list, in copies of the optimizer too
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """``w = 0.9 w - 0.1 grad``"""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        new = [param * 0.9 - 0.1 * param.grad for param in params]
        self.have_read[0] += 1
        for _ in range(self.patience):
            if self.have_read[0] == THREADS:
                break
            time.sleep(0)
        for param, value in zip(params, new, strict=True):
            param.copy_(value)


@on_ranks(2)
def test_concurrent_steps_equal_serial_ones(context: RankContext) -> None:
    """To the bit. The threads have two optimizers to share."""
    serial, threaded = sharded_model(), sharded_model()
    for model in (serial, threaded):
        stack_step(model, context.call(0))
    optimizer = DistributedOptimizer(Hesitant(serial.parameters(), 0), serial)
    for _ in range(THREADS):
        optimizer.step()
    hesitant = Hesitant(threaded.parameters(), 100)
    optimizers = [DistributedOptimizer(hesitant, threaded) for _ in range(2)]
    start = threading.Barrier(THREADS)

    def step(number: int) -> None:
        start.wait(timeout=30)
        optimizers[number % 2].step()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(step, range(THREADS)))
    wanted, found = full_weights(serial), full_weights(threaded)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- errors -------------------------------------------------------------------------------------------------------


@elementwise
class Fallible(torch.optim.SGD):
    """Raises instead of stepping while `failure` is set."""

    failure: str | None = None

    def step(self, closure: Any = None) -> Any:
        """See SGD."""
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
