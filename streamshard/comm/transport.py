"""What moves units' bytes between ranks: the interface that each backend implements.

`streamshard.comm.gloo` serves CPUs, `streamshard.comm.nccl` GPUs, `streamshard.comm.shared_memory` the CPU ranks of one
machine. `streamshard.inspect.adversary` misbehaves on purpose.

[Note: reductions]
Every reduction ends in main grads, fp32, as the mean over ranks; its `ReductionMode` says how it comes about. Where
chunks are exchanged (`EXCHANGE_16`, and everything on gloo), rank r receives its chunk from every other rank and sums
in rank order, so results do not depend on a ring's rounding or on timing. gloo's own reduce_scatter was 4 to 14 times
slower than this exchange (docs/internals/log.md).
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import Board, Guard, Kind, Watch
from streamshard.comm.streams import Fence, Rule, StreamName, Streams, Work
from streamshard.config import Precision, ReductionMode
from streamshard.errors import StateError

__all__ = ["AllToAll", "Peers", "Reduction", "Transport", "sum_in_rank_order"]


class Peers(Protocol):
    """What a transport knows of its ranks, see `streamshard.comm.ranks.Ranks`."""

    rank: int
    world_size: int
    streams: Streams
    stream: StreamName
    board: Board
    watch: Watch

    @property
    def group(self) -> dist.ProcessGroup: ...

    def guard(self, action: str, subject: str = "") -> Guard: ...


class Reduction(NamedTuple):
    """One reduction: the mean over ranks of each rank's slice of a grad slot, into main grads.

    Attributes:
        slot: [padded_numel] slot_grad_dtype, this rank's gradients of the whole unit.
        out: [shard_numel] fp32, this rank's main grads.
        scratch: [what `Transport.scratch_numel` says] slot_grad_dtype.
        mode: how; the same for all reductions of a model.
        accumulate: add to `out` instead of overwriting it.
        tag: index of the unit's segment: distinguishes its reductions from other messages.
    """

    slot: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor
    mode: ReductionMode
    accumulate: bool
    tag: int


class AllToAll(NamedTuple):
    """One exchange: each rank sends each rank a chunk, which may be empty. Chunks lie one after another, by rank.

    Attributes:
        send: [sum of send_numels] 1-D contiguous.
        send_numels: elements for each rank, this one included.
        received: [sum of received_numels], of the same dtype; does not overlap `send`.
        received_numels: elements from each rank: what that rank's `send_numels` says for this one.
    """

    send: torch.Tensor
    send_numels: Sequence[int]
    received: torch.Tensor
    received_numels: Sequence[int]

    def chunks(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk for `rank`, and the chunk from `rank`."""
        sent, received = sum(self.send_numels[:rank]), sum(self.received_numels[:rank])
        return (
            self.send.narrow(0, sent, self.send_numels[rank]),
            self.received.narrow(0, received, self.received_numels[rank]),
        )


class Transport(abc.ABC):
    """Moves a unit's bytes between ranks.

    The `start_` methods return at once. On CUDA the result is in place once the transport's stream has reached the
    point of return; elsewhere once the returned work has been waited for. Buffers belong to the caller, who must not
    touch them in between.

    Args:
        ranks: between whom; they hold this transport.

    Attributes:
        stream: on which it runs.
    """

    def __init__(self, ranks: Peers) -> None:
        self._ranks_of = weakref.ref(ranks)
        self.streams = ranks.streams
        self.stream = ranks.stream

    @property
    def ranks(self) -> Peers:
        """Between whom it moves bytes."""
        ranks = self._ranks_of()
        if ranks is None:
            raise StateError("a transport", "without its ranks", "a model that is alive")
        return ranks

    def meet(self) -> None:  # noqa: B027  # others connect when their group is made
        """Make the connections that a backend would make in its first collective. Collective."""

    @abc.abstractmethod
    def start_gather(
        self, shard: torch.Tensor, slot: torch.Tensor, tag: int, *, is_published: bool = True
    ) -> Work | None:
        """Start an all-gather of `shard` [shard_numel] from all ranks into `slot` [N * shard_numel], same dtype.

        Args:
            shard, slot: see above.
            tag: of the segment.
            is_published: `shard` is a compute shard. Otherwise it is another tensor, outside of steps.
        """

    @abc.abstractmethod
    def start_reduce(self, reduction: Reduction) -> Work | None:
        """Start a reduce-scatter (mean). See [Note: reductions]."""

    @abc.abstractmethod
    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        """Start to replace `tensor` [n] fp32 by its mean over the ranks of the group.

        Args:
            tensor: any tensor.
            tag: of the segment whose main grads it is; None: something else.
        """

    @abc.abstractmethod
    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """Start an all-to-all. Several may be under way."""

    @abc.abstractmethod
    def scratch_numel(self, shard_numel: int, mode: ReductionMode, *, adds: bool) -> int:
        """Elements of scratch that reductions of such a unit need.

        Each transport names every mode, so that the type checker finds those that do not know a new one.

        Args:
            shard_numel: of the unit.
            mode: of the reductions.
            adds: whether main grads may hold something that is added to.
        """

    def check_precision(self, precision: Precision) -> None:  # noqa: B027  # most sum in fp32
        """Raise if sums over so many ranks would be wrong in `precision`.

        Raises:
            ConfigError: they would.
        """

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] of zeros on the device of the streams, which other ranks may read."""
        return torch.zeros(numel, dtype=dtype, device=self.streams.device)

    def retract_shards(self) -> Work | None:
        """Compute shards are about to be written: the work that is done once no other rank reads them, if any does."""
        self.ranks.board.log.add(Kind.FORWARD)
        return None

    def publish_shards(self, shards: Sequence[torch.Tensor]) -> None:  # noqa: B027  # few transports need to know
        """Compute shards are written: other ranks may read them from now on.

        Args:
            shards: all units', at the indices that are the tags of their gathers.
        """

    def progress(self) -> None:  # noqa: B027  # where a backend has threads of its own there is nothing to do
        """Do what can be done for collectives under way without waiting. Called with every gradient."""

    def gather_now(self, shard: torch.Tensor, full: torch.Tensor, tag: int) -> None:
        """An all-gather outside of steps. Its result is in place, for the compute stream, on return."""
        fence = Fence(self.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "full tensors", self.stream)
        fence.record()
        fence.wait()
        arrived = Fence(self.streams, Rule.RESULTS_ARRIVED, self.stream, "full tensors")
        with self.ranks.guard("a gather of full tensors"):
            arrived.record(self.start_gather(shard, full, tag, is_published=False))
            arrived.wait()

    def before_talk(self) -> None:  # noqa: B027  # a late transport completes what others wait for
        """Ranks are about to talk to each other beside this transport."""

    def leave(self) -> None:  # noqa: B027  # most have nobody to tell
        """This rank has failed: let no rank wait for it."""


def sum_in_rank_order(chunks: Sequence[torch.Tensor], out: torch.Tensor, *, accumulate: bool) -> None:
    """``out (+)= mean of chunks``, added one after the other in fp32.

    Args:
        chunks: N tensors [n], every rank's, in rank order.
        out: [n] fp32.
        accumulate: add to `out` instead of overwriting it.
    """
    share = 1.0 / len(chunks)
    first, *others = chunks
    if accumulate:
        out.add_(first, alpha=share)
    else:
        out.copy_(first).mul_(share)  # torch.mul(first, share, out=out) would round to first's dtype
    for chunk in others:
        out.add_(chunk, alpha=share)
