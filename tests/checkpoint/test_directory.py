"""Which checkpoints there are, which is the latest, and what becomes of those that runs have left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamshard import latest
from streamshard.checkpoint.dcp_files import Source
from streamshard.checkpoint.directory import create_partial, find_checkpoint, next_number, publish_checkpoint
from streamshard.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest
from streamshard.checkpoint.stored_files import read_directory
from streamshard.errors import CheckpointError

FILE = "rank-00000-of-00001.safetensors"


def _put(directory: Path, number: int, saved_at: str, keep: int | None = None) -> Path:
    """A checkpoint with one file of four bytes."""
    partial = create_partial(directory, number)
    (partial / FILE).write_bytes(b"1234")
    record = FileRecord(FILE, 4, "9be3e0a3")
    versions = {"streamshard": "0", "torch": "0", "saved_at": saved_at}
    state: dict[str, Any] = {"models": {}, "optimizers": {}, "trees": {}}
    return publish_checkpoint(partial, Manifest(number, 1, 1, versions, (record,), {}, state), keep)


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("damage", ["cut", "longer", "lost", "manifest"])
def test_the_latest_is_the_latest_that_is_whole(tmp_path: Path, damage: str) -> None:
    """One that is not is passed over, by whoever looks for it."""
    first, second = _put(tmp_path, 1, "2026-01-01"), _put(tmp_path, 2, "2026-01-02")
    assert latest(tmp_path) == second
    if damage == "lost":
        os.unlink(second / FILE)
    else:
        path = second / (MANIFEST_NAME if damage == "manifest" else FILE)
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-1], "longer": content + b" "}.get(damage, content.replace(b"2026", b"2027")))
    assert latest(tmp_path) == find_checkpoint(tmp_path) == first
    assert _put(tmp_path, 3, "2026-01-03", keep=1) == latest(tmp_path)
    assert _names(tmp_path) == {"checkpoint-2", "checkpoint-3"}  # what is damaged is for people to look at


def test_one_that_was_put_aside_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    """By a run that was killed while it replaced it."""
    first = _put(tmp_path, 1, "2026-01-01")
    aside = first.rename(tmp_path / "checkpoint-1.replaced")
    (tmp_path / "checkpoint-1.partial").mkdir()
    assert latest(tmp_path) == aside
    _put(tmp_path, 2, "2026-01-02")
    assert _names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    assert (first / FILE).read_bytes() == b"1234"


def test_what_was_replaced_goes_where_its_successor_is_there(tmp_path: Path) -> None:
    """The newer one counts until then."""
    _put(tmp_path, 1, "2026-01-01").rename(tmp_path / "checkpoint-1.replaced")
    newer = tmp_path / "checkpoint-1"
    _put(tmp_path / "other", 1, "2026-01-02").rename(newer)
    assert latest(tmp_path) == newer
    _put(tmp_path, 2, "2026-01-03")
    assert _names(tmp_path) == {"checkpoint-1", "checkpoint-2", "other"}
    assert b"2026-01-02" in (newer / MANIFEST_NAME).read_bytes()


def test_the_one_that_was_just_saved_stays(tmp_path: Path) -> None:
    """Whatever the clock says, of another machine for example."""
    _put(tmp_path, 1, "2030-01-01")
    assert _put(tmp_path, 2, "2026-01-01", keep=1).is_dir()
    _put(tmp_path, 3, "2026-01-02", keep=1)
    assert _names(tmp_path) == {"checkpoint-1", "checkpoint-3"}


@pytest.mark.parametrize("name", ["best", "checkpoint-best", "checkpoint-1-backup", "checkpoint-01"])
@pytest.mark.parametrize("is_link", [False, True])
def test_copies_and_links_of_ones_own_are_neither_counted_nor_deleted(name: str, is_link: bool, tmp_path: Path) -> None:
    """Somebody keeps the best one, or a link to the latest, in the same directory."""
    for number in (1, 2, 3):
        path = _put(tmp_path, number, f"2026-01-0{number}", keep=2)
        own = tmp_path / name
        if is_link:
            own.unlink(missing_ok=True)
            own.symlink_to(path.name)
        elif number == 1:
            shutil.copytree(path, own)
    assert _names(tmp_path) == {"checkpoint-2", "checkpoint-3", name}
    assert read_manifest(tmp_path / name).number == (3 if is_link else 1)


def test_a_link_in_the_place_of_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    """What it leads to stays; as often as it is saved."""
    elsewhere = _put(tmp_path / "elsewhere", 5, "2026-01-01")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-5").symlink_to(elsewhere)
    for day in (2, 3, 4):
        _put(tmp_path / "run", 5, f"2026-01-0{day}")
        assert _names(tmp_path / "run") == {"checkpoint-5"}
    assert latest(elsewhere.parent) == elsewhere


def test_why_what_is_there_is_not_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """To whoever gives the directory of it: a newer format, a damaged file. The log has it once."""
    _put(tmp_path, 1, "2026-01-01").joinpath(FILE).write_bytes(b"12")
    with pytest.raises(CheckpointError, match=f"holds no whole checkpoint: .*checkpoint-1.*{FILE}"):
        find_checkpoint(tmp_path)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["passed over"]


FOREIGN = {
    "of torch.distributed.checkpoint": (".metadata", "streamshard convert {} OUT --from dcp makes a checkpoint of it"),
    "of accelerate and FSDP2": ("pytorch_model_fsdp_0/.metadata", "streamshard convert {} OUT --from dcp"),
    "an export": ("model.safetensors", "Hugging Face directory.*load_safetensors read it, streamshard inspect {} "),
    "a large export": ("model.safetensors.index.json", "Hugging Face directory.*streamshard inspect {} verifies it"),
    "adapters": ("adapter_model.safetensors", "directory of PEFT's.*from_pretrained"),
    "pickled weights": ("pytorch_model.bin", "pickled weights.*from_pretrained"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint_is_told_by_its_files(tmp_path: Path, kind: str) -> None:
    """And what to run, for the directory itself and for one that holds it."""
    name, told = FOREIGN[kind]
    own = tmp_path / "own"
    (own / name).parent.mkdir(parents=True)
    (own / name).write_bytes(b"")
    expected = f"{own} is a.*{told.format(own)}"
    with pytest.raises(CheckpointError, match=f"^{expected}"):
        find_checkpoint(own)
    with pytest.raises(CheckpointError, match=f"^{tmp_path} holds no whole checkpoint; {expected}"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("inside", ["", "checkpoint-3"])
def test_a_checkpoint_is_told_to_those_who_want_another_kind(tmp_path: Path, inside: str) -> None:
    """Whoever loads an export, or converts from DCP; given the checkpoint or the directory of it."""
    _put(tmp_path / "run", 3, "2026-01-01")
    own = tmp_path / "run" / inside
    told = f"{own} is a checkpoint of save_checkpoint.* no {{}}: .*streamshard export {own} OUT"
    with pytest.raises(CheckpointError, match=told.format("Hugging Face directory")):
        read_directory(own)
    with pytest.raises(CheckpointError, match=told.format("directory of torch.distributed.checkpoint")):
        Source(own)


def test_a_damaged_checkpoint_is_not_told_to_be_one(tmp_path: Path) -> None:
    """Whoever wants one wants a whole one."""
    _put(tmp_path, 3, "2026-01-01").joinpath(MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=f"^{tmp_path} holds no whole checkpoint: .*{MANIFEST_NAME} is damaged"):
        find_checkpoint(tmp_path)


def test_checkpoints_one_directory_further_down_are_named(tmp_path: Path) -> None:
    """The latest of all that are whole, rather than what else is there."""
    _put(tmp_path / "first", 2, "2026-01-02")
    _put(tmp_path / "first", 1, "2026-01-01")
    _put(tmp_path / "second", 1, "2026-01-01")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "model.safetensors").write_bytes(b"")
    first = tmp_path / "first"
    with pytest.raises(CheckpointError, match=f"but {first} in it does, the latest being {first / 'checkpoint-2'}$"):
        find_checkpoint(tmp_path)


def test_numbers_go_on_from_whatever_has_one(tmp_path: Path) -> None:
    """Also of what is no checkpoint, or not one yet."""
    assert next_number(tmp_path / "none") == 1
    for name in ("checkpoint-7.partial", "checkpoint-9", "checkpoint-x", "step-30"):
        (tmp_path / name).mkdir()
    assert next_number(tmp_path) == 10
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is no directory"):
        find_checkpoint(tmp_path / "none")
