"""The gradient of an embedding is made by ranges of rows, and has the bits that torch's whole gradient has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamshard.config import Precision
from streamshard.core import graph_hooks
from tests.compare import full_grads, full_weights
from tests.core.test_tied import kept_graph, twice, two_passes
from tests.counts import counted, engine_inside
from tests.faults import case
from tests.models import TinyConfig, UsingLM, token_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import ALL_SLOTS, adamw, assert_trains_like_plain, lm_step, no_sync, sharded_model

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="torch 2.11 does not say who has packed a saved tensor"
)

ROWS = 250  # no multiple of the number of ranges


class _Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens), 0.1) * 3.0


def _model(*embedding: Any, tied: bool = False, **uses: Any) -> UsingLM:
    return UsingLM(TinyConfig(vocabulary=ROWS, tied=tied), *embedding, **uses)


def _padded(rows: int, dim: int) -> nn.Module:
    return nn.Embedding(rows, dim, padding_idx=int(token_batch(0, 0)[0, 0]))


def _with_gradient_inside(model: Any, tokens: Tensor) -> Tensor:
    rows = model.embedding(tokens)
    (grad,) = torch.autograd.grad(rows.square().sum(), model.embedding.weight, retain_graph=True)
    return rows + grad.square().mean()


def _freeze_between(model: Any, call: Call) -> Tensor:
    with no_sync(model):
        loss = model(token_batch(call.step + 100, call.rank)).square().mean()
        model.embedding.weight.requires_grad_(False)
        call.backward(loss)
        model.embedding.weight.requires_grad_(True)
    return lm_step(model, call)


# By name: the model, how many look-ups' gradients are kept in three steps instead of the whole one, and the step.
MODELS: dict[str, tuple[Any, ...]] = {
    "an embedding": (_model, 3),
    "tied, with a row for padding": (lambda: _model(_padded, tied=True), 3),
    "tied, called twice": (lambda: _model(embed=twice, tied=True), 6),
    "by the number of tokens": (lambda: _model(lambda r, d: nn.Embedding(r, d, scale_grad_by_freq=True)), 0),
    "read": (lambda: _model(embed=lambda m, t: F.embedding(t, m.embedding.weight)), 0),
    "a gradient inside": (lambda: _model(embed=_with_gradient_inside), 3),
    "a gradient inside, tied": (lambda: _model(embed=_with_gradient_inside, tied=True), 3),
    "two passes": (lambda: _model(tied=True), 6, two_passes),
    "frozen before a backward": (_model, 3, _freeze_between, ALL_SLOTS),
}


_counting = functools.partial(counted, graph_hooks, "_keep_lookup")  # look-ups whose gradients were kept


@on_ranks(2)
def test_models_with_embeddings_train_like_plain(context: RankContext) -> None:
    for name, (build, kept, *rest) in MODELS.items():
        step, settings = [*rest, *(lm_step, {})[len(rest) :]]
        with case(name), _counting() as counts:
            model = assert_trains_like_plain(context, build, step, checked=(0, 2), **settings)
            assert sum(counts) == kept
            if name == "an embedding":  # which takes turns from the third step on
                assert len(engine_inside(model).plan.ends) == 2


@on_ranks(1)
def test_indices_that_saved_tensor_hooks_have_changed_are_not_used(context: RankContext) -> None:
    def changed(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_floating_point() else tensor.flip(0).contiguous()

    grads = []
    for hooks in (contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(changed, changed)):
        model = sharded_model(_model)
        with hooks:
            loss = model(token_batch(0, 0)).square().sum()
        loss.backward()
        grads.append(full_grads(model)["embedding.weight"])
    assert grads[0] is not None and grads[1] is not None and torch.equal(*grads)


def _accumulate(model: Any, call: Call) -> Tensor:
    """Two micro-batches, of which only the second is reduced."""
    with model.no_sync():
        lm_step(model, call._replace(step=call.step + 100))
    return lm_step(model, call)


STEPS: dict[str, tuple[Callable[[Any, Call], Tensor], dict[str, Any]]] = {
    "two slots": (lm_step, {}),
    "all slots, bf16 gradients": (_accumulate, {**ALL_SLOTS, "precision": Precision(grad_dtype=torch.bfloat16)}),
    "accumulation": (_accumulate, {}),
    "one graph, two backwards": (kept_graph, {"weight_slots": "all"}),
}


def _trained(step: Callable[[Any, Call], Tensor], rank: int, tied: bool, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = sharded_model(lambda: _model(_Scaled, tied=tied), **{"precision": Precision(), **settings})
    optimizer = adamw(model)
    for number in range(4):
        torch.manual_seed(number)
        step(model, Call(number, rank, 1, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@on_ranks(1, 2)
def test_ranges_of_rows_have_the_bits_of_the_whole_gradient(context: RankContext) -> None:
    """Tied on one rank or on two."""
    for number, (name, (step, settings)) in enumerate(STEPS.items()):
        given = step, context.rank, (number + context.world_size) % 2 == 0, settings
        with case(name):
            with _counting() as counts:
                found = _trained(*given)
            assert sum(counts) >= 4
            with mock.patch.object(graph_hooks, "_lookups_in", lambda output: ()):
                wanted = _trained(*given)
            assert [key for key, weight in wanted.items() if not torch.equal(weight, found[key])] == []


@on_ranks(1)
def test_the_smaller_one_of_both_gradients_is_kept(context: RankContext) -> None:
    """Of 250 rows the gradient is smaller than those of 256 outputs."""
    model = sharded_model(_model)
    for rows, kept in ((20, 1), (64, 0)):
        with _counting() as counts:
            model(token_batch(0, 0, rows=rows, length=4)).sum().backward()
        assert sum(counts) == kept
