"""The advice of refusals that no other test follows: what the message says works, in the place of the refused code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard
from streamshard.errors import ShardingError
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_same, assert_trains_like_plain, case, full_weights, stack_step


class Advice(NamedTuple):
    """Code that raises, and the code that the error advises.

    Attributes:
        refused: called with a sharded model.
        message: of its error.
        advised: called with another one.
    """

    refused: Callable[[Any], object]
    message: str
    advised: Callable[[Any], object]


def _loss(model: Any) -> Tensor:
    loss: Tensor = model(vector_batch(0, 0)).square().mean()
    return loss


def _train(model: Any) -> None:
    _loss(model).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _change_between(model: Any) -> None:
    loss = _loss(model)
    with torch.no_grad():
        model.layers[1].linear.weight.mul_(0.5)
    loss.backward()  # type: ignore[no-untyped-call]


def _change_before(model: Any) -> None:
    with torch.no_grad():
        model.layers[1].linear.weight.mul_(0.5)
    _train(model)


def _freeze(model: Any) -> None:
    model.layers[1].linear.weight.requires_grad_(False)
    _train(model)
    model.zero_grad()
    model.layers[1].linear.weight.requires_grad_(True)
    _train(model)
    assert model.layers[1].linear.weight.grad is not None


def _thaw(_: Any) -> None:
    model: Any = Stack()
    model.layers[1].linear.weight.requires_grad_(False)
    model = StreamShard(model, precision=FP32)
    model.layers[1].linear.weight.requires_grad_(True)
    _train(model)


def _forward_mode(model: Any) -> None:
    x = vector_batch(0, 0)
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(out).tangent is not None


def _scripted(model: Any) -> nn.Module:
    return nn.Sequential(Stack(), torch.jit.script(model))  # type: ignore[no-untyped-call]


def _ignoring(model: Any) -> Any:
    model._ddp_params_and_buffers_to_ignore = ["head.bias"]
    return model


def _without_ignoring(_: Any) -> None:
    model = _ignoring(Stack())
    del model._ddp_params_and_buffers_to_ignore
    _train(StreamShard(model, precision=FP32))


def _expanded() -> Any:
    model = Stack()
    model.register_buffer("mask", torch.ones(1).expand(DIM))
    return model


def _cloned(_: Any) -> None:
    model: Any = _expanded()
    model.mask = model.mask.clone()
    _train(StreamShard(model, precision=FP32))


def _copied(model: Any) -> None:
    other = StreamShard(Stack(), precision=FP32)
    other.load_state_dict(model.full_state_dict(rank0_only=False))
    assert_same(full_weights(other), full_weights(model), "weights")


def _assign(model: Any, *, assign: bool) -> None:
    model.load_state_dict(Stack().state_dict(), assign=assign)


def _replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(1, DIM))
    _loss(model)


def _write(model: Any) -> None:
    with model.summon_full_params():
        model.head.weight.data.fill_(1.0)
    assert full_weights(model)["head.weight"].eq(1.0).all()


def _on_meta() -> Any:
    with torch.device("meta"):
        return StreamShard(Stack(), precision=FP32)


def _penalty_inside(model: Any) -> None:
    with model.summon_full_params():
        _loss(model)


ADVICE = {
    "a change between forward and backward": Advice(_change_between, "run the backward first", _change_before),
    "a parameter that was frozen": Advice(_thaw, r"Freeze it after StreamShard\(model\)", _freeze),
    "torch.func": Advice(lambda m: torch.func.jvp(m, (vector_batch(0, 0),), (vector_batch(1, 0),)),
                         "forward-mode torch.autograd.forward_ad", _forward_mode),
    "TorchScript": Advice(lambda m: StreamShard(_scripted(nn.Linear(1, 1))), "Scripted functions and modules without",
                          lambda m: _loss(StreamShard(_scripted(nn.Tanh()), precision=FP32))),
    "DDP's list": Advice(lambda m: StreamShard(_ignoring(Stack())), "delete the attribute", _without_ignoring),
    "an expanded buffer": Advice(lambda m: StreamShard(_expanded()), r"Register a clone\(\)", _cloned),
    "a copy": Advice(copy.deepcopy, "shard a second model and load", _copied),
    "assign=True": Advice(lambda m: _assign(m, assign=True), "leave assign away", lambda m: _assign(m, assign=False)),
    "another parameter": Advice(_replace, r"summon_full_params\(\)", _write),
    "half precision": Advice(lambda m: m.half(), "sets what layers compute with",
                             lambda m: _loss(StreamShard(Stack(), precision=Precision(param_dtype=torch.float16)))),
    "a forward of full weights": Advice(_penalty_inside, "outside of summon_full_params", _loss),
    "weights without values": Advice(lambda m: _loss(_on_meta()), "model.load_state_dict",
                                     lambda m: _assign(_on_meta(), assign=False)),
}  # fmt: skip


@on_ranks(2)
def test_the_advice_of_refusals_works(context: RankContext) -> None:
    for name, advice in ADVICE.items():
        with case(name):
            with pytest.raises(ShardingError, match=advice.message):
                advice.refused(StreamShard(Stack(), precision=FP32))
            advice.advised(StreamShard(Stack(), precision=FP32))


class Expert(nn.Linear):
    """One of several that only some rows use."""


class Experts(Stack):
    """Experts as units, with one checkpoint over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(DIM, DIM) for _ in range(4))

    def route(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same; each rank uses other experts"""
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = x.argmax(1) % 4 == number
            if rows.any():
                out = out.index_put((rows,), torch.tanh(expert(x[rows])))
        return x + out

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> [rows, 1]"""
        x = checkpoint(self.route, x.requires_grad_(), use_reentrant=False)
        return super().forward(x)


@on_ranks(2)
def test_resident_experts_train_under_one_checkpoint_over_all(context: RankContext) -> None:
    """Streamed ones would wait for each other: the limits say so."""
    assert_trains_like_plain(context, Experts, stack_step, units=[Expert], resident=[Expert])
