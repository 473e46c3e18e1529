"""The groups over which hosts send control messages: their network and sockets, and errors of what ranks send."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not re-exported in stubs
from torch.distributed.device_mesh import DeviceMesh

from streamshard import StreamShard, export_safetensors, save_checkpoint
from streamshard.comm import groups, host_groups
from streamshard.comm import ranks as ranks_module
from streamshard.comm.groups import make_default_group
from streamshard.comm.host_groups import CONTROL_TIMEOUT, MOST_CONNECTED, gloo_settings, make_host_group, timeout_of
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CommunicationError, ConfigError, RankMismatchError, ShardingError
from tests.counts import engine_inside
from tests.launched import Launched
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks, warnings_are_errors
from tests.reference import assert_trains_like_plain, stack_step

_CLONE_NEWNET = 0x40000000


def _count_sockets() -> None:
    warnings_are_errors()
    torch.set_num_threads(1)
    host_groups.MOST_CONNECTED = 15
    make_default_group(torch.device("cpu"))
    ranks = RankGroup(dist.group.WORLD)
    assert any(ranks.gather_objects("vote", ranks.total_rank == 3))
    held = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)]
    print("sockets", sum(name.startswith("socket") for name in held), flush=True)
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store.set(f"rank {rank} has left", "")
    if rank == 0:  # it hosts the store, which others may still ask for addresses inside the barrier
        store.wait([f"rank {other} has left" for other in range(size)])


@pytest.mark.ranks
def test_ranks_of_a_large_group_connect_when_they_first_send(tmp_path: Path) -> None:
    """Two groups, StreamShard's own and the default one, of one rank more than a group has that connects at once."""
    size = 16
    for code, output in Launched(size, tmp_path, _count_sockets).end()[1:]:  # the first hosts the store for all
        assert code == 0, output
        assert int(output.rpartition("sockets ")[2]) < size


@on_ranks(2)
def test_a_rank_may_start_its_model_later_than_gloo_waits_for_connections(context: RankContext) -> None:
    group = dist.new_group([0, 1])
    with mock.patch.object(host_groups, "_CONNECTED_WITHIN", timedelta(seconds=4)):  # a fifth for each rank
        if context.rank == 1:
            time.sleep(1.2)
        assert host_groups.host_group_of(group).size() == 2


def test_a_rank_that_does_not_come_and_one_that_has_ended_the_wait_raise() -> None:
    store: Any = HashStore()
    group = mock.Mock(get_group_store=lambda: store, size=lambda: 3)
    with pytest.raises(RuntimeError, match="1 of 3 ranks have come within 0:00:00.01"):
        host_groups._wait_for_all(group, timedelta(seconds=0.01))
    host_groups.state_of(group).is_closed = True
    with pytest.raises(RuntimeError, match="has ended the wait"):
        host_groups._wait_for_all(group, timedelta(minutes=1))


def test_a_rank_that_is_late_gets_the_same_name_although_the_store_has_its_earlier_question() -> None:
    """Rank 0 has answered the dead rank before the new one asks."""
    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=10))
    store.set("streamshard/question of rank 1", "of the dead rank")
    with ThreadPoolExecutor() as threads:
        of_rank_0 = threads.submit(groups._agree_on_name, store, 0, 2)
        store.wait(["of the dead rank/answer"])
        assert groups._agree_on_name(store, 1, 2) == of_rank_0.result(10)


_ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
wifi0 00000000 01004D0A 0003 0 0 600 00000000 0 0 0
eth0 00000000 01004D0A 0003 0 0 100 00000000 0 0 0
ib0 00004D0A 00000000 0001 0 0 0 0000FFFF 0 0 0
"""


@pytest.mark.parametrize(
    ("host", "machines", "interface"),
    [("10.77.0.1", 2, "ib0"), ("node0", 2, "eth0"), ("node0", 1, "lo"), ("nosuchhost", 2, None)],
)
def test_gloo_listens_on_the_way_to_rank_0_unless_the_user_has_chosen(
    host: str, machines: int, interface: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The settings hold while a group is made, and not afterwards. On Debian "node0" is the machine's own name."""
    (tmp_path / "route").write_text(_ROUTES)
    monkeypatch.setattr(host_groups, "_ROUTES", tmp_path / "route")
    names = {"node0": "127.0.1.1", "nosuchhost": ""}
    monkeypatch.setattr(host_groups.socket, "gethostbyname", lambda name: names.get(name, name))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 // machines))
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    for mine in (None, "chosen0"):
        with monkeypatch.context() as patch:
            patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
            if mine is not None:
                patch.setenv("GLOO_SOCKET_IFNAME", mine)
            with gloo_settings(host, MOST_CONNECTED + 1):
                assert os.environ.get("GLOO_SOCKET_IFNAME") == (mine or interface)
                assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
            assert os.environ.get("GLOO_SOCKET_IFNAME") == mine
            with gloo_settings(host, MOST_CONNECTED):
                assert "TORCH_GLOO_LAZY_INIT" not in os.environ


def test_an_error_of_gloo_names_the_network_setting_where_ranks_may_be_on_several_machines(tmp_path: Path) -> None:
    for local_world_size, says in (("0", r"\. If ranks are on several machines: set GLOO_SOCKET_IFNAME"), ("1", "$")):
        environment = {"GLOO_SOCKET_IFNAME": "nosuch0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": local_world_size}
        store = f"file://{tmp_path}/store{local_world_size}"
        with mock.patch.dict(os.environ, environment), pytest.raises(CommunicationError, match=f"nosuch0{says}"):
            make_default_group(torch.device("cpu"), init_method=store, rank=0, world_size=1)


@on_ranks(3)
def test_an_exchange_is_one_entry_in_the_log_of_a_rank(context: RankContext) -> None:
    """With one for each half, a rank that waits for the answer would take its parent for missing."""
    ranks = RankGroup(dist.group.WORLD)
    before = ranks.recorder.log.count
    assert ranks.gather_objects("count", context.rank) == [0, 1, 2]
    assert ranks.join_results("add", lambda: context.rank, sum) == 3
    assert ranks.recorder.log.count == before + 2


@on_ranks(2)
def test_an_error_between_the_two_halves_of_an_exchange_ends_the_wait_of_the_others(context: RankContext) -> None:
    ranks = RankGroup(dist.group.WORLD)
    if context.rank == 0:
        with (
            mock.patch.object(ranks_module, "_answer_if_alike", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            ranks.gather_objects("wait", None)
    else:
        with pytest.raises(CommunicationError, match="rank 0 has failed: the exchange to wait ended with Keyboard"):
            ranks.gather_objects("wait", None)


@on_ranks(2)
def test_beside_a_group_for_devices_the_control_group_has_a_long_timeout(context: RankContext) -> None:
    """Under CPU ranks the user's timeout counts, because steps use the group too."""
    users = dist.new_group(timeout=timedelta(minutes=7))
    assert timeout_of(host_groups.host_group_of(users)) == timedelta(minutes=7)
    beside = dist.new_group(timeout=timedelta(minutes=7))
    with mock.patch.object(host_groups, "serves", lambda *_: False):
        assert timeout_of(host_groups.host_group_of(beside)) == CONTROL_TIMEOUT
    assert timeout_of(make_host_group(users, timedelta(seconds=20))) == timedelta(seconds=20)


@on_ranks(2)
def test_a_pass_without_its_process_group_raises(context: RankContext) -> None:
    """Over shared memory ranks could go on, but nothing would end their waits."""
    group: Any = dist.new_group([0, 1])
    model: Any = StreamShard(Stack(), mesh=group)
    model(vector_batch(0, context.rank))
    dist.destroy_process_group(group)
    del group
    with pytest.raises(CommunicationError, match="was destroyed"):
        model(vector_batch(0, context.rank))


@on_ranks(3)
def test_a_model_on_some_ranks_refuses_groups_that_torch_would_split(context: RankContext) -> None:
    """A mesh on two of three ranks, each with a replica. Ranks with a bound device would wait for the third rank."""
    world = dist.group.WORLD
    mesh = DeviceMesh("cpu", [[0], [1]])
    if context.rank == 2:
        return
    splitting = mock.patch.object(groups, "backend_of", return_value=mock.Mock(supports_splitting=True))
    world.bound_device_id = torch.device("cuda", 0)
    try:
        with splitting, pytest.raises(ConfigError, match=r"only ranks \[0, 1\] of 3 shard .* Leave device_id away"):
            StreamShard(Stack(), mesh=mesh)
    finally:
        world.bound_device_id = None  # the advice
    assert_trains_like_plain(dataclasses.replace(context, world_size=2), Stack, stack_step, mesh=mesh)


@contextlib.contextmanager
def _two_namespaces() -> Iterator[list[str]]:
    names = [f"shard{os.getpid()}{end}" for end in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip -n {names[0]} link add v0 type veth peer name v1 netns {names[1]}"]
    for index, name in enumerate(names):
        commands += [f"ip -n {name} addr add 10.77.0.{index + 1}/24 dev v{index}", f"ip -n {name} link set v{index} up"]
        commands += [f"ip -n {name} link set lo up"]
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    try:
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _train_on_host(names: list[str]) -> None:
    with open(f"/run/netns/{names[int(os.environ['RANK'])]}") as namespace:
        assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
    os.environ.update(MASTER_ADDR="10.77.0.1", LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    warnings_are_errors()
    torch.set_num_threads(1)
    model: Any = StreamShard(Stack())
    model(vector_batch(0, 0)).float().sum().backward()
    print("trained", float(model.clip_grad_norm_(1.0)), flush=True)
    dist.destroy_process_group()


@pytest.mark.ranks
def test_ranks_on_two_hosts_connect_although_the_hosts_names_lead_to_themselves(tmp_path: Path) -> None:
    """Each host is a network namespace. Its name leads to an address that the other one does not reach."""
    with _two_namespaces() as names:
        for code, output in Launched(2, tmp_path, _train_on_host, names).end():
            assert code == 0 and "trained" in output, output


def test_after_an_uncaught_exception_the_group_is_aborted_before_it_is_destroyed(monkeypatch: Any) -> None:
    """NCCL would wait for what other ranks never issue."""
    for fails in (False, True):
        calls = mock.Mock()
        calls.group.WORLD = calls.world
        monkeypatch.setattr(groups, "dist", calls)
        monkeypatch.setattr(sys, "last_value", ValueError() if fails else None, raising=False)
        host_groups.state_of(calls.world).is_ours = True
        groups._end()
        assert [name for name, _, _ in calls.mock_calls] == ["world.abort"] * fails + ["destroy_process_group"]


class _Interrupting:
    def __reduce__(self) -> NoReturn:
        raise KeyboardInterrupt


@on_ranks(2)
def test_an_object_that_one_rank_cannot_send_is_an_error_on_all_and_ranks_go_on(context: RankContext) -> None:
    """It is pickled before the collective starts; an interrupted rank raises what interrupted it."""
    model = StreamShard(Stack())
    ranks = engine_inside(model).ranks
    for value, own, words in (
        (threading.Lock(), ShardingError, "rank 1: TypeError: cannot pickle '_thread.lock'"),
        (_Interrupting(), KeyboardInterrupt, "rank 1: KeyboardInterrupt"),
    ):
        with pytest.raises(own if context.rank == 1 else ShardingError) as caught:
            ranks.gather_objects("count", value if context.rank == 1 else "fine")
        assert isinstance(caught.value, KeyboardInterrupt) or words in str(caught.value)
        assert ranks.gather_objects("count", context.rank) == [0, 1]
    assert ranks.of_first("tell", f"from {context.rank}") == "from 0"
    model.full_state_dict()


@on_ranks(3)
def test_ranks_that_come_to_different_exchanges_all_raise_and_go_on(context: RankContext, tmp_path: Path) -> None:
    """An export and a save, or two votes: no rank takes another exchange's message for an answer."""
    model: Any = StreamShard(Stack())
    ranks = engine_inside(model).ranks
    export, save = (lambda: export_safetensors(model, tmp_path)), (lambda: save_checkpoint(tmp_path, model))
    compare, choose = (lambda: ranks.gather_objects("compare", 1)), (lambda: ranks.of_first("choose", "a path"))
    for others, last, words in (
        (export, save, "to plan the export, rank 2 to begin a save"),
        (compare, choose, "to compare, rank 2 to choose"),
    ):
        with pytest.raises(RankMismatchError, match=f"different exchanges: rank 0 is about {words}"):
            last() if context.rank == 2 else others()
        assert ranks.gather_objects("count", context.rank) == [0, 1, 2]
    model.full_state_dict()


def _waits(ranks: RankGroup) -> list[str]:
    return [str(guard) for guard in ranks.recorder.log.waits]


def test_an_error_leaves_no_wait_behind_and_closes_all_guards_of_the_ranks() -> None:
    ranks = RankGroup()
    outer, inner = ranks.waiting("a step"), ranks.waiting("the gather of", "layers.0")
    for _ in range(2):  # a unit has one guard for each of its waits, for all steps
        with outer, inner, outer:
            assert _waits(ranks) == ["a step", "the gather of 'layers.0'", "a step"]
        assert _waits(ranks) == []
    said = "the gather of 'layers.0' failed on rank 0 of 1: it broke"
    with pytest.raises(CommunicationError, match=said), outer, inner:
        raise RuntimeError("it broke")
    assert _waits(ranks) == []
    for guard in (outer, inner):
        with pytest.raises(CommunicationError, match=rf"{guard} is not possible any more: .*it broke"), guard:
            raise AssertionError("the body must not run")
    assert _waits(ranks) == []
