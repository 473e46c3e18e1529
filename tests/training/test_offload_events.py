"""What a training loop does around ``offload="state"``: each event gives the same bits as without it.

Each event happens right after ``optimizer.step()``, while the step is late, and copies are as late as waits allow.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import streamshard
from streamshard import StreamShard
from streamshard.core import late_step
from streamshard.optim import update_parameters
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, adamw, assert_same, built, full_grads, full_weights
from tests.simulated import late, simulated_device

RESIDENT: dict[str, Any] = {"weight_slots": 2}
OFFLOAD: dict[str, Any] = {"offload": "state"}


class Run:
    """A model in training.

    Args:
        context: the rank.
        settings: of the model.
        build, make: make the model and its optimizer.
    """

    def __init__(
        self,
        context: RankContext,
        settings: dict[str, Any],
        build: Callable[[], nn.Module] = Stack,
        make: Callable[[Any], Any] = adamw,
    ) -> None:
        self.context, self.settings, self.number = context, settings, 0
        self.model: Any = StreamShard(built(build).to(context.device), precision=FP32, **settings)
        self.optimizer = make(self.model)

    def loss(self) -> Tensor:
        """Of the next batch."""
        self.number += 1
        loss: Tensor = self.model(vector_batch(self.number, self.context.rank).to(self.context.device)).square().mean()
        return loss

    def backward(self) -> None:
        """Gradients of the next batch alone."""
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self, steps: int = 1) -> None:
        """Train, and leave gradients."""
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    @property
    def params(self) -> list[Any]:
        """Of the model."""
        return list(self.model.parameters())

    def norms(self) -> list[Tensor]:
        """Of gradients."""
        return [param.grad.norm() for param in self.params]

    def other(self) -> Run:
        """Another run of the same kind, which has not trained."""
        return Run(self.context, self.settings)


@contextlib.contextmanager
def device_of(context: RankContext) -> Iterator[None]:
    """A device with streams: the GPU, or one that the CPU simulates."""
    played = simulated_device() if context.device.type == "cpu" else contextlib.nullcontext()
    with played, mock.patch.object(late_step, "CHUNK_NUMEL", 96):
        yield


def lateness(run: Run) -> Any:
    return late(run.model) if run.context.device.type == "cpu" else contextlib.nullcontext()


Event = Callable[[Run], Any]


def outcome(run: Run, event: Event) -> dict[str, Any]:
    """What the event gives, and where training is afterwards."""
    with lateness(run):
        run.step(2)
        seen = event(run)
        run.step(2)
        listed = seen if isinstance(seen, dict) else dict(enumerate(seen or ()))
        found = {f"seen {key}": torch.as_tensor(each).detach().clone() for key, each in listed.items()}
        state = streamshard.full_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
        for number, own in state.items():
            found |= {f"{number} {key}": torch.as_tensor(each) for key, each in own.items()}
        return found | full_weights(run.model)


def compare(context: RankContext, event: Event, **options: Any) -> None:
    with device_of(context):
        wanted = outcome(Run(context, RESIDENT, **options), event)
        assert_same(outcome(Run(context, OFFLOAD, **options), event), wanted, "what is seen, state and weights", EXACT)


# -- events -----------------------------------------------------------------------------------------------------------


def _options_in_place(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"], group["betas"] = torch.tensor(0.01), (torch.tensor(0.9), torch.tensor(0.99))
    run.step()
    for group in run.optimizer.param_groups:
        for number in (group["lr"], *group["betas"]):
            number.fill_(0.5)


def _schedule(run: Run) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.1)
    for _ in range(2):
        run.step()
        scheduler.step()
    return scheduler.get_last_lr() + [run.optimizer._opt_called]


def _hooks(run: Run) -> Any:
    first, seen = run.params[0], []

    def before(*_: Any) -> None:
        seen.append(first.detach().norm())
        first.grad.mul_(2.0)

    def after(*_: Any) -> None:
        seen.append(first.detach().norm())

    hooks = [run.optimizer.register_step_pre_hook(before), run.optimizer.register_step_post_hook(after)]
    run.step()
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2
    return seen


def _closure(run: Run) -> Any:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    return [run.optimizer.step(closure).detach()]


def _whole(run: Run) -> Iterator[Tensor]:
    for param in run.params:
        yield from (param, param.grad)


def _text(run: Run) -> Any:
    return {"".join(re.findall(r"[-.\d]+", repr(param).split("]")[0])): 0 for param in run.params}


def _copies(run: Run) -> Any:
    found = []
    for each in _whole(run):
        for made in (each.data, each.detach(), each.clone(), copy.deepcopy(each), each.data.clone()):
            found.append(made.as_subclass(Tensor).clone())
    return found


def _kept(run: Run) -> Any:
    kept = [param.detach() for param in run.params] + [param.data for param in run.params]
    run.step(2)
    return [each.sum() for each in kept]


def _clipped(run: Run) -> Any:
    norms = []
    for way in (run.model.clip_grad_norm_, functools.partial(torch.nn.utils.clip_grad_norm_, run.params)):
        for max_norm, norm_type in ((0.01, 2.0), (0.001, torch.inf), (0.0001, 3.0)):
            run.backward()
            norms.append(way(max_norm, norm_type=norm_type))
            run.optimizer.step()
    return [*norms, *run.norms(), full_grads(run.model)["head.weight"].sum()]


def _clipped_by_value(run: Run) -> Any:
    run.backward()
    torch.nn.utils.clip_grad_value_(run.params, 0.001)
    run.optimizer.step()
    return run.norms()


def _clipped_twice(run: Run) -> Any:
    run.backward()
    norms = [run.model.clip_grad_norm_(0.1), run.model.clip_grad_norm_(0.01)]
    run.optimizer.step()
    return norms + [param.grad.sum() for param in run.params]


def _clipped_and_accumulated(run: Run) -> Any:
    run.backward()
    run.model.clip_grad_norm_(0.01)
    run.loss().backward()
    run.model.clip_grad_norm_(0.01)
    run.optimizer.step()
    run.optimizer.step()


def _zeroed(run: Run) -> Any:
    run.optimizer.zero_grad(set_to_none=False)
    found = run.norms()
    run.optimizer.step()
    run.loss().backward()
    run.optimizer.step()
    run.model.zero_grad(set_to_none=False)
    return found


def _replaced(run: Run) -> None:
    for made in (torch.ones_like, lambda grad: None):
        for param in run.params:
            param.grad = made(param.grad)
        run.optimizer.step()


def _replaced_and_clipped(run: Run) -> Any:
    for param in run.params:
        param.grad = torch.ones_like(param)
    norm = run.model.clip_grad_norm_(0.1)
    run.optimizer.step()
    return [norm, *(param.grad.sum() for param in run.params)]


def _multiplied(run: Run) -> None:
    for param in run.params:
        param.grad.mul_(0.5)
        param.grad.data.add_(0.1)
    run.optimizer.step()
    for param in run.params:
        param.grad *= 3.0


def _multiplied_by_a_number_that_changes(run: Run) -> None:
    for param in run.params:
        factor = torch.tensor(0.5, device=run.context.device)
        param.grad.mul_(factor)
        factor.zero_()
    run.optimizer.step()


def _norms_kept(run: Run) -> Any:
    """Reductions replace the norms that are known."""
    run.loss().backward()
    norms = run.norms()
    run.step()
    return norms


def _weights_written(run: Run) -> None:
    with torch.no_grad():
        for param in run.params:
            param.mul_(0.9)
            param.data.add_(0.01)
            param.data = param.data
        torch._foreach_mul_(run.params, 0.99)


def _state_loaded(run: Run) -> Any:
    saved = copy.deepcopy(run.optimizer.state_dict())
    seen = copy.deepcopy(saved)
    run.step(2)
    run.optimizer.load_state_dict(saved)
    return [each for own in seen["state"].values() for each in own.values()]


def _full_state(run: Run) -> Any:
    full = streamshard.full_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    weights = run.model.full_state_dict(rank0_only=False)
    run.step(2)
    streamshard.load_optimizer_state_dict(run.model, run.optimizer, full)
    seen = {name: each.clone() for name, each in weights.items()}
    run.model.load_state_dict(weights)
    return seen


def _state_written(run: Run) -> None:
    streamshard.full_optimizer_state_dict(run.model, run.optimizer)
    for own in run.optimizer.state.values():
        own["exp_avg"].mul_(0.5)
        own["step"].add_(3)


def _summoned(run: Run) -> Any:
    with run.model.summon_full_params(), torch.no_grad():
        seen = [param.sum() for param in run.params]
        for param in run.params:
            param.mul_(0.9)
    return seen


def _exported(run: Run, directory: Path) -> None:
    streamshard.export_safetensors(run.model, directory)
    run.step(2)
    streamshard.load_safetensors(run.model, directory)


def _saved(run: Run, directory: Path, *, wait: bool) -> None:
    saved = streamshard.save_checkpoint(directory, run.model, run.optimizer, wait=wait)
    run.step(2)
    streamshard.load_checkpoint(saved.wait(), run.model, run.optimizer)


def _averaged(run: Run) -> Any:
    average = run.other().model
    for number in range(3):
        run.step()
        update_parameters(average, run.model, number)
    return full_weights(average)


def _no_backward(run: Run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.optimizer.step()


def _evaluated(run: Run) -> Any:
    found = []
    for _ in range(3):
        with torch.no_grad():
            found.append(run.loss())
        run.model.eval()
        with torch.inference_mode():
            found.append(run.loss().clone())
        run.model.train()
        run.step()
    return found


def _frozen(run: Run) -> None:
    for layer in (0, 2):
        run.model.layers[layer].requires_grad_(False)
        run.step()
        run.model.layers[layer].requires_grad_(True)
        run.step()


def _graph_kept(run: Run) -> Any:
    """A backward whose forward was before the step raises, with or without offload."""
    loss = run.loss()
    run.optimizer.step()
    with pytest.raises(streamshard.ShardingError, match="modified by an inplace operation"):
        loss.backward()


def _gone_on_from_gradients(run: Run) -> None:
    run.optimizer.zero_grad()
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.optimizer.step()


def _penalty(run: Run) -> None:
    """Its gradient is added to the others: it would not be computed beside them."""
    run.backward()
    for param in run.params:
        param.grad.add_(param.detach(), alpha=0.2)
    run.optimizer.step()


def _group_added(run: Run) -> None:
    extra = nn.Parameter(torch.ones(3, device=run.context.device))
    run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones_like(extra)
    run.optimizer.step()
    run.optimizer.param_groups.pop()
    run.optimizer.state.pop(extra)


def _gradients_given_up(run: Run) -> None:
    run.loss().backward()
    run.model.zero_grad()
    run.loss().backward()
    run.optimizer.step()


def _step_in_backward(run: Run) -> None:
    """One optimizer for each parameter steps in a hook, and clears the gradient."""
    optimizers = {param: adamw(nn.ParameterList([param])) for param in run.params}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    hooks = [param.register_post_accumulate_grad_hook(step) for param in optimizers]
    for _ in range(3):
        run.loss().backward()
    for hook in hooks:
        hook.remove()


EVENTS: dict[str, Event] = {
    name.lstrip("_"): event
    for name, event in list(globals().items())
    if name.startswith("_")
    and callable(event)
    and getattr(event, "__module__", "") == __name__
    and list(event.__annotations__) in (["run", "return"],)
}
EVENTS.pop("whole")
EVENTS |= {
    "sums": lambda run: [each.sum() for each in _whole(run)] + [each.norm(3.0) for each in _whole(run)],
    "equal": lambda run: [
        torch.equal(each, other(each)) for other in (torch.zeros_like, torch.clone) for each in _whole(run)
    ],
    "state_cleared": lambda run: run.optimizer.state.clear(),
    "state_replaced": lambda run: run.optimizer.state.update({next(iter(run.optimizer.state)): {}}),
}


@on_ranks(backend="of accelerator")
@pytest.mark.parametrize(
    ("world_size", "name"), [*((2, name) for name in EVENTS), *((1, name) for name in list(EVENTS)[::3])]
)
def test_events_after_a_step_change_no_bit(context: RankContext, name: str) -> None:
    compare(context, EVENTS[name])


@on_ranks(1, 2, backend="of accelerator")
@pytest.mark.parametrize("name", ["exported", "saved", "saved in the background"])
def test_files_change_no_bit(context: RankContext, tmp_path: Path, name: str) -> None:
    """Written and read while a step is late."""
    write = _exported if name == "exported" else functools.partial(_saved, wait=name == "saved")
    compare(context, lambda run: write(run, tmp_path / str(len(run.settings))))


def _scale_losses(run: Run) -> Any:
    """One loss overflows: its step is left out, and the scale is halved."""
    scaler = torch.amp.GradScaler(run.context.device.type, init_scale=1024.0, growth_interval=100)
    for factor in (1.0, 2.0**120, 1.0):
        run.optimizer.zero_grad()
        scaler.scale(run.loss() * factor).backward()
        scaler.step(run.optimizer)
        scaler.update()
    return [scaler.get_scale()]


@pytest.mark.gpu
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_steps_as_without_offload_on_a_gpu(context: RankContext, fused: bool) -> None:
    """Its scale and its check are on the device, gradients are not."""
    compare(context, _scale_losses, make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused))


@on_ranks(1, 2)
def test_a_loss_scaler_steps_as_without_offload(context: RankContext) -> None:
    """A scaler of the CPU, beside gradients there."""
    compare(context, _scale_losses)
