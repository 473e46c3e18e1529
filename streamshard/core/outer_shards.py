"""State that is cut over all ranks of a 2-D mesh, while layers are gathered and reduced inside the shard group.

    main weights -all-gather over replicas-> shard -all-gather in the shard group-> weight slot
    gradient slot -reduction in the shard group-> staging -reduction over replicas-> main grads

With R replicas of N ranks a rank holds 16/(R N) bytes of state per parameter, and a shard of 1/N in the wire dtype.
Only weights that have changed cross between replicas: once per optimizer step, one unit after the other beside the
next forward. Inside ``no_sync()`` gradients are summed in the shard group, in 4/N bytes per parameter, which are
allocated then. This is the hierarchical partition of ZeRO++ (hpZ), and Megatron-FSDP's sharding over the outer axis.

With ``Precision(sums_in_rank_order=True)`` all ranks exchange gradients, as on a 1-D mesh, and add them in one order.

Ranks are numbered replica by replica, as on a 1-D mesh of all ranks. So the shard of a rank consists of R pieces that
lie apart in the full tensors, and each all-gather and each reduction of a unit has R parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.core.params import FlatParam
from streamshard.core.replicas import OverReplicas
from streamshard.core.slots import Ledger
from streamshard.core.unit import Unit
from streamshard.planning.layout import UnitLayout
from streamshard.planning.memory import Category


class OuterShards(OverReplicas):
    """The exchanges of one model between replicas. Owns their fences and buffers.

    Args:
        layouts: of all units.
        ranks: the ranks with the same place in each replica.
        ledger: allocates.
        is_in_order: gradients are reduced over all ranks at once, in rank order.
    """

    is_on_host = False

    def __init__(
        self, layouts: Sequence[UnitLayout], ranks: Communicator, ledger: Ledger, *, is_in_order: bool
    ) -> None:
        super().__init__(ranks, "gradients for other replicas")
        self.is_in_order = is_in_order
        streams, size = ranks.streams, ranks.world_size
        trained = [[flat.layout.shard_numel for flat in unit.flat_params if flat.kind.trains] for unit in layouts]
        most = 0 if is_in_order else max(map(sum, trained))  # in rank order gradients need no stop between

        def scratch_numel(numel: int) -> int:
            return ranks.transport.scratch_numel(numel, ReductionMode.FP32, torch.float32, 4 * size * numel)

        room = 0 if is_in_order else max(sum(map(scratch_numel, unit)) for unit in trained)
        self._scratch_numel = scratch_numel
        replica, comm = StreamName.REPLICA, StreamName.COMM
        self._written = Fence(streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "main weights", replica)
        arrived, drained = "shards of all replicas", "gradients for other replicas"
        self._arrived = [Fence(streams, Rule.SHARDS_WRITTEN, replica, arrived, comm) for _ in layouts]
        buffers = [ledger.allocate(Category.STAGING, size * most, torch.float32) for _ in range(2)]
        scratches = [ledger.allocate(Category.SCRATCH, room, torch.float32) for _ in range(2)]
        fences = [Fence(streams, Rule.GRADS_DRAINED, replica, drained, comm) for _ in range(2)]
        self._staging = list(zip(buffers, scratches, fences, strict=True))  # two take turns
        self._buffers: list[torch.Tensor] = []  # of the reduction under way
        self._adds = False
        self._ledger = ledger
        self._sums: dict[int, list[torch.Tensor]] = {}  # by unit, for no_sync(): where the shard group's sums are
        self._main_adds: dict[int, bool] = {}  # by unit whose sums hold gradients: whether its main grads hold some too

    # -- weights --------------------------------------------------------------------------------------------------

    def begin_pass(self, units: Iterable[Unit], changed: Collection[bool]) -> None:
        """A forward begins: start to gather weights that may have changed, in the order of use. See `Changes`."""
        for unit in units:
            if flats := [flat for flat in unit.flat_params if flat.kind.trains in changed]:
                self._gather(unit, flats)

    def fetch(self, unit: Unit) -> None:
        """See `Home.fetch`: the pass has begun to gather the unit's weights over replicas."""
        self._arrived[unit.index].wait()  # rule 5

    def _gather(self, unit: Unit, flats: Sequence[FlatParam]) -> None:
        self._written.record()
        self._written.wait()  # rule 5. By then all reads of the shards are over: `Engine.finish_reading`
        with self.ranks.waiting("the gather over replicas of", unit.name):
            works = [self.ranks.transport.start_gather(flat.gather) for flat in flats]
            self._arrived[unit.index].record(*works)

    # -- gradients ------------------------------------------------------------------------------------------------

    def begin_reduction(self, unit: Unit, *, adds: bool) -> tuple[list[torch.Tensor], bool]:
        """See `Home.begin_reduction`: into staging [R * shard_numel], from which `flush` reduces over replicas.

        Inside ``no_sync()``, and in the first reduction outside, into sums of the same sizes. In rank order all ranks
        reduce into main grads at once.
        """
        if self.is_in_order:
            return [flat.main_grads for flat in unit.trained], adds
        if (has_sums := unit.index in self._main_adds) or not self._is_synced:
            self._main_adds.setdefault(unit.index, adds)
            if unit.index not in self._sums:  # gradients are in the slot already
                self._sums[unit.index] = []
                for flat in unit.trained:
                    numel = self.ranks.world_size * flat.layout.shard_numel
                    sums = self._ledger.allocate(Category.STAGING, numel, torch.float32)
                    self._sums[unit.index].append(sums)
                    flat.place_sums(sums)
            return self._sums[unit.index], has_sums
        self._take_turn()
        self._adds = adds
        sizes = [self.ranks.world_size * flat.layout.shard_numel for flat in unit.trained]
        staging, *_ = self._staging[0]
        self._buffers = list(staging.narrow(0, 0, sum(sizes)).split(sizes))
        return self._buffers, False

    def _take_turn(self) -> None:
        self._staging.reverse()
        *_, drained = self._staging[0]
        drained.wait()  # rule 3

    def end_reduction(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        """See `Home.end_reduction`. `add` follows, which knows what the host has to complete."""

    def _start(self, unit: Unit) -> None:
        buffers, adds = self._buffers, self._adds
        if unit.index in self._main_adds:
            self._take_turn()
            buffers, adds = self._sums[unit.index], self._main_adds.pop(unit.index)
        sizes = [self._scratch_numel(flat.layout.shard_numel) for flat in unit.trained]
        _, scratch, drained = self._staging[0]
        parts = scratch.narrow(0, 0, sum(sizes)).split(sizes)
        works = [
            self.ranks.transport.start_reduce(
                # The reduction in the shard group has divided by the number of all ranks.
                Reduction(buffer, flat.main_grads, part, ReductionMode.FP32, adds, flat.tag, divisor=1.0)
            )
            for flat, buffer, part in zip(unit.trained, buffers, parts, strict=True)
        ]
        drained.record(*works)
        arrived = Fence(self.ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, "main grads")
        arrived.record(*works)
        self._under_way[unit.index] = arrived

    def forget(self) -> None:
        """See `OverReplicas.forget`."""
        super().forget()
        self._main_adds.clear()
