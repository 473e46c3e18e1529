"""The gradient of a head takes the place of a tied weight, if backward needs the weight no more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import ShardingError
from streamshard.core.reductions import Reductions
from streamshard.core.unit_grads import UnitGrads
from tests.models import TinyConfig, TinyLM, next_token_loss, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    Call,
    Step,
    assert_trains_like_plain,
    lm_step,
    sharded_model,
)
from tests.scenarios import BF16
from tests.simulated import checking_streams, simulated_device


class _ByItself(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        """Rows, divided by the norm of all."""
        return super().forward(tokens) / self.weight.norm()


class _Tied(TinyLM):
    """Subclasses and lists change one place."""

    def __init__(self) -> None:
        super().__init__(TinyConfig(tied=True))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """As in `TinyLM`."""
        return self.predict(self.norm(self.run_blocks(self.embed(tokens), mask))) * self.scale

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> [.., dim]"""
        out: Tensor = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return out

    def predict(self, x: Tensor) -> Tensor:
        """[.., dim] -> logits"""
        out: Tensor = self.head(x)
        return out


class _Twice(_Tied):
    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of two tokens each."""
        return super().embed(tokens) + 0.5 * super().embed(tokens.flip(1))


class _ByFunction(_Tied):
    def embed(self, tokens: Tensor) -> Tensor:
        """Rows, whose gradient autograd makes as large as the weight."""
        return F.embedding(tokens, self.embedding.weight) + self.positions[: tokens.shape[1]]


class _Scaling(_Tied):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = _ByItself.from_pretrained(self.embedding.weight.detach(), freeze=False)
        self.head.weight = self.embedding.weight


class _SoftPrompt(_Tied):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, self.config.vocabulary))

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows, and a mixture of all rows."""
        out: Tensor = super().embed(tokens) + self.prompt.softmax(-1) @ self.embedding.weight
        return out


class _Recomputing(_Tied):
    def embed(self, tokens: Tensor) -> Tensor:
        """Looks up again in backward."""
        out: Tensor = checkpoint(super().embed, tokens, use_reentrant=False)
        return out


class _LateRecomputing(_Tied):
    recomputes = False

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows, looked up again in backward or not."""
        embed = super().embed
        out: Tensor = checkpoint(embed, tokens, use_reentrant=False) if self.recomputes else embed(tokens)
        return out


class _InChunks(_Tied):
    is_reentrant = False

    def predict(self, x: Tensor) -> Tensor:
        """Chunks, recomputed in backward."""
        return torch.cat([checkpoint(self.head, part, use_reentrant=self.is_reentrant) for part in x.chunk(2, 1)], 1)


class _InReentrantChunks(_InChunks):
    is_reentrant = True


class _LateChunks(_InChunks):
    is_penalised = False  # see `_from_step_2`

    def predict(self, x: Tensor) -> Tensor:
        """Logits, in reentrant chunks from step 2 on."""
        self.is_reentrant = True
        out: Tensor = super().predict(x) if self.is_penalised else self.head(x)
        return out


class _TwoHeads(_Tied):
    def predict(self, x: Tensor) -> Tensor:
        """Of the embedding's weight, and of the head, to which backward comes first."""
        second = F.linear(x.tanh(), self.embedding.weight)
        out: Tensor = self.head(x) + 0.5 * second
        return out


class _Hooked(_Tied):
    def embed(self, tokens: Tensor) -> Tensor:
        """Rows, whose gradient has no part along the weight."""
        rows, weight = super().embed(tokens), self.embedding.weight.detach()
        if rows.requires_grad:
            rows.register_hook(lambda grad: grad - 0.1 * (grad @ weight.t()) @ weight)
        return rows


class _Penalised(_Tied):
    is_penalised = False

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows, all a little larger if the weight is large."""
        x = super().embed(tokens)
        return x + self.embedding.weight.square().mean() if self.is_penalised else x


class _EarlyExit(_Tied):
    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The head between the blocks, too."""
        first, *others = self.blocks
        x = first(x)
        x = x + 0.1 * self.head(x).logsumexp(-1, keepdim=True)
        for block in others:
            x = block(x)
        return x


def _two_passes(model: nn.Module, call: Call) -> Tensor:
    batches = [token_batch(call.step + 50 * k, call.rank) for k in range(2)]
    first, second = (next_token_loss(model(tokens), tokens) for tokens in batches)
    return call.backward(first + 0.5 * second)


def _two_backwards(model: nn.Module, call: Call) -> Tensor:
    lm_step(model, call._replace(step=call.step + 50))
    return lm_step(model, call)


def _saved_on_the_cpu(model: nn.Module, call: Call) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        tokens = token_batch(call.step, call.rank)
        loss = next_token_loss(model(tokens), tokens)
    return call.backward(loss)


def _kept_graph(model: nn.Module, call: Call) -> Tensor:
    tokens = token_batch(call.step, call.rank)
    loss = next_token_loss(model(tokens), tokens)
    call.backward(loss, retain_graph=True)
    return call.backward(0.5 * loss)


def _penalised(model: Any, call: Call) -> Tensor:
    tokens = token_batch(call.step, call.rank)
    return call.backward(next_token_loss(model(tokens), tokens) + model(tokens).square().mean())


class _Way(NamedTuple):
    """How to build and train; whether the gradient takes the weight's place from the second step on."""

    build: Callable[[], nn.Module]
    is_taken: bool
    step: Step = lm_step


WAYS = {
    "a head": _Way(_Tied, True),
    "rows looked up twice": _Way(_Twice, True),
    "rows looked up by a function": _Way(_ByFunction, True),
    "a head in chunks": _Way(_InChunks, True),
    "a head between the blocks": _Way(_EarlyExit, True),
    "two passes": _Way(_Tied, True, _two_passes),
    "two backwards": _Way(_Tied, True, _two_backwards),
    "a kept graph": _Way(_Tied, True, _kept_graph),
    "outputs of two passes": _Way(_Tied, True, _penalised),
    "inside other hooks": _Way(_Tied, True, _saved_on_the_cpu),
    "an embedding that scales by its weight": _Way(_Scaling, False),
    "a hook with a view of the weight": _Way(_Hooked, False),
    "a soft prompt": _Way(_SoftPrompt, False),
    "a recomputed embedding": _Way(_Recomputing, False),
    "chunks in reentrant checkpoints": _Way(_InReentrantChunks, False),
    "a second head": _Way(_TwoHeads, False),
}


@contextlib.contextmanager
def _counting() -> Iterator[list[int]]:
    """The number of gradients that took their weight's place."""
    counts, begin = [0], Reductions.write_early

    def counted(*args: Any) -> None:
        counts[0] += 1
        begin(*args)

    with mock.patch.object(Reductions, "write_early", counted):
        yield counts


@on_ranks(2)
@pytest.mark.parametrize("name", WAYS)
def test_tied_models_train_like_plain(context: RankContext, name: str) -> None:
    build, is_taken, step = WAYS[name]
    with _counting() as counts:
        assert_trains_like_plain(context, build, step, checked=(0, 2), steps=4)
    assert (counts[0] >= 3) is is_taken and (counts[0] == 0) is not is_taken


@on_ranks(2)
@pytest.mark.parametrize("settings", [{"weight_slots": "all"}, {"weight_slots": 3}])
def test_tied_models_train_like_plain_with_other_slots(context: RankContext, settings: dict[str, Any]) -> None:
    with _counting() as counts:
        assert_trains_like_plain(context, _Twice, lm_step, **settings)
    assert (counts[0] > 0) is (settings["weight_slots"] == 3)


def _from_step_2(model: Any, number: int) -> None:
    if number == 2:
        model.is_penalised = model.recomputes = True


@on_ranks(2)
@pytest.mark.parametrize("build", [_Penalised, _LateChunks])
def test_graphs_that_begin_to_need_the_weight_keep_it(context: RankContext, build: Any) -> None:
    with _counting() as counts:
        assert_trains_like_plain(context, build, lm_step, prepare=_from_step_2, steps=4)
    assert counts[0] == 1


@on_ranks(2)
def test_code_that_begins_to_recompute_with_the_weight_raises(context: RankContext) -> None:
    """With the alternative."""
    with pytest.raises(ShardingError, match=r"resident=\['head'\]"):
        assert_trains_like_plain(context, _LateRecomputing, lm_step, prepare=_from_step_2)
    assert_trains_like_plain(context, _LateRecomputing, lm_step, prepare=_from_step_2, resident=["head"])


@on_ranks(2)
def test_a_gradient_waits_for_ranks_that_still_read_the_weight(context: RankContext) -> None:
    """They read it in this rank's range of the slot. A second backward gathers the weight, and then runs the head."""
    model = sharded_model(_Tied, precision=BF16)
    write, pending = UnitGrads.write_early, []

    def write_early(grads: Any, *given: Any) -> None:
        before = len(grads.slot.weights.read.works)
        write(grads, *given)
        pending.append((before, len(grads.slot.weights.read.works)))

    with mock.patch.object(UnitGrads, "write_early", write_early):
        for step in range(3):
            _kept_graph(model, Call(step, context.rank, 2, 1.0))
    assert pending and all(before > 0 and after == 0 for before, after in pending)


def _freeze_at_2(model: Any, number: int) -> None:
    model.embedding.weight.requires_grad_(number != 2)


@on_ranks(2)
def test_a_frozen_weight_has_no_gradient_in_its_place(context: RankContext) -> None:
    with _counting() as counts:
        assert_trains_like_plain(context, _Tied, lm_step, prepare=_freeze_at_2, steps=4)
    assert counts[0] == 2


@on_ranks(2)
def test_events_order_a_gradient_in_the_place_of_its_weight(context: RankContext) -> None:
    with simulated_device() as device, checking_streams(device) as checker, _counting() as counts:
        model = sharded_model(_Twice, precision=BF16)
        with checker.of(model):
            for step in range(3):
                lm_step(model, Call(step, context.rank, 2, 1.0))
                model.zero_grad()
    assert counts[0] == 2
