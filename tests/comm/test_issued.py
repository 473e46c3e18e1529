"""Ranks that do not do the same are told so, all of them, soon, in the same words, whatever carries their messages."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import streamshard.comm.watch as watch
from streamshard import StreamShard
from streamshard.comm.issued import Kind, Log, describe_difference
from streamshard.errors import CommunicationError
from streamshard.inspect import engine_inside
from tests.models import vector_batch
from tests.ranks import RankContext, on_ranks
from tests.scenarios import BF16, RoutedStack, over_sockets

TRANSPORTS = ["shared memory", "sockets"]


def _model(over: str) -> Any:
    torch.manual_seed(1)
    with over_sockets() if over == "sockets" else contextlib.nullcontext():
        return StreamShard(RoutedStack(), precision=BF16)


def _another_order(model: Any, rank: int) -> None:
    if rank == 1:
        model.route = [4, 3, 2, 1, 0]
    for step in range(3):
        model(vector_batch(step, rank)).sum().backward()


def _a_layer_again(model: Any, rank: int) -> None:
    model(vector_batch(0, rank)).sum().backward()
    model.route = [0, 1, 2, 0, 3, 4] if rank == 1 else [0, 1, 2, 3, 4]
    for step in range(3):
        model(vector_batch(step, rank)).sum().backward()


def _a_forward_too_many(model: Any, rank: int) -> None:
    for step in range(3):
        out = model(vector_batch(step, rank))
        if step == 1 and rank == 1:
            with torch.no_grad():
                model(vector_batch(step, rank))
        out.sum().backward()


def _no_backward(model: Any, rank: int) -> None:
    for step in range(3):
        out = model(vector_batch(step, rank))
        if not (step == 1 and rank == 0):
            out.sum().backward()


def _weights_on_one_rank(model: Any, rank: int) -> None:
    for step in range(3):
        model(vector_batch(step, rank)).sum().backward()
        if step == 1 and rank == 0:
            model.full_state_dict()


def _a_norm_on_one_rank(model: Any, rank: int) -> None:
    for step in range(3):
        model(vector_batch(step, rank)).sum().backward()
        if rank == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


WAYS: dict[str, Callable[[Any, int], None]] = {
    "layers in another order": _another_order,
    "a layer run again": _a_layer_again,
    "a forward too many": _a_forward_too_many,
    "a backward left out": _no_backward,
    "weights collected on one rank": _weights_on_one_rank,
    "a norm on one rank": _a_norm_on_one_rank,
}


def _caught(context: RankContext, over: str, way: str) -> str:
    """What this rank was told."""
    model = _model(over)
    with mock.patch.object(watch, "_PATIENCE_S", 0.2), pytest.raises(CommunicationError, match="Join") as caught:
        WAYS[way](model, context.rank)
    with pytest.raises(CommunicationError, match="is not possible any more: .*ranks do not do the same"):
        model(vector_batch(0, context.rank))
    return str(caught.value).partition("ranks do not do the same: ")[2].partition(". All of them")[0]


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("over", TRANSPORTS)
def test_ranks_that_do_not_do_the_same_are_told_what_each_does(ranks: Any, over: str, way: str) -> None:
    """In the same words on both, long before the process group's timeout; afterwards nothing waits any more."""
    first, second = ranks(2).run(_caught, over, way)
    assert first == second
    assert "rank 0 " in first
    assert ", rank 1 " in first


@pytest.mark.parametrize("over", TRANSPORTS)
def test_four_ranks_of_which_one_does_something_else_all_end(ranks: Any, over: str) -> None:
    """Also those that were waiting for one that does the same as they."""
    told = ranks(4).run(_caught, over, "layers in another order")
    assert all("rank 1 " in story for story in told)


@on_ranks(2)
@pytest.mark.parametrize("over", TRANSPORTS)
def test_a_rank_that_is_only_late_is_waited_for(context: RankContext, over: str) -> None:
    """However long: it may write a checkpoint. Looked at many times here, in the middle of everything."""
    model = _model(over)
    looked = []
    transport = engine_inside(model).ranks.transport
    find = transport.find_difference

    def look() -> str | None:
        looked.append(found := find())
        return found

    transport.find_difference = look  # type: ignore[method-assign]
    with mock.patch.object(watch, "_PATIENCE_S", 0.02):
        model.layers[1].register_forward_hook(lambda *_: time.sleep(0.3 * context.rank))
        for step in range(3):
            model(vector_batch(step, context.rank)).sum().backward()
    assert set(looked) <= {None}


@on_ranks(2)
@pytest.mark.parametrize("over", TRANSPORTS)
def test_an_error_in_the_middle_of_an_exchange_ends_the_others_wait(context: RankContext, over: str) -> None:
    """Ctrl-C on one rank: the others hear of it."""
    model = _model(over)
    ranks = engine_inside(model).ranks
    if context.rank == 0:
        with pytest.raises(KeyboardInterrupt), ranks.guard("something"):
            raise KeyboardInterrupt
    else:
        with pytest.raises(CommunicationError, match="losed|reset by peer"):  # not: timed out
            ranks.gather_objects(None)
    with pytest.raises(CommunicationError, match="not possible any more"):
        ranks.gather_objects(None)


# -- logs ---------------------------------------------------------------------------------------------------------

NAMES = ("the edge unit", "layers.0")


def _log(*entries: tuple[Kind, int]) -> Log:
    log = Log()
    for kind, tag in entries:
        log.add(kind, tag)
    return log


def test_the_first_difference_is_named_and_units_by_their_names() -> None:
    """What comes after it follows from it."""
    same = [(Kind.FORWARD, 0), (Kind.GATHER, 0)]
    ours = _log(*same, (Kind.GATHER, 1), (Kind.MEETING, 0))
    theirs = _log(*same, (Kind.REDUCE, 1), (Kind.SUM, 0))
    assert ours.digest != theirs.digest
    assert describe_difference([ours.words, theirs.words], NAMES) == (
        "ranks do not do the same: rank 0 gathers 'layers.0', rank 1 reduces the gradients of 'layers.0'"
    )


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_words(kind: Kind) -> None:
    """Beside another one."""
    other = Kind.SUM if kind is not Kind.SUM else Kind.FORWARD
    found = describe_difference([_log((kind, 2)).words, None, _log((other, 1)).words], NAMES)
    assert found is not None
    assert found.startswith("ranks do not do the same: rank 0 ")
    assert ", rank 2 " in found


def test_what_only_one_rank_called_is_named() -> None:
    """A checkpoint saved, or weights collected, behind ``if rank == 0:``."""
    found = describe_difference([_log((Kind.MEETING, 0)).words, _log((Kind.GATHER_FULL, 1)).words], NAMES)
    assert found is not None
    assert re.search(r"rank 0 .*save_checkpoint.*rank 1 .*'layers\.0' .*full_state_dict", found)


def test_a_rank_that_is_behind_does_the_same() -> None:
    """It may still come."""
    entries = [(Kind.FORWARD, 0), (Kind.GATHER, 0), (Kind.GATHER, 1)]
    assert describe_difference([_log(*entries).words, _log(*entries[:1]).words, _log().words], NAMES) is None
    assert describe_difference([_log(*entries).words], NAMES) is None


def test_of_the_rest_two_that_differ_are_found_although_this_rank_is_behind_both() -> None:
    """It waits for them in vain."""
    logs = [_log(), _log((Kind.GATHER, 0)), _log((Kind.GATHER, 1))]
    assert describe_difference([log.words for log in logs], NAMES) is not None


def test_what_was_overwritten_is_not_compared() -> None:
    """A rank may be ahead by more than a log holds: that is no difference, and a real one is still found."""
    entries = [(Kind.GATHER, number % 7) for number in range(3000)]
    ahead, behind = _log(*entries), _log(*entries[:1500])
    assert describe_difference([ahead.words, behind.words], NAMES) is None
    assert ahead.digest == _log(*entries).digest
    other = _log(*entries[:2900], (Kind.REDUCE, 1))
    assert describe_difference([ahead.words, other.words], NAMES) is not None
    assert _log(*entries[1:]).digest != ahead.digest
