"""Graphs that sharded models refuse, and memory that goes with the last reference. See `test_programs` too."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.errors import ShardingError
from streamshard.guards.weights import explain_version
from tests.compare import assert_same, full_grads, full_weights
from tests.counts import engine_inside
from tests.faults import case
from tests.models import DIM, Calling, Layer, Stack, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import FP32, SETTINGS, assert_trains_like_plain, each_setting, sgd, sharded_model, stack_step
from tests.scenarios import RoutedStack


@on_ranks()
@each_setting
def test_a_model_is_freed_with_the_last_reference_to_it(context: RankContext, settings: str) -> None:
    """At once, as a plain module, without help of the garbage collector: its buffers are most of a device's memory."""
    gc.collect()
    gc.disable()
    model = sharded_model(RoutedStack, **SETTINGS[settings])
    optimizer = sgd(model)
    for number in range(2):
        stack_step(model, context.call(number))
        optimizer.step()
    model.route = [0, 2]
    with torch.no_grad():
        model(vector_batch(0, context.rank))
    engine = engine_inside(model)
    parts = (model, model.layers[1], engine, *engine.units, engine.ranks, engine.ranks.transport)
    buffers = (*(buffer for _, buffer in engine.ledger.buffers), *(p.unsharded for u in engine.units for p in u.params))
    alive = [weakref.ref(each) for each in (*parts, *buffers)]
    del parts, buffers
    try:
        del model, optimizer, engine
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


@on_ranks()
@each_setting
def test_weights_changed_between_a_forward_and_its_backward_raise(context: RankContext, settings: str) -> None:
    """As in torch: old activations and new weights make no gradient. All ranks raise."""
    model = sharded_model(**SETTINGS[settings])
    whole = model.full_state_dict(rank0_only=False)
    parts = (model.parameters(), model.head.parameters(), model.layers[2].parameters(), [model.layers[2].linear.bias])
    steps = {n: torch.optim.SGD(part, 1.0).step for n, part in enumerate(parts)}  # a rank may own no piece of a bias
    changes: dict[Any, Callable[[], object]] = {**steps, "load": lambda: model.load_state_dict(whole)}
    for name, change in changes.items():
        with case(name):
            stack_step(model, context.call(0))
            loss = model(vector_batch(1, context.rank)).square().mean()
            change()
            model.zero_grad()
            said = r"'(layers\.\d\.linear|head)\.\w+' was modified by an inplace operation.*run the backward first"
            with pytest.raises(ShardingError, match=said):
                loss.backward()
    stack_step(model, context.call(2))


class ForceStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).sum(), x)
        return super().forward(x) + force.sum(1, keepdim=True)


class LearningStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).sum().backward()
        return super().forward(x)


@on_ranks(2)
def test_a_model_that_differentiates_inside_its_forward_raises(context: RankContext) -> None:
    """When layers' weights have left their slots, and for gradients, which no pass reduces. Resident layers may be."""
    for kind, said in (
        (ForceStack, r"forward goes through 'layers\.\d'.*resident=\['layers"),
        (LearningStack, r"inside the model's forward .* gradient of '(head|layers)"),
    ):
        with pytest.raises(ShardingError, match=said):
            sharded_model(kind)(vector_batch(0, context.rank))
    layers = [f"layers.{index}" for index in range(4)]
    assert_trains_like_plain(context, ForceStack, stack_step, resident=layers, precision=FP32)


class Stashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)
        self.stash: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.stash = torch.tanh(self.inner(x))
        out: Tensor = x + self.outer(self.stash)
        return out


_stashing = functools.partial(Calling, Stashing)


def _only_inside(model: Any, call: Call) -> Tensor:
    model(vector_batch(call.step, call.rank))
    return call.backward(sum(layer.stash.square().mean() for layer in model.layers))  # type: ignore[arg-type]


@on_ranks(2)
def test_a_loss_of_activations_from_inside_layers_alone_raises(context: RankContext) -> None:
    """No gradient comes to the layer's output, so nothing says that backward needs its weights."""
    model = sharded_model(_stashing)
    call = context.call(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            _only_inside(model, call)
        why = explain_version(raised.value)
        assert why is not None and re.search(r"a layer by a tensor.*resident=\[layer\]", why), why
    model(vector_batch(0, context.rank)).square().mean().backward(retain_graph=True)  # has put each layer in place
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.layers[2].stash.square().mean().backward()
    assert explain_version(RuntimeError("is at version 1; expected version 0 instead")) is None
    model = StreamShard(Calling(lambda: Attending(DIM, 2)), precision=FP32)
    model(vector_batch(0, context.rank))
    with pytest.raises(RuntimeError, match="another view of its base has been modified inplace") as raised:
        model.layers[1].maps.square().mean().backward()  # torch names no version: the layer's weight is in chunks
    assert "attention maps" in str(explain_version(raised.value))
    for slots in ("all", 2):  # with a slot for each layer, weights stay where they are
        with case(slots):
            resident = ["layers.3"] if slots == 2 else []
            assert_trains_like_plain(context, _stashing, _only_inside, resident=resident, weight_slots=slots)


class Attending(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y, self.maps = super().forward(x, x, x)
        return x + y


# -- torch.autograd.grad and backward(inputs=...): of sharded parameters refused, of anything else as ever ------------


@on_ranks(1, 2)
def test_gradients_that_sharded_parameters_cannot_give_are_refused(context: RankContext) -> None:
    """With the alternative, and the next step is right. Torch 2.13 asks parameters before a backward of them."""
    model = sharded_model()
    params, optimizer = list(model.parameters()), sgd(model)
    before, x = full_weights(model), vector_batch(0, context.rank).requires_grad_()
    said = r"'layers\.0\.linear\.weight'.* call loss\.backward"
    for inputs in (params, [x, *params])[: context.world_size]:
        with pytest.raises(ShardingError, match=said):
            model(x).square().mean().backward(inputs=inputs)
            optimizer.step()
    if context.world_size > 1:
        with pytest.raises(ShardingError, match=said):
            torch.autograd.grad(model(x).square().mean(), params)
        for each in (model, sharded_model(resident=Layer)):  # outside of the model
            with pytest.raises(ShardingError, match="create_graph=True.*with weight_slots='all'"):
                torch.autograd.grad(each(x).square().mean(), x, create_graph=True)
    assert_same(full_weights(model), before, "weights")
    model.zero_grad()
    stack_step(model, context.call(0))
    assert all(grad is not None for grad in full_grads(model).values())
    for trained in ("weight", "bias"):  # a large one and a small one, in layers whose weights stay
        model = sharded_model(weight_slots="all")
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(trained))
        with pytest.raises(ShardingError, match=f"{trained}' cannot be differentiated again"):
            model(x).square().mean().backward(create_graph=True)
