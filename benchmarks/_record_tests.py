"""A plugin of pytest that writes each test's outcome as it comes, so that a run that is stopped has told what it knows.

python -m pytest -p _record_tests --record outcomes.jsonl ...      # with this directory on PYTHONPATH
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

LONGEST_STORY = 6000  # characters of a failure, from its end: the whole is in the output


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to."""
    parser.addoption("--record", type=Path, required=True, help="append a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    """The file is there from the beginning: an empty one says that nothing has ended yet."""
    if hasattr(config, "workerinput"):  # of pytest-xdist, whose controller hears of all tests
        return
    path = config.getoption("--record")
    path.touch()
    config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """What could not even be imported."""
        if report.failed:
            self._write(report.nodeid, "failed", 0.0, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each test once, unless its teardown fails as well."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.duration, report.longreprtext)

    def _write(self, test: str, outcome: str, seconds: float, story: str) -> None:
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "story": story[-LONGEST_STORY:]}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
