"""A directory of checkpoints: find the newest intact checkpoint, add one, delete old ones.

Saves and exports write files with `write_together`: rank 0 makes a partial directory, all ranks write into it, rank 0
publishes it.

[Note: whole and intact]
A checkpoint is *whole* if its manifest can be read and used, and all files are there with their recorded sizes. It is
*intact* if the files also match their checksums. Saves and `latest` look for whole checkpoints, and read no tensors.
Loads look for intact checkpoints, before anything changes. A checkpoint that is damaged, or that the system cannot
read, stops no save and no load of another one, and is never deleted. If a process lacks memory or file descriptors,
nothing is said of the checkpoint: the save or load raises.

[Note: how a checkpoint appears]
A save writes into a *partial* directory, whose name ends in ``.partial`` and is never used again. When all files are on
the disk, one rename gives the directory its name. Before the rename there is no checkpoint, afterwards a whole one.
Saves overwrite nothing: if ``checkpoint-1000`` exists, the new one is called ``checkpoint-1000-2``. On object storage
the manifest takes the place of the rename: see `object_store.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from streamshard.checkpoint.manifest import CheckpointFiles, Manifest, read_manifest
from streamshard.checkpoint.safetensors_file import verify_files
from streamshard.checkpoint.storage import MANIFEST_NAME, Location, Partial, number_in, parse_location, storage_of
from streamshard.comm.ranks import RankGroup, refuse_differences, run_on_all_ranks, run_on_first
from streamshard.errors import CheckpointError, StreamShardError, describe, is_shortage, log, printable

_Written = TypeVar("_Written")
_Published = TypeVar("_Published")
_Place = TypeVar("_Place", bound=Location)


class Entry(NamedTuple):
    """A checkpoint in a directory. Its manifest was read, and the sizes of its files; not the files themselves.

    Attributes:
        path: its path or URL.
        manifest: None if it cannot be read or used.
        wrong: why the checkpoint cannot be used; "" if it is whole. See [Note: whole and intact].
        may_be_whole: False if it is damaged. True if the system cannot read it now (no permission, a failing disk).
    """

    path: Location
    manifest: Manifest | None
    wrong: str = ""
    may_be_whole: bool = True

    @property
    def order(self) -> tuple[float, int, bool]:
        """Sort key: newest last, entries without a manifest behind all others, a user's copy before its original."""
        made = self.manifest
        return (math.inf, 0, False) if made is None else (made.generation, made.number, is_named_as_ours(self.path))


def latest(directory: str | os.PathLike[str]) -> Location | None:
    """The latest whole checkpoint in `directory`, a path or a URL; None if there is none.

    A checkpoint is whole if its manifest matches its checksum, and all files are there with their recorded sizes.
    `load_checkpoint` verifies the files' contents. Generation numbers order the checkpoints. The log names
    checkpoints that are passed over, and why.

    Raises:
        CheckpointError: no checkpoint is whole, and the system cannot read some checkpoint now (no permission, a
            failing disk).
        ConfigError: `directory` is not a path.
    """
    root = parse_location("directory", directory)
    entries = survey(root)
    newest = next((each for each in reversed(entries) if not each.wrong), None)
    passed_over = {each.path: each.wrong for each in entries[entries.index(newest) + 1 if newest else 0 :]}
    if newest is None and any(each.may_be_whole for each in entries):  # None would let the run begin again
        raise no_checkpoint(root, passed_over)
    _warn(passed_over)
    return newest.path if newest else None


def _warn(passed_over: Mapping[Location, str]) -> None:
    for path, why in passed_over.items():
        log.warning("passed over %s: %s", printable(str(path)), why)


def survey(directory: Location) -> list[Entry]:
    """Read the manifests of all checkpoints in `directory`, and of `directory` if it is a checkpoint. Newest last.

    A local directory with a checkpoint's name and no manifest is a damaged checkpoint.

    Raises:
        OSError: the system cannot read the directory.
    """
    inside = [read_entry(directory / name) for name in sorted(storage_of(directory).complete())]
    outer = [read_entry(directory)] if is_checkpoint(directory) else []
    return sorted(outer + inside, key=lambda each: each.order)


def is_checkpoint(directory: Location) -> bool:
    """Whether `directory` has a manifest, damaged or not."""
    return storage_of(directory).is_file(MANIFEST_NAME)


def read_entry(path: Location) -> Entry:
    """Read the manifest of a checkpoint, and check the sizes of its files."""
    manifest = None
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CheckpointError as error:
        return Entry(path, manifest, str(error), may_be_whole=False)
    except OSError as error:
        if is_shortage(error):  # this process fails, the checkpoint may be whole
            raise
        return Entry(path, manifest, printable(f"cannot read {path}: {describe(error)}"))
    return Entry(path, manifest)


def no_checkpoint(directory: Location, why_of: Mapping[Location, str]) -> CheckpointError:
    """The error about a directory without an intact checkpoint, with the reason for each checkpoint in it."""
    is_there = not isinstance(directory, Path) or directory.exists()
    wanted = "wanted a directory that save_checkpoint has written to" if is_there else "it does not exist"
    reasons = "; ".join(why_of.values()) or wanted
    return CheckpointError(
        f"{directory} holds no whole checkpoint: {reasons}. `streamshard convert DIR OUT --from dcp` makes one of a "
        "directory of torch.distributed.checkpoint; load_safetensors reads a Hugging Face directory"
    )


def next_number(directory: Location) -> int:
    """One more than the largest number in the names of checkpoints in `directory`."""
    # Names of partial directories count too: a save under way has its number.
    return max((number_in(name) or 0 for name in storage_of(directory).names()), default=0) + 1


def check_sizes(directory: Location, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Check that files are there, readable, and of their recorded sizes: an equal share, number `share` of `shares`.

    Raises:
        CheckpointError: a file is missing, or has another size.
        OSError: the system cannot read a file now.
    """
    storage = storage_of(directory)
    for record in manifest.files[share::shares]:
        try:
            size_bytes = storage.size(record.name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{directory} is not whole: {record.name}: {error.strerror}") from error
        if size_bytes != record.size_bytes:
            sizes = f"{size_bytes} bytes, wanted {record.size_bytes}"
            raise CheckpointError(f"{directory} is not whole: {record.name} has {sizes}")


def is_named_as_ours(path: Location) -> bool:
    """Whether a save gives such names. Other names are the user's own copies and links."""
    return number_in(path.name, only=True) is not None


# ------------------------------------------------------------------------------------------------ verifying


def open_intact(root: Location, ranks: RankGroup) -> tuple[CheckpointFiles, dict[Location, str]]:
    """Open the checkpoint `root`, or the newest intact checkpoint in the directory `root`. Collective.

    Each rank verifies an equal share of the files.

    Returns:
        The files; and by path, why each checkpoint was passed over that is newer or may be newer. The first rank logs
        these reasons.

    Raises:
        CheckpointError: on every rank; says why the checkpoint `root`, or each checkpoint in `root`, is not intact. Or
            a rank lacks memory or file descriptors to verify one.
    """

    def find() -> list[tuple[Location, str]]:
        if is_checkpoint(root):
            return [(root, "")]
        return [(each.path, each.wrong) for each in reversed(survey(root))]

    failed: dict[Location, str] = {}
    for path, wrong in run_on_first(ranks, "find a checkpoint", find, at=f"in {root}"):
        if not wrong:
            try:
                files = open_verified(path, ranks)
            except CheckpointError as error:  # the same on all ranks, except its cause
                if any(ranks.gather_objects("tell a shortage from damage", is_shortage(error.__cause__))):
                    raise
                wrong = str(error)
            else:
                _warn(failed if ranks.is_first else {})
                return files, failed
        failed[path] = wrong
    if root not in failed:
        raise no_checkpoint(root, failed)
    parent = root.absolute().parent  # no older one instead: the path is the user's choice
    raise CheckpointError(f"{failed[root]}. Give its directory, {parent}, for the newest intact checkpoint in there")


def open_verified(path: Location, ranks: RankGroup) -> CheckpointFiles:
    """Open the checkpoint `path`. Each rank verifies an equal share of the files. Collective.

    Raises:
        CheckpointError: on all ranks; names the file that is missing, damaged or unreadable.
    """

    def find() -> Manifest:
        manifest = read_manifest(path)
        check_sizes(path, manifest, ranks.total_rank, ranks.total_size)  # each asks the file system for few files
        return manifest

    manifest = run_on_all_ranks(ranks, "load", find, at=path)
    if not ranks.are_equal("compare checkpoints", repr((manifest.files, manifest.versions))):  # checksums and time
        raise CheckpointError(f"ranks see different checkpoints at {path}: put it on storage that all ranks share")
    share = ranks.total_rank, ranks.total_size
    run_on_all_ranks(ranks, "verify", lambda: verify_files(path, manifest.files, *share), at=path)
    return CheckpointFiles(path, manifest)


# ------------------------------------------------------------------------------------------------ writing


def write_together(
    ranks: RankGroup,
    doing: str,
    root: _Place,
    name: str,
    *,
    write: Callable[[_Place], _Written],
    join: Callable[[_Place, list[_Written]], _Written] | None = None,
    publish: Callable[[_Place, list[_Written]], _Published],
    alone: bool = False,
) -> _Published:
    """Let all ranks write files into a partial directory, then let the first rank publish it. Collective.

    Args:
        ranks: the ranks.
        doing: the action, for messages.
        root: the directory in which the partial directory is made, the same on all ranks.
        name, alone: see `create_partial`.
        write: called on every rank with the partial directory.
        join: called on every rank when all have written, with the partial directory and the results of `write`.
        publish: called on the first rank with the partial directory, and the results of `join` or `write` by rank. The
            directory is deleted afterwards, unless `publish` has renamed it or made it a checkpoint.

    Returns:
        The result of `publish`, on every rank.

    Raises:
        CheckpointError: on every rank; names the rank and the cause. The partial directory is gone.
        RankMismatchError: on every rank, before anything is written: ranks give different directories.
    """
    given = ranks.gather_objects("begin a save or an export", {"directory": str(root)})
    refuse_differences("a save or an export", given)
    mine: list[Partial] = []  # on the first rank only: it alone deletes and renames the directory

    def start() -> Location:
        mine.append(create_partial(root, name, alone=alone))
        return mine[0].path

    def finish(written: list[_Written]) -> _Published:
        published = publish(path, written)
        remove_partial(mine[0])  # before other ranks go on
        return published

    try:
        path = cast(_Place, run_on_first(ranks, doing, start))
        if join is None:
            return ranks.join_results(doing, lambda: write(path), finish)
        written = ranks.gather_results(doing, lambda: write(path))
        return ranks.join_results(doing, lambda: join(path, written), finish)
    except BaseException:
        for partial in mine:
            remove_partial(partial)
        with contextlib.suppress(StreamShardError):  # if ranks cannot reach each other any more
            # No rank returns before the directory is gone.
            run_on_all_ranks(ranks, "delete a partial directory", lambda: None)
        raise


def create_partial(directory: Location, name: str, *, alone: bool = False) -> Partial:
    """Make a partial directory in `directory`, and delete partial directories of killed runs.

    Args:
        directory: made if it is not there.
        name: the begin of the partial directory's name: the checkpoint's name, or ``"model"`` for an export.
        alone: raise if another process is writing to `directory`.

    Raises:
        CheckpointError: with `alone`: another process is writing to `directory`.
        OSError: the system cannot make the directory.
    """
    storage = storage_of(directory)
    partial = storage.begin(name)  # before it looks for others: of two exports at once one sees the other
    try:
        for left in storage.leftovers():
            if left != partial.path.name and not storage.sweep(left):
                if alone:
                    where = directory / left
                    raise CheckpointError(f"another process is writing to {where}: write from one process at a time")
                log.warning("another run is saving to %s: give each run a directory of its own", directory / left)
    except BaseException:
        remove_partial(partial)
        raise
    return partial


def remove_partial(partial: Partial) -> None:
    """Delete a partial directory, unless it was published. A second call changes nothing."""
    storage_of(partial.path.parent).remove(partial)


def publish_checkpoint(partial: Location, manifest: Manifest, keep: int | None) -> Location:
    """Make a checkpoint of `partial`, which has all files, then delete all but the newest `keep` checkpoints.

    Copies under other names, links and write-protected directories are not deleted. An error leaves everything as it
    was. After publishing nothing raises: the log names a checkpoint that cannot be deleted. Returns the checkpoint's
    path: ``checkpoint-N``, or ``checkpoint-N-2`` and so on if ``checkpoint-N`` exists, or `partial` on object storage.
    """
    # Until now only the writer of a file knows that it is there.
    check_sizes(partial, manifest)
    directory = partial.parent
    earlier = survey(directory)
    storage = storage_of(directory)
    known = (each.manifest.generation for each in earlier if each.manifest is not None)
    # The time is larger, too, than the generation of a checkpoint that cannot be read now.
    generation = max([time.time_ns(), *(each + 1 for each in known)])
    text = manifest._replace(generation=generation).encode()
    path = storage.publish(partial.name, f"checkpoint-{manifest.number}", text)
    try:
        storage.sync()
        if keep is not None:
            # `directory` may be a checkpoint too. The new one counts for `keep`.
            _delete_old([each.path for each in earlier if not each.wrong and each.path != directory], keep - 1)
    except OSError as error:
        log.warning("%s is saved; older ones are not deleted: %s", path, error)
    return path


def _delete_old(paths: Sequence[Location], keep: int) -> None:
    """Delete all but the last `keep` checkpoints with names that saves give. Log those that cannot be deleted."""
    own = [path for path in paths if is_named_as_ours(path) and not storage_of(path.parent).is_link(path.name)]
    for old in own[: max(len(own) - keep, 0)]:
        try:
            if storage_of(old.parent).delete(old.name):
                log.info("deleted %s: it is older than the newest %d", old, keep + 1)
        except OSError as error:
            log.warning("%s could not be deleted: %s", old, error)
