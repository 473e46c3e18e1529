"""Embedding and head take turns with the blocks, once the first passes have shown that they can. See [Note: ends].

`Ends` watches these passes. Each rank then tells the others how it has used each candidate, and all decide alike: the
embedding joins if layers alone use it, before the first block; the head joins if everything that uses it comes behind
the last block. Otherwise the unit keeps its own slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from streamshard.comm.communicator import Communicator
from streamshard.core.allocation import join_slots
from streamshard.core.slots import Ledger
from streamshard.core.unit import Unit
from streamshard.planning.memory import SlotPlan, choose_ends

_ATTEMPTS = 10  # passes in which a rank may not be ready; then all units keep their slots


class Ends:
    """Watches the first passes with gradients.

    Args:
        candidates: indices of the resident units that may join the block slots.
        tables: those of them that look up rows of their weights.
        units: all of the model.
        ledger: owns the buffers of slots.

    Attributes:
        elsewhere: units of which something else is used too, between blocks say.
        saved: units whose weights backward needs.
        is_decided: no further pass is watched.
    """

    def __init__(
        self, candidates: Collection[int], tables: Collection[int], units: Sequence[Unit], ledger: Ledger
    ) -> None:
        self.elsewhere: set[int] = set()
        self.saved: set[int] = set()
        self.is_decided = False
        self._candidates = candidates
        self._tables = tables
        self._units, self._ledger = units, ledger
        self._early: set[int] = set()
        self._late: set[int] = set()
        self._so_far: set[int] = set()  # used in this pass, before its first block or behind its latest one
        self._has_block = False  # this pass has used one
        self._waiting: list[weakref.ref[object]] = []  # graphs that no backward has been through
        self._attempts = 0

    # -- what passes do -------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward begins."""
        self._so_far.clear()
        self._has_block = False

    def use(self, unit: Unit, *, is_read: bool = False, is_inside: bool = False) -> None:
        """A forward uses the weights of `unit`.

        Args:
            unit: not the root unit.
            is_read: by code outside of its layers. A view of the weights may live on.
            is_inside: in a layer of a block.
        """
        # What was used since the block before lies between blocks, or before the first.
        if unit.is_streamed:
            (self.elsewhere if self._has_block else self._early).update(self._so_far)
            self._so_far.clear()
            self._has_block = True
        elif is_inside or (is_read and not self._has_block):
            self.elsewhere.add(unit.index)
        else:
            self._so_far.add(unit.index)

    def end_pass(self, graph: object) -> None:
        """A forward with gradients is over."""
        if self._has_block:  # else this pass does not show on which side units are
            self._late.update(self._so_far)
        self._waiting.append(weakref.ref(graph))

    def end_backward(self, graphs: Collection[object]) -> None:
        """A backward has been through `graphs`."""
        self._waiting = [ref for ref in self._waiting if ref() is not None and ref() not in graphs]

    # -- the decision ---------------------------------------------------------------------------------------------

    def decide(self, order: Sequence[int], plan: SlotPlan, ranks: Communicator) -> SlotPlan | None:
        """A forward with gradients begins, and the order of units is settled: join, or not. Collective.

        A graph that waits for its backward may have saved views of the weights. Then the next pass decides.

        Args:
            plan, ranks: the engine's.
            order: in which passes use the units.

        Returns:
            The plan in which embedding and head take turns with the blocks; None while, or because, they do not.
        """
        self._attempts += 1
        has_grads = any(unit.grads.slot.content is not None for unit in self._units)  # slots with gradients cannot move
        is_ready = not has_grads and all(ref() is None for ref in self._waiting)
        seen = self._early, self._late, self.elsewhere, self.saved
        votes: list[Any] = ranks.gather_objects("decide which units share a slot", seen if is_ready else None)
        self.is_decided = None not in votes or self._attempts == _ATTEMPTS
        if None in votes:  # some rank's graph or gradients need the slots as they are
            return None
        early, late, elsewhere, saved = (set[int]().union(*each) for each in zip(*votes, strict=True))
        elsewhere |= early & late
        return self._join(order, plan, early - elsewhere, late - elsewhere, saved)

    def predict(self, plan: SlotPlan) -> SlotPlan | None:
        """The plan of most models: units are used in the order of registration, by calls of their layers."""
        blocks = [index for index, streamed in enumerate(plan.is_streamed) if streamed]
        early = {index for index in self._candidates if blocks and index < blocks[0]}
        late = {index for index in self._candidates if blocks and index > blocks[-1]}
        return self._join(range(len(self._units)), plan, early, late, early.difference(self._tables))

    def _join(
        self, order: Sequence[int], plan: SlotPlan, early: set[int], late: set[int], saved: Collection[int]
    ) -> SlotPlan | None:
        blocks = [place for place, unit in enumerate(order) if plan.is_streamed[unit]]
        before = {unit for unit in early.intersection(self._candidates) if order.index(unit) < blocks[0]}
        behind = {unit for unit in late.intersection(self._candidates) if order.index(unit) > blocks[-1]}
        ends = choose_ends(plan, [unit.layout.weight_bytes for unit in self._units], before, behind)
        if not ends:
            return None
        joined = plan.join(ends, (ends & before).intersection(self._tables).difference(saved))
        join_slots(self._units, joined, self._ledger)
        return joined
