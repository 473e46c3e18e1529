"""Hybrid sharding: main grads are averaged over the ranks that hold the same shard of other replicas of the model.

The mesh is replicate x shard. Gradients are reduced within a shard group first, so what crosses the replicate axis is
1/N of them, in fp32 (FSDP's HYBRID_SHARD, ZeRO++'s hierarchy). A unit's average is started when the next unit's
reduction is: by then its own reduction is over, and it runs while backward goes on. See [Note: averages].

[Note: averages]
A unit's gradients may come in several parts in one backward, each with a reduction. Averaging what has been averaged
already changes nothing, so after each part all of the main grads are averaged: mean(mean(g) + h) = mean(g + h).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.errors import ConfigError
from streamshard.unit.unit import StreamedUnit

__all__ = ["Replicas"]


class Replicas:
    """The other holders of this rank's shard. Owns its two fences.

    Args:
        ranks: over the replicate axis.

    Attributes:
        averages_grads: False while replicas train on their own (local SGD).
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.averages_grads = True
        self._warmup_steps: int | None = None
        self._last: tuple[StreamedUnit, Work | None] | None = None  # reduced, not averaged yet
        self._under_way: dict[int, Work | None] = {}  # by unit
        self._reduced = Fence(ranks.streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, "main grads to average")
        self._averaged = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "averaged main grads")

    def add(self, unit: StreamedUnit, reduction: Work | None) -> None:
        """`unit`'s reduction has been started (None: on CUDA, or one rank has the whole shard)."""
        self.flush()
        if self.averages_grads:
            self._last = unit, reduction

    def flush(self) -> None:
        """Start the average of the unit that was added last."""
        if self._last is None:
            return
        (unit, reduction), self._last = self._last, None
        if reduction is not None:
            reduction.wait()
        if unit.grads.slot is None:  # the compute stream itself has written the main grads
            self._reduced.record()
            self._reduced.wait()  # rule 4
        assert unit.grads.main is not None
        with self.ranks.guard("the average over replicas of", unit.name):
            self._under_way[unit.index] = self.ranks.transport.start_average(unit.grads.main)

    def finish_average(self, unit: StreamedUnit) -> None:
        """More gradients of `unit` are about to be written: its average comes first."""
        if self._last is not None and self._last[0] is unit:
            self.flush()
        if unit.index in self._under_way:
            with self.ranks.guard("the average over replicas of", unit.name):
                self._averaged.record(self._under_way.pop(unit.index))
                self._averaged.wait()  # rule 7

    def average(self, parts: Iterable[list[torch.Tensor]]) -> None:
        """Replace tensors by their means over replicas, on the compute stream: one collective for each part.

        Args:
            parts: tensors of one dtype, any shape; the same ones on all replicas.
        """
        under_way = []
        for tensors in parts:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
            if flat.numel():
                self._reduced.record()
                self._reduced.wait()  # rule 4
                with self.ranks.guard("an average over replicas"):
                    under_way.append((tensors, flat, self.ranks.transport.start_average(flat)))
        with torch.no_grad(), self.ranks.guard("an average over replicas"):
            for tensors, flat, work in under_way:
                self._averaged.record(work)
                self._averaged.wait()  # rule 7
                for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def agree_on_warmup(self, warmup_steps: int) -> None:
        """Local SGD begins after so many steps.

        Raises:
            ConfigError: another optimizer of the same model has another number.
        """
        if self._warmup_steps not in (None, warmup_steps):
            raise ConfigError(
                f"warmup_steps={warmup_steps}: another optimizer of this model has {self._warmup_steps}, and gradients "
                "of one backward are averaged over replicas or not"
            )
        self._warmup_steps = warmup_steps

    def take_works(self) -> list[Work]:
        """The backward is over: averages under way."""
        self.flush()
        works, self._under_way = self._under_way, {}
        return [work for work in works.values() if work is not None]
