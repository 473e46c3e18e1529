"""The run on a GPU, ``benchmarks/gpu.py``: rehearsed on the CPU, and what it keeps when it is stopped."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
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
OF_A_SYSTEM = {
    "backward_ms",
    "forward_ms",
    "host_ratio_to_fsdp2",
    "host_ratio_to_local",
    "host_us_per_layer",
    "last_loss",
    "memory",
    "ratio_to_fsdp2",
    "ratio_to_local",
    "rounds_ms",
    "steady_step",
    "step_ms",
    "tflops",
    "tokens_per_s",
    "update_ms",
    "utilization_of_data_sheet",
    "utilization_of_matmul",
}
OF_A_STEADY_STEP = {
    "allocations",
    "device_allocations",
    "runtime_calls",
    "synchronizations",
    "synchronized_at",
    "synchronizing_calls",
}


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
        """As there."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """As there."""
        return self._process.exitcode

    def wait(self, timeout: float | None) -> None:
        """As there."""
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
    ranks = Launched(int(command[count]), log.parent, _run_file, command[count + 1 :], dict(os.environ))
    for code, told in ranks.end():
        print(told, flush=True)
        assert code == 0
    sys.exit()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_rehearsal_finds_everything_that_is_asked_of_a_gpu(
    jobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests play a GPU, systems are compared, a step is drawn: every field of the results is there.

    What compares and draws is forked; the first job is a process as on a GPU, started by the command.
    """
    stages = ["tests.one", "llama", "small.many", "profile.8"]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", "--out", str(tmp_path), "--stages", stages[0]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr + (tmp_path / "output.log").read_text()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    known = {job.name: job for job in importlib.import_module("gpu")._jobs(scratch, tmp_path, rehearses=True)}
    with mock.patch.object(subprocess, "Popen", functools.partial(_Forked, tmp_path / "output.log")):
        is_well = jobs.run_jobs([known[name] for name in stages[1:]], tmp_path, {"is_rehearsal": True}, 600.0)
    log, told = (tmp_path / "output.log").read_text(), ended.stdout + capsys.readouterr().out
    assert is_well, told + log
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["is_rehearsal"] is True
    assert {"commit", "command", "date", "device", "torch"} <= set(results["environment"])
    assert list(results["jobs"]) == stages
    for name, job in results["jobs"].items():
        assert (job["exit_code"], job["timed_out"]) == (0, False), job
        assert job["brief"] in told
        assert f"=== {name}: {job['command']}" in log
    found = {name: job["found"] for name, job in results["jobs"].items()}

    assert (found["tests.one"]["passed"], found["tests.one"]["failed"], found["tests.one"]["skipped"]) == (2, 0, 0)
    assert {test["outcome"] for test in found["tests.one"]["tests"]} == {"passed"}

    for name, systems in (("llama", ["local", "ddp", "fsdp2", "streamshard"]), ("small.many", ["local", "fsdp2"])):
        assert found[name]["not_run"] == {}
        assert {"parameters", "flops_per_token", "rows", "tokens", "one_after_the_other"} <= set(found[name]["config"])
        assert {"matmul_tflops", "copy_gb_per_s", "data_sheet_tflops"} <= set(found[name]["machine"])
        for system in systems:
            entry = found[name]["systems"][system]
            assert set(entry) - {"host_ratio_to_fsdp2_beyond_local"} == OF_A_SYSTEM
            assert set(entry["steady_step"]) == OF_A_STEADY_STEP
            assert set(entry["memory"]) == {"building_peak_bytes", "held_bytes", "step_peak_bytes"}
            # What is gathered of ranks that are pretended is whatever is in memory.
            assert math.isfinite(entry["last_loss"]) or (name, system) == ("small.many", "fsdp2")
    assert found["llama"]["config"]["ranks"] == 1
    assert found["small.many"]["config"]["ranks"] == 8
    targets = [(target["job"], target["target"].split(",")[0]) for target in results["targets"]]
    steady = ["synchronizations", "synchronizing_calls", "device_allocations", "allocations"]
    assert targets == [
        ("llama", "step time"),
        ("llama", "peak memory"),
        *(("llama", f"{what} of a steady step beyond local's") for what in steady),
        ("small.many", "host time"),
    ]

    of_step = {
        "step_ms",
        "compute_ms",
        "gather_ms",
        "gather_beside_compute_ms",
        "reduce_ms",
        "reduce_beside_compute_ms",
    }
    assert of_step <= set(found["profile.8"])
    assert found["profile.8"]["config"]["ranks"] == 2
    assert 0.0 <= found["profile.8"]["gather_beside_compute_ms"] <= found["profile.8"]["gather_ms"]
    assert json.loads((tmp_path / "timeline-8.json").read_text())["traceEvents"]


def test_every_job_has_its_place_in_the_plan_for_half_an_hour() -> None:
    """The calls leave room for a machine to start, and each part of the run is in one of them."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py")]
    plan = subprocess.run([*command, "--plan"], capture_output=True, text=True, check=True).stdout.splitlines()
    calls = [line.split() for line in plan if line.startswith("python")]
    planned = [name for call in calls for name in call[call.index("--stages") + 1 :]]
    assert len(planned) == len(set(planned))
    within = [float(call[call.index("--within") + 1]) for call in calls]
    assert max(within) <= 560.0
    assert sum(within) <= 1620.0
    unknown = subprocess.run([*command, "--stages", "no such stage"], capture_output=True, text=True)
    assert unknown.returncode != 0
    known = set(unknown.stderr.split("wanted some of ")[1].split())
    jobs = {name for name in known if not any(other.startswith(f"{name}.") for other in known)}
    assert set(planned) == jobs


def test_only_tests_for_cpus_see_no_gpu(jobs: Any, tmp_path: Path) -> None:
    """Models that they make would move to one, away from inputs; ranks would ask for one each."""
    made = importlib.import_module("gpu")._jobs(tmp_path, tmp_path, rehearses=False)
    blind = {job.name for job in made if job.environment.get("CUDA_VISIBLE_DEVICES") == ""}
    assert blind == {"job.suite"}


def test_a_job_that_is_out_of_time_is_ended_and_what_it_found_is_kept(jobs: Any, tmp_path: Path) -> None:
    """The next one runs; results say what happened."""
    slow = _job(jobs, tmp_path, "a.slow", 'found.write_text(\'{"told": "half"}\'); time.sleep(600)', limit_s=6.0)
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


def test_jobs_without_time_are_told_and_results_of_earlier_calls_are_kept(jobs: Any, tmp_path: Path) -> None:
    """Calls into one directory add up."""
    first, second = (_job(jobs, tmp_path, name, 'found.write_text(\'{"told": "x"}\')') for name in ("a.b", "c.d"))
    assert jobs.run_jobs([first], tmp_path / "out", {"benchmark": "test"}, 100.0)
    assert not jobs.run_jobs([second], tmp_path / "out", {"benchmark": "test"}, 1.0)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["jobs"]["a.b"]["exit_code"] == 0
    assert results["jobs"]["c.d"]["not_run"].endswith("s were left")
    with pytest.raises(SystemExit, match="is of a rehearsal and this run is not, or the other way round"):
        jobs.run_jobs([first], tmp_path / "out", {"benchmark": "test", "is_rehearsal": True}, 100.0)


def test_a_job_that_needs_one_that_has_failed_is_not_run(jobs: Any, tmp_path: Path) -> None:
    """One whose need was not among those chosen is."""
    failing = _job(jobs, tmp_path, "failing", "sys.exit(1)")
    write = 'found.write_text(\'{"told": "x"}\')'
    in_vain = dataclasses.replace(_job(jobs, tmp_path, "a.in_vain", write), needs="failing")
    free = dataclasses.replace(_job(jobs, tmp_path, "a.free", write), needs="not chosen")
    jobs.run_jobs([failing, in_vain, free], tmp_path / "out", {"benchmark": "test"}, 100.0)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["jobs"]
    assert found["a.in_vain"]["not_run"] == "failing has failed"
    assert found["a.free"]["exit_code"] == 0
