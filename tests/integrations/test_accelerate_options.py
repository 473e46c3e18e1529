"""accelerate: what can be asked for, what is refused, and how processes are started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh

from streamshard import Precision
from streamshard.engine.module_state import engine_of
from streamshard.errors import ConfigError, UnitError
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.integrations.accelerating import Trained, launched, make_model, on_ranks, same, stock
from tests.ranks import RankContext

# -- options -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_options_are_arguments_or_variables(context: RankContext) -> None:
    with launched(
        context, STREAMSHARD_WEIGHT_SLOTS="3", STREAMSHARD_GRAD_SLOTS="all", STREAMSHARD_GRAD_DTYPE="bfloat16",
        STREAMSHARD_UNITS="Block, last", STREAMSHARD_CHECK_GRADS="true", STREAMSHARD_RESIDENT="blocks.1",
    ):  # fmt: skip
        accelerator = StreamShardAccelerator(weight_slots="all", mixed_precision="bf16")
        engine = engine_of(accelerator.prepare(make_model()))
        assert engine.plan.keeps_weights and engine.plan.keeps_grads
        assert engine.precision == Precision(grad_dtype=torch.bfloat16)
        assert [unit.name for unit in engine.units[1:]] == ["blocks.0", "blocks.1", "blocks.2", "last"]
        assert [unit.is_streamed for unit in engine.units[1:]] == [True, False, True, False]
        assert engine.reductions._checks_finite
    with launched(context, STREAMSHARD_UNITS="Block,lost"), pytest.raises(UnitError, match=r"'lost'.*'last'"):
        StreamShardAccelerator().prepare(make_model())


@on_ranks(1)
@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({"STREAMSHARD_WEIGHTS_SLOTS": "3"}, {}, "STREAMSHARD_WEIGHT_SLOTS"),
        ({"STREAMSHARD_CHECK_GRADS": "maybe"}, {}, "wanted True or False"),
        ({"STREAMSHARD_WEIGHT_SLOTS": "1"}, {}, "weight_slots=1"),
        ({}, {"weight_slots": 1}, "weight_slots=1"),
        ({}, {"mixed_precision": "bf16", "precision": Precision(param_dtype=torch.float16)}, "mixed_precision='fp16'"),
        ({}, {"precision": Precision()}, "mixed_precision='bf16'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"precision": Precision()}, "mixed_precision='bf16'"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "asked for a parallelism_config.*--multi_gpu.*mesh="),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    context: RankContext, environment: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with launched(context, **environment), pytest.raises(ConfigError, match=message):
        StreamShardAccelerator(**settings)


@on_ranks(1, 2)
def test_the_dtype_of_a_half_precision_model_is_kept(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        assert engine_of(accelerator.prepare(make_model().bfloat16())).precision.param_dtype is torch.bfloat16
        assert engine_of(accelerator.prepare(make_model())).precision.param_dtype is torch.float32


@on_ranks(2)
def test_a_mesh_of_replicas(context: RankContext) -> None:
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=4, mesh=init_device_mesh(context.device.type, (2, 1)))
        assert engine_of(ours.model).ranks.world_size == 1
    same(ours, theirs)


@on_ranks(2)
def test_an_accelerator_of_someone_elses_is_taken_over(context: RankContext) -> None:
    with launched(context):
        theirs = Trained(stock, steps=3)
    with launched(context):

        def take_over(**options: Any) -> StreamShardAccelerator:
            return StreamShardAccelerator.take_over(Accelerator(), **options)

        ours = Trained(take_over, steps=3, weight_slots=3)
        assert "weight_slots=3" in ours.model.memory_report().slots
        with pytest.raises(ConfigError, match="no such option: slots"):
            take_over(slots=3)
        accelerator = Accelerator()
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ConfigError, match="asked for FSDP.*--multi_gpu"):
            StreamShardAccelerator.take_over(accelerator)
    same(ours, theirs)


def test_other_libraries_are_imported_only_when_their_integration_is() -> None:
    others = "accelerate", "datasets", "peft", "transformers", "trl"
    code = f"import streamshard, sys; print([name for name in {others} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert told.stdout == "[]\n"


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


def _alone() -> tuple[int, str]:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)
    run = Trained(StreamShardAccelerator, steps=2)
    return run.accelerator.num_processes, run.accelerator.distributed_type.value


@on_ranks(1)
def test_a_script_that_was_started_alone(context: RankContext) -> None:
    """Without a launcher: ``python script.py``."""
    with launched(context):
        assert _alone() == (1, "NO")
