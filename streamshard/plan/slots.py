"""Which unit uses which slot. Pure data.

[Note: slots].

[Note: slots]
A unit always uses the same slots, so every compute view is made once and all addresses stay fixed. Blocks share the
block slots by parity (block i uses slot ``i % count``), sized by the largest block. A unit that is not one of several
of its kind (the root unit, embedding and head, a lone layer given as a unit) has slots of its own, so that it does not
size the others'; so has a unit of several layers if one of them is such a one. It *stays*: what is gathered is in place
until the backward is over, and takes as much memory as in one root unit. With "all" every block has a slot of its own:
nothing is gathered twice in a step (ZeRO-2), gradients can be accumulated where they are written (ZeRO-1), and what a
rank owns of a unit is a range of the unit's slot wherever the dtype is the same, not memory of its own. With one rank
there are no slots: views bind to the compute shard, gradients go to the main grads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamshard.config import SlotCount

__all__ = ["SlotPlan", "plan_slots"]


class SlotPlan(NamedTuple):
    """Which unit uses which slot. Pure data.

    Attributes:
        shared: by unit, whether it is one of several of its kind, which take turns in the block slots.
        weights: by unit, its weight slot.
        grads: by unit, its grad slot.
        scratch: by unit, the scratch of its reductions.
        keeps_weights: every unit has a weight slot of its own, which holds its compute shard too.
        keeps_grads: every unit has a grad slot of its own, which gradients may stay in from one backward to the next.
    """

    shared: tuple[bool, ...]
    weights: tuple[int, ...]
    grads: tuple[int, ...]
    scratch: tuple[int, ...]
    keeps_weights: bool
    keeps_grads: bool


def plan_slots(shared: Sequence[bool], weight_slots: SlotCount, grad_slots: SlotCount) -> SlotPlan:
    """Bind units to slots.

    Args:
        shared: by unit, whether it shares the block slots.
        weight_slots, grad_slots: number of block slots, or "all": as many as there are blocks.
    """
    grads = _assign(shared, grad_slots)
    return SlotPlan(
        tuple(shared),
        tuple(_assign(shared, weight_slots)),
        tuple(grads),
        # With a slot each, two reductions under way are enough: a scratch each would be another model / N.
        tuple(unit % 2 for unit in range(len(shared))) if grad_slots == "all" else tuple(grads),
        weight_slots == "all",
        grad_slots == "all",
    )


def _assign(shared: Sequence[bool], count: SlotCount) -> list[int]:
    """Block slots are 0 .. count - 1, more than there are blocks are not used; other units get numbers above."""
    blocks = sum(shared)
    own = blocks if count == "all" else min(count, blocks)
    turns = max(own, 1)
    slots: list[int] = []
    block = 0
    for is_shared in shared:
        if is_shared:
            slots.append(block % turns)
            block += 1
        else:
            slots.append(own)
            own += 1
    return slots
