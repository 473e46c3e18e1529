"""A kill or an error anywhere in a save loses nothing that a save had returned."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.errors import CheckpointError
from tests.checkpoint.changes import CHANGES, at_change
from tests.models import DIM, Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, case


class Killed(BaseException):
    """The process is no more."""


def _kill(call: Callable[[], object]) -> None:
    raise Killed


def _fail(call: Callable[[], object]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fail_late(call: Callable[[], object]) -> None:
    call()
    _fail(call)


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
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"step": 2}, {"checkpoint-1", "checkpoint-2", "checkpoint-2-2", "checkpoint-9"}),
        ({"step": 3, "keep": 1}, {"checkpoint-9"}),
    ]
    ways = ((_kill, CHANGES), (_fail, CHANGES), (_fail_late, CHANGES - {"rename"}))
    for (act, changes), (settings, names) in itertools.product(ways, cases):
        for number in itertools.count():
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(tmp_path / "before", directory)
            returned, at = 2, at_change(number, act, changes, lasting=act is _kill)
            with at as reached, contextlib.suppress(Killed, CheckpointError):
                save_checkpoint(directory, model, extra={"at": 3}, **settings)
                returned = 3
            if not reached():
                break
            outcomes.add((act, returned))
            with case((act, settings, number)):
                assert act is _kill or returned == 3 or _files(directory) == before
                assert load_checkpoint(directory, model)["at"] in (returned, 3)
                save_checkpoint(directory, model, extra={"at": 4}, **{**settings, "step": 9})
                found = {each.name for each in directory.iterdir()}
                assert found in (names, names - {"checkpoint-2-2"} if returned == 2 else names), found
    assert outcomes == {*itertools.product((_kill, _fail, _fail_late), (2, 3))} - {(_kill, 3)}
