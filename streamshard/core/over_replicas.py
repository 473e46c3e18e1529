"""Reductions over replicas, each behind the same unit's reduction in the shard group.

A backward inside ``no_sync()`` leaves its gradients summed in the shard group. The first backward outside reduces the
sums over replicas, also of units that it does not reach itself.

On CPUs the host has to complete a reduction before the one over replicas can start. It does so when the next unit's
reduction starts: by then the first one is usually over.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.core.unit import Unit


class OverReplicas(abc.ABC):
    """The reductions over replicas of one model. Owns the fences around them.

    Args:
        ranks: the ranks with the same place in each replica.
        what: the tensors that they reduce, for messages.
    """

    def __init__(self, ranks: Communicator, what: str) -> None:
        self.ranks = ranks
        self._is_synced = True
        self._left: dict[int, Unit] = {}  # by index: reduced inside no_sync()
        self._last: Unit | None = None  # reduced in the shard group, not over replicas
        self._under_way: dict[int, Fence] = {}  # by unit
        self._reduced = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, what, StreamName.REPLICA)

    def begin(self, *, is_synced: bool) -> None:
        """A backward begins, outside of ``no_sync()`` (True) or inside."""
        self._is_synced = is_synced

    @property
    def leaves_grads(self) -> bool:
        """A backward inside ``no_sync()`` leaves its gradients here."""
        return True

    def receive(self, unit: Unit) -> bool:
        """The reduction of `unit` in the shard group comes next. Returns whether it adds to sums of other replicas."""
        return False

    def add(self, unit: Unit, reduction: Sequence[Work | None]) -> None:
        """The reduction of `unit` in the shard group was started. The host need not complete None."""
        if not self._is_synced:
            self._left[unit.index] = unit
            return
        self._left.pop(unit.index, None)
        self._last = unit
        self._reduced.record(*reduction)
        if not self._reduced.works:
            self.flush()

    def flush(self) -> None:
        """Start the reduction over replicas of the unit that was added last."""
        unit, self._last = self._last, None
        if unit is not None:
            with self.ranks.waiting("the reduction over replicas of", unit.name):
                self._reduced.wait()  # rule 7
                self._start(unit)

    @abc.abstractmethod
    def _start(self, unit: Unit) -> None:
        """Start the reduction of `unit`."""

    def finish_before(self, unit: Unit) -> None:
        """More gradients of `unit` are about to be written. The reduction of the unit before starts."""
        self.flush()
        with self.ranks.waiting("the reduction over replicas of", unit.name):
            self._finish_one(unit.index)

    @abc.abstractmethod
    def _finish_one(self, index: int) -> None:
        """The next reduction of the unit with this index may start afterwards."""

    def finish(self) -> None:
        """The backward is over: let the compute stream wait for all main grads."""
        self.flush()
        for index in sorted(self._left) if self._is_synced else ():
            self.add(self._left[index], ())
        under_way, self._under_way = self._under_way, {}
        for arrived in under_way.values():
            arrived.wait()  # rule 7

    def forget(self) -> None:
        """A backward has failed: all gradients are discarded."""
        self._left.clear()
