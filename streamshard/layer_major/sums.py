"""Slots in which the gradients of all micro-batches of a step are added, in fp32, before they are reduced.

A slot that holds weights and then gradients cannot take them: the next micro-batch needs the weights. So units take
turns in two slots for sums: one is reduced while micro-batches of the next layer add to the other one. Embedding, head
and all large units share the first slot, so that the second is as large as a layer. The root unit, which any layer may
use, has one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from streamshard.core.engine import ROOT_UNIT, Engine
from streamshard.core.slots import GradSlot, Scratch
from streamshard.core.unit import Unit
from streamshard.planning.memory import Category


class Sums:
    """See the module. Allocated once; later steps use them again.

    Args:
        engine: the model's.
    """

    def __init__(self, engine: Engine) -> None:
        self._swaps: list[tuple[Any, str, Any]] = []  # objects, attributes, and their values at other times
        if engine.plan.keeps_grads:
            return  # each unit has a gradient slot of its own
        layers = [unit for unit in engine.units if unit.is_streamed and unit.index not in engine.plan.ends]
        most = max(map(_numel, layers), default=0)
        groups: dict[str, list[Unit]] = {}
        for unit in engine.units:
            is_second = unit.index % 2 == 1 and _numel(unit) <= most
            name = "the root unit's sums" if unit.index == ROOT_UNIT else f"sum slot {int(is_second)}"
            if unit.trained:
                groups.setdefault(name, []).append(unit)
        for name, units in groups.items():
            self._give_slot(engine, units, name)

    def _give_slot(self, engine: Engine, units: Sequence[Unit], name: str) -> None:
        ledger, scratches = engine.ledger, [_scratch_numels(unit) for unit in units]
        scratch = Scratch(4 * max(map(sum, scratches)), ledger, keeps_memory=False)
        # Visible: CPU ranks of one machine sum gradients where each rank has them.
        buffer = ledger.allocate(Category.GRAD_SLOTS, 4 * max(map(_numel, units)), torch.uint8, is_visible=True)
        slot = GradSlot(buffer, None, engine.streams, scratch, name)
        whole, room = buffer.view(torch.float32), scratch.buffer.view(torch.float32)
        for unit, numels in zip(units, scratches, strict=True):
            sizes = [flat.layout.padded_numel for flat in unit.trained]
            # Not strict: the last range, which larger units use, belongs to no flat parameter of this one.
            given = zip(unit.trained, whole.split([*sizes, len(whole) - sum(sizes)]), strict=False)
            parts = room.split([*numels, len(room) - sum(numels)])
            self._swaps.append((unit.grads, "slot", slot))
            for (flat, grads), part in zip(given, parts, strict=False):
                self._swaps += [(flat, "grads", grads), (flat, "scratch", part)]
                self._swaps += ((param, "in_slot", flat.part_of(grads, param.layout)) for param in flat.params)
        scratch.drop()  # not before: torch makes no view without memory

    def swap(self) -> None:
        """Let units add their gradients in these slots; called again, in their own slots. No gradient waits."""
        swaps, self._swaps = self._swaps, []
        for thing, name, value in swaps:
            self._swaps.append((thing, name, getattr(thing, name)))
            setattr(thing, name, value)


def _numel(unit: Unit) -> int:
    """Elements of the flat parameters that train, with padding."""
    return sum(flat.layout.padded_numel for flat in unit.trained)


def _scratch_numels(unit: Unit) -> list[int]:
    """Of each flat parameter that trains, fp32 elements of scratch for its reduction."""
    return [flat.scratch_numel(torch.float32, 4 * flat.layout.padded_numel) for flat in unit.trained]
