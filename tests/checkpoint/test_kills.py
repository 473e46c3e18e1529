"""A kill or an error anywhere in a save, or in an export that replaces another, loses nothing that had returned."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from streamshard import export_safetensors
from streamshard.checkpoint.directory import create_partial, survey
from streamshard.checkpoint.storage import Location, Url
from streamshard.errors import CheckpointError
from tests.checkpoint import exporting
from tests.checkpoint.changes import CHANGES, Act, Killed, answer_badly, at_change, fail, fail_late, kill, sweep
from tests.checkpoint.crafted import loaded_number, save_number
from tests.checkpoint.exporting import Plain, filled, names_in, sharded, stored_bytes
from tests.checkpoint.objects import at_operation
from tests.ranks import RankContext, on_ranks

at_change_not_of_names = functools.partial(at_change, calls=CHANGES - {"rename"})


@pytest.mark.parametrize(
    ("at", "act", "was_killed", "keep"),
    [
        *((at, kill, was_killed, keep) for at in (at_change, at_operation) for was_killed, keep in ((0, 2), (1, 1))),
        *((at_change, fail, False, None), (at_change, fail, True, 1), (at_change_not_of_names, fail_late, False, 1)),
        *((at_operation, fail, True, None), (at_operation, answer_badly, False, 1)),
    ],
)
def test_a_kill_or_an_error_anywhere_loses_no_save(
    tmp_path: Path, at: Any, act: Act, was_killed: bool, keep: int | None
) -> None:
    """At each change to the file system, or operation of a store, in turn. The next save deletes what is left."""
    outcomes = set()

    def prepare(number: int) -> Location:
        where = Url(f"kept://{tmp_path}/{number}") if at is at_operation else tmp_path / str(number)
        for each in (1, 2):
            save_number(where, each)
        if was_killed:
            with pytest.raises(Killed), at(5, kill, lasting=True):
                save_number(where, 7)
        return where

    for number, where, error in sweep(at, act, prepare, lambda where: save_number(where, 3, keep)):
        outcomes.add(error is None)
        assert error is None or isinstance(error, Killed) or str(where) in str(error)
        assert (3 if error is None else 2) <= loaded_number(where) <= 3
        assert not any(entry.wrong for entry in survey(where))
        if isinstance(error, CheckpointError) and at is not at_operation and not was_killed:  # nothing is left of it
            assert names_in(tmp_path / str(number)) == ["checkpoint-1", "checkpoint-2"]
        save_number(where, 4, keep=1)
        (name,) = names_in(tmp_path / str(number))
        assert re.match(r"checkpoint-4\b", name) and loaded_number(where) == 4
    assert number >= (19 if at is at_operation else 12)
    assert outcomes == ({False} if act is kill else {False, True})


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
def test_no_name_of_a_numbered_file_is_used_again_and_files_of_others_stay(
    context: RankContext, tmp_path: Path
) -> None:
    """A directory without weights gets save_pretrained's names; every later export has names that are new."""
    model = sharded(filled(Plain))
    seen: set[str] = set()
    users = {"model-fp16-00001-of-00002.safetensors", "model-old.partial", "model.safetensors.partial", "model-1.bin"}
    for number, size in enumerate((TWO, TWO, "5GB", TWO, THREE, TWO)):
        _export(model, tmp_path, size)
        numbered = {name for name in names_in(tmp_path) if name.startswith("model-")} - users
        assert numbered.isdisjoint(seen)
        standard = {name for name in numbered if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
        assert standard == (numbered if number == 0 else set())
        assert all(name.endswith(".safetensors") for name in numbered)
        seen |= numbered
        for name in users if number == 0 else ():  # they look alike
            (tmp_path / name).write_text("mine")
    assert users < set(names_in(tmp_path))


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
