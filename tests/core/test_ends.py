"""Embedding and head take turns with the blocks where the order of uses allows it, and never read other weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import plan
from streamshard.errors import CommunicationError, ShardingError
from streamshard.planning.memory import Category
from tests.compare import full_weights
from tests.counts import engine_inside
from tests.faults import case
from tests.models import DIM, TinyConfig, UsingLM, token_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, lm_step, sharded_model
from tests.scenarios import over_sockets

BOTH = {"embedding", "head"}


class _Scaled(nn.Embedding):
    """May scale rows by the size of its weights, so that backward needs these."""

    scales = False

    def forward(self, tokens: Tensor) -> Tensor:
        rows = super().forward(tokens)
        return rows * self.weight.square().mean() if self.scales else rows


def _reader(depth: int = 4, **uses: Callable[..., Any]) -> UsingLM:
    """Its embedding and head are larger than a block. An odd number of blocks has other slots."""
    return UsingLM(TinyConfig(vocabulary=256, depth=depth), _Scaled, **uses)


def _scale(model: UsingLM) -> float:
    model.embedding.scales = True
    return 0.0


def _in_chunks(model: UsingLM, x: Tensor) -> Tensor:
    parts = [checkpoint(F.linear, part, model.head.weight, use_reentrant=False) for part in x.unbind()]
    return torch.stack([part for part in parts if part is not None])


# By name: where the model uses which weights, and the units that take turns from the second step on.
PROGRAMS: dict[str, tuple[dict[str, Callable[..., Any]], set[str]]] = {
    "by their layers": ({}, BOTH),
    "head read by a fused loss": ({"head": lambda m, x: F.linear(x, m.head.weight)}, BOTH),
    "head read in checkpointed chunks": ({"head": _in_chunks}, BOTH),
    "embedding that backward needs": ({"first": _scale}, BOTH),
    "embedding called between blocks": (
        {"between": lambda m, x: m.embedding(torch.zeros(x.shape[:2], dtype=torch.int64)).mean()},
        {"head"},
    ),
    "embedding scaled by its weight": ({"embed": lambda m, t: m.embedding(t) * m.embedding.weight.norm()}, {"head"}),
    "embedding called behind the blocks": ({"last": lambda m, t: m.embedding(t).mean()}, {"head"}),
    "embedding read behind the blocks": ({"head": lambda m, x: m.head(x) + x @ m.embedding.weight.t()}, {"head"}),
    "an early exit": ({"between": lambda m, x: m.head(x).mean()}, {"embedding"}),
    "head read between blocks": ({"between": lambda m, x: (x @ m.head.weight.t()).mean()}, {"embedding"}),
}


def _ends(model: nn.Module) -> set[str]:
    engine = engine_inside(model)
    return {engine.units[unit].name for unit in engine.plan.ends}


@on_ranks(2)
def test_ends_take_turns_where_the_order_of_uses_allows(context: RankContext) -> None:
    """Losses, gradients and weights are plain PyTorch's, whatever reads the weights. With three slots over sockets."""
    for number, (name, (uses, wanted)) in enumerate(PROGRAMS.items()):
        build, slots = functools.partial(_reader, 4 + number % 2, **uses), 2 + number // 2 % 2
        settings: dict[str, Any] = {"steps": 4, "checked": (2, 3), "weight_slots": slots}
        with case(name), over_sockets() if slots == 3 else contextlib.nullcontext():
            assert _ends(assert_trains_like_plain(context, build, lm_step, **settings)) == wanted


# By name: a use that begins after embedding and head have joined; the unit that an error names, or None: it runs.
LATER: dict[str, tuple[dict[str, Callable[..., Any]], str | None]] = {
    "head called behind the blocks": ({"last": lambda m, t: m.head(m.norm(m.embedding(t))).mean()}, None),
    "an early exit": ({"between": lambda m, x: m.head(x).mean()}, None),
    "head read before the blocks": ({"first": lambda m: m.head.weight.square().mean()}, "head"),
    "embedding read behind the blocks": ({"head": lambda m, x: m.head(x) + x @ m.embedding.weight.t()}, "embedding"),
    "embedding checkpointed": ({"embed": lambda m, t: checkpoint(m.embedding, t, use_reentrant=False)}, None),
    "embedding that backward needs": ({"first": _scale}, "embedding"),
}


@on_ranks(2)
def test_an_end_that_is_used_otherwise_later_trains_like_plain_or_raises(context: RankContext) -> None:
    for number, (name, (uses, weight)) in enumerate(LATER.items()):

        def prepare(model: Any, number: int, uses: Any = uses) -> None:
            model.uses = uses if number >= 3 else {}

        build, options = functools.partial(_reader, 4 + number % 2), {"steps": 5, "checked": (3, 4), "prepare": prepare}
        train: Any = functools.partial(assert_trains_like_plain, context, build, lm_step, **options)
        with case(name):
            if weight is None:
                train()
                continue
            said = rf"the weight '{weight}\.weight'.* StreamShard\(model, resident=\['{weight}'\]\)"
            with pytest.raises(ShardingError, match=said):
                train()
            train(resident=[weight])


@on_ranks(2)
@pytest.mark.parametrize("name", ["embedding called between blocks", "an early exit"])
def test_another_call_on_one_rank_alone_raises(context: RankContext, name: str) -> None:
    """As docs/guide/limits.md says: between blocks, for the first time after the first steps.

    A resident embedding may be called so. The head has to be called at the same point on all ranks.
    """

    def step(model: Any, call: Call) -> Tensor:
        model.uses = PROGRAMS[name][0] if call.step >= 3 and call.rank == 1 else {}
        return lm_step(model, call)

    train = functools.partial(assert_trains_like_plain, context, _reader, step, steps=5, checked=(3, 4))
    if name != "an early exit":
        train(resident=["embedding"])
    with pytest.raises(CommunicationError, match="ranks do not do the same"):
        train()


def _train(model: nn.Module, steps: int) -> None:
    for number in range(steps):
        lm_step(model, Call(number, 0, 1, 1.0))
        model.zero_grad()


@on_ranks(2)
def test_the_slots_of_embedding_and_head_are_freed(context: RankContext) -> None:
    """The report and the plan count two slots from then on. The plan expects it, so it is right before, too."""
    model = sharded_model(_reader)
    slots = str(Category.WEIGHT_SLOTS.value)
    before = model.memory_report().held_bytes[slots]
    _train(model, 3)
    after = model.memory_report().held_bytes[slots]
    unit_bytes = [unit.layout.weight_bytes for unit in engine_inside(model).units]
    root, embedding, block, *_, head = unit_bytes
    assert embedding == head > block > 0
    assert (before, after) == (root + embedding + 2 * block + head, root + head + block)
    planned = plan(_reader, context.world_size, precision=FP32).stages[0].memory.held_bytes
    assert planned[slots] == after


@on_ranks(2)
def test_ends_take_turns_once_no_graph_waits_on_any_rank(context: RankContext) -> None:
    """Rank 1 keeps the loss of its first step for two more steps, so its graph may have views of the weights."""
    model = sharded_model(_reader)
    tokens = token_batch(0, context.rank)
    kept = [model(tokens)] if context.rank == 1 else [model(tokens).detach()]
    _train(model, 3)
    assert _ends(model) == set()
    kept.clear()
    _train(model, 1)
    assert _ends(model) == BOTH


@on_ranks(2)
def test_a_second_backward_through_a_graph_from_before_raises(context: RankContext) -> None:
    told = r"goes through a forward from before .*resident=\['embedding', 'head'\]"
    for resident in ([], ["embedding", "head"]):
        model = sharded_model(_reader, resident=resident)
        loss = model(token_batch(0, context.rank)).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        _train(model, 2)
        assert resident or _ends(model) == BOTH
        with contextlib.nullcontext() if resident else pytest.raises(ShardingError, match=told):
            loss.backward()
        _train(model, 1)


@on_ranks(2)
def test_a_view_that_an_evaluation_takes_before_the_blocks_raises(context: RankContext) -> None:
    """Also on one rank alone. Behind the blocks it would be a view of other weights."""

    def keep(model: Any) -> float:
        model.kept = [model.head.weight.detach()[:16]]
        return 0.0

    tokens = token_batch(0, context.rank)
    for resident in ([], ["head"]):
        model = sharded_model(_reader, resident=resident)
        _train(model, 3)
        full = full_weights(model)["head.weight"]
        model.uses = {"first": keep, "head": lambda m, x: x @ m.kept[0].t()}
        with torch.no_grad():
            if not resident:
                with pytest.raises(ShardingError, match=r"'head.weight' .* resident=\['head'\]"):
                    model(tokens)
                continue
            found = model(tokens)
            model.uses = {"head": lambda m, x, full=full: x @ full[:16].t()}
            torch.testing.assert_close(found, model(tokens))


class _Points(nn.Module):
    """Its first layer takes numbers, and has no table. A small tower behind the layers may compute with the weight of
    the last layer, as with SEW-D's distances.

    Args:
        calls: the last layer is called too, at the end.
        reads: its weight is read.
    """

    def __init__(self, calls: bool = True, reads: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(160, DIM), nn.Linear(DIM, 160)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.tower = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.calls, self.reads = calls, reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for layer in self.layers:
            x = layer(x).tanh()
        table = self.last.weight if self.reads else None
        for layer in self.tower:
            x = layer(x).tanh()
            x = x if table is None else (x @ table.t()).tanh() @ table
        return self.last(x) if self.calls else x


@on_ranks(2)
def test_a_first_layer_whose_input_needs_a_gradient_later_trains_like_plain(context: RankContext) -> None:
    """As a GAN's discriminator does: autograd saves the weights of its first layer only for the generator's loss."""

    def step(model: nn.Module, call: Call) -> Tensor:
        x = torch.sin(torch.arange(640.0).view(4, 160) + call.rank + call.step)
        if call.step < 3:
            return call.backward(model(x).square().mean())
        x.requires_grad_()
        loss = call.backward(model(x).square().mean())
        return loss + x.grad.square().sum() * call.weight**-2

    model = assert_trains_like_plain(context, _Points, step, steps=5, checked=(2, 4))
    assert _ends(model) == {"first", "last"}


@on_ranks(2)
def test_a_weight_that_is_read_before_a_resident_tower_keeps_its_values_for_backward(context: RankContext) -> None:
    """Backward comes to the tower while it still needs the weight, from the first step on, or from a later one."""

    def step(model: Any, call: Call) -> Tensor:
        model.reads = not model.calls or call.step >= 3
        x = torch.sin(torch.arange(640.0).view(4, 160) + call.rank + call.step)
        return call.backward(model(x).square().mean())

    for calls, resident in ((False, []), (True, []), (True, ["last"])):
        build, options = functools.partial(_Points, calls), {"steps": 5, "checked": (2, 4), "resident": resident}
        with case(f"{calls=}, {resident=}"):
            model: nn.Module = assert_trains_like_plain(context, build, step, **options)
            assert _ends(model) == {"first", "last"}.difference(resident)


@on_ranks(2)
def test_tokens_that_change_before_backward_raise_as_in_plain_pytorch(context: RankContext) -> None:
    model = sharded_model(_reader)
    for number in range(4):
        tokens = token_batch(number, context.rank)
        loss = model(tokens).square().mean()
        tokens.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss  # its graph would wait
        model.zero_grad()
        _train(model, 1)
    assert _ends(model) == BOTH
