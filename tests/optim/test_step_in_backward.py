"""Hooks on parameters that step an optimizer, and clear the gradient, while backward goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard import ShardingError
from streamshard.comm.streams import StreamName
from streamshard.errors import log
from streamshard.optim import WholeParameterOptimizer
from tests.adversary import make_adversarial
from tests.compare import EXACT, assert_same, full_weights
from tests.counts import engine_inside
from tests.faults import Trouble, case, failing
from tests.models import Layer, TinyConfig, TinyLM, stack_of, vector_batch
from tests.races import detect_races
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, adamw, built, lm_step, mesh_2d, sharded_model, stack_step
from tests.scenarios import BF16, SCENARIOS, RoutedStack, over_sockets, sharded
from tests.simulated import checking_streams, late, simulated_device

# Ways of training with one forward per backward. "plain" runs on a device below, "two layers" on replicas.
WAYS = (
    *("large embedding and head", "tied", "unequal layers", "checkpointing", "reentrant checkpointing"),
    *("unused layers", "layers unused on some ranks", "layers used twice", "an order that changes", "freezing"),
    *("adapters", "norms in fp32", "layers unused on some ranks, recomputed", "resident layers repeated on some ranks"),
)


def _one_each(model: nn.Module) -> dict[nn.Parameter, torch.optim.Optimizer]:
    """Torch's recipe: one optimizer for each parameter."""
    return {param: adamw(nn.ParameterList([param])) for param in model.parameters() if param.requires_grad}


def _step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def step_in_hooks(model: nn.Module) -> list[Any]:
    """Returns the hooks."""
    optimizers = _one_each(model)
    return [param.register_post_accumulate_grad_hook(lambda param: _step(optimizers[param])) for param in optimizers]


def step_behind(model: nn.Module) -> Callable[[], None]:
    """The same optimizers, after each backward."""
    return partial(_step, *_one_each(model).values())


def run(model: Any, way: str, context: RankContext, after: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Weights after three steps; `after` is called behind each backward."""
    for number in range(3):
        SCENARIOS[way].step(model, context.call(number))
        after()
    return full_weights(model)


@on_ranks(1, 2)
def test_steps_in_backward_change_no_bit(context: RankContext) -> None:
    """However late collectives are, without races; over sockets, or through shared memory. Few ways on one rank."""
    for number, way in enumerate(WAYS):
        if context.world_size == 1 and number % 4:
            continue
        precision = (FP32, BF16)[number // 2 % 2]
        with case(way), over_sockets() if number % 2 else contextlib.nullcontext():
            behind = sharded(way, precision)
            wanted = run(behind, way, context, step_behind(behind))
            model = sharded(way, precision)
            step_in_hooks(model)
            with detect_races(model), make_adversarial(model):
                assert_same(run(model, way, context), wanted, "weights", EXACT)


@on_ranks(2)
def test_steps_in_backward_wait_for_reductions_on_a_device(context: RankContext) -> None:
    """Reductions that are as late as the device allows, and each operation on the stream that is its own."""
    with simulated_device() as device:
        behind = sharded("plain", BF16)
        wanted = run(behind, "plain", context, step_behind(behind))
        model = sharded("plain", BF16)
        step_in_hooks(model)
        comm, held = engine_inside(model).streams.device_stream(StreamName.COMM), []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: held.append(len(comm._held)))
        with late(model):
            assert_same(run(model, "plain", context), wanted, "weights", EXACT)
        assert max(held) > 0  # a hook does not wait for the reduction that has just started
        with checking_streams(device) as streams:
            model = sharded("plain", BF16)
            step_in_hooks(model)
            with streams.of(model):
                run(model, "plain", context)


@on_ranks(2)
def test_two_units_have_main_grads_at_once(context: RankContext) -> None:
    """The unit that is being reduced, and the one before."""
    model = sharded_model(stack_of(Layer, 6), precision=BF16, weight_slots=2)
    engine, most = engine_inside(model), []

    def count(param: nn.Parameter) -> None:
        held = {flat for unit in engine.units for flat in unit.trained if flat.main_grads.untyped_storage().nbytes()}
        most.append(len(held))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    step_in_hooks(model)
    for number in range(2):
        stack_step(model, context.call(number))
        assert all(param.grad is None for param in model.parameters())
    assert max(most) == 2, most


@on_ranks(2)
def test_gradients_that_hooks_keep_are_added_to(context: RankContext) -> None:
    """A hook that only looks: `.grad` is there after backward, and grows."""
    for build, step in ((stack_of(Layer, 5), stack_step), (lambda: TinyLM(TinyConfig(tied=True)), lm_step)):
        grads = []
        for is_hooked in (False, True):
            model = sharded_model(build)
            calls: list[nn.Parameter] = []
            for param in model.parameters() if is_hooked else ():
                param.register_post_accumulate_grad_hook(calls.append)
            for number in range(2):
                step(model, context.call(number))
            assert len(calls) == (2 * len(list(model.parameters())) if is_hooked else 0)
            grads.append({name: param.grad.as_subclass(Tensor).clone() for name, param in model.named_parameters()})
        assert_same(grads[1], grads[0], "gradients", EXACT)


@on_ranks(2)
def test_gradients_in_two_parts_raise_behind_a_hook(context: RankContext) -> None:
    """A hook has stepped before a reentrant checkpoint of the forward before makes the second part."""
    model = sharded_model(lambda: RoutedStack(reentrant=True))
    step_in_hooks(model)
    x = [vector_batch(number, context.rank).requires_grad_() for number in range(2)]
    with pytest.raises(ShardingError, match=r"'layers\.\d', .*two forwards.*use_reentrant=False"):
        (model(x[0]).square().mean() + model(x[1]).square().mean()).backward()
    (model(x[0]).square().mean()).backward()
    behind, model = (sharded_model(lambda: RoutedStack(reentrant=False)) for _ in range(2))
    step_in_hooks(model)
    wanted = run(behind, "two forwards", context, step_behind(behind))
    assert_same(run(model, "two forwards", context), wanted, "weights", EXACT)


@on_ranks(4)
def test_hooks_with_replicas_get_averages(context: RankContext) -> None:
    """At the end of backward."""
    mesh = mesh_2d(2, 2)
    behind, model = (sharded("two layers", FP32, mesh=mesh) for _ in range(2))
    step_in_hooks(model)
    wanted = run(behind, "two layers", context, step_behind(behind))
    assert_same(run(model, "two layers", context), wanted, "weights", EXACT)


@on_ranks(2)
def test_a_backward_that_fails_behind_steps_calls_no_hook_afterwards(context: RankContext) -> None:
    """Ranks stay in step: the rest of the program is issued without hooks."""
    model: Any = sharded("a backward that fails", FP32)
    call, calls = context.call(0), list[nn.Parameter]()
    step_in_hooks(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(calls.append)
    with pytest.raises(Trouble), failing(model.layers[1]):
        stack_step(model, call)
    called = len(calls)
    with mock.patch.object(log, "warning") as warning:
        full_weights(model)
    assert "Hooks have stepped some parameters: load" in warning.call_args.args[1]
    assert 0 < called == len(calls) < len(list(model.parameters()))
    stack_step(model, call)
    assert len(calls) == called + len(list(model.parameters()))


@on_ranks(2)
def test_collectives_inside_hooks_raise(context: RankContext) -> None:
    """Another rank runs the hook at another moment, or never if it has not used the parameter."""
    model = sharded_model(stack_of(Layer, 5))
    whole = {p: WholeParameterOptimizer([p], torch.optim.Adafactor) for p in model.parameters()}
    call = context.call(0)
    ranks = engine_inside(model).ranks
    for hook in (lambda p: float(p.grad.norm()), lambda p: whole[p].step(), partial(ranks.gather_objects, "wait")):
        hooks = [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]
        with pytest.raises(ShardingError, match=r"a norm, a sum .* inside backward.*read p\.grad\.norm\(\) after back"):
            stack_step(model, call)
        for each in hooks:
            each.remove()
    told = r"register_post_accumulate_grad_hook, .*After backward\(\) param\.grad\.norm"
    with pytest.raises(ShardingError, match=told):
        model.layers[0].linear.weight.register_hook(torch.norm)
    plain = built(stack_of(Layer, 5))
    stack_step(model, call._replace(rank=0))
    stack_step(plain, call._replace(rank=0))
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert float(found.grad.norm()) == pytest.approx(float(wanted.grad.norm()), rel=1e-5)
        whole[found].step()


@on_ranks(2)
def test_steps_with_the_gradient_of_a_penalty_alone_raise(context: RankContext) -> None:
    """Autograd adds it by itself, before the gradient of the layer is there. Weight decay works: as all above have."""
    for name in ("layers.1.linear.weight", "head.weight"):
        model = sharded_model(stack_of(Layer, 5))
        step_in_hooks(model)
        loss = model(vector_batch(0, context.rank)).square().mean() + model.get_parameter(name).square().sum()
        with pytest.raises(ShardingError, match=rf"steps '{name}' inside backward.*a penalty.*weight_decay"):
            loss.backward()
