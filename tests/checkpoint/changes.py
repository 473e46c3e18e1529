"""What happens at one of the changes to the file system that a piece of code makes, counted from 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

CHANGES = {"open", "ftruncate", "pwrite", "fsync", "link", "replace", "rename", "unlink", "mkdir", "rmdir"}


@contextlib.contextmanager
def at_change(
    number: int, act: Callable[[Callable[[], Any]], Any], calls: Collection[str] = CHANGES, *, lasting: bool = False
) -> Iterator[Callable[[], bool]]:
    """Inside, ``act(real_call)`` takes the place of the change with this number, from 0, or of `lasting` ones.

    Only `calls` count, and opening a file that is there does not.

    Yields:
        Whether there have been that many.
    """
    count = 0

    def watch(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            count += 1
            if count - 1 == number or lasting and count > number:
                return act(lambda: real(*args, **kwargs))
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, watch(getattr(os, name), name))
        yield lambda: count > number
