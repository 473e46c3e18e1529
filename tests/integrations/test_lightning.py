"""Lightning's Fabric and Trainer: the same numbers as with DDP, and the same checkpoints."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integrations import accelerating
from tests.models import VOCABULARY, TinyLM, next_token_loss
from tests.ranks import RankContext, on_ranks

pytest.importorskip("lightning")
import lightning  # noqa: E402
from lightning.fabric.strategies import DDPStrategy as FabricDDP  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from streamshard import ConfigError, StreamShard  # noqa: E402
from streamshard.integrations.lightning import StreamShardFabricStrategy, StreamShardStrategy  # noqa: E402
from tests.compare import full_weights
from tests.reference import adamw

STEPS = 6


def _made() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM()


def _rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(0, VOCABULARY, (4 * STEPS, 8), generator=generator))


def _loss(model: Any, tokens: Tensor) -> Tensor:
    return next_token_loss(model(tokens), tokens)


@contextlib.contextmanager
def _launched(context: RankContext) -> Iterator[None]:
    """The environment is torchrun's, which Lightning knows by these names."""
    names = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    with accelerating.launched(context, **names), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's: few workers, no validation, small logging intervals
        os.environ["PL_DISABLE_FORK"] = "1"
        yield


_assert_equal = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


def _fabric(strategy: Any, **given: Any) -> Any:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, **given)
    fabric.launch()
    return fabric


def _run(fabric: Any, path: Path | None = None, resume: Path | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """Train with accumulation and clipping, save after half of the steps, or continue from there."""
    whole = _made()
    model, optimizer = fabric.setup(whole, adamw(whole))
    loader = fabric.setup_dataloaders(DataLoader(_rows(), batch_size=1))  # type: ignore[arg-type]  # rows
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, state)
    norms = []
    for number, tokens in enumerate(loader):
        if number < 2 * state["step"]:
            continue
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(_loss(model, tokens) / 2)
        if not is_last:
            continue
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if path is not None and state["step"] == STEPS // 2:
            fabric.save(path, state)
    return full_weights(whole), norms


@on_ranks(2)
def test_fabric_trains_saves_and_continues_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """The file of either strategy continues under the other one."""
    with _launched(context):
        wanted, norms = _run(_fabric(FabricDDP()), tmp_path / "ddp.ckpt")
        found, own_norms = _run(_fabric(StreamShardFabricStrategy()), tmp_path / "own.ckpt")
        _assert_equal(found, wanted)
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for name in ("ddp.ckpt", "own.ckpt"):
            _assert_equal(_run(_fabric(StreamShardFabricStrategy()), resume=tmp_path / name)[0], wanted)
        _assert_equal(_run(_fabric(FabricDDP()), resume=tmp_path / "own.ckpt")[0], wanted)


@on_ranks(2)
def test_fabrics_precision_decides_the_dtype_of_layers(context: RankContext) -> None:
    """Options of StreamShard have the last word; a precision without a counterpart is refused."""
    with _launched(context):
        for precision, options, dtype in (
            ("32-true", {}, torch.float32),
            ("bf16-mixed", {}, torch.bfloat16),
            ("32-true", {"precision": "bf16"}, torch.bfloat16),
        ):
            fabric = _fabric(StreamShardFabricStrategy(streamshard=options), precision=precision)
            model: Any = fabric.setup(_made())
            seen: list[torch.dtype] = []
            model.module.blocks[0].up.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.dtype))
            model(torch.zeros(1, 8, dtype=torch.int64))
            assert seen == [dtype]
            assert isinstance(model.module, StreamShard)
        with pytest.raises(ConfigError, match="precision='64-true': wanted one of 32-true"):
            _fabric(StreamShardFabricStrategy(), precision="64-true").setup(_made())


class _Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lm = _made()
        self.norms: list[float] = []

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        loss = _loss(self.lm, tokens)
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens: Tensor, number: int) -> None:
        self.log("validation", _loss(self.lm, tokens), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [float(param.grad.norm()) ** 2 for param in self.parameters() if param.grad is not None]
        self.norms.append(sum(squares) ** 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


def _fit(strategy: Any, path: Path, steps: int = STEPS, resume: Path | None = None) -> tuple[Any, _Module]:
    module = _Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        limit_val_batches=2,
        val_check_interval=4,
        callbacks=[ModelCheckpoint(path, filename="{step}", every_n_train_steps=3, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        use_distributed_sampler=True,
    )
    rows: Any = DataLoader(_rows(), batch_size=1)  # type: ignore[arg-type]  # rows
    trainer.fit(module, rows, rows, ckpt_path=None if resume is None else str(resume))
    return trainer, module


@on_ranks(2)
def test_trainer_trains_validates_saves_and_continues_as_with_ddp(context: RankContext, tmp_path: Path) -> None:
    """Accumulation, clipping, a schedule, checkpoints; a run of either strategy continues under the other one."""
    with _launched(context):
        theirs, wanted = _fit(DDPStrategy(), tmp_path / "ddp")
        ours, found = _fit(StreamShardStrategy(), tmp_path / "own")
        assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
        _assert_equal(full_weights(found), full_weights(wanted))
        for name in ("loss", "validation"):
            assert float(ours.callback_metrics[name]) == pytest.approx(float(theirs.callback_metrics[name]), rel=1e-4)
        _, continued = _fit(DDPStrategy(), tmp_path / "again", resume=tmp_path / "ddp" / "step=3.ckpt")
        for strategy, name in ((StreamShardStrategy, "ddp"), (StreamShardStrategy, "own"), (DDPStrategy, "own")):
            _, again = _fit(strategy(), tmp_path / "again", resume=tmp_path / name / "step=3.ckpt")
            assert again.norms == pytest.approx(continued.norms, rel=1e-4), (strategy, name)
            _assert_equal(full_weights(again), full_weights(continued))
        results = ours.validate(found, DataLoader(_rows(), batch_size=1), verbose=False)  # type: ignore[arg-type]
        assert results[0]["validation"] > 0.0
