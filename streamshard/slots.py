"""The preallocated buffers: every byte the engine holds is allocated here, once, under a category.

Public names in the order data meets them: `Ledger` allocates, `assign_slots` binds units to slots, `WeightSlot` and
`GradSlot` are the full-unit buffers. See [Note: slots].

[Note: slots]
A unit always uses the same slots, so every compute view is made once and all addresses stay fixed. Blocks share the
block slots by parity (block i uses slot ``i % count``), sized by the largest block. A unit that is not one of several
of its kind (the edge unit, a lone large embedding given as a unit) has slots of its own, so that it does not size the
others'. With one rank there are none: views bind to the compute shard, gradients go to the main grads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from streamshard.streams import Fence, Rule, StreamName, Streams

__all__ = ["Category", "GradSlot", "Ledger", "WeightSlot", "assign_slots"]


class Category(enum.Enum):
    """What a buffer is for; the rows of the memory report."""

    MAIN_WEIGHTS = "main weights"
    MAIN_GRADS = "main grads"
    COMPUTE_SHARDS = "compute shards"
    WEIGHT_SLOTS = "weight slots"
    GRAD_SLOTS = "grad slots"
    SCRATCH = "scratch"
    FLAGS = "flags"


class Ledger:
    """Allocates buffers and knows them all. Owns every buffer of the engine.

    Args:
        device: where buffers live.
        allocate_visible: allocates what other ranks may read, see `Transport.allocate_visible`.
    """

    def __init__(
        self, device: torch.device, allocate_visible: Callable[[int, torch.dtype], torch.Tensor] | None = None
    ) -> None:
        self.device = device
        self._allocate_visible = allocate_visible
        self.buffers: list[tuple[Category, torch.Tensor]] = []

    def allocate(self, category: Category, numel: int, dtype: torch.dtype, *, is_visible: bool = False) -> torch.Tensor:
        """A new buffer [numel] of zeros, so that padding never holds a NaN.

        Args:
            category, numel, dtype: what, how much, of which type.
            is_visible: whether other ranks may read it (compute shards, grad slots).
        """
        if is_visible and self._allocate_visible is not None:
            buffer = self._allocate_visible(numel, dtype)
        else:
            buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self.buffers.append((category, buffer))
        return buffer

    def held_bytes(self, category: Category) -> int:
        """Bytes held under `category`, counted on the live tensors."""
        return sum(buffer.untyped_storage().nbytes() for kind, buffer in self.buffers if kind is category)


def assign_slots(shared: Sequence[bool], count: int) -> list[int]:
    """The slot of each unit, by unit index.

    Args:
        shared: whether the unit shares the block slots.
        count: number of block slots, at least 1; more than there are blocks are not used.

    Returns:
        Block slots are 0 .. count - 1; every other unit gets a number of its own above.
    """
    slots, block, own = [], 0, count
    for is_shared in shared:
        if is_shared:
            slots.append(block % count)
            block += 1
        else:
            slots.append(own)
            own += 1
    return slots


class WeightSlot:
    """A full-unit buffer in param_dtype. Owns its two fences.

    Attributes:
        buffer: [numel of its largest unit] param_dtype.
        content: index of the unit whose weights it holds or is receiving; None if nobody's.
        arrived: rule 1, set after the gather.
        released: rule 2, set after a unit's last use.
        is_shared: whether several units take turns in it.
    """

    def __init__(self, buffer: torch.Tensor, streams: Streams, what: str, *, is_shared: bool) -> None:
        self.buffer = buffer
        self.is_shared = is_shared
        self.content: int | None = None
        self.arrived = Fence(streams, Rule.WEIGHTS_ARRIVED, StreamName.COMM, what)
        self.released = Fence(streams, Rule.SLOT_RELEASED, StreamName.COMPUTE, what)


class GradSlot:
    """A full-unit buffer in the gradient dtype. Owns its two fences.

    Attributes:
        buffer: [numel of its largest unit] slot_grad_dtype.
        scratch: what reductions from this slot need beside it, same dtype.
        content: index of the unit whose unreduced gradients it holds; None if nobody's.
        written: rule 4, set after a unit's last gradient.
        drained: rule 3, set after the reduction.
    """

    def __init__(self, buffer: torch.Tensor, scratch: torch.Tensor, streams: Streams, what: str) -> None:
        self.buffer = buffer
        self.scratch = scratch
        self.content: int | None = None
        self.written = Fence(streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, what)
        self.drained = Fence(streams, Rule.GRADS_DRAINED, StreamName.COMM, what)
