"""Whole weights take the room of a unit, one after the other, and nothing that is written to them is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from streamshard import StreamShard, init_weights
from streamshard.engine.handle import engine_of
from streamshard.whole_weight import Room, WholeWeight
from tests.engine.test_empty import on_meta
from tests.models import DIM, Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, full_weights

LAYER_BYTES = (DIM * DIM + DIM) * 4


def open_bytes(weight: WholeWeight) -> int:
    """What is open now."""
    return sum(tensor.nbytes for tensor in weight.room._open.values())


@on_ranks(1, 2)
def test_no_more_is_open_than_a_unit(context: RankContext) -> None:
    """Although one function goes through the whole model, and memory that nobody holds is used again."""
    model: Any = StreamShard(on_meta(lambda: Stack((DIM,) * 12)), precision=FP32)
    most = []
    memories = {}

    def init(module: nn.Module) -> None:
        if module is model:
            for param in model.parameters():
                assert isinstance(param, nn.Parameter)
                nn.init.normal_(param)
                most.append(open_bytes(param))
                memories.update({id(memory): memory for memory in param.room._open.values()})

    init_weights(model, init, seed=5)
    assert max(most) <= LAYER_BYTES
    assert len(memories) < 6
    found = full_weights(model)
    torch.manual_seed(5)
    for name, value in found.items():
        assert torch.equal(value, torch.randn(value.shape)), name


@on_ranks(1, 2)
def test_what_somebody_holds_stays_open(context: RankContext) -> None:
    """A view, or ``.data``, that is written to after other weights were opened."""
    model: Any = StreamShard(on_meta(lambda: Stack((DIM,) * 12)), precision=FP32)

    def init(module: nn.Module) -> None:
        if module is model:
            held = [layer.linear.weight.data.view(-1)[:] for layer in model.layers]
            assert open_bytes(model.head.weight) == len(held) * DIM * DIM * 4
            for param in model.parameters():
                nn.init.ones_(param)
            for number, memory in enumerate(held):
                memory.fill_(float(number))

    init_weights(model, init)
    for number, layer in enumerate(full_weights(model)[f"layers.{n}.linear.weight"] for n in range(11)):
        assert torch.equal(layer, torch.full((DIM, DIM), float(number)))


@on_ranks(1, 2)
def test_an_operation_on_several_weights_has_all_of_them(context: RankContext) -> None:
    """None is closed for the other."""
    model: Any = StreamShard(on_meta(lambda: Stack((DIM,) * 12)), precision=FP32)

    def init(module: nn.Module) -> None:
        if module is model:
            for param in model.parameters():
                nn.init.ones_(param)
            weights = [layer.linear.weight for layer in model.layers]
            torch._foreach_add_(weights, 2.0)
            weights[0].copy_(torch.stack(weights).sum(dim=0))

    init_weights(model, init)
    found = full_weights(model)
    assert torch.equal(found["layers.0.linear.weight"], torch.full((DIM, DIM), 33.0))
    assert torch.equal(found["layers.10.linear.weight"], torch.full((DIM, DIM), 3.0))


@on_ranks(1, 2)
def test_questions_take_no_memory(context: RankContext) -> None:
    """A whole weight has shape, dtype and device, is a Parameter, and has the attributes that one sets on it."""
    model: Any = StreamShard(on_meta(TinyLM), precision=FP32)
    engine = engine_of(model)
    room = Room(engine, set(engine.empty.params()))  # type: ignore[union-attr]  # it has some
    sharded = model.embedding.weight
    with room.in_modules(model):
        weight = model.embedding.weight
        assert isinstance(weight, nn.Parameter)
        assert weight is dict(model.named_parameters())["embedding.weight"]
        assert (weight.shape, weight.dim(), weight.dtype) == ((48, DIM), 2, torch.float32)
        assert weight.device == context.device
        weight.tag = 3
        assert weight.tag == 3
        assert weight.grad is None
        weight.requires_grad_(False)
        weight.requires_grad = False
        assert len(weight) == 48
        assert not room._open
        assert weight.T.shape == (DIM, 48)
        assert weight.t().mul_(0.0) is not weight
        assert weight.fill_(2.0) is weight
        assert list(room._open) == ["embedding.weight"]
    assert model.embedding.weight is sharded
    assert not sharded.requires_grad
    assert sharded.isnan().all()
