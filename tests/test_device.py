"""Any way of starting: which device a model trains on, whoever made the process group, and over what ranks talk."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streamshard import StreamShard, full_optimizer_state_dict, load_checkpoint, save_checkpoint
from streamshard import device as devices
from streamshard.comm.host_groups import host_group_of
from streamshard.comm.ranks import refuse_together
from streamshard.device import serves, training_device
from streamshard.errors import ConfigError, ShardingError
from streamshard.optim import WholeParameterOptimizer
from tests.compare import EXACT, assert_same, full_weights
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, sharded_model, stack_step

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    module = types.SimpleNamespace(device_count=lambda: 4, current_device=lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(devices, "get_device_module", lambda kind: module)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """With the backends that the test names, or one for GPUs as well: torch has a backend that does nothing."""
    backends = getattr(request, "param", "cpu:gloo,cuda:fake")
    dist.init_process_group(backends, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_model_on_the_cpu_moves_to_the_accelerator_of_its_rank(gpus: Any, group: Any, monkeypatch: Any) -> None:
    """The one that somebody has chosen, else the launcher's; the only one where a process sees one. It is current."""
    gpus.set_device = mock.Mock(side_effect=InterruptedError)  # nothing else is there of such a device
    for name, local_rank, current, index in (
        ("LOCAL_RANK", 0, 0, 0),
        ("SLURM_LOCALID", 3, 0, 3),
        ("LOCAL_RANK", 2, 0, 2),
        ("LOCAL_RANK", 2, 1, 1),
        ("LOCAL_RANK", 7, 0, 0),
    ):
        gpus.current_device = lambda current=current: current
        with monkeypatch.context() as patch:
            patch.setenv(name, str(local_rank))
            assert (
                training_device(CPU, None, None) == training_device(CPU, group, "cuda") == torch.device("cuda", index)
            )
            assert training_device(torch.device("cuda", 3), None, None) == torch.device("cuda", 3)
            with pytest.raises(InterruptedError):
                StreamShard(Stack(), precision=FP32)
        assert gpus.set_device.call_args.args == (torch.device("cuda", index),)


@pytest.mark.parametrize("group", ["gloo"], indirect=True)
def test_training_on_the_cpu_beside_idle_accelerators_says_so(gpus: Any, group: dist.ProcessGroup) -> None:
    with pytest.warns(UserWarning, match=r"on the CPU: .*\(cpu:gloo,cuda:gloo\).* 4 cuda devices") as said:
        assert training_device(CPU, group, None) == CPU
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert training_device(CPU, group, "cpu") == CPU


def _exchange_group(context: RankContext, directory: Path, backends: str | None = None) -> None:
    """Leave the test's own group: not before all have it, or gloo would take whoever leaves it for dead."""
    dist.barrier()
    dist.destroy_process_group()
    place, store = {"rank": context.rank, "world_size": context.world_size}, f"file://{directory}/store"
    dist.init_process_group(backends, init_method=store, **place)


@on_ranks(2)
def test_it_trains_with_a_group_of_several_kinds_of_device(context: RankContext, tmp_path: Path) -> None:
    _exchange_group(context, tmp_path)
    assert dist.get_backend() == "undefined"
    assert_trains_like_plain(context, Stack, stack_step, mesh=init_device_mesh("cpu", (context.world_size,)))


@on_ranks(2)
def test_hosts_talk_although_the_group_serves_devices_only(context: RankContext, tmp_path: Path) -> None:
    """Over a second group, which every further model uses too; an exception ends their waits."""
    _exchange_group(context, tmp_path, "cuda:fake")
    group = dist.group.WORLD
    assert group is not None
    assert not serves(group, "cpu")
    refuse_together(None, None)
    assert serves(host_group_of(group), "cpu")
    with pytest.raises(ConfigError, match=r"on cpu, .*\(cuda:fake\) has no backend: .*'gloo'"):
        StreamShard(Stack(), precision=FP32)
    if context.rank == 1:
        refuse_together(group, ValueError("no"))
    else:
        with pytest.raises(ShardingError, match="rank 1: ValueError: no"):
            refuse_together(group, None)


def _loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _train_and_save(context: RankContext, directory: Path, default: torch.device) -> dict[str, torch.Tensor]:
    """Weights and moments of a run that goes on from its checkpoint, while `default` is the default device."""
    model: Any = sharded_model(Stack)
    batches = [vector_batch(number, context.rank) for number in range(2)]
    optimizer = WholeParameterOptimizer(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9)
    with default:
        for number in range(4):
            if number < 3:
                _loss_of(model, batches[0]).backward()
            else:  # the order of the layers is known
                model.accumulate(batches, _loss_of)
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                save_checkpoint(directory, model, optimizer, wait=False).wait()
                load_checkpoint(directory, model, optimizer)
        state = full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
        moments = {f"{name}.{key}": value for name, own in state.items() for key, value in own.items()}
        return {**full_weights(model), **{key: value for key, value in moments.items() if torch.is_tensor(value)}}


@on_ranks(2)
def test_host_memory_is_the_hosts_whatever_the_default_device_is(context: RankContext, tmp_path: Path) -> None:
    """After ``torch.set_default_device("cuda")`` tensors without a device are on it. Here on one without memory."""
    wanted = _train_and_save(context, tmp_path / "cpu", CPU)
    assert_same(_train_and_save(context, tmp_path / "meta", torch.device("meta")), wanted, "state", EXACT)
