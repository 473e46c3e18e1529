"""accelerate: what can be asked for, what is refused, and how processes are started."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh

from streamshard import Precision
from streamshard.core.module_state import engine_of
from streamshard.errors import ConfigError
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.integrations.accelerating import Trained, launched, make_model, on_ranks, same, stock
from tests.ranks import RankContext
from tests.simulated import simulated_device

# -- options -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_options_are_those_of_streamshard(context: RankContext) -> None:
    """Also of an Accelerator that somebody else has made."""
    options: dict[str, Any] = {"weight_slots": "all", "units": ["Block", "last"], "resident": "blocks.1"}
    with launched(context):
        for accelerator in (
            StreamShardAccelerator(**options),
            StreamShardAccelerator.take_over(Accelerator(), **options),
        ):
            engine = engine_of(accelerator.prepare(make_model()))
            assert engine.plan.keeps_weights
            assert [unit.name for unit in engine.units[1:]] == ["blocks.0", "blocks.1", "blocks.2", "last"]
            assert [unit.is_streamed for unit in engine.units[1:]] == [True, False, True, False]


@on_ranks(1)
@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({}, {"weight_slots": 1}, "weight_slots=1"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"precision": Precision()}, "bfloat16, and mixed_precision is 'fp16'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    context: RankContext, environment: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with launched(context, **environment), pytest.raises(ConfigError, match=message):
        StreamShardAccelerator(**settings).prepare(make_model())


@on_ranks(1, 2)
def test_parameters_compute_in_their_own_dtypes_without_mixed_precision(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        for dtype in (torch.bfloat16, torch.float32):
            engine = engine_of(accelerator.prepare(make_model().to(dtype)))
            assert {view.dtype for unit in engine.units for view in (param.unsharded for param in unit.params)} == {
                dtype
            }


@on_ranks(2)
def test_a_mesh_of_replicas(context: RankContext) -> None:
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=4, mesh=init_device_mesh(context.device.type, (2, 1)))
        assert engine_of(ours.model).ranks.world_size == 1
    same(ours, theirs)


@on_ranks(2)
def test_state_in_host_memory(context: RankContext) -> None:
    """accelerate clips, and its scheduler changes options of a step that is late."""
    with launched(context):
        theirs = Trained(stock, steps=4)
    on_cpu = context.device.type == "cpu"
    with launched(context), simulated_device() if on_cpu else contextlib.nullcontext():
        ours = Trained(StreamShardAccelerator, steps=4, offload="state")
        assert engine_of(ours.model).host is not None
        same(ours, theirs)


@on_ranks(1)
def test_an_accelerator_that_shards_by_itself_is_refused(context: RankContext) -> None:
    with launched(context):
        accelerator = Accelerator()
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ConfigError, match="asked for FSDP.*--multi_gpu"):
            StreamShardAccelerator.take_over(accelerator)


# -- how processes are started -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_processes_that_do_not_know_of_each_other(context: RankContext) -> None:
    """accelerate leaves processes on CPUs alone that it is not told to train on CPUs with."""
    with launched(context):
        del os.environ["ACCELERATE_USE_CPU"]
        if not torch.accelerator.is_available():
            assert StreamShardAccelerator().num_processes == 2  # it is told
    with launched(context):
        del os.environ["ACCELERATE_USE_CPU"]
        del os.environ["LOCAL_RANK"]
        PartialState()
        assert PartialState().num_processes == 1 or torch.accelerator.is_available()
        if PartialState().num_processes == 1:
            with pytest.raises(ConfigError, match="2 processes were launched, and accelerate knows of 1.*--multi_gpu"):
                StreamShardAccelerator()


@on_ranks(1)
def test_a_script_without_a_launcher_trains_on_one_process(context: RankContext) -> None:
    """Without a launcher: ``python script.py``."""
    with launched(context):
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            os.environ.pop(name, None)
        accelerator = Trained(StreamShardAccelerator, steps=2).accelerator
        assert (accelerator.num_processes, accelerator.distributed_type.value) == (1, "NO")
