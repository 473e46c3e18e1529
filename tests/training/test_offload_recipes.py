"""Recipes of docs/guide/big_models.md: activations in host memory beside the state, checkpoints in both directions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import (
    StreamShard,
    full_optimizer_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    save_checkpoint,
)
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, adamw, assert_same, full_weights, seed
from tests.scenarios import BF16
from tests.simulated import late, simulated_device
from tests.training.test_offload_events import device_of

OFFLOAD: dict[str, Any] = {"offload": "state"}
TWO_SLOTS: dict[str, Any] = {"weight_slots": 2}  # their number changes the order of sums
STEPS = 3


class LongContext(Stack):
    """Between its layers, activations lie in host memory, and nothing else is saved."""

    def order(self) -> Iterable[Callable[[Tensor], Tensor]]:
        return [functools.partial(_checkpointed, layer) for layer in self.layers]


def _checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out: Tensor = checkpoint(layer, x, use_reentrant=False)
    return out


class _Counted(torch.autograd.graph.save_on_cpu):
    """Notes the shapes that it copies."""

    shapes: list[tuple[int, ...]]

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=pin_memory)
        self._pack = self.pack_hook
        self.pack_hook = self._note

    def _note(self, tensor: Tensor) -> Any:
        self.shapes.append(tuple(tensor.shape))
        return self._pack(tensor)


def _sharded(build: Callable[[], nn.Module], settings: dict[str, Any], context: RankContext) -> Any:
    seed(0)
    return StreamShard(build().to(context.device), precision=BF16, **settings)


def _train(model: Any, optimizer: Any, context: RankContext, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        model(vector_batch(step, context.rank).to(context.device)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()


def _compare_activations(context: RankContext, while_training: Callable[[Any], Any]) -> None:
    """Of each layer its input is copied, and no weight."""
    _Counted.shapes = []
    with mock.patch.object(torch.autograd.graph, "save_on_cpu", _Counted):
        resident = _sharded(Stack, TWO_SLOTS, context)
        _train(resident, adamw(resident), context)
        assert _Counted.shapes == []
        model = _sharded(LongContext, OFFLOAD, context)
        with while_training(model):
            _train(model, adamw(model), context)
    assert _Counted.shapes == [(4, DIM)] * len(model.layers) * STEPS
    assert_same(full_weights(model), full_weights(resident), "weights", EXACT)


@on_ranks(1, 2)
def test_activations_in_host_memory_change_no_bit(context: RankContext) -> None:
    with simulated_device():
        _compare_activations(context, late)


@pytest.mark.gpu
@on_ranks(1, 2, backend="nccl")
def test_activations_in_host_memory_change_no_bit_on_a_gpu(context: RankContext) -> None:
    """The memory is pinned here."""
    _compare_activations(context, lambda _: contextlib.nullcontext())


@on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [(OFFLOAD, TWO_SLOTS), (TWO_SLOTS, OFFLOAD)])
def test_a_run_goes_on_with_its_state_in_the_other_memory(
    context: RankContext, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    """To the bit. A late step is due when the checkpoint is saved."""
    with simulated_device():
        model = _sharded(Stack, saved, context)
        optimizer = adamw(model)
        _train(model, optimizer, context)
        save_checkpoint(tmp_path, model, optimizer)
        _train(model, optimizer, context, range(STEPS, 2 * STEPS))
        other = _sharded(Stack, loaded, context)
        optimizer = adamw(other)
        _train(other, optimizer, context, [17])  # which the checkpoint replaces
        load_checkpoint(tmp_path, other, optimizer)
        _train(other, optimizer, context, range(STEPS, 2 * STEPS))
        assert_same(full_weights(other), full_weights(model), "weights", EXACT)


@on_ranks(1, 2, backend="of accelerator")
@pytest.mark.parametrize("way", ["checkpoint", "full state"])
def test_moments_never_lie_on_the_device_when_they_are_loaded(context: RankContext, tmp_path: Path, way: str) -> None:
    """A run without offload has saved them from the device, where they might not fit."""
    given: list[torch.device] = []

    def note(_: Any, state: dict[str, Any]) -> None:
        given.extend(each.device for own in state["state"].values() for each in own.values() if each.ndim)

    with device_of(context):
        model, other = (_sharded(Stack, settings, context) for settings in (TWO_SLOTS, OFFLOAD))
        optimizer, others = adamw(model), adamw(other)
        others.register_load_state_dict_pre_hook(note)
        _train(model, optimizer, context)
        if way == "checkpoint":
            load_checkpoint(save_checkpoint(tmp_path, model, optimizer).wait(), other, others)
        else:
            load_optimizer_state_dict(other, others, full_optimizer_state_dict(model, optimizer))
        assert {device.type for device in given} == {"cpu"}
