"""Hybrid sharding: main grads are averaged over the ranks that hold the same shard of other replicas of the model.

The mesh is replicate x shard. Gradients are reduced within a shard group first, so only 1/N of them crosses the
replicate axis, in fp32 (FSDP's HYBRID_SHARD, ZeRO++'s hierarchy). Averages run on a stream of their own, after the
unit's reduction and beside later all-gathers and reductions, while backward goes on. See [Note: averages].

[Note: averages]
A unit's gradients may come in several parts in one backward, each with a reduction. Averaging an average again changes
nothing, so after each part all main grads of the unit are averaged: mean(mean(g) + h) = mean(g + h). For the same
reason a backward inside ``no_sync()`` averages nothing: the first backward outside averages the sums.

[Note: sums along replicas]
With ``Precision(sums_in_rank_order=True)`` a sum goes from replica to replica instead. Each replica receives the main
grads of the replica before, lets its own reduction add to them, and sends them on. The last replica then has the sum
over all ranks in rank order, with the bits of one shard group of all ranks. It sends the sum to all, a few units later:
so no replica waits for the last one before it sends the next unit on. Each reduction of a unit begins at the sum of the
earlier ones, also inside ``no_sync()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Work
from streamshard.comm.transport import Hop
from streamshard.core.over_replicas import OverReplicas
from streamshard.core.unit import Unit
from streamshard.errors import ConfigError


class Replicas(OverReplicas):
    """The other holders of this rank's shard. Owns its fences.

    Args:
        ranks: the replicate axis.
        in_order: see [Note: sums along replicas].

    Attributes:
        averages_grads: False while replicas train on their own (local SGD).
    """

    def __init__(self, ranks: Communicator, *, in_order: bool) -> None:
        super().__init__(ranks, "main grads to average")
        self.in_order = in_order
        self.averages_grads = True
        self._warmup_steps: int | None = None
        # By index: sent on to the next replica. The sum over all comes later.
        self._sent: dict[int, tuple[Unit, list[Work | None]]] = {}
        what, target = "main grads to average", StreamName.REPLICA
        self._written = Fence(ranks.streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, what, target)
        what, target = "main grads of the replica before", StreamName.COMM
        self._received = Fence(ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, what, target)

    def meet(self) -> None:
        """Let neighbours meet, if in order. Else NCCL would make communicators for two ranks in the first backward."""
        if not self.in_order:
            return
        transport, streams = self.ranks.transport, self.ranks.streams
        is_last = self.ranks.rank == self.ranks.world_size - 1
        with self.ranks.waiting("the first meeting of neighbouring replicas"), streams.on(self.ranks.stream):
            token = torch.zeros(1, device=streams.device)
            for hop in [Hop.RECEIVE] * (self.ranks.rank > 0) + [Hop.SEND] * (not is_last):
                if (work := transport.start_hop(hop, token, 0)) is not None:
                    work.wait()

    def begin(self, *, is_synced: bool) -> None:
        """See `OverReplicas.begin`. In order each micro-batch is summed."""
        super().begin(is_synced=is_synced or self.in_order)

    @property
    def leaves_grads(self) -> bool:
        """See `OverReplicas.leaves_grads`."""
        return self.averages_grads and not self.in_order

    def receive(self, unit: Unit) -> bool:
        """The reduction of `unit` comes next. Let it begin at the main grads of the replica before, if in order.

        Returns:
            Whether it adds to these.
        """
        if not self.in_order or self.ranks.rank == 0:
            return False
        unit.grads.make_memory()
        # Compute may have allocated, zeroed or clipped main grads, which are overwritten now.
        self._written.record()
        self._written.wait()  # rule 4
        with self.ranks.waiting("the gradients of earlier replicas of", unit.name):
            self._received.record(*self._start_hops(Hop.RECEIVE, unit))
            self._received.wait()  # rule 7
        return True

    def _start_hops(self, hop: Hop, unit: Unit) -> list[Work | None]:
        transport = self.ranks.transport
        return [transport.start_hop(hop, flat.main_grads, flat.tag) for flat in unit.trained]

    def add(self, unit: Unit, reduction: Sequence[Work | None]) -> None:
        """See `OverReplicas.add`. In local SGD nothing is averaged."""
        if self.averages_grads:
            super().add(unit, reduction)

    def _start(self, unit: Unit) -> None:
        if self.in_order:
            self._send(unit)
        else:
            self._under_way[unit.index] = self._average([(flat.main_grads, flat.tag) for flat in unit.trained])

    def _send(self, unit: Unit) -> None:
        """Send the unit's main grads on, and start the result of an earlier one."""
        is_last = self.ranks.rank == self.ranks.world_size - 1
        self._sent[unit.index] = unit, [] if is_last else self._start_hops(Hop.SEND, unit)
        if len(self._sent) > self.ranks.world_size:
            self._start_result(next(iter(self._sent)))

    def _start_result(self, index: int) -> None:
        unit, sends = self._sent.pop(index)
        result = Fence(self.ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, "main grads of all replicas")
        # The result overwrites main grads that this rank has sent. They have arrived: the last replica added to them.
        result.record(*sends, *self._start_hops(Hop.RESULT, unit))
        self._under_way[index] = result

    def _average(self, tensors: Sequence[tuple[torch.Tensor, int | None]]) -> Fence:
        """Start averages of (tensor, message tag) pairs. Returns the fence after them."""
        averaged = Fence(self.ranks.streams, Rule.RESULTS_ARRIVED, StreamName.REPLICA, "averaged main grads")
        averaged.record(*[self.ranks.transport.start_average(tensor, tag) for tensor, tag in tensors])
        return averaged

    def _finish_one(self, index: int) -> None:
        if index in self._sent:
            self._start_result(index)
        if index in self._under_way:
            self._under_way.pop(index).wait()  # rule 7

    def average(self, parts: Iterable[list[torch.Tensor]]) -> None:
        """Replace tensors by their means over replicas, on the compute stream: one collective for each part.

        Args:
            parts: each a list of tensors of one dtype, any shape; the same lists on all replicas.
        """
        under_way = []
        for tensors in parts:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
            if flat.numel():
                self._written.record()
                self._written.wait()  # rule 4
                with self.ranks.waiting("an average over replicas"):
                    under_way.append((tensors, flat, self._average([(flat, None)])))
        with torch.no_grad(), self.ranks.waiting("an average over replicas"):
            for tensors, flat, averaged in under_way:
                averaged.wait()  # rule 7
                for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def agree_on_warmup(self, warmup_steps: int) -> None:
        """Note that local SGD begins after `warmup_steps` steps.

        Raises:
            ConfigError: another optimizer of the same model has another number.
        """
        if self._warmup_steps not in (None, warmup_steps):
            raise ConfigError(
                f"warmup_steps={warmup_steps}: another optimizer of this model has {self._warmup_steps}, and gradients "
                "of one backward are averaged over replicas or not"
            )
        self._warmup_steps = warmup_steps

    def finish(self) -> None:
        """See `OverReplicas.finish`."""
        self.flush()
        for index in list(self._sent):
            self._start_result(index)
        super().finish()
