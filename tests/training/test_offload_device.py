"""Where code outside of the model finds it with ``offload="state"``: weights are in host memory, the model is not.

On a device of its own, which the CPU plays else, these tests also show that tensors of both do not meet.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from tests.compare import EXACT, assert_same, full_grads, full_weights
from tests.counts import engine_inside
from tests.faults import Trouble, case
from tests.integrations.models import make_model
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, built, sharded_model
from tests.scenarios import BF16, OFFLOAD, RESIDENT
from tests.training.test_offload_events import Run, compare, device_of, lateness

META = torch.device("meta")


class Placed(Stack):
    """Asks its parameters where it is, as models of libraries do."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.ones(DIM, device=self.device))


@on_ranks(1)
def test_the_device_of_a_model_is_where_it_computes(context: RankContext) -> None:
    """Its class has a property `device`; so may that of a model inside."""
    with device_of(context):
        model: Any = sharded_model(lambda: nn.Sequential(Placed()), **OFFLOAD)
        alone = sharded_model(Placed, **RESIDENT)
        host = engine_inside(model).host
        assert host is not None
        host.device = META  # a device that no parameter is on
        assert (model[0].device, alone.device) == (META, context.device)
        assert next(model.parameters()).device.type == "cpu"


def _generated(context: RankContext, **settings: Any) -> dict[str, Tensor]:
    """What a model that has trained generates and computes from inputs in different places."""
    model: Any = sharded_model(lambda: make_model("llama").to(context.device), **settings)
    optimizer, tokens = adamw(model), torch.arange(2, 12).view(2, 5) + context.rank
    for _ in range(2):
        model(tokens.to(model.device), labels=tokens.to(model.device)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    found = {"greedy": model.generate(tokens.to(model.device), **greedy), "from nothing": model.generate(**greedy)}
    if context.world_size == 1:  # else NCCL would get the tokens, with or without offload
        found["from host memory"] = model.generate(tokens, **greedy)
    model.eval()
    with torch.no_grad():
        beside = tokens.to(next(model.parameters()).device)
        found["logits"] = model(beside, attention_mask=torch.ones_like(beside)).logits
        assert found["logits"].device == model.device == context.device
    return {name: each.cpu() for name, each in found.items()}


@on_ranks(1, 2, backend="of accelerator")
def test_generate_and_evaluation_work_as_without_offload(context: RankContext) -> None:
    with device_of(context):
        resident = _generated(context, **RESIDENT)
        assert_same(_generated(context, **OFFLOAD), resident, "tokens and logits", EXACT)


@on_ranks(1)
def test_the_host_does_not_wait_until_inputs_are_on_the_device(context: RankContext) -> None:
    """It would wait for all kernels of the pass before."""

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise Trouble(inputs[0].device)

    with device_of(context):
        model = sharded_model(**OFFLOAD)
        model.register_forward_pre_hook(stop)
        host = engine_inside(model).host
        assert host is not None
        host.device = META  # else a copy to the played device is none
        moves = mock.Mock(wraps=Tensor.to)
        moving = mock.patch.object(Tensor, "to", lambda *given, **kwargs: moves(*given, **kwargs))
        with moving, pytest.raises(Trouble, match="meta"):
            model(vector_batch(0, 0))
    assert [call.kwargs for call in moves.call_args_list if META in call.args] == [{"non_blocking": True}]


def _averaged(context: RankContext, ours: dict[str, Any], theirs: dict[str, Any], **function: Any) -> dict[str, Tensor]:
    """The average of a model that trains with `ours`, in a model with `theirs`."""
    run, average = Run(context, ours), AveragedModel(built().to(context.device).requires_grad_(False), **function)
    sharded_model(lambda: average.module, **theirs)
    for _ in range(3):
        run.step()
        average.update_parameters(run.model)
    return full_weights(average.module)


@on_ranks(1, 2, backend="of accelerator")
def test_an_average_may_be_in_other_memory_than_its_model(context: RankContext) -> None:
    """All of it, or, by their budgets, other layers than in the model."""
    partly = OFFLOAD | {"device_budget": "9KB"}
    runs: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        (RESIDENT, OFFLOAD, {"multi_avg_fn": get_swa_multi_avg_fn()}),
        (OFFLOAD, RESIDENT, {"avg_fn": get_ema_avg_fn(0.9)}),
        (partly, OFFLOAD, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
    ]
    with device_of(context):
        for ours, theirs, function in runs:
            with case((ours, theirs, function)):
                wanted = _averaged(context, RESIDENT, RESIDENT, **function)
                assert_same(_averaged(context, ours, theirs, **function), wanted, "the average", EXACT)


def _lists(run: Run) -> dict[str, Tensor]:
    """Lists of gradients, whose first one is on the device or in host memory."""
    found: dict[str, Tensor] = {}
    for order in (1, -1):
        run.backward()
        grads = [param.grad for param in run.params][::order]
        norms = torch._foreach_norm(grads)
        torch._foreach_mul_(grads, torch.tensor(0.5, device=run.context.device))
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_add_(grads, grads)
        found |= {f"{order} {number}": norm + 0.0 for number, norm in enumerate(norms)}
        found[f"{order} clipped"] = run.model.clip_grad_norm_(0.1)
        found |= {f"{order} {name}": grad for name, grad in full_grads(run.model).items() if grad is not None}
    return found


@on_ranks(2, backend="of accelerator")
def test_lists_of_gradients_may_lie_on_both_sides(context: RankContext) -> None:
    """Or all in host memory."""
    for budget in ("9KB", 0):
        compare(context, _lists, offload={**OFFLOAD, "device_budget": budget})


# -- recipes of docs/guide/big_models.md: activations in host memory, checkpoints in both directions -----------------

STEPS = 3


class LongContext(Stack):
    """Between its layers, activations lie in host memory, and nothing else is saved."""

    def order(self) -> Any:
        for layer in self.layers:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                yield functools.partial(checkpoint, layer, use_reentrant=False)


@on_ranks(1, 2, backend="of accelerator")
def test_activations_in_host_memory_change_no_bit(context: RankContext) -> None:
    """Of each layer its input is copied, and no weight."""
    shapes: list[tuple[int, ...]] = []

    class Counted(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (shapes.append(tuple(tensor.shape)), pack(tensor))[1]

    with device_of(context), mock.patch.object(torch.autograd.graph, "save_on_cpu", Counted):
        resident = Run(context, {**RESIDENT, "precision": BF16})
        resident.step(STEPS)
        assert shapes == []
        run = Run(context, {**OFFLOAD, "precision": BF16}, build=LongContext)
        with lateness(context, run.model):
            run.step(STEPS)
        shapes = [shape for shape in shapes if 0 not in shape]  # checkpoints of torch 2.11 save an empty tensor
        assert shapes == [(4, DIM)] * len(run.model.layers) * STEPS
        assert_same(full_weights(run.model), full_weights(resident.model), "weights", EXACT)


@on_ranks(1, 2, backend="of accelerator")
@pytest.mark.parametrize("way", ["checkpoint", "full state"])
def test_moments_never_lie_on_the_device_when_they_are_loaded(context: RankContext, tmp_path: Path, way: str) -> None:
    """A run without offload has saved them from the device, where they might not fit."""
    given: list[torch.device] = []

    def note(_: Any, state: dict[str, Any]) -> None:
        given.extend(each.device for own in state["state"].values() for each in own.values() if each.ndim)

    with device_of(context):
        run, other = (Run(context, {**settings, "precision": BF16}) for settings in (RESIDENT, OFFLOAD))
        other.optimizer.register_load_state_dict_pre_hook(note)
        run.step(STEPS)
        other.step(STEPS)
        other.step()  # which is replaced
        if way == "checkpoint":
            load_checkpoint(save_checkpoint(tmp_path, run.model, run.optimizer).wait(), other.model, other.optimizer)
        else:
            other.model.load_state_dict(full_weights(run.model))
            state = full_optimizer_state_dict(run.model, run.optimizer)
            load_optimizer_state_dict(other.model, other.optimizer, state)
        assert {device.type for device in given} == {"cpu"}
        run.number = other.number
        for each in (run, other):
            each.step()
        assert_same(full_weights(other.model), full_weights(run.model), "weights", EXACT)
