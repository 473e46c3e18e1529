"""The ranks that train a model together: their transport, and what they sum and broadcast."""

from __future__ import annotations

import torch
import torch.distributed as dist

from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.groups import host_group_of
from streamshard.comm.issue_log import Guard, RecordKind
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.ranks import RankGroup
from streamshard.comm.shared_memory import SharedMemoryTransport, share_memory
from streamshard.comm.streams import StreamName, Streams
from streamshard.comm.transport import Transport
from streamshard.device import serves
from streamshard.errors import ConfigError


class Communicator(RankGroup):
    """The ranks of a shard group, and all ranks of its model. Making one is collective: it connects the ranks.

    Args:
        group: the shard group. Its ranks all-gather, reduce and sum norms together.
        streams: the engine's streams.
        stream: the transport's stream.
        all_ranks: all ranks that train this model, in all replicas; None: the shard group.
        replica: number of this rank's replica. Replica 0 writes weights to files.

    Attributes:
        transport: moves bytes between the ranks; chosen by the device of `streams`. Tests replace it.

    Raises:
        ConfigError: the group has no backend for the device.
    """

    transport: Transport

    def __init__(
        self,
        group: dist.ProcessGroup,
        streams: Streams,
        stream: StreamName = StreamName.COMM,
        all_ranks: dist.ProcessGroup | None = None,
        replica: int = 0,
    ) -> None:
        if not serves(group, streams.device.type):
            backend = dist.get_default_backend_for_device(streams.device)
            raise ConfigError(
                f"parameters are on {streams.device}, for which the process group ({dist.get_backend_config(group)}) "
                f"has no backend: torch.distributed.init_process_group({backend!r}), or without a name for all devices"
            )
        shard_group = group if streams.has_streams else host_group_of(group)
        super().__init__(all_ranks or group, shard_group=shard_group, replica=replica, streams=streams, stream=stream)
        self.transport = NcclTransport(self) if streams.has_streams else PairwiseTransport(self)
        if self.world_size > 1:
            with self.guard("the first meeting of a process group's ranks"):
                self.transport.meet()

    def share_memory(self, nbytes: int, units: int) -> None:
        """Switch to the shared-memory transport if all CPU ranks can map each other's memory. Collective.

        Args:
            nbytes: `Transport.allocate_visible` will allocate at most so much.
            units: the most reductions that can be under way.
        """
        if not self.streams.has_streams and min(self.world_size, self.total_size) > 1:  # a plan has no other ranks
            buffers = share_memory(self, nbytes, units)
            if buffers is not None:
                self.transport = SharedMemoryTransport(self, buffers)

    @property
    def all_ranks(self) -> dist.ProcessGroup:
        """All ranks that train this model: on devices the user's own group, on CPUs StreamShard's."""
        return self.users_group if self.streams.has_streams else host_group_of(self.users_group)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy `tensor` of rank number `source` into `tensor` of every rank. Blocks."""
        if self.total_size > 1:
            with self.talk("a broadcast", RecordKind.BROADCAST), self.streams.beside_compute(self.stream, "a tensor"):
                dist.broadcast(tensor, group=self.all_ranks, group_src=source)

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False, with_replicas: bool = False) -> None:
        """Replace `tensor` by the sum (or maximum) over ranks. The compute stream can use it afterwards.

        Args:
            tensor: any shape.
            maximum: take the maximum instead of the sum.
            with_replicas: reduce over all replicas too.
        """
        if (self.total_size if with_replicas else self.world_size) > 1:
            with self.talk("a sum over all ranks", RecordKind.SUM), self.streams.beside_compute(self.stream, "a sum"):
                group = self.all_ranks if with_replicas else self.group
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)

    def talk(self, action: str, kind: RecordKind) -> Guard:
        """See `RankGroup.talk`."""
        self.transport.before_talk()
        return super().talk(action, kind)

    def close(self, *, users_too: bool = False) -> None:
        """See `RankGroup.close`. Ends the transport's waits too."""
        self.transport.leave()
        super().close(users_too=users_too)


class PlannedRanks(Communicator):
    """Ranks that do not exist, for a plan. This is rank 0, whose buffers are on the meta device.

    Args:
        world_size: how many.
        transport: the name of what would connect them, one of `TRANSPORTS`.

    Raises:
        ConfigError: there is no such transport, or `world_size` is not positive.
    """

    def __init__(self, world_size: int, transport: str) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size={world_size!r}: wanted a positive number of ranks")
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport={transport!r}: wanted one of {', '.join(TRANSPORTS)}")
        RankGroup.__init__(self, streams=Streams(torch.device("meta")))
        self.world_size = world_size
        self.transport = TRANSPORTS[transport](self)


class _PlannedSharedMemory(SharedMemoryTransport):
    """Needs as much memory as `SharedMemoryTransport`, and maps none."""

    def __init__(self, ranks: RankGroup) -> None:
        Transport.__init__(self, ranks)

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """On the meta device."""
        return Transport.allocate_visible(self, numel, dtype)


TRANSPORTS: dict[str, type[NcclTransport | PairwiseTransport | _PlannedSharedMemory]] = {
    "nccl": NcclTransport,
    "sockets": PairwiseTransport,
    "shared-memory": _PlannedSharedMemory,
}
"""What connects ranks: NCCL on GPUs, gloo's sockets between CPUs, shared memory between the CPU ranks of a machine."""
