"""Who waits for long sees how far it is, on a terminal; elsewhere nothing is shown."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from streamshard.log import progress


class Bar:
    """Stands for tqdm's."""

    shown: list[Bar] = []

    def __init__(self, *, total: int, desc: str, **settings: Any) -> None:
        self.total, self.desc = total, desc
        self.done = 0
        self.shown.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *args: object) -> None:
        self.done = -self.done

    def update(self, count: int) -> None:
        """So much more."""
        self.done += count


@pytest.mark.parametrize(
    ("terminal", "installed", "shows"),
    [(True, True, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_progress_is_shown_by_the_first_rank_on_terminals_where_tqdm_is(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, installed: bool, shows: bool
) -> None:
    """And is told alike where it is not."""
    shown: list[Bar] = []
    monkeypatch.setattr(Bar, "shown", shown)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm") if installed else None)  # type: ignore[arg-type]
    if installed:
        monkeypatch.setattr(sys.modules["tqdm"], "tqdm", Bar, raising=False)
    with progress("saving", 30, shows=shows) as advance:
        advance(10)
        advance(20)
    if terminal and installed and shows:
        (bar,) = shown
        assert (bar.total, bar.desc, bar.done) == (30, "saving", -30)
    else:
        assert shown == []
