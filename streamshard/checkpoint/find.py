"""The checkpoints of a run, side by side in one directory: which there are, and which is the newest intact one.

[Note: whole and intact]
A checkpoint is *whole* if its manifest can be read and used, and its files are there with their recorded sizes. It is
*intact* if the files also match their checksums and hold the tensors that the manifest names. Saves and `latest` ask
for the first, which reads no tensors; loads for the second, before anything changes. A checkpoint that is damaged, or
that the system cannot read, never stops a save or the load of another one, and is never deleted.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from streamshard.checkpoint.manifest import MANIFEST_NAME, CheckpointFiles, Manifest, read_manifest
from streamshard.checkpoint.safetensors_file import open_regular
from streamshard.comm.ranks import RankGroup, run_on_all_ranks, run_on_first
from streamshard.config import parse_path
from streamshard.errors import CheckpointError, describe, log, printable

PARTIAL = ".partial"
"""Suffix of a directory's name until the directory is complete."""

_NAME = re.compile(r"checkpoint-(\d{1,18})(?!\d)(-\d+)?")


class Entry(NamedTuple):
    """A checkpoint in a directory, as far as its manifest and the sizes of its files say. Nobody has read the files.

    Attributes:
        path: its path.
        manifest: None if it cannot be read or used.
        wrong: why the checkpoint cannot be used; "" if it is whole. See [Note: whole and intact].
        may_be_whole: False if it is damaged. A system that cannot read it now (no permission, a failing disk) says
            nothing about it.
    """

    path: Path
    manifest: Manifest | None
    wrong: str = ""
    may_be_whole: bool = True

    @property
    def order(self) -> tuple[float, int, bool]:
        """Sort key, newest last. One without a manifest may be the newest. A user's copy comes before its original."""
        made = self.manifest
        return (math.inf, 0, False) if made is None else (made.generation, made.number, is_named_as_ours(self.path))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The latest whole checkpoint in `directory`; None if there is none.

    A checkpoint is whole if its manifest matches its checksum, and all files are there with their recorded sizes.
    `load_checkpoint` verifies the files' contents. Checkpoints are ordered by a generation number, not by clocks. The
    log names checkpoints that are passed over, and why.

    Raises:
        CheckpointError: no checkpoint is whole, and the system cannot read one (no permission, a failing disk).
        ConfigError: `directory` is not a path.
    """
    root = parse_path("directory", directory)
    entries = survey(root)
    newest = next((each for each in reversed(entries) if not each.wrong), None)
    passed_over = {each.path: each.wrong for each in entries[entries.index(newest) + 1 if newest else 0 :]}
    if newest is None and any(each.may_be_whole for each in entries):
        raise no_checkpoint(root, passed_over)
    _warn(passed_over)
    return newest.path if newest else None


def _warn(passed_over: Mapping[Path, str]) -> None:
    for path, why in passed_over.items():
        log.warning("passed over %s: %s", printable(str(path)), why)


def survey(directory: Path) -> list[Entry]:
    """Read the manifests of all checkpoints in `directory`, and its own if it is a checkpoint. Newest last.

    Directories with a checkpoint's name and no manifest are among them.

    Raises:
        OSError: the directory cannot be read.
    """
    inside = [path for path in sorted(_children(directory)) if not path.name.endswith(PARTIAL)]
    paths = [path for path in inside if is_named_as_ours(path) or is_checkpoint(path)]
    entries = [read_entry(path) for path in ([directory] if is_checkpoint(directory) else []) + paths]
    there = (each for each in entries if not each.wrong or os.path.lexists(each.path))  # another run may delete some
    return sorted(there, key=lambda each: each.order)


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` has a manifest, of any kind."""
    return os.path.lexists(directory / MANIFEST_NAME)


def read_entry(path: Path) -> Entry:
    """Read the manifest of a checkpoint, and look at the sizes of its files."""
    manifest = None
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CheckpointError as error:
        return Entry(path, manifest, str(error), may_be_whole=False)
    except OSError as error:
        return Entry(path, manifest, printable(f"cannot read {path}: {describe(error)}"))
    return Entry(path, manifest)


def no_checkpoint(directory: Path, why_of: Mapping[Path, str]) -> CheckpointError:
    """The error to raise for a directory without an intact checkpoint, with the reason for each entry."""
    reasons = "; ".join(why_of.values()) or "wanted a directory that save_checkpoint has written to"
    return CheckpointError(
        f"{directory} holds no whole checkpoint: {reasons}. `streamshard convert DIR OUT --from dcp` makes one of a "
        "directory of torch.distributed.checkpoint; load_safetensors reads a Hugging Face directory"
    )


def next_number(directory: Path) -> int:
    """One more than the largest number in the names of checkpoints in `directory`."""
    return max((int(match[1]) for path in _children(directory) if (match := _NAME.match(path.name))), default=0) + 1


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise unless all files are there, readable and as long as they were, whatever they contain.

    Raises:
        CheckpointError: a file is missing, or has another size.
        OSError: the system cannot read a file now.
    """
    for record in manifest.files:
        try:
            with open_regular(directory / record.name) as file:
                size_bytes = os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{directory} is not whole: {record.name}: {error.strerror}") from error
        if size_bytes != record.size_bytes:
            raise CheckpointError(
                f"{directory} is not whole: {record.name} has {size_bytes} bytes, was written with {record.size_bytes}"
            )


def is_named_as_ours(path: Path) -> bool:
    """Whether a save may have given `path` its name. Other names are the user's: copies and links."""
    return _NAME.fullmatch(path.name) is not None


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# ------------------------------------------------------------------------------------------------ verifying


def open_intact(root: Path, ranks: RankGroup) -> tuple[CheckpointFiles, dict[Path, str]]:
    """The files of a checkpoint, or of the newest intact one in a directory. Each rank verifies its share. Collective.

    Returns:
        The files; and by path, why checkpoints that are newer, or may be, are passed over. The first rank logs this.

    Raises:
        CheckpointError: on every rank. `root` is a checkpoint and damaged: names the newest intact one beside it. Or no
            checkpoint in `root` is intact: says why of each.
    """
    files, failed = _newest_intact(root, ranks)
    if files is not None:
        _warn(failed if ranks.is_first else {})
        return files, failed
    error = CheckpointError(failed[root]) if root in failed else no_checkpoint(root, failed)
    if root in failed or is_named_as_ours(root):
        path = Path(os.path.abspath(root))
        with contextlib.suppress(CheckpointError):  # the error about `root` matters more
            files, _ = _newest_intact(path.parent, ranks, without=path)
    advice = "" if files is None else f". The newest intact checkpoint beside it is {files.root}"
    raise CheckpointError(f"{error}{advice}")


def _newest_intact(
    root: Path, ranks: RankGroup, without: Path | None = None
) -> tuple[CheckpointFiles | None, dict[Path, str]]:
    """The checkpoint `root`, or the newest in it whose files match their checksums; and why others are passed over."""

    def find() -> list[tuple[Path, str]]:
        if is_checkpoint(root):
            return [(root, "")]
        return [(each.path, each.wrong) for each in reversed(survey(root)) if each.path != without]

    failed: dict[Path, str] = {}
    for path, wrong in run_on_first(ranks, f"load {root}", find):
        if not wrong:
            try:
                return open_verified(path, ranks), failed
            except CheckpointError as error:  # the same on all ranks
                wrong = str(error)
        failed[path] = wrong
    return None, failed


def open_verified(path: Path, ranks: RankGroup) -> CheckpointFiles:
    """The files of the checkpoint `path`; each rank has read an equal share of all bytes. Collective.

    Raises:
        CheckpointError: on all ranks; names the file or the value that is missing or damaged, or cannot be read.
    """

    def find() -> Manifest:
        entry = read_entry(path)
        if entry.wrong or entry.manifest is None:
            raise CheckpointError(entry.wrong)
        return entry.manifest

    manifest = run_on_all_ranks(ranks, f"load {path}", find)
    if not ranks.are_equal(repr((manifest.files, manifest.versions))):
        raise CheckpointError(f"ranks see different checkpoints at {path}: it has to be on shared storage")
    files = CheckpointFiles(path, manifest)
    run_on_all_ranks(ranks, f"verify {path}", lambda: files.verify(ranks.total_rank, ranks.total_size))
    return files
