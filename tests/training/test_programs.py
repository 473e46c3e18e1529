"""Training programs that give the numbers of plain PyTorch: each is a model, and what a step does with it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from streamshard import StreamShard
from tests.counts import counted_collectives
from tests.faults import case
from tests.models import Block, Calling, Layer, Stack, TinyConfig, TinyLM, stack_of, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import SETTINGS, Step, assert_trains_like_plain, lm_step, no_sync, sharded_model, stack_step
from tests.scenarios import RoutedStack


class Program(NamedTuple):
    build: Callable[[], nn.Module]
    step: Step = stack_step
    settings: dict[str, Any] = {}


def _loss(model: Any, call: Call, part: int = 0) -> Tensor:
    loss: Tensor = model(vector_batch(3 * call.step + part, call.rank)).square().mean()
    return loss


# -- passes that are not one forward and one backward, recomputation ---------------------------------------------------


def _in_two_parts() -> nn.Module:
    encoder = Stack((16, 16, 16, 16))
    encoder.head = nn.Linear(16, 16)
    return nn.Sequential(encoder, Stack((16, 16, 16, 16)))


def _without_the_roots_forward(model: Any, call: Call) -> Tensor:
    """From the start, and after an ordinary step."""
    x = vector_batch(call.step, call.rank)
    out = model(x) if call.step == 1 else model[1](model[0](x))
    return call.backward(out.square().mean())


class RecomputedInside(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed: Any = checkpoint(lambda y: self.attention(self.attention_norm(y), mask=mask), x, use_reentrant=False)
        x = x + mixed
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.mlp_norm(x)))))
        return out


class InPairs(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RecomputedInside(dropout=0.3) for _ in range(4))

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for pair in (self.blocks[:2], self.blocks[2:]):
            out: Any = checkpoint(nn.Sequential(*pair), x, use_reentrant=False)
            x = out
        return x


class Selective(TinyLM):
    """Keeps what matmuls give; the rest is computed again."""

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        options = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for block in self.blocks:
            out: Any = checkpoint(block, x, use_reentrant=False, context_fn=options)
            x = out
        return x


def _all_recomputed(model: nn.Module, call: Call) -> Tensor:
    x = vector_batch(call.step, call.rank).requires_grad_()
    out: Any = checkpoint(model, x, use_reentrant=False)
    return call.backward(out.square().mean())


def _evaluation_between(model: nn.Module, call: Call) -> Tensor:
    """Forwards without gradients between forward and backward."""
    loss = _loss(model, call)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(vector_batch(call.step + 100, call.rank, rows=7))
    return call.backward(loss)


def _switch(model: Any, call: Call) -> Tensor:
    """FSDP2's idiom, and a layer that the last micro-batch does not use."""
    total = torch.zeros(())
    for part in range(3):
        if isinstance(model, StreamShard):
            model.set_requires_gradient_sync(part == 2)
        model.route = range(part // 2, 5)
        total = total + stack_step(model, call._replace(step=3 * call.step + part))
    return total


def _partial_backward(model: Any, call: Call) -> Tensor:
    x = vector_batch(call.step, call.rank)
    hidden: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda module, args, out: hidden.append(out))
    out = model(x)
    hook.remove()
    call.backward(hidden[0].square().mean(), retain_graph=True)
    return call.backward(out.square().mean())


PASSES: dict[str, Program] = {
    "submodules without the root's forward": Program(_in_two_parts, _without_the_roots_forward, {"units": [Layer]}),
    "checkpoints inside, around and across units": Program(InPairs, lm_step),
    "selective checkpoints": Program(lambda: Selective(TinyConfig(dropout=0.3)), lm_step),
    "a checkpoint of the whole model": Program(Stack, _all_recomputed),
    "evaluation between forward and backward": Program(Stack, _evaluation_between),
    "set_requires_gradient_sync": Program(RoutedStack, _switch),
    "a partial backward first": Program(Stack, _partial_backward),
}


# -- graphs and gradients ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


def _frozen_in_backward(model: Any, call: Call) -> Tensor:
    """Torch gives a parameter no gradient if it is frozen when the backward runs."""
    loss = _loss(model, call)
    with _frozen(model.layers[call.step % 4]):
        return call.backward(loss)


def _discriminating(model: Any, call: Call) -> Tensor:
    """A discriminator accumulates; the generator's turn, for which it is frozen, comes between."""
    with no_sync(model):
        call.backward(_loss(model, call))
        with _frozen(model):
            x = vector_batch(call.step, call.rank).requires_grad_()
            call.backward(model(x).square().mean())
            assert x.grad is not None and bool(x.grad.any())
    return call.backward(_loss(model, call, 1))


def _frozen_while_waiting(model: Any, call: Call) -> Tensor:
    """Two whole layers are frozen before the last micro-batch; on one rank one of them never ran."""
    with no_sync(model):
        model.route = range(5) if call.rank == 0 else (0, 2, 3, 4)
        stack_step(model, call)
    model.route = range(5)
    with _frozen(model.layers[1]), _frozen(model.layers[3]):
        return stack_step(model, call._replace(step=call.step + 50))


def _first_in_first_out(model: Any, call: Call) -> Tensor:
    """Micro-batches as a pipeline has them: two forwards ahead."""
    losses = [_loss(model, call, part) for part in range(3)]
    total = call.backward(losses[0])
    losses.append(_loss(model, call, 3))
    return total + sum(call.backward(loss) for loss in losses[1:])


def _penalty(model: nn.Module) -> Tensor:
    total: Tensor = sum(0.1 * param.square().sum() for param in model.parameters())  # type: ignore[assignment]
    return total


def _penalised(where: str) -> Step:
    """A term that autograd adds to the sharded parameters themselves, beside gradients that wait in their slots."""

    def step(model: Any, call: Call) -> Tensor:
        losses = []
        for part in range(3):
            with no_sync(model, part < 2):
                early = _penalty(model) if where == "before each" else 0.0  # its nodes run last
                loss = _loss(model, call, part)
                call.backward(loss + early + (_penalty(model) if where == "in all" else 0.0))
                if where == "alone" and part == 1:
                    call.backward(_penalty(model))
                losses.append(loss.detach())
        return torch.stack(losses).sum()

    return step


class EnergyLayer(Layer):
    """A layer that descends an energy of its input; the descent is part of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.requires_grad_() if x.is_leaf else x
        energy = super().forward(y).square().sum()
        (slope,) = torch.autograd.grad(energy, y, create_graph=True)
        return super().forward(x) - 0.1 * slope


def _of_inputs(model: Any, call: Call) -> Tensor:
    """Gradients of the input and of an activation, before a backward of the same graph, which reduces as ever."""
    x = vector_batch(call.step, call.rank).requires_grad_()
    outputs: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda *given: outputs.append(given[-1]))
    loss = model(x).square().mean() * call.weight
    hook.remove()
    of_input, of_activation = torch.autograd.grad(loss, [x, outputs[0]], retain_graph=True)
    assert x.grad is None
    loss.backward()
    assert torch.equal(x.grad, of_input)
    return (of_input.square().sum() + of_activation.square().sum()).detach() / call.weight**2


def _with_penalty_on_slopes(model: Any, call: Call) -> Tensor:
    """As the error of `create_graph=True` says; outside of the forward."""
    x = vector_batch(call.step, call.rank).requires_grad_()
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return call.backward(loss + 0.1 * slope.square().sum())


# Gradients are a function of the graphs that were differentiated: present exactly where plain PyTorch has them.
class FirstCheckpointed(RoutedStack):
    """The first layer has a reentrant checkpoint, which no node tells of."""

    def order(self) -> Iterator[Any]:
        for place in self.route:
            yield self.layers[place] if place else self._checkpointed(self.layers[0])


def _in_parts(model: Any, call: Call) -> Tensor:
    """Each rank leaves out the layers of the other one, but for the resident one in the middle."""
    model.route = range(4) if not call.step else [(0, 1), (1, 2, 3)][call.rank % 2]
    return call.backward(model(vector_batch(call.step, call.rank).requires_grad_()).square().mean())


GRAPHS: dict[str, Program] = {
    "a reentrant checkpoint before a resident layer": Program(
        lambda: FirstCheckpointed(4, True), _in_parts, {"resident": ["layers.1"]}
    ),
    "frozen in the backward": Program(Stack, _frozen_in_backward),
    "frozen while gradients accumulate": Program(Stack, _discriminating),
    "layers frozen while gradients wait": Program(RoutedStack, _frozen_while_waiting),
    "first in, first out": Program(Stack, _first_in_first_out),
    **{f"penalties, {where}": Program(Stack, _penalised(where)) for where in ("in all", "before each", "alone")},
    "layers that differentiate their activations": Program(stack_of(EnergyLayer)),
    "gradients of inputs": Program(Stack, _of_inputs),
    "a penalty on gradients of inputs": Program(Stack, _with_penalty_on_slopes, {"weight_slots": "all"}),
}


# -- what goes into and comes out of layers ----------------------------------------------------------------------------


class Packing(nn.Module):
    """Takes its input by keyword, two containers deep; returns its result in others, beside values of other types.

    Containers without a tensor that needs a gradient are passed on as they are: caches, for example. `test_nested` has
    containers of all classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, mask: Tensor, inputs: dict[str, list[Tensor]], cache: list[Tensor]) -> Any:
        x = inputs["x"][0]
        y = x + torch.tanh(self.linear(x)) * mask
        cache.append(y.detach())
        return {"a": [(y, None)], "m": y.max(0)}, "text", cache


def _pack(layer: nn.Module, x: Tensor) -> Tensor:
    cache: list[Tensor] = []
    packed, text, returned = layer(mask=torch.ones(16), inputs={"x": [x]}, cache=cache)
    assert text == "text" and returned is cache and len(cache) == 1
    out: Tensor = packed["a"][0][0] + packed["m"].values
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


def _knowing_addresses(model: Any, call: Call) -> Tensor:
    """Saved-tensor hooks as of activation offload, which copies each once. Layers that take turns have one address."""
    copies: dict[Any, Tensor] = {}
    alive = []

    def pack(tensor: Tensor) -> Any:
        alive.append(tensor)
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        copies.setdefault(key, tensor.detach().clone())
        return key

    with torch.autograd.graph.saved_tensors_hooks(pack, copies.__getitem__):
        loss = _loss(model, call)
    return call.backward(loss)


class Exiting(Layer):
    """Computes a loss from its output, with weights of its own, and keeps it as an attribute (early exits)."""

    def __init__(self) -> None:
        super().__init__()
        self.exit: Any = Layer()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.exit.losses = [torch.sin(self.exit(y)).square().mean()]
        return y


def _with_exits(model: Any, call: Call) -> Tensor:
    """Backward comes to a loss before it comes to the output, or never comes to the last output."""
    out, losses = _loss(model, call), sum(layer.exit.losses[0] for layer in model.layers)
    return call.backward(out + losses if call.step else losses)


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


class Chain(nn.Module):
    """Each layer's outputs say when its backward begins, and no other tensor that it returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Carrying(way, place) for place in range(5))
        self.way, self.is_checkpointed = way, False

    def forward(self, x: Tensor) -> Any:
        state: Any = types.SimpleNamespace(x=x) if self.way == "object" else {"x": x * 1.0}
        for layer in self.layers:
            call = functools.partial(checkpoint, layer, use_reentrant=False) if self.is_checkpointed else layer
            state = call(state)
        return state.x if self.way == "object" else state["x"] + sum(state.get("earlier", ()))


def _checkpointed_in_turn(model: Any, call: Call) -> Tensor:
    model.is_checkpointed = call.step % 2 == 1
    return stack_step(model, call)


class WeightShared(Stack):
    """Layers 0 and 3 have the same weight, layers 1 and 2 the same linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.layers
        layers[3].linear.weight = layers[0].linear.weight
        layers[2].linear = layers[1].linear


LAYERS: dict[str, Program] = {
    "containers": Program(lambda: Calling(Packing, _pack)),
    "outputs overwritten": Program(lambda: Calling(Layer, _overwrite)),
    "hooks on activations": Program(lambda: Calling(Layer, _hook)),
    "saved tensors known by their addresses": Program(Stack, _knowing_addresses),
    "a loss of a layer's output as its attribute": Program(lambda: Calling(Exiting), _with_exits),
    **{
        f"outputs of earlier layers, {way}": Program(functools.partial(Chain, way), _checkpointed_in_turn)
        for way in ("returned", "object", "dropped")
    },
    "layers smaller than the number of ranks": Program(
        lambda: nn.Sequential(nn.Linear(16, 1), *(Layer(1, 1, bias=False) for _ in range(3)), nn.LayerNorm(1))
    ),
    "a weight of two layers": Program(WeightShared),
}


TABLES = {"passes": PASSES, "graphs": GRAPHS, "layers": LAYERS}
ALONE = [(1, "two slots", "passes"), (1, "two slots", "graphs")]  # passes and gradients are other code there
RUNS = [*ALONE, *((2, "two slots", table) for table in TABLES), (2, "a slot each", "graphs")]


@on_ranks()
@pytest.mark.parametrize(("world_size", "settings", "table"), RUNS)
def test_a_program_trains_like_plain_pytorch(context: RankContext, settings: str, table: str) -> None:
    """Losses, gradients and weights; gradients are None exactly where plain PyTorch's are."""
    for name, (build, step, its) in TABLES[table].items():
        with case(name):
            assert_trains_like_plain(context, build, step, checked=(0, 2), **{**SETTINGS[settings], **its})


class Paired(nn.Sequential):
    def forward(self, x: Tensor, *, is_reentrant: bool) -> Tensor:
        for first in range(0, len(self), 2):
            out: Any = checkpoint(nn.Sequential(self[first], self[first + 1]), x, use_reentrant=is_reentrant)
            x = out
        return x


@on_ranks(2)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_across_layers_reduces_each_layer_once(context: RankContext, is_reentrant: bool) -> None:
    """It recomputes its first layer while the last one's backward runs, or before."""
    model = sharded_model(lambda: Paired(*stack_of(Layer, 6)().layers))
    with counted_collectives(model) as counts:
        x = vector_batch(0, context.rank).requires_grad_()
        model(x, is_reentrant=is_reentrant).square().mean().backward()
    assert counts["reduce_scatter"] == 6
