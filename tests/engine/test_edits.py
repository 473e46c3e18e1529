"""In-place changes of weights in a model's own forward: they persist as in torch, or raise by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard
from streamshard.errors import ShardingError
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    stack_step,
)
from tests.scenarios import assert_does_not_depend_on_time


class CodebookLayer(Layer):
    """A counter that is a parameter, as vector quantisers have them, and clamped weights."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(DIM), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        with torch.no_grad():
            self.code.add_(0.125)
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x) + self.code


class CodebookStack(Stack):
    """The head is changed too."""

    repeats: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CodebookLayer() for _ in range(4))

    def order(self) -> Any:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        yield from self.layers
        for place in self.repeats:
            yield self.layers[place]


class DataStack(Stack):
    """Changes through ``.data``, which leave no trace in version counters."""

    def order(self) -> Any:
        for layer in self.layers:
            yield lambda x, layer=layer: layer(x)
        self.head.bias.data.add_(0.25)


class DataLayer(Layer):
    """The same in a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        self.linear.weight.data.div_(self.linear.weight.data.norm())
        return super().forward(x)


def _data_stack() -> Stack:
    model = DataStack()
    model.layers = nn.ModuleList(DataLayer() for _ in range(4))
    return model


def _by_hook() -> Stack:
    """A hook before the root's forward, which sees parameters as ``parameters()`` has them."""
    model = Stack()

    def halve(module: nn.Module, args: Any) -> None:
        for param in module.parameters():
            param.data.mul_(0.75)

    model.register_forward_pre_hook(halve)
    return model


def _all_rows(model: nn.Module, call: Call) -> Tensor:
    """The ranks' batches are the same: so is what is changed, once per step in one process as well."""
    if isinstance(model, StreamShard) or call.rank == 0:
        loss: Tensor = model(vector_batch(call.step, 0)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        _all_rows.last = loss.detach()  # type: ignore[attr-defined]
    return _all_rows.last  # type: ignore[attr-defined, no-any-return]


class LateCodebookLayer(Layer):
    """A weight is changed after another one was saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(DIM))
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        x = self.second(super().forward(x))
        with torch.no_grad():
            self.code.clamp_(max=0.5)
        return x + self.code.sum()


class LateCodebookStack(Stack):
    """Layers of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LateCodebookLayer() for _ in range(4))


@on_ranks(1, 2)
def test_a_weight_may_be_changed_after_others_were_saved(context: RankContext) -> None:
    """torch counts the changes of each weight; those of a unit lie in one memory."""
    assert_trains_like_plain(context, LateCodebookStack, stack_step)


@on_ranks()
@pytest.mark.parametrize(("world_size", "settings"), [(1, {}), (2, {}), (2, {"weight_slots": 3}), (3, {})], ids=str)
@pytest.mark.parametrize("build", [CodebookStack, _data_stack, _by_hook])
def test_what_a_forward_writes_to_weights_stays(
    context: RankContext, build: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    """It is what the rest of the forward, the backward, the optimizer and the next step compute with."""
    assert_trains_like_plain(context, build, _all_rows, checked=(0, 2), **settings)


class _WritingAround(Layer):
    """Halves its weight, then calls another layer, and computes again."""

    inner: tuple[Layer, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        y = super().forward(x)
        for layer in self.inner:
            y = y + layer(y)
        out: Tensor = self.linear(y)
        return out


class _PairsThatWrite(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_WritingAround() for _ in range(6))
        for outer, inner in zip(list(self.layers)[::2], list(self.layers)[1::2], strict=True):
            outer.inner = (inner,)  # a tuple: no child

    def order(self) -> Any:
        """The outer ones."""
        return list(self.layers)[::2]


@on_ranks()
@pytest.mark.parametrize(("world_size", "settings"), [(1, {}), (2, {}), (2, {"weight_slots": 3})], ids=str)
def test_what_a_layer_writes_before_it_calls_another_stays(context: RankContext, settings: dict[str, Any]) -> None:
    """Its slot goes to the inner layer, or to one that is on its way, and it finds what it has written again."""
    assert_trains_like_plain(context, _PairsThatWrite, _all_rows, checked=(0, 2), **settings)


@on_ranks(2)
def test_where_others_read_what_a_forward_writes_it_raises(context: RankContext) -> None:
    """With a slot each, what a rank owns is a part of the slot: the others gather it before or after it is changed."""
    model = StreamShard(CodebookStack(), precision=FP32, weight_slots="all")
    with pytest.raises(ShardingError, match=r"weights of .* are changed in place .* weight_slots='all'"):
        model(vector_batch(0, 0))


@on_ranks(1, 2)
def test_changes_in_param_dtype_leave_what_they_do_not_touch(context: RankContext) -> None:
    """Main weights are finer than what is computed with: only elements that were changed take its precision."""
    torch.manual_seed(3)
    model = StreamShard(CodebookStack(), precision=Precision())
    model.repeats = (2, 0)  # still in its slot, gathered again
    before = full_weights(model)
    with torch.no_grad():
        for _ in range(3):
            model(vector_batch(0, 0))
    after = full_weights(model)
    for place, wanted in enumerate((0.75, 0.375, 0.75, 0.375)):
        assert bool((after[f"layers.{place}.code"] == wanted).all())
    assert torch.equal(after["layers.1.linear.bias"], before["layers.1.linear.bias"])
    weight, was = after["layers.1.linear.weight"], before["layers.1.linear.weight"]
    limit = torch.tensor(0.1, dtype=torch.bfloat16).float()
    is_inside = was.bfloat16().float().abs() <= limit
    assert torch.equal(weight[is_inside], was[is_inside]) and bool((weight[~is_inside].abs() == limit).all())


@on_ranks(2)
def test_changes_on_another_replica_round_nothing_here(context: RankContext) -> None:
    """Replicas that train on their own have weights of their own: one's clamped element may be finer than another's."""

    class Clamping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.bias.clamp_(max=1.0)
            return super().forward(x)

    stack = Stack()
    stack.layers = nn.ModuleList(Clamping() for _ in range(3))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = StreamShard(stack, precision=Precision(), mesh=mesh)
    before, after = ((1.5, 1.0), (1.001, 1.001))[context.rank]
    for layer in model.layers:
        layer.linear.bias.data.fill_(before)
    with torch.no_grad():
        model(vector_batch(0, context.rank))
    for layer in model.layers:
        assert torch.equal(layer.linear.bias, torch.full_like(layer.linear.bias, after))


class HalvingLayer(Layer):
    """Halves its weight before it computes with it, and after the layer inside it has run, if there is one."""

    halves = True

    def __init__(self) -> None:
        super().__init__()
        self.inner: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        for layer in self.inner:
            x = layer(x)
        if self.halves:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return super().forward(x)


@on_ranks(1, 2)
@pytest.mark.parametrize("nested", [False, True], ids=["one after the other", "layers in layers"])
def test_backward_computes_with_what_a_forward_has_written(context: RankContext, nested: bool) -> None:
    """To the bit what a model gives whose weights were changed before; with layers in layers too."""
    grads = []
    for halves in (True, False):
        torch.manual_seed(3)
        stack = Stack()
        stack.layers = nn.ModuleList(HalvingLayer() for _ in range(4))
        for layer, inner in zip(stack.layers, list(stack.layers)[2:] if nested else (), strict=False):
            layer.inner = [inner]  # type: ignore[assignment]  # not a module: a list
        for layer in stack.layers:
            layer.halves = halves  # type: ignore[assignment]  # a bool
            if not halves:
                layer.linear.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]
        if nested:
            stack.order = lambda stack=stack: list(stack.layers)[:2]  # type: ignore[method-assign, misc]
        model = StreamShard(stack, precision=Precision())
        stack_step(model, Call(0, context.rank, context.world_size, 1.0))
        grads.append(full_grads(model))
    assert_same(grads[0], grads[1], "gradients", EXACT)


class RowsModel(nn.Module):
    """An embedding with ``max_norm``: a forward renormalises the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, DIM, max_norm=0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        """[n] int64 -> [n, DIM]"""
        x: Tensor = self.embedding(rows)
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(1, 2)
def test_rows_that_any_rank_renormalises_are_renormalised(context: RankContext) -> None:
    """Ranks look up different rows, and one that they share."""
    model = StreamShard(RowsModel(), precision=FP32)
    before = full_weights(model)["embedding.weight"]
    rows = torch.tensor([0, 1 + context.rank, 4 + 2 * context.rank])
    model(rows).sum().backward()
    norms = full_weights(model)["embedding.weight"].norm(dim=1)
    looked_up = {0, 1, 4} | ({2, 6} if context.world_size == 2 else set())
    for row in range(12):
        wanted = 0.5 if row in looked_up else float(before[row].norm())
        assert abs(float(norms[row]) - wanted) < 1e-4


class LocalLayer(Layer):
    """Writes what depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """[rows, DIM] -> the same"""
        with torch.no_grad():
            self.linear.bias.copy_(x.mean(0))
        return super().forward(x)


def _local_stack() -> Stack:
    model = Stack()
    model.layers = nn.ModuleList(LocalLayer() for _ in range(3))
    return model


@on_ranks(2)
def test_changes_that_differ_between_ranks_raise_on_all(context: RankContext) -> None:
    """No rank's is the answer."""
    model = StreamShard(_local_stack(), precision=FP32)
    with pytest.raises(ShardingError, match=r"ranks have changed 'layers\.0\.linear\.bias' in place"):
        model(vector_batch(0, context.rank))


@on_ranks(2)
def test_changes_that_begin_later_raise(context: RankContext) -> None:
    """Ranks have agreed on who changes weights in the first forward; the weights are as they were."""

    class Later(Stack):
        changes = False

        def order(self) -> Any:
            yield from self.layers
            if self.changes:
                with torch.no_grad():
                    self.head.weight.zero_()

    model = StreamShard(Later(), precision=FP32)
    stack_step(model, Call(0, context.rank, 2, 1.0))
    before = full_weights(model)
    model.changes = True
    with pytest.raises(ShardingError, match="weights of 'the edge unit' were changed in place inside a forward"):
        model(vector_batch(0, context.rank))
    model.changes = False
    assert_same(full_weights(model), before, "weights")
    stack_step(model, Call(1, context.rank, 2, 1.0))


@on_ranks(2)
def test_weights_that_are_given_other_memory_in_a_forward_raise(context: RankContext) -> None:
    """And have their own again afterwards."""

    class Assigning(Layer):
        assigns = True

        def forward(self, x: Tensor) -> Tensor:
            if self.assigns:
                self.linear.weight.data = self.linear.weight.data / 2
            return super().forward(x)

    model = Stack()
    model.layers = nn.ModuleList(Assigning() for _ in range(3))
    sharded = StreamShard(model, precision=FP32)
    with pytest.raises(ShardingError, match=r"'layers\.0\.linear\.weight' was given other memory inside a forward"):
        sharded(vector_batch(0, context.rank))
    for layer in model.layers:
        layer.assigns = False
    whole = full_weights(sharded)
    x = vector_batch(0, context.rank)
    for place in range(3):
        weight, bias = (whole[f"layers.{place}.linear.{name}"] for name in ("weight", "bias"))
        x = x + torch.tanh(F.linear(x, weight, bias))
    wanted = F.linear(x, whole["head.weight"], whole["head.bias"])
    assert_same({"out": sharded(vector_batch(0, context.rank))}, {"out": wanted}, "forward")


@on_ranks(1, 2)
def test_changes_under_checkpointing(context: RankContext) -> None:
    """The recomputation starts from what the forward has left, as in torch; clamping twice is clamping once."""

    class Clamping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class Checkpointed(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Clamping() for _ in range(4))

        def order(self) -> Any:
            for layer in self.layers:
                yield lambda x, layer=layer: checkpoint(layer, x, use_reentrant=False)

    assert_trains_like_plain(context, Checkpointed, stack_step)


@on_ranks(2, 3)
def test_changes_are_free_of_races_and_do_not_depend_on_time(context: RankContext) -> None:
    """What is cast anew at the end of a pass, and read by others in the backward."""
    assert_does_not_depend_on_time(context, CodebookStack, _all_rows)
