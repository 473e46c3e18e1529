"""Gradients on their way out of a backward: into the grad slot, over ranks, over replicas, to the optimizer.

The engine says when a unit's turn is over; here is what happens to its gradients then, and who is still under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from streamshard.comm.streams import AllWork, Fence, Rule, StreamName, Work
from streamshard.comm.transport import Transport
from streamshard.engine.replicas import Replicas
from streamshard.engine.used import UsedParams
from streamshard.unit.buffers import Ledger
from streamshard.unit.unit import StreamedUnit

__all__ = ["Reductions"]


class Reductions:
    """The reductions of one backward. Owns the fence that the optimizer waits behind.

    Args:
        units: all units.
        transport: reduces.
        ledger: allocates the flags of `UsedParams`.
        replicas: of a 2-D mesh.

    Attributes:
        due: indices of units whose reduction the program still has.
        grad_scale: gradients are multiplied by it before they are reduced.
        used: agrees on which parameters had a gradient.
        check: raises if a reduced gradient is not finite; None: nobody asked.
    """

    def __init__(
        self, units: Sequence[StreamedUnit], transport: Transport, ledger: Ledger, replicas: Replicas | None
    ) -> None:
        self.transport = transport
        self.replicas = replicas
        self.due: set[int] = set()
        self.grad_scale = 1.0
        self.check: Callable[[], None] | None = None
        self._units = units
        self._under_way: list[Work] = []
        self.used = UsedParams(units, transport, ledger, None if replicas is None else replicas.transport)
        self._done = Fence(transport.streams, Rule.STEP_BOUNDARY, StreamName.COMM, "main grads")

    def take(self, unit: StreamedUnit, place: int, grad: torch.Tensor) -> None:
        """A complete gradient moves into the unit's grad slot, which is opened for it (rule 3)."""
        slot = unit.grad_slot
        if slot is not None:
            if slot.content != unit.index:
                self._open(unit)
        elif not any(unit.used):
            self._open(unit)
        elif self.replicas is not None:
            self.replicas.settle(unit)
        unit.write_grad(place, grad if self.grad_scale == 1.0 else grad * self.grad_scale)
        self.transport.progress()

    def _open(self, unit: StreamedUnit) -> None:
        slot = unit.grad_slot
        if slot is not None and slot.content is not None:  # gradients that come in several parts
            earlier = self._units[slot.content]
            if earlier.index in self.due:  # not on every rank, perhaps: the program has one place for its reduction
                earlier.set_grads_aside()
            else:
                self.start(earlier)
        if self.replicas is not None:
            self.replicas.settle(unit)
        with self.transport.guard("the reduction before that of", unit.name):
            unit.open_grads()

    def start(self, unit: StreamedUnit) -> None:
        """The unit's gradients are all written (rule 4). Zeros where this rank has none: others may have some."""
        if not unit.is_trainable:
            return
        slot = unit.grad_slot
        if slot is None:
            if not any(unit.used):
                if self.replicas is None:
                    return
                self._open(unit)
        elif slot.content != unit.index:
            self._open(unit)
        with self.transport.guard("the reduction of", unit.name):
            work = unit.start_reduce()
        if work is not None:
            self._under_way.append(work)
        if self.replicas is not None:
            self.replicas.add(unit, work)

    def start_late_ones(self) -> None:
        """Reduce gradients of blocks that came after their unit's turn."""
        for unit in self._units[1:]:
            if unit.has_unreduced:
                self.start(unit)

    def finish(self) -> list[nn.Parameter]:
        """Let the optimizer go on once all is reduced; the parameters that have a new gradient."""
        reduced = [unit for unit in self._units if unit.reductions]
        self.used.start()
        self.complete()
        used = self.used.finish()
        return [param for unit in reduced for param in unit.finish_reduce(used[unit.index])]

    def complete(self) -> None:
        """Wait for all that is under way."""
        with self.transport.guard("the last reductions of a backward"):
            works, self._under_way = self._under_way, []
            if self.replicas is not None:
                works += self.replicas.take_works()
            self._done.record(AllWork(works))
            self._done.wait()  # rule 5: no optimizer step reads main grads that are still being reduced
