"""Uneven inputs: with torch.distributed.algorithms.Join training gives what DDP's join gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from streamshard import ConfigError, DistributedOptimizer, LocalSGD, ShardingError, StreamShard
from streamshard.inspect import engine_inside
from tests.models import NormStack, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Step,
    Tolerance,
    adamw,
    assert_same,
    full_weights,
    lm_step,
    sgd,
    stack_step,
)
from tests.scenarios import RoutedStack

NEAR = Tolerance(1e-4, 1e-5)
SEED = 3
LENGTHS = {
    "one runs out": (5, 2, 5, 5),
    "all differ": (4, 2, 3, 1),
    "one more": (3, 3, 4, 3),
    "the first": (1, 4, 4, 4),
}

After = Callable[[nn.Module, Optimizer], None]


def _step_only(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def _clip_and_step(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, StreamShard):
        model.clip_grad_norm_(0.05)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def _skip_large(model: nn.Module, optimizer: Optimizer) -> None:
    """Drops the gradients of about half of the steps."""
    if isinstance(model, StreamShard):
        model.clip_grad_norm_(0.05, skip_above=0.3)
    elif nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.3:
        model.zero_grad()
    optimizer.step()


def _train(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    context: RankContext,
    length: int,
    after: After = _step_only,
    schedule: Any = None,
    **options: Any,
) -> None:
    with Join([model], **options):  # type: ignore[list-item]  # what a Joinable has, without its metaclass
        for number in range(length):
            step(model, Call(number, context.rank, context.world_size, 1.0))
            after(model, optimizer)
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()


def _ddp(build: Callable[[], nn.Module]) -> DistributedDataParallel:
    torch.manual_seed(SEED)
    return DistributedDataParallel(build())


def _sharded(build: Callable[[], nn.Module], **settings: Any) -> Any:
    torch.manual_seed(SEED)
    settings.setdefault("precision", FP32)
    return StreamShard(build(), **settings)


def _assert_equal(context: RankContext, found: nn.Module, wanted: DistributedDataParallel) -> None:
    assert_same(full_weights(found), dict(wanted.module.state_dict()), "weights", NEAR)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, full_weights(found))
    for other in everyone:
        assert_same(other, everyone[0], "weights on another rank", EXACT)


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [_step_only, _clip_and_step, _skip_large])
@pytest.mark.parametrize("kind", [sgd, adamw])
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_training_equals_ddp_join(context: RankContext, lengths: str, kind: Any, after: After) -> None:
    """Momentum and decay go on where inputs have run out, as DDP's last joiner has it."""
    length = LENGTHS[lengths][context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack)
    _train(wanted, kind(wanted.module), stack_step, context, length, after)
    _train(found, kind(found), stack_step, context, length, after)
    _assert_equal(context, found, wanted)


@on_ranks(2, 4)
@pytest.mark.parametrize("by_all", [True, False])
def test_means_are_over_all_ranks_or_over_those_with_inputs(context: RankContext, by_all: bool) -> None:
    """``divide_by_initial_world_size``, for a language model."""
    length = LENGTHS["all differ"][context.rank]
    wanted, found = _ddp(TinyLM), _sharded(TinyLM)
    for model in (wanted, found):
        inner = getattr(model, "module", model)
        _train(model, sgd(inner), lm_step, context, length, divide_by_initial_world_size=by_all)
    _assert_equal(context, found, wanted)


@on_ranks(3)
@pytest.mark.parametrize("slots", [{}, {"weight_slots": "all"}, {"weight_slots": "all", "grad_slots": "all"}])
def test_every_slot_setting_works(context: RankContext, slots: dict[str, Any]) -> None:
    """Accumulated micro-batches too: a rank that has run out follows no_sync()."""

    def step(model: Any, call: Call) -> Tensor:
        with model.no_sync():
            stack_step(model, call._replace(step=2 * call.step))
        return stack_step(model, call._replace(step=2 * call.step + 1))

    length = LENGTHS["all differ"][context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack, **slots)
    _train(wanted, sgd(wanted.module), step, context, length)
    _train(found, sgd(found), step, context, length)
    _assert_equal(context, found, wanted)


@on_ranks(4)
def test_replicas_work(context: RankContext) -> None:
    """On a mesh of 2 x 2 ranks, one of which runs out."""
    length = LENGTHS["one runs out"][context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack, mesh=init_device_mesh("cpu", (2, 2)))
    _train(wanted, sgd(wanted.module), stack_step, context, length)
    _train(found, sgd(found), stack_step, context, length)
    _assert_equal(context, found, wanted)


@on_ranks(2, 3)
@pytest.mark.parametrize("lengths", list(LENGTHS))
def test_buffers_are_those_of_a_rank_with_inputs(context: RankContext, lengths: str) -> None:
    """Batch norm's statistics, as under DDP."""
    length = LENGTHS[lengths][context.rank]
    wanted, found = _ddp(NormStack), _sharded(NormStack)
    _train(wanted, sgd(wanted.module), stack_step, context, length)
    _train(found, sgd(found), stack_step, context, length)
    _assert_equal(context, found, wanted)


@on_ranks(2, 3)
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_may_be_cleared_at_the_start_of_a_step(context: RankContext, accumulates: bool) -> None:
    """Those of a rank's own last step do not get into the first that it shadows."""
    lengths = LENGTHS["all differ"]
    wanted, found = _ddp(Stack), _sharded(Stack)
    for model in (wanted, found):
        optimizer = sgd(getattr(model, "module", model))
        with Join([model]):  # type: ignore[list-item]
            for number in range(2 * lengths[context.rank]):
                is_first = number % 2 == 0 or not accumulates
                if is_first:
                    optimizer.zero_grad()
                with model.no_sync() if is_first and accumulates else contextlib.nullcontext():
                    stack_step(model, Call(number, context.rank, context.world_size, 1.0))
                if not is_first or not accumulates:
                    optimizer.step()
    _assert_equal(context, found, wanted)


@on_ranks(2)
def test_a_learning_rate_schedule_goes_on(context: RankContext) -> None:
    """The schedule of a rank that has run out stands still; its shard is updated at the others' rate."""
    length = (6, 2)[context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack)
    for model in (wanted, found):
        optimizer = sgd(getattr(model, "module", model))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        _train(model, optimizer, stack_step, context, length, schedule=schedule)
    _assert_equal(context, found, wanted)


@on_ranks(2, 3)
def test_a_rank_without_any_input_takes_part(context: RankContext) -> None:
    """It has to be told its optimizer; without that it says so."""
    for after in (_step_only, _clip_and_step, _skip_large):
        length = (3, 0, 1)[context.rank]
        wanted, found = _ddp(Stack), _sharded(Stack)
        optimizer = sgd(found)
        _train(wanted, sgd(wanted.module), stack_step, context, length, after)
        _train(found, optimizer, stack_step, context, length, after, optimizers=[optimizer])
        _assert_equal(context, found, wanted)
    with pytest.raises(ConfigError, match="optimizer is a Stack: wanted"):
        Join([found], optimizers=[found])


@on_ranks(2)
def test_optimizers_of_another_model_are_refused(context: RankContext) -> None:
    """They would leave the shard behind."""
    model, other = _sharded(Stack), _sharded(Stack)
    for wrong in ([sgd(other)], sgd(other), [sgd(model), sgd(nn.Linear(2, 2))]):
        with pytest.raises(ConfigError, match="SGD has no parameter of this model"):
            Join([model], optimizers=wrong)
    with pytest.raises(ConfigError, match="repeat=3: wanted a function"):
        Join([model], repeat=3)
    _train(model, sgd(model), stack_step, context, 2)


@on_ranks(2)
def test_a_rank_that_does_not_know_its_optimizer_says_so(context: RankContext) -> None:
    """On all ranks, before its shard would be left behind."""
    model = _sharded(Stack)
    with pytest.raises(ShardingError, match=r"rank 1 has run out before its first optimizer step.*optimizers="):
        _train(model, sgd(model), stack_step, context, (1, 0)[context.rank])


@on_ranks(2)
def test_other_joinables_can_join_too(context: RankContext) -> None:
    """A DDP model in front, which tells that this rank still has inputs, or behind."""
    length = (4, 2)[context.rank]
    for first in ("ddp", "ours"):
        weights = []
        for shard in (False, True):
            mine = _sharded(Stack) if shard else _ddp(Stack)
            other = _ddp(lambda: Stack((16, 4, 16)))
            optimizers = [sgd(getattr(model, "module", model)) for model in (other, mine)]
            models: Any = [other, mine] if first == "ddp" else [mine, other]
            with Join(models):
                for number in range(length):
                    for model in models:
                        stack_step(model, Call(number, context.rank, 2, 1.0))
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            weights.append([full_weights(getattr(model, "module", model)) for model in (other, mine)])
        for found, wanted in zip(weights[1], weights[0], strict=True):
            assert_same(found, wanted, first, NEAR)


@on_ranks(2, 3)
def test_layers_that_run_in_another_order_are_shadowed(context: RankContext) -> None:
    """A rank that has run out issues what the program says; layers nobody else uses stay without gradient."""

    def step(model: Any, call: Call) -> Tensor:
        (getattr(model, "module", model)).route = [[3, 1, 0, 2], [3, 0]][call.step % 2]
        return stack_step(model, call)

    lengths = LENGTHS["all differ"][: context.world_size]
    found = _sharded(RoutedStack)
    _train(found, sgd(found), step, context, lengths[context.rank])
    # DDP's join gives parameters that nobody uses a gradient of zero, which moves them by momentum and decay.
    torch.manual_seed(SEED)
    wanted = RoutedStack()
    optimizer = sgd(wanted)
    for number in range(max(lengths)):
        for rank in range(context.world_size):
            if number < lengths[rank]:
                step(wanted, Call(number, rank, context.world_size, 1.0 / context.world_size))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_weights(found), dict(wanted.state_dict()), "weights", NEAR)


@on_ranks(2)
def test_evaluation_inside_the_context_is_shadowed(context: RankContext) -> None:
    """A forward without gradients between steps, while another rank has run out."""
    length = (4, 2)[context.rank]
    results = []
    for evaluates in (False, True):
        model = _sharded(Stack)
        optimizer = sgd(model)
        with Join([model]):
            for number in range(length):
                stack_step(model, Call(number, context.rank, 2, 1.0))
                optimizer.step()
                optimizer.zero_grad()
                if evaluates:
                    with torch.no_grad():
                        stack = model(torch.ones(2, 16))
                    assert stack.isfinite().all()
        results.append(full_weights(model))
    assert_same(results[1], results[0], "weights", EXACT)


@on_ranks(4)
def test_wrapped_optimizers_are_repeated_whole(context: RankContext) -> None:
    """What they do around the step involves all ranks: averages over replicas, the exchange of errors."""
    length = LENGTHS["all differ"][context.rank]
    model = _sharded(Stack, mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = LocalSGD(DistributedOptimizer(sgd(model), model), model, warmup_steps=1, period=1)
    wanted = _ddp(Stack)
    _train(model, optimizer, stack_step, context, length)
    assert optimizer.step_count == max(LENGTHS["all differ"])
    assert all(weight.isfinite().all() for weight in full_weights(model).values())
    _train(wanted, sgd(wanted.module), stack_step, context, length)


@on_ranks(2)
def test_afterwards_everything_is_as_before(context: RankContext) -> None:
    """Training without the context goes on, and nothing is exchanged about inputs any more."""
    wanted, found = _ddp(Stack), _sharded(Stack)
    # Without momentum: that of a rank that ran out stands still under DDP, so its ranks would differ from each other.
    theirs, ours = (torch.optim.SGD(model.parameters(), 0.05) for model in (wanted, found))
    for _ in range(2):
        _train(wanted, theirs, stack_step, context, 2 + context.rank)
        _train(found, ours, stack_step, context, 2 + context.rank)
    assert engine_inside(found).uneven is None
    for number in range(2):
        call = Call(number, context.rank, 2, 1.0)
        for model, optimizer in ((wanted, theirs), (found, ours)):
            stack_step(model, call)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_weights(found), dict(wanted.module.state_dict()), "weights", NEAR)


class _Loop:
    """What follows backward in a loop that does more than clip and step; called by ranks that have run out as well."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inner = getattr(model, "module", model)
        self.optimizers = [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (inner.layers, inner.head)]
        self.average = [param.detach().clone() for param in inner.parameters()]
        self.count = 0

    def __call__(self) -> None:
        params = list(self.model.parameters())
        nn.utils.clip_grad_value_(params, 0.02)
        for param in params:
            if param.grad is not None:
                param.grad.mul_(0.5)
        nn.utils.clip_grad_norm_(params, 0.1 / (1 + self.count))
        self.optimizers[self.count % 2].step()
        with torch.no_grad():
            for average, param in zip(self.average, params, strict=True):
                param.clamp_(-0.2, 0.2)
                average.lerp_(param, 0.5)
        self.model.zero_grad()
        self.count += 1


@on_ranks(2, 3)
@pytest.mark.parametrize("lengths", ["all differ", "none at first"])
def test_whatever_follows_backward_can_be_repeated(context: RankContext, lengths: str) -> None:
    """Optimizers in turn, value clipping, torch's own norm, edits, averages: with ``repeat``."""
    length = {**LENGTHS, "none at first": (0, 4, 2)}[lengths][context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack)
    theirs, ours = _Loop(wanted), _Loop(found)
    for model, loop in ((wanted, theirs), (found, ours)):
        with Join([model], repeat=loop):  # type: ignore[list-item]
            for number in range(length):
                stack_step(model, Call(number, context.rank, context.world_size, 1.0))
                loop()
    # DDP's join leaves momentum and averages of ranks that have run out behind, and copies weights at the end.
    _assert_equal(context, found, wanted)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, (ours.count, theirs.count))
    assert {count for count, _ in everyone} == {max(count for _, count in everyone)}
    pieces = [average.clone() for average in ours.average]
    for param, average in zip(found.parameters(), pieces, strict=True):
        param.data.copy_(average)
    averages = full_weights(found)
    last = [count for _, count in everyone].index(max(count for _, count in everyone))
    reference = dict(zip(dict(wanted.module.named_parameters()), theirs.average, strict=True))
    kept: list[Any] = [None] * context.world_size
    dist.all_gather_object(kept, reference)
    assert_same(averages, kept[last], "averages", NEAR)


@on_ranks(2)
@pytest.mark.parametrize("divides_by_all", [True, False])
def test_an_exception_ends_the_context_too(context: RankContext, divides_by_all: bool) -> None:
    """Join tells nobody; what only it forbids is allowed again, and means are over all ranks."""
    wanted, found = _sharded(Stack), _sharded(Stack)
    with contextlib.suppress(ZeroDivisionError), Join([found], divide_by_initial_world_size=divides_by_all):
        found(torch.ones(2, 16))
        raise ZeroDivisionError
    assert engine_inside(found).uneven is None
    for model in (wanted, found):
        optimizer = sgd(model)
        for number in range(2):
            stack_step(model, Call(number, context.rank, 2, 1.0))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_weights(found), full_weights(wanted), "weights", EXACT)


@on_ranks(2)
def test_an_early_end_can_be_thrown(context: RankContext) -> None:
    """``throw_on_early_termination``: every rank raises, the model can be used afterwards."""
    model = _sharded(Stack)
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="exhausted"):
        _train(model, optimizer, stack_step, context, 2 + context.rank, throw_on_early_termination=True)
    assert all(weight.isfinite().all() for weight in full_weights(model).values())


@on_ranks(2)
def test_what_cannot_be_repeated_raises(context: RankContext) -> None:
    """Norms that a rank without inputs would not know of, a loss scaler, steps that differ from each other."""
    model = _sharded(Stack)
    optimizer = sgd(model)

    def torch_clip(model: nn.Module, optimizer: Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def scale(model: nn.Module, optimizer: Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)

    for after, said in ((torch_clip, "the norm of gradients.*model.clip_grad_norm_"), (scale, "a loss scaler")):
        with pytest.raises(ShardingError, match=said):
            _train(model, optimizer, stack_step, context, 2, after)
        optimizer.zero_grad()

    counts: Iterator[int]

    def sometimes(model: nn.Module, optimizer: Optimizer) -> None:
        if next(counts) % 2:
            optimizer.step()

    def growing(model: nn.Module, optimizer: Optimizer) -> None:
        model.clip_grad_norm_(1.0 + next(counts))  # type: ignore[operator]  # a method
        optimizer.step()

    def alternating(model: nn.Module, optimizer: Optimizer) -> None:
        pair[next(counts) % 2].step()

    pair = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.layers, model.head)]
    for after, said in (
        (sometimes, r"it was nothing, then SGD.step\(\). Put no_sync"),
        (growing, r"it was clip_grad_norm_\(.*SGD.step\(\), then clip_grad_norm_\(.*repeat="),
        (alternating, r"it was SGD.step\(\), then SGD.step\(\)"),
    ):
        counts = iter(range(9))
        with pytest.raises(ShardingError, match=said):
            _train(model, optimizer, stack_step, context, 6, after)
        optimizer.zero_grad()


@on_ranks(2)
def test_settings_changed_too_late_raise(context: RankContext) -> None:
    """The learning rate of a step is told before it. From the second step on, whether somebody has run out or not."""
    model = _sharded(Stack)
    optimizer = sgd(model)

    raised: list[ShardingError] = []

    def change(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        try:
            optimizer.step()
        except ShardingError as error:
            raised.append(error)

    _train(model, optimizer, stack_step, context, (4, 2)[context.rank], change)
    assert len(raised) == (3, 1)[context.rank]
    assert all("changed between the forward and step()" in str(error) for error in raised)
