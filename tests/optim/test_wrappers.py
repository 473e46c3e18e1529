"""Optimizers around others. `DistributedOptimizer`: steps take turns, errors reach all ranks, it is like any other.

`LocalSGD` on the replicate axis: step for step what PostLocalSGDOptimizer and PeriodicModelAverager give.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler

from streamshard import (
    DistributedOptimizer,
    LocalSGD,
    Precision,
    StreamShard,
    full_optimizer_state_dict,
    load_optimizer_state_dict,
)
from streamshard.errors import ConfigError, OptimizerError, ShardingError
from streamshard.optim import elementwise
from tests.compare import EXACT, NEAR, assert_same, full_weights
from tests.models import Stack, vector_batch
from tests.ranks import Call, RankContext, everywhere, on_ranks
from tests.reference import adamw, assert_trains_like_plain, built, mesh_2d, sgd, sharded_model, stack_step, train_stack


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


@elementwise
class Fallible(torch.optim.SGD):
    failure: str | None = None

    def step(self, closure: Any = None) -> Any:
        if self.failure is not None:
            raise ValueError(self.failure)
        return super().step(closure)


@on_ranks(2)
def test_an_error_on_one_rank_reaches_all_and_training_goes_on(context: RankContext) -> None:
    """It names the rank and the error; afterwards steps go on from the weights as they are."""
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
    other = sharded_model()
    other.load_state_dict(full_weights(model))
    for each, its in ((model, optimizer), (other, torch.optim.SGD(other.parameters(), lr=0.05))):
        train_stack(each, its, context, first=1, steps=1)
    assert_same(full_weights(model), full_weights(other), "weights", EXACT)


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


# -- LocalSGD -------------------------------------------------------------------------------------------------------

STEPS = 7


def _theirs(
    build: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Optimizer], shard: int, **settings: int
) -> tuple[Any, Any]:
    """DDP over all ranks, whose hook stops averaging gradients outside of groups of `shard` ranks."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # its import warns: allowed on ranks only

    model = DistributedDataParallel(built(build))
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + shard))) for first in range(0, size, shard)]
    state = PostLocalSGDState(None, groups[rank // shard], start_localSGD_iter=settings["warmup_steps"])
    model.register_comm_hook(state, post_localSGD_hook)
    return model, PostLocalSGDOptimizer(optimizer(model.module), PeriodicModelAverager(**settings))


def _differ(weights: dict[str, Tensor]) -> bool:
    return any(not torch.equal(weights[name], other[name]) for other in everywhere(weights) for name in weights)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "shape", "warmup_steps", "period", "kind"),  # sharded replicas, and whole ones
    [(4, (2, 2), 3, 2, "adamw"), (2, (2, 1), 0, 3, "sgd")],
)
def test_training_equals_post_local_sgd(
    context: RankContext, kind: str, warmup_steps: int, period: int, shape: tuple[int, int]
) -> None:
    """Every rank's own weights after every step; replicas drift apart in between, as theirs do."""
    make = {"sgd": sgd, "adamw": adamw}[kind]
    wanted, theirs = _theirs(Stack, make, shape[1], warmup_steps=warmup_steps, period=period)
    found = sharded_model(mesh=mesh_2d(*shape))
    ours = LocalSGD(make(found), found, warmup_steps=warmup_steps, period=period)
    drifted = False
    for number in range(STEPS):
        train_stack(wanted, theirs, context, first=number, steps=1)
        train_stack(found, ours, context, first=number, steps=1)
        weights = full_weights(found)
        assert_same(weights, dict(wanted.module.state_dict()), f"weights after step {number}", NEAR)
        drifted = drifted or _differ(weights)
        assert ours.step_count == theirs.averager.step
    assert drifted, "the reference never does what is to be tested"


@on_ranks(2)
def test_the_counter_survives_a_checkpoint(context: RankContext) -> None:
    """Its own state dict, the whole state, and that of PostLocalSGDOptimizer: training goes on as if never stopped."""
    settings: dict[str, Any] = {"warmup_steps": 3, "period": 4}
    _, theirs = _theirs(Stack, adamw, 1, **settings)
    for way in ("pieces", "whole", "theirs"):
        model = sharded_model(mesh=mesh_2d(2, 1))
        optimizer = LocalSGD(adamw(model), model, **settings)
        train_stack(model, optimizer, context, first=0, steps=4)  # all replicas are equal after step number 3
        again = sharded_model(mesh=mesh_2d(2, 1))
        again.load_state_dict(full_weights(model))
        other = LocalSGD(adamw(again), again, **settings)
        if way == "pieces":
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            whole = full_optimizer_state_dict(model, optimizer, rank0_only=False)
            if way == "theirs":
                theirs.load_state_dict(whole)
                whole = theirs.state_dict()
            load_optimizer_state_dict(again, other, whole)
            # The moments of the first replica are everybody's now.
            load_optimizer_state_dict(model, optimizer, whole)
        assert other.step_count == 4
        train_stack(model, optimizer, context, first=4, steps=3)
        train_stack(again, other, context, first=4, steps=3)
        assert_same(full_weights(again), full_weights(model), way, EXACT)


@on_ranks(2)
def test_settings_that_cannot_work_are_refused(context: RankContext) -> None:
    model = sharded_model()
    with pytest.raises(ConfigError, match="this model has one: shard it with a 2-D mesh"):
        LocalSGD(sgd(model), model, period=2)
    model = sharded_model(mesh=mesh_2d(2, 1), precision=Precision(sums_in_rank_order=True))
    with pytest.raises(ConfigError, match="without shard_over_replicas and sums_in_rank_order"):
        LocalSGD(sgd(model), model, period=2)
    model = sharded_model(mesh=mesh_2d(2, 1))
    with pytest.raises(ConfigError, match="period=0: wanted at least 1"):
        LocalSGD(sgd(model), model, period=0)
    local = LocalSGD(DistributedOptimizer(sgd(model), model), model, period=1, warmup_steps=2)
    with pytest.raises(ConfigError, match=r"Put it inside: LocalSGD\(DistributedOptimizer"):
        DistributedOptimizer(local, model)
    with pytest.raises(ConfigError, match="warmup_steps=3: another optimizer of this model has 2"):
        LocalSGD(sgd(model), model, period=1, warmup_steps=3)


@on_ranks(2)
def test_replicas_never_drift_apart_for_good(context: RankContext) -> None:
    """A step outside of local SGD raises while gradients are not averaged, also when the LocalSGD is gone."""
    model = sharded_model(mesh=mesh_2d(2, 1))
    plain = sgd(model)
    local: Any = LocalSGD(sgd(model), model, period=1, warmup_steps=1)
    train_stack(model, plain, context, steps=1)  # gradients are averaged so far
    train_stack(model, local, context, steps=2)
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"steps '.*' outside of LocalSGD.*delete the other one"):
            train_stack(model, plain, context, steps=1)
        local = None
    train_stack(model, LocalSGD(plain, model, period=1, warmup_steps=3), context, steps=3)
    assert not _differ(full_weights(model))


@on_ranks(2, 4)
def test_a_step_that_overflows_in_one_replica_is_skipped_by_all(context: RankContext) -> None:
    """Or replicas would count differently, and wait for averages that others do not take part in."""
    model = sharded_model(mesh=mesh_2d(2, context.world_size // 2))
    optimizer = LocalSGD(sgd(model), model, period=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        loss = model(vector_batch(number, context.rank)).square().mean()
        bad = number == 2 and context.rank == context.world_size - 1
        scaler.scale(loss * (torch.inf if bad else 1.0)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert optimizer.step_count == (number + 1 if number < 2 else number)
    assert all(weight.isfinite().all() for weight in full_weights(model).values())
    assert scaler.get_scale() == 2.0
