"""Slots in which the gradients of all micro-batches of a step are added, in fp32, before they are reduced.

A slot that holds weights and then gradients cannot take them: the next micro-batch needs the weights. So units share a
slot for sums, one after the other. The root unit, which any layer may use, has one of its own.
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
        trained = [unit for unit in engine.units if unit.trained]
        for units in ([unit for unit in trained if unit.index == ROOT_UNIT], trained[trained[0].index == ROOT_UNIT :]):
            if units:
                self._give_slot(engine, units)

    def _give_slot(self, engine: Engine, units: Sequence[Unit]) -> None:
        ledger, scratches = engine.ledger, [_scratch_numels(unit) for unit in units]
        scratch = Scratch(4 * max(map(sum, scratches)), ledger)
        n_bytes = 4 * max(sum(flat.layout.padded_numel for flat in unit.trained) for unit in units)
        buffer = ledger.allocate(Category.GRAD_SLOTS, n_bytes, torch.uint8, is_visible=True)
        slot = GradSlot(buffer, None, engine.streams, scratch, "the sums of micro-batches")
        whole, room = buffer.view(torch.float32), scratch.buffer.view(torch.float32)
        for unit, numels in zip(units, scratches, strict=True):
            sizes = [flat.layout.padded_numel for flat in unit.trained]
            given = zip(unit.trained, whole.split([*sizes, len(whole) - sum(sizes)]), strict=False)
            parts = room.split([*numels, len(room) - sum(numels)])
            self._swaps.append((unit.grads, "slot", slot))
            for (flat, grads), part in zip(given, parts, strict=False):
                self._swaps += [(flat, "grads", grads), (flat, "scratch", part), (flat, "is_main_in_slot", False)]
                self._swaps += ((param, "in_slot", flat.part_of(grads, param.layout)) for param in flat.params)

    def swap(self) -> None:
        """Let units add their gradients in these slots; called again, in their own slots. No gradient waits."""
        swaps, self._swaps = self._swaps, []
        for thing, name, value in swaps:
            self._swaps.append((thing, name, getattr(thing, name)))
            setattr(thing, name, value)


def _scratch_numels(unit: Unit) -> list[int]:
    """Of each flat parameter that trains, fp32 elements of scratch for its reduction."""
    numels = []
    for flat in unit.trained:
        limit = 4 * flat.layout.padded_numel
        numels.append(flat.ranks.transport.scratch_numel(flat.layout.shard_numel, flat.kind.mode, torch.float32, limit))
    return numels
