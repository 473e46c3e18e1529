"""Which unit uses which slot, how much memory a choice of slots takes, and the most slots that fit into a budget.

Pure functions: everything is known before anything is allocated.

[Note: slots]
A unit always uses the same slots, so every unsharded parameter is made once and all addresses stay fixed. Streamed
units (*blocks*) share the block slots: block i uses slot ``i % count``. Each slot has the size of its largest block. A
resident unit (the root unit, embedding and head, a lone layer) has slots of its own, so it does not size the others'.
Its weights are all-gathered once in a step and stay until backward is over.

With "all" weight slots, every block has a slot of its own: nothing is all-gathered twice in a step (ZeRO-2), and a
rank's shard of a unit is a range of the unit's slot if the dtypes are equal. With "all" grad slots, gradients can
accumulate (ZeRO-1). With one rank there are no slots: layers compute with the shards, and gradients go to the
main grads.

[Note: memory]
S is the sum of the sizes of this rank's shards in elements, padding included; N is the number of ranks. Bytes per rank:

    main weights        4 S of flat parameters that train
    main grads          4 S of flat parameters that train
    frozen weights      m S of the others; m bytes per element of the storage dtype
    all-gather inputs   p S of flat parameters whose storage dtype is not the compute dtype; p bytes per element of it
    weight slots        p times the elements of the largest unit of each slot
    grad slots          g times the elements of the largest unit that train, of each slot; g bytes of grad_dtype
    scratch             as the transport asks
    flags               N + 1 per parameter; R N + N + 1 with R replicas

With "all" weight slots, all-gather inputs lie in the slots, and so do main or frozen weights of the compute dtype.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from streamshard.config import MemoryBudget, Precision, SlotCount, parse_bytes
from streamshard.device import free_bytes
from streamshard.errors import ConfigError
from streamshard.plan.flat_params import FlatParam, UnitLayout

__all__ = [
    "Category",
    "Sizing",
    "SlotPlan",
    "choose_slots",
    "expected_bytes",
    "largest_of",
    "plan_slots",
    "read_budget",
]

_MOMENTS_BYTES = 8  # per element: Adam's two moments in fp32


class SlotPlan(NamedTuple):
    """Which unit uses which slot. See [Note: slots].

    Attributes:
        shared: by unit, whether the unit is streamed: it shares the block slots.
        weights: by unit, its weight slot.
        grads: by unit, its grad slot.
        scratch: by unit, the scratch of its reductions.
        keeps_weights: every unit has a weight slot of its own, which also holds its all-gather input.
        keeps_grads: every unit has a grad slot of its own, where gradients may stay until the next backward.
    """

    shared: tuple[bool, ...]
    weights: tuple[int, ...]
    grads: tuple[int, ...]
    scratch: tuple[int, ...]
    keeps_weights: bool
    keeps_grads: bool


def plan_slots(shared: Sequence[bool], weight_slots: SlotCount, grad_slots: SlotCount) -> SlotPlan:
    """Assign slots to units.

    Args:
        shared: by unit, whether the unit is streamed.
        weight_slots, grad_slots: number of block slots, or "all": as many as there are blocks.
    """
    grads = _assign(shared, grad_slots)
    # With "all" grad slots two scratches are enough, of two reductions under way. One each would take a model / N.
    scratch = tuple(unit % 2 for unit in range(len(shared))) if grad_slots == "all" else grads
    return SlotPlan(
        tuple(shared), _assign(shared, weight_slots), grads, scratch, weight_slots == "all", grad_slots == "all"
    )


def _assign(shared: Sequence[bool], count: SlotCount) -> tuple[int, ...]:
    """By unit, its slot: block slots are 0 to count - 1, resident units get numbers above."""
    blocks = list(itertools.accumulate(shared, initial=0))  # before each unit
    turns = blocks[-1] if count == "all" else min(count, blocks[-1])
    pairs = enumerate(zip(shared, blocks, strict=False))
    return tuple(before % turns if is_shared else turns + unit - before for unit, (is_shared, before) in pairs)


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
    """The sizes that memory depends on, besides the choice of slots.

    Attributes:
        layouts: of all units, root unit first.
        shared: by unit, whether the unit is streamed.
        precision: the dtypes.
        world_size: N.
        scratch_numel: flat parameter -> elements of scratch, see `Transport.scratch_numel`.
        replicas: R, size of the replicate axis.
    """

    layouts: Sequence[UnitLayout]
    shared: Sequence[bool]
    precision: Precision
    world_size: int
    scratch_numel: Callable[[FlatParam], int]
    replicas: int = 1

    @property
    def flat_params(self) -> list[FlatParam]:
        """The flat parameters of all units."""
        return [flat_param for layout in self.layouts for flat_param in layout.flat_params]

    @property
    def trained_numel(self) -> int:
        """Elements of this rank's shards of flat parameters that train, padding included."""
        return sum(flat_param.layout.shard_numel for flat_param in self.flat_params if flat_param.kind.trains)

    def scratch_of(self, flat_param: FlatParam) -> tuple[int, int]:
        """Where the scratch of a flat parameter's reductions begins in its unit's scratch, and its bytes."""
        start = n_bytes = 0
        for own in self.layouts[flat_param.unit].flat_params:
            start += n_bytes
            n_bytes = self.scratch_numel(own) * own.kind.grad_dtype.itemsize if own.kind.trains else 0
            if own.tag == flat_param.tag:
                break
        return start, n_bytes

    def scratch_bytes(self, unit: int) -> int:
        """Bytes of the scratch of a unit's reductions."""
        return sum(self.scratch_of(self.layouts[unit].flat_params[-1]))


def largest_of(slot_of: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """By slot, the largest of the `sizes` of its units."""
    largest: dict[int, int] = {}
    for slot, size in zip(slot_of, sizes, strict=True):
        largest[slot] = max(largest.get(slot, 0), size)
    return largest


def expected_bytes(sizing: Sizing, plan: SlotPlan) -> dict[Category, int]:
    """Bytes by category. See [Note: memory]."""
    layouts, is_alone = sizing.layouts, sizing.world_size == 1
    found = dict.fromkeys(Category, 0)
    for flat_param in sizing.flat_params:
        kind, numel = flat_param.kind, flat_param.layout.shard_numel
        lies_in_slot = plan.keeps_weights and not is_alone  # the shard is a range of the unit's slot
        if not (lies_in_slot and kind.main_dtype is kind.compute_dtype):
            kept_as = Category.MAIN_WEIGHTS if kind.trains else Category.FROZEN_WEIGHTS
            found[kept_as] += kind.main_dtype.itemsize * numel
        if not lies_in_slot and kind.main_dtype is not kind.compute_dtype:
            found[Category.COMPUTE_SHARDS] += kind.compute_dtype.itemsize * numel
        if kind.trains:
            found[Category.MAIN_GRADS] += 4 * numel
    groups = {sizing.world_size, sizing.world_size * sizing.replicas} - {1}  # numbers of ranks whose flags arrive
    found[Category.FLAGS] = (1 + sum(groups) if groups else 0) * sum(len(layout.params) for layout in layouts)
    if not is_alone:
        scratch = [sizing.scratch_bytes(unit) for unit in range(len(layouts))]
        for category, slot_of, sizes in (
            (Category.WEIGHT_SLOTS, plan.weights, [layout.weight_bytes for layout in layouts]),
            (Category.GRAD_SLOTS, plan.grads, [layout.grad_bytes for layout in layouts]),
            (Category.SCRATCH, plan.scratch, scratch),
        ):
            found[category] = sum(largest_of(slot_of, sizes).values())
    return found


def read_budget(budget: MemoryBudget, device: torch.device, replaced: int = 0) -> int:
    """`budget` in bytes.

    Args:
        budget: bytes, text such as ``"70GiB"``, or a share (0 to 1) of the free memory of `device` now.
        device: where the model will live.
        replaced: bytes of the model on the device now; its shards replace them, so they count as free.

    Raises:
        ConfigError: `budget` cannot be read, or is not positive.
    """
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ConfigError(f"memory_budget={budget!r}: wanted a share of the free memory between 0 and 1")
        return int(budget * free_bytes(device, replaced))
    return parse_bytes("memory_budget", budget)


def choose_slots(sizing: Sizing, budget: int) -> tuple[SlotPlan, str]:
    """The most slots with which the engine's buffers and Adam's moments fit into `budget` bytes.

    Weight slots come first: each saves an all-gather in every step. "all" grad slots save reductions only if gradients
    are accumulated.

    Returns:
        The plan, and the reason in a sentence.

    Raises:
        ConfigError: not even two slots of each kind fit; says what is missing.
    """
    counts = range(sum(sizing.shared) - 1, 2, -1)
    candidates: list[tuple[SlotCount, SlotCount]] = [("all", "all"), ("all", 2), *((n, 2) for n in counts), (2, 2)]
    for weight_slots, grad_slots in candidates:
        plan = plan_slots(sizing.shared, weight_slots, grad_slots)
        total = _MOMENTS_BYTES * sizing.trained_numel + sum(expected_bytes(sizing, plan).values())
        if total <= budget:
            return plan, f"weight_slots={weight_slots!r}, grad_slots={grad_slots!r}: {_mib(total)} of {_mib(budget)}"
    raise ConfigError(
        f"memory_budget is {_mib(budget)}, but weight_slots=2, grad_slots=2 with Adam's moments take {_mib(total)} on "
        f"each of {sizing.world_size} rank(s): {_mib(total - budget)} are missing. Use more ranks, a 16-bit "
        "param_dtype or grad_dtype, or smaller units"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"
