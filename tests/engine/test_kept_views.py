"""Views of weights that outlive their layer's forward: refused where somebody can still read them, let be elsewhere."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard import Precision, ShardingError, StreamShard
from streamshard.engine import kept_views
from streamshard.inspect import engine_inside
from tests.ranks import RankContext, on_ranks

DIM = 8
# Searches look through what a test has made, not through what was imported before it: that takes a second of each.
searching_what_is_new = mock.patch.object(gc, "unfreeze")
_stored: list[Tensor] = []


class _Layer(nn.Module):
    """Keeps what `keep` keeps."""

    def __init__(self, keep: Callable[[_Layer, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.keep = keep
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        found = self.keep(self, x)
        return found if isinstance(found, Tensor) else self.linear(x)


class _Model(nn.Module):
    def __init__(self, keep: Callable[[_Layer, Tensor], Any], n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(keep) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _sharded(keep: Callable[[_Layer, Tensor], Any]) -> StreamShard:
    torch.manual_seed(0)
    return StreamShard(_Model(keep), precision=Precision(param_dtype=torch.float32))


# ------------------------------------------------------------------------------------------------------- refused


def _as_attribute(layer: _Layer, x: Tensor) -> None:
    layer.kept = layer.linear.weight.t()


def _detached(layer: _Layer, x: Tensor) -> None:
    layer.kept = layer.linear.weight.detach()


def _in_a_list(layer: _Layer, x: Tensor) -> None:
    layer.kept = [{"weight": layer.linear.weight.data}]


def _in_a_closure(layer: _Layer, x: Tensor) -> None:
    view = layer.linear.weight.t()
    layer.kept = lambda: view


def _in_a_global(layer: _Layer, x: Tensor) -> None:
    _stored.append(layer.linear.weight[:3])


@on_ranks(2)
@pytest.mark.parametrize(
    ("keep", "where", "has_grad"),
    [
        (_as_attribute, "_Layer.kept, (8, 8) torch.float32", True),
        (_as_attribute, "_Layer.kept", False),
        (_detached, "_Layer.kept", True),
        (_in_a_list, "_Layer.kept", False),
        (_in_a_closure, "_Layer.kept", True),
        (_in_a_global, "a global variable of tests.engine.test_kept_views, (3, 8)", False),
    ],
)
def test_a_view_that_is_kept_is_refused(context: RankContext, keep: Any, where: str, has_grad: bool) -> None:
    """The first time, and by name; forwards go on after it is let go of."""
    model, x = _sharded(keep), torch.ones(2, DIM)
    with contextlib.nullcontext() if keep is _in_a_global else searching_what_is_new:  # a global was imported
        for _ in range(2):
            refused = pytest.raises(ShardingError, match="keeps a view of one of")
            with torch.set_grad_enabled(has_grad), refused as caught:
                model(x)
            assert where in str(caught.value)
            assert "'layers.0'" in str(caught.value)
            _stored.clear()
        for layer in model.layers:
            layer.keep, layer.kept = _nothing, None
        assert torch.equal(model(x), _sharded(_nothing)(x))


@on_ranks(2)
def test_a_view_that_a_hook_keeps_is_refused(context: RankContext) -> None:
    """As a logger of weights does."""
    model, log = _sharded(_nothing), {}
    for name, layer in model.layers.named_children():
        layer.linear.register_forward_hook(
            lambda linear, args, output, name=name: log.update({name: linear.weight.detach()})
        )
    refused = pytest.raises(ShardingError, match=r"Linear\._forward_hooks")
    with searching_what_is_new, torch.no_grad(), refused:
        model(torch.ones(2, DIM))


@on_ranks(2)
def test_the_last_layers_view_is_refused_too(context: RankContext) -> None:
    """Nobody takes its slot in this forward."""
    model = _sharded(_nothing)
    model.layers[-1].keep = _as_attribute
    with searching_what_is_new, torch.no_grad(), pytest.raises(ShardingError, match=r"'layers\.2' keeps a view"):
        model(torch.ones(2, DIM))


# -------------------------------------------------------------------------------------------------------- let be


def _nothing(layer: _Layer, x: Tensor) -> None:
    pass


def _for_a_while(layer: _Layer, x: Tensor) -> None:
    layer.kept = [layer.linear.weight.t(), layer.linear.weight.detach()]
    layer.kept = None


def _a_clone(layer: _Layer, x: Tensor) -> None:
    layer.kept = layer.linear.weight.t().clone()


def _the_parameter(layer: _Layer, x: Tensor) -> None:
    layer.kept = [layer.linear.weight]


def _in_a_cycle(layer: _Layer, x: Tensor) -> None:
    view = layer.linear.weight.t()

    def count_down(n: int) -> Tensor:
        return view.sum() if n == 0 else count_down(n - 1)

    count_down(2)


class _OwnProduct(torch.autograd.Function):
    """Keeps the transposed weight beside what it saves, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        ctx.save_for_backward(x)
        return x @ transposed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.transposed.t(), x.t() @ grads[0]


def _in_a_function(layer: _Layer, x: Tensor) -> Tensor:
    layer.kept = [layer.linear.weight]
    result: Tensor = _OwnProduct.apply(x, layer.linear.weight.t()) + layer.linear.bias
    return result


def _in_a_hook_of_the_graph(layer: _Layer, x: Tensor) -> Tensor:
    view, y = layer.linear.weight.t(), layer.linear(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad + 0 * view.sum())
    return y


def _by_hooks_for_saved_tensors(layer: _Layer, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return layer.linear(x)


def _by_a_traceback(layer: _Layer, x: Tensor) -> None:
    try:
        view = layer.linear.weight.t()
        raise ValueError(tuple(view.shape))
    except ValueError as error:
        layer.kept = error


@on_ranks(2)
@pytest.mark.parametrize(
    "keep",
    [
        _for_a_while,
        _a_clone,
        _the_parameter,
        _in_a_cycle,
        _in_a_function,
        _in_a_hook_of_the_graph,
        _by_hooks_for_saved_tensors,
        _by_a_traceback,
    ],
)
def test_what_nobody_else_can_read_is_let_be(context: RankContext, keep: Any) -> None:
    """And right: outputs and gradients are those of a model that keeps nothing."""
    model, plain = _sharded(keep), _sharded(_nothing)
    gc.collect()
    gc.disable()  # no cycle goes by itself
    try:
        for step in range(2):
            x = torch.full((2, DIM), float(step + context.rank))
            with searching_what_is_new:
                found, wanted = model(x), plain(x)
            torch.testing.assert_close(found, wanted)
            found.sum().backward()
            wanted.sum().backward()
            for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    finally:
        gc.enable()


@on_ranks(2)
@pytest.mark.parametrize("keep", [_nothing, _for_a_while, _in_a_function])
def test_nobody_is_searched_for_in_a_steady_step(context: RankContext, keep: Any) -> None:
    """A search through all objects takes longer than a layer."""
    model, searches = _sharded(keep), []
    own = kept_views._views_in
    kept_views._views_in = lambda *args: searches.append(args) or own(*args)  # type: ignore[func-returns-value]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, kept_views, "_views_in", own)
        for _ in range(4):
            n_before = len(searches)
            model(torch.ones(2, DIM)).sum().backward()
    assert len(searches) == n_before
    assert bool(searches) is (keep is _in_a_function)
    assert all(unit.weight_slot.references > 0 for unit in engine_inside(model).units)
