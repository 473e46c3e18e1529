"""The main job: continuing a run, its last words after an error, and its progress on any terminal."""

from __future__ import annotations

import fcntl
import functools
import importlib
import io
import json
import multiprocessing
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from streamshard.checkpoint.directory import open_checkpoint
from streamshard.checkpoint.manifest import decode
from tests.launched import ROOT, Launched, run_file

JOB = "docs/examples/train_llama.py"
SIZES = "--hidden 64 --layers 2 --batch-size 8 --seq-len 16 --held-out-every 20 --save-every 3 --precision fp32"


def _launch(directory: Path, *arguments: str, samples: bool = False) -> Launched:
    directory.mkdir()
    run = functools.partial(_run_plainly, directory / "samples") if samples else _leave_out
    return Launched(2, directory, _run_rank, [JOB, *arguments], run)


def _run(directory: Path, *arguments: str, samples: bool = False) -> str:
    """The output of rank 0."""
    return _end(_launch(directory, *arguments, samples=samples), code=0)


def _end(job: Launched, code: int) -> str:
    (first, told), (other, _) = job.end(timeout_s=200.0)
    assert (first, other) == (code, code), told
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
    assert "of 40 steps; going on" in told
    assert f"loaded {killed / 'model'}: LlamaForCausalLM" in told
    assert _curve(killed) == _curve(whole)
    assert len(list((killed / "checkpoints").iterdir())) == 2


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_main_job_trains_on_after_its_end(tmp_path: Path) -> None:
    """A complete run takes more steps, none, but not fewer."""
    data, out = tmp_path / "text.txt", tmp_path / "out"
    data.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(2000)))
    _run(tmp_path / "first", *SIZES.split(), "--data", str(data), "--steps", "20", "--out", str(out))
    first = _curve(out)
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["checkpoint-18", "checkpoint-20"]

    told = _run(tmp_path / "again", "--resume", str(out))
    assert "20 of 20 steps; all are done" in told
    assert _curve(out) == first

    # 300 is the default, and has to count as given. The run is killed soon, and still knows its steps when it goes on.
    job = _launch(tmp_path / "killed ranks", "--resume", str(out), "--steps", "300")
    while job.processes[0].is_alive() and not list(out.glob("checkpoints/checkpoint-2[4-9]")):
        time.sleep(0.01)
    job.kill()
    assert json.loads((out / "arguments.json").read_text())["steps"] == 300

    told = _run(tmp_path / "more", "--resume", str(out), "--steps", "60", "--held-out-every", "30")
    assert re.search(r"2\d of 60 steps; going on", told)
    longer = _curve(out)
    assert longer["held_out_step"] == [20, 30, 60]
    assert longer["train_loss"][: len(first["train_loss"])] == first["train_loss"]
    files = open_checkpoint(out / "checkpoints" / "checkpoint-60")
    (saved,) = files.manifest.state["optimizers"].values()
    rates = {group["lr"] for group in decode(saved["param_groups"], files.read_whole, torch.device("cpu"))}
    assert [*rates] == [pytest.approx(2e-3 / 10)]  # the end of the cosine of 60 steps

    fewer = _launch(tmp_path / "fewer", "--resume", str(out), "--steps", "50")
    assert f"error: --steps 50: {out} has 60 steps already; wanted more, or no --steps" in _end(fewer, code=2)
    assert json.loads((out / "arguments.json").read_text())["steps"] == 60


@pytest.mark.ranks
def test_the_launchers_last_words_are_the_jobs_error() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    told = subprocess.run([*launcher, JOB, "--bogus"], cwd=ROOT, capture_output=True, text=True, timeout=100.0)
    assert told.returncode
    *_, before, last, after, border = told.stderr.rstrip().splitlines()
    assert last == "error: unrecognized arguments: --bogus (--help lists the options)"
    assert (before, after, set(border)) == ("", "", {"="})


def _progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps, shown on stderr."""
    monkeypatch.syspath_prepend(str((ROOT / JOB).parent))
    progress = importlib.import_module("_progress").Progress(10, 0, is_shown=True)
    for step in range(1, 11):
        progress.step()
        progress.show(f"loss {10 - step}.25, 5,000 tokens/s, 400 MiB in the process")
    progress.close()


def _on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, kind: str) -> str:
    """What a terminal gets that is so wide; 0: it does not know its size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as terminal:
        patch.setenv("TERM", kind)
        patch.setattr(sys, "stderr", terminal)
        _progress(patch)
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(ours, 4096)
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize("columns", [0, 30, 60, 120])
def test_the_bar_fits_any_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = [line for line in re.split(r"[\r\n]+", _on_terminal(monkeypatch, columns, "xterm")) if line.strip()]
    assert lines[-1].startswith("10/10 |")
    assert ("loss 0.25" in lines[-1]) == (columns != 30)
    assert max(map(len, lines)) == (columns or 80) - 1


def test_without_a_cursor_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = r"10/10, 00:00 left, loss 0.25, 5,000 tokens/s, 400 MiB in the process"
    assert _on_terminal(monkeypatch, 30, "dumb").splitlines() == [wanted]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", io.StringIO())
        _progress(patch)
        assert sys.stderr.getvalue().splitlines() == [wanted]  # type: ignore[attr-defined]
