"""Ranks that do not exist, for a plan."""

from __future__ import annotations

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.ranks import RankGroup
from streamshard.comm.shared_memory import SharedMemoryTransport
from streamshard.comm.streams import Streams
from streamshard.comm.transport import AloneTransport, Transport
from streamshard.errors import ConfigError


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
        self.transport = AloneTransport(self) if world_size == 1 else TRANSPORTS[transport](self)


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
