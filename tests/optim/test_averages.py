"""`update_parameters`: the average that torch's `AveragedModel` keeps of the unsharded model, buffers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from streamshard import ConfigError, ShardingError, StreamShard
from streamshard.optim import update_parameters
from tests.models import DIM, NormStack, Stack
from tests.ranks import RankContext, everywhere, on_ranks
from tests.reference import EXACT, FP32, Tolerance, assert_same, counted_collectives, sgd, sharded_model, train_stack


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "kind", "use_buffers"), [(1, "mean", True), (2, "multi", True), (2, "each", False)]
)
def test_averages_equal_those_of_averaged_model(context: RankContext, kind: str, use_buffers: bool) -> None:
    """Parameters and batch norm's statistics; its counter is copied. In evaluation all ranks use rank 0's buffers."""
    model, average = StreamShard(NormStack()), StreamShard(NormStack().requires_grad_(False))
    plain, multi_avg_fn = NormStack(), get_ema_multi_avg_fn(0.6) if kind == "multi" else None
    avg_fn = get_ema_avg_fn(0.6) if kind == "each" else None
    wanted = AveragedModel(plain, multi_avg_fn=multi_avg_fn, avg_fn=avg_fn, use_buffers=use_buffers)
    optimizer = sgd(model)
    for step in range(3):
        train_stack(model, optimizer, context, first=step, steps=1)
        update_parameters(average, model, step, multi_avg_fn=multi_avg_fn, avg_fn=avg_fn, use_buffers=use_buffers)
        plain.load_state_dict(everywhere(model.full_state_dict())[0])
        wanted.update_parameters(plain)
        with torch.no_grad():
            average.eval()(torch.zeros(1, DIM))
    expected = {**wanted.module.state_dict(), **{k: v for k, v in plain.state_dict().items() if "num_batches" in k}}
    assert_same(average.full_state_dict(rank0_only=False), expected, "average", Tolerance(1e-6))


@on_ranks(2)
def test_models_that_do_not_fit_together_are_not_averaged(context: RankContext) -> None:
    """Each error names the first tensor. Nothing has changed."""

    model, average = sharded_model(), StreamShard(Stack().requires_grad_(False), precision=FP32)
    before = average.full_state_dict(rank0_only=False)
    for other, said in (
        (NormStack(), "the model alone has the buffer 'norms.0.running_mean'"),
        (Stack((DIM,) * 4), "the averaged model alone has the parameter 'layers.3"),
        (Stack().bfloat16().requires_grad_(False), "bfloat16"),
        (Stack((2 * DIM,) * 5), "another shape, dtype or ranks"),
    ):
        precision = "bf16" if "bfloat16" in said else FP32
        with pytest.raises(ShardingError, match=said):
            update_parameters(average, StreamShard(other, precision=precision), 1)
    with pytest.raises(ShardingError, match="Stack is not sharded"):
        update_parameters(Stack(), model, 1)
    with pytest.raises(ConfigError, match="n_averaged=0.5"):
        update_parameters(average, model, 0.5)  # type: ignore[arg-type]
    assert_same(average.full_state_dict(rank0_only=False), before, "weights", EXACT)


@on_ranks(2)
def test_an_average_from_the_meta_device_begins_as_a_copy(context: RankContext) -> None:
    """Buffers get values too. A later update of an average without values raises."""
    with torch.device("meta"):
        average = StreamShard(NormStack().requires_grad_(False), precision=FP32)
    model = sharded_model(NormStack)
    with pytest.raises(ShardingError, match="is empty"):
        update_parameters(average, model, 1)
    update_parameters(average, model, 0)
    assert_same(average.full_state_dict(rank0_only=False), model.full_state_dict(rank0_only=False), "average", EXACT)


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
