"""Which transport serves a process group."""

from __future__ import annotations

import torch.distributed as dist

from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Streams
from streamshard.comm.transport import Transport
from streamshard.errors import ConfigError

__all__ = ["make_transport"]


def make_transport(
    group: dist.ProcessGroup, streams: Streams, everyone: dist.ProcessGroup | None = None, replica: int = 0
) -> Transport:
    """The transport for `group` and the device of `streams`. Arguments: see `Transport`.

    Raises:
        ConfigError: CUDA parameters over a group that has no NCCL backend.
    """
    if not streams.is_cuda:
        return PairwiseTransport(group, streams, everyone, replica)
    backend = dist.get_backend(group)
    if "nccl" not in backend:
        raise ConfigError(f"parameters are on {streams.device}, the process group's backend is {backend!r}: use nccl")
    return NcclTransport(group, streams, everyone, replica)
