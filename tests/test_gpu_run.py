"""The run on a GPU, ``benchmarks/gpu.py``: what it keeps of jobs that fail, and which jobs it runs.

So does its largest job, ``benchmarks/host_memory.py``, with its parts. ``.ci/run`` rehearses the whole run.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._jobs import Job, run_jobs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _job(directory: Path, name: str, code: str, limit_s: float = 60.0) -> Job:
    """One that runs `code`, which writes to the path in ``sys.argv[1]``."""
    found = directory / f"{name}.json"
    code = f"import os, pathlib, sys, time; found = pathlib.Path(sys.argv[1]); {code}"
    command = [sys.executable, "-c", code, str(found)]
    return Job(name=name, command=command, limit_s=limit_s, found=found, brief=lambda known: known["told"])


def _run(directory: Path, *jobs: Job) -> tuple[bool, dict[str, Any]]:
    """Whether they ended well, and what the results say of all jobs."""
    is_well = run_jobs(jobs, directory, {"benchmark": "test"}, 100.0)
    return is_well, json.loads((directory / "results.json").read_text())["jobs"]


def test_a_job_that_fails_hangs_or_is_killed_leaves_its_results_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next one runs. An error is found above later output; a job that hangs says where it was, if it can."""
    slow = _job(tmp_path, "slow", 'found.write_text(\'{"told": "half"}\'); time.sleep(600)', limit_s=1.0)
    slow = dataclasses.replace(slow, environment={"PYTHONFAULTHANDLER": "1"})
    quick = _job(tmp_path, "quick", "print('words'); found.write_text('{\"told\": \"all\"}')")
    error = _job(tmp_path, "error", "import atexit; atexit.register(print, 'last words'); raise KeyError('a name')")
    killed = _job(tmp_path, "killed", "print('much memory', flush=True); os.kill(os.getpid(), 9)")
    is_well, found = _run(tmp_path / "out", slow, quick, error, killed)
    assert not is_well
    ended = {name: (job["timed_out"], job["exit_code"], job["brief"]) for name, job in found.items()}
    assert ended["quick"] == (False, 0, "all") and "words" in (tmp_path / "out" / "output.log").read_text()
    assert ended["slow"][0] and ended["slow"][2] == "half" and ended["error"] == (False, 1, "found nothing")
    assert found["error"]["reason"] == "KeyError: 'a name'"
    assert found["slow"]["reason"] == 'it was at File "<string>", line 1 in <module>'
    assert found["killed"]["reason"] == "much memory"
    told = capsys.readouterr().out
    assert "FAILED: SIGKILL" in told
    failed = [job for name, job in found.items() if name != "quick"]
    assert all(job["reason"] in told and job["reason"].split()[-1] in job["output"] for job in failed)


def test_ranks_that_wait_for_a_failed_one_end_and_ranks_that_hang_say_where(tmp_path: Path) -> None:
    """The reason is the failed rank's error, or a rank's position: never the launcher's."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys, time

def wait_for_ever():
    time.sleep(600)

if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise ValueError("rank 1 is wrong")
wait_for_ever()
""")
    jobs = [_job(tmp_path, what, "", limit_s) for what, limit_s in (("fail", 60.0), ("hang", 2.0))]
    launcher = [sys.executable, str(BENCHMARKS / "_ranks.py"), "2", str(script)]
    stacks = {"PYTHONFAULTHANDLER": "1"}
    jobs = [dataclasses.replace(job, command=[*launcher, job.name], environment=stacks) for job in jobs]
    _, found = _run(tmp_path, *jobs)
    assert (found["fail"]["timed_out"], found["fail"]["reason"]) == (False, "ValueError: rank 1 is wrong")
    assert found["hang"]["timed_out"]
    assert found["hang"]["reason"] == f'it was at File "{script}", line 5 in wait_for_ever'
    assert found["hang"]["output"].count("in wait_for_ever") == 2


def test_a_substitute_runs_only_if_its_job_has_failed(tmp_path: Path) -> None:
    """A substitute that is not needed is no failure."""
    for code in (0, 1):
        first = _job(tmp_path, "first", f"sys.exit({code})")
        substitute = _job(tmp_path, "other", 'found.write_text(\'{"told": "instead"}\')')
        is_well, found = _run(tmp_path, first, dataclasses.replace(substitute, instead_of="first"))
        assert is_well == (code == 0)
        assert found["other"].get("not_run") == (None if code else "only if first fails")
        assert found["other"]["brief"] == ("instead" if code else "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, which runs no job: ``gpu.chosen`` has the jobs of the call."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu")
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "chosen", [], raising=False)
    monkeypatch.setattr(module, "run_jobs", lambda jobs, *_: module.chosen.extend(jobs) or True)
    return module


def _call(gpu: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return ended.value.code


def test_a_run_on_a_gpu_begins_with_what_is_most_valuable(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of the first jobs took as long as it may, there would still be time for host memory.

    Without ``parity.gloo``, which runs if NCCL refuses two ranks on one GPU: it has refused early then.
    """
    assert _call(gpu, monkeypatch) == 0
    names = [job.name for job in gpu.chosen]
    assert names[:7] == ["facts", "parity.one", "parity.two", "parity.gloo", "llama", "overlap", "tests.one"]
    assert names[7:] == ["host_memory", "small", "tests.two", "compiled"]
    assert sum(job.limit_s for job in gpu.chosen[:8] if job.instead_of is None) <= 470.0
    assert gpu.chosen[7].limit_s == 120.0


def test_jobs_of_a_run_on_a_gpu_are_chosen_by_name(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute that is named runs."""
    assert _call(gpu, monkeypatch, "--only", "parity.gloo", "facts") == 0
    assert [(job.name, job.instead_of) for job in gpu.chosen] == [("facts", None), ("parity.gloo", None)]
    assert "--only fact: wanted some of facts parity.one" in str(_call(gpu, monkeypatch, "--only", "fact"))


# -- host memory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("host_memory")


def _measured(tokens: int, step_ms: float) -> dict[str, Any]:
    """What a part tells of one number of tokens."""
    facts = dict.fromkeys(("tokens_per_s", "tflops", "peak_device_bytes", "host_bytes"), 1.0)
    return {"tokens": tokens, "step_ms": {"median": step_ms}, **facts}


def _sleep(tell: Callable[..., None]) -> None:
    time.sleep(600)


def _die(tell: Callable[..., None]) -> None:
    os.kill(os.getpid(), 9)


def _raise(tell: Callable[..., None]) -> None:
    tell("failed", "ValueError: of the part")
    tell("done", None)


def _end(tell: Callable[..., None]) -> None:
    tell("cell", {"tokens": 2048, "not_run": "out of memory"})
    tell("done", None)
    time.sleep(600)  # an end that hangs costs no time


@pytest.mark.parametrize(
    ("ending", "why", "has_failed"),
    [
        (_sleep, "out of time after 1 s", True),
        (_die, "ended with exit code -9", True),
        (_raise, "ValueError: of the part", True),
        (_end, "out of memory", False),
    ],
)
def test_a_part_that_fails_leaves_the_reason_and_what_it_has_measured(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: Any, why: str, has_failed: bool
) -> None:
    def measure(part: Any, limit_s: float, is_rehearsal: bool, pipe: Any) -> None:
        pipe.send(("cell", _measured(1024, 4.0)))
        ending(lambda *told: pipe.send(told))

    monkeypatch.setattr(benchmark, "_measure", measure)
    parts = [benchmark.Part(f"3B.{name}", (1024, 2048), 60.0) for name in ("streamshard", "fsdp2")]
    results = benchmark.Results(parts, tmp_path / "found.json")
    benchmark._run(parts[0], 1.0, results, is_rehearsal=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cells"]["3B, 1k tokens"]["streamshard"]["step_ms"] == {"median": 4.0}
    assert found["not_run"] == {
        "3B, 2k tokens, streamshard": why,
        "3B, 1k tokens, fsdp2": "no time was left",
        "3B, 2k tokens, fsdp2": "no time was left",
    }
    assert results.has_failed is has_failed


def test_the_most_valuable_parts_run_first_and_without_time_each_row_says_so(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run: list[str] = []
    monkeypatch.setattr(benchmark, "_run", lambda part, limit_s, results, is_rehearsal: run.append(part.name))
    monkeypatch.setattr(benchmark, "_import_once", lambda: None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for within in ("240", "0"):
        output = tmp_path / f"{within}.json"
        monkeypatch.setattr(sys, "argv", ["host_memory.py", "--within", within, "--output", str(output)])
        with pytest.raises(SystemExit) as ended:
            benchmark.main()
        assert ended.value.code == 0
    assert run == [part.name for part in benchmark.PARTS]
    assert run[:4] == ["link", "3B.alone", "3B.streamshard", "3B.fsdp2"]
    assert sum(part.limit_s for part in benchmark.PARTS[:3]) <= 115.0  # what ``gpu.py`` gives them
    not_run = json.loads((tmp_path / "0.json").read_text())["not_run"]
    assert len(not_run) == 1 + sum(len(part.counts) for part in benchmark.PARTS)
    assert set(not_run.values()) == {"no time was left"}
