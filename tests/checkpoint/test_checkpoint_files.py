"""A checkpoint has a file for each rank that saved it, and a process may open only so many."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.checkpoint import safetensors_file
from streamshard.checkpoint.dcp import to_dcp
from streamshard.checkpoint.export import export_checkpoint
from streamshard.checkpoint.manifest import CheckpointFiles, Read, read_manifest
from streamshard.comm.objects import SingleProcess
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import split
from tests.models import Stack
from tests.ranks import RankContext, RankPool
from tests.reference import EXACT, FP32, assert_same, full_weights

FILES = 150


def _save(context: RankContext, directory: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    save_checkpoint(directory, model, step=1)


def _load(context: RankContext, one: Path, many: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    load_checkpoint(one, model)
    wanted = full_weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for _ in _with_few_files():
        load_checkpoint(many, model)
    assert_same(full_weights(model), wanted, "weights", EXACT)


def _with_few_files(spare: int = 100) -> Iterator[None]:
    """A loop's body may open `spare` files more than are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same checkpoint, in one file and in many."""
    directory = tmp_path_factory.mktemp("runs")
    ranks(1).run(_save, directory / "one")
    shutil.copytree(directory / "one", directory / "many")
    split(directory / "many" / "checkpoint-1", FILES)
    return directory / "one", directory / "many"


def test_a_checkpoint_of_more_files_than_may_be_open_is_read(
    ranks: RankPool, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """Loaded, exported and converted: what comes of it is what comes of one file."""
    one, many = saved
    for _ in _with_few_files():
        export_checkpoint(many, tmp_path / "many")
        to_dcp(many, tmp_path / "dcp")
    export_checkpoint(one, tmp_path / "one")
    name = "model.safetensors"
    assert (tmp_path / "many" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    ranks(1).run(_load, one, many)


def test_too_many_open_files_are_not_taken_for_damage(saved: tuple[Path, Path]) -> None:
    """Whichever of the calls that open one fails: the checkpoint is sound, and nothing should be deleted."""
    path = saved[1] / "checkpoint-1"
    manifest = read_manifest(path)
    for spare in range(4):
        with CheckpointFiles(path, manifest) as files, pytest.raises(CheckpointError) as raised:
            for _ in _with_few_files(spare):
                for name in manifest.tensors:
                    files.read_whole(name)
        assert "Too many open files" in str(raised.value)
        assert "damaged" not in str(raised.value)


@pytest.mark.parametrize("change", ["replaced", "deleted", "written to"])
def test_a_file_that_is_opened_again_must_be_the_same(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Half of a tensor would be of another checkpoint."""
    monkeypatch.setattr(safetensors_file, "_OPENED_AT_MOST", 2)
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved[1], path.parent, dirs_exist_ok=True)
    manifest = read_manifest(path)
    name = next(iter(manifest.tensors))
    numbers = [piece.file for piece in manifest.tensors[name].pieces][:3]
    read = Read(name, 0, torch.empty(sum(p.stop - p.start for p in manifest.tensors[name].pieces[:3])))
    file = path / manifest.files[numbers[0]].name
    with CheckpointFiles(path, manifest) as files:
        files.verify_together(SingleProcess())
        files.read_tensor(read)
        content = file.read_bytes()
        if change != "written to":
            file.unlink()
        if change != "deleted":
            file.write_bytes(content)
            os.utime(file, (1, 1))
        with pytest.raises(CheckpointError, match="No such file" if change == "deleted" else "was replaced while"):
            files.read_tensor(read)
