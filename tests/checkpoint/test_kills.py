"""A kill or an error anywhere in a save, or in an export that replaces another, loses nothing that had returned."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from streamshard import StreamShard, export_safetensors, load_checkpoint, save_checkpoint
from streamshard.checkpoint.directory import create_partial
from streamshard.errors import CheckpointError
from tests.checkpoint import exporting
from tests.checkpoint.changes import CHANGES, Act, at_change, fail, fail_late, kill, sweep
from tests.checkpoint.exporting import Plain, filled, names_in, sharded, stored_bytes
from tests.models import DIM, Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, case


def _files(directory: Path) -> dict[Path, bytes | None]:
    paths = directory.rglob("*")
    return {path.relative_to(directory): path.read_bytes() if path.is_file() else None for path in paths}


@on_ranks(1)
def test_a_kill_or_an_error_anywhere_leaves_what_was_there_or_the_new_one(context: RankContext, tmp_path: Path) -> None:
    """At each change to the file system in turn. No error once the new one is whole; the next save sweeps up."""
    model = StreamShard(Stack((DIM,) * 3), precision=FP32)
    for step in (1, 2):
        save_checkpoint(tmp_path / "before", model, extra={"at": step})
    before, directory, outcomes = _files(tmp_path / "before"), tmp_path / "directory", set()

    def prepare(number: int) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        return shutil.copytree(tmp_path / "before", directory)

    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"step": 2}, {"checkpoint-1", "checkpoint-2", "checkpoint-2-2", "checkpoint-9"}),
        ({"step": 3, "keep": 1}, {"checkpoint-9"}),
    ]
    ways = ((kill, CHANGES), (fail, CHANGES), (fail_late, CHANGES - {"rename"}))
    for (act, calls), (settings, names) in itertools.product(ways, cases):
        save = functools.partial(save_checkpoint, model=model, extra={"at": 3}, **settings)
        for number, _, error in sweep(functools.partial(at_change, calls=calls), act, prepare, save):
            returned = 3 if error is None else 2
            outcomes.add((act, returned))
            with case((act, settings, number)):
                assert act is kill or returned == 3 or _files(directory) == before
                assert load_checkpoint(directory, model)["at"] in (returned, 3)
                save_checkpoint(directory, model, extra={"at": 4}, **{**settings, "step": 9})
                found = {each.name for each in directory.iterdir()}
                assert found in (names, names - {"checkpoint-2-2"} if returned == 2 else names), found
    assert outcomes == {*itertools.product((kill, fail, fail_late), (2, 3))} - {(kill, 3)}


# Limits of a file's bytes at which the model takes three files and two. What is tried grows with the square of that.
THREE, TWO = 180, 250
# As (old, new) max_shard_size: the same number of files, one to several and back.
SIZES = [(TWO, TWO), ("5GB", TWO), (TWO, "5GB")]


def _export(model: nn.Module, directory: Path, size: int | str) -> None:
    export_safetensors(model, directory, max_shard_size=size)


@on_ranks(1)
@pytest.mark.parametrize(("old", "new", "act"), [*((*sizes, kill) for sizes in SIZES), (THREE, TWO, fail)])
def test_a_kill_leaves_the_old_export_or_the_new(
    context: RankContext, old: int | str, new: int | str, act: Act, tmp_path: Path
) -> None:
    """After every single change to the file system; the next export sweeps up what is left."""
    before, after, found = tmp_path / "before", tmp_path / "after", list[str]()
    model = sharded(Plain())
    _export(sharded(filled(Plain)), before, old)
    _export(model, after, new)

    def which(directory: Path) -> str:
        """Of the two, which readers find: libraries that go by Hugging Face's rules, and ours."""
        state = stored_bytes(directory)
        assert state is not None and exporting.read_by_us(directory) == state
        return "old" if state == stored_bytes(before) else "new" if state == stored_bytes(after) else "neither"

    def prepare(number: int) -> Path:
        return shutil.copytree(before, tmp_path / str(number))

    for _, directory, error in sweep(at_change, act, prepare, lambda directory: _export(model, directory, new)):
        found.append(which(directory))
        assert found[-1] == "new" or error is not None  # an error can be made up for
        _export(model, directory, new)
        assert [re.sub("-[0-9a-f]{8}-", "-", name) for name in names_in(directory)] == names_in(after)
        assert which(directory) == "new"
    assert set(found) == {"old", "new"}
    assert act is fail or found == sorted(found, reverse=True)


@on_ranks(1)
def test_no_name_of_a_numbered_file_is_used_again(context: RankContext, tmp_path: Path) -> None:
    """A directory without weights gets save_pretrained's names; every later export has names that are new."""
    model = sharded(filled(Plain))
    seen: set[str] = set()
    for number, size in enumerate((TWO, TWO, "5GB", TWO, THREE, TWO)):
        _export(model, tmp_path, size)
        numbered = {name for name in names_in(tmp_path) if name.startswith("model-")}
        assert numbered.isdisjoint(seen)
        standard = {name for name in numbered if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
        assert standard == (numbered if number == 0 else set())
        assert all(name.endswith(".safetensors") for name in numbered)
        seen |= numbered


@on_ranks(1)
def test_an_export_removes_only_files_of_earlier_exports(context: RankContext, tmp_path: Path) -> None:
    """Names that look alike are the user's."""
    model = sharded(filled(Plain))
    _export(model, tmp_path, TWO)
    own = ["model-fp16-00001-of-00002.safetensors", "model-old.partial", "model.safetensors.partial", "model-1.bin"]
    for name in own:
        (tmp_path / name).write_text("mine")
    _export(model, tmp_path, TWO)
    assert set(own) < set(names_in(tmp_path))
    assert "model-00001-of-00002.safetensors" not in names_in(tmp_path)


@on_ranks(1)
def test_a_second_process_that_exports_at_the_same_time_is_refused(context: RankContext, tmp_path: Path) -> None:
    """What a killed one has left is deleted: its lock is free."""
    model = sharded(filled(Plain))
    other = create_partial(tmp_path, "model")
    with pytest.raises(CheckpointError, match=f"another process is writing to {other.path}"):
        _export(model, tmp_path, TWO)
    other.manifest.close()
    _export(model, tmp_path, TWO)
    assert names_in(tmp_path)[-1] == "model.safetensors.index.json"
