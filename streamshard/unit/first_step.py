"""The first step of an optimizer is watched: one that takes norms, sums or products of gradients needs whole ones.

Whether a step is under way is asked of the stack: torch calls a hook before each step and one after it, but none after
one that an exception has left, and what is watched must not go on to whatever takes a norm next. What a step calls and
is not its own, the user's closure, takes the watch off for as long as it runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import NoReturn

from torch.optim import Optimizer

from streamshard.errors import ShardingError

__all__ = ["finish_watching", "refuse_optimizer", "refuse_stepping", "start_watching", "unwatched"]

_stepping: list[Optimizer] = []  # in their first step, or left by an exception


def start_watching(optimizer: Optimizer) -> None:
    """The first step of `optimizer` begins."""
    _stepping[:] = [optimizer]


def finish_watching() -> None:
    """A step is over."""
    _stepping.clear()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What runs inside is no optimizer's doing, though called by one: a closure may clip gradients."""
    stepping, _stepping[:] = _stepping[:], []
    try:
        yield
    finally:
        _stepping[:] = stepping


def refuse_optimizer(name: str) -> NoReturn:
    """Raise: an optimizer of class `name` looks at more than one element at a time."""
    raise ShardingError(
        f"{name} looks at whole parameters, each rank holds pieces of them: use an element-wise optimizer (AdamW, SGD, "
        "..) with StreamShard"
    )


def refuse_stepping() -> None:
    """Raise if this is called from inside the first step of an optimizer."""
    if not _stepping:
        return
    optimizer, frame = _stepping[-1], inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            refuse_optimizer(type(optimizer).__name__)
        frame = frame.f_back
    _stepping.clear()
