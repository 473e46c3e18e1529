"""What is worth telling people while it happens: the standard ``logging``, and progress bars on terminals."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["log", "printable", "progress"]

log = logging.getLogger("streamshard")


def printable(text: str) -> str:
    """`text` in one line, without what a terminal may take for a command: as a file, or its name, may hold."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@contextlib.contextmanager
def progress(what: str, total_bytes: int, *, shows: bool) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, if that is a terminal and tqdm is installed. Gives a function to be told of bytes done.

    Args:
        what: is being done.
        total_bytes: until it is done.
        shows: False: nothing is shown (on ranks other than the first).
    """
    bars = _tqdm() if shows and sys.stderr.isatty() else None
    if bars is None:
        yield lambda count: None
        return
    with bars(total=total_bytes, desc=printable(what), unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
