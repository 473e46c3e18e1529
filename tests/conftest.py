"""Fixtures and settings shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPool, open_pool

# Examples are the same on every run, and none fails because a machine was slow.
settings.register_profile("streamshard", derandomize=True, deadline=None, database=None, max_examples=20)
settings.load_profile("streamshard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs rank processes by what it asks for."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's rank processes: ``ranks(n).run(function, *args)``."""
    with open_pool() as pool:
        yield pool
