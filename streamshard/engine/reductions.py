"""Gradients on their way out of a backward: into the gradient slot, over ranks, over replicas, to the optimizer.

`Reductions` owns the reductions under way. `UsedParams` lets ranks agree on which parameters had a gradient. A
parameter that no rank used keeps ``grad = None``, so the optimizer skips it, as under DistributedDataParallel. On CUDA
neither the host nor the compute stream of a rank that used all parameters waits for this exchange: its own flags are
the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import AllWork, Fence, Rule, StreamName, Streams, Work
from streamshard.engine.replicas import Replicas
from streamshard.planning.memory import Category
from streamshard.unit.shard import Ledger
from streamshard.unit.unit import StreamedUnit


class SmallGrads:
    """Small gradients that autograd has left in ``.grad`` of unsharded parameters, until their unit is reduced.

    Hooks of unsharded parameters hold this object, so it holds no tensors: no collector would see such a cycle.

    Attributes:
        units: indices of units that have some.
        stream: the device's stream that has made them.
    """

    def __init__(self, streams: Streams) -> None:
        self.units: set[int] = set()
        self.stream: Any = None
        self._streams = streams
        self._is_open = False

    def open(self) -> None:
        """A backward begins, on the current stream."""
        self._is_open = True
        self.units.clear()
        self.stream = self._streams.device_stream(StreamName.COMPUTE)

    def close(self) -> None:
        """The backward has ended."""
        self._is_open = False

    def leave(self, unit: int) -> bool:
        """Autograd has made a gradient of `unit`: whether it stays. Other streams' gradients are copied at once."""
        if not self._is_open or torch.is_grad_enabled():
            return False
        if self.stream is not None and self.stream != self._streams.device_stream(StreamName.COMPUTE):
            return False
        self.units.add(unit)
        return True


class Reductions:
    """The reductions of one backward. Owns the fence that the optimizer waits behind.

    Args:
        units: all units.
        ranks: the shard group, over which gradients are reduced.
        ledger: allocates the flags of `UsedParams`.
        replicas: averages main grads over the replicate axis; None on a 1-D mesh.

    Attributes:
        due: indices of units whose reduction the program still has.
        used: agrees on which parameters had a gradient.
        small: gradients that `start` copies.
    """

    def __init__(
        self, units: Sequence[StreamedUnit], ranks: Communicator, ledger: Ledger, replicas: Replicas | None
    ) -> None:
        self.ranks = ranks
        self.replicas = replicas
        self.due: set[int] = set()
        self._units = units
        self._is_last = True
        self.small = SmallGrads(ranks.streams)
        self._under_way: list[Work] = []
        self.used = UsedParams(units, ranks, ledger, None if replicas is None else replicas.ranks)
        self._done = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "main grads")

    def begin(self, *, is_synced: bool, is_last: bool) -> None:
        """A backward begins.

        Args:
            is_synced: outside of ``no_sync()``.
            is_last: gradients are reduced; False: they stay in their slots, for another backward to add to.
        """
        self.due = set()
        self._is_last = is_last
        if self.replicas is not None:
            self.replicas.begin(is_synced=is_synced)

    def take(self, unit: StreamedUnit, param_index: int, grad: torch.Tensor) -> None:
        """Copy or add `grad` [shape of the unsharded parameter] to the unit's grad slot; opens the slot (rule 3)."""
        self._open(unit)
        unit.grads.write(param_index, grad)
        self.ranks.transport.progress()

    def _open(self, unit: StreamedUnit) -> None:
        slot = unit.grads.slot
        if self.replicas is not None and (slot is None or not unit.grads.is_open):
            self.replicas.finish_average(unit)
        if unit.grads.is_open:
            return
        if slot is not None and slot.content is not None:  # gradients that come in several parts
            earlier = self._units[slot.content]
            if earlier.index in self.due:  # other ranks may not be here: they reduce it where the program has it
                earlier.grads.spill()
            else:
                self.start(earlier)
        with self.ranks.guard("the reduction before that of", unit.name):
            unit.grads.open()

    def start(self, unit: StreamedUnit) -> None:
        """Collect the gradients of the unit, which are all made, and reduce them (rule 4).

        Parameters without a gradient here send zeros.
        """
        if not (unit.is_trainable or unit.grads.waits):
            return
        has_left = unit.index in self.small.units
        needs_no_slot = not self._is_last or unit.grads.slot is None and self.replicas is None
        if needs_no_slot and not has_left and not unit.grads.is_open:
            return
        self._open(unit)
        if has_left:
            self.small.units.remove(unit.index)
            unit.grads.collect(self.small.stream)
        if not self._is_last:
            return
        with self.ranks.guard("the reduction of", unit.name):
            work = unit.grads.start_reduce()
        if work is not None:
            self._under_way.append(work)
        if self.replicas is not None:
            self.replicas.add(unit, work)

    def start_late_ones(self) -> None:
        """Reduce gradients that came after the reduction of their unit, except those of the root unit."""
        for unit in self._units[1:]:
            if unit.grads.has_unreduced or unit.index in self.small.units:
                self.start(unit)

    def finish(self) -> list[nn.Parameter]:
        """Let the compute stream wait for all reductions, and set ``.grad``.

        Returns:
            The parameters that have a new gradient.
        """
        reduced = [unit for unit in self._units if unit.grads.reductions]
        self.complete(sends_flags=True)
        used = self.used.finish()
        return [param for unit in reduced for param in unit.grads.finish(used[unit.index])]

    def complete(self, *, sends_flags: bool = False) -> None:
        """Let the compute stream wait for all reductions and averages under way.

        Args:
            sends_flags: start the exchange of `used`, behind these: the compute stream need not wait for it.
        """
        with self.ranks.guard("the last reductions of a backward"):
            if self.replicas is not None:
                self.replicas.finish()
            works, self._under_way = self._under_way, []
            self._done.record(AllWork(works))
            if sends_flags:
                self.used.start()
            self._done.wait()  # rule 7: no optimizer step reads main grads that are still being reduced


class UsedParams:
    """The exchange of one flag per parameter: whether it had a gradient. Owns its fences, two for each stage.

    Args:
        units: all units; each knows which of its parameters were used here.
        ranks: the shard group, the first stage.
        ledger: allocates uint8, see `Transport.start_flags`.
        replicas: the replicate axis, the second stage; None on a 1-D mesh.
    """

    def __init__(
        self, units: Sequence[StreamedUnit], ranks: Communicator, ledger: Ledger, replicas: Communicator | None
    ) -> None:
        self._units = units
        self._ranks = ranks
        # The communicators of the exchanges, in order; those of one rank are left out.
        self._stages = [stage for stage in (ranks, replicas) if stage is not None and stage.world_size > 1]
        count = sum(len(unit.layout.params) for unit in units) if self._stages else 0
        self._flags = [ledger.allocate(Category.FLAGS, count, torch.uint8)]
        for stage in self._stages:
            count = stage.transport.flags_numel(count)
            self._flags.append(ledger.allocate(Category.FLAGS, count, torch.uint8))
        self._sent: list[bool] = []
        self._tag = sum(len(unit.flat_params) for unit in units)  # behind those of the flat parameters
        self._written = [
            Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "flags", stage.stream)
            for stage in self._stages
        ]
        self._arrived = [
            Fence(ranks.streams, Rule.RESULTS_ARRIVED, stage.stream, "everybody's flags") for stage in self._stages
        ]

    def start(self) -> None:
        """Start to tell the other ranks which parameters were used here."""
        if self._stages:
            with self._ranks.guard("the exchange of which parameters were used"):
                self._write([grad.is_used for unit in self._units for grad in unit.grads.params])
                self._start(0)

    def _start(self, stage: int) -> None:
        own, gathered = self._flags[stage : stage + 2]
        self._written[stage].record()
        self._written[stage].wait()  # rule 5: the exchange does not read what is being written
        self._arrived[stage].record(self._stages[stage].transport.start_flags(own, gathered, self._tag))

    def finish(self) -> list[list[bool]]:
        """By unit, which parameters any rank used. On a device the host waits only if this rank left one out."""
        here = [[grad.is_used for grad in unit.grads.params] for unit in self._units]
        if not self._stages:
            return here
        is_complete = all(
            grad.is_used or not unit.grads.counts(grad) for unit in self._units for grad in unit.grads.params
        )
        with self._ranks.guard("the exchange of which parameters were used"):
            for stage in range(len(self._stages)):
                if stage > 0:
                    self._start(stage)
                # On the CPU not left for later: gloo's work objects must not outlive a profiler that saw them made.
                if not is_complete or not self._ranks.streams.has_streams or stage + 1 < len(self._stages):
                    self._arrived[stage].wait()  # rule 7
        if is_complete:
            return here
        anywhere = iter(self._flags[-1].view(-1, self._flags[0].numel()).amax(0).bool().tolist())
        return [list(itertools.islice(anywhere, len(unit.views))) for unit in self._units]

    def _write(self, flags: list[bool]) -> None:
        """Copy `flags` to the device, unless the last exchange has sent the same. Compute stream."""
        if flags != self._sent:
            self._sent = flags
            self._arrived[0].wait()  # rule 6: the last exchange has read the old flags
            is_remote = self._flags[0].device.type != "cpu"  # then pinned memory, for which the host need not wait
            told = torch.tensor(flags, dtype=torch.uint8, pin_memory=is_remote)
            self._flags[0].copy_(told, non_blocking=is_remote)
