"""The command line: says what a checkpoint holds, and whether it is sound."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard import save_checkpoint
from streamshard.tools.command import main
from tests.checkpoint.crafted import flip, rewrite
from tests.checkpoint.objects import Kept
from tests.checkpoint.runs import start, steps
from tests.ranks import RankContext, RankPool


def _save(context: RankContext, directory: Path, *numbers: int) -> None:
    run = start(0)
    for number in numbers:
        steps(run, number, number + 1)
        extra = {**run.extra, "position": number, "mean": torch.ones(3), "rank": context.rank}
        save_checkpoint(directory, run.model, run.optimizer, extra, step=number)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "saved"
    ranks(2).run(_save, directory, 9, 10)
    return directory


def test_inspect_says_what_a_checkpoint_holds(saved: Path, command: Any) -> None:
    """Time, ranks and bytes, and each tensor if asked. It reads the files."""
    first, *lines, last = command("inspect", saved / "checkpoint-10", "--tensors").splitlines()
    assert re.fullmatch(r"checkpoint-10 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  2 rank\(s\)  0\.\d MB, latest", first)
    rows = dict(line.split(maxsplit=1) for line in lines)
    assert rows["optimizer/model/embedding.weight.exp_avg"] == "float32  [48, 16]"
    assert last == "verified: all is as written"


def test_inspect_of_a_directory_prints_a_line_for_each_checkpoint(saved: Path, command: Any) -> None:
    first, second = command("inspect", f"{Kept.protocol}://{saved}").splitlines()
    assert first.startswith("checkpoint-9 ") and first.endswith("MB")
    assert second.startswith("checkpoint-10 ") and second.endswith("MB, latest")


@pytest.mark.parametrize("damage", ["flip", "lose", "manifest"])
def test_inspect_finds_damage(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    bad = tmp_path / "checkpoint-10"
    file = bad / ("checkpoint.json" if damage == "manifest" else "rank-00001-of-00002.safetensors")
    if damage == "lose":
        file.unlink()
    else:
        flip(file, -1)
    assert main(["inspect", str(bad)]) == 1
    said = capsys.readouterr()
    assert file.name in said.err and said.err.count("\n") == 1
    assert main(["inspect", str(tmp_path)]) == (0 if damage == "flip" else 1)
    one, two = capsys.readouterr().out.splitlines()
    assert "damaged" not in one and ("damaged" in two) == (damage != "flip")  # a list reads no tensors


def test_control_characters_from_a_checkpoint_are_not_printed(saved: Path, tmp_path: Path, capsys: Any) -> None:
    """Names in a malicious checkpoint could otherwise fake the output of a successful check."""
    attack = "\x1b]0;owned\x07\x1b[2K\rverified: all is as written\n\u202e\udcff"
    path = tmp_path / "run\x1b[2K\n" / "checkpoint-1"
    shutil.copytree(saved / "checkpoint-10", path)

    def change(content: Any) -> None:
        content["versions"]["torch"] = attack
        content["state"]["trees"][attack] = [attack]
        content["tensors"][attack] = {"shape": [0], "dtype": "float32", "pieces": []}

    rewrite(path, change)
    assert main(["inspect", str(path), "--tensors"]) == 0
    rewrite(path, lambda content: content.update(format=attack))
    for command in (
        ["inspect", str(path.parent)],
        ["inspect", str(path)],
        ["convert", str(path.parent), "out", "--to", "dcp"],
    ):
        assert main(command) == 1
    said = capsys.readouterr()
    assert "\\x1b]0;owned" in said.out and "\\x1b]0;owned" in said.err and "\\u202e\\udcff" in said.out
    lines = (said.out + said.err).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines.count("verified: all is as written") == 1
    assert main(["inspect", os.fsdecode(bytes(tmp_path) + b"\xff")]) == 2
    assert "\\udcff" in capsys.readouterr().err


def test_errors_are_one_line_and_an_exit_code(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 for a missing checkpoint or another library's, with advice; 2 for wrong usage."""
    out, nowhere, fsdp2 = str(tmp_path / "out"), str(tmp_path / "nowhere"), str(tmp_path / "fsdp2")
    assert main(["convert", str(saved), fsdp2, "--to", "dcp"]) == 0
    for told, command in (
        ("nowhere holds no whole checkpoint: it does not exist", ["inspect", nowhere]),
        ("nowhere holds no whole checkpoint", ["convert", nowhere, out, "--to", "dcp"]),
        ("holds no whole checkpoint", ["inspect", str(saved.parent)]),
        ("`streamshard convert DIR OUT --from dcp` makes one", ["convert", fsdp2, out, "--to", "dcp"]),
    ):
        capsys.readouterr()
        assert main(command) == 1
        said = capsys.readouterr().err
        assert told in said and said.startswith(f"streamshard {command[0]}: ") and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    for wrong in ([], ["inspect"], ["fly"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2


def test_the_command_imports_what_it_needs(saved: Path) -> None:
    """``--help`` and ``--version`` do not import torch, which takes seconds; no command imports an integration."""
    others = "accelerate", "datasets", "peft", "transformers", "trl"
    code = f"""
import runpy, sys, streamshard.__main__
for option in ("--help", "--version"):
    try:
        streamshard.__main__.main([option])
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules)
try:
    runpy.run_module("streamshard", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print(ended.code, [name for name in {others} if name in sys.modules])
"""
    run = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code, "inspect", str(saved / "checkpoint-9")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines.count("0 False") == 2
    version = importlib.metadata.version("streamshard")
    assert streamshard.__version__ == version and f"streamshard {version}" in lines
    assert lines[-2:] == ["verified: all is as written", "0 []"]
