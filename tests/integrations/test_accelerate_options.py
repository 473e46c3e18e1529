"""accelerate: what can be asked for, what is refused, how processes are started; its examples give what DDP gives."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
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
from tests.integrations.accelerating import Trained, launched, load_example, make_model, on_ranks, same, stock
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
def test_options_that_contradict_each_other_are_refused(context: RankContext) -> None:
    with launched(context):
        with pytest.raises(ConfigError, match="weight_slots=1"):
            StreamShardAccelerator(weight_slots=1).prepare(make_model())
        accelerator = Accelerator()
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ConfigError, match="asked for FSDP.*--multi_gpu"):
            StreamShardAccelerator.take_over(accelerator)
    contradiction = pytest.raises(ConfigError, match="bfloat16, and mixed_precision is 'fp16'")
    with launched(context, ACCELERATE_MIXED_PRECISION="fp16"), contradiction:
        StreamShardAccelerator(precision=Precision()).prepare(make_model())


@on_ranks(2)
def test_parameters_compute_in_their_own_dtypes_without_mixed_precision(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        for dtype in (torch.bfloat16, torch.float32):
            engine = engine_of(accelerator.prepare(make_model().to(dtype)))
            assert {view.dtype for unit in engine.units for view in (param.unsharded for param in unit.params)} == {
                dtype
            }


@on_ranks(2)
def test_replicas_and_state_in_host_memory_train_as_ddp(context: RankContext) -> None:
    """accelerate clips, and its scheduler changes options of a step that is late."""
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=4, mesh=init_device_mesh(context.device.type, (2, 1)))
        assert engine_of(ours.model).ranks.world_size == 1
    same(ours, theirs)
    on_cpu = context.device.type == "cpu"
    with launched(context), simulated_device() if on_cpu else contextlib.nullcontext():
        ours = Trained(StreamShardAccelerator, steps=4, offload="state")
        assert engine_of(ours.model).host is not None
        same(ours, theirs)


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


# -- accelerate's examples --------------------------------------------------------------------------------------------


def _run(context: RankContext, name: str, make: Callable[..., Any], **arguments: Any) -> list[float]:
    """What the example's ``main`` returns, with `make` in the place of the class that the changed line imports."""
    example = load_example(f"accelerate/{name}.py")
    assert example.Accelerator is StreamShardAccelerator
    with launched(context), contextlib.redirect_stdout(io.StringIO()):
        accelerators: list[Any] = []

        def made(*args: Any, **kwargs: Any) -> Any:
            accelerators.append(make(*args, **kwargs))
            accelerators[-1].state.destroy_process_group = lambda: None  # which is the test's
            return accelerators[-1]

        example.Accelerator = made
        return example.main(**arguments)


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "automatic_gradient_accumulation",
        "cross_validation",
        "early_stopping",
        "gradient_accumulation",
        "gradient_accumulation_for_autoregressive_models",
        "memory",
        "multi_process_metrics",
        "schedule_free",
    ],
)
def test_an_accelerate_example_gives_the_results_of_ddp(context: RankContext, name: str) -> None:
    theirs, ours = (_run(context, name, make) for make in (stock, StreamShardAccelerator))
    assert ours
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_checkpointing_and_going_on_within_an_epoch(context: RankContext, tmp_path: Path) -> None:
    """Both classes go on from their own checkpoints with the same losses."""
    losses = []
    for make in (stock, StreamShardAccelerator):
        where = tmp_path / make.__name__
        losses.append(_run(context, "checkpointing", make, directory=str(where)))
        again = {"directory": str(where / "again"), "resume": str(where / "step_4")}
        losses.append(_run(context, "checkpointing", make, **again))
        assert len(losses[-1]) == len(losses[-2]) - 4
    torch.testing.assert_close(losses[2:], losses[:2], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_local_sgd(context: RankContext) -> None:
    """Which is no numbers of DDP's: it trains, and processes have other weights between averages."""
    example = load_example("accelerate/local_sgd.py")
    with launched(context), contextlib.redirect_stdout(io.StringIO()):
        example.StreamShardAccelerator.end_training = lambda self: None
        try:
            losses = example.main()
        finally:
            del example.StreamShardAccelerator.end_training
    assert losses[-1] < losses[0]
