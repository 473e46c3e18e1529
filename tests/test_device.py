"""Any way of starting: which device a model trains on, whoever made the process group, and over what ranks talk."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamshard import ConfigError, ShardingError, StreamShard
from streamshard import device as devices
from streamshard.comm.communicator import Communicator
from streamshard.comm.host_groups import host_group_of
from streamshard.comm.ranks import refuse_together
from streamshard.device import serves, training_device
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, stack_step

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A machine with four GPUs, as far as one can ask of it."""
    module = types.SimpleNamespace(device_count=lambda: 4, current_device=lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(devices, "get_device_module", lambda kind: module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return module


def _group(backends: str, tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(backends, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group that has nothing for GPUs."""
    yield from _group("gloo", tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """One that serves GPUs as well; torch has a backend that does nothing."""
    yield from _group("cpu:gloo,cuda:fake", tmp_path)


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
    """The one that somebody has chosen, else the launcher's; the only one where a process sees one. It is current."""
    monkeypatch.setenv("SLURM_LOCALID", "3" if local_rank is None and index == 3 else "0")
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    gpus.current_device = lambda: current
    assert training_device(CPU, None, None) == training_device(CPU, both, "cuda") == torch.device("cuda", index)
    assert training_device(torch.device("cuda", 3), None, None) == torch.device("cuda", 3)
    gpus.set_device = mock.Mock(side_effect=InterruptedError)  # nothing else is there of such a device
    with pytest.raises(InterruptedError):
        StreamShard(Stack(), precision=FP32)
    gpus.set_device.assert_called_once_with(torch.device("cuda", index))


def test_training_on_the_cpu_beside_idle_accelerators_says_so(
    gpus: types.SimpleNamespace, gloo: dist.ProcessGroup
) -> None:
    """Unless it was asked for."""
    with pytest.warns(UserWarning, match=r"on the CPU: .*\(cpu:gloo,cuda:gloo\).* 4 cuda devices") as said:
        assert training_device(CPU, gloo, None) == CPU
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training_device(CPU, gloo, "cpu") == CPU


def test_a_group_without_a_backend_for_the_parameters_is_refused(gloo: dist.ProcessGroup) -> None:
    """It says which it has, and which is wanted."""
    streams = types.SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=r"on cuda:0, .*\(cpu:gloo,cuda:gloo\) has no backend: .*'nccl'"):
        Communicator(gloo, streams)  # type: ignore[arg-type]  # no GPU is here


# ---------------------------------------------------------------------------------------------- whoever makes the group


def _leave_group() -> None:
    """The test's own group: not before all have it, or gloo would take whoever leaves it for dead."""
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(2)
def test_it_trains_with_a_group_of_several_kinds_of_device(context: RankContext, tmp_path: Path) -> None:
    """Which has no backend's name."""
    _leave_group()
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=context.rank, world_size=context.world_size)
    assert dist.get_backend() == "undefined"
    assert_trains_like_plain(context, Stack, stack_step, mesh=init_device_mesh("cpu", (context.world_size,)))


@on_ranks(2)
def test_hosts_talk_although_the_group_serves_devices_only(context: RankContext, tmp_path: Path) -> None:
    """Over a second group, which every further model uses too; an exception ends their waits."""
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
