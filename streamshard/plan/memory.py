"""How much memory a choice of slots takes, and the most slots that fit into a budget. Before anything is allocated.

Formula, for N ranks, S the sum over units of the padded shard, all in bytes: main weights 4 S, main grads 4 S of the
units that train, compute shards p S (none in fp32: they are the main weights), weight slots the largest unit of each
times p, grad slots likewise times g if one of its units trains, scratch as the transport asks, and (N + 1) bytes of
flags a parameter, with R replicas (R N + N + 1). One rank has no slots. With "all" weight slots compute shards lie in
them (in fp32 the main weights do), with "all" grad slots in fp32 the main grads do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

import torch

from streamshard.config import MemoryBudget, Precision, SlotCount, parse_bytes
from streamshard.device import free_bytes
from streamshard.errors import ConfigError
from streamshard.plan.layout import UnitLayout
from streamshard.plan.slots import SlotPlan, plan_slots

__all__ = ["Category", "Sizing", "choose_slots", "expected_bytes", "holds_main_grads", "read_budget"]

_MOMENTS_BYTES = 8  # a parameter: Adam's two moments in fp32


class Category(enum.Enum):
    """What a buffer is for; the rows of the memory report."""

    MAIN_WEIGHTS = "main weights"
    MAIN_GRADS = "main grads"
    COMPUTE_SHARDS = "compute shards"
    WEIGHT_SLOTS = "weight slots"
    GRAD_SLOTS = "grad slots"
    SCRATCH = "scratch"
    FLAGS = "flags"


class Sizing(NamedTuple):
    """What memory depends on besides the choice of slots.

    Attributes:
        layouts: of all units, edge unit first.
        shared: by unit, whether it takes turns in the block slots.
        trains: by unit, whether it has main grads.
        precision: the dtypes.
        scratch_numel: ``(shard_numel, adds)`` -> elements of scratch, see `Transport.scratch_numel`.
        replicas: R, size of the replicate axis.
    """

    layouts: Sequence[UnitLayout]
    shared: Sequence[bool]
    trains: Sequence[bool]
    precision: Precision
    scratch_numel: Callable[[int, bool], int]
    replicas: int = 1


def holds_main_grads(sizing: Sizing, plan: SlotPlan) -> bool:
    """Whether main grads are ranges of the grad slots: every unit has one of its own, and both are fp32."""
    is_alone = sizing.layouts[0].world_size == 1
    return plan.keeps_grads and not is_alone and sizing.precision.slot_grad_dtype is torch.float32


def expected_bytes(sizing: Sizing, plan: SlotPlan) -> dict[Category, int]:
    """The formula above."""
    layouts, trains, precision = sizing.layouts, sizing.trains, sizing.precision
    is_alone = layouts[0].world_size == 1
    param_bytes, grad_bytes = precision.param_dtype.itemsize, precision.slot_grad_dtype.itemsize
    padded = [layout.padded_numel for layout in layouts]
    shards = sum(layout.shard_numel for layout in layouts)
    trained = sum(layout.shard_numel for layout, train in zip(layouts, trains, strict=True) if train)
    holds_compute = plan.keeps_weights and not is_alone  # what a rank owns is a range of the slots
    holds_grads = holds_main_grads(sizing, plan)
    scratch = [sizing.scratch_numel(layout.shard_numel, not holds_grads) for layout in layouts]

    def slots(slot_of: Sequence[int], numel: Sequence[int], in_use: Container[int]) -> int:
        largest: dict[int, int] = {}
        for slot, size in zip(slot_of, numel, strict=True):
            largest[slot] = max(largest.get(slot, 0), size if slot in in_use else 0)
        return 0 if is_alone else sum(largest.values())

    def in_use(slot_of: Sequence[int]) -> set[int]:
        return {slot for slot, train in zip(slot_of, trains, strict=True) if train}

    return {
        Category.MAIN_WEIGHTS: 0 if param_bytes == 4 and holds_compute else 4 * shards,
        Category.MAIN_GRADS: 0 if holds_grads else 4 * trained,
        Category.COMPUTE_SHARDS: 0 if param_bytes == 4 or holds_compute else param_bytes * shards,
        Category.WEIGHT_SLOTS: param_bytes * slots(plan.weights, padded, set(plan.weights)),
        Category.GRAD_SLOTS: grad_bytes * slots(plan.grads, padded, in_use(plan.grads)),
        Category.SCRATCH: grad_bytes * slots(plan.scratch, scratch, in_use(plan.scratch)),
        Category.FLAGS: _flags(layouts[0].world_size, sizing.replicas) * sum(len(layout.params) for layout in layouts),
    }


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
    moments = _MOMENTS_BYTES * sum(
        layout.shard_numel for layout, train in zip(sizing.layouts, sizing.trains, strict=True) if train
    )
    for weight_slots, grad_slots in _candidates(sum(sizing.shared)):
        plan = plan_slots(sizing.shared, weight_slots, grad_slots)
        total = moments + sum(expected_bytes(sizing, plan).values())
        name = f"weight_slots={weight_slots!r}, grad_slots={grad_slots!r}"
        if total <= budget:
            reason = f"{name}: {_gib(total)} of {_gib(budget)}"
            return plan, reason + (f"; {rejected} would not fit" if rejected else "; the model has no use for more")
        rejected = f"{name} ({_gib(total)})"
    ranks = sizing.layouts[0].world_size
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
