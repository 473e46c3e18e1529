"""Which checkpoints there are, which is the latest, and what becomes of directories that runs have left.

A checkpoint that is damaged, or that cannot be read, stops no save and no search, and is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from streamshard import latest
from streamshard.checkpoint import directory, safetensors_file
from streamshard.checkpoint.directory import next_number, open_intact
from streamshard.checkpoint.manifest import read_manifest
from streamshard.checkpoint.safetensors_file import OpenFiles
from streamshard.checkpoint.storage import MANIFEST_NAME
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import FILE, begin, flip, publish, put


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
    for name in ("checkpoint-7", "checkpoint-12-2", "checkpoint-9.0a1b2c3d.partial", "other-50"):
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


def test_copies_and_links_of_ones_own_are_not_deleted(tmp_path: Path) -> None:
    """A user may keep the best one, or a link to the latest, in the same directory."""
    link, copy = tmp_path / "best", tmp_path / "checkpoint-best"
    for number in (1, 2, 3):
        path = put(tmp_path, number, keep=2)
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        if number == 1:
            shutil.copytree(path, copy)
    assert _names(tmp_path) == {"checkpoint-2", "checkpoint-3", link.name, copy.name}
    assert (read_manifest(link).number, read_manifest(copy).number) == (3, 1)


def test_two_runs_may_save_one_number_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither deletes what the other writes. The one that begins later warns."""
    first = begin(tmp_path, 5)
    second = begin(tmp_path, 5)
    assert f"another run is saving to {first.path}: give each run a directory of its own" in caplog.messages
    assert publish(first, 5) == latest(tmp_path) == tmp_path / "checkpoint-5"
    assert publish(second, 5) == latest(tmp_path) == tmp_path / "checkpoint-5-2"
    _assert_whole(tmp_path, "checkpoint-5", "checkpoint-5-2")


def test_the_next_save_deletes_what_a_killed_run_has_left(tmp_path: Path) -> None:
    """With a manifest whose lock is free, or without one. Other names are the user's."""
    users = {"checkpoint-3.partial", "mine.12345678.partial", "checkpoint-3.x.partial"}
    for name in (*users, "checkpoint-3.12345678.partial"):
        (tmp_path / name).mkdir()
    killed = begin(tmp_path, 4)
    killed.manifest.close()
    put(tmp_path, 1)
    assert _names(tmp_path) == {"checkpoint-1", *users}


def test_without_locks_a_partial_directory_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On such a file system nothing tells a killed run from a live one."""
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))):
        left = begin(tmp_path, 1)
        left.manifest.close()
        put(tmp_path, 2)
    assert _names(tmp_path) == {left.path.name, "checkpoint-2"}
    assert any(str(left.path) in message for message in caplog.messages)


@contextlib.contextmanager
def raising(error: Exception, path: Path, *functions: tuple[ModuleType, str]) -> Iterator[None]:
    """Inside, these functions, whose first argument is a path, raise for this one."""

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(given: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(given, int) and os.fspath(given) == str(path):
                raise error
            return real(given, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in functions:
            patch.setattr(module, name, watch(getattr(module, name)))
        yield


def failing(path: Path, code: int) -> contextlib.AbstractContextManager[None]:
    """Inside, the system cannot open or look at `path`."""
    return raising(OSError(code, os.strerror(code), str(path)), path, (os, "open"), (os, "stat"))


def _replace_manifest(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def act(checkpoint: Path) -> None:
        (checkpoint / MANIFEST_NAME).unlink()
        make(checkpoint / MANIFEST_NAME)

    return act


def _edit(manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes().replace(b"2026", b"2027"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no manifest": lambda checkpoint: os.unlink(checkpoint / MANIFEST_NAME),
    "a manifest that is a directory": _replace_manifest(os.mkdir),
    "a manifest that is a pipe": _replace_manifest(os.mkfifo),
    "a manifest that is a device": _replace_manifest(lambda path: path.symlink_to("/dev/zero")),
    "no file": lambda checkpoint: os.unlink(checkpoint / FILE),
    "a file that is cut": lambda checkpoint: os.truncate(checkpoint / FILE, 1),
    "a manifest that was edited": lambda checkpoint: _edit(checkpoint / MANIFEST_NAME),
    "no checkpoint but a file": lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.write_bytes(b"")),
}


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int, damage: str
) -> None:
    """The log names it, unless it is known to be older than the one that is found. `keep` leaves it alone."""
    paths = [put(tmp_path, number) for number in (1, 2, 3)]
    damaged = paths[place - 1]
    DAMAGES[damage](damaged)
    before = sorted(damaged.rglob("*"))
    assert latest(tmp_path) == open_intact(tmp_path, RankGroup())[0].root == (paths[2] if place == 1 else paths[1])
    is_older = place == 1 and damage.startswith(("no file", "a file"))  # its manifest is whole
    assert is_older or any(f"passed over {damaged}: " in message for message in caplog.messages)
    assert put(tmp_path, 4, keep=1) == latest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {damaged.name, "checkpoint-4"}
    assert sorted(damaged.rglob("*")) == before


@pytest.mark.parametrize(
    ("place", "name", "code"),
    [(1, MANIFEST_NAME, errno.EIO), (3, FILE, errno.EACCES), (3, MANIFEST_NAME, errno.ESTALE)],
)
def test_what_cannot_be_read_now_is_older_than_saves_made_meanwhile(
    tmp_path: Path, place: int, name: str, code: int
) -> None:
    """Also after it can be read again, whichever of the newer ones cannot be read then. It is not deleted."""
    paths = [put(tmp_path, number) for number in (7, 8, 9)]
    with failing(paths[place - 1] / name, code):
        assert latest(tmp_path) == (paths[2] if place == 1 else paths[1])
        second = put(tmp_path, 1, keep=1)
        assert latest(tmp_path) == second
    assert latest(tmp_path) == second
    with failing(paths[place - 1] / name, code), failing(second / name, code):
        third = put(tmp_path, 1, keep=2)
    assert latest(tmp_path) == third
    assert {path.name for path in tmp_path.iterdir()} == {paths[place - 1].name, second.name, third.name}


def test_latest_raises_if_the_only_checkpoint_cannot_be_read(tmp_path: Path) -> None:
    """None would let the run begin again."""
    path = put(tmp_path, 1)
    with failing(path / MANIFEST_NAME, errno.EIO), pytest.raises(CheckpointError, match="Input/output error"):
        latest(tmp_path)
    with failing(tmp_path, errno.EACCES), pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        open_intact(tmp_path / "nothing", RankGroup())


def test_a_save_into_a_checkpoint_does_not_delete_the_checkpoint(tmp_path: Path) -> None:
    outer = put(tmp_path, 1)
    inner = put(outer, 2, keep=1)
    assert latest(tmp_path) == outer
    assert inner.exists()


@pytest.mark.parametrize(
    "lack",
    [
        MemoryError("Cannot allocate memory (os error 12)"),  # of safetensors
        RuntimeError("unable to mmap 8 bytes from file </rank-0>: Cannot allocate memory (12)"),  # of torch
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_shortage_in_the_process_makes_no_load_go_back_to_an_older_checkpoint(
    tmp_path: Path, lack: Exception
) -> None:
    """The newest is intact, whether a manifest cannot be read, a file cannot be verified or cannot be mapped."""
    put(tmp_path, 1)
    newest = put(tmp_path, 2)
    for name, find in (
        ("read_manifest", lambda: latest(tmp_path)),  # None would let a run begin again
        ("read_manifest", lambda: open_intact(tmp_path, RankGroup())),
        ("verify_files", lambda: open_intact(tmp_path, RankGroup())),
    ):
        refused = pytest.raises((CheckpointError, type(lack)), match=re.escape(str(lack)))
        with raising(lack, newest, (directory, name)), refused:
            find()
    with raising(lack, newest / FILE, (safetensors_file, "safe_open")), pytest.raises(type(lack)):
        OpenFiles(newest).open(FILE)
    assert open_intact(tmp_path, RankGroup())[0].root == newest


def test_the_newest_intact_checkpoint_is_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit is found when the files are read, a lost file before; each is named with its reason."""
    alone = RankGroup()
    paths = [put(tmp_path, number) for number in (1, 2, 3, 4, 5)]
    flip(paths[4] / FILE)
    (paths[3] / FILE).unlink()
    (paths[2] / MANIFEST_NAME).unlink()
    flip(paths[0] / FILE)
    files, passed_over = open_intact(tmp_path, alone)
    assert files.root == paths[1]
    assert passed_over.keys() == {*paths[2:]}
    assert "its checksums differ" in passed_over[paths[4]]
    assert f"not whole: {FILE}" in passed_over[paths[3]]
    assert f"{MANIFEST_NAME}: No such file" in passed_over[paths[2]]
    assert caplog.messages == [f"passed over {path}: {why}" for path, why in passed_over.items()]
    for path in paths[2:]:
        told = f"{passed_over[path]}. Give its directory, {tmp_path}, for the newest intact checkpoint in there"
        with pytest.raises(CheckpointError) as caught:
            open_intact(path, alone)
        if path == paths[2]:
            assert re.match(f"{path} holds no whole checkpoint: .* `streamshard convert", str(caught.value))
        else:
            assert str(caught.value).endswith(told)
    flip(paths[1] / FILE)
    with pytest.raises(CheckpointError, match=".*".join(f"checkpoint-{number}/" for number in (3, 5, 2, 1))):
        open_intact(tmp_path, alone)
