"""What ranks keep for an optimizer is put together only if they have stepped alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from streamshard.errors import ConfigError, RankMismatchError
from streamshard.optim import WholeParameterOptimizer
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, sharded_model, stack_step, train_stack


def _adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def _muon(model: nn.Module) -> Any:
    return WholeParameterOptimizer(
        [param for param in model.parameters() if param.ndim == 2], torch.optim.Muon, lr=0.01
    )


def _sets_lr_by_its_own_loss(optimizer: Any, rank: int) -> None:
    """As a rank with ReduceLROnPlateau and a loss that no rank averages."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 1.0 + rank, 1.0 + rank):
        schedule.step(loss if rank else loss / (1 + schedule.last_epoch))


def _has_another_order(optimizer: Any, rank: int) -> None:
    if rank:
        optimizer.param_groups[0]["params"].reverse()


_SOME = r"optimizer: '{}' of group 0 is {} on rank 0 and {} on rank 1"


@on_ranks(2)
@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (_adamw, _sets_lr_by_its_own_loss, _SOME.format("lr", "0.01", "0.0025")),
        (_adamw, {"betas": (0.9, 0.99)}, _SOME.format("betas", r"\[0.9, 0.999\]", r"\[0.9, 0.99\]")),
        (_adamw, {"lr": torch.tensor(0.5)}, _SOME.format("lr", "0.01", "0.5")),
        (_adamw, {"kind": "head"}, ""),
        (_adamw, {"foreach": False}, ""),
        (_adamw, _has_another_order, ""),
        (_adamw, {"lr": 0.01 * (1 + 1e-15)}, ""),
        (_muon, {"weight_decay": 0.0}, _SOME.format("weight_decay", "0.1", "0.0")),
    ],
)
def test_options_that_differ_between_ranks_are_named_before_anything_is_written(
    context: RankContext, tmp_path: Path, build: Any, change: Any, message: str
) -> None:
    """The run goes on, and saves with options that are the same. Options that change no step may differ."""
    model = sharded_model()
    optimizer = build(model)
    train_stack(model, optimizer, context, steps=1)
    before = dict(optimizer.param_groups[0])
    if callable(change):
        change(optimizer, context.rank)
    elif context.rank == 1:
        optimizer.param_groups[0].update(change)
    if message:
        with pytest.raises(RankMismatchError, match=message):
            save_checkpoint(tmp_path, model, optimizer)
        with pytest.raises(RankMismatchError, match=message.removeprefix("optimizer: ")):
            full_optimizer_state_dict(model, optimizer)
        assert list(tmp_path.iterdir()) == []
        optimizer.param_groups[0].update(before)
        train_stack(model, optimizer, context, first=1, steps=1)
    save_checkpoint(tmp_path, model, optimizer)
    full_optimizer_state_dict(model, optimizer)


@on_ranks(2)
def test_a_first_step_that_one_rank_leaves_out_is_named(context: RankContext, tmp_path: Path) -> None:
    """As by `if not loss.isnan(): optimizer.step()`, at the call also if the save goes on in the background."""
    model = sharded_model()
    optimizer = _adamw(model)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    if context.rank == 0:
        optimizer.step()
    for save in (save_checkpoint, lambda *args: save_checkpoint(*args, wait=False)):
        with pytest.raises(RankMismatchError, match=r"'has stepped' of model/\S+ is True on rank 0 and False on"):
            save(tmp_path, model, optimizer)
    with pytest.raises(RankMismatchError, match=r"'has stepped' of layers\.\S+ is True on rank 0 and False on"):
        full_optimizer_state_dict(model, optimizer)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
@pytest.mark.parametrize("used_by", [0, 1])
def test_of_a_parameter_that_is_not_sharded_the_state_of_rank_0_counts(
    context: RankContext, tmp_path: Path, used_by: int
) -> None:
    """As of the weights of a loss that only one rank has used."""
    model, head = sharded_model(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), head.weight], lr=0.01)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    if context.rank == used_by:
        head.weight.grad = torch.ones(2, 2)
    optimizer.step()
    state = full_optimizer_state_dict(model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, {"head": head})
    for load in (
        lambda: load_optimizer_state_dict(model, optimizer, state),
        lambda: load_checkpoint(tmp_path, model, optimizer, {"head": head}),
    ):
        optimizer.state[head.weight] = {}
        load()
        found = optimizer.state[head.weight]
        assert (float(found["step"]) if found else None) == (1.0 if used_by == 0 else None)
        if found:
            torch.testing.assert_close(found["exp_avg"], torch.full((2, 2), 0.1))


@on_ranks(4)
@pytest.mark.parametrize("skips_on", [1, 2])
def test_a_step_that_one_rank_leaves_out_is_named(context: RankContext, tmp_path: Path, skips_on: int) -> None:
    """Of the same shard group, or of another replica. The weights can be saved without the optimizer."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = sharded_model(mesh=mesh)
    optimizer = _adamw(model)
    train_stack(model, optimizer, context, steps=1)
    stack_step(model, Call(1, context.rank, context.world_size, 1.0))
    if context.rank != skips_on:
        optimizer.step()
    with pytest.raises(RankMismatchError, match=rf"'step' of model/.* is 2.0 on rank 0 and 1.0 on rank {skips_on}"):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path, model)


@on_ranks(2)
def test_an_optimizer_of_two_sharded_models_has_no_full_state(context: RankContext) -> None:
    """Of the other model there would be pieces only."""
    models = sharded_model(), sharded_model()
    optimizer = torch.optim.AdamW([param for model in models for param in model.parameters()])
    for model in models:
        stack_step(model, Call(0, context.rank, 2, 1.0))
    optimizer.step()
    message = r"AdamW steps 'layers.0.linear.weight' of another sharded model too.*save_checkpoint\(directory"
    with pytest.raises(ConfigError, match=message):
        full_optimizer_state_dict(models[0], optimizer)
    with pytest.raises(ConfigError, match=message):
        load_optimizer_state_dict(models[1], optimizer, optimizer.state_dict())
