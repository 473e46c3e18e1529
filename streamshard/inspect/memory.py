"""The memory report: what the engine's tensors really hold, beside what the formula says.

Formula, for N ranks, S the sum over units of the padded shard, all in bytes: main weights 4 S, main grads 4 S of the
units that train, compute shards p S (none in fp32: they are the main weights), weight slots the largest unit of each
times p, grad slots likewise times g, scratch as the transport asks, and (N + 1) bytes of flags a parameter. One rank
has no slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamshard.config import Precision
from streamshard.layout import UnitLayout
from streamshard.slots import Category, Ledger
from streamshard.unit import StreamedUnit

__all__ = ["MemoryReport", "expected_bytes", "report_memory"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes the engine holds on this rank, by category.

    Attributes:
        held_bytes: counted on the live tensors.
        formula_bytes: computed from the layout.
        numel: parameters of the whole model.
        world_size: N.
        adam_bytes: what the two moments of Adam take on this rank once it has stepped; not held by the engine.
    """

    held_bytes: Mapping[str, int]
    formula_bytes: Mapping[str, int]
    numel: int
    world_size: int
    adam_bytes: int

    @property
    def total_bytes(self) -> int:
        """All categories."""
        return sum(self.held_bytes.values())

    def __str__(self) -> str:
        lines = [f"memory of this rank: {self.numel:,} parameters over {self.world_size} rank(s)"]
        rows = [(name, held, self.formula_bytes[name]) for name, held in self.held_bytes.items()]
        rows.append(("total", self.total_bytes, sum(self.formula_bytes.values())))
        for name, held, formula in rows:
            per_param = held / max(self.numel, 1)
            lines.append(f"  {name:<16}{held / 2**20:>12.2f} MiB {per_param:>8.2f} bytes/param   formula {formula:,}")
        adam = f"{self.adam_bytes / 2**20:>12.2f} MiB {self.adam_bytes / max(self.numel, 1):>8.2f} bytes/param"
        lines.append(f"  {'(Adam moments)':<16}{adam}   held by the optimizer")
        return "\n".join(lines)


def expected_bytes(
    layouts: Sequence[UnitLayout],
    slot_of: Mapping[Category, Sequence[int]],
    trains: Sequence[bool],
    param_bytes: int,
    grad_bytes: int,
    scratch_numel: Sequence[int],
) -> dict[Category, int]:
    """The formula above.

    Args:
        layouts: of all units.
        slot_of: the slot of each unit, for WEIGHT_SLOTS and GRAD_SLOTS.
        trains: whether the unit has main grads.
        param_bytes, grad_bytes: bytes of an element of param_dtype and of the grad slots' dtype.
        scratch_numel: elements of scratch that reductions of each unit need.
    """
    shards = sum(layout.shard_numel for layout in layouts)
    is_alone = layouts[0].world_size == 1

    def slots(category: Category, numel: Sequence[int]) -> int:
        largest: dict[int, int] = {}
        for slot, size in zip(slot_of[category], numel, strict=True):
            largest[slot] = max(largest.get(slot, 0), size)
        return 0 if is_alone else sum(largest.values())

    padded = [layout.padded_numel for layout in layouts]
    return {
        Category.MAIN_WEIGHTS: 4 * shards,
        Category.MAIN_GRADS: 4 * sum(lay.shard_numel for lay, train in zip(layouts, trains, strict=True) if train),
        Category.COMPUTE_SHARDS: 0 if param_bytes == 4 else param_bytes * shards,
        Category.WEIGHT_SLOTS: param_bytes * slots(Category.WEIGHT_SLOTS, padded),
        Category.GRAD_SLOTS: grad_bytes * slots(Category.GRAD_SLOTS, padded),
        Category.SCRATCH: grad_bytes * slots(Category.GRAD_SLOTS, scratch_numel),
        Category.FLAGS: 0 if is_alone else (layouts[0].world_size + 1) * sum(len(layout.params) for layout in layouts),
    }


def report_memory(
    ledger: Ledger, units: Sequence[StreamedUnit], slot_of: Mapping[Category, Sequence[int]], precision: Precision
) -> MemoryReport:
    """What `ledger` holds beside what `expected_bytes` says of `units`."""
    layouts = [unit.shard.layout for unit in units]
    expected = expected_bytes(
        layouts,
        slot_of,
        [unit.shard.grad is not None for unit in units],
        precision.param_dtype.itemsize,
        precision.slot_grad_dtype.itemsize,
        [unit.scratch_numel for unit in units],
    )
    return MemoryReport(
        held_bytes={category.value: ledger.held_bytes(category) for category in Category},
        formula_bytes={category.value: expected[category] for category in Category},
        numel=sum(layout.numel for layout in layouts),
        world_size=layouts[0].world_size,
        adam_bytes=8 * sum(layout.shard_numel for layout in layouts),
    )
