"""Weights outside of their layer's forward: shapes can be read, values raise, resident weights can be read."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamshard import StreamShard, register_forward_method
from streamshard.errors import ShardingError
from streamshard.guards.weights import explain_version
from tests.adversary import make_adversarial
from tests.compare import assert_same, full_grads
from tests.faults import case, let_dynamo_look
from tests.models import DIM, Layer, Stack, stack_of, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, built, only_sharded, sharded_model, stack_step


class Reading(Stack):
    """The root computes with a layer's weight, before the layers run or after them."""

    def __init__(self, read: Callable[[Any, Tensor], Any], *, first: bool = True) -> None:
        super().__init__()
        self.read, self.first = read, first

    def forward(self, x: Tensor) -> Tensor:
        found = self.read(self, x) if self.first else None
        out = super().forward(x)
        found = found if self.first else self.read(self, x)
        return out + found.square().mean() if isinstance(found, Tensor) else out


def _weight(model: Any) -> Any:
    return model.layers[1].linear.weight


def _writes(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        _weight(model).mul_(2)


def _assigns(model: Any, x: Tensor) -> None:
    _weight(model).data = torch.ones(DIM, DIM)


def _writes_all(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([_weight(model)], 2.0)


READERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "linear": lambda model, x: F.linear(x, _weight(model), model.layers[1].linear.bias),
    "a module in the layer": lambda model, x: model.layers[1].linear(x),
    "forward itself": lambda model, x: model.layers[1].forward(x),
    "a list": lambda model, x: torch.stack([p.square().mean() for p in model.layers[1].parameters()]),
    "a view": lambda model, x: _weight(model).view(-1)[:DIM] * x,
    "detach": lambda model, x: _weight(model).detach() @ x.t(),
    "data": lambda model, x: _weight(model).data.sum() * x,
}
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": _writes,
    "a list in place": _writes_all,
    "assignment": _assigns,
    "memory": lambda model, x: _weight(model).data_ptr(),
    "a copy": lambda model, x: copy.deepcopy(_weight(model)),
    "a number": lambda model, x: float(_weight(model)[0, 0]),
}


@on_ranks(1, 2)
def test_computing_with_a_weight_while_its_layer_does_not_run_raises(context: RankContext) -> None:
    """By name, with what to do about it; the model is as it was."""
    model: Any = StreamShard(Reading(READERS["linear"]), precision=FP32, weight_slots=2)
    before = model.full_state_dict(rank0_only=False)
    for read in (READERS | REFUSED).values():
        for first, has_grad in ((True, True), (False, True), (True, False)):
            model.read, model.first = read, first
            wanted = r"'layers\.1\.linear\.(weight|bias)' .* resident=\['layers\.1\.linear'\]"
            with torch.set_grad_enabled(has_grad), pytest.raises(ShardingError, match=wanted):
                model(vector_batch(0, context.rank))
    assert_same(model.full_state_dict(rank0_only=False), before, "weights")
    model.read = lambda model, x: None
    stack_step(model, context.call(0))


@on_ranks(2)
def test_weights_of_resident_layers_may_be_read(context: RankContext) -> None:
    """Loss, gradients and weights are plain PyTorch's. Compiled graphs break where weights are read."""
    let_dynamo_look()
    compiled = only_sharded(lambda model: model.compile(backend="aot_eager"))
    for number, (name, read) in enumerate(READERS.items()):
        build = functools.partial(Reading, read, first=number % 2 == 0)
        for prepare in (None, compiled) if name == "linear" else (None,):
            with case(name):
                assert_trains_like_plain(context, build, stack_step, steps=2, resident=["layers.1"], prepare=prepare)


@on_ranks(2)
def test_shape_and_dtype_of_a_weight_need_no_gather(context: RankContext) -> None:
    """Form, dtype and device are those that its layer computes with, whether it trains is the parameter's."""

    def ask(model: Any, x: Tensor) -> None:
        weight = _weight(model)
        assert weight is _weight(model) and isinstance(weight, nn.Parameter)
        assert (weight.shape, len(weight), weight.numel(), weight.stride()) == ((DIM, DIM), DIM, DIM * DIM, (DIM, 1))
        assert (weight.requires_grad, weight.is_leaf, weight.grad, weight.device.type) == (trains, True, None, "cpu")
        assert {param.dtype for param in model.parameters()} == {weight.dtype} == {torch.bfloat16}
        asked.append(weight)

    model: Any = StreamShard(Reading(ask))
    asked = list[Any]()
    for trains in (True, False):
        model.layers[1].requires_grad_(trains)
        model(vector_batch(0, context.rank))
    assert len(asked) == 2


class Calling(Layer):
    inner: Sequence[Layer] = ()  # a tuple: no submodule

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        y = super().forward(x if given is None else F.linear(x, given))
        for layer in self.inner:
            y = y + layer(y, self.linear.weight)
        return y


def _calling() -> Any:
    model = stack_of(Calling)()
    model.layers[0].inner = (model.layers[2],)
    model.order = lambda model=model: [model.layers[0], model.layers[1]]
    return model


@on_ranks(2)
def test_a_layer_that_calls_another_streamed_layer_raises(context: RankContext) -> None:
    """Both would need the same slot. If one of them is resident, the model trains as in plain PyTorch."""
    for has_grad in (True, False):
        model = StreamShard(_calling())
        message = r"a layer of 'layers\.0' calls a layer of 'layers\.2'.*resident=\['layers\.2'\]"
        with torch.set_grad_enabled(has_grad), pytest.raises(ShardingError, match=message):
            model(vector_batch(0, context.rank))
    for resident in ("layers.0", "layers.2"):
        assert_trains_like_plain(context, _calling, stack_step, resident=[resident])


class Keeping(Layer):
    """Leaves its weight on a shelf, and gives a layer two or one places later to it."""

    def __init__(
        self, shelf: list[Any], distance: int, makes: Callable[[Tensor], Tensor] = lambda weight: weight
    ) -> None:
        super().__init__()
        self.shelf, self.distance, self.makes = shelf, distance, makes

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if len(self.shelf) >= self.distance:
            x = F.linear(x, self.shelf[-self.distance]())
        weight = self.makes(self.linear.weight)
        self.shelf.append(lambda: weight)
        return x


@on_ranks(1, 2)
def test_a_weight_that_is_kept_raises_when_its_layer_is_over(context: RankContext) -> None:
    """In the layers that follow, in the pass that follows, and outside; with gradients and without."""
    shelf: list[Any] = []
    model = sharded_model(stack_of(lambda: Keeping(shelf, 1)), weight_slots=2)
    for has_grad in (True, False):
        for distance in (1, 2):
            for layer in model.layers:
                layer.distance = distance
            shelf.clear()
            with torch.set_grad_enabled(has_grad), pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight'"):
                model(vector_batch(0, context.rank))
    for layer in model.layers:
        layer.distance = 100
    stack_step(model, context.call(0))
    kept = shelf[1]()
    assert kept.shape == (16, 16) and isinstance(kept, nn.Parameter)
    with pytest.raises(ShardingError, match="was read inside a forward and is used after it"):
        kept.norm()


@on_ranks(1, 2)
def test_a_weight_that_is_kept_in_place_raises_when_gradients_have_its_slot(context: RankContext) -> None:
    """Of the root unit and of a resident layer. Until backward it has its values, and again in the next pass."""
    kept: list[Tensor] = []

    def read(model: Any, x: Tensor) -> None:
        kept[:] = [model.head.weight, _weight(model)]

    def build() -> Any:
        return Reading(read, first=False)

    model: Any = StreamShard(build(), precision=FP32, weight_slots=2, resident=["layers.1"])
    model(vector_batch(0, context.rank))
    whole = model.full_state_dict(rank0_only=False)
    wanted = whole["head.weight"], whole["layers.1.linear.weight"]
    for number in range(2):
        loss = model(vector_batch(number, context.rank)).square().mean()
        assert all(map(torch.equal, map(Tensor.detach, kept), wanted))
        call = context.call(number)
        call.backward(loss, retain_graph=True)
        for weight, value in zip(kept, wanted, strict=True):
            with pytest.raises(ShardingError, match="was read inside a forward and is used after it"):
                weight.detach()
            assert weight.shape == value.shape and isinstance(weight, nn.Parameter)
        call.backward(loss)
    assert_trains_like_plain(context, build, stack_step, resident=["layers.1"], weight_slots=2)


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)

    def forward(self) -> Any:
        return {"prompt": self.weight.t()}


class Prompted(Stack):
    """Reads each layer's prompt before the layer, and behind the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(Prompt() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        earlier = x.new_zeros(DIM)
        for layer, made in zip(self.layers, self.prompts, strict=True):
            prompt = made()["prompt"]
            x = layer(x @ prompt) + earlier
            earlier = prompt.mean(0)
        return self.head(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_streamed_layer_may_return_its_weight(context: RankContext) -> None:
    """Or a view of it: the code around it reads a copy, whatever has the slot by then. In evaluation too."""
    model: Any = assert_trains_like_plain(context, Prompted, stack_step, units=[Layer, Prompt])
    plain, x = Prompted(), vector_batch(0, context.rank)
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), make_adversarial(model):
            assert_same({"output": model(x)}, {"output": plain(x)}, mode.__name__)


@on_ranks(2)
def test_a_backward_that_reads_a_weight_after_its_reduction_raises(context: RankContext) -> None:
    """Gradients have taken the place of a resident layer's weights. With slots for all units weights stay."""
    kept: list[Tensor] = []

    def read(model: Any, x: Tensor) -> None:
        kept[:] = [_weight(model).square().sum()]  # its backward reads the weight

    for settings in ({}, {"weight_slots": "all"}):
        model = StreamShard(Reading(read, first=False), precision=FP32, resident=["layers.1"], **settings)
        model(vector_batch(0, context.rank)).sum().backward()
        with contextlib.nullcontext() if settings else pytest.raises(RuntimeError, match="modified by an inplace"):
            kept[0].backward()


@on_ranks(2)
def test_a_hook_in_backward_may_read_a_resident_weight_whose_gradients_have_its_slot(context: RankContext) -> None:
    """All ranks gather it once more; it is reduced only once."""
    model, plain, read = sharded_model(resident=["layers.3"]), built(Stack), []
    model.layers[1].register_full_backward_hook(lambda *_: read.append((model.layers[3].linear.weight * 2).sum()))
    stack_step(model, context.call(0))
    torch.testing.assert_close(read, [(plain.layers[3].linear.weight.detach() * 2).sum()])
    for rank in range(2):
        stack_step(plain, Call(0, rank, 2, 0.5))
    assert_same(full_grads(model), {name: param.grad for name, param in plain.named_parameters()}, "gradients")


@on_ranks(2)
def test_backward_through_a_view_of_another_layers_weight_raises(context: RankContext) -> None:
    """In a layer of the same slot, and of the other one. The view of a layer's own weight is fine."""
    views: list[Callable[[Tensor], Tensor]] = [Tensor.t, Tensor.detach, lambda weight: weight[:]]
    for makes, distance in zip(views, (1, 2, 2), strict=True):
        shelf: list[Any] = []
        model = sharded_model(stack_of(functools.partial(Keeping, shelf, distance, makes)))
        out = model(vector_batch(0, context.rank)).square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            out.backward()
        why = explain_version(raised.value)
        assert why is not None and re.search("a view of a weight of another layer.*a clone", why), why
        for layer in model.layers:
            layer.distance = 100
        shelf.clear()
        stack_step(model, context.call(0))


class OwnWeight(torch.autograd.Function):
    """x @ w.T whose context keeps the weight: right while the layer itself is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert ctx.weight.data_ptr()  # as a kernel asks for it
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.saved_tensors[0]


class OfItsOwn(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(OwnWeight.apply(x, self.linear.weight) + self.linear.bias) + x  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_weights_kept_by_a_layers_own_graph_are_unsharded_in_its_backward(context: RankContext) -> None:
    """Memory and all: kernels may read it."""
    for resident in ((), Layer):
        assert_trains_like_plain(context, stack_of(OfItsOwn), stack_step, resident=resident)


@on_ranks(2)
def test_a_registered_method_is_a_forward(context: RankContext) -> None:
    """Of the model and of a layer; losses of both kinds mix."""

    class Encoder(Stack):
        def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.head.weight * scale, self.head.bias)

    def halve(layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.linear.weight) / 2

    def step(model: Any, call: Call) -> Tensor:
        if isinstance(model, StreamShard) and "encode" not in vars(model):
            register_forward_method(model, "encode")
            register_forward_method(model.layers[1], "halve")
            assert model.encode.__name__ == "encode"
        x = vector_batch(call.step, call.rank)
        return call.backward(model.encode(x, scale=2.0).square().mean() + model.layers[1].halve(x).mean())

    with mock.patch.object(Layer, "halve", halve, create=True):
        assert_trains_like_plain(context, Encoder, step)
