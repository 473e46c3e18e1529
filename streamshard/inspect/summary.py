"""What ``print(model)`` says of how a model is sharded."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from streamshard.engine.engine import Engine
from streamshard.engine.handle import handle_of
from streamshard.plan.structure import modules_inside

__all__ = ["summarise"]


def summarise(engine: Engine, root: nn.Module) -> list[str]:
    """Units, ranks, slots and dtypes, in two lines."""
    handles = {module: handle_of(module) for module in modules_inside(root)}
    layers = Counter(type(module).__name__ for module, handle in handles.items() if handle and handle.unit)
    units = [f"{count} x {kind}" if count > 1 else kind for kind, count in layers.items()]
    named = [", ".join(units), "the root unit"]
    resident = ", ".join(unit.name for unit in engine.units[1:] if not unit.is_streamed)
    size, copies = engine.ranks.world_size, engine.ranks.total_size // engine.ranks.world_size
    precision = engine.precision
    ranks = f"{size} rank{'s' * (size > 1)}" + (f" in each of {copies} replicas" if copies > 1 else "")
    numel = sum(layout.numel for layout in engine.sizing.layouts)
    return [
        f"StreamShard: {numel:,} parameters over {ranks}; units: {' and '.join(filter(None, named))}"
        + f"; resident: {resident}" * bool(resident),
        f"{engine.why_slots.partition(':')[0]}; computes in {_name(precision.param_dtype)}, gradients in "
        f"{_name(precision.slot_grad_dtype)}, summed in {_name(precision.reduce_dtype)}",
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
