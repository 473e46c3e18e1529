"""Averages of weights: torch's `AveragedModel`, unmodified, and averages of a part of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from streamshard import ShardingError, StreamShard
from tests.compare import EXACT, Tolerance, assert_same
from tests.counts import counted_collectives
from tests.models import DIM, NormStack, Stack
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import FP32, sgd, train_stack


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "kind", "use_buffers"), [(1, "mean", True), (2, "multi", True), (2, "each", False)]
)
def test_averages_equal_those_of_averaged_model(context: RankContext, kind: str, use_buffers: bool) -> None:
    """Parameters and batch norm's statistics."""
    plain, multi_avg_fn = NormStack(), get_ema_multi_avg_fn(0.6) if kind == "multi" else None
    avg_fn = get_ema_avg_fn(0.6) if kind == "each" else None
    average, wanted = (
        AveragedModel(plain, multi_avg_fn=multi_avg_fn, avg_fn=avg_fn, use_buffers=use_buffers) for _ in range(2)
    )
    model, _ = StreamShard(NormStack()), StreamShard(average.module.requires_grad_(False))
    optimizer = sgd(model)
    for step in range(3):
        train_stack(model, optimizer, context, first=step, steps=1)
        average.update_parameters(model)
        plain.load_state_dict(everywhere(model.full_state_dict())[0])
        wanted.update_parameters(plain)
        with torch.no_grad():
            average.eval()(torch.zeros(1, DIM))
    found = everywhere(average.module.full_state_dict())[0]
    assert_same(found, wanted.module.state_dict(), "average", Tolerance(1e-6))


class Online(nn.Module):
    """A tower and a predictor, and perhaps the tower's running average, as BYOL has them."""

    def __init__(self, *, has_target: bool) -> None:
        super().__init__()
        self.tower, self.predictor = Stack(), nn.Linear(1, 7)
        if has_target:
            self.target = Stack().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.predictor(self.tower(x))
        return out


def _by_data(average: list[Any], params: list[Any]) -> None:
    for mine, theirs in zip(average, params, strict=True):
        mine.data.mul_(0.75).add_(theirs.data, alpha=0.25)


def _by_lists(average: list[Any], params: list[Any]) -> None:
    torch._foreach_lerp_(average, params, 0.25)


def _by_copies(average: list[Any], params: list[Any]) -> None:
    for mine, theirs in zip(average, params, strict=True):
        mine.copy_(mine * 0.75 + theirs.to(mine.dtype) * 0.25)


@on_ranks(2)
@pytest.mark.parametrize(("update", "is_one_model"), [(_by_data, True), (_by_lists, False), (_by_copies, True)])
def test_a_tower_averages_a_tower_that_is_cut_at_other_places(
    context: RankContext, update: Any, is_one_model: bool
) -> None:
    """The predictor moves the cuts of the tower's head. Pieces that are cut alike are not sent."""
    model = StreamShard(Online(has_target=is_one_model), precision=FP32)
    target = model.target if is_one_model else StreamShard(Stack().requires_grad_(False), precision=FP32)
    holder, optimizer = (model if is_one_model else target), sgd(model)

    def values(root: nn.Module, of: Any) -> list[Tensor]:
        with of.summon_full_params():
            return [param.detach().clone() for param in root.parameters()]

    for step in range(2):
        train_stack(model, optimizer, context, first=step, steps=1)
        wanted = values(target, holder)
        with torch.no_grad():
            update(wanted, values(model.tower, model))
            with counted_collectives(model if is_one_model else target) as sent:
                update(list(target.parameters()), list(model.tower.parameters()))
        assert sent.get("all_to_all") == 2, sent  # the weight and the bias of the head
        assert_same(dict(enumerate(values(target, holder))), dict(enumerate(wanted)), "average", EXACT)


@on_ranks(2)
def test_exchanged_pieces_have_no_graph(context: RankContext) -> None:
    """A penalty on the distance of two towers detaches one, or raises by name. Another shape raises too."""
    model = StreamShard(Online(has_target=True), precision=FP32)
    trained, target = model.tower.head.weight, model.target.head.weight
    with pytest.raises(ShardingError, match=r"'tower.head.weight' is cut at other places.*detach\(\)"):
        target - trained
    (trained - target).square().sum().backward()
    difference = (target - trained.detach()).abs().max()
    assert difference == (trained.grad / 2).abs().max()
    with pytest.raises(ShardingError, match="'tower.head.weight' has another shape"):
        model.predictor.weight.detach() - trained.detach()
