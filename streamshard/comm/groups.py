"""Process groups of the ranks that train a model: the user's, a mesh's, or made from the launcher's environment.

StreamShard's own groups of the same ranks are in `streamshard.comm.host_groups`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not re-exported in stubs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from streamshard.comm.host_groups import gloo_settings, is_one_machine, state_of, state_of_default
from streamshard.device import has_streams
from streamshard.errors import CommunicationError, ConfigError, ShardingError, uncaught
from streamshard.torch_private import backend_of

_NETWORK_ADVICE = (
    ". If ranks are on several machines: set GLOO_SOCKET_IFNAME on each to the name of its network interface that the "
    "others reach, such as eth0 (`ip address` lists them)"
)
_RESTART_ADVICE = (
    ". torchrun has restarted the ranks, and its store may still have the addresses of dead ranks. Let StreamShard "
    "make the process group, or start with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d`"
)
_ASK_EVERY_S = 0.02  # how often rank 0 reads the other ranks' questions


class Parts(NamedTuple):
    """The ranks between which DTensors are cut in parts.

    Attributes:
        size: how many parts.
        number: of this rank's part.
        model: ranks that share one replica of the model.
        same: ranks with the same part, in all replicas.
        counts: sums and norms count this rank's part; another rank outside of its group of shards may have a copy.
        axis: global number of the first rank of the axis. It names the axis: its ranks have all parts.
    """

    size: int
    number: int
    model: dist.ProcessGroup
    same: dist.ProcessGroup
    counts: bool = True
    axis: int = 0


class Experts(NamedTuple):
    """The ranks of a model with DTensors of experts, whose mesh lies inside the shard group.

    Attributes:
        shard: ranks of one replica with the same experts. They cut these experts.
        parts: each part has other experts.
    """

    shard: dist.ProcessGroup
    parts: Parts


class Groups(NamedTuple):
    """The process groups of one model.

    Attributes:
        shard: ranks that cut the same tensors. Without `tensor_parallel` they share one replica of the model.
        replicate: ranks that hold the same shard, one in each replica; None if there is one replica.
        all_ranks: all ranks that train the model.
        replica: this rank's number in `replicate`.
        device_type: the device type of the user's mesh; None: the user gave no mesh.
        tensor_parallel: if the model has DTensors on a mesh across `shard`.
        experts: if the model has DTensors on a mesh inside `shard`.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup
    replica: int = 0
    device_type: str | None = None
    tensor_parallel: Parts | None = None
    experts: Experts | None = None


def groups_of(mesh: object) -> Groups:
    """The groups of a process group or of a 1-D (shard) or 2-D (replicate x shard) DeviceMesh.

    Raises:
        ConfigError: `mesh` is something else, has more axes, has its ranks in another order, or does not contain this
            rank.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return Groups(mesh, None, mesh)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r}: wanted a DeviceMesh, a ProcessGroup with rank {dist.get_rank()}, or None")
    if mesh.ndim > 2:
        raise ConfigError(f"mesh has {mesh.ndim} axes: wanted one (shard), or two (replicate x shard)")
    if mesh.get_coordinate() is None:
        raise ConfigError(f"mesh={mesh!r}: rank {dist.get_rank()} is not in it")
    shard = mesh.get_group(mesh.ndim - 1)
    # One replica needs no averages, and no communicator for them.
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return Groups(shard, None, shard, device_type=mesh.device_type)
    if any(row != sorted(row) for row in mesh.mesh.tolist()):  # a process group sorts its ranks
        raise ConfigError(f"mesh={mesh!r}: wanted ranks that ascend along the second axis, shard")
    everyone = mesh.mesh.flatten().tolist()
    all_ranks = group_of_ranks(everyone, everyone)
    return Groups(shard, mesh.get_group(0), all_ranks, mesh.get_local_rank(0), mesh.device_type)


def group_of_ranks(ranks: Sequence[int], callers: Collection[int], *known: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of `ranks`: all ranks, one of `known`, or a new group, which costs a communicator. Collective.

    Args:
        callers: the ranks that call this, each with its own `ranks`.
        known: groups that the callers have.

    Raises:
        ConfigError: torch would split the communicator of all ranks, and some do not call this.
    """
    world: Any = dist.group.WORLD
    for group in (world, *known):
        if dist.get_process_group_ranks(group) == sorted(ranks):
            return cast(dist.ProcessGroup, group)
    # torch does so, whatever use_local_synchronization is, and ncclCommSplit waits for all ranks.
    device = world.bound_device_id
    if device is not None and len(callers) < world.size() and backend_of(world, device).supports_splitting:
        what = f"init_process_group(device_id=..), and only ranks {sorted(callers)} of {world.size()} shard the model"
        raise ConfigError(f"{what}: torch would wait for the others to make a process group. Leave device_id away")
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True))  # others do not call it


def resolve_group(device: torch.device) -> dist.ProcessGroup:
    """The default process group. Makes one from the launcher's environment if there is none, for `device` and the CPU.

    Raises:
        ShardingError: there is neither a process group nor a launcher.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            what = f"no process group and no launcher ({', '.join(missing)} not set)"
            how = "`torchrun --nproc-per-node N script.py` or `accelerate launch --multi_gpu --num_processes N ..`"
            raise ShardingError(f"{what}: start with {how}")
        make_default_group(device)
    return cast(dist.ProcessGroup, dist.group.WORLD)


def make_default_group(device: torch.device, **given: Any) -> None:
    """Make the default process group, with backends for `device` and the CPU.

    Args:
        device: the device that ranks train on.
        **given: arguments of ``init_process_group``. None given: the launcher's environment counts.

    Raises:
        CommunicationError: the ranks cannot connect.
    """
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
    several = ",".join(f"{kind}:{backend}" for kind, backend in backends.items())
    timeout = datetime.timedelta(minutes=10)  # torch's default for NCCL
    world_size = int(given.get("world_size", os.environ.get("WORLD_SIZE", "1")))
    try:
        with gloo_settings(os.environ.get("MASTER_ADDR"), world_size):
            given = given or _meet_at_launchers_store(timeout)
            dist.init_process_group(several if len(backends) > 1 else "gloo", timeout=timeout, **given)
            dist.all_reduce(torch.zeros(1, device="cpu"))  # here, where ranks that cannot connect get advice
    except RuntimeError as error:
        raise CommunicationError(f"the ranks cannot connect: {error}{connection_advice()}") from error
    state_of_default().is_ours = True
    if has_streams(device):
        atexit.register(_end)


def _meet_at_launchers_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments of ``init_process_group`` from the launcher's environment. Collective; blocks.

    torchrun's store outlives a restart, with the addresses of dead ranks. So each start of the ranks has keys of its
    own.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    start = _agree_on_name(store, rank, world_size)
    return {"store": PrefixStore(start, store), "rank": rank, "world_size": world_size}


def _agree_on_name(store: Any, rank: int, world_size: int) -> str:
    """A name that no earlier start of the ranks has used in `store`, the same on all ranks. Collective; blocks.

    TORCHELASTIC_RESTART_COUNT differs between machines after a restart. So rank 0 draws a name. Each other rank draws a
    key, asks with it, and rank 0 answers under this key. So no answer is of an earlier start. A question may be: rank 0
    reads the questions again until all ranks have their answer.
    """
    drawn = f"streamshard/{uuid.uuid4().hex}"
    if rank != 0:
        store.set(f"streamshard/question of rank {rank}", drawn)
        name: str = store.get(f"{drawn}/answer").decode()
        store.set(f"{name}/rank {rank} knows", "")
        return name
    others = range(1, world_size)
    while not store.check([f"{drawn}/rank {other} knows" for other in others]):
        questions = store.multi_get([f"streamshard/question of rank {other}" for other in others])
        store.multi_set([f"{question.decode()}/answer" for question in questions], [drawn] * len(questions))
        time.sleep(_ASK_EVERY_S)
    return drawn


def connection_advice() -> str:
    """Advice for ranks that connect slowly or not at all: sentences to add to an error, "" if there is none."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_users = dist.is_initialized() and not state_of_default().is_ours
    return _NETWORK_ADVICE * (not is_one_machine()) + _RESTART_ADVICE * (is_restarted and is_users)


def _end() -> None:
    """At exit, destroy the default group that StreamShard has made: NCCL warns otherwise.

    After an uncaught exception (or Ctrl-C) other ranks may never issue this rank's last collectives, and NCCL would
    wait for them until its timeout. So abort the group first.
    """
    if (group := dist.group.WORLD) is not None and state_of(group).is_ours:
        if uncaught() is not None:
            with contextlib.suppress(RuntimeError):  # gloo cannot abort
                group.abort()
        dist.destroy_process_group()
