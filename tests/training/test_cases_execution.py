"""Layers that do not run once each in registration order: unused, conditional, repeated, reordered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamshard import StreamShard
from tests.models import Layer, Stack, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, RankFailure, RankPool, on_ranks
from tests.reference import (
    FP32,
    Call,
    adamw,
    assert_same,
    assert_trains_like_ddp,
    assert_trains_like_plain,
    full_grads,
    lm_step,
    stack_step,
)


class Planned(Stack):
    """A stack whose layers run in the order that the step function sets before each forward."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__((16,) * (depth + 1))
        self.plan: list[int] = list(range(depth))

    def order(self) -> Iterable[nn.Module]:
        """The layers of `plan`; a layer may be missing, or be there more than once."""
        return [self.layers[index] for index in self.plan]


def planned_step(plans: dict[tuple[int, int], list[int]]) -> Any:
    """Step function that runs `plans[step, rank]`; a missing key means registration order."""

    def step(model: nn.Module, call: Call) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        inner.plan = plans.get((call.step, call.rank), list(range(len(inner.layers))))
        return stack_step(model, call)

    return step


def same_on_all_ranks(*plans: list[int]) -> dict[tuple[int, int], list[int]]:
    """The plans of steps 0, 1, ... on every rank."""
    return {(step, rank): plan for step, plan in enumerate(plans) for rank in range(4)}


# ---------------------------------------------------------------------------------------------- alike on all ranks

ALIKE = {
    "a layer never used": same_on_all_ranks(*[[0, 1, 3]] * 3),
    "the first layer never used": same_on_all_ranks(*[[1, 2, 3]] * 3),
    "the last layer never used": same_on_all_ranks(*[[0, 1, 2]] * 3),
    "only one layer used": same_on_all_ranks(*[[2]] * 3),
    "no layer used": same_on_all_ranks(*[[]] * 3),
    "a layer used now and then": same_on_all_ranks([0, 1, 2, 3], [0, 1, 3], [0, 3]),
    "a layer used from the second step on": same_on_all_ranks([0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
    "layers used twice in a row": same_on_all_ranks(*[[0, 0, 1, 1, 2, 3, 3]] * 3),
    "layers used twice with others between": same_on_all_ranks(*[[0, 1, 2, 3, 0, 1, 2, 3]] * 3),
    "there and back again": same_on_all_ranks(*[[0, 1, 2, 3, 2, 1, 0]] * 3),
    "the same layer over and over": same_on_all_ranks(*[[1, 1, 1, 1, 1]] * 3),
    "more repeats each step": same_on_all_ranks([0, 1], [0, 1, 1], [0, 1, 1, 1, 2]),
    "reverse order": same_on_all_ranks(*[[3, 2, 1, 0]] * 3),
    "even layers, then odd ones": same_on_all_ranks(*[[0, 2, 1, 3]] * 3),
    "another order each step": same_on_all_ranks([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]),
    "order, repeats and gaps change": same_on_all_ranks([2, 1], [0, 3, 0], [3, 3, 1, 2, 0]),
}


@on_ranks(2)
@pytest.mark.parametrize("what", ALIKE)
def test_layers_run_in_any_order_any_number_of_times(context: RankContext, what: str) -> None:
    """All ranks do the same; gradients of layers that did not run are None, as in plain PyTorch."""
    assert_trains_like_plain(context, Planned, planned_step(ALIKE[what]), checked=(0, 2))


@on_ranks(1, 3)
@pytest.mark.parametrize("what", ["a layer used now and then", "order, repeats and gaps change"])
def test_layers_run_in_any_order_at_other_numbers_of_ranks(context: RankContext, what: str) -> None:
    """The same at 1 and 3 ranks."""
    assert_trains_like_plain(context, Planned, planned_step(ALIKE[what]), optimizer=adamw)


# ---------------------------------------------------------------------------------------------- ranks differ

DIFFERENT = {
    "a layer used on rank 0 only": {(step, 1): [0, 1, 3] for step in range(4)},
    "a layer used on rank 1 only": {(step, 0): [0, 2, 3] for step in range(4)},
    "a different layer on each rank": {(step, rank): [0, 1 + rank, 3] for step in range(4) for rank in range(2)},
    "rank 1 uses no layer": {(step, 1): [] for step in range(4)},
    "the rank that skips changes": {(step, step % 2): [0, 3] for step in range(4)},
    "a layer used on no rank, another on one": {
        (step, rank): [0, 3] if rank else [0, 1, 3] for step in range(4) for rank in range(2)
    },
    "differing from the second step on": {(2, 0): [0, 1], (2, 1): [2, 3], (3, 0): [0, 3], (3, 1): [1]},
    "differing from the second step on, after another order": {
        **same_on_all_ranks([2, 0, 3, 1], [2, 0, 3, 1]),
        **{(2, 0): [2, 0], (2, 1): [0, 3, 1], (3, 0): [3], (3, 1): [2, 1]},
    },
    "another order, which one rank skips, from the first step on": {
        **same_on_all_ranks(*[[3, 1, 0, 2]] * 4),
        **{(0, 0): [2], (1, 1): [1], (2, 0): [3, 0], (3, 1): []},
    },
    "another order, of which no rank runs all at first": {
        **same_on_all_ranks(*[[3, 1, 0, 2]] * 4),
        **{(0, 0): [3, 0], (0, 1): [1, 0], (1, 0): [0, 2], (1, 1): [3, 1]},
    },
    "layers that come in front later, on one rank": {
        **same_on_all_ranks(*[[0, 1]] * 4),
        **{(1, 1): [3, 2, 0, 1], (2, 0): [3, 2, 0, 1], (3, 1): [3, 2]},
    },
    "ranks contradict each other at first": {
        **same_on_all_ranks(*[[1, 3]] * 4),
        **{(0, 0): [3, 2, 1, 0, 1], (0, 1): [1, 0, 3, 3, 2]},
    },
    "differing at first, alike later": {(0, 0): [0, 1], (0, 1): [2, 3], (1, 0): [], (1, 1): [3]},
}


@on_ranks(2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_may_run_different_layers(context: RankContext, what: str) -> None:
    """A rank without a gradient contributes zeros; the numbers are those of DDP with `find_unused_parameters`."""
    assert_trains_like_ddp(context, Planned, planned_step(DIFFERENT[what]))


@on_ranks(2)
def test_a_layer_that_one_rank_alone_runs_without_gradients_is_served(context: RankContext) -> None:
    """As what takes images, frozen, in front of layers that are registered before it: the other has none at first."""

    class Tower(Planned):
        def forward(self, x: Tensor) -> Tensor:
            if 3 in self.plan:
                with torch.no_grad():
                    for layer in (self.layers[3], self.layers[1]):
                        x = layer(x)
            return super().forward(x)

        def order(self) -> Iterable[nn.Module]:
            return self.layers[::2]

    plans = {(step, rank): [3] if step % 2 != rank else [] for step in range(4) for rank in range(2)}
    assert_trains_like_ddp(context, Tower, planned_step(plans))


def _retained(model: nn.Module, call: Call, losses: list[Tensor]) -> None:
    """Each graph twice."""
    call.backward(losses[0], retain_graph=True)
    call.backward(losses[0])
    call.backward(losses[1])


def _joined(model: nn.Module, call: Call, losses: list[Tensor]) -> None:
    """Two graphs in one backward, and the later one once more."""
    call.backward(losses[0] + losses[1], retain_graph=True)
    call.backward(losses[1])


@on_ranks(2)
@pytest.mark.parametrize("backward", [_retained, _joined])
def test_ranks_may_run_different_layers_in_graphs_that_are_used_twice(context: RankContext, backward: Any) -> None:
    """Each backward issues the same everywhere, however often it has come by, and wherever ranks stop in a graph."""

    def step(model: Any, call: Call) -> Tensor:
        losses = []
        for number in range(2):
            model.plan = [k for k in range(4) if k not in ((), (0, 1), (3,))[call.rank + number]]
            losses.append(model(vector_batch(call.step + 50 * number, call.rank)).square().mean())
        backward(model, call, losses)
        return losses[0].detach()

    assert_trains_like_plain(context, Planned, step)


@on_ranks(3)
@pytest.mark.parametrize("what", ["a different layer on each rank", "differing from the second step on"])
def test_three_ranks_may_run_different_layers(context: RankContext, what: str) -> None:
    """The third rank runs all of them."""
    assert_trains_like_ddp(context, Planned, planned_step(DIFFERENT[what]))


ORDERS_DIFFER = {
    "repeats on one rank": {(step, 1): [0, 1, 1, 2, 0, 3] for step in range(4)},
    "reverse order on one rank": {(step, 1): [3, 2, 1, 0] for step in range(4)},
    "order differs from step 2 on": {(2, 1): [1, 3, 0, 2]},
}


def _train_with_orders_that_differ(context: RankContext, what: str) -> None:
    assert_trains_like_ddp(context, Planned, planned_step(ORDERS_DIFFER[what]))


@pytest.mark.parametrize("what", ORDERS_DIFFER)
def test_ranks_that_run_layers_in_different_orders_train_like_ddp_or_raise(ranks: RankPool, what: str) -> None:
    """Collectives have one order on all ranks. Where that cannot be kept, an error names a layer; nothing hangs."""
    try:
        ranks(2, group_timeout_s=4.0).run(_train_with_orders_that_differ, what)
    except RankFailure as failure:
        story = str(failure)
        assert "no answer" not in story
        assert "layers." in story.rsplit("Error", 1)[-1]


@on_ranks(2)
def test_layer_drop_trains_like_ddp(context: RankContext) -> None:
    """Every rank drops layers at random in every step."""
    generator = torch.Generator().manual_seed(5)
    plans = {
        (step, rank): [i for i in range(4) if torch.rand((), generator=generator) > 0.4]
        for step in range(8)
        for rank in range(2)
    }
    assert_trains_like_ddp(context, Planned, planned_step(plans), steps=8, optimizer=adamw)


# ---------------------------------------------------------------------------------------------- inside a layer


class Branching(nn.Module):
    """A layer that uses one of two branches, or none, and has a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.spare = nn.Parameter(torch.ones(16))
        self.choice: int | None = 0

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        return x if self.choice is None else x + torch.tanh(self.branches[self.choice](x))


class BranchingStack(nn.Module):
    """Three branching layers and an edge weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branching() for _ in range(3))
        self.unused_edge = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def branching_step(choose: Any) -> Any:
    """Step function in which layer `index` takes branch ``choose(step, rank, index)``."""

    def step(model: nn.Module, call: Call) -> Tensor:
        inner: Any = model.module if hasattr(model, "module") else model
        for index, layer in enumerate(inner.layers):
            layer.choice = choose(call.step, call.rank, index)
        return stack_step(model, call)

    return step


BRANCHES: dict[str, Any] = {
    "the same branch always": lambda step, rank, index: 0,
    "alternating by step": lambda step, rank, index: step % 2,
    "by rank": lambda step, rank, index: rank % 2,
    "by layer, step and rank": lambda step, rank, index: (step + rank + index) % 2,
    "none on rank 0": lambda step, rank, index: rank if rank else None,
    "none in step 1": lambda step, rank, index: None if step == 1 else 1,
}


@on_ranks(2)
@pytest.mark.parametrize("what", BRANCHES)
def test_branches_inside_a_layer_train_like_ddp(context: RankContext, what: str) -> None:
    """Parts of a unit without gradients: None where no rank has one, zeros added where some have."""
    assert_trains_like_ddp(context, BranchingStack, branching_step(BRANCHES[what]))


@on_ranks(2)
def test_a_part_that_got_no_gradient_never_sees_leftovers_of_another_layer(context: RankContext) -> None:
    """Slots are shared: huge gradients of the other layers must not appear in the unused branch."""

    def step(model: nn.Module, call: Call) -> Tensor:
        inner: Any = model
        for index, layer in enumerate(inner.layers):
            layer.choice = 1 if index == 2 and call.step % 2 else 0
        return call.backward(model(vector_batch(call.step, call.rank)).square().mean() * 1e6)

    def frozen_by_lr(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-9)

    assert_trains_like_plain(context, BranchingStack, step, optimizer=frozen_by_lr, checked=(0, 1, 2))


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_unused_parameters_survive_as_the_user_left_them(context: RankContext, set_to_none: bool) -> None:
    """With `zero_grad(set_to_none=False)` they are zeros and momentum goes on; with True they are None."""
    plans = same_on_all_ranks([0, 1, 2, 3], [0, 3], [0, 1, 3], [1])
    assert_trains_like_plain(
        context, Planned, planned_step(plans), steps=4, set_to_none=set_to_none, checked=(0, 1, 2, 3), optimizer=adamw
    )


@on_ranks(2)
def test_a_parameter_used_by_no_rank_has_no_gradient_outside_summon_either(context: RankContext) -> None:
    """`p.grad` is None on every rank, so that optimizers skip it."""
    model = StreamShard(BranchingStack(), precision=FP32)
    branching_step(lambda step, rank, index: 0)(model, Call(0, context.rank, 2, 1.0))
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in grads.items():
        unused = "branches.1" in name or "spare" in name or "unused_edge" in name
        assert (grad is None) is unused, name


# ---------------------------------------------------------------------------------------------- experts


class Experts(nn.Module):
    """Each token goes to one expert; experts that get no token do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        gates = F.softmax(self.router(x), dim=-1)
        best = gates.argmax(dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * gates[rows, index, None])
        return x + out


class ExpertStack(nn.Module):
    """Three layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@on_ranks(2, 3)
@pytest.mark.parametrize("units", [None, "experts"])
def test_experts_that_run_on_some_ranks_only_train_like_ddp(context: RankContext, units: str | None) -> None:
    """Experts inside a layer's unit, and each expert a unit of its own."""

    def step(model: nn.Module, call: Call) -> Tensor:
        return call.backward(model(vector_batch(call.step, call.rank, rows=2)).square().mean())

    settings = {} if units is None else {"units": [Layer]}
    assert_trains_like_ddp(context, ExpertStack, step, optimizer=adamw, **settings)


# ---------------------------------------------------------------------------------------------- outside forward


@on_ranks(2)
def test_submodules_called_outside_the_roots_forward_give_the_right_output(context: RankContext) -> None:
    """The embedding, one block, the head: each gathers what it needs."""
    torch.manual_seed(7)
    plain: Any = TinyLM()
    torch.manual_seed(7)
    model: Any = StreamShard(TinyLM(), precision=FP32)
    tokens = token_batch(0, context.rank)
    for number in range(2):
        with torch.no_grad():
            x, wanted = model.embedding(tokens), plain.embedding(tokens)
            assert_same({"embedding": x}, {"embedding": wanted}, "submodule")
            x, wanted = model.blocks[2](x), plain.blocks[2](wanted)
            assert_same({"block": x}, {"block": wanted}, "submodule")
        for rank in range(2):
            lm_step(plain, Call(number, rank, 2, 0.5))
        lm_step(model, Call(number, context.rank, 2, 1.0))
        assert_same(full_grads(model), full_grads(plain), "gradients of the step between")


@on_ranks(2)
def test_a_part_of_a_layer_called_on_its_own_is_right_or_raises(context: RankContext) -> None:
    """It lies inside a unit that nobody asked for; what must not happen is a result made from this rank's piece."""
    torch.manual_seed(7)
    plain: Any = TinyLM()
    torch.manual_seed(7)
    model: Any = StreamShard(TinyLM(), precision=FP32)
    x = torch.randn(2, 16)
    for part in ("up", "attention_norm"):
        try:
            found = model.blocks[0].get_submodule(part)(x)
        except RuntimeError:
            continue
        assert_same({part: found}, {part: plain.blocks[0].get_submodule(part)(x)}, "part of a layer")


class EncoderDecoder(nn.Module):
    """Two stacks that users call one after the other themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack((16, 16, 16, 16))
        self.encoder.head = nn.Linear(16, 16)
        self.decoder = Stack((16, 16, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        out: Tensor = self.decoder(self.encoder(x))
        return out


@on_ranks(2)
@pytest.mark.parametrize("from_step", [0, 2])
def test_training_through_submodules_without_the_roots_forward(context: RankContext, from_step: int) -> None:
    """`model.decoder(model.encoder(x))` trains like `model(x)`, from the start and after ordinary steps."""

    def step(model: Any, call: Call) -> Tensor:
        x = vector_batch(call.step, call.rank)
        out = model.decoder(model.encoder(x)) if call.step >= from_step else model(x)
        return call.backward(out.square().mean())

    assert_trains_like_plain(context, EncoderDecoder, step, units=[Layer])
