"""Which transport serves a process group."""

from __future__ import annotations

import torch.distributed as dist

from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Streams
from streamshard.errors import ConfigError

__all__ = ["connect"]


def connect(
    group: dist.ProcessGroup, streams: Streams, everyone: dist.ProcessGroup | None = None, replica: int = 0
) -> Ranks:
    """The ranks of `group`, with the transport for the device of `streams`. Arguments: see `Ranks`.

    Raises:
        ConfigError: CUDA parameters over a group that has no NCCL backend.
    """
    backend = dist.get_backend(group)
    if streams.is_cuda and "nccl" not in backend:
        raise ConfigError(f"parameters are on {streams.device}, the process group's backend is {backend!r}: use nccl")
    ranks = Ranks(group, streams, everyone, replica)
    ranks.transport = NcclTransport(ranks) if streams.is_cuda else PairwiseTransport(ranks)
    return ranks
