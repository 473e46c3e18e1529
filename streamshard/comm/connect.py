"""Which transport serves a process group."""

from __future__ import annotations

import torch.distributed as dist

from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import StreamName, Streams
from streamshard.device import serves
from streamshard.errors import ConfigError

__all__ = ["connect"]


def connect(
    group: dist.ProcessGroup,
    streams: Streams,
    stream: StreamName = StreamName.COMM,
    all_ranks: dist.ProcessGroup | None = None,
    replica: int = 0,
) -> Ranks:
    """The ranks of `group`, with the transport for the device of `streams`. Collective. Arguments: see `Ranks`.

    Raises:
        ConfigError: the group has no backend for that device.
    """
    if not serves(group, streams.device.type):
        backend = dist.get_default_backend_for_device(streams.device)
        raise ConfigError(
            f"parameters are on {streams.device}, for which the process group ({dist.get_backend_config(group)}) has "
            f"no backend: torch.distributed.init_process_group({backend!r}), or without a name for all devices"
        )
    ranks = Ranks(group, streams, stream, all_ranks, replica)
    ranks.transport = NcclTransport(ranks) if streams.has_streams else PairwiseTransport(ranks)
    if ranks.world_size > 1:
        with ranks.guard("the first meeting of a process group's ranks"):
            ranks.transport.meet()
    return ranks
