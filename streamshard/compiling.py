"""Functions that are run as they are where torch.compile would trace them: what they do is no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip

__all__ = ["is_compiling", "skip", "untraced"]

_T = TypeVar("_T")


# skip: torch.compile breaks its graph at this function, runs it as it is and goes on compiling in what it calls.
@skip
def is_compiling() -> bool:
    """Whether what a function calls that is skipped would be compiled."""
    return get_eval_frame_callback() not in (None, False)


@skip
def untraced(function: Callable[..., _T], *args: Any) -> _T:
    """Call `function`, never compiled."""
    if get_eval_frame_callback() in (None, False):
        return function(*args)
    result: _T = torch._dynamo.disable(function)(*args)
    return result
