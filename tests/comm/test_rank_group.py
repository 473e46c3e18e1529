"""An object that cannot be sent is the same error on all ranks, and ranks go on."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest

from streamshard import StreamShard
from streamshard.errors import ShardingError
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
