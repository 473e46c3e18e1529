"""The planned bytes of a step with state in host memory are those of a live one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import StreamShard, plan
from streamshard.tools.activations import Activations
from streamshard.tools.host_time import MACHINES, Step, StepTime
from tests.faults import case
from tests.models import DIM, TinyConfig, TinyLM, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, lm_step
from tests.scenarios import BF16
from tests.simulated import is_inside, simulated_device

no_activations = mock.patch(  # takes seconds
    "streamshard.tools.planner.estimate_activations", return_value=Activations(0, 0)
)


def half_frozen(config: TinyConfig, count: int = 4) -> TinyLM:
    """A `TinyLM` of which the first `count` of embedding and three blocks are frozen."""
    model = TinyLM(config)
    for module in (model.embedding, *model.blocks[:3])[:count]:
        module.requires_grad_(False)
    return model


def _step(model: Any, world_size: int, machine: str, **given: Any) -> StepTime:
    names = [name for name in ("micro_batches", "active") if name in given]
    wanted = Step(MACHINES[machine], **{name: given.pop(name) for name in names})
    with no_activations:
        step = plan(model, world_size, step=wanted, **given).step
    assert step is not None
    return step


class _Copied(TorchDispatchMode):
    def __init__(self, blocks: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._blocks = blocks
        self.in_bytes = self.out_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            to, source = (is_inside(each, self._blocks) for each in args[:2])
            self.in_bytes += args[1].nbytes * (source and not to)
            self.out_bytes += args[0].nbytes * (to and not source)
        return func(*args, **(kwargs or {}))


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "micro_batches", "accumulates"), [(1, 3, False), (2, 1, False), (2, 3, False), (2, 3, True)]
)
def test_a_step_copies_the_bytes_of_its_plan(context: RankContext, micro_batches: int, accumulates: bool) -> None:
    """In both directions, with the optimizer's step, which the first forward carries out."""
    call = context.call(0)

    def build(frozen: int) -> nn.Module:
        return half_frozen(TinyConfig(vocabulary=160, dim=32, depth=6), frozen)  # no unit is padded

    def loss_of(model: Any, number: int) -> torch.Tensor:
        return model(token_batch(number, context.rank)).float().logsumexp(-1).mean()

    # Of one step each: frozen modules, slots, and a budget of the device.
    cases: list[tuple[int, int, Any]] = [(0, 2, 0), (4, 2, "400KB"), (0, 3, 0)]
    chosen = {(1, 3, False): cases[:1], (2, 1, False): cases[1:], (2, 3, True): cases[:2]}
    for frozen, slots, budget in chosen.get((context.world_size, micro_batches, accumulates), cases):
        settings: dict[str, Any] = {"offload": "state", "weight_slots": slots, "device_budget": budget}
        settings["precision"] = BF16
        run = {"batch": 2, "seq": 8, ("accumulate" if accumulates else "micro_batches"): micro_batches}
        step = _step(functools.partial(build, frozen), context.world_size, "pcie5", **run, **settings)
        with simulated_device() as device:
            model: Any = StreamShard(build(frozen), **settings)
            optimizer = adamw(model)
            for number in range(3):
                with _Copied(device.pinned) as copied:
                    if accumulates:
                        model.accumulate(range(micro_batches), loss_of)
                    for part in range(0 if accumulates else micro_batches):
                        lm_step(model, call._replace(step=micro_batches * number + part))
                optimizer.step()
                optimizer.zero_grad()
        with case((frozen, slots, budget)):
            assert copied.in_bytes == sum(each.count * each.in_bytes for each in step.passes)
            assert copied.out_bytes == sum(each.count * each.out_bytes for each in step.passes)


def test_a_token_uses_all_parameters_but_embeddings_unless_told() -> None:
    """A tied embedding is the head too. A machine has no more ranks than the run."""
    sizes, run = TinyConfig(vocabulary=160, depth=3), {"batch": 2, "seq": 8, "offload": "state"}
    model = TinyLM(sizes)
    used = sum(param.numel() for param in model.parameters()) - 160 * DIM
    frozen = sum(param.numel() for param in model.blocks[0].requires_grad_(False).parameters())
    step = _step(model, 2, "pcie5x8", **run)
    assert (step.load.used, step.load.trained) == (used, used - frozen)
    assert (step.load.layers, step.load.width, step.machine.ranks) == (3, DIM, 2)
    tied = _step(TinyLM(dataclasses.replace(sizes, tied=True)), 2, "pcie5", **run)
    assert tied.load.used == used
    part = _step(model, 2, "pcie5", active=1000, **run)
    assert (part.load.used, part.load.trained) == (1000, pytest.approx(1000 * (used - frozen) / used))
