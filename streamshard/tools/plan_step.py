"""What a planned rank copies and computes in a step with state in host memory (see `streamshard.tools.host_time`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from streamshard.core.engine import Engine
from streamshard.core.params import FlatParam
from streamshard.planning.discovery import FoundUnit
from streamshard.planning.structure import modules_inside
from streamshard.tools.host_time import Inputs, Load, Step


def load_of(model: nn.Module, found: Sequence[FoundUnit], tokens: tuple[int, int], step: Step) -> Load:
    """The load of a rank that trains `model`, with the units `found`, in micro-batches of the shape `tokens`."""
    tables = [module for module in modules_inside(model) if isinstance(module, nn.Embedding)]
    others = [module for module in modules_inside(model) if not isinstance(module, nn.Embedding)]
    params = {param for module in others for param in module._parameters.values() if param is not None}
    used = sum(param.numel() for param in params)
    trained = sum(param.numel() for param in params if param.requires_grad)
    share = 1.0 if step.active is None else step.active / used
    layers = sum(len(each.modules) for each in found if not each.is_resident)
    width = max((table.embedding_dim for table in tables), default=0)
    return Load(share * used, share * trained, layers, width, *tokens, step.micro_batches, step.is_checkpointed)


def still_gathered(engine: Engine) -> set[int]:
    """The units in their slots as a forward begins: without those whose gradients have taken the slot in backward."""
    left = engine.plan.left_by(reversed(range(len(engine.units))))
    return {unit for unit in left if engine.units[unit].host is not None and not engine.units[unit].trained}


def inputs_of(engine: Engine) -> Inputs:
    """What the rank of a planned engine has in host memory."""
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
        forward=size(absent(still_gathered(engine))),
        backward=size(absent(engine.plan.left_by(order))),
    )
