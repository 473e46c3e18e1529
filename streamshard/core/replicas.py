"""Reductions over the replicas of a 2-D mesh (replicate x shard), each behind the same unit's in the shard group.

Gradients are reduced within a shard group first, so only 1/N of them crosses the replicate axis, in fp32 (FSDP's
HYBRID_SHARD, ZeRO++'s hierarchy). Reductions over replicas run on a stream of their own, beside later all-gathers and
reductions, while backward goes on. `Replicas` averages main grads; see [Note: averages].
`streamshard.core.outer_shards` cuts state over replicas too.

A backward inside ``no_sync()`` leaves its gradients summed in the shard group. The first backward outside reduces the
sums over replicas, also of units that it does not reach itself.

On CPUs the host has to complete a reduction before the one over replicas can start. It does so when the next unit's
reduction starts: by then the first one is usually over.

[Note: averages]
A unit's gradients may come in several parts in one backward, each with a reduction. Averaging an average again changes
nothing, so after each part all main grads of the unit are averaged: mean(mean(g) + h) = mean(g + h). For the same
reason a backward inside ``no_sync()`` averages nothing: the first backward outside averages the sums.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.core.unit import Unit


class OverReplicas(abc.ABC):
    """The reductions over replicas of one model. Owns the fences around them.

    Args:
        ranks: the ranks with the same place in each replica.
        what: the tensors that they reduce, for messages.

    Attributes:
        averages_grads: False while replicas train on their own (local SGD).
    """

    def __init__(self, ranks: Communicator, what: str) -> None:
        self.ranks = ranks
        self.averages_grads = self._is_synced = True
        self._left: dict[int, Unit] = {}  # by index: reduced inside no_sync()
        self._last: Unit | None = None  # reduced in the shard group, not over replicas
        self._under_way: dict[int, Fence] = {}  # by unit
        self._reduced = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, what, StreamName.REPLICA)

    def begin(self, *, is_synced: bool) -> None:
        """A backward begins, outside of ``no_sync()`` (True) or inside."""
        self._is_synced = is_synced

    def add(self, unit: Unit, reduction: Sequence[Work | None]) -> None:
        """The reduction of `unit` in the shard group was started. A work of None needs no completing."""
        if not self.averages_grads:
            return
        if not self._is_synced:
            self._left[unit.index] = unit
            return
        self._left.pop(unit.index, None)
        self._last = unit
        self._reduced.record(*reduction)
        # On CPUs the host would wait for this reduction first: it starts the average behind the next one.
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
            if unit.index in self._under_way:
                self._under_way.pop(unit.index).wait()  # rule 7

    def finish(self) -> None:
        """The backward is over: let the compute stream wait for all main grads."""
        self.flush()
        for index in sorted(self._left) if self._is_synced else ():  # one order on all replicas
            self.add(self._left[index], ())
        under_way, self._under_way = self._under_way, {}
        for arrived in under_way.values():
            arrived.wait()  # rule 7

    def forget(self) -> None:
        """A backward has failed: all gradients are discarded."""
        self._left.clear()


class Replicas(OverReplicas):
    """The other holders of this rank's shard. Owns its fences.

    Args:
        ranks: the replicate axis.

    Attributes:
        optimizers: each `LocalSGD` of the model that somebody still has.
    """

    def __init__(self, ranks: Communicator) -> None:
        super().__init__(ranks, "main grads to average")
        self.optimizers: WeakSet[Any] = WeakSet()

    def _start(self, unit: Unit) -> None:
        # One for each: the averages of several units are under way.
        averaged = Fence(self.ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, "averaged main grads")
        averaged.record(*[self.ranks.transport.start_average(flat.main_grads, flat.tag) for flat in unit.trained])
        self._under_way[unit.index] = averaged

    def average(self, parts: Iterable[list[torch.Tensor]]) -> None:
        """Replace tensors by their means over replicas, one part after the other. Then the compute stream may use them.

        Args:
            parts: each a list of tensors of one dtype, any shape; the same lists on all replicas.
        """
        with torch.no_grad():
            for tensors in filter(None, parts):
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                if flat.numel():
                    self.ranks.average_now(flat)
                for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
