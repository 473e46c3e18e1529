"""Who trains a model together: process groups from a mesh, from the user, or from the launcher's environment."""

from __future__ import annotations

import datetime
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamshard.errors import ConfigError, ShardingError, StreamShardError

__all__ = ["Groups", "groups_of", "refuse_together", "resolve_group"]


class Groups(NamedTuple):
    """Who does what together.

    Attributes:
        shard: ranks that hold a model between them.
        replicate: ranks that hold the same shard of it; None where there is one replica.
        everyone: all ranks of both.
        replica: this rank's place in `replicate`.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    everyone: dist.ProcessGroup
    replica: int = 0


def groups_of(mesh: object) -> Groups:
    """The groups of a process group or of a 1-D (shard) or 2-D (replicate x shard) DeviceMesh.

    Raises:
        ConfigError: it is something else, has more axes, its ranks are in another order, or this one is not in it.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return Groups(mesh, None, mesh)
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"mesh={mesh!r} is what torch.distributed.new_group gives to ranks that are not in the new group: rank "
            f"{dist.get_rank()} has no part of this model. Call StreamShard on the ranks of the group only"
        )
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r}: wanted a DeviceMesh, a ProcessGroup or None")
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} axes: wanted one, whose ranks share the model, or two, replicate x shard"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"mesh={mesh!r}: rank {dist.get_rank()} is not in it, so it has no part of the model")
    if mesh.ndim == 1:
        return Groups(mesh.get_group(), None, mesh.get_group())
    if any(row != sorted(row) for row in mesh.mesh.tolist()):  # groups number their ranks in this order
        raise ConfigError(f"mesh={mesh!r}: wanted ranks that ascend along the second axis, shard")
    replicate, shard = mesh.get_group(0), mesh.get_group(1)
    if mesh.size(0) == 1:
        return Groups(shard, None, shard)
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        everyone = dist.group.WORLD
    else:
        everyone = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return Groups(shard, replicate, everyone, mesh.get_local_rank(0))


def resolve_group(device: torch.device) -> dist.ProcessGroup:
    """The default group, or one made from the launcher's environment.

    Raises:
        ShardingError: there is neither a process group nor a launcher.
    """
    if not dist.is_available():
        raise ShardingError("this build of torch has no torch.distributed")
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ShardingError(
                f"no process group and no launcher ({', '.join(missing)} not set): start the script with `torchrun "
                "--nproc-per-node N script.py` or `accelerate launch`, or call torch.distributed.init_process_group "
                "first. On CPUs `accelerate launch --num_processes N` alone starts one process that knows of no "
                "others: it needs a config file such as docs/examples/two_processes.yaml"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=10))
    default = dist.group.WORLD
    if default is None:
        raise ShardingError("torch.distributed is initialised but has no default group")
    return default


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StreamShardError) else f"{type(error).__name__}: {error}"


def refuse_together(group: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Tell the other ranks that this one refuses its model, or None that it does not. Collective, blocks.

    Returns on a rank with an error, which then raises its own.

    Raises:
        ShardingError: here all is well, but another rank refuses its model; names the rank and says why.
    """
    errors: list[str | None] = [None] * dist.get_world_size(group)
    if len(errors) > 1:
        dist.all_gather_object(errors, None if error is None else _told(error), group=group)
    for rank, message in enumerate(errors):
        if error is None and message is not None:
            raise ShardingError(f"rank {rank} refused its model: {message}")
