"""State that is cut over all ranks of a 2-D mesh, while layers are gathered and reduced inside the shard group.

    main weights -all-gather over replicas-> shard -all-gather in the shard group-> weight slot
    gradient slot -reduction in the shard group-> staging -reduction over replicas-> main grads

With R replicas of N ranks a rank holds 16/(R N) bytes of state per parameter, and a shard of 1/N in the wire dtype.
Only weights that have changed cross between replicas: once per optimizer step, one unit after the other beside the
next forward. This is the hierarchical partition of ZeRO++ (hpZ), and Megatron-FSDP's sharding over the outer axis.

With ``Precision(sums_in_rank_order=True)`` all ranks exchange gradients, as on a 1-D mesh, and add them in one order.

Ranks are numbered replica by replica, as on a 1-D mesh of all ranks. So the shard of a rank consists of R pieces that
lie apart in the full tensors, and each all-gather and each reduction of a unit has R parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.core.params import FlatParam
from streamshard.core.slots import Ledger, WeightSlot
from streamshard.planning.layout import UnitLayout
from streamshard.planning.memory import Category


class OuterUnit(Protocol):
    """A unit whose state is cut over replicas too: a `streamshard.core.unit.Unit`."""

    index: int
    name: str
    weight_slot: WeightSlot
    flat_params: tuple[FlatParam, ...]
    trained: list[FlatParam]
    versions_sent: list[int]

    def versions(self) -> list[int]:
        """See `streamshard.core.unit.Unit.versions`."""


class OuterShards:
    """The exchanges of one model between replicas. Owns their fences and buffers.

    Args:
        layouts: of all units.
        ranks: the ranks with the same place in each replica.
        ledger: allocates.
        is_in_order: gradients are reduced over all ranks at once, in rank order.
    """

    def __init__(
        self, layouts: Sequence[UnitLayout], ranks: Communicator, ledger: Ledger, *, is_in_order: bool
    ) -> None:
        self.ranks, self.is_in_order = ranks, is_in_order
        streams, size = ranks.streams, ranks.world_size
        trained = [[flat.layout.shard_numel for flat in unit.flat_params if flat.kind.trains] for unit in layouts]
        most = 0 if is_in_order else max(map(sum, trained))
        self._staging = [ledger.allocate(Category.STAGING, size * most, torch.float32) for _ in range(2)]

        def scratch_numel(numel: int) -> int:
            return ranks.transport.scratch_numel(numel, ReductionMode.FP32, torch.float32, 4 * size * numel)

        room = 0 if is_in_order else max(sum(map(scratch_numel, unit)) for unit in trained)
        self._scratch = [ledger.allocate(Category.SCRATCH, room, torch.float32) for _ in range(2)]
        self._scratch_numel = scratch_numel
        replica, comm = StreamName.REPLICA, StreamName.COMM
        self._written = Fence(streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "main weights", replica)
        self._read = Fence(streams, Rule.SHARDS_READ, comm, "shards of all replicas", replica)
        arrived, drained = "shards of all replicas", "gradients for other replicas"
        self._arrived = [Fence(streams, Rule.SHARDS_WRITTEN, replica, arrived, comm) for _ in layouts]
        self._reduced = Fence(streams, Rule.RESULTS_ARRIVED, comm, drained, replica)
        self._drained = [Fence(streams, Rule.GRADS_DRAINED, replica, drained, comm) for _ in range(2)]
        self._turn = 0  # of staging
        self._buffers: list[torch.Tensor] = []  # of the reduction under way
        self._adds = False
        self._last: OuterUnit | None = None  # reduced in the shard group, not over replicas
        self._under_way: dict[int, Fence] = {}  # by unit

    # -- weights --------------------------------------------------------------------------------------------------

    def begin_pass(self, units: Iterable[OuterUnit]) -> None:
        """A forward begins: start to gather all weights that have changed, in the order of use."""
        for unit in units:
            self._gather(unit)

    def fetch(self, unit: OuterUnit) -> None:
        """Gather the unit's weights over replicas, if they have changed. Comm waits for them."""
        self._gather(unit)
        self._arrived[unit.index].wait()  # rule 5

    def _gather(self, unit: OuterUnit) -> None:
        now, before, place = unit.versions(), unit.versions_sent, 0
        changed: list[FlatParam] = []
        for flat in unit.flat_params:
            end = place + len(flat.params)
            if now[place:end] != before[place:end]:
                changed.append(flat)
            place = end
        unit.versions_sent = now
        if not changed:
            return
        self._written.record()
        self._written.wait()  # rule 5
        unit.weight_slot.read.complete()  # rule 6
        self._read.record()
        self._read.wait()  # rule 6
        with self.ranks.waiting("the gather over replicas of", unit.name):
            works = [self.ranks.transport.start_gather(flat.gather) for flat in changed]
            self._arrived[unit.index].record(*works)

    # -- gradients ------------------------------------------------------------------------------------------------

    def begin(self, *, is_synced: bool) -> None:
        """A backward begins."""

    def receive(self, unit: OuterUnit) -> bool:
        """Nothing comes from other replicas before the unit's reduction."""
        return False

    def begin_reduction(self, unit: OuterUnit, *, adds: bool) -> list[torch.Tensor]:
        """Buffers [R * shard_numel] for the unit's reductions in the shard group, one per flat parameter that trains.

        Args:
            unit: its gradients are written.
            adds: the reduction over replicas adds to main grads.
        """
        self._turn, self._adds = 1 - self._turn, adds
        self._drained[self._turn].wait()  # rule 3
        sizes = [self.ranks.world_size * flat.layout.shard_numel for flat in unit.trained]
        self._buffers = list(self._staging[self._turn].narrow(0, 0, sum(sizes)).split(sizes))
        return self._buffers

    def add(self, unit: OuterUnit, reduction: Sequence[Work | None]) -> None:
        """The reduction of `unit` in the shard group was started. Without works the host need not complete it."""
        self._last = unit
        self._reduced.record(*reduction)
        if not self._reduced.works:
            self.flush()

    def flush(self) -> None:
        """Start the reduction over replicas of the unit that was added last."""
        unit, self._last = self._last, None
        if unit is None:
            return
        sizes = [self._scratch_numel(flat.layout.shard_numel) for flat in unit.trained]
        parts = self._scratch[self._turn].narrow(0, 0, sum(sizes)).split(sizes)
        with self.ranks.waiting("the reduction over replicas of", unit.name):
            self._reduced.wait()  # rule 7
            works = [
                self.ranks.transport.start_reduce(
                    Reduction(buffer, flat.main_grads, part, ReductionMode.FP32, self._adds, flat.tag, divisor=1.0)
                )
                for flat, buffer, part in zip(unit.trained, self._buffers, parts, strict=True)
            ]
        drained = self._drained[self._turn]
        drained.record(*works)
        arrived = Fence(self.ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, "main grads")
        arrived.record(*works)
        self._under_way[unit.index] = arrived

    def finish_average(self, unit: OuterUnit) -> None:
        """More gradients of `unit` are about to be written. The unit before starts."""
        self.flush()
        if unit.index in self._under_way:  # the next reduction adds to this one; on a device they run in order
            with self.ranks.waiting("the reduction over replicas of", unit.name):
                self._under_way.pop(unit.index).complete()

    def finish(self) -> None:
        """The backward is over: let the compute stream wait for all main grads."""
        self.flush()
        under_way, self._under_way = self._under_way, {}
        for arrived in under_way.values():
            arrived.wait()  # rule 7
