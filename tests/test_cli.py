"""The command line: says what a checkpoint holds, whether it is sound, and exports it to the byte."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard import StreamShard, export_safetensors, save_checkpoint
from streamshard.checkpoint import export
from streamshard.checkpoint.export import export_checkpoint
from streamshard.checkpoint.manifest import CheckpointFiles, Read
from streamshard.cli import main
from streamshard.errors import CheckpointError
from tests import families
from tests.checkpoint.crafted import rewrite
from tests.checkpoint.exporting import Plain, assert_same_files
from tests.checkpoint.runs import start, steps
from tests.models import Stack
from tests.ranks import RankContext, RankPool
from tests.reference import FP32


def _save(context: RankContext, directory: Path, *numbers: int) -> None:
    run = start(0)
    for number in numbers:
        steps(run, number, number + 1)
        extra = {"position": number, "names": ["a", ("b", 1.5)], "mean": torch.ones(3), "rank": context.rank}
        save_checkpoint(directory, *run, extra=extra, step=number)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------ inspect


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks, 9 and 10."""
    directory = tmp_path_factory.mktemp("runs") / "saved"
    ranks(2).run(_save, directory, 9, 10)
    return directory


def test_inspect_says_what_a_checkpoint_holds(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks, parameters, bytes, the optimizer's state, and everything else with its value."""
    assert main(["inspect", str(saved / "checkpoint-10")]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert rows["number"] == "10"
    assert rows["ranks"] == "2"
    assert "in 2 files" in rows["size"]
    assert rows["model"].startswith("tests.checkpoint.runs.Counted, ")
    assert "(float32, " in rows["model"]
    assert "int64, 24 bytes)" in rows["model"]
    assert rows["optimizer"].startswith("torch.optim.adamw.AdamW, 2 groups, step, exp_avg, exp_avg_sq, ")
    assert rows["extra.position"] == "10"
    assert rows["extra.names"] == '["a", {"$": "tuple", "items": ["b", 1.5]}]'
    assert rows["extra.mean"] == '{"$": "tensor", "tensor": "extra.mean"}'
    assert rows["extra.rank"] == "differs between 2 ranks; 0"
    assert "scheduler" in rows
    assert "random" in rows
    assert rows["verified:"] == "all is as written"


def test_inspect_lists_tensors(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, dtype, shape; weights, moments and what the user has saved."""
    assert main(["inspect", str(saved / "checkpoint-10"), "--tensors", "--no-verify"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["model/embedding.weight", "float32", "[48, 16]"] in rows
    assert ["optimizer/embedding.weight/exp_avg", "float32", "[48, 16]"] in rows
    assert ["extra.mean", "float32", "[3]"] in rows
    assert rows[-1][:2] == ["not", "verified:"]


def test_inspect_of_a_directory_has_a_line_for_each(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By number, and the latest is marked."""
    assert main(["inspect", str(saved)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("checkpoint-9 ")
    assert first.endswith("verified")
    assert second.startswith("checkpoint-10 ")
    assert second.endswith("verified, latest")


def test_one_rank_is_one(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not "1 ranks"."""
    ranks(1).run(_save, tmp_path, 1)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "  1 rank  " in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "manifest"])
def test_inspect_finds_damage(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """One flipped bit of any file, or one that is missing: exit code 1 and the file's name; the other is the latest."""
    ranks(2).run(_save, tmp_path, 1, 2)
    bad = tmp_path / "checkpoint-2"
    file = bad / ("checkpoint.json" if damage == "manifest" else "rank-00001-of-00002.safetensors")
    if damage == "lose":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        _flip(file)
    assert main(["inspect", str(bad)]) == 1
    said = capsys.readouterr()
    assert file.name in said.err
    assert said.err.count("\n") == 1
    assert "verified" not in said.out
    assert main(["inspect", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert file.name in said.err
    one, two = said.out.splitlines()
    assert one.endswith("verified, latest")
    assert two.endswith("damaged")
    assert main(["inspect", "--no-verify", str(bad)]) == (0 if damage == "flip" else 1)


# ------------------------------------------------------------------------------------------------ inspect an export


@pytest.mark.parametrize("size", ["5GB", "3KB"])
def test_inspect_of_an_export_shows_and_verifies_it(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    """One file or several; with --tensors each of them."""
    assert main(["export", str(saved), str(tmp_path), "--max-shard-size", size]) == 0
    files = sorted(tmp_path.glob("*.safetensors"))
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == [str(tmp_path), "is a Hugging Face directory"]
    assert re.fullmatch(r"[\d,]+ numbers in \d+ tensors \(float32, .* kB, int64, 24 bytes\)", rows[1][1])
    assert rows[2][1].endswith(" in 1 file" if size == "5GB" else f" in {len(files)} files")
    assert ["embedding.weight", "float32  [48, 16]"] in [[name, " ".join(rest).strip()] for name, *rest in rows[4:-1]]
    assert rows[-1] == ["verified:", "the weights are as they were written"]
    _flip(files[-1])
    assert main(["inspect", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"{files[-1]} is damaged: it is not what its checksum" in said.err
    assert "verified" not in said.out
    assert main(["inspect", str(tmp_path), "--no-verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "not verified: files have the sizes they should have"
    (tmp_path / "model.safetensors.crc32.json").unlink()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "not verified: there are no checksums (model.safetensors.crc32.json)" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_other_directories_are_told_by_their_kind(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """FSDP2's, with what to run."""
    assert main(["convert", str(saved), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    rest = [str(tmp_path / "out")] if command == "export" else []
    for given, told in (
        (tmp_path / "dcp", f"streamshard convert {tmp_path / 'dcp'} OUT --from dcp makes a checkpoint of it"),
        (saved.parent, "holds no whole checkpoint: wanted a directory that save_checkpoint has written to"),
    ):
        capsys.readouterr()
        assert main([command, str(given), *rest]) == 1
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ export


def _export_live(
    context: RankContext, family: str, directory: Path, dtype: str | None, size: str, cast: torch.dtype
) -> None:
    torch.manual_seed(0)
    made = (Plain if family == "plain" else getattr(families, family))().to(cast)
    model = StreamShard(made, units=["norm"] if family == "plain" else None, precision=FP32)
    save_checkpoint(directory / "run", model)
    export_safetensors(model, directory / "live", dtype, size)


@pytest.mark.parametrize(
    ("family", "dtype", "size", "cast"),
    [
        ("llama", None, "5GB", torch.float32),
        ("llama", "bfloat16", "3KB", torch.float32),
        ("llama", None, "3KB", torch.bfloat16),
        ("gpt2", "float16", "5GB", torch.float32),
        ("bert", None, "5GB", torch.float32),
        ("t5", None, "5GB", torch.float32),
        ("mixtral", "bfloat16", "3KB", torch.float32),
        ("vit", None, "5GB", torch.float32),
        ("qwen3_vl_moe", "bfloat16", "5GB", torch.float32),
        ("plain", None, "5GB", torch.float32),
        ("plain", "bfloat16", "5GB", torch.float32),
    ],
)
def test_export_is_what_the_live_model_exports(
    ranks: RankPool, tmp_path: Path, family: str, dtype: str | None, size: str, cast: torch.dtype
) -> None:
    """Every file, byte for byte, configs too: other dtypes, several files, rearranged experts, tied weights."""
    ranks(2).run(_export_live, family, tmp_path, dtype, size, cast)
    out = tmp_path / "out"
    options = ["--max-shard-size", size, *(["--dtype", dtype] if dtype else [])]
    assert main(["export", str(tmp_path / "run"), str(out), *options]) == 0
    assert_same_files(out, tmp_path / "live")


def test_export_reads_and_writes_chunk_by_chunk(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a tensor."""
    sizes: list[int] = []
    read = CheckpointFiles.read_tensor

    def watched(self: CheckpointFiles, what: Read) -> None:
        sizes.append(what.target.nbytes)
        read(self, what)

    monkeypatch.setattr(export, "CHUNK_BYTES", 64)
    monkeypatch.setattr(CheckpointFiles, "read_tensor", watched)
    export_checkpoint(saved, tmp_path / "out", dtype="bfloat16")
    assert max(sizes) == 64
    assert len(sizes) > 100


def _save_two(context: RankContext, directory: Path) -> None:
    torch.manual_seed(0)
    policy, value = (StreamShard(Stack(), precision=FP32) for _ in range(2))
    save_checkpoint(directory / "run", {"policy": policy, "value": value})
    export_safetensors(value, directory / "live")


def test_one_of_several_models_is_named(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --model; without it, or with another name, the names that there are are said, and nothing is written."""
    ranks(1).run(_save_two, tmp_path)
    out = tmp_path / "out"
    for wrong in ([], ["--model", "critic"]):
        assert main(["export", str(tmp_path / "run"), str(out), *wrong]) == 2
        assert "holds 'model.policy', 'model.value'" in capsys.readouterr().err
    assert not out.exists()
    assert main(["export", str(tmp_path / "run"), str(out), "--model", "value"]) == 0
    assert_same_files(out, tmp_path / "live")


def test_export_of_a_damaged_checkpoint_writes_nothing(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is verified before the first file is made."""
    ranks(2).run(_save, tmp_path / "run", 1)
    file = tmp_path / "run" / "checkpoint-1" / "rank-00000-of-00002.safetensors"
    _flip(file)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert f"{file} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _save_what_cannot_be_exported(context: RankContext, directory: Path) -> None:
    model = families.llama()
    model._hf_peft_config_loaded = True  # what add_adapter() sets
    save_checkpoint(directory, StreamShard(model, precision=FP32))


def test_what_the_live_model_cannot_export_says_why(ranks: RankPool, tmp_path: Path) -> None:
    """The checkpoint is saved all the same, with the reason."""
    ranks(1).run(_save_what_cannot_be_exported, tmp_path / "run")
    with pytest.raises(CheckpointError, match="'model' cannot be exported: LlamaForCausalLM has adapters"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")


def _save_custom_code(context: RankContext, directory: Path) -> None:
    model = families.llama()
    model.is_remote_code = lambda: True  # as a class says that came with its weights
    save_checkpoint(directory, StreamShard(model, precision=FP32))


def test_export_says_that_custom_code_is_not_there(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint holds no code; who exports it has to bring it."""
    ranks(1).run(_save_custom_code, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "LlamaForCausalLM has code" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.py"))


def test_export_into_a_place_that_is_a_file_fails_in_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's own words, and nobody speaks of ranks."""
    (tmp_path / "out").write_text("in the way")
    assert main(["export", str(saved), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "File exists" in said
    assert "rank" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--max-shard-size", "many"]])
def test_arguments_that_cannot_work_are_usage_errors(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Exit code 2, before anything is read."""
    assert main(["export", str(saved), str(tmp_path / "out"), *options]) == 2
    assert options[1] in capsys.readouterr().err


def test_nothing_that_a_terminal_obeys_is_printed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what strangers have written into a checkpoint, or how they have called it: it could say that all is well."""
    attack = "\x1b]0;owned\x07\x1b[2K\rverified: all is as written\n\u202e\udcff"
    path = tmp_path / os.fsdecode(b"run\x1b[2K\n\xff") / "checkpoint-1"
    shutil.copytree(saved / "checkpoint-10", path)

    def change(content: Any) -> None:
        content["versions"]["torch"] = attack
        content["state"]["trees"][attack] = {"all": attack}
        content["tensors"][attack] = {"shape": [0], "dtype": "float32", "pieces": []}

    rewrite(path, change)
    assert main(["inspect", str(path), "--tensors"]) == 0
    rewrite(path, lambda content: content.update(format=3, versions={"streamshard": attack}))
    for command in (["inspect", str(path.parent)], ["inspect", str(path)], ["export", str(path.parent), "out"]):
        assert main(command) == 1
    said = capsys.readouterr()
    assert "\\x1b]0;owned" in said.out and "\\x1b]0;owned" in said.err and "\\u202e\\udcff" in said.out
    lines = (said.out + said.err).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines.count("verified: all is as written") == 1


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """A directory that holds none, one that does not exist."""
    rest = [str(tmp_path / "out")] if command == "export" else []
    for wrong in (tmp_path, tmp_path / "nowhere"):
        assert main([command, str(wrong), *rest]) == 1
        said = capsys.readouterr()
        assert said.err.startswith(f"streamshard {command}: {wrong} ")
        assert said.err.count("\n") == 1


def test_its_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """As installed, and as `streamshard.__version__` has it."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"streamshard {importlib.metadata.version('streamshard')}\n"
    assert streamshard.__version__ == importlib.metadata.version("streamshard")


def test_usage_errors_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's own way, and its own words."""
    for wrong in ([], ["inspect"], ["fly"]):
        with pytest.raises(SystemExit) as left:
            main(wrong)
        assert left.value.code == 2
    assert "usage: streamshard" in capsys.readouterr().err


def test_help_has_examples_that_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Every example in a help text is one that the parser takes."""
    for command in ([], ["inspect"], ["export"], ["convert"]):
        with pytest.raises(SystemExit) as left:
            main([*command, "--help"])
        assert left.value.code == 0
        examples = capsys.readouterr().out.split("examples:\n")[1].split("\n\n")[0].splitlines()
        for example in filter(None, examples):
            words = example.strip().split("  ")[0].split()
            assert words[0] == "streamshard"
            assert main(words[1:]) == 1  # there is no such checkpoint
            capsys.readouterr()


@pytest.mark.parametrize("command", [[], ["inspect"], ["export"], ["convert"]])
def test_help_fits_a_terminal(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 80 columns; argparse wraps the options, the texts are as they are written."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_it_is_a_program(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m streamshard``, whose exit code is that of the command."""
    run = [sys.executable, "-m", "streamshard", "inspect", str(saved / "checkpoint-9")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified: all is as written" in done.stdout
    assert done.stderr == ""
    monkeypatch.setattr(sys, "argv", ["streamshard", "inspect", "nowhere"])
    with pytest.raises(SystemExit) as gone:
        runpy.run_module("streamshard", run_name="__main__")
    told = capsys.readouterr()
    assert (gone.value.code, told.out) == (1, "")
    assert "nowhere is no directory" in told.err


def test_configs_are_in_the_manifest_once(ranks: RankPool, tmp_path: Path) -> None:
    """As text, so that whoever exports needs no transformers."""
    ranks(2).run(_export_live, "gpt2", tmp_path, None, "5GB", torch.float32)
    content = json.loads((tmp_path / "run" / "checkpoint-1" / "checkpoint.json").read_text())["content"]
    files = content["state"]["models"]["model"]["export"]["files"]
    assert sorted(files) == ["config.json", "generation_config.json"]
    assert files["config.json"] == (tmp_path / "live" / "config.json").read_text()
