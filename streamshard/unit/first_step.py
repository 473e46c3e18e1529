"""The first step of an optimizer is watched: one that takes norms, sums or products of gradients needs whole ones."""

from __future__ import annotations

import inspect
from typing import NamedTuple, NoReturn

from torch.optim import Optimizer

from streamshard.errors import ShardingError

__all__ = ["FirstStep", "first_step", "refuse_optimizer", "refuse_stepping"]


class FirstStep(NamedTuple):
    """The first step of an optimizer of pieces, which is watched: whole parameters may be what it needs.

    Attributes:
        optimizer: that steps.
        closure: code that it calls and that is not its own: the user may clip gradients there.
    """

    optimizer: Optimizer
    closure: object


first_step: list[FirstStep] = []  # under way


def refuse_optimizer(name: str) -> NoReturn:
    """Raise: an optimizer of class `name` looks at more than one element at a time."""
    raise ShardingError(
        f"{name} looks at whole parameters, each rank holds pieces of them: use an element-wise optimizer (AdamW, SGD, "
        "..) with StreamShard"
    )


def refuse_stepping() -> None:
    """Raise if this is called from inside the first step of an optimizer; no hook tells of a step that has failed."""
    if not first_step:
        return
    step, frame = first_step[-1], inspect.currentframe()
    while frame is not None:
        if frame.f_code is step.closure:
            return
        if frame.f_locals.get("self") is step.optimizer:
            refuse_optimizer(type(step.optimizer).__name__)
        frame = frame.f_back
    first_step.clear()
