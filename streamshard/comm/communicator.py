"""The ranks that train a model together: their transport, and what they sum and broadcast."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.groups import Parts
from streamshard.comm.host_groups import alive, close_connections, host_group_of, weak
from streamshard.comm.ranks import RankGroup
from streamshard.comm.streams import Fence, RankWait, Rule, StreamName, Streams, Work
from streamshard.comm.transport import AllToAll, AloneTransport, Gather, Transport
from streamshard.device import serves
from streamshard.errors import ConfigError, ShardingError


class Communicator(RankGroup):
    """The ranks of a shard group, and all ranks of its model. Making one is collective: it connects the ranks.

    Args:
        group: the shard group. Its ranks all-gather, reduce and sum norms together.
        streams: the engine's streams.
        stream: the transport's stream.
        all_ranks: all ranks that train this model, in all replicas; None: the shard group.
        replica: number of this rank's replica. Replica 0 writes weights to files.
        parts: of the DTensors; None: there are no DTensors.

    Attributes:
        n_parts: the number of parts of each DTensor.
        axis: names the ranks that have all parts, and get the same batches.
        counts_parts: sums and norms count this rank's part.
        counts_copies: of a tensor that the ranks of all parts have, sums and norms count this rank's copy.
        transport: moves bytes between the ranks; chosen by the device of `streams`. Tests replace it.
        grad_divisor: of the shard group: its sums of gradients are divided by it; N for the mean. Of experts: sums in a
            loss are divided by it and by `n_parts`.

    Raises:
        ConfigError: the group has no backend for the device.
    """

    transport: Transport
    # On the class: `PlannedRanks` is made without this constructor.
    counts_copies = counts_parts = True
    _is_in_hook = False
    _levels: Sequence[Communicator] = ()
    _whole_of: Callable[[], Communicator | None] = staticmethod(lambda: None)  # of a level: the model's ranks
    n_parts, axis = 1, 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        streams: Streams,
        stream: StreamName = StreamName.COMM,
        all_ranks: dist.ProcessGroup | None = None,
        replica: int = 0,
        parts: Parts | None = None,
    ) -> None:
        if not serves(group, streams.device.type):
            backend = dist.get_default_backend_for_device(streams.device)
            raise ConfigError(
                f"parameters are on {streams.device}, for which the process group ({dist.get_backend_config(group)}) "
                f"has no backend: torch.distributed.init_process_group({backend!r}), or without a name for all devices"
            )
        # On CPUs not the user's groups: gloo would pair our messages with those of other libraries.
        shard_group, *others = (
            each if streams.has_streams else host_group_of(each)
            for each in (group, *(() if parts is None else (parts.model, parts.same)))
        )
        super().__init__(all_ranks or group, shard_group=shard_group, replica=replica, streams=streams, stream=stream)
        self._model_group_of, self._same_group_of = self.group_of, weak(self.all_ranks)
        if parts is not None:
            self.n_parts, self.counts_copies, self.counts_parts = parts.size, parts.number == 0, parts.counts
            self.axis = parts.axis
            self._model_group_of, self._same_group_of = map(weak, others)
        # CPU ranks begin with sockets: how much memory they would share is known only when units are planned.
        self.transport = _make_transport(self, "nccl" if streams.has_streams else "sockets")
        self.grad_divisor = float(self.world_size if parts is None else parts.model.size() // parts.size)
        if self.world_size > 1:
            # NCCL would connect in the first collective. Of replicas this is an average, in autograd's thread.
            with self.waiting("the first meeting of a process group's ranks"):
                self.transport.meet()

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The ranks that share one replica of the model. Raises as `users_group` does."""
        return alive(self._model_group_of)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has the model to itself, replicas aside."""
        return self.world_size * self.n_parts == 1

    @property
    def n_replicas(self) -> int:
        """The number of replicas of the model."""
        return self.total_size // (self.world_size * self.n_parts)

    def include(self, *levels: Communicator) -> None:
        """These communicators belong to the same program: one log has the collectives of all, and all close together.

        So ranks that wait in a level compare the log, and a rank that fails ends waits in each.
        """
        self._levels = levels
        for each in levels:
            # Their own logs end: with three, a wait and what came before it would be in different logs.
            each.recorder.leave()
            each.recorder = each.transport.recorder = self.recorder
            each._whole_of = weakref.ref(self)

    def are_the_ranks_of(self, other: Communicator) -> bool:
        """Whether the shard groups of both have the same processes, in the same order."""
        return self is other or dist.get_process_group_ranks(self.group) == dist.get_process_group_ranks(other.group)

    def share_memory(self, nbytes: int, units: int) -> None:
        """Switch to the shared-memory transport if all CPU ranks can map each other's memory. Collective.

        Args:
            nbytes: `Transport.allocate_visible` will allocate at most so much.
            units: the most reductions that can be under way.
        """
        if not self.streams.has_streams and min(self.world_size, self.total_size) > 1:  # planned ranks do not exist
            from streamshard.comm.shared_memory import SharedMemoryTransport, share_memory

            buffers = share_memory(self, nbytes, units)
            if buffers is not None:
                self.transport = SharedMemoryTransport(self, buffers)

    def share_memory_of(self, model: Communicator) -> None:
        """Use the memory that the ranks of `model` share, if these ranks, with the same experts, are among them."""
        if not self.streams.has_streams and min(self.world_size, self.total_size) > 1:
            from streamshard.comm.shared_memory import SharedMemoryTransport

            own, theirs = dist.get_process_group_ranks(self.group), dist.get_process_group_ranks(model.group)
            if isinstance(model.transport, SharedMemoryTransport) and set(own).issubset(theirs):
                self.transport = model.transport.among(self, list(map(theirs.index, own)))

    @property
    def all_ranks(self) -> dist.ProcessGroup:
        """All ranks that train this model: on devices the user's own group, on CPUs StreamShard's."""
        return self.users_group if self.streams.has_streams else host_group_of(self.users_group)

    def gather_now(self, shard: torch.Tensor, full: torch.Tensor, tag: int) -> None:
        """All-gather outside of steps. On return the compute stream can use the result.

        Args:
            shard: [n] this rank's part, any dtype.
            full: [N * n] receives the parts of all ranks of the shard group, same dtype.
            tag: index of the flat parameter whose data these are.
        """
        self.refuse_in_hook()
        with self.waiting("a gather of full tensors"), self._beside_compute("full tensors") as works:
            works.append(self.transport.start_gather(Gather(shard, full, tag, is_of_step=False)))

    def exchange_now(self, exchange: AllToAll) -> None:
        """All-to-all of the shard group outside of steps. On return the compute stream can use the result."""
        self.refuse_in_hook()
        with self.waiting("an exchange of pieces"), self._beside_compute("pieces") as works:
            works.append(self.transport.start_all_to_all(exchange))

    def average_now(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` [n] fp32 by its mean over these ranks. On return the compute stream can use the result."""
        with self.waiting("an average over replicas"), self._beside_compute("weights to average") as works:
            works.append(self.transport.start_average(tensor, None))

    def broadcast(self, tensor: torch.Tensor, source: int = 0, *, is_part: bool = False) -> None:
        """Copy `tensor` of rank number `source` into `tensor` of every rank. Blocks.

        Args:
            tensor: any shape.
            source: a number of `total_size`.
            is_part: the tensor is a part of a DTensor: among the ranks that have the same part.
        """
        if self.total_size > 1:
            with self.talk("a broadcast", RecordKind.BROADCAST), self._blocking("a tensor"):
                sent = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # gloo knows no fp8
                group = alive(self._same_group_of) if is_part else self.all_ranks
                dist.broadcast(sent, group=group, group_src=source)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False, with_replicas: bool = False) -> None:
        """Replace `tensor` by the sum (or maximum) over a replica's ranks. The compute stream can use it afterwards.

        Args:
            tensor: any shape; it may be in host memory.
            maximum: take the maximum instead of the sum.
            with_replicas: reduce over all replicas too.
        """
        if self.total_size > 1 if with_replicas else not self.is_alone:
            with self.talk("a sum over all ranks", RecordKind.SUM), self._blocking("a sum"):
                group = self.all_ranks if with_replicas else self.model_group
                on_device = tensor.to(self.streams.device)  # NCCL does not read host memory
                dist.all_reduce(on_device, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
                if on_device is not tensor:
                    tensor.copy_(on_device)

    @contextlib.contextmanager
    def _beside_compute(self, what: str, stream: StreamName | None = None) -> Iterator[list[Work | None]]:
        """Run a collective on its communicator's stream, not on the compute stream. The body may add pending works.

        Collectives of one communicator on two streams can wait for each other (reported for ROCm,
        pytorch/torchtitan#4064). First its stream waits for the compute stream (rule 5). Afterwards the compute stream
        waits for it (rule 7).

        Args:
            what: the tensors that the collective reads and writes, for messages.
            stream: None: the transport's.
        """
        stream = stream or self.stream
        works: list[Work | None] = []
        written = Fence(self.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, what, stream)
        written.record()
        written.wait()
        with self.streams.on(stream):
            yield works
        arrived = Fence(self.streams, Rule.RESULTS_ARRIVED, stream, what)
        arrived.record(*works)
        arrived.wait()

    def _blocking(self, what: str) -> AbstractContextManager[object]:
        """Around a collective of torch's that blocks the host on CPUs. There no fence orders other works behind it."""
        if not self.streams.has_streams:
            return contextlib.nullcontext()
        # If each replica is one rank, the communicator of all ranks is that of averages too, which have their stream.
        return self._beside_compute(what, StreamName.REPLICA if self.is_alone else self.stream)

    def talk(self, action: str, kind: RecordKind) -> RankWait:
        """See `RankGroup.talk`."""
        self.refuse_in_hook()
        # In gloo this rank copies nothing, and others may need its copies before they come there.
        with self.waiting(action):
            for each in (self, *self._levels):
                each.transport.before_talk()
        return super().talk(action, kind)

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """A hook of the user's runs, for a gradient that other ranks may have at another moment, or not at all."""
        self._is_in_hook = True
        try:
            yield
        finally:
            self._is_in_hook = False

    def refuse_in_hook(self) -> None:
        """A collective outside of the model's passes is about to begin: raise in a hook of the user's.

        Raises:
            ShardingError: names the alternatives.
        """
        if self._is_in_hook:
            raise ShardingError(
                "a hook of register_post_accumulate_grad_hook wants a norm, a sum or elements of other ranks. It runs "
                "inside backward, on each rank at another moment: read p.grad.norm() after backward(), clip and step "
                "whole parameters after it, or use each element by itself in the hook"
            )

    def close(self, *, users_too: bool = False) -> None:
        """See `RankGroup.close`. Ends the transport's waits too."""
        if (whole := self._whole_of()) is not None:
            # Other ranks may wait for this one in any of the levels.
            whole.close(users_too=users_too)
            return
        for each in (self, *self._levels):
            each._close_own(users_too=users_too)

    def _close_own(self, *, users_too: bool) -> None:
        self.transport.leave()  # peers in shared memory wait for no connection
        super().close(users_too=users_too)
        if self.n_parts > 1:
            others = (of() for of in (self._model_group_of, self._same_group_of))
            close_connections(*(group for group in others if group is not None))


class PlannedRanks(Communicator):
    """Ranks that do not exist, for a plan. This is rank 0, whose buffers are on the meta device.

    Args:
        world_size: how many.
        transport: what would connect them: "nccl" on GPUs, "sockets" between CPUs, "shared-memory" between the CPU
            ranks of a machine.

    Raises:
        ConfigError: there is no such transport, or `world_size` is not positive.
    """

    def __init__(self, world_size: int, transport: str) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size={world_size!r}: wanted a positive number of ranks")
        if transport not in ("nccl", "sockets", "shared-memory"):
            raise ConfigError(f"transport={transport!r}: wanted one of nccl, sockets, shared-memory")
        RankGroup.__init__(self, streams=Streams(torch.device("meta")))  # not Communicator's, which connects ranks
        # `total_size` stays 1, so objects and broadcasts meet nobody.
        self.world_size, self.kind = world_size, transport
        self.transport = _make_transport(self, transport)


def _make_transport(ranks: RankGroup, kind: str) -> Transport:
    """The transport of `kind` between `ranks`. Others are not imported. Planned ranks share no memory."""
    if ranks.world_size == 1 or kind == "shared-memory":  # both need no scratch
        return AloneTransport(ranks)
    if kind == "nccl":
        from streamshard.comm.nccl import NcclTransport

        return NcclTransport(ranks)
    from streamshard.comm.gloo import PairwiseTransport

    return PairwiseTransport(ranks)
