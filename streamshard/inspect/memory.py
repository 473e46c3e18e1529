"""The memory report: what the engine's tensors really hold, beside what the formula says.

Formula, for N ranks, S the sum over units of the padded shard, all in bytes: main weights 4 S, main grads 4 S of the
units that train, compute shards p S (none in fp32: they are the main weights), weight slots the largest unit of each
times p, grad slots likewise times g if one of its units trains, scratch as the transport asks, and (N + 1) bytes of
flags a parameter. One rank has no slots. With "all" weight slots compute shards lie in them (in fp32 the main weights
do), with "all" grad slots in fp32 the main grads do.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from streamshard.config import Precision
from streamshard.layout import UnitLayout
from streamshard.slots import Category, Ledger, SlotPlan
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
    plan: SlotPlan,
    trains: Sequence[bool],
    precision: Precision,
    scratch_numel: Sequence[int],
) -> dict[Category, int]:
    """The formula above.

    Args:
        layouts: of all units.
        plan: which unit uses which slot.
        trains: whether the unit has main grads.
        precision: the dtypes.
        scratch_numel: elements of scratch that reductions of each unit need.
    """
    is_alone = layouts[0].world_size == 1
    param_bytes, grad_bytes = precision.param_dtype.itemsize, precision.slot_grad_dtype.itemsize
    padded = [layout.padded_numel for layout in layouts]
    shards = sum(layout.shard_numel for layout in layouts)
    trained = sum(layout.shard_numel for layout, train in zip(layouts, trains, strict=True) if train)
    holds_compute = plan.keeps_weights and not is_alone  # what a rank owns is a range of the slots
    holds_grads = plan.keeps_grads and not is_alone and precision.slot_grad_dtype is torch.float32
    in_use = {slot for slot, train in zip(plan.grads, trains, strict=True) if train}
    scratch_in_use = {slot for slot, train in zip(plan.scratch, trains, strict=True) if train}

    def slots(slot_of: Sequence[int], numel: Sequence[int], wanted: Container[int]) -> int:
        largest: dict[int, int] = {}
        for slot, size in zip(slot_of, numel, strict=True):
            largest[slot] = max(largest.get(slot, 0), size if slot in wanted else 0)
        return 0 if is_alone else sum(largest.values())

    return {
        Category.MAIN_WEIGHTS: 0 if param_bytes == 4 and holds_compute else 4 * shards,
        Category.MAIN_GRADS: 0 if holds_grads else 4 * trained,
        Category.COMPUTE_SHARDS: 0 if param_bytes == 4 or holds_compute else param_bytes * shards,
        Category.WEIGHT_SLOTS: param_bytes * slots(plan.weights, padded, set(plan.weights)),
        Category.GRAD_SLOTS: grad_bytes * slots(plan.grads, padded, in_use),
        Category.SCRATCH: grad_bytes * slots(plan.scratch, scratch_numel, scratch_in_use),
        Category.FLAGS: 0 if is_alone else (layouts[0].world_size + 1) * sum(len(layout.params) for layout in layouts),
    }


def report_memory(ledger: Ledger, units: Sequence[StreamedUnit], plan: SlotPlan, precision: Precision) -> MemoryReport:
    """What `ledger` holds beside what `expected_bytes` says of `units`."""
    layouts = [unit.shard.layout for unit in units]
    trains = [unit.shard.grad is not None for unit in units]
    expected = expected_bytes(layouts, plan, trains, precision, [unit.scratch_numel for unit in units])
    return MemoryReport(
        held_bytes={category.value: ledger.held_bytes(category) for category in Category},
        formula_bytes={category.value: expected[category] for category in Category},
        numel=sum(layout.numel for layout in layouts),
        world_size=layouts[0].world_size,
        adam_bytes=8 * sum(layout.shard_numel for layout in layouts),
    )
