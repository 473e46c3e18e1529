"""What a planned rank copies, exchanges and computes in a step (see `streamshard.tools.host_time`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from streamshard.core.engine import Engine
from streamshard.core.params import FlatParam
from streamshard.core.unit import Unit
from streamshard.planning.discovery import FoundUnit
from streamshard.planning.structure import modules_inside
from streamshard.tools.host_time import Exchanged, HostBytes, Load, Step


def load_of(model: nn.Module, found: Sequence[FoundUnit], tokens: tuple[int, int], step: Step) -> Load:
    """The load of a rank that trains `model`, with the units `found`, in a loop over micro-batches of `tokens`."""
    tables = [module for module in modules_inside(model) if isinstance(module, nn.Embedding)]
    others = [module for module in modules_inside(model) if not isinstance(module, nn.Embedding)]
    params = {param for module in others for param in module._parameters.values() if param is not None}
    used = sum(param.numel() for param in params)
    trained = sum(param.numel() for param in params if param.requires_grad)
    share = 1.0 if step.active is None else step.active / used
    layers = sum(len(each.modules) for each in found if not each.is_resident)
    width = max((table.embedding_dim for table in tables), default=0)
    return Load(share * used, share * trained, layers, width, *tokens, step.micro_batches, step.is_checkpointed)


def gathers_of(engine: Engine) -> tuple[list[Unit], list[Unit]]:
    """The units that a forward and a backward all-gather, from the second step on."""
    plan, units = engine.plan, engine.units
    content: dict[int, int] = {}
    for _ in range(2):
        # Frozen weights in host memory do not change. Gradients have taken the slots of trained units.
        content = {
            slot: unit for slot, unit in content.items() if units[unit].host is not None and not units[unit].trained
        }
        forward = plan.gathers(range(len(units)), content)
        backward = plan.gathers(reversed(range(len(units))), content, plan.weightless)
    return [units[unit] for unit in forward], [units[unit] for unit in backward]


def inputs_of(engine: Engine) -> HostBytes:
    """What the rank of a planned engine has in host memory."""
    forward, backward = gathers_of(engine)

    def size(flats: Iterable[FlatParam]) -> int:
        return sum(flat.layout.shard_numel * flat.kind.wire_dtype.itemsize for flat in flats)

    def flats(units: Iterable[Unit]) -> Iterator[FlatParam]:
        return (flat for unit in units if unit.host is not None for flat in unit.flat_params)

    trained = [flat for flat in flats(engine.units) if flat.kind.trains]
    return HostBytes(
        trained=sum(flat.layout.shard_numel for flat in trained),
        cast=size(flat for flat in trained if flat.kind.wire_dtype is not flat.kind.main_dtype),
        first_forward=size(flat for flat in flats(forward) if not flat.kind.trains),
        forward=size(flats(forward)),
        backward=size(flats(backward)),
    )


def exchanged_of(engine: Engine) -> Exchanged:
    """What the rank of a planned engine sends, with gradients in the slots that units have now."""

    def sent(flat: FlatParam, dtype: torch.dtype) -> int:
        # Each other rank receives this rank's shards, and chunks of this rank's gradients.
        return (flat.ranks.world_size - 1) * flat.layout.shard_numel * dtype.itemsize

    forward, backward = (
        sum(sent(flat, flat.kind.wire_dtype) for unit in units for flat in unit.flat_params)
        for units in gathers_of(engine)
    )
    reduced = [flat for unit in engine.units for flat in unit.trained]
    grads = sum(sent(flat, flat.ranks.transport.sent_dtype(flat.kind.mode, flat.grads.dtype)) for flat in reduced)
    return Exchanged(forward, backward, grads, engine.plan.keeps_weights, engine.plan.keeps_grads)
