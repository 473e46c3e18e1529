"""An exception in the middle of a step reaches the user as it is, and the next step is right again."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from streamshard.core import backward
from streamshard.errors import ShardingError, log
from tests.models import TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import (
    Stop,
    Trouble,
    adamw,
    assert_trains_like_plain,
    case,
    failing,
    lm_step,
    no_sync,
    sharded_model,
)

_small = functools.partial(TinyLM, TinyConfig(depth=3))
# By name: the module whose backward or forward fails, how, and whether in backward.
IN_BACKWARD: dict[str, tuple[str, type[BaseException], bool]] = {
    "at the start of backward": ("head", Trouble, True),
    "in the middle of backward": ("blocks.1", Trouble, True),
    "interrupted in backward": ("blocks.2", Stop, True),
}
TROUBLES: dict[str, tuple[str, type[BaseException], bool]] = {
    **IN_BACKWARD,
    "inside a block": ("blocks.1.up", Trouble, False),
    "interrupted in forward": ("blocks.2", Stop, False),
    "at the end of backward": ("embedding", Trouble, True),
    "in evaluation": ("blocks.2", Trouble, False),
}


def _fail(model: nn.Module, call: Call, where: str) -> None:
    name, error, in_backward = TROUBLES[where]
    fails = failing(model.get_submodule(name), error, backward=in_backward)
    with pytest.raises(error), fails, torch.set_grad_enabled(where != "in evaluation"):
        lm_step(model, call._replace(step=call.step + 70))


@on_ranks(1, 2)
def test_after_an_exception_the_next_step_is_right(context: RankContext) -> None:
    """On all ranks, from the first step on. Meanwhile layers hold the shards, which the user may edit or freeze."""
    names = list(TROUBLES)

    def step(model: nn.Module, call: Call) -> Tensor:
        if isinstance(model, StreamShard):
            _fail(model, call, names[call.step])
            held = {param for module in model.modules() for param in module._parameters.values()} - {None}
            assert held == set(model.parameters())
            model.zero_grad()
        return lm_step(model, call)

    every = range(len(names))
    assert_trains_like_plain(context, _small, step, steps=len(names), checked=every, optimizer=adamw)


def _fail_and_clear(model: nn.Module, call: Call, where: str) -> None:
    """The list of parameters was made before: the model hears nothing until its next forward."""
    params = list(model.parameters())
    _fail(model, call, where)
    for param in params:
        param.grad = None


@on_ranks(1, 2)
def test_after_an_exception_the_optimizer_alone_may_clear_gradients(context: RankContext) -> None:
    """Then a backward of an earlier forward is right, although no forward comes between."""
    names = list(IN_BACKWARD)

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        loss = next_token_loss(model(tokens), tokens)
        if isinstance(model, StreamShard):
            _fail_and_clear(model, call, names[call.step])
        return call.backward(loss)

    assert_trains_like_plain(context, _small, step, steps=len(names), checked=(0, 2))


class _Penalised(TinyLM):
    """Each forward leaves a penalty, whose backward reaches a parameter before any node of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(4))

    def forward(self, tokens: Tensor) -> Tensor:
        self.penalty = self.offset.sum()
        return super().forward(tokens)


@on_ranks(1, 2)
def test_a_backward_that_begins_with_a_small_gradient_keeps_it(context: RankContext) -> None:
    """Behind a backward that has ended, and behind one that an exception has ended."""

    def step(model: Any, call: Call) -> Tensor:
        model(token_batch(call.step, call.rank))
        penalty: Tensor = model.penalty
        if isinstance(model, StreamShard) and call.step == 1:
            _fail_and_clear(model, call, "in the middle of backward")
        return call.backward(penalty)

    assert_trains_like_plain(context, _Penalised, step)


@on_ranks()
@pytest.mark.parametrize(("world_size", "slots"), [(1, {"weight_slots": 2}), (2, {"grad_slots": "all"})])
def test_when_a_backward_fails_earlier_gradients_are_discarded(context: RankContext, slots: dict[str, Any]) -> None:
    """With a warning; gradients that wait inside `no_sync` too, whether the user clears them or not."""
    for waits, clears in ((False, False), (True, True)):

        def step(model: nn.Module, call: Call, waits: bool = waits, clears: bool = clears) -> Tensor:
            if isinstance(model, StreamShard):
                params = list(model.parameters())
                with no_sync(model, waits):
                    lm_step(model, call._replace(step=call.step + 30))
                    _fail(model, call, "in the middle of backward")
                for param in params if clears else ():
                    param.grad = None
            return lm_step(model, call)

        with case((waits, clears)), mock.patch.object(log, "warning") as warned:
            assert_trains_like_plain(context, _small, step, **slots)
        assert "all gradients of the model are discarded" in warned.call_args.args[0]


@on_ranks(2)
def test_the_users_exception_is_raised_unchanged(context: RankContext) -> None:
    """Torch's error for a bad input, not one of the engine's; an exception inside `no_sync` leaves the context."""
    model = sharded_model(TinyLM)
    with pytest.raises(IndexError):
        model(torch.full((2, 6), 10_000))
    with pytest.raises(TypeError, match="forward"):
        model()
    with pytest.raises(Trouble), model.no_sync():
        raise Trouble
    lm_step(model, context.call(0))
    assert model.head.weight.grad.norm() > 0


@on_ranks(2)
def test_another_thread_cannot_use_the_model_during_a_backward(context: RankContext) -> None:
    """Its call raises, and the backward goes on."""
    model = sharded_model()
    raised: list[str] = []

    def call_aside(call: Callable[[], object]) -> None:
        try:
            call()
        except ShardingError as error:
            raised.append(str(error))

    def ask(grad: Tensor) -> None:
        for call in (model.state_dict, lambda: model(vector_batch(1, 0))):
            thread = threading.Thread(target=call_aside, args=(call,))
            thread.start()
            thread.join()

    model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(ask) and None)
    with mock.patch.object(backward, "_LETS_GO_WITHIN_S", 0.05):
        model(vector_batch(0, context.rank)).square().mean().backward()
    assert "state_dict() of" in raised[0] and "a forward begins in one thread" in raised[1]
    assert all(param.grad is not None for param in model.parameters())
