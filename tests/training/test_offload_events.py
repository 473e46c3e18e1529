"""What a training loop does around ``offload="state"``: each event gives the same bits as without it.

Each event happens right after ``optimizer.step()``, while the step is late, and copies are as late as waits allow.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
from tests.compare import EXACT, assert_same, full_grads, full_weights
from tests.models import Stack, vector_batch
from tests.optim.test_step_in_backward import step_in_hooks
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, adamw, built
from tests.scenarios import OFFLOAD, RESIDENT
from tests.simulated import late, simulated_device


class Run:
    """A model in training."""

    def __init__(
        self,
        context: RankContext,
        settings: dict[str, Any],
        make: Callable[[Any], Any] = adamw,
        build: Callable[[], nn.Module] = Stack,
    ) -> None:
        self.context, self.settings, self.number = context, settings, 0
        self.model: Any = StreamShard(built(build).to(context.device), **{"precision": FP32, **settings})
        self.optimizer = make(self.model)

    def loss(self) -> Tensor:
        self.number += 1
        loss: Tensor = self.model(vector_batch(self.number, self.context.rank).to(self.context.device)).square().mean()
        return loss

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def norms(self) -> list[Tensor]:
        return [param.grad.norm() for param in self.params]


@contextlib.contextmanager
def device_of(context: RankContext) -> Iterator[None]:
    """A device with streams: the GPU, or one that the CPU simulates."""
    played = simulated_device() if context.device.type == "cpu" else contextlib.nullcontext()
    with played, mock.patch.object(late_step, "CHUNK_NUMEL", 96):
        yield


def lateness(context: RankContext, model: Any) -> Any:
    """Copies and collectives of `model` are late, on a simulated device."""
    return late(model) if context.device.type == "cpu" else contextlib.nullcontext()


Event = Callable[[Run], Any]


def outcome(run: Run, events: tuple[Event, ...]) -> dict[str, Any]:
    """What each event gives, and where training is afterwards."""
    found: dict[str, Any] = {}
    with lateness(run.context, run.model):
        run.step(2)
        for event in events:
            seen = event(run)
            run.step()
            listed = seen if isinstance(seen, dict) else dict(enumerate(seen or ()))
            seen = {f"seen {key}": torch.as_tensor(each).detach().clone() for key, each in listed.items()}
            name = getattr(event, "__name__", "")
            found |= {f"{name}: {key}": each for key, each in (seen | full_weights(run.model)).items()}
            run.step()
        state = streamshard.full_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
        for number, own in state.items():
            found |= {f"{number} {key}": torch.as_tensor(each) for key, each in own.items()}
    return found


def compare(context: RankContext, *events: Event, offload: dict[str, Any] = OFFLOAD, **options: Any) -> None:
    with device_of(context):
        wanted = outcome(Run(context, RESIDENT, **options), events)
        assert_same(outcome(Run(context, offload, **options), events), wanted, "what is seen, state and weights", EXACT)


def _options_in_place(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"], group["betas"] = torch.tensor(0.01), (torch.tensor(0.9), torch.tensor(0.99))
    run.step()
    for group in run.optimizer.param_groups:
        for number in (group["lr"], *group["betas"]):
            number.fill_(0.5)


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


def _read(run: Run) -> Any:
    kept = [param.detach() for param in run.params] + [param.data for param in run.params]
    run.step(2)
    found = [each.sum() for each in kept]
    for param in run.params:
        for each in (param, param.grad):
            found += [each.norm(3.0), torch.tensor(torch.equal(each, each.clone()))]
            found += [made.as_subclass(Tensor).clone() for made in (each.data, each.clone(), copy.deepcopy(each))]
    return found


def _state_cleared(run: Run) -> None:
    run.optimizer.state.clear()


def _clipped(run: Run) -> Any:
    norms = []
    for way in (run.model.clip_grad_norm_, functools.partial(torch.nn.utils.clip_grad_norm_, run.params)):
        for max_norm, norm_type in ((0.01, 2.0), (0.001, torch.inf), (0.0001, 3.0)):
            run.backward()
            norms.append(way(max_norm, norm_type=norm_type))
            run.optimizer.step()
    return [*norms, *run.norms(), full_grads(run.model)["head.weight"].sum()]


def _clipped_twice(run: Run) -> Any:
    run.backward()
    norms = [run.model.clip_grad_norm_(0.1), run.model.clip_grad_norm_(0.01)]
    run.optimizer.step()
    return norms + [param.grad.sum() for param in run.params]


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


def _multiplied(run: Run) -> None:
    for param in run.params:
        param.grad.mul_(0.5)
        param.grad.data.add_(0.1)
    run.optimizer.step()
    for param in run.params:
        param.grad *= 3.0


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
    weights = full_weights(run.model)
    run.step(2)
    streamshard.load_optimizer_state_dict(run.model, run.optimizer, full)
    run.model.load_state_dict(weights)
    return weights


def _graph_kept(run: Run) -> Any:
    """A backward whose forward was before the step raises, with or without offload."""
    loss = run.loss()
    run.optimizer.step()
    with pytest.raises(streamshard.ShardingError, match="modified by an inplace operation"):
        loss.backward()


def _step_in_backward(run: Run) -> None:
    """One optimizer for each parameter steps in a hook, and clears the gradient."""
    hooks = step_in_hooks(run.model)
    for _ in range(3):
        run.loss().backward()
    for hook in hooks:
        hook.remove()


def _scale_losses(run: Run) -> Any:
    """One loss overflows: its step is left out, and the scale is halved."""
    scaler = torch.amp.GradScaler(run.context.device.type, init_scale=1024.0, growth_interval=100)
    for factor in (1.0, 2.0**120, 1.0):
        run.optimizer.zero_grad()
        scaler.scale(run.loss() * factor).backward()
        scaler.step(run.optimizer)
        scaler.update()
    return [scaler.get_scale()]


EVENTS: dict[str, tuple[Event, ...]] = {
    "gradients": (_clipped, _clipped_twice, _zeroed, _replaced, _multiplied, _step_in_backward),
    "state": (_read, _weights_written, _state_loaded, _full_state, _state_cleared),
    "loop": (_hooks, _scale_losses, _graph_kept, _options_in_place),
}


@on_ranks(2, backend="of accelerator")
@pytest.mark.parametrize("kind", EVENTS)
def test_events_after_a_step_change_no_bit(context: RankContext, kind: str) -> None:
    compare(context, *EVENTS[kind])


@on_ranks(2, backend="of accelerator")
def test_files_change_no_bit(context: RankContext, tmp_path: Path) -> None:
    """Written and read while a step is late; in the background too."""

    def write(run: Run) -> None:
        place = tmp_path / next(iter(run.settings))
        streamshard.export_safetensors(run.model, place / "export")
        run.step(2)
        streamshard.load_safetensors(run.model, place / "export")
        for wait in (True, False):
            run.step()
            saved = streamshard.save_checkpoint(place / str(wait), run.model, run.optimizer, wait=wait)
            run.step(2)
            streamshard.load_checkpoint(saved.wait(), run.model, run.optimizer)

    compare(context, write)


_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
_MOMENTUM = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)


@pytest.mark.gpu
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize(
    ("make", "way"),
    [*((_ADAMW, way) for way in ("foreach", "fused", "capturable")), (_ADAMW, ""), (_MOMENTUM, "fused")],
)
def test_optimizers_change_no_bit_on_a_gpu(context: RankContext, make: Any, way: str) -> None:
    """Which memory is whose: collectives, counters, norms and a scaler's check are the device's, state is the host's.

    A fused step looks at the check.
    """
    options = {way: True} if way else {"foreach": False}
    compare(context, _clipped, _zeroed, _scale_losses, make=lambda model: make(model.parameters(), **options))
