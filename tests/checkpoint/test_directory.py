"""Which checkpoints there are, which is the latest, and what becomes of those that runs have left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamshard import latest
from streamshard.checkpoint import directory as directory_module
from streamshard.checkpoint.dcp import Source
from streamshard.checkpoint.directory import (
    Partial,
    create_partial,
    find_checkpoint,
    next_number,
    publish_checkpoint,
    remove_partial,
)
from streamshard.checkpoint.load import read_directory
from streamshard.checkpoint.manifest import LARGEST, MANIFEST_NAME, Manifest, read_manifest
from streamshard.checkpoint.safetensors_file import FileRecord
from streamshard.errors import CheckpointError

FILE = "rank-00000-of-00001.safetensors"


def _put(directory: Path, number: int, saved_at: str, keep: int | None = None) -> Path:
    """A checkpoint with one file of four bytes."""
    return _publish(_begin(directory, number), number, saved_at, keep)


def _begin(directory: Path, number: int) -> Partial:
    partial = create_partial(directory, number)
    (partial.path / FILE).write_bytes(b"1234")
    return partial


def _publish(partial: Partial, number: int, saved_at: str = "2026-01-01", keep: int | None = None) -> Path:
    versions = {"streamshard": "0", "torch": "0", "saved_at": saved_at}
    state: dict[str, Any] = {"models": {}, "optimizers": {}, "trees": {}}
    return publish_checkpoint(
        partial, Manifest(number, 1, 1, versions, (FileRecord(FILE, 4, ["9be3e0a3"]),), {}, state), keep
    )


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


def test_a_whole_checkpoint_under_a_partial_name_is_found_and_gets_its_name(tmp_path: Path) -> None:
    """A run was killed before it renamed it, or before it deleted what it replaced. The newer of two is kept."""
    left = _put(tmp_path, 1, "2026-01-01").rename(tmp_path / "checkpoint-1.12345678.partial")
    (tmp_path / "checkpoint-1.partial").mkdir()
    assert latest(tmp_path) == left
    second = _put(tmp_path, 2, "2026-01-02")
    _assert_whole(tmp_path, "checkpoint-1", "checkpoint-2")
    shutil.copytree(second, tmp_path / "other")
    _put(tmp_path, 2, "2026-01-03").rename(left)
    (tmp_path / "other").rename(second)
    assert latest(tmp_path) == left
    left = left.rename(tmp_path / "checkpoint-2.12345678.partial")
    shutil.copytree(second, tmp_path / "checkpoint-2.87654321.partial")
    _put(tmp_path, 3, "2026-01-04")
    _assert_whole(tmp_path, "checkpoint-1", "checkpoint-2", "checkpoint-3")
    assert b"2026-01-03" in (second / MANIFEST_NAME).read_bytes()


def test_the_last_save_is_the_latest_whatever_the_clock_says(tmp_path: Path) -> None:
    """Clocks are corrected, and those of machines differ; numbers are the user's. `keep` goes by the same order."""
    for number, day in ((10, 9), (11, 8), (3, 7), (12, 6)):
        assert latest(tmp_path) != _put(tmp_path, number, f"2026-01-0{day}", keep=2) == latest(tmp_path)
    assert _names(tmp_path) == {"checkpoint-3", "checkpoint-12"}
    (tmp_path / "checkpoint-12" / FILE).unlink()  # not whole, but it counts
    assert read_manifest(_put(tmp_path, 1, "2026-01-01")).generation == 5


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
    """And what to run."""
    name, told = FOREIGN[kind]
    own = tmp_path / "own"
    (own / name).parent.mkdir(parents=True)
    (own / name).write_bytes(b"")
    expected = f"{own} is a.*{told.format(own)}"
    with pytest.raises(CheckpointError, match=f"^{expected}"):
        find_checkpoint(own)


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


# ------------------------------------------------------------------------------------------------ neighbours


@contextlib.contextmanager
def _as_nobody() -> Iterator[Path]:
    """Somebody who may not do everything, and a directory that is theirs."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as directory:
        if user == 0:
            os.chown(directory, 65534, 65534)
            os.setresuid(65534, 65534, 0)
        try:
            yield Path(directory)
        finally:
            if user == 0:
                os.setresuid(0, 0, 0)
            for path in Path(directory).rglob("*"):
                if not path.is_symlink():
                    path.chmod(0o700)


def test_neighbours_that_cannot_be_read_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """At the root of a volume is a lost+found, and directories of other people may be anywhere."""
    with _as_nobody() as root:
        (root / "lost+found").mkdir(mode=0)
        (root / "loop").symlink_to("loop")
        (root / os.fsdecode(b"\xff\x1b[2K")).mkdir()
        (root / "checkpoint-7").write_text("a file")
        first = _put(root, 1, "2026-01-01")
        assert latest(root) == find_checkpoint(root) == first
        assert _put(root, 2, "2026-01-01", keep=1) == latest(root)
        assert not first.exists()
        assert caplog.messages == []
        (root / "checkpoint-9").mkdir(mode=0)  # which may be the newest
        (root / "checkpoint-8").symlink_to("checkpoint-8")
        assert _put(root, 3, "2026-01-01", keep=1) == latest(root)
        assert any("checkpoint-9" in each and "Permission denied" in each for each in caplog.messages)
        with pytest.raises(CheckpointError, match="checkpoint-9 is there already"):
            create_partial(root, 9)
        with pytest.raises(CheckpointError, match=f"cannot read {root / 'lost'}.found: Permission denied"):
            latest(root / "lost+found")


def test_a_checkpoint_that_is_write_protected_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Whole, whatever `keep` is."""
    with _as_nobody() as root:
        protected = _put(root, 1, "2026-01-01")
        protected.chmod(0o500)
        for number in (2, 3):
            _put(root, number, "2026-01-01", keep=1)
        assert _names(root) == {"checkpoint-1", "checkpoint-3"}
        assert read_manifest(protected).number == 1
        assert caplog.messages == [f"{protected} stays, because it is write-protected"]


def test_one_that_goes_while_it_is_looked_for_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run deletes it."""
    first, second = _put(tmp_path, 1, "2026-01-01"), _put(tmp_path, 2, "2026-01-01")

    def read_late(path: Path) -> Manifest:
        shutil.rmtree(second, ignore_errors=True)
        return read_manifest(path)

    monkeypatch.setattr(directory_module, "read_manifest", read_late)
    assert latest(tmp_path) == first


def test_a_process_with_too_many_files_open_passes_nothing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin again from an older checkpoint, or from none."""
    _put(tmp_path, 1, "2026-01-01")

    def fail(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="cannot read .*Too many open files"):
        latest(tmp_path)


def test_nothing_raises_once_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller would take it for lost."""
    _put(tmp_path, 1, "2026-01-01")
    sync = directory_module.sync_directory

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "the disk is broken")
        sync(path)

    monkeypatch.setattr(directory_module, "sync_directory", fail)
    assert _put(tmp_path, 2, "2026-01-01", keep=1) == latest(tmp_path)
    assert "checkpoint-2 is saved" in caplog.text and "the disk is broken" in caplog.text
    assert _names(tmp_path) == {"checkpoint-1", "checkpoint-2"}  # which may be the newest on the disk


def test_the_largest_generation_is_no_end(tmp_path: Path) -> None:
    """Which nobody reaches by counting; the checkpoints that follow can be read all the same."""
    path = _put(tmp_path, 1, "2026-01-01")
    text = (path / MANIFEST_NAME).read_bytes()
    manifest = read_manifest(path)
    (path / MANIFEST_NAME).write_bytes(Manifest(**{**vars(manifest), "generation": LARGEST}).encode())
    assert text != (path / MANIFEST_NAME).read_bytes()
    assert _put(tmp_path, 2, "2026-01-01") == latest(tmp_path)


# ------------------------------------------------------------------------------------------------ two runs


def _assert_whole(directory: Path, *names: str) -> None:
    assert _names(directory) == set(names)
    for name in names:
        read_manifest(directory / name)
        assert (directory / name / FILE).read_bytes() == b"1234"


def test_two_runs_that_save_one_number_at_once_leave_a_whole_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that is published later is there in the end. Whoever begins later is told of the other."""
    for _ in range(2):  # there is none of that number; there is one
        first = _begin(tmp_path, 5)
        second = _begin(tmp_path, 5)
        assert [message for message in caplog.messages if f"another run is saving to {first.path}" in message]
        assert _publish(first, 5, "2026-01-01") == latest(tmp_path)
        assert _publish(second, 5, "2026-01-02") == latest(tmp_path)
        _assert_whole(tmp_path, "checkpoint-5")
        assert b"2026-01-02" in (tmp_path / "checkpoint-5" / MANIFEST_NAME).read_bytes()


@pytest.mark.parametrize("between", ["publishes", "begins", "ends"])
@pytest.mark.parametrize("call", [1, 2])
def test_another_run_between_two_renames_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, call: int
) -> None:
    """It publishes the same number, or sweeps up, before each of the calls that rename."""
    _put(tmp_path, 5, "2026-01-01")
    first, second = _begin(tmp_path, 5), _begin(tmp_path, 5)
    replace, calls = os.replace, 0

    def interrupted(*paths: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            if between == "publishes":
                _publish(second, 5, "2026-01-02")
            elif between == "begins":
                remove_partial(_begin(tmp_path, 6))
            else:
                _put(tmp_path, 5, "2026-01-02")
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    assert _publish(first, 5, "2026-01-03") == latest(tmp_path)
    remove_partial(second)
    _assert_whole(tmp_path, "checkpoint-5")
    assert b"2026-01-03" in (tmp_path / "checkpoint-5" / MANIFEST_NAME).read_bytes()


def test_a_partial_directory_that_is_gone_is_not_published(tmp_path: Path) -> None:
    """Whoever deleted it, or put another in its place: what was there before stays."""
    before = _put(tmp_path, 5, "2026-01-01")
    for is_replaced in (False, True):
        partial = _begin(tmp_path, 5)
        aside = partial.path.rename(tmp_path / "aside")
        if is_replaced:
            shutil.copytree(aside, partial.path)
        with pytest.raises(CheckpointError, match="was deleted or replaced while it was written|is not whole"):
            _publish(partial, 5, "2026-01-02")
        remove_partial(partial)
        shutil.rmtree(aside)
        assert latest(tmp_path) == before
    _put(tmp_path, 6, "2026-01-03")
    _assert_whole(tmp_path, "checkpoint-5", "checkpoint-6")


@pytest.mark.parametrize("left", ["checkpoint-3.partial", "checkpoint-3.12345678.partial", "checkpoint-3.x.partial"])
def test_what_a_killed_run_has_left_goes_with_the_next_save(tmp_path: Path, left: str) -> None:
    """Killed before there was a manifest, or after it; its lock went with it. A link's target stays."""
    (tmp_path / "own").mkdir()
    (tmp_path / "run").mkdir()
    partial = tmp_path / "run" / left
    partial.mkdir()
    (partial / FILE).write_bytes(b"1234")
    for has_manifest in (False, True):
        if has_manifest:
            killed = _begin(tmp_path / "run", 3)
            killed.path.rename(partial)
            killed.manifest.close()
        _put(tmp_path / "run", 1, "2026-01-01")
        _assert_whole(tmp_path / "run", "checkpoint-1")
    partial.symlink_to(tmp_path / "own")
    _put(tmp_path / "run", 1, "2026-01-01")
    _assert_whole(tmp_path / "run", "checkpoint-1")
    assert _names(tmp_path / "own") == set()


def test_without_locks_what_may_be_another_runs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some network file systems have none. It is said once."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    left = tmp_path / "checkpoint-1.12345678.partial"
    left.mkdir()
    for number in (1, 2):
        _put(tmp_path, number, "2026-01-01", keep=1)
        assert _names(tmp_path) == {f"checkpoint-{number}", left.name}
    assert [message.partition(":")[0] for message in caplog.messages] == [f"{left} stays"]


def test_a_directory_that_another_run_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the calls that make it and lock it: whoever sweeps up then may delete it."""

    due = ["flock", "mkdir"]  # calls before, or after, which another run sweeps up; from the last on

    def sweep_at(call: str) -> None:
        if due[-1:] == [call]:
            due.append("nothing")
            for left in tmp_path.iterdir():
                directory_module._sweep(left, tmp_path / "checkpoint-1")
            assert _names(tmp_path) == set()
            del due[-2:]

    mkdir, flock = os.mkdir, fcntl.flock

    def mkdir_and_sweep(*args: Any) -> None:
        mkdir(*args)
        sweep_at("mkdir")

    def sweep_and_flock(*args: Any) -> None:
        sweep_at("flock")
        flock(*args)

    monkeypatch.setattr(os, "mkdir", mkdir_and_sweep)
    monkeypatch.setattr(fcntl, "flock", sweep_and_flock)
    _publish(_begin(tmp_path, 1), 1)
    assert due == []
    _assert_whole(tmp_path, "checkpoint-1")
