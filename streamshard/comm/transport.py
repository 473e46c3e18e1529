"""Every collective, behind one small interface.

The engine asks for five things: move shards into a slot, move a slot's gradients into main grads, average main grads
over replicas, small host-side agreements, and the first rank's weights at the start. `streamshard.comm.gloo`
serves CPUs, `streamshard.comm.nccl` GPUs; one over shared memory (`streamshard.comm.shared_memory`) or one that
misbehaves on purpose (`streamshard.inspect.adversary`) implements the same methods.

[Note: reductions]
Every reduction ends in main grads, fp32, as the mean over ranks. Where chunks are exchanged (16-bit wire with fp32
accumulation, and everything on gloo), rank r receives its chunk from every other rank and sums in rank order, so
results do not depend on a ring's rounding or on timing (Megatron-LM: ``reduce_scatter_with_fp32_accumulation``).
gloo's own reduce_scatter was 4 to 14 times slower than this exchange (docs/internals/log.md).

[Note: ranks that do not do the same]
All ranks issue the same exchanges in the same order. A transport logs what it issues (`streamshard.comm.issued`); who
has waited for long compares the logs of all ranks, and if they differ, waits no longer. Whoever fails, for this reason
or another, says so to those who wait for it: it closes its connections, which ends their waits, and has its log read.
So all ranks end soon, with the same words.
"""

from __future__ import annotations

import abc
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from streamshard.comm.guard import Guard
from streamshard.comm.issued import Kind, Log
from streamshard.comm.streams import Fence, Rule, StreamName, Streams, Work
from streamshard.comm.watch import Vigil
from streamshard.errors import CommunicationError

__all__ = [
    "Reduction",
    "Transport",
    "sum_in_rank_order",
]


class Reduction(NamedTuple):
    """One reduction: the mean over ranks of each rank's slice of a grad slot, into main grads.

    Attributes:
        slot: [padded_numel] slot_grad_dtype, this rank's gradients of the whole unit.
        out: [shard_numel] fp32, this rank's main grads.
        scratch: [shard_numel, or (N - 1) * shard_numel where chunks are exchanged] slot_grad_dtype.
        accumulate: add to `out` instead of overwriting it.
        tag: distinguishes this unit's reductions from other messages.
    """

    slot: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor
    accumulate: bool
    tag: int


class Transport(abc.ABC):
    """Moves a unit's bytes between ranks.

    Both `start_` methods return at once. On CUDA the result is in place once the comm stream has reached the point of
    return; elsewhere once the returned work has been waited for. Buffers belong to the caller and must not be touched
    in between.

    Args:
        group: the shard group: gathers, reductions and norms are among its ranks.
        streams: the engine's streams.
        everyone: all ranks that train this model, replicas included, who agree on things; None: the shard group.
        replica: place of this rank's replica among them, on the replicate axis.

    Attributes:
        rank: this rank within the shard group.
        world_size: N.
        replica: see above; weights are written to files by replica 0.
        place: of this rank among everyone.
        is_first: whether this is the rank whose weights count at the start and that writes what is written once.
        total_size: number of ranks in `everyone`.
        is_uneven: whether ranks may run out of inputs, see `streamshard.join`.
        failure: how a collective has failed; None: none has.
        vigil: how long this rank has been waiting for others.
        log: what this rank has issued.
        names: of units, by tag; for messages.
    """

    def __init__(
        self, group: dist.ProcessGroup, streams: Streams, everyone: dist.ProcessGroup | None = None, replica: int = 0
    ) -> None:
        self.failure: str | None = None
        self.is_uneven = False
        self.log = Log()
        self.names: Sequence[str] = ()
        # Weak: destroy_process_group() has to end gloo's threads, which must not outlive Python (they take its lock).
        self._group_of = weakref.ref(group)
        self._everyone_of = weakref.ref(everyone or group)
        self.streams = streams
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.replica = replica
        self.place: int = dist.get_rank(self.everyone)
        self.is_first = self.place == 0
        self.total_size: int = dist.get_world_size(self.everyone)
        self.vigil = Vigil(self)
        _alive_ones.add(self)

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed: nothing more is issued."""
        return self.failure is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """The shard group.

        Raises:
            CommunicationError: it has been destroyed.
        """
        return _alive(self._group_of)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All ranks that train this model.

        Raises:
            CommunicationError: the group has been destroyed.
        """
        return _alive(self._everyone_of)

    @abc.abstractmethod
    def start_gather(self, shard: torch.Tensor, slot: torch.Tensor, tag: int) -> Work | None:
        """Start an all-gather of `shard` [shard_numel] from all ranks into `slot` [N * shard_numel], same dtype."""

    def start_gather_full(self, shard: torch.Tensor, full: torch.Tensor, tag: int) -> Work | None:
        """The same outside of steps, of something other than compute shards."""
        return self.start_gather(shard, full, tag)

    @abc.abstractmethod
    def start_reduce(self, reduction: Reduction) -> Work | None:
        """Start a reduce-scatter (mean). See [Note: reductions]."""

    @abc.abstractmethod
    def start_average(self, tensor: torch.Tensor) -> Work | None:
        """Start to replace `tensor` [n] fp32 by its mean over the ranks of the group. Completed as the other two."""

    @abc.abstractmethod
    def scratch_numel(self, shard_numel: int, wire: torch.dtype, accumulate: torch.dtype, *, adds: bool) -> int:
        """Elements of scratch that reductions of such a unit need.

        Args:
            shard_numel: of the unit.
            wire, accumulate: what is sent, what is summed in.
            adds: whether main grads may hold something that is added to.
        """

    def allocate_visible(self, numel: int, dtype: torch.dtype, *, is_users: bool = False) -> torch.Tensor:
        """Memory for what other ranks are to read: a buffer [numel] of zeros on the device of the streams.

        Args:
            numel, dtype: how much, of which type.
            is_users: whether the user sees it too.
        """
        return torch.zeros(numel, dtype=dtype, device=self.streams.device)

    def retract_shards(self) -> Work | None:
        """Before compute shards are written: the work that is done once no other rank reads them. None: none does."""
        self.log.add(Kind.FORWARD)
        return None

    def publish_shards(self, shards: Sequence[torch.Tensor]) -> None:  # noqa: B027  # few transports need to know
        """Compute shards are written: other ranks may read them from now on.

        Args:
            shards: all units', at the places that are the tags of their gathers.
        """

    def progress(self) -> None:  # noqa: B027  # where a backend has threads of its own there is nothing to do
        """Do what can be done for collectives under way without waiting for anyone. Called with every gradient."""

    def guard(self, action: str, subject: str = "") -> Guard:
        """A context around collectives and waits for them: says what failed, see `Guard`."""
        return Guard(self, action, subject)

    def gather_now(self, shard: torch.Tensor, full: torch.Tensor, tag: int) -> None:
        """An all-gather outside of steps: in place, for the compute stream, on return."""
        fence = Fence(self.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "full tensors")
        fence.record()
        fence.wait()
        arrived = Fence(self.streams, Rule.RESULTS_ARRIVED, StreamName.COMM, "full tensors")
        with self.guard("a gather of full tensors"):
            arrived.record(self.start_gather_full(shard, full, tag))
            arrived.wait()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite `tensor` on every rank by that of the rank at place `source`. Blocks."""
        if self.total_size > 1:
            with self.guard("a broadcast"):
                self.log.add(Kind.BROADCAST)
                dist.broadcast(tensor, src=dist.get_global_rank(self.everyone, source), group=self.everyone)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False, everyone: bool = False) -> None:
        """Replace `tensor` by the sum (or maximum) over ranks, on the compute stream.

        Args:
            tensor: any shape.
            maximum: instead of the sum.
            everyone: over replicas too.
        """
        if (self.total_size if everyone else self.world_size) > 1:
            group = self.everyone if everyone else self.group
            with self.guard("a sum over all ranks"):
                self.log.add(Kind.SUM)
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank, replicas included. Blocks the host; no device waits or is waited for."""
        if self.total_size == 1:
            return value
        flag = torch.tensor([value], dtype=torch.uint8)
        with self.guard("a vote of all ranks"):
            self.log.add(Kind.VOTE)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=_host_group(self.everyone))
        return bool(flag)

    def gather_objects(self, value: object, *, everyone: bool = True) -> list[Any]:
        """Every rank's `value`, in rank order. Blocks; for set-up and errors, not for steps.

        Args:
            value: can be pickled.
            everyone: from replicas too.
        """
        values: list[Any] = [value] * (self.total_size if everyone else self.world_size)
        if len(values) > 1:
            with self.guard("a meeting of all ranks"):
                self.log.add(Kind.MEETING)
                dist.all_gather_object(values, value, group=self.everyone if everyone else self.group)
        return values

    def gather_errors(self, error: str | None) -> list[str | None]:
        """Every rank's error, None where there is none. Blocks."""
        return self.gather_objects(error)

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.gather_objects(None)

    # -- when ranks do not do the same ------------------------------------------------------------------------------

    def find_difference(self) -> str | None:
        """What this rank and others have issued that is not the same; None if all is, as far as one can know."""
        return None

    def give_up_if_in_vain(self) -> None:
        """Called from another thread while this rank has been waiting for long."""
        if self.failure is None and self.find_difference() is not None:
            self.hang_up()

    def hang_up(self) -> None:  # noqa: B027  # where there are no connections there is nothing to close
        """End every wait of this rank, and of those that wait for it, with an error."""

    def fail(self, failure: str) -> None:
        """A collective has failed: issue nothing more, let nobody wait for this rank. The first failure counts."""
        if self.failure is None:
            self.failure = failure
            self.hang_up()


# Groups over which hosts talk, beside those that only move what is on devices. Kept by torch until it destroys them.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """`group` if it takes tensors in CPU memory, else one of the same ranks that does. Collective the first time."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        if group not in _host_groups:
            ranks = dist.get_process_group_ranks(group)
            _host_groups[group] = weakref.ref(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
        return _alive(_host_groups[group])
    return group


def _alive(group_of: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    group = group_of()
    if group is None:
        raise CommunicationError("the process group was destroyed (destroy_process_group) while the model needs it")
    return group


_alive_ones: weakref.WeakSet[Transport] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for transport in _alive_ones:
        if transport.total_size > 1:
            transport.failure = (
                f"this process was forked from rank {transport.rank} and is none of its own: it has the weights that "
                "it was forked with, but no connection to other ranks"
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


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
