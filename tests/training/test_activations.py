"""What goes into and comes out of layers: containers, stashed activations, in-place edits, hooks."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from streamshard.guards.weights import explain_version
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, case, stack_step


@dataclass
class Record:
    """A dataclass that pytree does not know."""

    value: Tensor
    note: str = "kept"
    nothing: None = None


class Pair(NamedTuple):
    """A tensor and a number."""

    tensor: Tensor
    number: int


class Packing(nn.Module):
    """Takes its input by keyword, two containers deep; returns its result in others, beside values of other types.

    Containers without a tensor that needs a gradient are passed on as they are: caches, for example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, mask: Tensor, inputs: dict[str, list[Tensor]], cache: list[Tensor]) -> Any:
        x = inputs["x"][0]
        y = x + torch.tanh(self.linear(x)) * mask
        cache.append(y.detach())
        return {"a": [(y, None)], "p": Pair(y, 3), "m": y.max(0), "r": Record(y * 2)}, "text", cache


class Stashing(nn.Module):
    """Keeps an activation from its inside where the user can find it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)
        self.stash: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.stash = torch.tanh(self.inner(x))
        out: Tensor = x + self.outer(self.stash)
        return out


class Calling(nn.Module):
    """Layers of a given class, called by a given function, and a head."""

    def __init__(self, layer: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        out: Tensor = self.head(x)
        return out


def _pack(layer: nn.Module, x: Tensor) -> Tensor:
    cache: list[Tensor] = []
    packed, text, returned = layer(mask=torch.ones(16), inputs={"x": [x]}, cache=cache)
    assert text == "text" and returned is cache and len(cache) == 1 and packed["p"].number == 3
    out: Tensor = packed["a"][0][0] + packed["p"].tensor + packed["m"].values + packed["r"].value
    return out


def _overwrite(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    out[:, :4].mul_(0.5)
    out += 0.1 * x
    return out


def _hook(layer: nn.Module, x: Tensor) -> Tensor:
    """`register_hook` and `retain_grad` on a layer's output work, and may change the gradient."""
    out: Tensor = layer(x)
    out.register_hook(lambda grad: grad * 0.5)
    out.retain_grad()
    return out


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "containers": (Packing, _pack),
    "outputs overwritten": (Layer, _overwrite),
    "hooks on activations": (Layer, _hook),
}


@on_ranks(2)
def test_activations_may_be_packed_modified_hooked_and_moved(context: RankContext) -> None:
    """In dicts, dataclasses and tuples, in place, by tensor hooks, by saved-tensor hooks."""
    for name, (layer, call) in CALLS.items():

        def build(layer: Any = layer, call: Any = call) -> nn.Module:
            return Calling(layer, call)

        with case(name):
            assert_trains_like_plain(context, build, stack_step)


@on_ranks(2)
def test_hooks_around_the_model_may_know_saved_tensors_by_their_addresses(context: RankContext) -> None:
    """As activation offload does, which copies each once. Layers that take turns have weights at one address."""

    def step(model: Any, call: Call) -> Tensor:
        copies: dict[Any, Tensor] = {}
        alive = []

        def pack(tensor: Tensor) -> Any:
            alive.append(tensor)
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            copies.setdefault(key, tensor.detach().clone())
            return key

        with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__):
            loss = model(vector_batch(call.step, call.rank)).square().mean()
        return call.backward(loss)

    assert_trains_like_plain(context, Stack, step)


def _stashing() -> nn.Module:
    return Calling(Stashing, lambda layer, x: layer(x))


class Exiting(Layer):
    """Computes a loss from its output, with weights of its own, and keeps it as an attribute (early exits)."""

    def __init__(self) -> None:
        super().__init__()
        self.exit: Any = Layer()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.exit.losses = [torch.sin(self.exit(y)).square().mean()]
        return y


@on_ranks(2)
def test_a_layer_may_keep_a_loss_of_its_output_as_an_attribute(context: RankContext) -> None:
    """Backward comes to the loss before it comes to the output, or never comes to the last output."""

    def step(model: Any, call: Call) -> Tensor:
        out = model(vector_batch(call.step, call.rank)).square().mean()
        losses = sum(layer.exit.losses[0] for layer in model.layers)
        return call.backward(out + losses if call.step else losses)

    assert_trains_like_plain(context, lambda: Calling(Exiting, lambda layer, x: layer(x)), step)


def _only_inside(model: Any, call: Call) -> Tensor:
    model(vector_batch(call.step, call.rank))
    return call.backward(sum(layer.stash.square().mean() for layer in model.layers))  # type: ignore[arg-type]


@on_ranks(2)
def test_a_loss_of_activations_from_inside_layers_alone_raises(context: RankContext) -> None:
    """No gradient comes to the layer's output, so nothing says that backward needs its weights."""
    model: Any = StreamShard(_stashing(), precision=FP32)
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
    for slots in ("all", 2):  # with a slot for each layer, weights stay where they are
        with case(slots):
            resident = ["layers.3"] if slots == 2 else []
            assert_trains_like_plain(context, _stashing, _only_inside, resident=resident, weight_slots=slots)


class Carrying(Layer):
    """Takes and returns a container, with outputs of earlier layers in it, in one of several ways."""

    def __init__(self, way: str, place: int) -> None:
        super().__init__()
        self.way, self.place = way, place

    def forward(self, state: Any) -> Any:  # type: ignore[override]  # a container
        x = state.x if self.way == "object" else state["x"]
        if self.way == "dropped" and self.place in (1, 2):
            return {"x": x[:]}  # a view, made without weights
        y = super().forward(x.clone())
        if self.way == "object":
            return types.SimpleNamespace(x=y)
        return {"x": y, "earlier": [*state.get("earlier", ()), y]}


@on_ranks(2)
@pytest.mark.parametrize("way", ["returned", "object", "dropped"])
def test_layers_may_carry_outputs_of_earlier_layers(context: RankContext, way: str) -> None:
    """Each layer's outputs say when its backward begins, and no other tensor that it returns; with checkpoints too."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Carrying(way, place) for place in range(5))
            self.is_checkpointed = False

        def forward(self, x: Tensor) -> Tensor:
            state: Any = types.SimpleNamespace(x=x) if way == "object" else {"x": x * 1.0}
            for layer in self.layers:
                call = functools.partial(checkpoint, layer, use_reentrant=False) if self.is_checkpointed else layer
                state = call(state)
            if way == "object":
                return state.x  # type: ignore[no-any-return]
            return state["x"] + sum(state.get("earlier", ()))  # type: ignore[no-any-return]

    def step(model: Any, call: Call) -> Tensor:
        model.is_checkpointed = call.step % 2 == 1
        return stack_step(model, call)

    assert_trains_like_plain(context, Chain, step, checked=(0, 2))


class Attending(nn.MultiheadAttention):
    """Keeps its attention maps."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y, self.maps = super().forward(x, x, x)
        return x + y


@on_ranks(2)
def test_a_loss_of_attention_maps_alone_raises(context: RankContext) -> None:
    """Torch names no version where a layer computes with chunks of a weight."""
    model: Any = StreamShard(Calling(lambda: Attending(DIM, 2), lambda layer, x: layer(x)), precision=FP32)
    model(vector_batch(0, context.rank))
    with pytest.raises(RuntimeError, match="another view of its base has been modified inplace") as raised:
        model.layers[1].maps.square().mean().backward()
    assert "attention maps" in str(explain_version(raised.value))
