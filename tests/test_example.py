"""The main job of README: killed at any step it goes on, and its curve is that of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
JOB = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", "docs/examples/two_processes.yaml"),
    "docs/examples/train_llama.py",
]
SIZES = "--hidden 64 --layers 2 --batch-size 1 --seq-len 32 --held-out-every 20 --save-every 3 --precision fp32"


def _start(*arguments: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))}
    return subprocess.Popen(
        [*JOB, *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(job: subprocess.Popen[str]) -> str:
    told, _ = job.communicate(timeout=200)
    assert job.returncode == 0, told
    return told


def _curve(out: Path) -> dict[str, list[float]]:
    curve: dict[str, list[float]] = json.loads((out / "result.json").read_text())["curve"]
    del curve["seconds"]
    return curve


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_main_job_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """SIGKILL for every process of it, once there are checkpoints; the losses are those of a run that went through."""
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(2000)))
    sizes = [*SIZES.split(), "--data", str(data), "--steps", "40"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(_start(*sizes, "--out", str(whole)))

    job = _start(*sizes, "--out", str(killed))
    while job.poll() is None and len(list(killed.glob("checkpoints/checkpoint-*[0-9]"))) < 2:
        time.sleep(0.01)
    launcher = psutil.Process(job.pid)
    for process in [launcher, *launcher.children(recursive=True)]:  # ranks have sessions of their own
        process.kill()
    job.communicate()
    assert not (killed / "result.json").exists()

    told = _finish(_start("--resume", str(killed)))
    assert "going on after step" in told
    assert _curve(killed) == _curve(whole)
    assert len(list((killed / "checkpoints").iterdir())) == 2
