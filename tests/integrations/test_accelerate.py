"""accelerate: what a script gets from `StreamShardAccelerator` is what it gets from accelerate's own with DDP."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs, TorchDynamoPlugin
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.core.module_state import engine_of
from streamshard.errors import ConfigError, ShardingError
from streamshard.integrations.accelerate import StreamShardAccelerator
from streamshard.optim import WholeParameterOptimizer
from tests.integrations.accelerating import Trained, launched, loader, make_model, on_ranks, same, stock
from tests.ranks import RankContext
from tests.reference import assert_same

# -- training ----------------------------------------------------------------------------------------------------------


def _whole_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor, lr=0.05, round_size=256)


@on_ranks(2)
@pytest.mark.parametrize("optim", ["AdamW", "Adafactor"])
def test_a_prepared_model_trains_as_under_ddp(context: RankContext, optim: str) -> None:
    """Clipped by value, or in micro-batches by norm, with an optimizer that steps whole parameters."""
    settings: dict[str, Any] = {"steps": 5, "clip": "value"}
    own: dict[str, Any] = {}
    if optim == "Adafactor":
        settings, own = {"steps": 5, "gradient_accumulation_steps": 2}, {"optimizer": _whole_adafactor}
        settings["optimizer"] = lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05)
    with launched(context):
        theirs = Trained(stock, **settings)
    with launched(context):
        ours = Trained(StreamShardAccelerator, **{**settings, **own})
        assert isinstance(ours.model, StreamShard)
        assert ours.accelerator.unwrap_model(ours.model) is ours.model
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
        assert engine_of(ours.model).precision.param_dtype is torch.bfloat16
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=5e-2, atol=1e-2)


@on_ranks(2)
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
def test_pieces_are_not_reduced(context: RankContext) -> None:
    """What accelerate's LocalSGD does with weights."""
    with launched(context):
        run = Trained(StreamShardAccelerator, steps=1)
        with pytest.raises(ShardingError, match=r"all_reduce\(\) of parameter"):
            run.accelerator.reduce([param.data for param in run.model.parameters()])
        assert int(run.accelerator.reduce(torch.ones((), device=context.device))) == 2
