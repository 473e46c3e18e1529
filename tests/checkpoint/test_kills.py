"""A checkpoint is whole or absent, whoever is killed when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.kills import kill_often


@pytest.mark.ranks
def test_runs_that_are_killed_while_saving_lose_nothing_they_had_saved(tmp_path: Path) -> None:
    """Ranks of them or all, between any two changes to the file system or whenever, again and again."""
    counts = kill_often(tmp_path, 10, [2, 3], seed=4)
    assert counts.kills >= 10
    assert counts.saves > 0
