"""The library's logger, and text that is safe to print."""

from __future__ import annotations

import logging

__all__ = ["log", "printable"]

log = logging.getLogger("streamshard")


def printable(text: str) -> str:
    """`text` in one line, without what a terminal may take for a command: as a file, or its name, may hold."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
