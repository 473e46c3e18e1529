"""Process groups of the ranks that train a model: from a mesh, from the user, or from the launcher's environment."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import time
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streamshard.comm.flight_recorder import Board, RecordKind, Wait, Watch, explain
from streamshard.comm.objects import gather_bytes, gather_results, raise_if
from streamshard.device import has_streams, serves
from streamshard.errors import CommunicationError, ConfigError, ShardingError
from streamshard.torch_private import backend_of

__all__ = [
    "Groups",
    "close_connections",
    "groups_of",
    "host_group_of",
    "make_default_group",
    "refuse_together",
    "resolve_group",
    "timeout_of",
]

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, as its documentation says
_COME = "streamshard/come"  # counts the ranks that have come to make a host group
_UNUSED_TAG = (1 << 31) - 1  # of a message that is never sent


class Groups(NamedTuple):
    """The process groups of one model.

    Attributes:
        shard: ranks that share one replica of the model.
        replicate: ranks that hold the same shard, one in each replica; None if there is one replica.
        all_ranks: all ranks that train the model.
        replica: this rank's number in `replicate`.
        device_type: the device type of the user's mesh; None: the user gave no mesh.
    """

    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup
    replica: int = 0
    device_type: str | None = None


def groups_of(mesh: object) -> Groups:
    """The groups of a process group or of a 1-D (shard) or 2-D (replicate x shard) DeviceMesh.

    Raises:
        ConfigError: `mesh` is something else, has more axes, has its ranks in another order, or does not contain this
            rank.
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
        return Groups(mesh.get_group(), None, mesh.get_group(), device_type=mesh.device_type)
    if any(row != sorted(row) for row in mesh.mesh.tolist()):  # a process group sorts its ranks
        raise ConfigError(f"mesh={mesh!r}: wanted ranks that ascend along the second axis, shard")
    replicate, shard = mesh.get_group(0), mesh.get_group(1)
    if mesh.size(0) == 1:
        return Groups(shard, None, shard, device_type=mesh.device_type)
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        all_ranks = dist.group.WORLD
    else:
        all_ranks = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return Groups(shard, replicate, all_ranks, mesh.get_local_rank(0), mesh.device_type)


def resolve_group(device: torch.device) -> dist.ProcessGroup:
    """The default process group. If there is none, one from the launcher's environment, for `device` and the CPU.

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
                "others: it needs --multi_gpu, or a config file such as docs/examples/two_processes.yaml"
            )
        make_default_group(device)
    return _default()


def make_default_group(device: torch.device, **rendezvous: Any) -> None:
    """Make the default process group, with backends for `device` and the CPU.

    Args:
        device: the device that ranks train on.
        **rendezvous: arguments of ``init_process_group``; without any, the launcher's environment counts.
    """
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
    several = ",".join(f"{kind}:{backend}" for kind, backend in backends.items())
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group(several if len(backends) > 1 else "gloo", timeout=timeout, **rendezvous)
    if has_streams(device):
        atexit.register(_end, weakref.ref(_default()))


def _default() -> dist.ProcessGroup:
    default = dist.group.WORLD
    if default is None:
        raise ShardingError("torch.distributed is initialised but has no default group")
    return default


def _end(group_of: weakref.ref[dist.ProcessGroup]) -> None:
    """Destroy the default group at exit: NCCL warns otherwise."""
    if dist.is_initialized() and group_of() is dist.group.WORLD:
        dist.destroy_process_group()


# StreamShard's own gloo groups, by the user's group of the same ranks. Weak: torch owns them.
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def host_group_of(group: dist.ProcessGroup, *, makes: bool = True) -> dist.ProcessGroup | None:
    """StreamShard's own gloo group of the same ranks.

    StreamShard does not use the user's group for this. gloo would pair StreamShard's collective on one rank with
    another library's collective on another, and give each the other's bytes. NCCL's watchdog would end the process
    while one rank writes files.

    Args:
        group: the user's group. It is returned as it is if it serves the CPU and has one rank or no gloo.
        makes: make the group if there is none yet (collective); False: return None then.
    """
    if serves(group, "cpu") and (group.size() == 1 or backend_of(group, torch.device("cpu")).name() != "gloo"):
        return group
    if makes and group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_of(group) if serves(group, "cpu") else _DEFAULT_TIMEOUT
        # With use_local_synchronization torch names a group by the number of groups that this rank is in. That number
        # may differ between ranks, so a group of all ranks does without.
        is_of_some = len(ranks) < dist.get_world_size()
        _await_all(group, timeout.total_seconds())
        host_group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=is_of_some)
        _host_groups[group] = _host_groups[host_group] = weakref.ref(host_group)
    group_of = _host_groups.get(group)
    return None if group_of is None else group_of()


def _await_all(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Return once all ranks of `group` have called this.

    ``dist.new_group`` would block the store's connection while it waits, and the watchdog could not read the logs.

    Raises:
        RuntimeError: the other ranks did not come in time.
    """
    store, deadline, sleep_s = group.get_group_store(), time.monotonic() + timeout_s, 1e-4
    come = store.add(_COME, 1)
    while come < group.size():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {timeout_s:g} s: {come} of {group.size()} ranks have come")
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, 0.1)
        come = store.add(_COME, 0)


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout of `group` for collectives on tensors in CPU memory."""
    options = getattr(backend_of(group, torch.device("cpu")), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
    return timeout


def close_connections(group: dist.ProcessGroup) -> None:
    """End all waits over `group` with an error, on this rank and on ranks that wait for it. Ends the group for good.

    gloo has no function for it, but closes all connections when a receive times out.

    Args:
        group: a gloo group.
    """
    if group.size() > 1:
        peer = (group.rank() + 1) % group.size()
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(datetime.timedelta(milliseconds=1))


def refuse_together(group: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Tell the other ranks whether this rank refuses its model. Collective; blocks.

    On a rank that passes an error this returns; the caller raises the error.

    Args:
        group: all ranks of the model; None: the default group.
        error: why this rank refuses its model; None: it does not.

    Raises:
        ShardingError: this rank accepts its model, but another one refuses; names that rank and its reason.
        CommunicationError: another rank did not come.
    """
    group = group or dist.group.WORLD
    if group is None or group.size() == 1:
        return
    board = Board(group, group.rank(), group.size())
    watch = Watch(board)
    watch.wait = Wait("the start of StreamShard(model), which all ranks have to call")
    board.log.add(RecordKind.MEETING)
    try:
        hosts = host_group_of(group)
        if hosts is None:
            raise RuntimeError("the process group was destroyed")
        gather_results(
            lambda data: gather_bytes(hosts, data), "shard the model", lambda: raise_if(error), ShardingError
        )
    except (RuntimeError, ShardingError) as failure:
        if error is not None:
            return
        if isinstance(failure, ShardingError):
            raise
        message = f"{watch.wait.what} failed on {board.describe_rank()}: {explain(failure, board)}"
        raise CommunicationError(message) from failure
