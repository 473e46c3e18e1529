"""Weights that the user changes between steps, by whatever means, are the weights that the next forward uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, Tolerance, assert_same, full_weights, stack_step
from tests.scenarios import BF16


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def _full_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in full_weights(model).items()})


def _submodules_state_dict(model: Any) -> None:
    full = full_weights(model)
    model.layers[1].load_state_dict(
        {name.removeprefix("layers.1."): value * 0.5 for name, value in full.items() if name.startswith("layers.1.")}
    )


def _summoned(model: nn.Module) -> None:
    if isinstance(model, StreamShard):
        with model.summon_full_params():
            _in_place(model)
    else:
        _in_place(model)


def _fused_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.detach().sign().contiguous()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


EDITS: dict[str, Callable[[Any], None]] = {
    "in place": _in_place,
    "through .data": _through_data,
    "load_state_dict of the whole": _full_state_dict,
    "load_state_dict of a submodule": _submodules_state_dict,
    "summoned and written back": _summoned,
    "a fused optimizer": _fused_step,
}


@on_ranks(1, 2)
def test_edited_weights_are_the_ones_used_next_in_bf16(context: RankContext) -> None:
    """A forward right after the edit, with and without gradients, between steps, casts the weights anew."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = vector_batch(0, context.rank)
    start = copy.deepcopy(plain.state_dict())
    edits = [name for name in EDITS if " of a " not in name]  # loading a part moves less than bf16 rounds
    for name in edits:
        plain.load_state_dict(start)
        model.load_state_dict(start)
        before = model(x).detach()
        EDITS[name](model)
        EDITS[name](plain)
        wanted = copy.deepcopy(plain).bfloat16()(x.bfloat16()).detach()
        moved = (wanted - before).abs().max()
        assert float(moved) > 0.02 * float(before.abs().max()), name  # else this would pass with stale weights
        for grad_mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with grad_mode():
                found = model(x)
            assert_same({"out": found}, {"out": wanted}, name, Tolerance(relative=2e-2))
        found.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_parameter_or_layer_replaced_after_sharding_raises(context: RankContext) -> None:
    """The new object is not sharded: its gradients would stay local."""

    def parameter(model: Any) -> None:
        model.layers[1].linear.weight = nn.Parameter(torch.full((16, 16), 0.1))

    def layer(model: Any) -> None:
        model.head = nn.Linear(16, 1)

    def step(model: Any) -> Tensor:
        return stack_step(model, Call(0, context.rank, 2, 1.0))

    for replace, name in ((parameter, "layers.1.linear.weight"), (layer, "head")):
        model: Any = StreamShard(Stack(), precision=FP32)
        with pytest.raises(RuntimeError, match=name):
            replace(model)
            step(model)
