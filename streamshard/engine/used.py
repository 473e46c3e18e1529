"""Which parameters had a gradient on any rank: agreed once per backward, a byte a parameter.

A parameter that no rank used must keep ``grad = None``, so that the optimizer skips it, as under
DistributedDataParallel. On CUDA only a rank that left a parameter out waits for the exchange: one that used all of its
own needs to know nothing of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.plan.memory import Category
from streamshard.unit.buffers import Ledger
from streamshard.unit.unit import StreamedUnit

__all__ = ["UsedParams"]


class UsedParams:
    """The exchange of flags. Owns its fences, two for each stage.

    Args:
        units: all units; each knows which of its parameters were used here.
        ranks: exchanges within the shard group.
        ledger: allocates [F] and [N * F] uint8, F the number of parameters; with R replicas [R * N * F] too.
        replicas: exchanges what each shard group has found.
    """

    def __init__(self, units: Sequence[StreamedUnit], ranks: Ranks, ledger: Ledger, replicas: Ranks | None) -> None:
        self._units = units
        self._ranks = ranks
        self._replicas = replicas
        count = sum(len(unit.layout.params) for unit in units) if self._stages else 0
        self._flags = [ledger.allocate(Category.FLAGS, count, torch.uint8)]
        for stage in self._stages:
            count *= stage.world_size
            self._flags.append(ledger.allocate(Category.FLAGS, count, torch.uint8))
        self._sent: list[bool] = []
        self._tag = sum(len(unit.segments) for unit in units)  # behind those of the segments
        self._written = [
            Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "flags", stage.stream)
            for stage in self._stages
        ]
        self._arrived = [
            Fence(ranks.streams, Rule.RESULTS_ARRIVED, stage.stream, "everybody's flags") for stage in self._stages
        ]

    @property
    def _stages(self) -> list[Ranks]:
        """The exchanges, one after the other."""
        return [stage for stage in (self._ranks, self._replicas) if stage is not None and stage.world_size > 1]

    def start(self) -> None:
        """Send this rank's flags. Compute stream; the exchange runs on the stream of who exchanges them."""
        if not self._stages:
            return
        with self._ranks.guard("the exchange of which parameters were used"):
            flags = [grad.is_used for unit in self._units for grad in unit.grads.params]
            if flags != self._sent:
                self._sent = flags
                is_remote = self._flags[0].device.type != "cpu"  # then pinned memory, for which the host need not wait
                told = torch.tensor(flags, dtype=torch.uint8, pin_memory=is_remote)
                self._flags[0].copy_(told, non_blocking=is_remote)
            self._start(0)

    def _start(self, stage: int) -> None:
        here, everywhere = self._flags[stage : stage + 2]
        self._written[stage].record()
        self._written[stage].wait()  # rule 5: the exchange does not read what is being written
        self._arrived[stage].record(self._stages[stage].transport.start_gather(here, everywhere, self._tag))

    def finish(self) -> list[list[bool]]:
        """For each unit, which parameters some rank used. On CUDA the host waits only if this rank left one out."""
        here = [[grad.is_used for grad in unit.grads.params] for unit in self._units]
        if not self._stages:
            return here
        with self._ranks.guard("the exchange of which parameters were used"):
            # rule 7. Not left for later: gloo's work objects must not outlive a profiler that saw them being made.
            self._arrived[0].wait()
            for stage in range(1, len(self._stages)):
                self._start(stage)
                self._arrived[stage].wait()
        is_complete = all(
            grad.is_used or not unit.grads.counts(grad) for unit in self._units for grad in unit.grads.params
        )
        if is_complete:
            return here
        anywhere = self._flags[-1].view(-1, self._flags[0].numel()).amax(0).tolist()
        result, start = [], 0
        for unit in self._units:
            stop = start + len(unit.views)
            result.append([bool(flag) for flag in anywhere[start:stop]])
            start = stop
        return result
