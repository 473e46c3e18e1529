"""Unusual ways of training, for tests of order and time: each is a model and one training step.

A step runs forwards and backwards of a *sharded* model, as many as the way of training wants, up to the optimizer step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard
from streamshard.comm.streams import Fence, StreamName
from tests.compare import full_weights
from tests.counts import engine_inside
from tests.faults import Trouble, failing
from tests.models import DIM, Adapter, Layer, Stack, TinyConfig, TinyLM, UsingLM, stack_of, vector_batch
from tests.ranks import Call, RankContext
from tests.reference import adamw, lm_step, no_sync, seed, stack_step

RESIDENT: dict[str, Any] = {"weight_slots": 2}  # as many as with `OFFLOAD`: their number orders sums
OFFLOAD: dict[str, Any] = {"offload": "state"}
BF16 = Precision(param_dtype=torch.bfloat16)
PRECISIONS = {
    "fp32": Precision(param_dtype=torch.float32),
    "bf16": BF16,
    "16-bit wire": Precision(param_dtype=torch.bfloat16, grad_dtype=torch.bfloat16),
    "16-bit": Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class Scenario(NamedTuple):
    """A model and what one optimizer step of it consists of."""

    build: Callable[[], nn.Module]
    step: Callable[[Any, Call], object]
    resident: Sequence[str] = ()


class RoutedStack(Stack):
    """Layers that run in the order of `route`, which may skip and repeat them.

    Args:
        depth: number of layers.
        reentrant: whether each layer is checkpointed with ``use_reentrant``; None is not at all.
    """

    def __init__(self, depth: int = 5, reentrant: bool | None = None) -> None:
        super().__init__((DIM,) * (depth + 1))
        self.route: Sequence[int] = range(depth)
        self.reentrant = reentrant

    def order(self) -> Iterator[Any]:
        for place in self.route:
            layer = self.layers[place]
            yield layer if self.reentrant is None else self._checkpointed(layer)

    def _checkpointed(self, layer: nn.Module) -> Callable[[Tensor], Any]:
        return lambda x: checkpoint(layer, x, use_reentrant=self.reentrant)


class ReadingStack(Stack):
    """Weights of two layers are read where these do not run: by the root, and by other layers."""

    def __init__(self) -> None:
        super().__init__((DIM,) * 6)
        for place, layer in enumerate(self.layers):
            lenders = [self.layers[0], self.layers[2]][: 1 + place % 2]
            layer.forward = functools.partial(_lent, layer, lenders)  # type: ignore[method-assign]  # a method's place

    def forward(self, x: Tensor) -> Tensor:
        first, third = (self.layers[place].linear.weight for place in (0, 2))
        penalty = (first @ third).square().mean() + third.square().mean()
        return super().forward(x) + penalty


def _lent(layer: Layer, lenders: Sequence[Layer], x: Tensor) -> Tensor:
    for lender in lenders:
        x = x + F.linear(x, layer.linear.weight @ lender.linear.weight, lender.linear.bias)
    return Layer.forward(layer, x)


def _read_head(model: Any, x: Tensor) -> Tensor:
    """As a fused loss does."""
    return F.linear(x, model.head.weight)


def _differentiable_input(model: nn.Module, call: Call) -> None:
    """Reentrant checkpointing wants an input that needs a gradient."""
    call.backward(model(vector_batch(call.step, call.rank).requires_grad_()).square().mean())


def _micro_batches(model: nn.Module, call: Call) -> None:
    for part in range(3):
        stack_step(model, call._replace(step=3 * call.step + part))


def _no_sync(model: nn.Module, call: Call) -> None:
    """In one step gradients that wait are added to one that was reduced before."""
    if call.step == 1:
        stack_step(model, call._replace(step=20))
    with no_sync(model):
        for part in range(2):
            stack_step(model, call._replace(step=3 * call.step + part))
    stack_step(model, call._replace(step=3 * call.step + 2))


def _on(*routes: Sequence[int]) -> Callable[[nn.Module, Call], None]:
    """A step on another route each time, the same on all ranks."""

    def step(model: nn.Module, call: Call) -> None:
        model.route = routes[call.step % len(routes)]  # type: ignore[assignment]  # a RoutedStack
        stack_step(model, call)

    return step


def _route_by_rank(model: nn.Module, call: Call) -> None:
    _on([0, 1, 2, 3, 4], [0, 2, 4], [1, 3])(model, call._replace(step=call.step + call.rank))


def _recompute_by_rank(model: nn.Module, call: Call) -> None:
    model.route = ([0, 1, 2, 3, 4], [0], [0, 2, 4], [1, 3])[(call.step + call.rank) % 4]  # type: ignore[assignment]
    _differentiable_input(model, call)


def _repeat_by_rank(model: nn.Module, call: Call) -> None:
    """After the first step each rank alone repeats its first layers, in turn, or uses them last, or not at all."""
    routes = ([0, 1, 2, 0, 1, 2, 3, 4, 5], [3, 4, 5], [0, 1, 0, 1, 2, 3, 4, 5], [3, 4, 5, 2, 0])
    _on([0, 1, 2, 3, 4, 5] if call.step == 0 else routes[(call.step + call.rank) % 4])(model, call)


def _evaluating(model: nn.Module, call: Call) -> None:
    """Layers skipped at the end of a pass are gathered all the same, and nothing ever waits for them."""
    with torch.no_grad():
        for route in ([0, 1, 2], [4, 3, 2, 1, 0], [0]):
            model.route = route  # type: ignore[assignment]  # a RoutedStack
            model(vector_batch(call.step, call.rank))
    _on([0, 1, 2, 3, 4])(model, call)


def _two_forwards(model: nn.Module, call: Call) -> None:
    losses = [model(vector_batch(call.step + 50 * k, call.rank)).square().mean() for k in range(2)]
    call.backward(losses[0] + losses[1])


def _two_backwards(model: nn.Module, call: Call) -> None:
    loss = model(vector_batch(call.step, call.rank)).square().mean()
    call.backward(loss, retain_graph=True)
    call.backward(loss)


def _kept_graph(model: nn.Module, call: Call) -> None:
    """A graph that has been through one backward is part of the next one: gradients come in several parts."""
    first, second = (model(vector_batch(call.step + 50 * k, call.rank)).square().mean() for k in range(2))
    call.backward(first, retain_graph=True)
    call.backward(first + second)


def _freezing(model: nn.Module, call: Call) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(f"layers.{call.step}" not in name)
    stack_step(model, call)


class AdapterStack(Stack):
    """Adapters that train on layers that do not; a layer that trains, and one that is frozen altogether.

    What is frozen is of half precision, but for one weight.
    """

    def __init__(self) -> None:
        super().__init__((DIM,) * 7)
        layers: Any = self.layers
        for index in (0, 1, 2, 4):
            layers[index].linear = Adapter(layers[index].linear)
        layers[3].requires_grad_(False)
        for name, param in self.named_parameters():
            if not param.requires_grad and name != "layers.2.linear.base.weight":
                param.data = param.to(torch.bfloat16)


class NormedLayer(Layer):
    """With a norm of its outputs, whose weights and statistics are fp32 where the rest is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(x))
        return out


def _clipping(model: nn.Module, call: Call) -> None:
    assert isinstance(model, StreamShard)
    stack_step(model, call)
    model.clip_grad_norm_(0.01)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.005)


def _summoning(model: nn.Module, call: Call) -> None:
    assert isinstance(model, StreamShard)
    stack_step(model, call)
    with model.summon_full_params(), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.99)
    model.full_state_dict()


def _stop_halfway(model: nn.Module, call: Call, *, backward: bool = True) -> None:
    """A backward that raises, when gradients of the layers behind have been reduced; or a forward."""
    with contextlib.suppress(Trouble), failing(model.layers[2], backward=backward):  # type: ignore[index]
        stack_step(model, call)


def _failing_backward(model: nn.Module, call: Call) -> None:
    _stop_halfway(model, call)
    model.zero_grad()
    stack_step(model, call)


def _failing_forward(model: nn.Module, call: Call) -> None:
    _stop_halfway(model, call, backward=False)
    stack_step(model, call)


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(lambda: TinyLM(TinyConfig(depth=5)), lm_step),
    "large embedding and head": Scenario(lambda: TinyLM(TinyConfig(vocabulary=160)), lm_step),
    "tied": Scenario(lambda: TinyLM(TinyConfig(tied=True)), lm_step),
    "two layers": Scenario(lambda: RoutedStack(2), stack_step),
    "unequal layers": Scenario(lambda: Stack((16, 3, 40, 1, 24, 16)), stack_step),
    "a unit of another kind": Scenario(
        lambda: nn.Sequential(nn.Linear(DIM, DIM), *(Layer() for _ in range(4))), stack_step
    ),
    "micro-batches": Scenario(RoutedStack, _micro_batches),
    "no_sync": Scenario(RoutedStack, _no_sync),
    "checkpointing": Scenario(lambda: RoutedStack(reentrant=False), stack_step),
    "reentrant checkpointing": Scenario(lambda: RoutedStack(reentrant=True), _differentiable_input),
    "unused layers": Scenario(RoutedStack, _on([0, 1, 2, 3, 4], [0, 2, 4], [1], [4, 3])),
    "layers unused on some ranks": Scenario(RoutedStack, _route_by_rank),
    "layers used twice": Scenario(RoutedStack, _on([0, 1, 0, 1, 2, 3, 4], [0, 0, 1, 1, 2, 3, 4, 4], [0, 2, 0, 4, 0])),
    "repeats under checkpointing": Scenario(lambda: RoutedStack(reentrant=False), _on([0, 1, 0, 1, 2, 3, 4, 0])),
    "an order that changes": Scenario(RoutedStack, _on([4, 3, 2, 1, 0], [0, 2, 4, 1, 3], [1, 0, 3, 2, 4])),
    "evaluation between steps": Scenario(RoutedStack, _evaluating),
    "two forwards": Scenario(RoutedStack, _two_forwards),
    "two backwards": Scenario(RoutedStack, _two_backwards),
    "a kept graph": Scenario(RoutedStack, _kept_graph),
    "freezing": Scenario(RoutedStack, _freezing),
    "adapters": Scenario(AdapterStack, stack_step),
    "adapters in micro-batches": Scenario(AdapterStack, _no_sync),
    "norms in fp32": Scenario(stack_of(NormedLayer, 5), stack_step),
    "clipping": Scenario(RoutedStack, _clipping),
    "summoning": Scenario(RoutedStack, _summoning),
    "a backward that fails": Scenario(RoutedStack, _failing_backward),
    "weights read elsewhere": Scenario(ReadingStack, stack_step, resident=("layers.0", "layers.2")),
    "a forward that fails": Scenario(RoutedStack, _failing_forward),
    "resident layers repeated on some ranks": Scenario(
        lambda: RoutedStack(6), _repeat_by_rank, resident=("layers.0", "layers.1", "layers.2")
    ),
    "layers unused on some ranks, recomputed": Scenario(lambda: RoutedStack(reentrant=True), _recompute_by_rank),
    "a head that a loss reads": Scenario(
        lambda: UsingLM(TinyConfig(vocabulary=160, depth=5), head=_read_head), lm_step
    ),
}


# Where gradients are added to what is there: in another order on accelerators.
ADDING = ("micro-batches", "no_sync", "adapters in micro-batches", "two backwards", "a kept graph")


def sharded(scenario: str, precision: Precision, **settings: Any) -> nn.Module:
    """The scenario's model, sharded, the same at each call."""
    seed(23)
    build, _, resident = SCENARIOS[scenario]
    model: nn.Module = StreamShard(build(), resident=resident, precision=precision, **settings)
    return model


@contextlib.contextmanager
def over_sockets() -> Iterator[None]:
    """Models that are sharded inside exchange everything through gloo, as between machines."""
    os.environ["STREAMSHARD_SHARED_MEMORY"] = "0"
    try:
        yield
    finally:
        del os.environ["STREAMSHARD_SHARED_MEMORY"]


def train(
    model: nn.Module,
    scenario: str,
    context: RankContext,
    *,
    steps: int = 3,
    make: Callable[[Any], Any] = adamw,
    weight: float = 1.0,
) -> None:
    """Optimizer steps of the scenario, whose losses are multiplied by `weight`."""
    optimizer = make(model)
    for number in range(steps):
        SCENARIOS[scenario].step(model, context.call(number)._replace(weight=weight))
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)


def trained(context: RankContext, scenario: str, precision: Precision, **settings: Any) -> dict[str, Tensor]:
    """Whole weights after training."""
    model = sharded(scenario, precision, **settings)
    train(model, scenario, context)
    return full_weights(model)


# Of this process, which serves many tests.
_references: dict[tuple[str, Precision, int], dict[str, Tensor]] = {}


def reference(context: RankContext, scenario: str, precision: Precision) -> dict[str, Tensor]:
    """What training with the default settings gives, trained once per set of rank processes. Collective."""
    key = (scenario, precision, context.world_size)
    is_known = torch.tensor(key in _references)
    dist.all_reduce(is_known, dist.ReduceOp.MIN)  # processes are replaced when a test fails, not all of them
    if not is_known:
        _references[key] = trained(context, scenario, precision)
    return _references[key]


@contextlib.contextmanager
def without_waits(model: nn.Module, which: str | tuple[str, int]) -> Iterator[None]:
    """Leave out waits of `model`: of fences by what they guard, or in a line of a file."""
    streams, wait = engine_inside(model).streams, Fence.wait

    def wait_for_others(fence: Fence, target: StreamName | None = None) -> None:
        caller = sys._getframe(1)
        if fence._streams is not streams or which not in (fence.what, (caller.f_code.co_filename, caller.f_lineno)):
            wait(fence, target)

    with mock.patch.object(Fence, "wait", wait_for_others):
        yield
