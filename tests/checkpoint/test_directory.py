"""Which checkpoints there are, which is the latest, and what becomes of directories that runs have left."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from streamshard import latest
from streamshard.checkpoint.directory import next_number, open_intact
from streamshard.checkpoint.manifest import read_manifest
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import FILE, begin, few_files, publish, put


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def _assert_whole(directory: Path, *names: str) -> None:
    assert _names(directory) == set(names)
    for name in names:
        read_manifest(directory / name)
        assert (directory / name / FILE).read_bytes() == b"1234"


def test_the_last_save_is_the_latest_whatever_clocks_and_numbers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks are corrected, and those of machines differ; numbers are the user's. `keep` goes by the same order."""
    for number, now in ((10, 9), (11, 8), (3, 7), (12, 6)):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        assert latest(tmp_path) != put(tmp_path, number, keep=2) == latest(tmp_path)
    assert _names(tmp_path) == {"checkpoint-3", "checkpoint-12"}


def test_numbers_go_on_from_the_largest(tmp_path: Path) -> None:
    """Of directories that are called like a checkpoint, whole or not."""
    assert next_number(tmp_path / "nothing") == next_number(tmp_path) == 1
    too_long = f"checkpoint-{'9' * 200}"
    for name in ("checkpoint-7", "checkpoint-12-2", "checkpoint-9.0a1b2c3d.partial", "other-50", too_long):
        (tmp_path / name).mkdir()
    assert next_number(tmp_path) == 13


def test_a_second_checkpoint_with_a_number_does_not_overwrite_the_first(tmp_path: Path) -> None:
    """It gets another name, and is the latest; so it is for a file or a link with that name."""
    first = put(tmp_path, 5)
    (tmp_path / "checkpoint-6").symlink_to(first)
    assert put(tmp_path, 5) == latest(tmp_path) == tmp_path / "checkpoint-5-2"
    assert put(tmp_path, 6) == latest(tmp_path) == tmp_path / "checkpoint-6-2"
    _assert_whole(tmp_path, "checkpoint-5", "checkpoint-5-2", "checkpoint-6", "checkpoint-6-2")
    put(tmp_path, 7, keep=3)
    assert _names(tmp_path) == {"checkpoint-5-2", "checkpoint-6", "checkpoint-6-2", "checkpoint-7"}


@pytest.mark.parametrize(("name", "is_link"), [("best", True), ("checkpoint-best", False)])
def test_copies_and_links_of_ones_own_are_not_deleted(name: str, is_link: bool, tmp_path: Path) -> None:
    """A user may keep the best one, or a link to the latest, in the same directory."""
    for number in (1, 2, 3):
        path = put(tmp_path, number, keep=2)
        own = tmp_path / name
        if is_link:
            own.unlink(missing_ok=True)
            own.symlink_to(path.name)
        elif number == 1:
            shutil.copytree(path, own)
    assert _names(tmp_path) == {"checkpoint-2", "checkpoint-3", name}
    assert read_manifest(tmp_path / name).number == (3 if is_link else 1)


def test_the_error_says_why_a_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    """And the one about any other directory, what can be done with it."""
    put(tmp_path, 1)
    (tmp_path / "checkpoint-1" / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint-1 is not whole: {FILE}: No such file"):
        open_intact(tmp_path, RankGroup())
    for directory in (tmp_path / "nothing", tmp_path / "checkpoint-1" / FILE):
        with pytest.raises(CheckpointError, match="holds no whole checkpoint: .* `streamshard convert"):
            open_intact(directory, RankGroup())


def test_a_process_with_too_many_open_files_finds_no_checkpoint_damaged(tmp_path: Path) -> None:
    """`latest` would return None, and a run would begin again."""
    put(tmp_path, 1)
    with few_files(0), pytest.raises(OSError, match="Too many open files"):
        latest(tmp_path)


# ------------------------------------------------------------------------------------------------ two runs


def test_two_runs_that_save_one_number_at_once_both_leave_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither deletes what the other writes. The one that begins later warns."""
    first = begin(tmp_path, 5)
    second = begin(tmp_path, 5)
    assert f"another run is saving to {first.path}: give each run a directory of its own" in caplog.messages
    assert publish(first, 5) == latest(tmp_path) == tmp_path / "checkpoint-5"
    assert publish(second, 5) == latest(tmp_path) == tmp_path / "checkpoint-5-2"
    _assert_whole(tmp_path, "checkpoint-5", "checkpoint-5-2")


def test_the_next_save_deletes_what_a_killed_run_has_left(tmp_path: Path) -> None:
    """With a manifest whose lock is free, or without one. Other names are the user's."""
    for name in ("checkpoint-3.partial", "mine.12345678.partial", "checkpoint-3.x.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-3.12345678.partial").mkdir()
    killed = begin(tmp_path, 4)
    killed.manifest.close()
    put(tmp_path, 1)
    assert _names(tmp_path) == {
        "checkpoint-1",
        "checkpoint-3.partial",
        "mine.12345678.partial",
        "checkpoint-3.x.partial",
    }


def test_without_locks_a_partial_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On such a file system nothing tells a killed run from a live one."""

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    left = begin(tmp_path, 1)
    left.manifest.close()
    put(tmp_path, 2)
    assert _names(tmp_path) == {left.path.name, "checkpoint-2"}
    assert any(str(left.path) in message for message in caplog.messages)
