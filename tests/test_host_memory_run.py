"""The benchmark of state in host memory, ``benchmarks/host_memory.py``: it runs, and keeps what it has found.

``.ci/run`` rehearses it on a played GPU too, as a part of the run on a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.ranks
def test_the_benchmark_of_host_memory_runs_on_a_simulated_device(tmp_path: Path) -> None:
    """Each number of tokens has a row beside the model that computes alone; what is not installed says so."""
    output = tmp_path / "found.json"
    parts = ["link", "tiny.alone", "tiny.streamshard", "tiny.deepspeed", "tiny.streamshard-40"]
    command = [sys.executable, str(BENCHMARKS / "host_memory.py"), "--rehearse", "--output", str(output)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--only", *parts], env=environment, capture_output=True, text=True, timeout=100.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert sorted(found["step_ns_per_param"])[-2:] == ["late step, foreach AdamW", "late step, fused AdamW"]
    assert list(found["pin_s"]) == ["1 MiB", "1 MiB in pages of 4 KiB"]
    assert all(each["pin"] > 0.0 for each in found["pin_s"].values()) and len(found["link_gb_s"]) == 3
    assert found["built"]["tiny.streamshard"]["steady_step"]["synchronizations"] == 0
    assert list(found["cells"]) == [f"tiny, {tokens} tokens" for tokens in (32, 8, 128, 64, 16)]
    for cell, row in found["cells"].items():
        few = {"alone", "streamshard"}
        assert set(row) == (few if cell in ("tiny, 64 tokens", "tiny, 16 tokens") else {*few, "streamshard-40"})
        alone = row.pop("alone")
        for each in row.values():
            assert each["share_of_alone"] == alone["step_ms"]["median"] / each["step_ms"]["median"]
            assert each["tokens_per_s"] > 0.0 and each["tflops"] > 0.0
            assert each["loss"] == pytest.approx(alone["loss"], abs=0.2)
    if find_spec("deepspeed") is None:
        assert found["not_run"] == {f"tiny, {tokens} tokens, deepspeed": "not installed" for tokens in (32, 8, 128)}


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


@pytest.mark.parametrize(("has_started_cuda", "method"), [(False, "fork"), (True, "spawn")])
def test_parts_start_anew_if_an_import_has_started_cuda(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, has_started_cuda: bool, method: str
) -> None:
    """A fork could not use the GPU."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: has_started_cuda)
    benchmark._context.cache_clear()
    assert benchmark._context().get_start_method() == method
    benchmark._context.cache_clear()


def test_a_peer_that_fails_is_a_result(benchmark: Any, tmp_path: Path) -> None:
    part = benchmark.Part("3B.fsdp2", (1024,), 60.0)
    results = benchmark.Results([part], tmp_path / "found.json")
    results.take(part, "failed", "TypeError: of the peer")
    assert not results.has_failed


@pytest.mark.parametrize(("step_ms", "is_met"), [(100.0, True), (120.0, False)])
def test_a_target_is_a_share_of_computing_alone(benchmark: Any, tmp_path: Path, step_ms: float, is_met: bool) -> None:
    """64k tokens: 90 %."""
    alone, ours = (benchmark.Part(f"3B.{name}", (64 << 10,), 60.0) for name in ("alone", "streamshard"))
    results = benchmark.Results([alone, ours], tmp_path / "found.json")
    results.take(alone, "cell", _measured(64 << 10, 99.0))
    results.take(ours, "cell", _measured(64 << 10, step_ms))
    targets = json.loads((tmp_path / "found.json").read_text())["targets"]
    assert targets == [
        {
            "target": "3B, 64k tokens, streamshard: speed, share of computing alone",
            "at_least": 0.9,
            "found": 99.0 / step_ms,
            "met": is_met,
        }
    ]


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
