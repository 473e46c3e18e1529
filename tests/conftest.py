"""Fixtures and settings shared by all tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.gpu import IS_PLAYED_CUDA, has_gpu
from tests.played_cuda import library
from tests.ranks import RankPool, open_pool

with contextlib.suppress(ImportError):  # a machine with a GPU may lack it, and tests for GPUs need it not
    from hypothesis import settings

    # Examples are the same on every run, and none fails because a machine was slow.
    settings.register_profile("streamshard", derandomize=True, deadline=None, database=None, max_examples=20)
    settings.load_profile("streamshard")
os.fsync = lambda descriptor: None  # as in ranks: see tests/fork_origin.py


def pytest_addoption(parser: pytest.Parser) -> None:
    """Ranks that share one GPU are another matter than one that has it for itself."""
    parser.addoption("--world-sizes", metavar="N,..", help="run tests on ranks at these numbers of ranks only")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in two processes, with rank processes of their own: two ranks leave much of two cores idle.

    `-n 0` runs it in one; so does whoever names tests, debugs, or wants to see what they print.
    """
    option = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not option.collectonly
    is_watched = option.usepdb or option.trace or option.capture == "no"
    has_workers = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if has_workers and option.numprocesses is None and is_whole and not is_watched and (os.cpu_count() or 1) > 1:
        option.numprocesses, option.dist = 2, "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Compile the device that plays "cuda:0" before there are ranks, which would all compile it."""
    if IS_PLAYED_CUDA and not library().exists():
        code = "from tests.played_cuda import build; build()"  # this process must not load the device itself
        subprocess.run([sys.executable, "-c", code], cwd=config.rootpath, check=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs rank processes by what it asks for; leave out the numbers of ranks that are not wanted."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
    wanted = config.getoption("--world-sizes")
    if wanted is not None:
        sizes = {int(size) for size in wanted.split(",")}
        others = [item for item in items if _world_size(item) not in sizes]
        config.hook.pytest_deselected(items=others)
        # By size: ranks that are left over wait in groups of before, whose end not every backend can bear alone.
        items[:] = [item for size in sorted(sizes) for item in items if _world_size(item) == size]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that are marked ``gpu`` where there is none; one that is played is one unless the mark refuses it."""
    mark = item.get_closest_marker("gpu")
    if mark is not None and not has_gpu(may_be_played=mark.kwargs.get("may_be_played", True)):
        pytest.skip("no CUDA device: this test needs a GPU")


def _world_size(item: pytest.Item) -> int | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("world_size")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's rank processes: ``ranks(n).run(function, *args)``."""
    with open_pool() as pool:
        yield pool
