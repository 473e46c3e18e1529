"""Writes safetensors files from all ranks at once, each its own byte ranges. Nothing is gathered.

    plan -> create (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)

Between two arrows all ranks meet, and a failure on one becomes a `CheckpointError` on all that names it.

Files are complete before they have names that readers look for. See [Note: publishing] in `publish.py`. Each rank sums
up what it writes, and the first one puts the files' checksums together (`checksum.py`): nothing is read again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from streamshard.checkpoint.checksum import Extent, Extents, join_extents
from streamshard.checkpoint.publish import (
    Staged,
    check_free,
    final_names,
    publish,
    remove_partials,
    sweep,
    write_all,
    write_synced,
)
from streamshard.checkpoint.safetensors_file import (
    INDEX_NAME,
    FileLayout,
    TensorSpec,
    encode_index,
    plan_files,
)
from streamshard.comm.objects import gather_results
from streamshard.config import parse_bytes
from streamshard.errors import CheckpointError

__all__ = [
    "Alone",
    "Elements",
    "RankGroup",
    "TensorEntry",
    "gather_from_all_ranks",
    "run_on_all_ranks",
    "run_on_first_rank",
    "write_sharded",
]

CHUNK_BYTES = 8 << 20  # all the memory an export takes
VISIBLE_WITHIN_S = 10.0  # network file systems may show a new file to other hosts only after a while

_FORMAT = {"format": "pt"}

_T = TypeVar("_T")


class RankGroup(Protocol):
    """What is needed of the ranks that write together."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what is done once. One rank is."""

    @property
    def replica(self) -> int:
        """Which copy of the model this rank holds a shard of, from 0."""

    @property
    def number(self) -> int:
        """Which of them this rank is, from 0."""

    @property
    def world_size(self) -> int:
        """How many hold a copy of the model together."""

    @property
    def total_size(self) -> int:
        """How many there are."""

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Every rank's `data`, in rank order. Blocks until all ranks have called it. Not called where there is one."""


class Alone:
    """One process and no process group, as the only rank there is."""

    is_first = True
    replica = 0
    number = 0
    world_size = 1
    total_size = 1

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Its own."""
        return [data]


class Elements(Protocol):
    """Elements of a tensor that are fetched when they are needed, such as those in a file."""

    def numel(self) -> int:
        """How many there are."""

    def read(self, start: int, target: torch.Tensor) -> None:
        """Fill `target`, [n] 1-D contiguous on the CPU, of any dtype, by those from `start` on."""


class TensorEntry(NamedTuple):
    """This rank's part of one tensor: elements [start, stop) of the flattened whole.

    A tensor that a rank has several ranges of has several entries, one that it has nothing of has one with `data` None.

    Attributes:
        name: the tensor's name in the file.
        shape: of the whole tensor.
        dtype: in the file.
        start: first element that this rank writes.
        stop: one past the last.
        data: [stop - start] 1-D, any dtype and device, fetched and converted chunk by chunk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    data: torch.Tensor | Elements | None


def write_sharded(
    entries: Sequence[TensorEntry],
    directory: str | os.PathLike[str],
    group: RankGroup,
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] = _FORMAT,
    total_parameters: int | None = None,
    write_beside: Callable[[Path], None] | None = None,
    advance: Callable[[int], object] | None = None,
) -> list[str]:
    """Write a Hugging Face safetensors directory from all ranks. Extra memory is one chunk of `CHUNK_BYTES` on each.

    Every rank passes the same tensors in the same order, and the same settings; together their ranges cover each
    tensor, and do not overlap.

    Args:
        entries: this rank's part of every tensor, tensors in the order of the state dict.
        directory: on storage that all ranks share; made if it is not there.
        group: the ranks that call this, all of them.
        max_shard_size: tensor bytes a file may hold, as a number or ``"5GB"``.
        metadata: strings for the files' headers.
        total_parameters: number of parameters, for the index.
        write_beside: writes further files (a config) into the directory it is given; called on rank 0 only. They
            are published together with the weights.
        advance: is told how many bytes this rank has written, now and then.

    Returns:
        The names of the files written, the index last.

    Raises:
        ConfigError: `max_shard_size` cannot be read.
        CheckpointError: on every rank, when any rank failed: names the rank and the cause. What was in the directory
            before is still there then, or the new export is, whole. Nobody has some of a tensor, or two ranks have.
    """
    max_file_bytes = parse_bytes("max_shard_size", max_shard_size)
    root = Path(directory)
    files = run_on_all_ranks(group, "plan the export", lambda: _plan(entries, max_file_bytes, metadata))
    token = secrets.token_hex(8)

    def create() -> tuple[str, list[str]]:
        """The first rank's token, and the names it has chosen for the files."""
        if not group.is_first:
            return "", []
        names = _begin(root, files, token)
        _create(_stage(root, token, files, names, total_parameters), write_beside)
        return token, names

    try:
        chosen = gather_from_all_ranks(group, f"create files in {root}", create)[0]
        staged = _stage(root, chosen[0], files, chosen[1], total_parameters)
        written = gather_from_all_ranks(group, f"write to {root}", lambda: _write(staged, entries, advance))
        run_on_first_rank(group, f"publish {root}", lambda: publish(staged, _join(staged, written)))
    except BaseException:
        if group.is_first:
            with contextlib.suppress(OSError):
                remove_partials(root, token)
        raise
    return [file.name for file in staged.files] + ([INDEX_NAME] if staged.index_json is not None else [])


def run_on_all_ranks(group: RankGroup, doing: str, action: Callable[[], _T]) -> _T:
    """Run `action` on every rank; when it fails on one, fail on all.

    Args:
        group: the ranks.
        doing: what the action does, for the message: "could not <doing>".
        action: this rank's work; it must not communicate.

    Raises:
        CheckpointError: names the ranks on which the action failed, and why.
    """
    result: list[_T] = []
    gather_from_all_ranks(group, doing, lambda: result.append(action()))
    return result[0]


def run_on_first_rank(group: RankGroup, doing: str, action: Callable[[], object]) -> None:
    """Run `action` on the first rank; when it fails, fail on all. Otherwise as `run_on_all_ranks`."""

    def act() -> None:
        if group.is_first:
            action()

    run_on_all_ranks(group, doing, act)


def gather_from_all_ranks(group: RankGroup, doing: str, action: Callable[[], _T]) -> list[_T]:
    """What `action` gives on every rank, in rank order; otherwise as `run_on_all_ranks`. It can be pickled."""
    return gather_results(group.gather_bytes if group.total_size > 1 else None, doing, action, CheckpointError)


def _plan(entries: Sequence[TensorEntry], max_file_bytes: int, metadata: Mapping[str, str]) -> tuple[FileLayout, ...]:
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian, this machine is not")
    specs: dict[str, TensorSpec] = {}
    for entry in entries:
        spec = TensorSpec(entry.name, tuple(entry.shape), entry.dtype)
        if specs.setdefault(entry.name, spec) != spec:
            raise CheckpointError(f"two entries for {entry.name!r} differ in shape or dtype")
        numel = 0 if entry.data is None else entry.data.numel()
        inside = 0 <= entry.start <= entry.stop <= spec.size_bytes // max(spec.dtype.itemsize, 1)
        if not inside or numel != entry.stop - entry.start:
            raise CheckpointError(
                f"{entry.name!r} {list(entry.shape)}: {numel} elements given for [{entry.start}, {entry.stop})"
            )
    return plan_files(list(specs.values()), max_file_bytes, metadata)


def _begin(root: Path, files: Sequence[FileLayout], token: str) -> list[str]:
    """Final names for the files. Removes what other exports have left."""
    os.makedirs(root, exist_ok=True)
    names = final_names(root, files, token)  # before sweeping: a name that is in use now is not used again
    sweep(root)
    return names


def _stage(
    root: Path, token: str, files: Sequence[FileLayout], names: Sequence[str], total_parameters: int | None
) -> Staged:
    renamed = tuple(file._replace(name=name) for file, name in zip(files, names, strict=True))
    return Staged(root, token, renamed, encode_index(renamed, total_parameters) if len(renamed) > 1 else None)


def _create(staged: Staged, write_beside: Callable[[Path], None] | None) -> None:
    """Every file at its full size with its header in place; ranks fill in the rest.

    The front comes first: another export that removes later files then removes it too, which stops this one.
    """
    if staged.index_json is not None:
        write_synced(staged.partial(INDEX_NAME), staged.index_json)
    for file in staged.files:
        with _opened(staged.partial(file.name), os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            os.ftruncate(descriptor, file.size_bytes)
            write_all(descriptor, memoryview(file.header), 0)
            os.fsync(descriptor)
    if write_beside is not None:
        os.mkdir(staged.beside)
        write_beside(staged.beside)
    check_free(staged)


def _join(staged: Staged, written: Sequence[Sequence[Extent]]) -> list[int]:
    """The files' checksums, of what the ranks have written."""
    headers = Extents()
    for number, file in enumerate(staged.files):
        headers.add(number, 0, memoryview(file.header))
    try:
        return join_extents([*headers.found, *itertools.chain(*written)], [file.size_bytes for file in staged.files])
    except CheckpointError as error:
        raise CheckpointError(f"ranks did not write every byte of {staged.root} once: {error}") from error


def _write(staged: Staged, entries: Sequence[TensorEntry], advance: Callable[[int], object] | None) -> list[Extent]:
    """This rank's byte ranges, file by file."""
    staging = bytearray(CHUNK_BYTES)
    written = Extents()
    by_name: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        if entry.start < entry.stop:
            by_name.setdefault(entry.name, []).append(entry)
    for number, file in enumerate(staged.files):
        mine = [(offset, entry) for name, offset in file.offsets.items() for entry in by_name.get(name, ())]
        if not mine:
            continue
        try:
            with _opened(staged.partial(file.name), os.O_RDWR) as descriptor:
                if os.pread(descriptor, len(file.header), 0) != file.header:
                    raise CheckpointError(
                        f"{file.name} made by rank 0 has another header: ranks disagree on the tensors"
                    )
                for offset, entry in mine:
                    for chunk, position in _chunks(entry, offset, staging):
                        written.add(number, position, chunk)
                        write_all(descriptor, chunk, position)
                        if advance is not None:
                            advance(len(chunk))
                os.fsync(descriptor)
        except OSError as error:  # a failed write does not say which file it was
            raise CheckpointError(f"{file.name}: {error}") from error
    return written.found


def _chunks(entry: TensorEntry, offset: int, staging: bytearray) -> Iterator[tuple[memoryview, int]]:
    """Copied to the host and converted, one after another in `staging`; and where in the file each of them lies."""
    if entry.data is None:
        return
    chunk = torch.frombuffer(staging, dtype=torch.uint8).view(entry.dtype)
    item_bytes = entry.dtype.itemsize
    numel = entry.data.numel()
    for done in range(0, numel, chunk.numel()):
        part = chunk[: numel - done]
        if isinstance(entry.data, torch.Tensor):
            part.copy_(entry.data.detach()[done : done + part.numel()])
        else:
            entry.data.read(done, part)
        yield memoryview(staging)[: part.numel() * item_bytes], offset + (entry.start + done) * item_bytes


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        try:
            descriptor = os.open(path, flags, 0o666)
            break
        except FileNotFoundError as error:
            if flags & os.O_CREAT:
                raise
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{path} is not there, though rank 0 created it: the directory must be on storage all ranks share, "
                    "and one process only may export into it at a time"
                ) from error
            time.sleep(0.1)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
