"""`WholeParameterOptimizer` with what stands around an optimizer: schedulers, closures, replicas, plain modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_leaves

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from streamshard.errors import ConfigError, ShardingError
from streamshard.optim import WholeParameterOptimizer
from tests.compare import assert_same, full_weights
from tests.models import NormStack, vector_batch
from tests.optim.test_state import Odd
from tests.optim.test_whole_parameters import NEAR, Mixed, _matrices, _muon_and_adamw, muon_in_fp32, whole
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    ALL_SLOTS,
    Call,
    Step,
    assert_trains_like_plain,
    built,
    mesh_2d,
    no_sync,
    seed,
    sharded_model,
    stack_step,
)

STEPS = 4


def _optimizer(model: nn.Module, params: Any = None, kind: type[Optimizer] = torch.optim.Muon, **options: Any) -> Any:
    params = _matrices(model) if params is None else params
    return whole(model, params, kind, **{"lr": 0.02, "round_size": 1024, **options})


def _scheduled(model: nn.Module) -> Any:
    optimizer = _optimizer(model, lr=torch.tensor(0.02))
    optimizer.scheduler = lr_scheduler.StepLR(optimizer, step_size=2)
    return optimizer


def _schedule(model: nn.Module, optimizer: Any, number: int) -> None:
    if number:
        optimizer.scheduler.step()


def _add_group(model: nn.Module, optimizer: Any, number: int) -> None:
    if number == 2:
        optimizer.add_param_group({"params": [model.get_submodule("head").weight], "lr": 0.1})


def _unfreeze(model: nn.Module, optimizer: Any, number: int) -> None:
    model.get_submodule("layers.1").requires_grad_(number >= 2)
    repr(optimizer)


def _freeze_behind(model: nn.Module, call: Call) -> Tensor:
    """With a gradient, which is stepped, then with zeros, which are too: momentum goes on."""
    frozen = model.get_submodule("layers.1").requires_grad_(call.step < 3)
    loss = stack_step(model, call)
    frozen.requires_grad_(False)
    return loss


class _Rebinds(torch.optim.SGD):
    """Puts new tensors in the place of parameters' data and of its state, which is in 16 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["last"] = (state.get("last", 0.0) + param.grad).to(torch.bfloat16)
                    param.data = param.data - group["lr"] * state["last"].float()


class _ClipsRows(torch.optim.SGD):
    """Adaptive gradient clipping: each row of a gradient is at most a part of its weight's (as timm has it)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            most = 0.01 * param.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            param.grad.mul_((most / param.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))
        return super().step(closure)


# What makes the optimizer, what is done before each step, forward and backward.
PROGRAMS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, Any, int], object], Step]] = {
    "schedules of a tensor lr": (_scheduled, _schedule, stack_step),
    "groups added": (lambda model: _optimizer(model, _matrices(model)[:2]), _add_group, stack_step),
    "adaptive clipping": (
        lambda model: _optimizer(model, list(model.parameters()), _ClipsRows),
        lambda *_: None,
        stack_step,
    ),
    "unfreezing": (_optimizer, _unfreeze, stack_step),
    "freezing": (_optimizer, lambda *_: None, _freeze_behind),
    "new memory": (
        lambda model: _optimizer(model, list(model.parameters()), _Rebinds, lr=1e-4),
        lambda *_: None,
        stack_step,
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", PROGRAMS)
@muon_in_fp32
def test_programs_train_as_on_the_unsharded_model(context: RankContext, name: str) -> None:
    make, prepare, step = PROGRAMS[name]
    optimizers: dict[nn.Module, Any] = {}

    def optimizer(model: nn.Module) -> Any:
        return optimizers.setdefault(model, make(model))

    def before(model: nn.Module, number: int) -> None:
        prepare(model, optimizers[model], number)

    given: dict[str, Any] = {"set_to_none": name != "freezing", "tolerance": NEAR}
    assert_trains_like_plain(context, Mixed, step, steps=4, checked=(), optimizer=optimizer, prepare=before, **given)


@on_ranks(1, 2)
@muon_in_fp32
def test_a_closure_makes_the_gradients(context: RankContext) -> None:
    """Called once, and its result is returned. With one rank as well, where parameters are stepped in place."""
    found, wanted = sharded_model(Mixed), built(Mixed)
    for model in (found, wanted):
        optimizer, losses = _optimizer(model), list[Tensor]()

        def closure(model: Any = model, optimizer: Any = optimizer, losses: list[Tensor] = losses) -> Tensor:
            optimizer.zero_grad()
            losses.append(stack_step(model, Call(len(losses), 0, 1, 1.0)))
            return losses[-1]

        for number in range(STEPS):
            assert optimizer.step(closure) is losses[-1] and len(losses) == number + 1
    assert_same(full_weights(found), full_weights(wanted), "weights", NEAR)


@on_ranks(4)
@muon_in_fp32
def test_replicas_have_owners_of_their_own(context: RankContext) -> None:
    settings: dict[str, Any] = {"optimizer": _muon_and_adamw, "tolerance": NEAR, "mesh": mesh_2d(2, 2)}
    assert_trains_like_plain(context, Mixed, stack_step, **settings)


@on_ranks(2)
@muon_in_fp32
def test_accumulated_gradients_are_stepped_once(context: RankContext) -> None:
    """A step that comes before all ranks' gradients are summed is refused."""
    optimizers = list[Any]()

    def optimizer(model: nn.Module) -> Any:
        optimizers.append(_optimizer(model))
        return optimizers[-1]

    def twice(model: nn.Module, call: Call) -> Tensor:
        with no_sync(model):
            stack_step(model, call._replace(step=call.step + 10))
            if isinstance(optimizers[-1], WholeParameterOptimizer):  # not of the unsharded model
                with pytest.raises(ShardingError, match="an optimizer's step"):
                    optimizers[-1].step()
        return stack_step(model, call)

    settings: dict[str, Any] = {"optimizer": optimizer, "tolerance": NEAR, **ALL_SLOTS}
    assert_trains_like_plain(context, Mixed, twice, **settings)


@on_ranks(2)
def test_parameters_of_a_plain_module_are_stepped_by_every_rank(context: RankContext, tmp_path: Path) -> None:
    """All ranks compute the same, also after the state was collected and loaded."""
    model = sharded_model(Mixed)
    seed(4)
    head = nn.Linear(5, 3)
    params = [*model.parameters(), *head.parameters()]
    optimizer, other, again = (_optimizer(model, params, Odd) for _ in range(3))

    def train(optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            head(model(vector_batch(number, 0))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(optimizer, 0, STEPS)
    assert optimizer.owner_of(head.weight) is None
    state = full_optimizer_state_dict(model, optimizer)
    own = {tensor.data_ptr() for tensor in tree_leaves(optimizer.state[head.weight]) if isinstance(tensor, Tensor)}
    assert own.isdisjoint(tensor.data_ptr() for tensor in tree_leaves(state) if isinstance(tensor, Tensor))
    load_optimizer_state_dict(model, other, state)
    save_checkpoint(tmp_path, model, optimizer, {"head": head})
    train(other, STEPS, STEPS + 1)
    wanted = head.weight.detach().clone()
    first = wanted.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, wanted)
    load_checkpoint(tmp_path, model, again, {"head": head})
    train(again, STEPS, STEPS + 1)
    assert torch.equal(head.weight, wanted)


@on_ranks(2)
def test_parameters_of_two_models_are_refused(context: RankContext) -> None:
    """The error names a parameter of the second model, at every step."""
    first, second = sharded_model(Mixed), sharded_model(NormStack)
    optimizer = _optimizer(first, [*_matrices(first), *_matrices(second)])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'layers.0.linear.weight' is of another model.*one .* for each model"):
            optimizer.step()
