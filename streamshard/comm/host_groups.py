"""StreamShard's own gloo groups of a user's ranks, and what StreamShard knows of each group."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not re-exported in stubs

from streamshard.comm.tree import gather_to_first, send_to_all
from streamshard.device import serves
from streamshard.errors import CommunicationError
from streamshard.torch_private import backend_of, set_timeout

_ROUTES = Path("/proc/net/route")
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's, as its documentation says
# Of control messages. One rank may write files for hours while the others wait. The watchdog ends waits that hang.
CONTROL_TIMEOUT = datetime.timedelta(hours=24)
_CONNECTED_WITHIN = datetime.timedelta(minutes=5)  # if a rank dies meanwhile
# gloo waits for a connection from a rank five times as long as for anything else (Pair::waitUntilConnected).
_CONNECTION_WAITS = 5
MOST_CONNECTED = 32  # ranks of the largest group that connects at once
_ASK_EVERY_S = 0.5
_UNUSED_TAG = (1 << 31) - 1  # of a message that is never sent

GroupOf = Callable[[], dist.ProcessGroup | None]
"""Returns a group; None if there is none, or it was destroyed."""


def weak(group: dist.ProcessGroup | None) -> GroupOf:
    """A reference to `group` that does not keep it alive.

    destroy_process_group() has to end gloo's threads. They take Python's lock, so they must end before Python ends.
    """
    return weakref.ref(group) if group is not None else lambda: None


class GroupState:
    """StreamShard's state of one process group, as long as the group lives.

    Attributes:
        is_ours: this is the default group, and StreamShard has made it, with keys of its own in the store.
        is_closed: this rank has ended the waits over StreamShard's own group of the same ranks.
        host_of: returns StreamShard's own gloo group of the same ranks, or None. The own group returns itself.
        background_of: the same for saves in the background.
        recorders: the number of flight recorders that the group has had.
        started: of the default group, by ranks, the number of models that this process has started on them.
        log_store: the part of the store in which flight recorders write; None: there was no recorder.
        connection: of the default group, a second connection to the store.
        abandoned: messages that nobody has waited for.
    """

    def __init__(self) -> None:
        self.is_ours = self.is_closed = False
        self.host_of = self.background_of = weak(None)
        self.recorders = 0
        self.started = Counter[tuple[int, ...]]()
        self.log_store: Any = None
        self.connection: Any = None
        self.abandoned: list[dist.Work] = []


_states = weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState]()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """StreamShard's state of `group`."""
    if (state := _states.get(group)) is None:
        state = _states[group] = GroupState()
    return state


def state_of_default() -> GroupState:
    world = dist.group.WORLD
    return GroupState() if world is None else state_of(world)


def log_store(group: dist.ProcessGroup) -> tuple[Any, int]:
    """For a new flight recorder of `group`: a part of the store, and the recorder's number, for its keys in this part.

    All ranks get the same number, because they create recorders in the same order. Making a group blocks the connection
    to the store, so each process has a second connection. Ranks of a large group have no second connection.
    """
    state, default = state_of(group), state_of_default()
    state.recorders += 1
    if state.log_store is None:
        state.log_store = store = group.get_group_store()
        # The name is the same on all ranks, and new after a restart: torchrun's store may have an earlier failure. With
        # a store for each start, the count of restarts may differ between machines.
        is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not default.is_ours
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if is_kept else ""
        with contextlib.suppress(RuntimeError):  # not every store can do this
            connection = base_store(group)
            if group.size() <= MOST_CONNECTED:  # the host of the store would hold two sockets of each rank
                connection = default.connection = default.connection or connection.clone()
            name = store.compare_set(f"streamshard/{start}", "", uuid.uuid4().hex).decode()
            state.log_store = PrefixStore(f"streamshard/{name}", connection)
    return state.log_store, state.recorders


def host_group_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """StreamShard's own gloo group of the same ranks. The first call is collective.

    In the user's group gloo would pair StreamShard's collective on one rank with another library's collective on
    another rank, and give each the other's bytes. NCCL's watchdog would end the process while one rank writes files.

    Args:
        group: the user's group. It is returned itself if it serves the CPU and has one rank or no gloo.
    """
    serves_cpu, state = serves(group, "cpu"), state_of(group)
    if serves_cpu and (group.size() == 1 or backend_of(group, torch.device("cpu")).name() != "gloo"):
        return group
    if (host := state.host_of()) is None:
        timeout = timeout_of(group) if serves_cpu else CONTROL_TIMEOUT  # on CPUs steps use the group too
        _wait_for_all(group, timeout if serves_cpu else _DEFAULT_TIMEOUT)
        host = make_host_group(group, timeout)
        state.host_of = weak(host)
    return host


def _wait_for_all(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Wait at the store until all ranks of `group` have come here. gloo waits a minute for a rank, late or dead.

    Raises:
        RuntimeError: a rank has not come within `timeout`, or the watchdog has ended the wait.
    """
    store, come, all_come = group.get_group_store(), "streamshard/come", "streamshard/all have come"
    deadline, pause_s = time.monotonic() + timeout.total_seconds(), 0.001
    if store.add(come, 1) >= group.size():
        store.set(all_come, "")
    while not store.check([all_come]):
        if state_of(group).is_closed:
            raise RuntimeError("this rank has ended the wait")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{store.add(come, 0)} of {group.size()} ranks have come within {timeout}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _ASK_EVERY_S)


def make_host_group(group: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A new gloo group of the ranks of `group`. Collective: all ranks come within a minute.

    Args:
        group: a group of the same ranks.
        timeout: the timeout of the new group.
    """
    ranks = dist.get_process_group_ranks(group)
    # With use_local_synchronization torch names a group by the number of this rank's groups, which may differ between
    # ranks. A group of all ranks needs no such name.
    is_of_some = len(ranks) < dist.get_world_size()
    host = getattr(base_store(group), "host", os.environ.get("MASTER_ADDR"))
    with gloo_settings(host, len(ranks)):
        limit = min(timeout, _CONNECTED_WITHIN / _CONNECTION_WAITS)
        made: dist.ProcessGroup = dist.new_group(ranks, limit, "gloo", use_local_synchronization=is_of_some)
        dist.all_reduce(torch.zeros(1, device="cpu"), group=made)  # connects a ring, see `gloo_settings`
        # Ranks that exchange messages in a tree connect now: later they wait for each other far longer.
        gathered = gather_to_first(made, b"", limit)
        send_to_all(made, None if gathered is None else b"", limit)
    # Made with a shorter one, so that nobody waits long for a rank that dies while it connects.
    set_timeout(timeout, made)
    state_of(made).host_of = weak(made)
    return made


def base_store(group: dist.ProcessGroup) -> Any:
    """The store through which the ranks of `group` have found each other, such as a TCPStore."""
    store: Any = group.get_group_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


@contextlib.contextmanager
def gloo_settings(host: str | None, ranks: int) -> Iterator[None]:
    """Inside, environment variables are set for a new gloo group, unless the user has set them.

    In a large group two ranks connect when one first sends to the other: N - 1 sockets for each group would pass
    `ulimit -n`. `close_connections` needs the connections of a ring, so make them by a first exchange. Small groups
    connect at once, because gloo then reports a refused connection.

    By default gloo listens at the address of this machine's host name. On Debian that is 127.0.1.1, which no other
    machine reaches.

    Args:
        host: the machine of rank 0, by name or address; None: not known.
        ranks: the number of ranks.
    """
    is_lazy = "1" if ranks > MOST_CONNECTED else None
    wanted = {"TORCH_GLOO_LAZY_INIT": is_lazy, "GLOO_SOCKET_IFNAME": host and _interface_to(host)}
    added = {name: value for name, value in wanted.items() if value is not None and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _interface_to(host: str) -> str | None:
    """The network interface of the route to `host`, such as "eth0", by Linux' table of routes; None: not known.

    If `host` is this machine itself, and ranks may be on several machines: the interface of the default route.
    """
    if host == "localhost" or host.startswith("127.") or is_one_machine():
        return "lo" if _ROUTES.exists() else None
    with contextlib.suppress(OSError, ValueError):  # not Linux, no such host, no route
        rows = [row.split() for row in _ROUTES.read_text("ascii").splitlines()[1:]]  # see proc(5)
        address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        routes = [(int(mask, 16), -int(metric), int(net, 16), name) for name, net, *_, metric, mask, _, _, _ in rows]
        # As Linux chooses: the most specific route, then the lowest metric.
        return max(route for route in routes if address & route[0] == route[2])[-1]
    return None


def is_one_machine() -> bool:
    """Whether the launcher has started all ranks on this machine; False if this is not known."""
    ranks = os.environ.get("WORLD_SIZE")
    return ranks is not None and ranks == os.environ.get("LOCAL_WORLD_SIZE")


def alive(group_of: GroupOf) -> dist.ProcessGroup:
    """The group that `group_of` returns.

    Raises:
        CommunicationError: the group has been destroyed.
    """
    if (group := group_of()) is None:
        by = "destroy_process_group, or accelerate's end_training"
        raise CommunicationError(f"the process group was destroyed (by {by}) while the model needs it")
    return group


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """The timeout of `group` for collectives on tensors in CPU memory."""
    options = getattr(backend_of(group, torch.device("cpu")), "options", None)
    timeout: datetime.timedelta = getattr(options, "_timeout", _DEFAULT_TIMEOUT)
    return timeout


def close_connections(*groups: dist.ProcessGroup, users_too: bool = False) -> None:
    """End all waits over StreamShard's own groups with an error, on this rank and on ranks that wait for it.

    Ends the groups for good. gloo has no function for it, but closes all connections when a receive times out.

    Args:
        *groups: users' groups, or StreamShard's own.
        users_too: end other libraries' waits over the users' groups too. A group that does not serve the CPU is left
            out.
    """
    hosts = [host for group in groups if (host := state_of(group).host_of()) is not None]
    for group in (*groups, *hosts):
        state_of(group).is_closed = True
    for group in dict.fromkeys((*hosts, *(groups if users_too else ()))):
        if group.size() > 1 and serves(group, "cpu"):
            peer = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(datetime.timedelta(milliseconds=1))
