"""`WholeParameterOptimizer` with what stands around an optimizer: clipping, scalers, schedulers, wrappers, slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_leaves

from streamshard import (
    StreamShard,
    full_optimizer_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    save_checkpoint,
)
from streamshard.errors import ConfigError, ShardingError
from streamshard.optim import WholeParameterOptimizer
from tests.models import NormStack, vector_batch
from tests.optim.muon import muon_in_fp32
from tests.optim.test_whole_parameters import NEAR, Mixed, _matrices, _muon_and_adamw, whole
from tests.optim.test_whole_state import Odd
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_same, built, full_weights, seed, sharded_model, stack_step, train_stack

STEPS = 4
Backward = Callable[[int], Any]


def _optimizer(model: nn.Module, params: Any = None, kind: type[Optimizer] = torch.optim.Muon, **options: Any) -> Any:
    params = _matrices(model) if params is None else params
    return whole(model, params, kind, **{"lr": 0.02, "round_size": 1024, **options})


def _backward(model: nn.Module, context: RankContext) -> Backward:
    """This rank's forward and backward; those of all ranks, if the model is plain."""
    if isinstance(model, StreamShard):
        return lambda number: stack_step(model, context.call(number))
    size = context.world_size
    return lambda number: sum(stack_step(model, Call(number, rank, size, 1 / size)) for rank in range(size)) / size


@muon_in_fp32()
def _assert_like_plain(
    context: RankContext,
    program: Callable[[Any, Any, Backward], Any],
    make: Callable[[Any], Any] = _optimizer,
    build: Callable[[], nn.Module] = Mixed,
    **settings: Any,
) -> None:
    """`program` ends with the same weights on a sharded model as on a plain one."""
    found, wanted = sharded_model(build, **settings), built(build)
    for model in (wanted, found):
        program(model, make(model), _backward(model, context))
    assert_same(full_weights(found), full_weights(wanted), "weights", NEAR)


def _train(model: Any, optimizer: Any, backward: Backward, steps: int = STEPS, first: int = 0) -> None:
    for number in range(first, first + steps):
        backward(number)
        optimizer.step()
        optimizer.zero_grad()


# -- programs -------------------------------------------------------------------------------------------------------


def _calls_closures(model: Any, optimizer: Any, backward: Backward) -> None:
    for number in range(STEPS):
        losses = []

        def closure(number: int = number, losses: list[Any] = losses) -> Any:
            optimizer.zero_grad()
            losses.append(backward(number))
            return losses[-1]

        assert optimizer.step(closure) is losses[0] and len(losses) == 1


def _schedules(model: Any, optimizer: Any, backward: Backward) -> None:
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2)
    for number in range(STEPS):
        _train(model, optimizer, backward, 1, number)
        scheduler.step()


def _adds_groups(model: Any, optimizer: Any, backward: Backward) -> None:
    for number in range(STEPS):
        _train(model, optimizer, backward, 1, number)
        if number == 1:
            optimizer.add_param_group({"params": [model.get_submodule("head").weight], "lr": 0.1})


def _unfreezes(model: Any, optimizer: Any, backward: Backward) -> None:
    for number in range(STEPS):
        model.get_submodule("layers.1").requires_grad_(number >= 2)
        repr(optimizer)
        _train(model, optimizer, backward, 1, number)


def _freezes(model: Any, optimizer: Any, backward: Backward) -> None:
    """With a gradient, which is stepped, then with zeros, which are too: momentum goes on."""
    frozen = model.get_submodule("layers.1")
    for number in range(STEPS):
        backward(number)
        frozen.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        frozen.requires_grad_(number < 2)


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


PROGRAMS: dict[str, tuple[Any, ...]] = {
    "closures": (_calls_closures,),
    "schedules of a tensor lr": (_schedules, lambda model: _optimizer(model, lr=torch.tensor(0.02))),
    "groups added": (_adds_groups, lambda model: _optimizer(model, _matrices(model)[:2])),
    "unfreezing": (_unfreezes,),
    "freezing": (_freezes,),
    "new memory": (_train, lambda model: _optimizer(model, list(model.parameters()), _Rebinds, lr=1e-4)),
}


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), [(1, "closures"), *((2, name) for name in PROGRAMS)])
def test_programs_train_as_on_the_unsharded_model(context: RankContext, name: str) -> None:
    """With one rank as well, where parameters are stepped in place."""
    _assert_like_plain(context, *PROGRAMS[name])


@on_ranks(4)
def test_replicas_have_owners_of_their_own(context: RankContext) -> None:
    _assert_like_plain(context, _train, _muon_and_adamw, mesh=init_device_mesh("cpu", (2, 2)))


@on_ranks(2)
def test_accumulated_gradients_are_stepped_once(context: RankContext) -> None:
    """A step that comes before all ranks' gradients are summed is refused."""

    def program(model: Any, optimizer: Any, backward: Backward) -> None:
        for number in range(0, 2 * STEPS, 2):
            if isinstance(model, StreamShard):
                with model.no_sync():
                    backward(number)
                    with pytest.raises(ShardingError, match="an optimizer's step"):
                        optimizer.step()
            else:
                backward(number)
            _train(model, optimizer, backward, 1, number + 1)

    _assert_like_plain(context, program, weight_slots="all", grad_slots="all")


@on_ranks(2)
def test_parameters_of_a_plain_module_are_stepped_by_every_rank(context: RankContext, tmp_path: Path) -> None:
    """All ranks compute the same, also after the state was collected and loaded."""
    model = sharded_model(Mixed)
    seed(4)
    head = nn.Linear(5, 3)
    params = [*model.parameters(), *head.parameters()]
    optimizer, other, again = (_optimizer(model, params, Odd) for _ in range(3))

    def backward(number: int) -> None:
        head(model(vector_batch(number, 0))).square().mean().backward()

    _train(model, optimizer, backward)
    assert optimizer.owner_of(head.weight) is None
    state = full_optimizer_state_dict(model, optimizer)
    own = {tensor.data_ptr() for tensor in tree_leaves(optimizer.state[head.weight]) if isinstance(tensor, Tensor)}
    assert own.isdisjoint(tensor.data_ptr() for tensor in tree_leaves(state) if isinstance(tensor, Tensor))
    load_optimizer_state_dict(model, other, state)
    save_checkpoint(tmp_path, model, optimizer, {"head": head})
    _train(model, other, backward, 1, STEPS)
    wanted = head.weight.detach().clone()
    first = wanted.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, wanted)
    load_checkpoint(tmp_path, model, again, {"head": head})
    _train(model, again, backward, 1, STEPS)
    assert torch.equal(head.weight, wanted)


@on_ranks(2)
def test_parameters_of_two_models_are_refused(context: RankContext) -> None:
    """The error names a parameter of the second model, at every step."""
    first, second = sharded_model(Mixed), sharded_model(NormStack)
    optimizer = _optimizer(first, [*_matrices(first), *_matrices(second)])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'layers.0.linear.weight' is of another model.*one .* for each model"):
            optimizer.step()


@on_ranks(2)
def test_models_may_be_sharded_after_the_optimizer_was_made(context: RankContext) -> None:
    """And after it has stepped."""
    found, wanted = built(Mixed), built(Mixed)
    kind = torch.optim.Adafactor
    optimizer = WholeParameterOptimizer(found.parameters(), kind, lr=0.02, round_size=1024)
    its = kind(wanted.parameters(), lr=0.02)
    train_stack(found, optimizer, steps=2)
    train_stack(wanted, its, steps=2)
    sharded = StreamShard(found, precision=FP32)
    train_stack(sharded, optimizer, first=2, steps=2)
    train_stack(wanted, its, first=2, steps=2)
    assert_same(full_weights(sharded), full_weights(wanted), "weights", NEAR)
    kept = {param for param in optimizer.state if optimizer.owner_of(param) not in (None, context.rank)}
    assert not kept, "state of parameters that other ranks own"
