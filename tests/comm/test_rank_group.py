"""Errors of what ranks send and wait for: an object that cannot be sent is one error on all ranks, and ranks go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from streamshard import StreamShard, export_safetensors, save_checkpoint
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CommunicationError, RankMismatchError, ShardingError
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import engine_inside


class Raising:
    """Raises while it is pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        """Raise."""
        raise self.error


@on_ranks(2)
def test_an_object_that_one_rank_cannot_send_is_an_error_on_all_and_ranks_go_on(context: RankContext) -> None:
    """It is pickled before the collective starts; an interrupted rank raises what interrupted it."""
    model = StreamShard(Stack())
    ranks = engine_inside(model).ranks
    for value, own, words in (
        (threading.Lock(), ShardingError, "rank 1: TypeError: cannot pickle '_thread.lock'"),
        (Raising(KeyboardInterrupt()), KeyboardInterrupt, "rank 1: KeyboardInterrupt"),
    ):
        with pytest.raises(own if context.rank == 1 else ShardingError) as caught:
            ranks.gather_objects("count", value if context.rank == 1 else "fine")
        assert isinstance(caught.value, KeyboardInterrupt) or words in str(caught.value)
        assert ranks.gather_objects("count", context.rank) == [0, 1]
    assert ranks.of_first("tell", f"from {context.rank}") == "from 0"
    model.full_state_dict()


@on_ranks(3)
def test_ranks_that_come_to_different_exchanges_all_raise_and_go_on(context: RankContext, tmp_path: Path) -> None:
    """An export and a save, or two votes: no rank takes another exchange's message for an answer."""
    model: Any = StreamShard(Stack())
    ranks = engine_inside(model).ranks
    acts: list[tuple[Callable[[], object], Callable[[], object], str]] = [
        (
            lambda: export_safetensors(model, tmp_path),
            lambda: save_checkpoint(tmp_path, model),
            "to plan the export, rank 2 to begin a save",
        ),
        (
            lambda: ranks.gather_objects("compare", 1),
            lambda: ranks.of_first("choose", "a path"),
            "to compare, rank 2 to choose",
        ),
    ]
    for others, last, words in acts:
        with pytest.raises(RankMismatchError, match=f"different exchanges: rank 0 is about {words}"):
            last() if context.rank == 2 else others()
        assert ranks.gather_objects("count", context.rank) == [0, 1, 2]
    model.full_state_dict()


# -- guards of waits --------------------------------------------------------------------------------------------------


def _waits(ranks: RankGroup) -> list[str]:
    return [str(guard) for guard in ranks.recorder.log.waits]


def test_an_error_leaves_no_wait_behind_and_closes_all_guards_of_the_ranks() -> None:
    """Each error names the guard, the first one also what went wrong."""
    ranks = RankGroup()
    outer, inner = ranks.waiting("a step"), ranks.waiting("the gather of", "layers.0")
    for _ in range(2):  # a unit has one guard for each of its waits, for all steps
        with outer, inner, outer:
            assert _waits(ranks) == ["a step", "the gather of 'layers.0'", "a step"]
        assert _waits(ranks) == []
    said = "the gather of 'layers.0' failed on rank 0 of 1: it broke"
    with pytest.raises(CommunicationError, match=said), outer, inner:
        raise RuntimeError("it broke")
    assert _waits(ranks) == []
    for guard in (outer, inner):
        with pytest.raises(CommunicationError, match=rf"{guard} is not possible any more: .*it broke"), guard:
            raise AssertionError("the body must not run")
    assert _waits(ranks) == []
