"""accelerate: a script gets from `StreamShardAccelerator` what it gets from accelerate's own with DDP, or an error."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, GradScalerKwargs, TorchDynamoPlugin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import ConfigError, Precision, ShardingError, StreamShard
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.compare import assert_same
from tests.counts import engine_inside
from tests.integrations.accelerating import Trained, launched, load_example, loader, make_model, on_ranks, same, stock
from tests.ranks import RankContext
from tests.simulated import simulated_device


@on_ranks(2)
def test_a_prepared_model_trains_as_under_ddp(context: RankContext) -> None:
    """Clipped by norm, which also replicas and state in host memory are, or by value; in micro-batches in other tests.

    With state in host memory accelerate clips, and its scheduler changes options, of a step that is late.
    """
    on_cpu = context.device.type == "cpu"
    for clip in ("value", "norm"):  # the last is compared with offload, too
        with launched(context):
            theirs = Trained(stock, steps=4, clip=clip)
        with launched(context):
            replicas = init_device_mesh(context.device.type, (2, 1)) if clip == "norm" else None
            ours = Trained(StreamShardAccelerator, steps=4, clip=clip, mesh=replicas)
            assert isinstance(ours.model, StreamShard)
            assert engine_inside(ours.model).ranks.world_size == (1 if clip == "norm" else 2)
            assert ours.accelerator.unwrap_model(ours.model) is ours.model
        same(ours, theirs)
    with launched(context), simulated_device() if on_cpu else contextlib.nullcontext():
        ours = Trained(StreamShardAccelerator, steps=4, offload="state")
        assert engine_inside(ours.model).host is not None
        same(ours, theirs)


@on_ranks(2)
@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_accumulate_takes_the_steps_of_accelerates_loop(context: RankContext, mixed_precision: str) -> None:
    """Each epoch has five micro-batches on a rank: its last step has one."""
    with launched(context):
        make = stock if mixed_precision == "no" else StreamShardAccelerator  # DDP scales no loss on CPUs
        settings = {"gradient_accumulation_steps": 4, "mixed_precision": mixed_precision}
        theirs = Trained(make, steps=10, data=loader(samples=40), **settings)
    with launched(context):
        ours = Trained(StreamShardAccelerator, data=loader(samples=40), mixed_precision=mixed_precision)
        for _ in range(2):
            batches = iter(ours.data)
            while micro_batches := list(itertools.islice(batches, 4)):
                ours.accumulate(micro_batches)
        ours.final = ours.weights()
    same(ours, theirs)


@on_ranks(2)
def test_bf16_equals_ddp_with_autocast(context: RankContext) -> None:
    """The same with fp32 weights and inputs left alone; nearly with weights of bf16, which are the default."""
    with launched(context):
        theirs = Trained(stock, steps=6, mixed_precision="bf16")
    with launched(context):
        precision = Precision(param_dtype=torch.float32, cast_inputs=False)
        ours = Trained(StreamShardAccelerator, steps=6, mixed_precision="bf16", precision=precision)
        assert ours.model(torch.ones(2, 5, device=context.device)).dtype is torch.float32
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=1e-4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=6, mixed_precision="bf16")
        assert engine_inside(ours.model).precision.param_dtype is torch.bfloat16
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=5e-2, atol=1e-2)


@on_ranks(2)
def test_fp16_scales_losses_on_cpus_too(context: RankContext) -> None:
    """Norms are those of unscaled gradients; an overflow on one rank skips the step on all."""
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        scale = GradScalerKwargs(init_scale=1024.0)
        ours = Trained(StreamShardAccelerator, steps=4, mixed_precision="fp16", kwargs_handlers=[scale])
        assert engine_inside(ours.model).precision.param_dtype is torch.float16
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(ours.norms, theirs.norms, rtol=5e-2, atol=1e-2)
        assert not ours.accelerator.optimizer_step_was_skipped
        before = ours.weights()
        x = torch.full((4, 5), 1e4 if context.rank == 0 else 1.0, device=context.device)
        ours.step(x, torch.full((4, 1), 6e4, device=context.device))
        assert ours.accelerator.optimizer_step_was_skipped
        assert_same(ours.weights(), before, "weights")
        assert float(ours.accelerator.scaler.get_scale()) == 512.0


@on_ranks(2)
@pytest.mark.parametrize("how", ["whole", "before"])
def test_a_compiled_model_trains_as_ddp_does(context: RankContext, how: str) -> None:
    class Compiling(StreamShardAccelerator):
        def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            return super().prepare_model(torch.compile(model, backend="eager"), *args, **kwargs)

    plugin = TorchDynamoPlugin(backend="no" if how == "before" else "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo, about gradients of views that it looks at
        with launched(context):
            theirs = Trained(stock, steps=3)
        with launched(context):
            ours = Trained(Compiling if how == "before" else StreamShardAccelerator, steps=3, dynamo_plugin=plugin)
            assert isinstance(ours.accelerator.unwrap_model(ours.model, keep_torch_compile=False), StreamShard)
            with pytest.raises(ConfigError, match="call layer.compile"):
                ours.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
                ours.accelerator.prepare(make_model())
    same(ours, theirs)


def _layers(seed: int, out: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)), nn.Linear(5, out))


def _gan(make: Callable[..., Any], where: Path | None = None) -> list[dict[str, torch.Tensor]]:
    accelerator = make()
    actor, critic = _layers(1, 5), _layers(2, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (actor, critic)]
    actor, critic, *optimizers, data = accelerator.prepare(actor, critic, *optimizers, loader(samples=24))
    criterion: nn.Module = nn.L1Loss()
    if isinstance(accelerator, StreamShardAccelerator):  # DDP takes no modules without parameters
        criterion = accelerator.prepare(criterion)
    for x, _ in data:
        for trained, sign in ((critic, 1.0), (actor, -1.0)):
            accelerator.backward(sign * criterion(critic(x), critic(actor(x))))
            accelerator.clip_grad_norm_(trained.parameters(), 0.5)
            optimizers[0 if trained is actor else 1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    whole = [{n: t.clone() for n, t in accelerator.get_state_dict(each).items()} for each in (actor, critic)]
    if where is not None:
        accelerator.save_state(where)
        for param in (*actor.parameters(), *critic.parameters()):
            param.data.zero_()
        accelerator.load_state(where)
        for model, wanted in zip((actor, critic), whole, strict=True):
            assert_same(accelerator.get_state_dict(model), wanted, "weights that were loaded")
    return whole


@on_ranks(2)
def test_several_models_and_optimizers(context: RankContext, tmp_path: Path) -> None:
    """And a loss that is a module without parameters."""
    with launched(context):
        theirs = _gan(stock)
    with launched(context):
        ours = _gan(StreamShardAccelerator, tmp_path)
    for own, other in zip(ours, theirs, strict=True):
        assert_same(own, other, "weights")


@on_ranks(2)
def test_a_reference_model_is_sharded_and_has_no_gradients(context: RankContext) -> None:
    """It cannot be trained later. The other way round it can."""
    with launched(context):
        accelerator = StreamShardAccelerator()
        model = make_model().to(context.device)
        x = torch.randn(3, 5, device=context.device)
        wanted = model(x)
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        assert prepared is model and isinstance(model, StreamShard)
        with torch.no_grad():
            assert torch.equal(model(x), wanted)
        assert all(param.requires_grad for param in model.parameters())
        held = model.memory_report().held_bytes
        assert held["frozen weights"] > 0
        assert held["main weights"] == held["main grads"] == held["grad slots"] == 0
        accelerator.prepare(model)
        with pytest.raises(ShardingError, match="frozen"):
            model(x).sum().backward()
        trained = accelerator.prepare(make_model())
        assert accelerator.prepare_model(trained, evaluation_mode=True) is accelerator.prepare(trained)


@on_ranks(2)
def test_an_accelerator_and_its_loader_are_freed_with_their_last_reference(context: RankContext) -> None:
    """Without garbage collection, as accelerate's own: loaders end their processes when they are freed."""
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=2)
        accelerator, model = run.accelerator, run.model
        run.epoch(3)
        alive = [weakref.ref(each) for each in (accelerator, run.data, run.optimizer, run.scheduler)]
        del accelerator, run
        assert [each() for each in alive] == [None] * 4
    del model  # has cycles of its own


@on_ranks(2)
def test_options_are_those_of_streamshard(context: RankContext) -> None:
    """Without mixed precision parameters compute in their own dtypes."""
    options: dict[str, Any] = {"weight_slots": "all", "units": ["Layer", "head"], "resident": "layers.1"}
    with launched(context):
        engine = engine_inside(StreamShardAccelerator(**options).prepare(make_model()))
        assert engine.plan.keeps_weights
        assert [unit.name for unit in engine.units[1:]] == [*(f"layers.{number}" for number in range(4)), "head"]
        assert [unit.is_streamed for unit in engine.units[1:]] == [True, False, True, True, False]
        for dtype in (torch.bfloat16, torch.float32):
            engine = engine_inside(StreamShardAccelerator().prepare(make_model().to(dtype)))
            assert {param.unsharded.dtype for unit in engine.units for param in unit.params} == {dtype}


@on_ranks(1)
def test_options_that_contradict_each_other_are_refused(context: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    with launched(context):
        with pytest.raises(ConfigError, match="weight_slots=1"):
            StreamShardAccelerator(weight_slots=1).prepare(make_model())
        monkeypatch.setattr(StreamShardAccelerator, "distributed_type", DistributedType.FSDP)
        with pytest.raises(ConfigError, match="asked for FSDP.*--multi_gpu"):
            StreamShardAccelerator()
    monkeypatch.undo()
    contradiction = pytest.raises(ConfigError, match="bfloat16, and mixed_precision is 'fp16'")
    with launched(context, ACCELERATE_MIXED_PRECISION="fp16"), contradiction:
        StreamShardAccelerator(precision=Precision()).prepare(make_model())


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


def _run(context: RankContext, name: str, make: Callable[..., Any], **arguments: Any) -> list[float]:
    """What the example's ``main`` returns, with `make` in the place of the class that the changed line imports."""
    example = load_example(f"accelerate/{name}.py")
    imported = next(each for each, value in vars(example).items() if value is StreamShardAccelerator)
    with launched(context), contextlib.redirect_stdout(io.StringIO()):
        accelerators: list[Any] = []

        def made(*args: Any, **kwargs: Any) -> Any:
            accelerators.append(make(*args, **kwargs))
            accelerators[-1].state.destroy_process_group = lambda: None  # which is the test's
            return accelerators[-1]

        setattr(example, imported, made)
        return example.main(**arguments)


@on_ranks(2)
@pytest.mark.parametrize(
    "name",
    ["automatic_gradient_accumulation", "cross_validation", "early_stopping", "gradient_accumulation", "memory"]
    + ["gradient_accumulation_for_autoregressive_models", "multi_process_metrics", "schedule_free"],
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
    losses = _run(context, "local_sgd", StreamShardAccelerator)
    assert losses[-1] < losses[0]
