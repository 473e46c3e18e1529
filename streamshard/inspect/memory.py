"""The memory report: what the engine's tensors really hold, beside what `streamshard.plan.memory` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamshard.engine.engine import Engine
from streamshard.plan.memory import Category, expected_bytes

__all__ = ["MemoryReport", "report_memory"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes the engine holds on this rank, by category.

    Attributes:
        held_bytes: counted on the live tensors.
        formula_bytes: computed from the layout.
        numel: parameters of the whole model.
        padded_numel: elements of all segments, with what lies between parameters and behind them.
        world_size: N.
        adam_bytes: what the two moments of Adam take on this rank once it has stepped; not held by the engine.
        slots: how many there are, and why.
    """

    held_bytes: Mapping[str, int]
    formula_bytes: Mapping[str, int]
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
        who = f"memory of this rank, one of {self.world_size}"
        lines = [f"{who}; bytes per parameter of all {self.numel:,}, padded by {padding:.2%}"]
        rows = [(name, held, self.formula_bytes[name]) for name, held in self.held_bytes.items()]
        rows.append(("total", self.total_bytes, sum(self.formula_bytes.values())))
        for name, held, formula in rows:
            per_param = held / max(self.numel, 1)
            check = "as the formula says" if held == formula else f"the formula says {formula / 2**20:.2f} MiB"
            lines.append(f"  {name:<16}{held / 2**20:>12.2f} MiB {per_param:>8.2f} bytes/param   {check}")
        adam = f"{self.adam_bytes / 2**20:>12.2f} MiB {self.adam_bytes / max(self.numel, 1):>8.2f} bytes/param"
        lines.append(f"  {'(Adam moments)':<16}{adam}   held by the optimizer, not in the total")
        lines.append(f"  {self.slots}")
        return "\n".join(lines)


def report_memory(engine: Engine) -> MemoryReport:
    """What `engine` holds beside what `expected_bytes` says."""
    sizing = engine.sizing
    expected = expected_bytes(sizing, engine.plan)
    expected[Category.OPTIMIZER_ROUNDS] = engine.ledger.rounds_bytes
    return MemoryReport(
        held_bytes={category.value: engine.ledger.held_bytes(category) for category in Category},
        formula_bytes={category.value: expected[category] for category in Category},
        numel=sum(layout.numel for layout in sizing.layouts),
        padded_numel=sum(layout.padded_numel for layout in sizing.layouts),
        world_size=sizing.world_size,
        adam_bytes=8 * sizing.trained_numel,
        slots=engine.why_slots,
    )
