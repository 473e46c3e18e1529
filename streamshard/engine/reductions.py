"""Gradients on their way out of a backward: into the grad slot, over ranks, over replicas, to the optimizer.

The engine says when a unit's turn is over; here is what happens to its gradients then, and who is still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import AllWork, Fence, Rule, StreamName, Work
from streamshard.engine.replicas import Replicas
from streamshard.engine.used import UsedParams
from streamshard.unit.buffers import Ledger
from streamshard.unit.unit import StreamedUnit

__all__ = ["Reductions"]


class Reductions:
    """The reductions of one backward. Owns the fence that the optimizer waits behind.

    Args:
        units: all units.
        ranks: reduces.
        ledger: allocates the flags of `UsedParams`.
        replicas: of a 2-D mesh.

    Attributes:
        due: indices of units whose reduction the program still has.
        used: agrees on which parameters had a gradient.
        check: raises if a reduced gradient is not finite; None: nobody asked.
    """

    def __init__(self, units: Sequence[StreamedUnit], ranks: Ranks, ledger: Ledger, replicas: Replicas | None) -> None:
        self.ranks = ranks
        self.replicas = replicas
        self.due: set[int] = set()
        self.check: Callable[[], None] | None = None
        self._units = units
        self._under_way: list[Work] = []
        self.used = UsedParams(units, ranks, ledger, None if replicas is None else replicas.ranks)
        self._done = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "main grads")

    def take(self, unit: StreamedUnit, param_index: int, grad: torch.Tensor) -> None:
        """A complete gradient moves into the unit's grad slot, which is opened for it (rule 3)."""
        if not unit.grads.is_open:
            self._open(unit)
        elif unit.grads.slot is None and self.replicas is not None:
            self.replicas.finish_average(unit)
        unit.grads.write(param_index, grad)
        self.ranks.transport.progress()

    def _open(self, unit: StreamedUnit) -> None:
        slot = unit.grads.slot
        if slot is not None and slot.content is not None:  # gradients that come in several parts
            earlier = self._units[slot.content]
            if earlier.index in self.due:  # not on every rank, perhaps: the program has one place for its reduction
                earlier.grads.park()
            else:
                self.start(earlier)
        if self.replicas is not None:
            self.replicas.finish_average(unit)
        with self.ranks.guard("the reduction before that of", unit.name):
            unit.grads.open()

    def start(self, unit: StreamedUnit) -> None:
        """The unit's gradients are all written (rule 4). Zeros where this rank has none: others may have some."""
        if not (unit.is_trainable or unit.grads.waits):
            return
        if not unit.grads.is_open:
            if unit.grads.slot is None and self.replicas is None:
                return
            self._open(unit)
        with self.ranks.guard("the reduction of", unit.name):
            work = unit.grads.start_reduce()
        if work is not None:
            self._under_way.append(work)
        if self.replicas is not None:
            self.replicas.add(unit, work)

    def start_late_ones(self) -> None:
        """Reduce gradients of blocks that came after their unit's turn."""
        for unit in self._units[1:]:
            if unit.grads.has_unreduced:
                self.start(unit)

    def finish(self) -> list[nn.Parameter]:
        """Let the optimizer go on once all is reduced; the parameters that have a new gradient."""
        reduced = [unit for unit in self._units if unit.grads.reductions]
        self.used.start()
        self.complete()
        used = self.used.finish()
        return [param for unit in reduced for param in unit.grads.finish(used[unit.index])]

    def complete(self) -> None:
        """Wait for all that is under way."""
        with self.ranks.guard("the last reductions of a backward"):
            if self.replicas is not None:
                self.replicas.finish()
            works, self._under_way = self._under_way, []
            self._done.record(AllWork(works))
            self._done.wait()  # rule 7: no optimizer step reads main grads that are still being reduced
