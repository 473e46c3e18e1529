"""What goes into and comes out of layers: containers, stashed activations, in-place edits, hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Layer, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, assert_trains_like_plain, case, stack_step


@dataclass
class Record:
    """A dataclass that pytree does not know."""

    value: Tensor
    note: str = "kept"
    nothing: None = None


class Packing(nn.Module):
    """Takes its input by keyword, two containers deep; returns its result in others, beside values of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, mask: Tensor, inputs: dict[str, list[Tensor]]) -> Any:
        """x + tanh(W x), and its double"""
        x = inputs["x"][0]
        y = x + torch.tanh(self.linear(x)) * mask
        return {"a": [(y, None)], "r": Record(y * 2)}, "text"


class Stashing(nn.Module):
    """Keeps an activation from its inside where the user can find it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)
        self.stash: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x + W2 tanh(W1 x)"""
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
        """[rows, 16] -> [rows, 1]"""
        for layer in self.layers:
            x = self.call(layer, x)
        out: Tensor = self.head(x)
        return out


def _pack(layer: nn.Module, x: Tensor) -> Tensor:
    packed, text = layer(mask=torch.ones(16), inputs={"x": [x]})
    assert text == "text"
    out: Tensor = packed["a"][0][0] + packed["r"].value
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


def _save_on_cpu(layer: nn.Module, x: Tensor) -> Tensor:
    """PyTorch's own saved-tensor hooks."""
    with torch.autograd.graph.save_on_cpu():
        out: Tensor = layer(x)
    return out


CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "containers": (Packing, _pack),
    "outputs overwritten": (Layer, _overwrite),
    "hooks on activations": (Layer, _hook),
    "activations saved elsewhere": (Layer, _save_on_cpu),
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
def test_the_loss_may_use_activations_from_inside_layers(context: RankContext) -> None:
    """An auxiliary loss on an activation that the root does not return, also when the output is not used at all."""

    def build() -> nn.Module:
        return Calling(Stashing, lambda layer, x: layer(x))

    for use_output, which in ((True, (0, 1, 2, 3)), (False, (2,))):

        def step(model: Any, call: Call, use_output: bool = use_output, which: Any = which) -> Tensor:
            out = model(vector_batch(call.step, call.rank))
            loss = out.square().mean() if use_output else torch.zeros(())
            for index in which:
                loss = loss + model.layers[index].stash.square().mean()
            for layer in model.layers:
                layer.stash = None
            return call.backward(loss)

        with case((use_output, which)):
            assert_trains_like_plain(context, build, step, checked=(0, 2))
