"""Units whose weights are read while no layer of theirs runs: in place if they stay, borrowed if they take turns.

Who reads them is `streamshard.engine.away`'s and the saved-tensor hooks' affair; here the engine is asked for them, and
given back what it lent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from streamshard.engine.engine import Engine
from streamshard.engine.passes import Use
from streamshard.unit.unit import Member, StreamedUnit

__all__ = ["Borrowed", "borrow", "owner_of", "read", "unit_at", "use_of"]


class Borrowed(NamedTuple):
    """A unit that is in its slot for somebody else's sake.

    Attributes:
        engine: whose.
        unit: is in its slot.
        evicted: layers of another unit that were bound, and computing perhaps, when it came.
        use: what saved tensors refer to; None where somebody else's hooks take care of them.
    """

    engine: Engine
    unit: StreamedUnit
    evicted: list[Member]
    use: Use | None

    def give_back(self) -> None:
        """The slot goes back to whom it was taken from: layers that had to leave find their weights again."""
        self.unit.weight_slot.released.record()
        for member in self.evicted:
            self.engine.bring_back(member)


def borrow(engine: Engine, unit: StreamedUnit) -> Borrowed:
    """Weights of `unit`, which takes turns, are read: they are in its slot until they are given back."""
    engine.begin_if_asked()
    content = unit.weight_slot.content
    holder = None if content is None or content == unit.index else engine.units[content]
    evicted = [member for member in holder.members if member.is_bound] if holder is not None else []
    # Only the innermost saved-tensor hooks are called. A running layer's are ours, in a recomputation too; others',
    # such as a checkpoint's around the root's own code, have to see the same number of tensors both times.
    is_ours = engine.is_in_layer
    if engine.is_in_forward:
        is_ours = is_ours or torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    engine.acquire(unit)  # beside the program, which would take the running layer's turn to be over
    if engine.is_in_forward:
        engine.depart(unit)
        unit.take_trainability()
    return Borrowed(engine, unit, evicted, use_of(engine, unit) if is_ours else None)


def read(engine: Engine, unit: StreamedUnit) -> None:
    """Weights of `unit`, which stays, are read: they are in place from here on.

    Its compute views may go into the graph: backward finds them as they are. Nobody says when they are read last: a
    slot of a unit's own is gathered into only behind a cast, before which all computing was (rule 5).
    """
    engine.begin_if_asked()
    if not engine.is_in_forward:
        engine.acquire(unit)
    elif unit is not engine.edge:
        engine.use_in_place(unit)


def use_of(engine: Engine, unit: StreamedUnit) -> Use:
    """What refers to weights of `unit` that are read in the pass under way, or the one that is recomputed."""
    return Use(unit, engine.pass_, unit.versions(), is_borrowed=True)


def owner_of(engine: Engine, tensor: torch.Tensor | None) -> tuple[StreamedUnit, int] | None:
    """The unit whose compute view `tensor` is, and which of its parameters'; None if it is none."""
    for unit in engine.units:
        if id(tensor) in unit.view_ids:
            return unit, next(index for index, view in enumerate(unit.views) if view is tensor)
    return None


def unit_at(engine: Engine, address: int) -> StreamedUnit | None:
    """The unit whose weights lie at `address`, of those that take turns in slots."""
    content = engine.turn_slots.content_at(address)
    return None if content is None else engine.units[content]
