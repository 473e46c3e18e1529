"""Example scripts: a run that continues from a checkpoint has the losses of an uninterrupted run."""

from __future__ import annotations

import functools
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.launched import Launched, run_file

JOB = "docs/examples/train_llama.py"
SIZES = "--hidden 64 --layers 2 --batch-size 8 --seq-len 16 --held-out-every 20 --save-every 3 --precision fp32"


def _launch(directory: Path, *arguments: str, samples: bool = False) -> Launched:
    directory.mkdir()
    run = functools.partial(_run_plainly, directory / "samples") if samples else _leave_out
    return Launched(2, directory, _run_rank, [JOB, *arguments], run)


def _run(directory: Path, *arguments: str, samples: bool = False) -> str:
    """The output of rank 0."""
    (code, told), (other, _) = _launch(directory, *arguments, samples=samples).end(timeout_s=200.0)
    assert (code, other) == (0, 0), told
    return told


def _run_rank(arguments: list[str], run: Callable[..., None]) -> None:
    real = subprocess.run

    def choose(command: list[str], **settings: Any) -> Any:
        return (run if command[0] == sys.executable else real)(command, **settings)  # matplotlib asks for fonts

    with mock.patch.object(subprocess, "run", choose):
        run_file(arguments)


def _leave_out(*_: object, **__: object) -> None:
    pass


def _run_plainly(directory: Path, command: list[str], *, check: bool, env: dict[str, str]) -> None:
    """In the place of ``subprocess.run``: a process that is forked from this one, whose group has ended."""
    assert check
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & set(env)
    directory.mkdir()
    ((code, told),) = Launched(0, directory, run_file, command[1:], start=multiprocessing.get_context("fork")).end()
    print(told)
    assert code == 0, told


def _curve(out: Path) -> dict[str, list[float]]:
    curve: dict[str, list[float]] = json.loads((out / "result.json").read_text())["curve"]
    del curve["seconds"]
    return curve


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_main_job_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """All ranks get SIGKILL after the first checkpoints. The resumed run has the losses of an uninterrupted run."""
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(2000)))
    sizes = [*SIZES.split(), "--data", str(data), "--steps", "40"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(tmp_path / "first", *sizes, "--out", str(whole))

    job = _launch(tmp_path / "killed ranks", *sizes, "--out", str(killed))
    while job.processes[0].is_alive() and len(list(killed.glob("checkpoints/checkpoint-*[0-9]"))) < 2:
        time.sleep(0.01)
    job.kill()
    assert not (killed / "result.json").exists()

    told = _run(tmp_path / "second", "--resume", str(killed), samples=True)
    assert "going on after step" in told
    assert f"loaded {killed / 'model'}: LlamaForCausalLM" in told
    assert _curve(killed) == _curve(whole)
    assert len(list((killed / "checkpoints").iterdir())) == 2
