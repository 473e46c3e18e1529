"""accelerate: what a script gets from `StreamShardAccelerator` is what it gets from accelerate's own with DDP."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState, load_checkpoint_in_model
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from streamshard import Precision, StreamShard, init_weights
from streamshard.engine.handle import engine_of
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from streamshard.integrations import accelerate_launch
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.integrations.accelerating import SAMPLES, launched, loader, make_model, stock
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import assert_same

FP32 = Precision(param_dtype=torch.float32)


class Trained:
    """A training run on one rank: what it showed, and what it left.

    Args:
        make: the Accelerator's class.
        steps: how many batches to train on, over as many epochs as it takes.
        clip: what to do to gradients.
        data: batches.
        dropout: of the model.
        **settings: of the Accelerator.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        steps: int = 0,
        clip: str = "norm",
        data: Any = None,
        dropout: float = 0.0,
        **settings: Any,
    ) -> None:
        self.accelerator = make(**settings)
        model = make_model(dropout=dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        prepared = self.accelerator.prepare(model, optimizer, data or loader(), scheduler)
        self.model, self.optimizer, self.data, self.scheduler = prepared
        self.clip = clip
        self.losses: list[float] = []
        self.norms: list[float] = []
        while len(self.losses) < steps:
            self.epoch(steps - len(self.losses))
        self.final = self.weights()  # while accelerate still knows of it

    def epoch(self, most: int = 10**6, data: Any = None) -> None:
        for number, (x, y) in enumerate(self.data if data is None else data, 1):
            self.step(x, y)
            if number == most:
                return

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        accelerator, params = self.accelerator, self.model.parameters()
        with accelerator.accumulate(self.model):
            loss = (self.model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and self.clip == "norm":
                self.norms.append(float(accelerator.clip_grad_norm_(params, 0.5)))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(params, 0.01)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.gather_for_metrics(loss.detach()[None]).mean()))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def _same(ours: Trained, theirs: Trained) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-4, atol=1e-6)
    assert_same(ours.final, theirs.final, "weights")


# -- training ---------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_trains_as_ddp_does(context: RankContext, clip: str, accumulated: int) -> None:
    settings = {"steps": 9, "clip": clip, "gradient_accumulation_steps": accumulated}
    with launched(context):
        theirs = Trained(stock, **settings)
    with launched(context):
        ours = Trained(StreamShardAccelerator, **settings)
        assert isinstance(ours.model, StreamShard)
        assert ours.accelerator.unwrap_model(ours.model) is ours.model
    _same(ours, theirs)


@on_ranks(2)
def test_bf16_is_ddps_autocast(context: RankContext) -> None:
    """The same with fp32 weights and inputs left alone; nearly with weights of bf16, which are the default."""
    with launched(context):
        theirs = Trained(stock, steps=6, mixed_precision="bf16")
    with launched(context):
        precision = Precision(param_dtype=torch.float32, cast_inputs=False)
        ours = Trained(StreamShardAccelerator, steps=6, mixed_precision="bf16", precision=precision)
        assert ours.model(torch.ones(2, 5)).dtype is torch.float32
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=1e-4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=6, mixed_precision="bf16")
        assert engine_of(ours.model).precision.param_dtype is torch.bfloat16
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=5e-2, atol=1e-2)


@on_ranks(1, 2)
def test_fp16_scales_losses_on_cpus_too(context: RankContext) -> None:
    """Norms are those of unscaled gradients; an overflow on one rank skips the step on all."""
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        scale = GradScalerKwargs(init_scale=1024.0)
        ours = Trained(StreamShardAccelerator, steps=4, mixed_precision="fp16", kwargs_handlers=[scale])
        assert engine_of(ours.model).precision.param_dtype is torch.float16
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(ours.norms, theirs.norms, rtol=5e-2, atol=1e-2)
        assert not ours.accelerator.optimizer_step_was_skipped
        before = ours.weights()
        x = torch.full((4, 5), 1e4 if context.rank == 0 else 1.0)
        ours.step(x, torch.full((4, 1), 6e4))
        assert ours.accelerator.optimizer_step_was_skipped
        assert_same(ours.weights(), before, "weights")
        assert float(ours.accelerator.scaler.get_scale()) == 512.0


@on_ranks(2)
def test_a_compiled_model_trains_as_ddp_does(context: RankContext) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo, about gradients of views that it looks at
        with launched(context):
            theirs = Trained(stock, steps=3)
        with launched(context):
            ours = Trained(StreamShardAccelerator, steps=3, dynamo_backend="eager")
            assert not isinstance(ours.model, StreamShard)
            _same(ours, theirs)


class Gan(nn.Module):
    def __init__(self, seed: int, out: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _gan(make: Callable[..., Any], where: Path | None = None) -> list[dict[str, torch.Tensor]]:
    accelerator = make()
    actor, critic = Gan(1, 5), Gan(2, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (actor, critic)]
    actor, critic, *optimizers, data, criterion = accelerator.prepare(
        actor, critic, *optimizers, loader(), nn.MSELoss()
    )
    for x, _ in data:
        for trained, sign in ((critic, 1.0), (actor, -1.0)):
            score = criterion(critic(x), torch.ones(4, 1)) - criterion(critic(actor(x)), torch.ones(4, 1))
            accelerator.backward(sign * score)
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
        # DDP takes no modules without parameters, and one forward for one backward.
        theirs = _gan(lambda: StreamShardAccelerator(weight_slots="all", grad_slots="all"))
    with launched(context):
        ours = _gan(StreamShardAccelerator, tmp_path)
    for own, other in zip(ours, theirs, strict=True):
        assert_same(own, other, "weights")


@on_ranks(1, 2)
def test_a_reference_model_is_sharded_and_has_no_gradients(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        model = make_model()
        x = torch.randn(3, 5)
        wanted = model(x)
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        assert prepared is model and isinstance(model, StreamShard)
        with torch.no_grad():
            assert torch.equal(model(x), wanted)
        assert all(param.requires_grad for param in model.parameters())
        held = model.memory_report().held_bytes
        assert held["frozen weights"] > 0
        assert held["main weights"] == held["main grads"] == held["grad slots"] == 0


@on_ranks(2)
def test_a_model_that_was_evaluated_first_trains_as_well(context: RankContext) -> None:
    """What transformers' Trainer does when it evaluates before it trains."""
    with launched(context):
        theirs = Trained(stock, steps=3)
    with launched(context):

        class Evaluating(StreamShardAccelerator):
            def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
                evaluated = super().prepare_model(model, evaluation_mode=True)
                with torch.no_grad():
                    evaluated(torch.ones(2, 5))
                return super().prepare_model(model, *args, **kwargs)

        ours = Trained(Evaluating, steps=3)
    _same(ours, theirs)


@on_ranks(2)
def test_free_memory_lets_go_of_everything(context: RankContext) -> None:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=2)
        alive = weakref.ref(engine_of(run.model))
        accelerator = run.accelerator
        run.model, run.optimizer = accelerator.free_memory(run.model, run.optimizer)
        del run
        gc.collect()
        assert alive() is None
        assert accelerator.step == 0
        assert Trained(lambda: accelerator, steps=2).losses


@on_ranks(2)
def test_pieces_are_not_reduced_or_gathered(context: RankContext) -> None:
    """What accelerate's LocalSGD does with weights."""
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1)
        for what in (run.accelerator.reduce, run.accelerator.gather):
            with pytest.raises(ShardingError, match="LocalSGD"):
                what([param.data for param in run.model.parameters()])
        assert int(run.accelerator.reduce(torch.ones(()))) == 2


# -- uneven inputs ----------------------------------------------------------------------------------------------------


def _uneven(run: Trained, context: RankContext, lengths: tuple[int, ...], join: Callable[[], Any]) -> None:
    with join():
        generator = torch.Generator().manual_seed(context.rank)
        for _ in range(lengths[context.rank]):
            x = torch.randn(4, 5, generator=generator)
            run.accelerator.backward((run.model(x) - 1.0).square().mean())
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()


@on_ranks(2, 3)
@pytest.mark.parametrize("lengths", [(4, 2, 3), (0, 3, 1)])
def test_uneven_inputs_as_with_ddp(context: RankContext, lengths: tuple[int, ...]) -> None:
    with launched(context):
        theirs = Trained(stock)
        _uneven(theirs, context, lengths, lambda: Join([theirs.model]))
        wanted = theirs.weights()
    with launched(context):
        ours = Trained(StreamShardAccelerator)
        accelerator = ours.accelerator
        _uneven(ours, context, lengths, lambda: accelerator.join_uneven_inputs([ours.model], even_batches=False))
        assert_same(ours.weights(), wanted, "weights")


@on_ranks(2)
def test_uneven_inputs_from_loaders_with_clipping(context: RankContext) -> None:
    """A rank that has run out clips as it did before. Loaders give what they have, and even batches again later."""
    with launched(context):
        run = Trained(StreamShardAccelerator)
        accelerator = run.accelerator
        data = accelerator.prepare(loader(samples=20, shuffle=False))
        with accelerator.join_uneven_inputs([run.model], even_batches=False):
            for x, y in data:
                _clipped_step(run, x, y)
        assert len(run.norms) == (3 if context.rank == 0 else 2)
        assert data.batch_sampler.even_batches
        run.model.check_weights()
        whole = run.weights()
    reference = make_model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    batches = list(loader(samples=20, shuffle=False))
    for together in (batches[:2], batches[2:4], batches[4:]):
        optimizer.zero_grad()
        for x, y in together:
            ((reference(x) - y).square().mean() / 2).backward()  # a rank without inputs adds zeros
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        scheduler.step()  # once for each process, as accelerate does
    assert_same(whole, reference.state_dict(), "weights")


def _clipped_step(run: Trained, x: torch.Tensor, y: torch.Tensor) -> None:
    accelerator = run.accelerator
    accelerator.backward((run.model(x) - y).square().mean())
    run.norms.append(float(accelerator.clip_grad_norm_(run.model.parameters(), 0.05)))
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()


# -- options ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_options_are_arguments_or_variables(context: RankContext) -> None:
    with launched(
        context, STREAMSHARD_WEIGHT_SLOTS="3", STREAMSHARD_GRAD_SLOTS="all", STREAMSHARD_GRAD_DTYPE="bfloat16",
        STREAMSHARD_UNITS="Block, last", STREAMSHARD_CHECK_GRADS="true",
    ):  # fmt: skip
        accelerator = StreamShardAccelerator(weight_slots="all", mixed_precision="bf16")
        engine = engine_of(accelerator.prepare(make_model()))
        assert engine.plan.keeps_weights and engine.plan.keeps_grads
        assert engine.precision == Precision(grad_dtype=torch.bfloat16)
        assert [unit.name for unit in engine.units[1:]] == ["blocks.0", "blocks.1", "blocks.2", "last"]
        assert engine.reductions.check is not None
    with launched(context, STREAMSHARD_MEMORY_BUDGET="0.5"):
        model = StreamShardAccelerator(weight_slots=3).prepare(make_model())
        assert "weight_slots=3" in model.memory_report().slots


@on_ranks(1)
@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({"STREAMSHARD_WEIGHTS_SLOTS": "3"}, {}, "STREAMSHARD_WEIGHT_SLOTS"),
        ({"STREAMSHARD_CHECK_GRADS": "maybe"}, {}, "true or false"),
        ({"STREAMSHARD_WEIGHT_SLOTS": "1"}, {}, "weight_slots=1"),
        ({}, {"weight_slots": 1}, "weight_slots=1"),
        ({}, {"mixed_precision": "bf16", "precision": Precision(param_dtype=torch.float16)}, "mixed_precision='fp16'"),
        ({}, {"precision": Precision()}, "mixed_precision='bf16'"),
        ({}, {"precision": "bf16"}, "wanted a streamshard.Precision"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"precision": Precision()}, "mixed_precision='bf16'"),
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "FSDP .*ACCELERATE_USE_FSDP.*--multi_gpu"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "Megatron"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, {}, "mesh="),
        ({}, {"fsdp_plugin": FullyShardedDataParallelPlugin}, "fsdp_plugin"),
        ({}, {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "grad_dtype"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    context: RankContext, environment: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with launched(context, **environment):
        if "fsdp_plugin" in settings:
            settings = {"fsdp_plugin": settings["fsdp_plugin"]()}
        with pytest.raises(ConfigError, match=message):
            StreamShardAccelerator(**settings)


@on_ranks(1, 2)
def test_the_dtype_of_a_half_precision_model_is_kept(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        assert engine_of(accelerator.prepare(make_model().bfloat16())).precision.param_dtype is torch.bfloat16
        assert engine_of(accelerator.prepare(make_model())).precision.param_dtype is torch.float32
        with pytest.raises(ConfigError, match="was sharded with param_dtype=torch.bfloat16.*mixed_precision='bf16'"):
            accelerator.prepare(StreamShard(make_model()))
        assert len(accelerator._models) == 2


@on_ranks(2)
def test_a_mesh_of_replicas(context: RankContext) -> None:
    with launched(context):
        theirs = Trained(stock, steps=4)
    with launched(context):
        ours = Trained(StreamShardAccelerator, steps=4, mesh=init_device_mesh("cpu", (2, 1)))
        assert engine_of(ours.model).ranks.world_size == 1
    _same(ours, theirs)


@on_ranks(2)
def test_an_accelerator_of_someone_elses_is_taken_over(context: RankContext) -> None:
    with launched(context):
        theirs = Trained(stock, steps=3)
    with launched(context):

        def take_over(**options: Any) -> StreamShardAccelerator:
            return StreamShardAccelerator.take_over(Accelerator(), **options)

        ours = Trained(take_over, steps=3, weight_slots=3)
        assert "weight_slots=3" in ours.model.memory_report().slots
        with pytest.raises(ConfigError, match="has prepared a model"):
            take_over().__class__.take_over(ours.accelerator)
        with pytest.raises(ConfigError, match="no such option: slots"):
            take_over(slots=3)
    _same(ours, theirs)


@on_ranks(2)
def test_a_model_without_values_is_prepared_and_filled(context: RankContext) -> None:
    with launched(context):
        accelerator = StreamShardAccelerator()
        with torch.device("meta"):
            model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        init_weights(model, seed=5)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        assert accelerator.get_state_dict(model)["first.weight"].shape == (12, 5)


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "accelerate.md"


@pytest.mark.parametrize("group", ["FSDP Arguments", "DeepSpeed Arguments"])
def test_the_page_says_what_to_write_for_each_option_of_accelerate(group: str) -> None:
    page = PAGE.read_text()
    groups = [each for each in launch_command_parser()._action_groups if each.title == group]
    options = [action.dest for each in groups for action in each._group_actions]
    assert len(options) > 10
    assert [option for option in options if option not in page] == []


# -- how processes are started ----------------------------------------------------------------------------------------


def test_one_process_of_several_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch --cpu --num_processes 2`` starts one, and leaves this trace of it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="has started one.*--multi_gpu --num_machines 1 --num_processes N"):
        StreamShardAccelerator()


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
            with pytest.raises(ConfigError, match="2 processes were started, and accelerate knows of 1"):
                StreamShardAccelerator()


def test_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Devices:
        @staticmethod
        def device_count() -> int:
            return 2

    monkeypatch.setattr(accelerate_launch, "accelerator_kind", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: Devices)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    with pytest.raises(ConfigError, match="3 processes for 2 cuda device.*cpu=True"):
        accelerate_launch.check_processes({})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert accelerate_launch.check_processes({"split_batches": True}) == {"split_batches": True}


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


# -- weights ----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_whole_weights_in_memory_and_in_files(context: RankContext, tmp_path: Path) -> None:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=2)
        accelerator = run.accelerator
        whole = run.weights()
        assert {name: tensor.shape for name, tensor in whole.items()} == {
            name: tensor.shape for name, tensor in make_model().state_dict().items()
        }
        assert bool(accelerator.get_state_dict(run.model, rank0_only=True)) == (context.rank == 0)
        accelerator.save_model(run.model, tmp_path / "several", max_shard_size="2KB")
        assert (tmp_path / "several" / "model.safetensors.index.json").exists()
        accelerator.save_model(run.model, tmp_path / "one")
        for where in ("several", "one"):
            other = make_model(seed=99)
            load_checkpoint_in_model(other, tmp_path / where)
            assert_same(other.state_dict(), whole, where)
        with pytest.raises(ConfigError, match="safetensors"):
            accelerator.save_model(run.model, tmp_path / "bin", safe_serialization=False)


@on_ranks(1, 2)
def test_accelerates_own_class_saves_no_pieces(context: RankContext, tmp_path: Path) -> None:
    """The error is on every rank, and before a file is written."""
    with launched(context):
        accelerator = stock()
        model = StreamShard(make_model(), precision=FP32)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        if context.world_size > 1:
            with pytest.raises(ShardingError, match="StreamShardAccelerator"):
                accelerator.save_state(tmp_path)
        with pytest.raises(ShardingError, match="StreamShardAccelerator"):
            accelerator.prepare(model)
        accelerator._models.clear()
        model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        for safe in (True, False):
            for attempt in (
                accelerator.save_state,
                lambda where, safe: accelerator.save_model(model, where, "1GB", safe),
            ):
                with pytest.raises(ShardingError, match="StreamShardAccelerator"):
                    attempt(tmp_path, safe)
        with pytest.raises(ShardingError, match="StreamShardAccelerator"):
            accelerator.get_state_dict(model)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        assert model.state_dict()  # asked for by others it is each rank's own, as ever


# -- runs -------------------------------------------------------------------------------------------------------------


class Counter:
    """An object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["shuffled", "seedable", "in order"])
@pytest.mark.parametrize("after", [4, SAMPLES])
def test_a_run_goes_on_within_an_epoch(context: RankContext, tmp_path: Path, kind: str, after: int) -> None:
    """With the batches and random numbers that were left, as they would have come; or behind its last batch."""
    settings = {
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=kind == "seedable"),
        "data": loader(shuffle=kind != "in order"),
        "dropout": 0.2,
    }
    with launched(context):
        run = Trained(StreamShardAccelerator, **settings)
        run.epoch()
        per_epoch = len(run.data)
        after = min(after, per_epoch)
        for number, (x, y) in enumerate(run.data, 1):
            run.step(x, y)
            if number == after:
                run.accelerator.save_state(tmp_path)
                run.losses.clear()
        run.epoch()
    with launched(context):
        other = Trained(StreamShardAccelerator, **settings)
        other.epoch(1)  # of which nothing must be left
        other.accelerator.load_state(tmp_path)
        other.losses.clear()
        if after < per_epoch:
            other.epoch(data=other.accelerator.skip_first_batches(other.data, after))
            other.data.set_epoch(2)  # as accelerate's own example does
        other.epoch()
        assert other.losses == run.losses
        assert_same(other.weights(), run.weights(), "weights")


def _saved_run(context: RankContext, where: Path) -> list[float]:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=3, mixed_precision="fp16")
        run.accelerator.register_for_checkpointing(Counter(7))
        run.accelerator.save_state(where)
        assert run.accelerator.step == 3
        x = torch.linspace(-1, 1, 20).view(4, 5)
        for _ in range(2):
            run.step(x, x[:, :1])
        return run.losses[-2:]


def _loaded_run(context: RankContext, where: Path) -> list[float]:
    with launched(context):
        run = Trained(StreamShardAccelerator, mixed_precision="fp16")
        counter = Counter(0)
        run.accelerator.register_for_checkpointing(counter)
        run.accelerator.load_state(where)
        assert (counter.count, run.accelerator.step) == (7, 3)
        x = torch.linspace(-1, 1, 20).view(4, 5)
        for _ in range(2):
            run.step(x, x[:, :1])
        return run.losses[-2:]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3)])
@pytest.mark.ranks
def test_a_run_goes_on_at_another_number_of_processes(ranks: RankPool, tmp_path: Path, before: int, after: int) -> None:
    """Weights, moments, schedule, scale, step and registered objects."""
    wanted = ranks(before).run(_saved_run, tmp_path)[0]
    found = ranks(after).run(_loaded_run, tmp_path)[0]
    torch.testing.assert_close(found, wanted, rtol=0.0 if before == after else 5e-3, atol=0.0)


@on_ranks(2)
def test_checkpoints_are_numbered_and_only_the_latest_kept(context: RankContext, tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1, project_config=project)
        accelerator = run.accelerator
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            accelerator.load_state()
        for number in range(11):
            assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
        wanted = run.weights()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_10", "checkpoint_9"]
        assert accelerator.save_iteration == 11
        run.epoch(1)
        accelerator.project_configuration.iteration = 10
        with pytest.raises(CheckpointError, match="checkpoint_10 exists"):
            accelerator.save_state()
        accelerator.load_state()
        assert_same(run.weights(), wanted, "weights")


@on_ranks(2)
def test_hooks_see_whole_weights_and_take_models_out(context: RankContext, tmp_path: Path) -> None:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1)
        accelerator = run.accelerator
        seen: list[Any] = []

        def saving(models: list[Any], weights: list[Any], where: str) -> None:
            seen.append((models[0] is run.model, weights.pop(), where))

        def loading(models: list[Any], where: str) -> None:
            for param in models.pop().parameters():
                param.data.fill_(0.5)

        accelerator.register_save_state_pre_hook(saving)
        wanted = run.weights()
        accelerator.save_state(str(tmp_path / "a"))
        (is_model, weights, where), = seen  # fmt: skip
        assert is_model and where == str(tmp_path / "a")
        assert_same(weights, wanted if context.rank == 0 else {}, "weights")
        handle = accelerator.register_load_state_pre_hook(loading)
        accelerator.load_state(str(tmp_path / "a"))
        assert all(bool((tensor == 0.5).all()) for tensor in run.weights().values())
        handle.remove()
        accelerator.load_state(str(tmp_path / "a"))
        assert_same(run.weights(), wanted, "weights")

        def failing(models: list[Any], weights: list[Any], where: str) -> None:
            if context.rank == 1:
                raise ValueError("no room")

        accelerator.register_save_state_pre_hook(failing)
        with pytest.raises(CheckpointError, match="rank 1: ValueError: no room"):
            accelerator.save_state(tmp_path / "b")


@on_ranks(2)
def test_a_state_of_other_things_is_refused(context: RankContext, tmp_path: Path) -> None:
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1)
        run.accelerator.save_state(tmp_path)
        run.accelerator.register_for_checkpointing(Counter(1))
        with pytest.raises(CheckpointError, match="object.0"):
            run.accelerator.load_state(tmp_path)
        run.accelerator.load_state(tmp_path, strict=False)
        run.accelerator.save_state(tmp_path)
        run.accelerator._custom_objects.clear()
        with pytest.warns(UserWarning, match="object.0, for which nothing is registered"):
            run.accelerator.load_state(tmp_path)
        with pytest.raises(CheckpointError, match="no directory"):
            run.accelerator.load_state(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="automatic_checkpoint_naming"):
            run.accelerator.save_state()
        assert AcceleratorState().num_processes == 2
