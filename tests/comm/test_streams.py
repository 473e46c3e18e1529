"""What a rank waits for: guards say it, one inside the other."""

from __future__ import annotations

import pytest

from streamshard.comm.ranks import RankGroup
from streamshard.errors import CommunicationError


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
