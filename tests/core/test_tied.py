"""The gradient of a head takes the place of a tied weight, if backward needs the weight no more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import ShardingError, StreamShard, register_forward_method
from streamshard.core.reductions import Reductions
from streamshard.core.unit_grads import UnitGrads
from tests.counts import counted
from tests.faults import case
from tests.models import TinyConfig, UsingLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import Call, Step, assert_trains_like_plain, lm_step, sharded_model
from tests.scenarios import BF16
from tests.simulated import checking_streams, simulated_device


def _rows(model: Any, tokens: Tensor) -> Tensor:
    rows: Tensor = model.embedding(tokens)
    return rows


# Uses may look at `is_late`, see `_prepare`.
_tied = functools.partial(UsingLM, TinyConfig(tied=True))


def twice(model: Any, tokens: Tensor) -> Tensor:
    return _rows(model, tokens) + 0.5 * _rows(model, tokens.flip(1))


def _recomputed(model: Any, tokens: Tensor) -> Tensor:
    out: Tensor = checkpoint(_rows, model, tokens, use_reentrant=False)
    return out


def _hooked(model: Any, tokens: Tensor) -> Tensor:
    """Rows, whose gradient has no part along the weight."""
    rows, weight = _rows(model, tokens), model.embedding.weight.detach()
    if rows.requires_grad:
        rows.register_hook(lambda grad: grad - 0.1 * (grad @ weight.t()) @ weight)
    return rows


def _penalised_late(model: Any, tokens: Tensor) -> Tensor:
    """Rows, all a little larger if the weight is large."""
    rows = _rows(model, tokens)
    return rows + model.embedding.weight.square().mean() if model.is_late else rows


def _in_chunks(model: Any, x: Tensor, *, is_reentrant: bool = False) -> Tensor:
    """Chunks, recomputed in backward."""
    return torch.cat([checkpoint(model.head, part, use_reentrant=is_reentrant) for part in x.chunk(2, 1)], 1)


_in_reentrant_chunks = functools.partial(_in_chunks, is_reentrant=True)


def _in_chunks_late(model: Any, x: Tensor) -> Tensor:
    out: Tensor = _in_reentrant_chunks(model, x) if model.is_late else model.head(x)
    return out


def _by_two_heads(model: Any, x: Tensor) -> Tensor:
    """Of the embedding's weight, and of the head, to which backward comes first."""
    second = F.linear(x.tanh(), model.embedding.weight)
    out: Tensor = model.head(x) + 0.5 * second
    return out


def two_passes(model: nn.Module, call: Call) -> Tensor:
    batches = [token_batch(call.step + 50 * k, call.rank) for k in range(2)]
    first, second = (next_token_loss(model(tokens), tokens) for tokens in batches)
    return call.backward(first + 0.5 * second)


def kept_graph(model: nn.Module, call: Call) -> Tensor:
    tokens = token_batch(call.step, call.rank)
    loss = next_token_loss(model(tokens), tokens)
    call.backward(loss, retain_graph=True)
    return call.backward(0.5 * loss)


def _prepare(model: Any, number: int) -> None:
    """From the third step on what is late happens; in the third one the weight of some models is frozen."""
    model.is_late = number >= 2
    if number == 0 and isinstance(model, StreamShard) and "on_instance" in vars(model.head):
        for _ in range(2):  # as decorators may do it
            register_forward_method(model.head, "on_instance")
    model.embedding.weight.requires_grad_(not (number == 2 and getattr(model, "is_frozen_once", False)))


def _frozen_once() -> nn.Module:
    model = _tied()
    model.is_frozen_once = True  # type: ignore[assignment]
    return model


def _frozen_between(model: Any, call: Call) -> Tensor:
    """In the third step the weight is frozen between forward and backward."""
    tokens = token_batch(call.step, call.rank)
    loss = next_token_loss(model(tokens), tokens)
    model.embedding.weight.requires_grad_(call.step != 2)
    found = call.backward(loss)
    model.embedding.weight.requires_grad_(True)
    return found


def _alone() -> nn.Module:
    """Of the root unit only the tied weight trains."""
    model = _tied()
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(("blocks", "embedding")))
    return model


def _with_a_method() -> nn.Module:
    model: Any = _tied(head=lambda model, x: model.head.on_instance(x))
    model.head.on_instance = lambda x: F.linear(x, model.head.weight)
    return model  # type: ignore[no-any-return]


class _Way(NamedTuple):
    """How to build and train; how often in four steps the gradient takes the weight's place, never in the first."""

    build: Callable[[], nn.Module]
    times: int
    step: Step = lm_step
    slots: Any = 2


WAYS = {
    "a head": _Way(_tied, 3),
    "rows looked up twice": _Way(lambda: _tied(embed=twice), 3),
    "the same with three slots": _Way(lambda: _tied(embed=twice), 3, slots=3),
    "the same with all slots": _Way(lambda: _tied(embed=twice), 0, slots="all"),
    "rows looked up by a function": _Way(lambda: _tied(embed=lambda m, t: F.embedding(t, m.embedding.weight)), 3),
    "a head in chunks": _Way(lambda: _tied(head=_in_chunks), 3),
    "two passes": _Way(_tied, 3, two_passes),
    "a kept graph": _Way(_tied, 4, kept_graph),
    "a hook with a view of the weight": _Way(lambda: _tied(embed=_hooked), 0),
    "a recomputed embedding": _Way(lambda: _tied(embed=_recomputed), 0),
    "chunks in reentrant checkpoints": _Way(lambda: _tied(head=_in_reentrant_chunks), 0),
    "a second head": _Way(lambda: _tied(head=_by_two_heads), 0),
    "a penalty from the third step on": _Way(lambda: _tied(embed=_penalised_late), 1),
    "chunks from the third step on": _Way(lambda: _tied(head=_in_chunks_late), 1),
    "a method of the head's instance": _Way(_with_a_method, 3),
    "frozen in the third step": _Way(_frozen_once, 2),
    "frozen before the third backward": _Way(_tied, 2, _frozen_between),
    "frozen before the third backward, alone": _Way(_alone, 2, _frozen_between),
}


_counting = functools.partial(counted, Reductions, "write_tied")  # gradients that took their weight's place


@on_ranks(2)
def test_tied_models_train_like_plain(context: RankContext) -> None:
    for name, (build, times, step, slots) in WAYS.items():
        with case(name), _counting() as counts:
            options: Any = {"steps": 4, "checked": (0, 2), "prepare": _prepare, "weight_slots": slots}
            assert_trains_like_plain(context, build, step, **options)
            assert len(counts) == times


@on_ranks(2)
def test_code_that_begins_to_recompute_with_the_weight_raises(context: RankContext) -> None:
    """With the alternative."""

    def embed(model: Any, tokens: Tensor) -> Tensor:
        return (_recomputed if model.is_late else _rows)(model, tokens)

    with pytest.raises(ShardingError, match=r"resident=\['head'\]"):
        assert_trains_like_plain(context, lambda: _tied(embed=embed), lm_step, prepare=_prepare)
    assert_trains_like_plain(context, lambda: _tied(embed=embed), lm_step, prepare=_prepare, resident=["head"])


@on_ranks(2)
def test_a_gradient_waits_for_ranks_that_still_read_the_weight(context: RankContext) -> None:
    """They read it in this rank's range of the slot. A second backward gathers the weight, and then runs the head."""
    model = sharded_model(_tied, precision=BF16)
    write, pending = UnitGrads.write_tied, []

    def write_tied(grads: Any, *given: Any) -> None:
        before = len(grads.slot.weights.shard_read.works)
        write(grads, *given)
        pending.append((before, len(grads.slot.weights.shard_read.works)))

    with mock.patch.object(UnitGrads, "write_tied", write_tied):
        for step in range(3):
            kept_graph(model, context.call(step))
    assert pending and all(before > 0 and after == 0 for before, after in pending)


@on_ranks(2)
def test_a_tied_weight_that_is_kept_raises_behind_its_backward(context: RankContext) -> None:
    """Kept from the head, and from the embedding."""
    model = sharded_model(_tied, precision=BF16)
    kept: list[Any] = []
    for module in (model.embedding, model.head):
        module.register_forward_hook(lambda module, args, out: kept.append(module.weight))
    for step in range(3):
        kept.clear()
        lm_step(model, context.call(step))
        for weight in kept:
            with pytest.raises(ShardingError, match="was read inside a forward and is used after it"):
                weight.detach()


@on_ranks(2)
def test_events_order_a_gradient_in_the_place_of_its_weight(context: RankContext) -> None:
    with simulated_device() as device, checking_streams(device) as checker, _counting() as counts:
        model = sharded_model(lambda: _tied(embed=twice), precision=BF16)
        with checker.of(model):
            for step in range(3):
                lm_step(model, context.call(step))
                model.zero_grad()
    assert len(counts) == 2
