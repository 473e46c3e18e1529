"""What ``model.memory_report()`` and ``print(model)`` say: bytes by category, units, ranks and dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from streamshard.engine.engine import Engine
from streamshard.engine.module_state import handle_of
from streamshard.planning.memory import Category
from streamshard.planning.structure import modules_inside


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that the engine holds on this rank, by category.

    Attributes:
        held_bytes: counted on the live tensors; "pool rounding" as torch's allocator says.
        numel: parameters of the whole model.
        padded_numel: elements of all flat parameters, alignment and padding included.
        world_size: N.
        adam_bytes: Adam's two moments on this rank; the optimizer holds them, not the engine.
        slots: how many slots there are, and why.
    """

    held_bytes: Mapping[str, int]
    numel: int
    padded_numel: int
    world_size: int
    adam_bytes: int
    slots: str

    @property
    def total_bytes(self) -> int:
        """All categories."""
        return sum(self.held_bytes.values())

    def __str__(self) -> str:
        padding = self.padded_numel / self.numel - 1 if self.numel else 0
        lines = [f"memory of one rank of {self.world_size}; {self.numel:,} parameters in all, padded by {padding:.2%}"]
        rows = {**self.held_bytes, "total": self.total_bytes, "(Adam's moments)": self.adam_bytes}
        for name, held in rows.items():
            per_param = held / max(self.numel, 1)
            lines.append(f"  {name:<18}{held / 2**20:>12.2f} MiB {per_param:>8.2f} bytes/param")
        return "\n".join([*lines, f"  {self.slots}"])


def report_memory(engine: Engine) -> MemoryReport:
    """What `engine` holds. See [Note: memory] in `streamshard.planning.memory`."""
    layouts, ledger = engine.sizing.layouts, engine.ledger
    held_bytes = {category.value: ledger.held_bytes(category) for category in Category}
    if ledger.registered is not None:
        held_bytes["pool rounding"] = ledger.registered.unused_bytes()
    trained_numel = sum(grads.main.numel() for unit in engine.units for grads in unit.grads.flat_params)
    return MemoryReport(
        held_bytes=held_bytes,
        numel=sum(layout.numel for layout in layouts),
        padded_numel=sum(layout.padded_numel for layout in layouts),
        world_size=engine.ranks.world_size,
        adam_bytes=8 * trained_numel,
        slots=engine.why_slots,
    )


def summarise(engine: Engine, root: nn.Module) -> list[str]:
    """Units, ranks, slots and dtypes, in two lines."""
    handles = {module: handle_of(module) for module in modules_inside(root)}
    layers = Counter(type(module).__name__ for module, handle in handles.items() if handle and handle.unit)
    units = [f"{count} x {layer}" if count > 1 else layer for layer, count in layers.items()]
    units = [", ".join(units)] * bool(units) + ["the root unit"]
    resident = ", ".join(unit.name for unit in engine.units[1:] if not unit.is_streamed)
    size, precision = engine.ranks.world_size, engine.precision
    dtypes = (precision.param_dtype, precision.slot_grad_dtype, precision.reduce_dtype)
    compute, gradients, sums = (str(dtype or "the parameters' own").removeprefix("torch.") for dtype in dtypes)
    numel = sum(layout.numel for layout in engine.sizing.layouts)
    replicas = engine.ranks.total_size // size
    return [
        f"StreamShard: {numel:,} parameters over {size} rank{'s' * (size > 1)}"
        + f" in each of {replicas} replicas" * (replicas > 1)
        + f"; units: {' and '.join(units)}"
        + f"; resident: {resident}" * bool(resident),
        f"{engine.why_slots.partition(':')[0]}; computes in {compute}, gradients in {gradients}, summed in {sums}",
    ]
