"""The run on a GPU, ``benchmarks/gpu.py``: rehearsed on the CPU, and what it keeps when it is stopped."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.launched import Launched, run_file
from tests.ranks import forkserver

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, found as the benchmarks find it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_jobs")


def _job(jobs: Any, directory: Path, name: str, code: str, limit_s: float = 60.0) -> Any:
    """One that runs `code`, which writes to the path in ``sys.argv[1]``."""
    found = directory / f"{name}.json"
    command = [
        sys.executable,
        "-c",
        f"import pathlib, sys, time; found = pathlib.Path(sys.argv[1]); {code}",
        str(found),
    ]
    return jobs.Job(name=name, command=command, limit_s=limit_s, found=found, brief=lambda known: known["told"])


class _Forked:
    """In the place of ``subprocess.Popen``: forked from what has imported torch. What it says is appended to `log`."""

    def __init__(self, log: Path, command: list[str], *, env: dict[str, str], **_: object) -> None:
        assert command[0] == sys.executable
        self._process = forkserver().Process(target=_run_job, args=(command[1:], env, log))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a job", timeout or 0.0)


def _run_job(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setpgrp()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    with mock.patch.object(os, "execv", functools.partial(_launch, log)):
        _run_file(arguments, environment)


def _run_file(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    run_file(arguments)


def _launch(log: Path, _: str, command: list[str]) -> None:
    """In the place of torchrun: ranks that are forked as well."""
    count = command.index("--nproc-per-node") + 1
    arguments, start = command[count + 1 :], multiprocessing.get_context("fork")
    ranks = Launched(int(command[count]), log.parent, _run_file, arguments, dict(os.environ), start=start)
    for code, told in ranks.end():
        print(told, flush=True)
        assert code == 0
    sys.exit()


@pytest.mark.ranks
def test_a_rehearsal_finds_everything_that_is_asked_of_a_gpu(
    jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Systems are compared, a step is drawn: every field of the results is there. What compares and draws is forked."""
    stages = ["llama", "profile.8", "registered"]
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(subprocess, "Popen", functools.partial(_Forked, tmp_path / "output.log"))
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--out", str(tmp_path), "--stages", *stages])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    log, told = (tmp_path / "output.log").read_text(), capsys.readouterr().out
    assert ended.value.code == 0, told + log
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_rehearsal"] is True
    assert {"commit", "command", "date", "device", "torch"} <= set(results["environment"])
    assert list(results["jobs"]) == stages
    for name, job in results["jobs"].items():
        assert (job["exit_code"], job["timed_out"]) == (0, False), job
        assert job["brief"] in told
        assert f"=== {name}: {job['command']}" in log
    found = {name: job["found"] for name, job in results["jobs"].items()}
    assert found["llama"]["not_run"] == {}
    for system in ("local", "ddp", "fsdp2", "streamshard"):
        assert {"step_ms", "memory", "host_us_per_layer"} <= set(found["llama"]["systems"][system])
    assert {target["job"] for target in results["targets"]} == {"llama"}
    assert 0.0 <= found["profile.8"]["exposed_all_gather_s"] <= found["profile.8"]["step_s"]
    assert found["registered"]["systems"]["streamshard"]["rounds_ms"]
    assert "cannot register memory" in found["registered"]["not_run"]["registered"]
    assert json.loads((tmp_path / "timeline-8.json").read_text())["traceEvents"]


def test_a_job_out_of_time_is_stopped_and_its_results_are_kept(jobs: Any, tmp_path: Path) -> None:
    """The next one runs; results say what happened."""
    slow = _job(jobs, tmp_path, "a.slow", 'found.write_text(\'{"told": "half"}\'); time.sleep(600)', limit_s=1.0)
    quick = _job(jobs, tmp_path, "a.quick", "print('words'); found.write_text('{\"told\": \"all\"}')")
    silent = _job(jobs, tmp_path, "a.silent", "sys.exit(3)")
    assert not jobs.run_jobs([slow, quick, silent], tmp_path / "out", {"benchmark": "test"}, 100.0)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    ended = {name: (job["timed_out"], job["exit_code"], job["brief"]) for name, job in results["jobs"].items()}
    assert ended == {
        "a.slow": (True, -15, "half"),
        "a.quick": (False, 0, "all"),
        "a.silent": (False, 3, "found nothing"),
    }
    assert "words" in (tmp_path / "out" / "output.log").read_text()
