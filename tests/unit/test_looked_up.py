"""A parameter that is looked up outside of all passes knows that it is a piece."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from streamshard import Precision, ShardingError, StreamShard
from tests.ranks import RankContext, on_ranks

FP32 = Precision(param_dtype=torch.float32)
DIM = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.table = nn.Embedding(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.table.weight.sum()


def sharded() -> Any:
    torch.manual_seed(0)
    return StreamShard(nn.Sequential(Layer(), Layer()), precision=FP32)


@on_ranks(2)
def test_computing_with_a_piece_as_if_it_were_the_weight_names_the_parameter(context: RankContext) -> None:
    """Whatever the function, also where the shapes of pieces fit: the first rank has the whole of the weight."""
    model = sharded()
    linear, norm, table, x = model[0].linear, model[0].norm, model[0].table, torch.randn(4, DIM)
    with pytest.raises(ShardingError, match=r"linear\(\) takes '0\.linear\.weight' for a whole.*StreamShard.*summon"):
        F.linear(x, linear.weight)
    uses: dict[str, Callable[[], object]] = {
        "linear.weight": lambda: x @ linear.weight.T,
        "0.linear.weight": lambda: x @ linear.weight.data.t(),
        "'0.linear.weight": lambda: F.linear(x.bfloat16(), linear.weight.detach().to(torch.bfloat16)),
        "0.linear.weight'": lambda: torch.einsum("bi,oi->bo", x, linear.weight),
        "'0.linear.weight'": lambda: F.conv1d(x[None], linear.weight[..., None]),
        "linear.bias": lambda: x + linear.bias,
        "table.weight": lambda: F.embedding(torch.tensor([1]), table.weight),
        "norm.weight": lambda: F.layer_norm(x, (DIM,), norm.weight),
        "0.norm.weight": lambda: x * norm.weight,
        "norm.bias": lambda: torch.where(x > 0, x, norm.bias),
        "0.table.weight": lambda: torch.linalg.svd(table.weight),
        "'0.table.weight'": lambda: table.weight.data.copy_(torch.zeros(DIM, DIM)),
        "'0.norm.weight'": lambda: nn.Parameter(norm.weight),
    }
    for name, use in uses.items():
        with pytest.raises(ShardingError, match=rf"{name}.*StreamShard keeps only this rank's piece"):
            use()


@on_ranks(2)
def test_what_works_with_a_piece_goes_on_to(context: RankContext) -> None:
    """Looking, comparing, writing element by element, freezing, copying, penalties."""
    model = sharded()
    plain = dict(nn.Sequential(Layer(), Layer()).named_parameters())
    for name, listed in model.named_parameters():
        owner, _, key = name.rpartition(".")
        param = getattr(model.get_submodule(owner), key)
        assert param is listed and isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
        assert repr(param).startswith("Parameter containing:\ntensor(")
        assert type(copy.deepcopy(param)) is nn.Parameter
        assert type(copy.deepcopy(param.data)) is torch.Tensor
        before = param.detach().clone()
        with torch.no_grad():
            param.mul_(2.0).add_(before)
            torch._foreach_div_([param], 3.0)
        torch.testing.assert_close(param.data, before, rtol=1e-6, atol=0.0)
        param.data.lerp_(before, 0.5)
        param.data = before.clone()
        assert torch.equal(param, before) and not (param != before).any()
        assert before.numpy().shape == tuple(param.shape) and param.ndim == plain[name].ndim
        assert param.sum().ndim == 0 and param.norm().item() >= 0.0
        param.requires_grad_(False).requires_grad_(True)
        (0.5 * param.pow(2).sum()).backward()
        assert torch.equal(param.grad, param) and not param.grad.is_sparse
        param.grad = None
        nn.init.normal_(param)
        file = io.BytesIO()
        torch.save(param.data.to(torch.bfloat16), file)
        file.seek(0)
        assert type(torch.load(file)) is torch.Tensor


@on_ranks(2)
def test_weights_that_are_whole_for_a_while_can_be_computed_with(context: RankContext) -> None:
    """Looked up before or inside."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    before, x = model[1].linear.weight, torch.randn(4, DIM)
    with model.summon_full_params():
        for weight in (before, model[1].linear.weight):
            torch.testing.assert_close(F.linear(x, weight), F.linear(x, plain[1].linear.weight))
    with pytest.raises(ShardingError, match="whole weight"):
        F.linear(x, before)


@on_ranks(2)
def test_optimizers_step_on_plain_parameters(context: RankContext) -> None:
    """torch's fast kernels are for these alone; the next who looks one up is told again."""
    seen: list[type] = []

    class Seen(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(map(type, group["params"]))
            return super()._init_group(group, *args, **kwargs)

    model = sharded()
    optimizer = Seen([model[0].linear.weight, model[1].norm.weight], lr=0.1)
    before = model.full_state_dict(rank0_only=False)
    model(torch.randn(4, DIM)).sum().backward()
    assert type(model[0].linear.weight) is not nn.Parameter
    optimizer.step()
    assert seen == [nn.Parameter, nn.Parameter]
    after = model.full_state_dict(rank0_only=False)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"0.linear.weight", "1.norm.weight"}
    with pytest.raises(ShardingError, match="whole weight"):
        F.linear(torch.randn(4, DIM), model[0].linear.weight)


@on_ranks(1)
def test_one_rank_has_whole_weights(context: RankContext) -> None:
    """Nothing is refused, and parameters are what they were."""
    model, x = sharded(), torch.randn(4, DIM)
    assert type(model[0].linear.weight) is nn.Parameter
    assert F.linear(x, model[0].linear.weight).shape == x.shape
