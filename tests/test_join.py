"""Uneven inputs: with torch.distributed.algorithms.Join training gives what DDP's join gives."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
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
from streamshard.engine.engine import Inputs
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
    counted_collectives,
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
    def finish() -> None:
        after(model, optimizer)
        if schedule is not None:
            schedule.step()

    with Join([model], repeat=finish, **options):  # type: ignore[list-item]  # a Joinable but for its metaclass
        for number in range(length):
            step(model, Call(number, context.rank, context.world_size, 1.0))
            finish()
            optimizer.zero_grad()


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


def _assert_even(model: nn.Module) -> None:
    """Everything is as it was before the context."""
    assert type(engine_inside(model).inputs) is Inputs
    assert "_join_config" not in vars(model)


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("lengths", "kind", "after"),
    [
        (lengths, (sgd, adamw)[(row + column) % 2], after)
        for row, lengths in enumerate(LENGTHS)
        for column, after in enumerate((_step_only, _clip_and_step, _skip_large))
    ],
)
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


def _partly_frozen() -> nn.Module:
    """A layer that does not train, and a bias of another."""
    model = Stack()
    layers: Any = model.layers
    layers[1].requires_grad_(False)
    layers[2].linear.bias.requires_grad_(False)
    return model


@on_ranks(3)
def test_frozen_parameters_are_not_reduced_for_ranks_that_run_out_either(context: RankContext) -> None:
    """Ranks that have no inputs issue what the others do."""
    length = LENGTHS["all differ"][context.rank]
    wanted, found = _ddp(_partly_frozen), _sharded(_partly_frozen)
    _train(wanted, sgd(wanted.module), stack_step, context, length)
    _train(found, sgd(found), stack_step, context, length)
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
        with Join([model], repeat=optimizer.step):  # type: ignore[list-item]
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
    """A shard is updated at the rate of its turn, whoever has inputs: the schedule is part of ``repeat``."""
    length = (6, 2)[context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack)
    for model in (wanted, found):
        optimizer = sgd(getattr(model, "module", model))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        _train(model, optimizer, stack_step, context, length, schedule=schedule)
    _assert_equal(context, found, wanted)


@on_ranks(2, 3)
@pytest.mark.parametrize("after", [_step_only, _clip_and_step, _skip_large])
def test_a_rank_without_any_input_takes_part(context: RankContext, after: After) -> None:
    """It has what the others have: its optimizer, and what to do after a backward."""
    length = (3, 0, 1)[context.rank]
    wanted, found = _ddp(Stack), _sharded(Stack)
    _train(wanted, sgd(wanted.module), stack_step, context, length, after)
    _train(found, sgd(found), stack_step, context, length, after)
    _assert_equal(context, found, wanted)


@on_ranks(2)
def test_training_without_repeat_is_refused_on_all_ranks(context: RankContext) -> None:
    """At the first forward that trains, before anybody has run out, and if it is one rank that forgot it."""
    model = _sharded(Stack)
    optimizer = sgd(model)
    for repeats in ((None, None), (optimizer.step, None)):
        with (
            pytest.raises(ConfigError, match=r"rank [01] does not know what to do.*repeat=optimizer\.step"),
            Join([model], repeat=repeats[context.rank]),
        ):
            stack_step(model, Call(0, context.rank, 2, 1.0))
        _assert_even(model)
    with pytest.raises(ConfigError, match="repeat=3: wanted a function"):
        Join([model], repeat=3)
    with Join([model], others_argument=3), torch.no_grad():
        for _ in range(1 + context.rank):
            assert model(torch.ones(2, 16)).isfinite().all()


@on_ranks(2)
def test_a_context_that_is_switched_off_is_none(context: RankContext) -> None:
    """``enable=False``, where all ranks are known to have as many inputs."""
    model = _sharded(Stack)
    with Join([model], enable=False):
        stack_step(model, Call(0, context.rank, 2, 1.0))
    with Join([model], enable=False), counted_collectives(model) as counts, torch.no_grad():
        model(torch.ones(2, 16))
    assert "allreduce_" not in counts


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
            with Join(models, repeat=optimizers[1].step):
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
        with Join([model], repeat=optimizer.step):
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
    _assert_even(found)
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
    """Optimizers in turn, value clipping, torch's own norm, edits, averages."""
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
    """Join tells nobody; passes are not announced any more, and means are over all ranks."""
    wanted, found = _sharded(Stack), _sharded(Stack)
    options = {"repeat": print, "divide_by_initial_world_size": divides_by_all}
    with contextlib.suppress(ZeroDivisionError), Join([found], **options):
        found(torch.ones(2, 16))
        raise ZeroDivisionError
    _assert_even(found)
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


@on_ranks(2, 3)
@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scaler_works(context: RankContext, overflows: bool) -> None:
    """A rank that has run out unscales, hears of others' overflows, and moves its scale as they do."""
    lengths = (5, 2 if overflows else 0, 4)[: context.world_size]
    weights, scales = [], []
    for evenly in (True, False):
        model = _sharded(Stack)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        scaler.scale(torch.zeros(()))  # on a rank without any input nobody else makes the scale

        def finish() -> None:
            scaler.step(optimizer)  # noqa: B023  # called in this turn of the loop
            scaler.update()  # noqa: B023

        with contextlib.nullcontext() if evenly else Join([model], repeat=finish):
            for number in range(max(lengths) if evenly else lengths[context.rank]):
                is_shadow = number >= lengths[context.rank]
                factor = 0.0 if is_shadow else torch.inf if overflows and number == 3 and context.rank == 0 else 1.0
                loss = model(torch.full((2, 16), 0.1 * number + context.rank)).square().mean() * factor
                scaler.scale(loss).backward()
                finish()
                optimizer.zero_grad()
        weights.append(full_weights(model))
        scales.append(scaler.get_scale())
    assert_same(weights[1], weights[0], "weights", NEAR)
    assert scales[0] == scales[1] == (64.0 if overflows else 256.0)


@on_ranks(2)
def test_norms_of_gradients_can_be_part_of_it(context: RankContext) -> None:
    """They are of all ranks, and a rank that has run out takes them with the others."""
    norms: list[float] = []

    def note(model: nn.Module, optimizer: Optimizer) -> None:
        norms.append(float(sum(param.grad.norm() for param in model.parameters() if param.grad is not None)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()

    model = _sharded(Stack)
    _train(model, sgd(model), stack_step, context, (4, 2)[context.rank], note)
    everyone: list[Any] = [None] * context.world_size
    dist.all_gather_object(everyone, norms)
    assert len(norms) == 8
    assert everyone[0] == everyone[1]


def _lower_rate(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def _nothing(model: nn.Module, optimizer: Optimizer) -> None:
    pass


def _step_twice(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.step()


@on_ranks(2, 3)
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize(
    ("loop", "repeat", "story"),
    [
        (_lower_rate, _step_only, r"repeat= did SGD.step\(lr=0.01\); rank 0 did SGD.step\(lr=0.005\)"),
        (_step_only, _nothing, r"repeat= did nothing; rank 0 did SGD.step\(\)\. Join.*scheduler"),
        (_nothing, _step_only, r"repeat= did SGD.step\(\); rank 0 did nothing.*no_sync"),
        (_step_only, _step_twice, r"repeat= did SGD.step\(\), SGD.step\(\); rank 0 did SGD.step\(\)\."),
    ],
)
def test_what_is_repeated_is_compared(context: RankContext, loop: After, repeat: After, story: str, more: int) -> None:
    """With what the others did, on all ranks: when the next pass is announced, and at the end if that was the last."""
    model = _sharded(Stack)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    if loop is _lower_rate:
        story = "rank 1 has run out, and " + story
    with pytest.raises(ShardingError, match=story), Join([model], repeat=lambda: repeat(model, optimizer)):
        for number in range((2 + more, 1, 2)[context.rank]):
            stack_step(model, Call(number, context.rank, context.world_size, 1.0))
            loop(model, optimizer)
            optimizer.zero_grad()
    _assert_even(model)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_what_a_clipping_is_given_is_compared(context: RankContext) -> None:
    """Its norm would differ from the others', with which it is summed."""
    model = _sharded(Stack)
    optimizer = sgd(model)
    limit = [1.0]

    def finish() -> None:
        model.clip_grad_norm_(limit[0])
        optimizer.step()

    with (
        pytest.raises(ShardingError, match=r"did clip_grad_norm_\(max_norm=1\.0\), SGD\.step\(\); rank 0 did"),
        Join([model], repeat=finish),
    ):
        for number in range((3, 1)[context.rank]):
            stack_step(model, Call(number, context.rank, 2, 1.0))
            finish()
            limit[0] *= 0.5 if number else 1.0
    _assert_even(model)


@on_ranks(2, 3)
@pytest.mark.parametrize("who", ["loop", "repeat"])
@pytest.mark.parametrize("more", [0, 3])
def test_a_norm_that_only_some_take_ends_all_of_them(context: RankContext, who: str, more: int) -> None:
    """It would be summed with what is none. They do not wait for the process group's timeout."""
    model = _sharded(Stack)
    optimizer = sgd(model)

    def finish(clips: bool) -> None:
        if clips:
            model.clip_grad_norm_(1.0)
        optimizer.step()

    story = "ranks do not do the same.*sums over|Connection closed|Application timeout"  # the latter two in Join's own
    with pytest.raises(RuntimeError, match=story), Join([model], repeat=lambda: finish(who == "repeat")):
        for number in range((2 + more, 1, 2)[context.rank]):
            stack_step(model, Call(number, context.rank, context.world_size, 1.0))
            finish(who == "loop")
            optimizer.zero_grad()


@on_ranks(2)
def test_two_sharded_models_take_turns(context: RankContext) -> None:
    """``repeat`` is called after the backward of each: here it steps after that of the second."""
    lengths = (4, 2)
    weights = []
    for evenly in (True, False):
        models: Any = [_sharded(Stack), _sharded(lambda: Stack((16, 4, 16)))]
        optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
        turns = itertools.count(1)

        def step() -> None:
            for model, optimizer in zip(models, optimizers, strict=True):  # noqa: B023  # called in this turn
                model.clip_grad_norm_(0.1)
                optimizer.step()

        def finish() -> None:
            if next(turns) % 2 == 0:  # noqa: B023
                step()  # noqa: B023

        with contextlib.nullcontext() if evenly else Join(models, repeat=finish):
            for number in range(max(lengths) if evenly else lengths[context.rank]):
                for model in models:
                    weight = float(number < lengths[context.rank])
                    stack_step(model, Call(number, context.rank, 2, weight))
                step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        weights.append([full_weights(model) for model in models])
    for found, wanted in zip(weights[1], weights[0], strict=True):
        assert_same(found, wanted, "weights", NEAR)


@on_ranks(2)
def test_ranks_that_have_inputs_make_the_same_passes(context: RankContext) -> None:
    """Which a rank that has run out is told of once."""
    model = _sharded(Stack)
    with (
        pytest.raises(ShardingError, match=r"rank 0 begins an evaluation, rank 1 a training pass"),
        Join([model], repeat=print),
        torch.set_grad_enabled(context.rank == 1),
    ):
        model(torch.ones(2, 16))
