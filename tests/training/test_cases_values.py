"""What goes into and comes out of layers: keyword arguments, masks, containers, stashed activations, in-place edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import StreamShard
from tests.models import Block, Layer, Stack, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, FP32, Call, assert_same, assert_trains_like_plain, full_weights, stack_step

DEPTH = 4


class Model(nn.Module):
    """`DEPTH` layers of a given class, called by a given function, and a head."""

    def __init__(self, layer: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH))
        self.head = nn.Linear(16, 1)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        for layer in self.layers:
            x = self.call(layer, x)
        out: Tensor = self.head(x)
        return out


# ---------------------------------------------------------------------------------------------- inputs


@on_ranks(2)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_attention_masks_without_gradient(context: RankContext, kind: str, by_keyword: bool) -> None:
    """An input that needs no gradient beside one that does."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        allowed = torch.ones(6, 6, dtype=torch.bool).tril()
        mask = allowed if kind == "bool" else torch.zeros(6, 6).masked_fill(~allowed, float("-inf"))
        logits = model(tokens, mask=mask) if by_keyword else model(tokens, mask)
        return call.backward(next_token_loss(logits, tokens))

    assert_trains_like_plain(context, TinyLM, step)


class Keyworded(nn.Module):
    """Everything by keyword, the mask first, tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, *, mask: Tensor, inputs: dict[str, list[Tensor]], flag: bool = False) -> Tensor:
        """x + tanh(W x) * mask"""
        x = inputs["x"][0]
        return x + torch.tanh(self.linear(x)) * mask if flag else x


@on_ranks(2)
def test_layers_called_with_keywords_only_and_tensors_in_containers(context: RankContext) -> None:
    """The tensor that carries the gradient is two containers deep."""

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(mask=torch.ones(16), inputs={"x": [x]}, flag=True)
        return out

    assert_trains_like_plain(context, lambda: Model(Keyworded, call), stack_step)


class FirstInputNeedsNoGradient(Stack):
    """The first layer's input is data; its weights still get gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        assert not x.requires_grad
        return super().forward(x)


@on_ranks(1, 2, 3)
def test_a_layer_whose_inputs_need_no_gradient_trains(context: RankContext) -> None:
    """No gradient flows to its inputs, so a hook on them would never fire."""
    assert_trains_like_plain(context, FirstInputNeedsNoGradient, stack_step)


class Detaching(Stack):
    """Every layer's input is detached; outputs are summed."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x.detach())
            total = total + x
        out: Tensor = self.head(total)
        return out


@on_ranks(2)
def test_layers_cut_off_from_each_other_train(context: RankContext) -> None:
    """No layer's backward leads to another's; the order in which autograd visits them is its own."""
    assert_trains_like_plain(context, Detaching, stack_step)


@on_ranks(1, 2)
def test_gradients_of_inputs_are_right(context: RankContext) -> None:
    """The user may want the gradient of the data, of this rank's loss."""
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model = StreamShard(Stack(), precision=FP32)
    for number in range(2):
        inputs = [vector_batch(number, context.rank).requires_grad_() for _ in range(2)]
        for trained, x in zip((plain, model), inputs, strict=True):
            trained(x).square().mean().backward()
        assert_same({"x": inputs[1].grad}, {"x": inputs[0].grad}, "input gradient")


@on_ranks(2)
def test_autograd_grad_of_inputs_leaves_parameters_alone(context: RankContext) -> None:
    """`torch.autograd.grad` gives the inputs' gradient and accumulates nothing; the step after it is right."""

    def step(model: nn.Module, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank).requires_grad_()
        (wanted,) = torch.autograd.grad(model(x).square().mean(), [x])
        if isinstance(model, StreamShard):
            assert all(p.grad is None for p in model.parameters())
        return stack_step(model, call) + wanted.square().sum()

    assert_trains_like_plain(context, Stack, step)


# ---------------------------------------------------------------------------------------------- outputs


class Pair(NamedTuple):
    """Two tensors with names."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """A dataclass that pytree does not know."""

    value: Tensor
    note: str = "kept"
    nothing: None = None


class Packing(nn.Module):
    """Returns its result packed in some container, beside things that are no tensors."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        """x + tanh(W x), packed"""
        return self.pack(x + torch.tanh(self.linear(x)))


def _model_output(y: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y, hidden_states=(y * 2,))


PACKINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda y: (y, None, 3), lambda out: out[0]),
    "list": (lambda y: [torch.zeros(2), y], lambda out: out[1]),
    "dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "nested": (lambda y: ({"a": [(y, y * 2)]}, "text"), lambda out: out[0]["a"][0][0] + out[0]["a"][0][1]),
    "named tuple": (lambda y: Pair(y, y * 0.5), lambda out: out.first + out.second),
    "dataclass": (lambda y: Record(y), lambda out: out.value),
    "dataclass in a dict": (lambda y: {"r": Record(y)}, lambda out: out["r"].value),
    "model output": (_model_output, lambda out: out.last_hidden_state + out.hidden_states[0]),
    "only the second": (lambda y: (y * 3, y), lambda out: out[1]),
    "with integers": (lambda y: (y.argmax(-1), y), lambda out: out[1] * (out[0][:, None] + 1).float().rsqrt()),
}


@on_ranks(2)
@pytest.mark.parametrize("name", PACKINGS)
def test_layers_may_return_containers(context: RankContext, name: str) -> None:
    """Dicts, dataclasses, named and nested tuples reach the root as they were made."""
    pack, unpack = PACKINGS[name]
    assert_trains_like_plain(
        context, lambda: Model(lambda: Packing(pack), lambda layer, x: unpack(layer(x))), stack_step
    )


@on_ranks(2)
@pytest.mark.parametrize("name", PACKINGS)
def test_the_root_may_return_containers(context: RankContext, name: str) -> None:
    """The same at the root, whose output keeps its type."""
    pack, unpack = PACKINGS[name]

    class Root(Stack):
        def forward(self, x: Tensor) -> Any:
            return pack(super().forward(x).expand(-1, 2))

    def step(model: nn.Module, call: Call) -> Tensor:
        out = model(vector_batch(call.step, call.rank))
        assert type(out) is type(pack(torch.zeros(1, 2)))
        return call.backward(unpack(out).square().mean())

    assert_trains_like_plain(context, Root, step)


@on_ranks(2)
def test_a_layer_may_return_its_input_or_nothing(context: RankContext) -> None:
    """Identity layers, layers that return None, layers whose output does not depend on their weights."""

    class Odd(nn.Module):
        def __init__(self, kind: int) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.kind = kind

        def forward(self, x: Tensor, into: list[Tensor]) -> Tensor | None:
            if self.kind == 0:
                return x
            if self.kind == 1:
                into.append(self.linear(x))
                return None
            if self.kind == 2:
                self.linear(x)
                return x * 2
            return torch.tanh(self.linear(x))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Odd(kind) for kind in range(4))
            self.head = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                into: list[Tensor] = []
                out = layer(x, into)
                x = into[0] if out is None else out
            result: Tensor = self.head(x)
            return result

    assert_trains_like_plain(context, Root, stack_step)


# ---------------------------------------------------------------------------------------------- stashes


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


def stash_step(use_output: bool, which: tuple[int, ...]) -> Callable[[Any, Call], Tensor]:
    """The loss is on stashes of the layers `which`, and on the model's output if `use_output`."""

    def step(model: Any, call: Call) -> Tensor:
        out = model(vector_batch(call.step, call.rank))
        loss = out.square().mean() if use_output else torch.zeros(())
        for index in which:
            loss = loss + model.layers[index].stash.square().mean()
        for layer in model.layers:
            layer.stash = None
        return call.backward(loss)

    return step


@on_ranks(2)
@pytest.mark.parametrize("use_output", [True, False])
@pytest.mark.parametrize("which", [(0,), (2,), (3,), (0, 3), (0, 1, 2, 3)])
def test_the_loss_may_use_an_activation_from_inside_a_layer(
    context: RankContext, use_output: bool, which: tuple[int, ...]
) -> None:
    """An auxiliary loss on something that the root did not return, also when nothing else is used."""

    def build() -> nn.Module:
        return Model(Stashing, lambda layer, x: layer(x))

    assert_trains_like_plain(context, build, stash_step(use_output, which), checked=(0, 2))


@on_ranks(2)
def test_the_loss_may_use_hidden_states_only(context: RankContext) -> None:
    """The output of the model is not used at all; a middle layer's output is."""
    hidden: dict[str, Tensor] = {}

    def step(model: Any, call: Call) -> Tensor:
        hook = model.layers[1].register_forward_hook(lambda module, args, out: hidden.update(value=out))
        model(vector_batch(call.step, call.rank))
        hook.remove()
        return call.backward(hidden.pop("value").square().mean())

    assert_trains_like_plain(context, Stack, step)


@on_ranks(2)
def test_a_user_hook_may_replace_a_layers_output(context: RankContext) -> None:
    """Forward hooks that return something else, as steering and LoRA hooks do."""

    def build() -> nn.Module:
        model = Stack()
        model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
        model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        return model

    assert_trains_like_plain(context, build, stack_step)


# ---------------------------------------------------------------------------------------------- in place


def _scale(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out.mul_(0.7)


def _add_into(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    out += 0.1 * x
    return out


def _overwrite_parts(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    out[:, :4].mul_(0.5)
    out[0] = 0.5
    return out


class ReturnsView(nn.Module):
    """Its output is a view of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        """The first half of W x"""
        return torch.sin(self.linear(x)).view(-1, 2, 16)[:, 0]


class ReturnsViewOfInput(nn.Module):
    """Its output is a view of its input, changed in place by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x / 2 + sin(W x), written into a copy of x that is then returned as a view"""
        base = x * 0.5
        base += torch.sin(self.linear(x))
        return base.view(x.shape)


EDITS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "scaled": _scale,
    "added to": _add_into,
    "parts overwritten": _overwrite_parts,
}


@on_ranks(2)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("layer", [Layer, ReturnsView, ReturnsViewOfInput])
def test_a_layers_output_may_be_modified_in_place(context: RankContext, edit: str, layer: Any) -> None:
    """Also where the output is a view, of something inside the layer or of its input."""
    assert_trains_like_plain(context, lambda: Model(layer, EDITS[edit]), stack_step)


@on_ranks(2)
def test_the_roots_output_may_be_modified_in_place(context: RankContext) -> None:
    """Before the loss is taken."""

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).expand(-1, 3).clone().view(-1)

    def step(model: nn.Module, call: Call) -> Tensor:
        out = model(vector_batch(call.step, call.rank))
        out.mul_(2.0)
        out[0] = 1.0
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, Root, step)


@on_ranks(2)
def test_a_layer_may_modify_its_input_in_place(context: RankContext) -> None:
    """The residual stream is one tensor that every layer writes to."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x += torch.sin(self.linear(x.clone()))
            return x

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x if x.requires_grad else x.clone())
        return out

    assert_trains_like_plain(context, lambda: Model(Writing, call), stack_step)


class ReturnsRecomputedView(nn.Module):
    """Its output is a view of what it recomputes, with a weight that it has in a list: nothing else is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)
        self.listed = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        """The first half of sin(W x)"""
        y: Any = checkpoint(lambda z: torch.sin(torch.nn.functional.linear(z, *self.listed)), x, use_reentrant=False)
        out: Tensor = y.view(-1, 2, 16)[:, 0]
        return out


@on_ranks(2)
def test_a_view_that_is_modified_announces_its_layer_all_the_same(context: RankContext) -> None:
    """Its node is another one by then."""
    assert_trains_like_plain(context, lambda: Model(ReturnsRecomputedView, _scale), stack_step)


@on_ranks(1, 2)
def test_an_activation_that_is_modified_and_was_saved_raises(context: RankContext) -> None:
    """As in torch: a layer's backward would compute with what it has become."""

    class Overwriting(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            z = y * y
            y.add_(1.0)
            return z

    model = StreamShard(Model(Overwriting, lambda layer, x: layer(x)), precision=FP32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stack_step(model, Call(0, context.rank, context.world_size, 1.0))


@on_ranks(2)
def test_outputs_that_are_dropped_do_no_harm(context: RankContext) -> None:
    """A layer runs for nothing; another's output is used twice."""

    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[3](x)
            y = self.layers[0](x)
            out: Tensor = self.head(self.layers[1](y) * y + self.layers[2](y.detach()))
            return out

    assert_trains_like_plain(context, Root, stack_step)


@on_ranks(2)
def test_hooks_on_activations_see_gradients(context: RankContext) -> None:
    """`register_hook` and `retain_grad` on a layer's output work, and may change the gradient."""

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x)
        out.register_hook(lambda grad: grad * 0.5)
        out.retain_grad()
        return out

    assert_trains_like_plain(context, lambda: Model(Layer, call), stack_step)


@on_ranks(2)
def test_full_backward_hooks_of_the_user_run(context: RankContext) -> None:
    """Module backward hooks on a layer and on a part of it."""
    calls: list[str] = []

    def build() -> nn.Module:
        model = TinyLM()
        for name in ("blocks.1", "blocks.2.up"):
            model.get_submodule(name).register_full_backward_hook(
                lambda module, grad_in, grad_out, name=name: calls.append(name)  # type: ignore[misc]
            )
        return model

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        return call.backward(next_token_loss(model(tokens), tokens))

    assert_trains_like_plain(context, build, step, steps=2, plain_everywhere=True)
    assert calls.count("blocks.1") == calls.count("blocks.2.up") == 2 * (2 + 1)  # plain plays both ranks


@on_ranks(2)
def test_blocks_as_functions_of_saved_tensor_hooks(context: RankContext) -> None:
    """Activations moved elsewhere by the user's own saved-tensor hooks come back right."""

    def pack(tensor: Tensor) -> Tensor:
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.clone()

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out: Tensor = layer(x)
        return out

    assert_trains_like_plain(context, lambda: Model(Block3D, call), stack_step)


class Block3D(nn.Module):
    """A transformer block for [rows, 16]: each row is a sequence of one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        out: Tensor = self.block(x[:, None])[:, 0]
        return out


@on_ranks(2)
@pytest.mark.parametrize("where", ["whole step", "forward of one layer"])
def test_save_on_cpu_around_layers(context: RankContext, where: str) -> None:
    """PyTorch's own hooks that move saved activations to host memory."""
    if where == "whole step":

        def step(model: nn.Module, call: Call) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return stack_step(model, call)

        assert_trains_like_plain(context, Stack, step)
        return

    def call_layer(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = layer(x)
        return out

    assert_trains_like_plain(context, lambda: Model(Layer, call_layer), stack_step)


@on_ranks(1, 2)
def test_a_whole_state_dict_is_loaded_inside_summon_full_params(context: RankContext) -> None:
    """Where parameters are whole, whole values go in as they are."""
    torch.manual_seed(11)
    source = Stack()
    model: Any = StreamShard(Stack(), precision=FP32)
    with model.summon_full_params(writeback=True):
        model.load_state_dict(source.state_dict())
    assert_same(full_weights(model), dict(source.state_dict()), "weights", EXACT)
