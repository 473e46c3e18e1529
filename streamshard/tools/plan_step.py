"""The time of a step of one model with state in host memory, before it runs (see `streamshard.tools.host_time`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from streamshard.build import check_model, plan_engine
from streamshard.comm.communicator import PlannedRanks
from streamshard.core.engine import Engine
from streamshard.core.params import FlatParam
from streamshard.errors import ConfigError
from streamshard.planning.discovery import ResidentArgument, UnitsArgument
from streamshard.planning.structure import modules_inside
from streamshard.tools.activations import Build
from streamshard.tools.host_time import Inputs, Load, Machine, StepTime, predict


def plan_step(
    model: nn.Module | Build,
    world_size: int,
    machine: Machine,
    units: UnitsArgument = None,
    *,
    batch: int,
    seq: int,
    micro_batches: int = 1,
    is_checkpointed: bool = False,
    active: float | None = None,
    resident: ResidentArgument = (),
    **given: Any,
) -> StepTime:
    """Predict whether copies of a model with ``offload`` hide behind its compute.

    Args:
        model, world_size, units, resident: as for `streamshard.plan`.
        machine: the speeds. It has no more ranks than there are.
        batch, seq: shape of a rank's micro-batch of tokens.
        micro_batches: of a step.
        is_checkpointed: layers are checkpointed.
        active: parameters that a token uses, of a mixture of experts. None: all parameters outside of embeddings.
        **given: other arguments of `StreamShard`.

    Raises:
        ConfigError: a number is not positive, or `offload` is not given.
        ShardingError, UnitError: as `StreamShard` does.
    """
    numbers = {"batch": batch, "seq": seq, "micro_batches": micro_batches, "active": 1 if active is None else active}
    for name, number in numbers.items():
        if number is None or number <= 0:
            raise ConfigError(f"{name}={number}: wanted a positive number")
    with torch.device("meta"):
        built = model if isinstance(model, nn.Module) else model()
    checked = check_model(built, units, resident, given)
    if checked.settings.offload is None:
        raise ConfigError('a step without offload copies nothing from host memory: give offload="state"')
    tables = [module for module in modules_inside(built) if isinstance(module, nn.Embedding)]
    others = [module for module in modules_inside(built) if not isinstance(module, nn.Embedding)]
    params = {param for module in others for param in module._parameters.values() if param is not None}
    used = sum(param.numel() for param in params)
    trained = sum(param.numel() for param in params if param.requires_grad)
    share = 1.0 if active is None else active / used
    layers = sum(len(found.modules) for found in checked.found if not found.is_resident)
    width = max((table.embedding_dim for table in tables), default=0)
    load = Load(share * used, share * trained, layers, width, batch, seq, micro_batches, is_checkpointed)
    machine = dataclasses.replace(machine, ranks=min(machine.ranks, world_size))
    return predict(_inputs_of(plan_engine(checked, PlannedRanks(world_size, "nccl"))), load, machine)


def still_gathered(engine: Engine) -> set[int]:
    """The units in their slots as the first forward of a step begins: without those that the last step has stepped."""
    left = engine.plan.left_by(reversed(range(len(engine.units))))
    return {unit for unit in left if engine.units[unit].host is not None and not engine.units[unit].trained}


def _inputs_of(engine: Engine) -> Inputs:
    units, order = [unit for unit in engine.units if unit.host is not None], range(len(engine.units))

    def size(flats: Iterable[FlatParam]) -> int:
        return sum(flat.layout.shard_numel * flat.kind.wire_dtype.itemsize for flat in flats)

    def absent(there: Collection[int]) -> Iterator[FlatParam]:
        return (flat for unit in units if unit.index not in there for flat in unit.flat_params)

    trained = [flat for unit in units for flat in unit.trained]
    return Inputs(
        trained=sum(flat.layout.shard_numel for flat in trained),
        cast=size(flat for flat in trained if flat.kind.wire_dtype is not flat.kind.main_dtype),
        first_forward=size(flat for flat in absent(still_gathered(engine)) if not flat.kind.trains),
        forward=size(absent(engine.plan.left_by(reversed(order)))),
        backward=size(absent(engine.plan.left_by(order))),
    )
