"""How much memory a choice of slots takes, and the most slots that fit into a budget. Before anything is allocated.

Formula, for N ranks, S the sum over segments of the padded shard, all in bytes: main weights and main grads 4 S of what
trains, frozen weights m S of what does not (m of the dtype that it is kept in), compute shards p S of what is kept in
another dtype than it is computed with, weight slots the largest unit of each times p, grad slots the largest unit's
trained segments times g, scratch as the transport asks, and (N + 1) bytes of flags a parameter, with R replicas
(R N + N + 1). One rank has no slots. With "all" weight slots compute shards lie in them (and main or frozen weights,
where they are the same), with "all" grad slots in fp32 the main grads do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from streamshard.config import MemoryBudget, Precision, SlotCount, parse_bytes
from streamshard.device import free_bytes
from streamshard.errors import ConfigError
from streamshard.plan.segments import PlannedSegment, SegmentKind, UnitLayout
from streamshard.plan.slots import SlotPlan, plan_slots

__all__ = ["Category", "Sizing", "choose_slots", "expected_bytes", "holds_main_grads", "largest_of", "read_budget"]

_MOMENTS_BYTES = 8  # a parameter: Adam's two moments in fp32


class Category(enum.Enum):
    """What a buffer is for; the rows of the memory report."""

    MAIN_WEIGHTS = "main weights"
    MAIN_GRADS = "main grads"
    FROZEN_WEIGHTS = "frozen weights"
    COMPUTE_SHARDS = "compute shards"
    WEIGHT_SLOTS = "weight slots"
    GRAD_SLOTS = "grad slots"
    SCRATCH = "scratch"
    FLAGS = "flags"
    OPTIMIZER_ROUNDS = "optimizer rounds"


class Sizing(NamedTuple):
    """What memory depends on besides the choice of slots.

    Attributes:
        layouts: of all units, root unit first.
        shared: by unit, whether it takes turns in the block slots.
        precision: the dtypes.
        world_size: N.
        scratch_numel: ``(segment, adds)`` -> elements of scratch, see `Transport.scratch_numel`.
        replicas: R, size of the replicate axis.
    """

    layouts: Sequence[UnitLayout]
    shared: Sequence[bool]
    precision: Precision
    world_size: int
    scratch_numel: Callable[[PlannedSegment, bool], int]
    replicas: int = 1

    @property
    def segments(self) -> list[PlannedSegment]:
        """Of all units."""
        return [segment for layout in self.layouts for segment in layout.segments]

    @property
    def trained_numel(self) -> int:
        """Elements of this rank's shards that train."""
        return sum(segment.layout.shard_numel for segment in self.segments if segment.kind.trains)

    def scratch_of(self, segment: PlannedSegment, plan: SlotPlan) -> tuple[int, int]:
        """What its reductions need beside the grad slot: where that begins in the scratch, and bytes."""
        start = n_bytes = 0
        for own in self.layouts[segment.unit].segments:
            start += n_bytes
            adds = not holds_main_grads(own.kind, plan, self.world_size)
            n_bytes = self.scratch_numel(own, adds) * own.kind.grad_dtype.itemsize if own.kind.trains else 0
            if own.tag == segment.tag:
                break
        return start, n_bytes

    def scratch_bytes(self, unit: int, plan: SlotPlan) -> int:
        """What a unit's reductions need beside the grad slot."""
        return sum(self.scratch_of(self.layouts[unit].segments[-1], plan))


def holds_main_grads(kind: SegmentKind, plan: SlotPlan, world_size: int) -> bool:
    """Whether main grads are ranges of the grad slots: every unit has one of its own, and both are fp32."""
    return plan.keeps_grads and world_size > 1 and kind.grad_dtype is torch.float32


def largest_of(slot_of: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """By slot, the largest of its units' `sizes`."""
    largest: dict[int, int] = {}
    for slot, size in zip(slot_of, sizes, strict=True):
        largest[slot] = max(largest.get(slot, 0), size)
    return largest


def expected_bytes(sizing: Sizing, plan: SlotPlan) -> dict[Category, int]:
    """The formula above."""
    layouts, is_alone = sizing.layouts, sizing.world_size == 1
    found = dict.fromkeys(Category, 0)
    for segment in sizing.segments:
        kind, numel = segment.kind, segment.layout.shard_numel
        lies_in_slot = plan.keeps_weights and not is_alone  # what a rank owns is a range of the slots
        if not (lies_in_slot and kind.main_dtype is kind.compute_dtype):
            kept_as = Category.MAIN_WEIGHTS if kind.trains else Category.FROZEN_WEIGHTS
            found[kept_as] += kind.main_dtype.itemsize * numel
        if not lies_in_slot and kind.main_dtype is not kind.compute_dtype:
            found[Category.COMPUTE_SHARDS] += kind.compute_dtype.itemsize * numel
        if kind.trains and not holds_main_grads(kind, plan, sizing.world_size):
            found[Category.MAIN_GRADS] += 4 * numel
    found[Category.FLAGS] = _flags(sizing.world_size, sizing.replicas) * sum(len(layout.params) for layout in layouts)
    if is_alone:
        return found
    found[Category.WEIGHT_SLOTS] = sum(largest_of(plan.weights, [layout.weight_bytes for layout in layouts]).values())
    found[Category.GRAD_SLOTS] = sum(largest_of(plan.grads, [layout.grad_bytes for layout in layouts]).values())
    scratch = [sizing.scratch_bytes(unit, plan) for unit in range(len(layouts))]
    found[Category.SCRATCH] = sum(largest_of(plan.scratch, scratch).values())
    return found


def _flags(world_size: int, replicas: int) -> int:
    """Flags for each parameter: this rank's, the shard group's, those of all shard groups."""
    sizes = {world_size, world_size * replicas} - {1}
    return 1 + sum(sizes) if sizes else 0


def read_budget(budget: MemoryBudget, device: torch.device, replaced: int = 0) -> int:
    """`budget` in bytes.

    Args:
        budget: bytes, text such as ``"70GiB"``, or a share (0 to 1) of what is free on `device` now.
        device: where the model will live.
        replaced: bytes of it that lie there now, and are freed for its shards.

    Raises:
        ConfigError: it cannot be read, or is not positive.
    """
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ConfigError(f"memory_budget={budget!r}: wanted a share of the free memory between 0 and 1")
        return int(budget * free_bytes(device, replaced))
    return parse_bytes("memory_budget", budget)


def choose_slots(sizing: Sizing, budget: int) -> tuple[SlotPlan, str]:
    """The most slots with which what the engine holds, and Adam's moments, fit into `budget` bytes.

    Weight slots come first: each saves a gather in every step. All grad slots save reductions only where gradients are
    accumulated, so they are what is left over for.

    Returns:
        The plan, and the reason in a sentence.

    Raises:
        ConfigError: not even two slots of each kind fit; says what they take and what is missing.
    """
    rejected = None
    moments = _MOMENTS_BYTES * sizing.trained_numel
    for weight_slots, grad_slots in _candidates(sum(sizing.shared)):
        plan = plan_slots(sizing.shared, weight_slots, grad_slots)
        total = moments + sum(expected_bytes(sizing, plan).values())
        name = f"weight_slots={weight_slots!r}, grad_slots={grad_slots!r}"
        if total <= budget:
            reason = f"{name}: {_gib(total)} of {_gib(budget)}"
            return plan, reason + (f"; {rejected} would not fit" if rejected else "; the model has no use for more")
        rejected = f"{name} ({_gib(total)})"
    ranks = sizing.world_size
    raise ConfigError(
        f"memory_budget is {_gib(budget)}, but {name} with Adam's moments take {_gib(total)} on each of {ranks} "
        f"rank(s): {_gib(total - budget)} are missing. Use more ranks, a 16-bit param_dtype or grad_dtype, or smaller "
        "units"
    )


def _candidates(blocks: int) -> Iterator[tuple[SlotCount, SlotCount]]:
    yield "all", "all"
    yield "all", 2
    for count in range(blocks - 1, 2, -1):
        yield count, 2
    yield 2, 2


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
