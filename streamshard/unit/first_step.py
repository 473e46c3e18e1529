"""The first step of an optimizer is watched: one that takes norms, sums or products of gradients needs whole ones.

What is watched are the gradients that it sees, and what it computes from them (`streamshard.unit.sharded_tensor`'s
StepTensor): those that its closure makes, and takes norms of, are others.
"""

from __future__ import annotations

from typing import NoReturn

from torch.optim import Optimizer

from streamshard.errors import ShardingError

__all__ = ["finish_watching", "refuse_in_first_step", "refuse_optimizer", "start_watching"]

_stepping: list[Optimizer] = []  # in their first step, or left by an exception


def start_watching(optimizer: Optimizer) -> None:
    """The first step of `optimizer` begins."""
    _stepping[:] = [optimizer]


def finish_watching() -> None:
    """A step is over."""
    _stepping.clear()


def refuse_optimizer(name: str) -> NoReturn:
    """Raise: an optimizer of class `name` looks at more than one element at a time."""
    raise ShardingError(
        f"{name} looks at whole parameters, each rank holds pieces of them: use an element-wise optimizer (AdamW, SGD, "
        "..) with StreamShard"
    )


def refuse_in_first_step() -> None:
    """Raise if a first step is under way: called for what steps alone get."""
    if _stepping:
        refuse_optimizer(type(_stepping[-1]).__name__)
