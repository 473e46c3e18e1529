"""`DistributedOptimizer`: steps take turns, errors reach all ranks, and it is an optimizer like any other."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.optim import Optimizer, lr_scheduler

import streamshard
from streamshard import DistributedOptimizer, StreamShard
from streamshard.errors import CommunicationError, ConfigError, OptimizerError, ShardingError
from streamshard.optim import elementwise
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    ROUNDING,
    SEED,
    Call,
    assert_same,
    assert_trains_like_plain,
    full_weights,
    piece_of,
    stack_step,
)


def _plain() -> nn.Module:
    torch.manual_seed(SEED)
    return Stack()


def _sharded(context: RankContext) -> Any:
    return StreamShard(_plain().to(context.device), precision=FP32)


def _backward(model: nn.Module, number: int, rank: int, weight: float = 1.0) -> None:
    device = next(model.parameters()).device
    (model(vector_batch(number, rank).to(device)).square().mean() * weight).backward()


def _momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


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
        self.have_read = 0
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """``w = 0.9 w - 0.1 grad``"""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        new = [param * 0.9 - 0.1 * param.grad for param in params]
        self.have_read += 1
        for _ in range(self.patience):
            if self.have_read == THREADS:
                break
            time.sleep(0)
        for param, value in zip(params, new, strict=True):
            param.copy_(value)


def _steps_in_threads_equal_serial_ones(context: RankContext, is_locked: bool) -> bool:
    """Whether weights are the same to the bit. The threads have two optimizers to share."""
    serial, threaded = _sharded(context), _sharded(context)
    for model in (serial, threaded):
        _backward(model, 0, context.rank)
    optimizer = DistributedOptimizer(Hesitant(serial.parameters(), 0), serial)
    for _ in range(THREADS):
        optimizer.step()
    hesitant = Hesitant(threaded.parameters(), 100 if is_locked else 100_000)
    optimizers = [DistributedOptimizer(hesitant, threaded) for _ in range(2)]
    if not is_locked:
        optimizers[0].engine.step_lock = contextlib.nullcontext()  # type: ignore[assignment]
    start = threading.Barrier(THREADS)

    def step(number: int) -> None:
        start.wait(timeout=30)
        optimizers[number % 2].step()

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(step, range(THREADS)))
    wanted, found = full_weights(serial), full_weights(threaded)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


@on_ranks(2)
def test_concurrent_steps_equal_serial_ones(context: RankContext) -> None:
    """Four threads on each of two ranks."""
    assert _steps_in_threads_equal_serial_ones(context, is_locked=True)


@on_ranks(2)
def test_without_the_lock_concurrent_steps_are_lost(context: RankContext) -> None:
    """The test above can fail: here steps overwrite each other."""
    assert not _steps_in_threads_equal_serial_ones(context, is_locked=False)


@pytest.mark.gpu
@on_ranks(2, backend="nccl")
def test_concurrent_steps_equal_serial_ones_on_a_gpu(context: RankContext) -> None:
    """What torch's DistributedOptimizer does not do on CUDA tensors."""
    assert _steps_in_threads_equal_serial_ones(context, is_locked=True)


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


def _an_error_reaches_all(context: RankContext) -> None:
    model = _sharded(context)
    fallible = Fallible(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(fallible, model)
    _backward(model, 0, context.rank)
    before = [param.as_subclass(torch.Tensor).detach().clone() for param in model.parameters()]
    fallible.failure = "out of luck" if context.rank == 1 else None
    with pytest.raises(OptimizerError, match="step the optimizer: rank 1: ValueError: out of luck$") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, ValueError) is (context.rank == 1)
    after = [param.as_subclass(torch.Tensor) for param in model.parameters()]  # this rank's alone
    has_stepped = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert has_stepped is (context.rank != 1)

    fallible.failure = None
    optimizer.zero_grad()
    plain = _plain().to(context.device)
    plain.load_state_dict(full_weights(model))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for number in range(1, 4):
        for rank in range(context.world_size):
            _backward(plain, number, rank, 1 / context.world_size)
        _backward(model, number, context.rank)
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
    found = full_weights(model)
    assert_same(found, {name: value.cpu() for name, value in plain.state_dict().items()}, "weights")


@on_ranks(2, 3)
def test_an_error_on_one_rank_reaches_all_and_training_goes_on(context: RankContext) -> None:
    """It names the rank and the error; afterwards steps are those of plain torch from the weights as they are."""
    _an_error_reaches_all(context)


@pytest.mark.gpu
@on_ranks(2, backend="nccl")
def test_an_error_on_one_rank_reaches_all_on_a_gpu(context: RankContext) -> None:
    """The same, over NCCL."""
    _an_error_reaches_all(context)


@on_ranks(1, 2)
def test_errors_of_several_ranks_are_all_told(context: RankContext) -> None:
    """And one rank alone raises the same kind."""
    model = _sharded(context)
    fallible = Fallible(model.parameters(), lr=0.05)
    fallible.failure = f"number {context.rank}"
    stories = "; ".join(f"rank {rank}: ValueError: number {rank}" for rank in range(context.world_size))
    alone = "ValueError: number 0"
    with pytest.raises(OptimizerError, match=f"the optimizer: {stories if context.world_size > 1 else alone}$"):
        DistributedOptimizer(fallible, model).step()


@on_ranks(2)
def test_an_error_in_a_thread_reaches_all(context: RankContext) -> None:
    """Of four threads on rank 1 one fails; on rank 0 some thread hears of it, and the lock is free again."""
    model = _sharded(context)
    _backward(model, 0, context.rank)
    optimizers = [DistributedOptimizer(Fallible(model.parameters(), lr=0.05), model) for _ in range(THREADS)]
    if context.rank == 1:
        optimizers[2].optimizer.failure = "out of luck"  # type: ignore[attr-defined]

    def step(optimizer: DistributedOptimizer) -> str:
        try:
            optimizer.step()
        except OptimizerError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(THREADS) as threads:
        stories = list(threads.map(step, optimizers))
    assert sorted(stories) == [""] * 3 + ["could not step the optimizer: rank 1: ValueError: out of luck"]
    assert context.rank == 0 or stories[2]
    optimizers[0].step()


@on_ranks(2)
def test_a_failed_collective_inside_a_step_is_not_exchanged(context: RankContext) -> None:
    """Another rank is gone (here: does not step): waiting for it would be a hang."""
    model = _sharded(context)
    optimizer = DistributedOptimizer(_momentum(model), model)
    if context.rank == 1:
        return

    def closure() -> None:
        with optimizer.engine.ranks.guard("a sum"):
            raise RuntimeError("connection closed by peer")

    with pytest.raises(CommunicationError, match="a sum failed on rank 0 of 2: connection closed by peer"):
        optimizer.step(closure)


# -- an optimizer like any other ------------------------------------------------------------------------------------


def _wrapped(build: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """`build`, and around it the wrapper where the model is sharded."""

    def make(model: nn.Module) -> Optimizer:
        optimizer = build(model)
        return DistributedOptimizer(optimizer, model) if isinstance(model, StreamShard) else optimizer

    return make


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),  # asks for defaults
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_inner_optimizer(context: RankContext, name: str) -> None:
    """Five steps as on the unsharded model; a scheduler that did not see the steps would warn, which is an error."""
    schedulers: dict[int, Any] = {}

    def build(model: nn.Module) -> Optimizer:
        optimizer = _wrapped(_momentum)(model)
        schedulers[id(model)] = SCHEDULERS[name](optimizer)
        return optimizer

    def prepare(model: nn.Module, number: int) -> None:
        if number:
            schedulers[id(model)].step()

    assert_trains_like_plain(context, Stack, stack_step, steps=5, checked=(1, 4), optimizer=build, prepare=prepare)


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_through_the_wrapper(context: RankContext, fused: bool) -> None:
    """A fused optimizer unscales inside its step when GradScaler tells it to, which the wrapper must not hide."""

    def build(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)

    plain, model = _plain(), _sharded(context)
    optimizer, plain_optimizer = DistributedOptimizer(build(model), model), build(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for number in range(4):
        for rank in range(2):
            _backward(plain, number, rank, 0.5)
        scaler.scale(model(vector_batch(number, context.rank)).square().mean()).backward()
        before = full_weights(model)
        if number == 2 and context.rank == 1:
            piece_of(next(p.grad for p in model.parameters() if piece_of(p).numel()))[...] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        if number == 2:
            assert_same(full_weights(model), before, "weights after an overflow on rank 1", EXACT)
            assert scaler.get_scale() == 512.0
        else:
            plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_param_groups_can_be_added_through_the_wrapper(context: RankContext) -> None:
    """Layers that are unfrozen after two steps, with a learning rate of their own."""
    made: dict[int, Optimizer] = {}

    def build(model: nn.Module) -> Optimizer:
        model.get_submodule("layers").requires_grad_(False)
        head = model.get_submodule("head")
        made[id(model)] = _wrapped(lambda m: torch.optim.AdamW(head.parameters(), lr=0.01, eps=1e-3))(model)
        return made[id(model)]

    def unfreeze(model: nn.Module, number: int) -> None:
        if number == 2:
            layers = model.get_submodule("layers").requires_grad_(True)
            made[id(model)].add_param_group({"params": list(layers.parameters()), "lr": 0.003})

    assert_trains_like_plain(context, Stack, stack_step, steps=5, checked=(4,), optimizer=build, prepare=unfreeze)


@on_ranks(2)
def test_param_groups_are_the_inner_ones_after_loading_state(context: RankContext) -> None:
    """Loading puts new groups into an optimizer: a wrapper that kept the old ones would set nobody's learning rate."""
    model = _sharded(context)
    inner = _momentum(model)
    optimizer = DistributedOptimizer(inner, model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups = copy.copy(inner.param_groups)
    assert optimizer.param_groups is inner.param_groups
    assert repr(inner) in repr(optimizer)


@on_ranks(2)
def test_hooks_on_the_wrapper_run_once_in_the_inner_optimizer(context: RankContext) -> None:
    """All six kinds."""
    model = _sharded(context)
    inner = _momentum(model)
    optimizer = DistributedOptimizer(inner, model)
    seen: list[tuple[str, Any]] = []
    kinds = [f"{what}_{when}" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    for kind in kinds:
        getattr(optimizer, f"register_{kind}_hook")(lambda *args, kind=kind: seen.append((kind, args[0])))
    _backward(model, 0, context.rank)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [(kind, inner) for kind in kinds]


@on_ranks(2)
def test_a_closure_is_called_by_the_inner_optimizer(context: RankContext) -> None:
    """Once, with gradients enabled; its loss is what step returns."""

    def train(model: nn.Module, optimizer: Optimizer, ranks: range) -> list[float]:
        def closure(number: int) -> float:
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            for rank in ranks:
                _backward(model, number, rank, 1 / len(ranks))
            return float(number)

        return [optimizer.step(lambda number=number: closure(number)) for number in range(3)]

    plain, model = _plain(), _sharded(context)
    train(plain, _momentum(plain), range(2))
    losses = train(model, DistributedOptimizer(_momentum(model), model), range(context.rank, context.rank + 1))
    assert losses == [0.0, 1.0, 2.0]
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(2)
def test_the_whole_state_travels_through_the_wrapper(context: RankContext) -> None:
    """Collected from one wrapped optimizer and loaded into another, training goes on to the bit."""

    def train(model: nn.Module, optimizer: Optimizer, first: int) -> None:
        for number in range(first, first + 2):
            stack_step(model, Call(number, context.rank, 2, 1.0))
            optimizer.step()
            optimizer.zero_grad()

    def make(model: nn.Module) -> Optimizer:
        return DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)

    model, resumed = _sharded(context), _sharded(context)
    optimizer = make(model)
    train(model, optimizer, 0)
    resumed.load_state_dict(full_weights(model))
    resumed_optimizer = make(resumed)
    state = streamshard.full_optimizer_state_dict(model, optimizer)
    assert context.rank or state["state"][0]["exp_avg"].shape == _plain().state_dict()["layers.0.linear.weight"].shape
    streamshard.load_optimizer_state_dict(resumed, resumed_optimizer, state)
    train(model, optimizer, 2)
    train(resumed, resumed_optimizer, 2)
    assert_same(full_weights(resumed), full_weights(model), "weights", EXACT)


@on_ranks(2)
def test_accelerate_takes_the_wrapper_for_an_optimizer(context: RankContext) -> None:
    """`Accelerator.prepare` wraps it once more; steps, learning rates and scheduling go through."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    plain, model = _plain(), _sharded(context)
    plain_optimizer = _momentum(plain)
    try:
        accelerator = Accelerator(cpu=True)
        wrapper = DistributedOptimizer(_momentum(model), model)
        optimizer, scheduler = accelerator.prepare(wrapper, lr_scheduler.StepLR(wrapper, 1, 0.5))
        plain_scheduler = lr_scheduler.StepLR(plain_optimizer, 1, 0.5)
        for number in range(3):
            for rank in range(2):
                _backward(plain, number, rank, 0.5)
            _backward(model, number, context.rank)
            for each in (optimizer, scheduler, plain_optimizer, plain_scheduler):
                each.step()
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert_same(full_weights(model), full_weights(plain), "weights")


@on_ranks(1)
def test_what_cannot_be_wrapped_or_copied_raises(context: RankContext) -> None:
    """Arguments in the wrong order, an unsharded model, deepcopy, pickle."""
    model = _sharded(context)
    with pytest.raises(ConfigError, match=r"optimizer is a Stack: wanted a torch\.optim\.Optimizer"):
        DistributedOptimizer(model, _momentum(model))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ShardingError, match="Stack is not sharded"):
        DistributedOptimizer(_momentum(model), _plain())
    optimizer = DistributedOptimizer(_momentum(model), model)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ShardingError, match="full_optimizer_state_dict"):
            copying(optimizer)


# -- torch.distributed.optim.DistributedOptimizer -------------------------------------------------------------------

BOUNDS = ((0, 2), (2, 5))  # which of a Stack's four layers and head each worker holds
STEPS = 5
KINDS: tuple[tuple[type[Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
)


class Part:
    """What one worker holds of a Stack."""

    def __init__(self, start: int, stop: int) -> None:
        stack: Any = _plain()
        layers = [*((f"layers.{number}", layer) for number, layer in enumerate(stack.layers)), ("head", stack.head)]
        self.layers: list[tuple[str, nn.Module]] = layers[start:stop]

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> [rows, width], or [rows, 1] with the head."""
        for _, layer in self.layers:
            x = layer(x)
        return x

    def weights(self) -> dict[str, Tensor]:
        """By their names in the Stack."""
        return {f"{name}.{p}": value.detach() for name, layer in self.layers for p, value in layer.named_parameters()}

    def params(self) -> list[Any]:
        """Remote references to the parameters."""
        return [rpc.RRef(param) for _, layer in self.layers for param in layer.parameters()]


def _train_over_rpc(kind: type[Optimizer], options: dict[str, Any]) -> dict[str, Tensor]:
    from torch.distributed.optim import DistributedOptimizer as OverRpc  # warns of torch.jit

    parts = [rpc.remote(f"worker{rank}", Part, args=bounds) for rank, bounds in enumerate(BOUNDS)]
    params = [param for part in parts for param in part.rpc_sync().params()]
    optimizer = OverRpc(kind, params, **options)
    for number in range(STEPS):
        with autograd.context() as context_id:
            x = vector_batch(number, 0)
            for part in parts:
                x = part.rpc_sync().forward(x)
            autograd.backward(context_id, [x.square().mean()])
            optimizer.step(context_id)
    return {name: value for part in parts for name, value in part.rpc_sync().weights().items()}


@on_ranks(2)
def test_weights_are_those_of_torchs_over_rpc(context: RankContext, tmp_path: Path) -> None:
    """SGD, Adam, AdamW. Torch: layers on two workers, driven by one. Here: both ranks have the same batch."""
    settings = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    # Once for all three: started a second time in a process, RPC still sends references through its first agent.
    rpc.init_rpc(f"worker{context.rank}", rank=context.rank, world_size=2, rpc_backend_options=settings)
    wanted = [_train_over_rpc(kind, options) for kind, options in KINDS] if context.rank == 0 else []
    rpc.shutdown()

    for place, (kind, options) in enumerate(KINDS):
        model = _sharded(context)
        optimizer = DistributedOptimizer(kind(model.parameters(), **options), model)  # type: ignore[call-arg]
        for number in range(STEPS):
            _backward(model, number, 0)
            optimizer.step()
            optimizer.zero_grad()
        found = full_weights(model)
        if context.rank == 0:
            assert_same(found, wanted[place], f"weights of {kind.__name__}", ROUNDING)
