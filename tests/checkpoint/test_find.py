"""A checkpoint that is damaged, or that cannot be read, stops no save and no search, and is never deleted."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streamshard import latest
from streamshard.checkpoint import directory, safetensors_file
from streamshard.checkpoint.directory import open_intact
from streamshard.checkpoint.safetensors_file import OpenFiles
from streamshard.checkpoint.storage import MANIFEST_NAME
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import FILE, put, rewrite


@contextlib.contextmanager
def failing(path: Path, code: int) -> Iterator[None]:
    """Inside, the system cannot open or look at `path`."""

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(name: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(name, int) and os.fspath(name) == str(path):
                raise OSError(code, os.strerror(code), str(path))
            return real(name, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "stat"):
            patch.setattr(os, name, watch(getattr(os, name)))
        yield


def _replace_manifest(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def act(checkpoint: Path) -> None:
        (checkpoint / MANIFEST_NAME).unlink()
        make(checkpoint / MANIFEST_NAME)

    return act


def _set(**others: Any) -> Callable[[Path], object]:
    return lambda checkpoint: rewrite(checkpoint, lambda content: content.update(others))


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
    "a generation of text": _set(generation="x"),
    "a generation that is no number": _set(generation=float("nan")),
    "a number of text": _set(number="x"),
    "state in a list": _set(state=[]),
}


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_stops_neither_saves_nor_searches(
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
def test_a_checkpoint_that_cannot_be_read_now_is_older_than_saves_made_meanwhile(
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: Exception
) -> None:
    """The newest is intact, whether a manifest cannot be read, a file cannot be verified or cannot be mapped."""
    put(tmp_path, 1)
    newest = put(tmp_path, 2)

    @contextlib.contextmanager
    def lacking(module: ModuleType, name: str) -> Iterator[None]:
        real = getattr(module, name)

        def call(path: Path, *args: Any, **options: Any) -> Any:
            if newest in (path, path.parent):
                raise lack
            return real(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, call)
            yield

    for module, name in ((directory, "read_manifest"), (directory, "verify_files")):
        with lacking(module, name), pytest.raises((CheckpointError, OSError), match=re.escape(str(lack))):
            open_intact(tmp_path, RankGroup())
    with lacking(safetensors_file, "safe_open"), pytest.raises(type(lack)):
        OpenFiles(newest).open(FILE)
    assert open_intact(tmp_path, RankGroup())[0].root == newest


def _flip(checkpoint: Path) -> None:
    content = bytearray((checkpoint / FILE).read_bytes())
    content[0] ^= 1
    (checkpoint / FILE).write_bytes(content)


def test_the_newest_intact_checkpoint_is_opened_and_newer_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flipped bit is found when the files are read, a lost file before; each is named with its reason."""
    alone = RankGroup()
    paths = [put(tmp_path, number) for number in (1, 2, 3, 4, 5)]
    _flip(paths[4])
    (paths[3] / FILE).unlink()
    (paths[2] / MANIFEST_NAME).unlink()
    _flip(paths[0])
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
            assert str(caught.value).startswith(f"{path} holds no whole checkpoint")
        else:
            assert str(caught.value).endswith(told)
    _flip(paths[1])
    with pytest.raises(CheckpointError, match=".*".join(f"checkpoint-{number}/" for number in (3, 5, 2, 1))):
        open_intact(tmp_path, alone)
