"""Any way of starting: which device a model trains on, whoever made the process group, and over what ranks talk."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamshard import ConfigError, ShardingError, StreamShard
from streamshard.comm.communicator import Communicator
from streamshard.comm.groups import host_group_of
from streamshard.comm.objects import refuse_together
from streamshard.device import serves, training_device
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, stack_step

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Makes torch report four GPUs."""
    module = types.SimpleNamespace(
        device_count=lambda: 4,
        current_device=lambda: 0,
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return module


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group without a backend for GPUs."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def both(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group with a backend for GPUs too: torch's fake backend, which does nothing."""
    dist.init_process_group("cpu:gloo,cuda:fake", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("local_rank", "current", "index"), [(None, 0, 0), (None, 0, 3), ("2", 0, 2), ("2", 1, 1), ("7", 0, 0)]
)
def test_a_model_on_the_cpu_moves_to_the_accelerator_of_its_rank(
    gpus: types.SimpleNamespace,
    both: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: str | None,
    current: int,
    index: int,
) -> None:
    """The current device if it was set, else LOCAL_RANK, else SLURM_LOCALID; device 0 if LOCAL_RANK is too large."""
    monkeypatch.setenv("SLURM_LOCALID", "3" if local_rank is None and index == 3 else "0")
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    gpus.current_device = lambda: current
    assert training_device(CPU, None, None) == training_device(CPU, both, "cuda") == torch.device("cuda", index)
    assert training_device(torch.device("cuda", 3), None, None) == torch.device("cuda", 3)


def test_training_on_the_cpu_beside_idle_accelerators_says_so(
    gpus: types.SimpleNamespace, gloo: dist.ProcessGroup
) -> None:
    """Unless it was asked for."""
    with pytest.warns(UserWarning, match=r"on the CPU while 4 cuda devices are there.*\(cpu:gloo,cuda:gloo\)") as said:
        assert training_device(CPU, gloo, None) == CPU
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training_device(CPU, gloo, "cpu") == CPU


def test_a_group_without_a_backend_for_the_parameters_is_refused(gloo: dist.ProcessGroup) -> None:
    """The error names the group's backends, and the missing one."""
    streams = types.SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"on cuda:0, .*\(cpu:gloo,cuda:gloo\) has no backend: .*'nccl'"):
        Communicator(gloo, streams)  # type: ignore[arg-type]  # no GPU is here


# ---------------------------------------------------------------------------------------------- whoever makes the group


def _leave_group() -> None:
    """Leave the test's process group, after all ranks have made it: else gloo takes a rank that leaves for dead."""
    dist.barrier()
    dist.destroy_process_group()


def _unnamed(context: RankContext, place: str) -> Any:
    dist.init_process_group(init_method=f"file://{place}", rank=context.rank, world_size=context.world_size)
    assert dist.get_backend() == "undefined"
    return None


def _mesh(context: RankContext, place: str) -> Any:
    _unnamed(context, place)
    return init_device_mesh("cpu", (context.world_size,))


STARTS: dict[str, Callable[[RankContext, str], Any]] = {"unnamed": _unnamed, "mesh": _mesh}


@on_ranks(2)
@pytest.mark.parametrize("start", list(STARTS))
def test_a_model_trains_however_the_process_group_was_made(context: RankContext, start: str, tmp_path: Path) -> None:
    """Without a backend's name, by a mesh, for several kinds of device."""
    _leave_group()
    mesh = STARTS[start](context, f"{tmp_path}/store")
    assert_trains_like_plain(context, Stack, stack_step, mesh=mesh)


@on_ranks(2)
def test_hosts_communicate_if_the_process_group_serves_devices_only(context: RankContext, tmp_path: Path) -> None:
    """Over a second group, which all models share. An exception on one rank ends the other ranks' waits."""
    _leave_group()
    dist.init_process_group(
        "cuda:fake", init_method=f"file://{tmp_path}/store", rank=context.rank, world_size=context.world_size
    )
    group = dist.group.WORLD
    assert group is not None
    assert not serves(group, "cpu")
    refuse_together(None, None)
    assert serves(host_group_of(group), "cpu")
    with pytest.raises(ConfigError, match="has no backend"):
        StreamShard(Stack(), precision=FP32)
    if context.rank == 1:
        refuse_together(group, ValueError("no"))
    else:
        with pytest.raises(ShardingError, match="rank 1: ValueError: no"):
            refuse_together(group, None)
