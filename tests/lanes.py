"""Lanes: a long run of tests goes on in several processes at the same time. A pytest plugin, which `conftest` names.

A test on two ranks leaves much of two cores idle: its ranks wait for each other, and pytest for them. So pytest forks
once it knows all tests; each lane has rank processes of its own, takes some tests of a module at a time, and sends its
reports to the process it was forked from, which tells them as if they were its own.

    python -m pytest --lanes 1      # all in this process, one after the other, in their order

Short runs have one lane, and so has a debugger, or who wants to see what tests print.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

__all__: list[str] = []

LANES = 2
FEWEST = 400  # tests that are worth a second set of rank processes
AT_A_TIME = 12  # tests of one module; so few that no lane is still busy for long when the other has nothing left to do


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many."""
    parser.addoption("--lanes", type=int, metavar="N", help=f"processes that run tests; {LANES} for {FEWEST} or more")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In place of pytest's own loop, which does the same in this process."""
    options = session.config.option
    wanted = options.lanes or (LANES if len(session.items) >= FEWEST and (os.cpu_count() or 1) >= LANES else 1)
    is_watched = options.usepdb or options.trace or options.capture == "no"
    if wanted < 2 or is_watched or options.collectonly or session.testsfailed or not hasattr(os, "fork"):
        return None
    chunks = list(_chunks(session.items))
    reading, writing = os.pipe()
    for number in range(len(chunks)):
        os.write(writing, number.to_bytes(_NUMBER_BYTES, "little"))
    os.close(writing)  # who reads on finds the end
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all lanes
    lanes: dict[Connection, int] = {}
    try:
        for _ in range(wanted):
            ours, theirs = Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads, which have nothing to do yet
                process = os.fork()
            if process == 0:
                _run_lane(session, chunks, reading, theirs)
            theirs.close()
            lanes[ours] = process
        _tell(session, lanes)
    finally:
        os.close(reading)
        for process in lanes.values():
            os.kill(process, signal.SIGINT)
            os.waitpid(process, 0)
    return True


_NUMBER_BYTES = 4


def _chunks(items: Sequence[pytest.Item]) -> Iterator[list[pytest.Item]]:
    for _, of_module in itertools.groupby(items, lambda item: item.path):
        left = list(of_module)
        while left:
            yield left[:AT_A_TIME]
            del left[:AT_A_TIME]


# ---------------------------------------------------------------------------------------------- in pytest's process


def _tell(session: pytest.Session, lanes: dict[Connection, int]) -> None:
    """Pass reports on until every lane has come to its end."""
    hook = session.config.hook
    under_way = dict.fromkeys(lanes, "the first test")
    while under_way:
        for lane in wait(list(under_way)):
            assert isinstance(lane, Connection)
            try:
                kind, what = lane.recv()
            except EOFError:
                raise RuntimeError(f"a lane died at or after {under_way[lane]}") from None
            if kind == "begins":
                under_way[lane] = what
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=what)
                hook.pytest_runtest_logreport(report=report)
            elif kind == "fails":
                raise RuntimeError(f"a lane failed in {under_way[lane]}\n{what}")
            else:
                del under_way[lane]
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


# ---------------------------------------------------------------------------------------------- in a lane


class _Reports:
    """Sends what happens, in the place of what would print it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._tw = create_terminal_writer(config, io.StringIO())  # where plugins look for one

    def send(self, kind: str, what: Any = None) -> None:
        self._connection.send((kind, what))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _run_lane(
    session: pytest.Session, chunks: list[list[pytest.Item]], reading: int, connection: Connection
) -> NoReturn:
    """Run chunks until there are no more, and end the process."""
    reports = _Reports(session.config, connection)
    try:
        session.config.pluginmanager.unregister(name="terminalreporter")
        session.config.pluginmanager.register(reports, "terminalreporter")
        left = deque[pytest.Item]()
        while _refill(left, chunks, reading):
            item = left.popleft()
            _refill(left, chunks, reading)  # what fixtures have made stays for the next test, if there is one
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=left[0] if left else None)
        reports.send("ends")
    except BaseException:
        with contextlib.suppress(BaseException):
            reports.send("fails", traceback.format_exc())
            session._setupstate.teardown_exact(None)  # ends the rank processes
    finally:
        os._exit(0)


def _refill(left: deque[pytest.Item], chunks: list[list[pytest.Item]], reading: int) -> bool:
    """Take the next chunk that no lane has if nothing is left; whether something is."""
    if not left and (number := os.read(reading, _NUMBER_BYTES)):
        left.extend(chunks[int.from_bytes(number, "little")])
    return bool(left)
