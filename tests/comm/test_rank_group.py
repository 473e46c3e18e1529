"""Errors of what ranks send and wait for: an object that cannot be sent is one error on all ranks, and ranks go on."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest

from streamshard import StreamShard
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CommunicationError, ShardingError
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


CASES: dict[str, tuple[Any, str]] = {
    "no pickle": (threading.Lock, "rank 1: TypeError: cannot pickle '_thread.lock'"),
    "an interrupt": (lambda: Raising(KeyboardInterrupt()), "rank 1: KeyboardInterrupt"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_an_object_that_one_rank_cannot_send_is_an_error_on_all_and_ranks_go_on(
    context: RankContext, case: str
) -> None:
    """It is pickled before the collective starts; an interrupted rank raises what interrupted it."""
    make, words = CASES[case]
    model = StreamShard(Stack())
    ranks = engine_inside(model).ranks
    value = make() if context.rank == 1 else "fine"
    if case == "an interrupt" and context.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            ranks.gather_objects(value)
    else:
        with pytest.raises(ShardingError, match=words):
            ranks.gather_objects(value)
    assert ranks.gather_objects(context.rank) == [0, 1]
    assert ranks.of_first(f"from {context.rank}") == "from 0"
    model.full_state_dict()


# -- guards of waits --------------------------------------------------------------------------------------------------


def _waits(ranks: RankGroup) -> list[str]:
    return [str(guard) for guard in ranks.recorder.log.waits]


def test_a_guard_can_be_entered_again_and_inside_itself() -> None:
    """A unit has one guard for each of its waits, for all steps."""
    ranks = RankGroup()
    gather, step = ranks.waiting("the gather of", "layers.0"), ranks.waiting("a step")
    for _ in range(2):
        with step, gather, step:
            assert _waits(ranks) == ["a step", "the gather of 'layers.0'", "a step"]
        assert _waits(ranks) == []


def test_an_error_leaves_no_wait_behind_and_closes_all_guards_of_the_ranks() -> None:
    """Each error names the guard, the first one also what went wrong."""
    ranks = RankGroup()
    outer, inner = ranks.waiting("a step"), ranks.waiting("the gather of", "layers.0")
    said = "the gather of 'layers.0' failed on rank 0 of 1: it broke"
    with pytest.raises(CommunicationError, match=said), outer, inner:
        raise RuntimeError("it broke")
    assert _waits(ranks) == []
    for guard in (outer, inner):
        with pytest.raises(CommunicationError, match=rf"{guard} is not possible any more: .*it broke"), guard:
            raise AssertionError("the body must not run")
    assert _waits(ranks) == []
