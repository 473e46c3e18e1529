"""The checkpoints of a run, side by side in one directory: add one, delete old ones.

`write_together` is how saves and exports write files: rank 0 makes a partial directory, all ranks write into it, rank 0
publishes it.

[Note: how a checkpoint appears]
A save writes into a *partial* directory, whose name ends in ``.partial`` and is never used again. When all files are on
the disk, one rename gives the directory its name. Until then there is no checkpoint, afterwards there is a whole one.
Nothing is ever overwritten: if ``checkpoint-1000`` exists, the new one is called ``checkpoint-1000-2``.

[Note: two runs in one directory]
A requeued job may start while its predecessor still saves. So each save holds a lock (flock) on the manifest in its
partial directory. The manifest is created first and filled last. The system releases the lock when the process ends,
however it ends. A save deletes partial directories whose lock is free: killed runs have left them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

from streamshard.checkpoint.find import PARTIAL, Entry, check_sizes, is_named_as_ours, survey
from streamshard.checkpoint.manifest import MANIFEST_NAME, MAX_GENERATION, Manifest
from streamshard.checkpoint.safetensors_file import sync_directory, write_all
from streamshard.comm.ranks import RankGroup, run_on_all_ranks, run_on_first
from streamshard.errors import CheckpointError, StreamShardError, log

_LEFT = re.compile(r"(checkpoint-\d+(-\d+)?|model)\.[0-9a-f]{8}\.partial")

_AHEAD = 1 << 20
"""By how much the generation of a checkpoint that cannot be read now is at most larger than the largest known one."""

_Written = TypeVar("_Written")
_Published = TypeVar("_Published")


def write_together(
    ranks: RankGroup,
    doing: str,
    root: Path,
    name: str,
    *,
    prepare: Callable[[Path], object] = lambda _: None,
    write: Callable[[Path], _Written],
    publish: Callable[[Partial, list[_Written]], _Published],
    alone: bool = False,
) -> _Published:
    """Write files from all ranks into a partial directory, which the first rank publishes. Collective.

    Args:
        ranks: the ranks.
        doing: what is done, for messages.
        root: gets the partial directory.
        name, alone: see `create_partial`.
        prepare: called with the partial directory, on the first rank.
        write: called with the partial directory, on every rank.
        publish: called with the partial directory and what `write` has returned on each rank; on the first rank.

    Returns:
        What `publish` has returned, on every rank.

    Raises:
        CheckpointError: on every rank; names the rank and the cause. The partial directory is gone.
    """
    mine: list[Partial] = []  # the first rank's, which alone deletes and renames it

    def start() -> str:
        mine.append(create_partial(root, name, alone=alone))
        prepare(mine[0].path)
        return mine[0].path.name

    try:
        path = root / run_on_first(ranks, doing, start)
        written = ranks.gather_results(doing, lambda: write(path))
        return run_on_first(ranks, doing, lambda: publish(mine[0], written))
    except BaseException:
        for partial in mine:
            remove_partial(partial)
        with contextlib.suppress(StreamShardError):  # raises at once if ranks cannot reach each other any more
            run_on_all_ranks(ranks, doing, lambda: None)  # no rank returns before the directory is gone
        raise


class Partial(NamedTuple):
    """A directory that one save writes to. See [Note: two runs in one directory].

    Attributes:
        path: its name ends in ``.partial``.
        manifest: a file in it, open and locked; empty until the checkpoint is published.
    """

    path: Path
    manifest: FileIO


def create_partial(directory: Path, name: str, *, alone: bool = False) -> Partial:
    """Make a partial directory in `directory` for what will be called `name`, and delete those of killed runs.

    Args:
        directory: made if it is not there.
        name: of the checkpoint, or ``"model"`` for an export.
        alone: another process may not write to `directory` at the same time.

    Raises:
        CheckpointError: with `alone`, another process is writing there.
        OSError: it cannot be made.
    """
    os.makedirs(directory, exist_ok=True)
    partial = _create(directory, name)
    try:
        for left in directory.iterdir():
            if left != partial.path and _LEFT.fullmatch(left.name) and not _delete_unless_locked(left):
                if alone:
                    raise CheckpointError(f"another process is writing to {left}: write from one process at a time")
                log.warning("another run is saving to %s: give each run a directory of its own", left)
    except BaseException:
        remove_partial(partial)
        raise
    return partial


def _create(directory: Path, name: str) -> Partial:
    while True:
        path = directory / f"{name}.{secrets.token_hex(4)}{PARTIAL}"
        with contextlib.ExitStack() as undo:  # also of an interrupt: a lock would refuse the next export
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            try:
                os.mkdir(path)
                manifest = FileIO(os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "r+")
            except FileNotFoundError:  # another run has deleted it before it was locked
                continue
            undo.callback(manifest.close)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(manifest, fcntl.LOCK_EX)  # waits for another run that deletes the directory right now
            if (path / MANIFEST_NAME).exists():
                undo.pop_all()
                return Partial(path, manifest)


def remove_partial(partial: Partial) -> None:
    """Delete the partial directory, unless it was published."""
    try:
        shutil.rmtree(partial.path, ignore_errors=True)
    finally:
        partial.manifest.close()


def publish_checkpoint(partial: Partial, manifest: Manifest, keep: int | None) -> Path:
    """Make a checkpoint of `partial`, whose files are all there, then delete all but the newest `keep`.

    A copy under another name, a link, and a write-protected directory are not deleted. An error leaves everything as it
    was. After the rename nothing raises: a checkpoint that cannot be deleted is logged.

    Returns:
        The checkpoint's path: ``checkpoint-N``, or ``checkpoint-N-2`` and so on if that exists.
    """
    check_sizes(partial.path, manifest)
    directory = partial.path.parent
    earlier = survey(directory)
    descriptor = partial.manifest.fileno()
    write_all(descriptor, manifest._replace(generation=_next_generation(earlier)).encode(), 0)
    os.fsync(descriptor)
    sync_directory(partial.path)
    path = _rename_to_unused(partial.path, directory / f"checkpoint-{manifest.number}")
    partial.manifest.close()
    try:
        sync_directory(directory)
        if keep is not None:
            _delete_old([each.path for each in earlier if not each.wrong and each.path != directory], keep - 1)
    except OSError as error:
        log.warning("%s is saved; older ones are not deleted: %s", path, error)
    return path


def _next_generation(earlier: Sequence[Entry]) -> int:
    """One more than the largest in the directory, or far more if it has a checkpoint that the system cannot read now.

    Raises:
        CheckpointError: there is none.
    """
    known = max((each.manifest.generation for each in earlier if each.manifest is not None), default=0)
    unread = sum(each.manifest is None and each.may_be_whole for each in earlier)
    if (generation := known + 1 + unread * _AHEAD) > MAX_GENERATION:
        raise CheckpointError(f"a checkpoint beside it has generation {known}, the largest there may be: move it away")
    return generation


def _delete_old(paths: Sequence[Path], keep: int) -> None:
    """Delete all but the last `keep` of our own checkpoints. Each that cannot be deleted is logged."""
    own = [path for path in paths if is_named_as_ours(path) and not path.is_symlink()]
    for old in own[: max(len(own) - keep, 0)]:
        try:
            is_ours = os.access(old, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
            if is_ours and os.stat(old).st_mode & stat.S_IWUSR:  # root may write to all
                gone = old.with_name(f"{old.name}.{secrets.token_hex(4)}{PARTIAL}")
                os.rename(old, gone)  # first: what a kill leaves is no checkpoint, and the next save deletes it
                shutil.rmtree(gone)
                log.info("deleted %s: it is older than the newest %d", old, keep + 1)
        except OSError as error:
            log.warning("%s could not be deleted: %s", old, error)


def _rename_to_unused(partial: Path, path: Path) -> Path:
    for place in itertools.count(1):
        free = path if place == 1 else path.with_name(f"{path.name}-{place}")
        if not os.path.lexists(free):
            try:
                os.rename(partial, free)
                return free
            except OSError as error:  # another run has just published one with this name
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    raise AssertionError("not reached")


def _delete_unless_locked(left: Path) -> bool:
    """Delete what a killed run has left. False if its lock is held. See [Note: two runs in one directory]."""
    try:
        with open(left / MANIFEST_NAME, "r+b") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    except FileNotFoundError:  # a killed run had begun to delete it
        shutil.rmtree(left, ignore_errors=True)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s stays, because its manifest cannot be locked: %s", left, error)
    return True
