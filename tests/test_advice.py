"""The advice of refusals that no other test follows: what the message says works, in the place of the refused code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from streamshard import ShardingError, StreamShard, init_weights
from streamshard.core.optimizer_hooks import follow_model
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.compare import EXACT, assert_same, full_weights
from tests.faults import case
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, stack_step
from tests.scenarios import RoutedStack
from tests.test_meta_device import on_meta


class Advice(NamedTuple):
    """Code that raises with this message, and the code that it advises, unless other tests have that or any has."""

    refused: Callable[[Any], object]
    message: str
    advised: Callable[[Any], object] | None = None


def _loss(model: Any) -> Tensor:
    return model(vector_batch(0, 0)).square().mean()


def _sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1)


def _train(model: Any, make: Callable[[Any], Any] = _sgd) -> Any:
    """One step by the optimizer of ``make(parameters)``, which is returned. A refused one changes no weight."""
    optimizer = make(model.parameters())
    _loss(model).backward()  # type: ignore[no-untyped-call]
    before = full_weights(model)
    try:
        optimizer.step(lambda: _loss(model)) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    except ShardingError:
        assert_same(full_weights(model), before, "weights", EXACT)
        raise
    return optimizer


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


def _replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(1, DIM))
    _loss(model)


class Adaptive(Stack):
    """Returns a copy of its last weight, with which it computes."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        copied = self.head.weight.clone()
        return nn.functional.linear(x, copied, self.head.bias), copied


def _differentiate_by_a_copy(_: Any) -> None:
    """As VQGAN does to weigh losses."""
    model: Any = StreamShard(Adaptive(), precision=FP32)
    out, copied = model(vector_batch(0, 0))
    (slope,) = torch.autograd.grad(out.square().mean(), copied, retain_graph=True)
    out.square().mean().backward()
    torch.testing.assert_close(slope.norm(), model.head.weight.grad.norm())


ADVICE = {
    "a gradient of a weight": Advice(lambda m: torch.autograd.grad(_loss(m), m.head.weight),
                                     r"copy = weight\.clone\(\), and return the copy", _differentiate_by_a_copy),
    "torch.func": Advice(lambda m: torch.func.jvp(m, (vector_batch(0, 0),), (vector_batch(1, 0),)),
                         "torch.autograd.grad of inputs, or torch.autograd.forward_ad", _forward_mode),
    "TorchScript": Advice(lambda m: StreamShard(_scripted(nn.Sequential(nn.Linear(1, 1)))),
                          "Scripted functions and modules without",
                          lambda m: _loss(StreamShard(_scripted(nn.Tanh()), precision=FP32))),
    "DDP's list": Advice(lambda m: StreamShard(_ignoring(Stack())), "delete the attribute"),
    "another model's module": Advice(lambda m: StreamShard(nn.Sequential(Stack(), m.layers[0])),
                                     "as a part of another .*copy.deepcopy"),
    "assign=True": Advice(lambda m: m.load_state_dict(Stack().state_dict(), assign=True), "leave assign away"),
    "another parameter": Advice(_replace, r"summon_full_params\(\)"),
    "half precision": Advice(lambda m: m.half(), "sets what layers compute with"),
    "weights without values": Advice(lambda m: _loss(StreamShard(on_meta(Stack))), "model.load_state_dict"),
}  # fmt: skip


class AdamW8bit(torch.optim.SGD):
    """Has the name of torchao's."""

    def __init__(self, params: Any, block_size: int = 256) -> None:
        super().__init__(params, lr=0.1)
        self.block_size = block_size


Slower: Any = type("Slower", (torch.optim.SGD,), {})
Lion: Any = type("Lion", (torch.optim.SGD,), {})  # of a package that has another one, which works element by element
Faster: Any = elementwise(type("Faster", (torch.optim.SGD,), {}))
Undeclared: Any = type("Undeclared", (Faster,), {})
AdamW8bit.__module__, Lion.__module__ = "torchao.optim.adam", "lion_pytorch.cautious_lion"
_DECLARE = r"declare it: streamshard.optim.elementwise\({}\)"


def _in_blocks(width: int, make: Callable[[Any], Any], align_pieces_to: int = 4096) -> None:
    model: Any = StreamShard(Stack((64, width, width)), precision=FP32, align_pieces_to=align_pieces_to)
    model(vector_batch(0, 0, dim=64)).sum().backward()
    make(model.parameters()).step()


def _in_blocks_but_one(params: Any) -> Any:
    small, large = [], []
    for param in params:
        (large if param.numel() >= 4096 else small).append(param)
    torch.optim.AdamW(large).step()
    return AdamW8bit(small)


def _load_pieces(model: Any) -> None:
    others = [nn.Parameter(torch.ones(5)) for _ in model.parameters()]
    for each in others:
        each.grad = torch.ones(5)
    theirs, ours = torch.optim.AdamW(others), torch.optim.AdamW(model.parameters())
    theirs.step()
    _train(model, lambda params: ours)
    ours.load_state_dict(theirs.state_dict())


def _step_dtensors(*, first: bool) -> None:
    """Before the model is sharded, or only afterwards: accelerate's `prepare` may get the optimizer before."""
    world = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(Stack(), world["tp"], {"head": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first:
        _loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    sharded = StreamShard(model, mesh=world["dp"], precision=FP32)
    follow_model(optimizer)
    _loss(sharded).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


OF_OPTIMIZERS = {
    "whole parameters": Advice(
        lambda m: _train(m, torch.optim.Adafactor), r"optimizer = streamshard.optim.WholeParameterOptimizer\(model"),
    "a subclass": Advice(lambda m: _train(m, Slower), _DECLARE.format("Slower"),
                         lambda m: _train(m, elementwise(type("Declared", (Slower,), {})))),
    "a subclass of a declared one": Advice(lambda m: _train(m, Undeclared), _DECLARE.format("Undeclared"),
                                           lambda m: _train(m, Faster)),
    "another of a known package": Advice(
        lambda m: _train(m, Lion), r"cautious_lion.Lion is not .*elementwise\(Lion\).* write .*Optimizer\(.*, Lion,",
        lambda m: _train(m, functools.partial(WholeParameterOptimizer, optimizer_class=Lion))),
    "a closure": Advice(lambda m: _train(m, torch.optim.LBFGS), "take another optimizer, such as torch.optim.AdamW"),
    "cut blocks": Advice(lambda m: _in_blocks(128, AdamW8bit, 1), r"write StreamShard\(model, align_pieces_to=4096\)",
                         lambda m: _in_blocks(128, AdamW8bit)),
    "blocks of another size": Advice(lambda m: _in_blocks(128, functools.partial(AdamW8bit, block_size=192)),
                                     "wanted a power of two, at most 4096"),
    "an incomplete block": Advice(lambda m: _in_blocks(100, AdamW8bit), "give this parameter to another optimizer",
                                  lambda m: _in_blocks(100, _in_blocks_but_one)),
    "steps of DTensors": Advice(lambda m: _step_dtensors(first=True), r"optimizer of model.parameters\(\) afterwards",
                                lambda m: _step_dtensors(first=False)),
    "state of other shapes": Advice(_load_pieces, r"load_optimizer_state_dict\(model, optimizer, state\)"),
}  # fmt: skip


def _copy_head(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    elif isinstance(module, Stack):
        module.head.bias.copy_(module.layers[0].linear.weight[0, :1])


def _initialise(*loaded: str) -> None:
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    full = Stack().state_dict()
    model.load_state_dict({name: torch.ones_like(full[name]) for name in loaded}, strict=False)
    init_weights(model, _copy_head)
    assert all(param.isfinite().all() for param in full_weights(model).values())
    assert all(full_weights(model)[name].eq(1.0).all() for name in loaded)


OF_INITIALISATION = {
    "weights of another unit": Advice(lambda m: _initialise(), "or load the weights that need them",
                                      lambda m: _initialise("head.weight", "head.bias")),
}  # fmt: skip


TABLES = {"models": ADVICE, "optimizers": OF_OPTIMIZERS, "initialisation": OF_INITIALISATION}


@on_ranks(2)
@pytest.mark.parametrize("of", TABLES)
def test_the_advice_of_refusals_works(context: RankContext, of: str) -> None:
    for name, advice in TABLES[of].items():
        with case(name):
            with pytest.raises(ShardingError, match=advice.message):
                advice.refused(StreamShard(Stack(), precision=FP32))
            if advice.advised is not None:
                advice.advised(StreamShard(Stack(), precision=FP32))


class _Experts(RoutedStack):
    """Experts, of which each rank uses others, under one checkpoint over all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=False)


def _expert_step(model: Any, call: Call) -> Tensor:
    model.route = [0, 2] if call.rank else [1, 3, 2]
    return stack_step(model, call)


@on_ranks(2)
def test_resident_experts_train_under_one_checkpoint_over_all(context: RankContext) -> None:
    """Streamed ones would wait for each other: the limits say so."""
    assert_trains_like_plain(context, _Experts, _expert_step, units=[Layer], resident=[Layer])
