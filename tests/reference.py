"""What training must give: the same model trained by plain PyTorch on the same batches.

A *step function* runs forward and backward of one rank in one step and returns the loss. Plain PyTorch plays all
ranks in turn, each loss weighted 1/N, which is the mean of means that DDP computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from streamshard import Precision, StreamShard
from tests.compare import ROUNDING, Tolerance, assert_same, difference, full_grads, full_weights
from tests.models import Stack, next_token_loss, token_batch, vector_batch
from tests.ranks import Call as Call
from tests.ranks import RankContext

FP32 = Precision(param_dtype=torch.float32)
SEED = 7
ALL_SLOTS: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}
# Slots that units take turns in, and one for each unit. What lies between has the one's weights and the other's grads.
SETTINGS: dict[str, dict[str, Any]] = {"two slots": {}, "a slot each": ALL_SLOTS}
# For tests that are ``@on_ranks()``: one rank has no slots, so there is nothing to set.
each_setting = pytest.mark.parametrize(
    ("world_size", "settings"), [(1, "two slots"), *((2, settings) for settings in SETTINGS)]
)


def seed(number: int) -> None:
    """Seed the CPU's generator. ``torch.manual_seed`` is slower: it records the stack for missing devices."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def no_sync(model: Any, waits: bool = True) -> contextlib.AbstractContextManager[Any]:
    """The model's `no_sync()`, if it is sharded and gradients wait; plain PyTorch has no context for it."""
    return model.no_sync() if waits and isinstance(model, StreamShard) else contextlib.nullcontext()


def mesh_2d(replicate: int, shard: int) -> DeviceMesh:
    """A mesh of that many replicas with that many shards."""
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def only_sharded(do: Callable[[Any], None]) -> Callable[[nn.Module, int], None]:
    """Compile the sharded model, say, before its first step; plain PyTorch stays as it is."""

    def prepare(model: nn.Module, number: int) -> None:
        if number == 0 and isinstance(model, StreamShard):
            do(model)

    return prepare


Step = Callable[[nn.Module, Call], Tensor]


def _beside(model: nn.Module, batch: Tensor) -> Tensor:
    """On the device of the model's parameters."""
    return batch.to(next(model.parameters()).device)


def lm_step(model: nn.Module, call: Call) -> Tensor:
    """Next-token training of a `TinyLM`."""
    tokens = _beside(model, token_batch(call.step, call.rank))
    return call.backward(next_token_loss(model(tokens), tokens))


def stack_step(model: nn.Module, call: Call) -> Tensor:
    """Regression to zero of a `Stack`."""
    return call.backward(model(_beside(model, vector_batch(call.step, call.rank))).square().mean())


def sgd(model: nn.Module) -> Optimizer:
    """Momentum and weight decay: skipping a parameter without gradient makes a difference."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    """An `eps` large enough that rounding noise in gradients that are really zero is not blown up."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def assert_script_trained_like_plain(script: Mapping[str, Any], model: nn.Module, norms: Sequence[float]) -> None:
    """Train the plain model of a documented script in one process, and compare gradient norms and weights.

    Args:
        script: its names: `make_model` and `whole_batch`.
        model: trained by its `main` over all ranks.
        norms: the gradient norm of each step.
    """
    assert norms
    whole = script["make_model"]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    for step, norm in enumerate(norms):
        tokens = script["whole_batch"](step)
        cross_entropy(whole(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert difference(full_weights(model), full_weights(whole)) < 1e-4


def assert_trains_like_plain(
    context: RankContext,
    build: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    checked: Collection[int] = (1, 2),
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    prepare: Callable[[nn.Module, int], None] | None = None,
    set_to_none: bool = True,
    tolerance: Tolerance = ROUNDING,
    **settings: Any,
) -> nn.Module:
    """Train `build()` with StreamShard on all ranks and with plain PyTorch on all batches; compare.

    Args:
        context: the rank.
        build: makes the model; called with the same seed each time.
        step: forward and backward.
        steps: how many optimizer steps.
        checked: steps in which full gradients are collected and compared. Not all of them, because collecting could
            itself put right what was wrong. Losses are compared in every step, weights after the last.
        optimizer: makes the optimizer.
        prepare: called with the model and the step's number before each step.
        set_to_none: for ``zero_grad``.
        tolerance: for losses, gradients and weights.
        **settings: for `StreamShard`; fp32 throughout unless `precision` is given.

    Returns:
        The sharded model.
    """
    settings.setdefault("precision", FP32)
    size = context.world_size
    options: Any = {"steps": steps, "checked": checked, "prepare": prepare, "set_to_none": set_to_none}
    plain = built(build).to(context.device)
    wanted = _train(plain, optimizer(plain), step, [Call(0, rank, size, 1.0 / size) for rank in range(size)], **options)
    sharded = built(build).to(context.device)
    sharded = StreamShard(sharded, **settings)
    found = _train(sharded, optimizer(sharded), step, [context.call(0)], **options)
    _compare(found, wanted._replace(losses=[[losses[context.rank]] for losses in wanted.losses]), tolerance)
    return sharded


class _Course(NamedTuple):
    """A training run's results in CPU memory: losses of each step, gradients of checked steps, final weights."""

    losses: list[list[Tensor]]
    grads: dict[int, dict[str, Tensor | None]]
    weights: dict[str, Tensor]


def _train(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    calls: Sequence[Call],
    *,
    steps: int,
    checked: Collection[int],
    prepare: Callable[[nn.Module, int], None] | None,
    set_to_none: bool,
) -> _Course:
    """Train with each of `calls` in each step."""
    course = _Course([], {}, {})
    for number in range(steps):
        if prepare is not None:
            prepare(model, number)
        course.losses.append([])
        for call in calls:
            seed(1000 * number + call.rank)  # dropout falls alike wherever this rank's step is run
            course.losses[-1].append(step(model, call._replace(step=number)).cpu())
        if number in checked:
            grads = full_grads(model)
            course.grads[number] = {name: None if grad is None else grad.cpu() for name, grad in grads.items()}
        optimizer.step()
        if number == steps - 1:
            course.weights.update(full_weights(model))
        optimizer.zero_grad(set_to_none=set_to_none)
    return course


def _compare(found: _Course, wanted: _Course, tolerance: Tolerance) -> None:
    for number, (ours, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert theirs[0].isfinite(), "the reference itself diverges: nothing can be compared with it"
        assert_same({"loss": ours[0]}, {"loss": theirs[0]}, f"loss of step {number}", tolerance)
        if number in wanted.grads:
            assert_same(found.grads[number], wanted.grads[number], f"gradients of step {number}", tolerance)
    assert_same(found.weights, wanted.weights, "weights", tolerance)


def built(build: Callable[[], nn.Module] = Stack) -> Any:
    """The same model at each call."""
    seed(SEED)
    return build()


def sharded_model(build: Callable[[], nn.Module] = Stack, **settings: Any) -> Any:
    """The same model at each call, sharded; fp32 throughout unless `precision` is given."""
    return StreamShard(built(build), **{"precision": FP32, **settings})


def train_stack(
    model: nn.Module,
    optimizer: Any,
    context: RankContext | None = None,
    *,
    first: int = 0,
    steps: int = 3,
    step: Callable[[Any, Call], object] = stack_step,
) -> None:
    """Optimizer steps with `step`: on this rank's batches, or without `context` on the same ones everywhere."""
    rank, size = (0, 1) if context is None else (context.rank, context.world_size)
    for number in range(first, first + steps):
        step(model, Call(number, rank, size, 1.0))
        optimizer.step()
        optimizer.zero_grad()
