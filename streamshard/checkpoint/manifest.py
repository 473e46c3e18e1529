"""The manifest of a checkpoint: which files there are, and where in them each tensor lies.

The manifest is JSON. Its first line holds its own SHA-256, and it lists checksums of all other files, so any changed
byte of a checkpoint is noticed. Anyone can compute checksums, so `read_manifest` also checks that file names stay
inside the directory, and that no tensor is larger than its files.

[Note: names of tensors]
A weight is called "model/", then its name; state of an optimizer "optimizer/model/", its name and the key; a tensor in
`extra` "extra.", then its key. If ranks or replicas have different tensors of one name, "rank3/" or "replica1/" comes
first. No other name begins so.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.json_codec import dtype_named, name_of
from streamshard.checkpoint.safetensors_file import FileRecord, OpenFiles, contiguous_runs, copy_range, verify_files
from streamshard.comm.objects import RankGroup, run_on_all_ranks
from streamshard.errors import CheckpointError

MANIFEST_NAME = "checkpoint.json"
FORMAT = 6

_HEAD = '{{"sha256": "{}", "content":\n'
_TAIL = b"\n}\n"
_CPU = torch.device("cpu")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")  # in the checkpoint's directory, and not hidden there


Found = tuple[torch.Tensor, int, torch.Tensor]
"""A view of a mapped file, the place in it of the first element, and what is filled from there."""


Box = tuple[tuple[int, int], ...]
"""A part of a tensor: start and size in each dimension."""


class PieceRecord(NamedTuple):
    """A piece of a tensor, in file number `file`, under the tensor's name, 1-D.

    The piece holds elements [start, stop) of the flattened box. For example, columns 4 to 7 of a tensor of shape [6, 8]
    are the box ((0, 6), (4, 4)), and elements [4, 12) of this box are rows 1 and 2 of these columns.

    Attributes:
        file: its place in the manifest's list of files.
        start: first element.
        stop: after the last element.
        box: the part of the tensor; () is the whole tensor.
    """

    file: int
    start: int
    stop: int
    box: Box = ()


class TensorRecord(NamedTuple):
    """A tensor, in pieces that together hold each of its elements once: pieces fill their box, boxes the tensor.

    Attributes:
        shape: of the whole.
        dtype: of the tensor.
        pieces: those of each box in the order of their elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[PieceRecord, ...]

    def ordered(self, name: str) -> TensorRecord:
        """The same, with its pieces in order. It may come from anybody.

        Raises:
            CheckpointError: pieces leave gaps, overlap, or lie outside of the shape.
            TypeError, ValueError: starts cannot be ordered, or a box does not have two numbers for each dimension.
        """
        pieces = tuple(sorted(self.pieces, key=lambda piece: piece[1:3]))
        if not _hold_each_element_once(self.shape, pieces):
            have = ", ".join(f"{each[1]}:{each[2]} of {each.box or self.shape} in file {each.file}" for each in pieces)
            raise CheckpointError(f"ranks do not have each element of {name!r:.80} once, but {have or 'none'}")
        return self._replace(pieces=pieces)


def _hold_each_element_once(shape: tuple[int, ...], pieces: Iterable[PieceRecord]) -> bool:
    """Whether pieces, ordered by `start`, fill their boxes one after another, and the boxes fill the tensor."""
    edges_of: dict[Box, list[int]] = {}
    for piece in pieces:
        edges_of.setdefault(piece.box or tuple((0, size) for size in shape), [0]).extend(piece[1:3])
    numbers = chain(shape, *edges_of.values(), *chain(*edges_of))
    if not all(type(each) is int and each >= 0 for each in numbers):
        return False
    for box, edges in edges_of.items():
        edges.append(_numel_of(box))
        is_inside = all(start + size <= end for (start, size), end in zip(box, shape, strict=True))
        if not is_inside or edges[::2] != edges[1::2] or edges != sorted(edges):
            return False
    has_enough = sum(map(_numel_of, edges_of)) == math.prod(shape)
    return has_enough and not any(_overlap(*two) for two in combinations(edges_of, 2))


def _numel_of(box: Box) -> int:
    return math.prod(size for _, size in box)


def _overlap(one: Box, other: Box) -> bool:
    """Whether the two have an element in common; neither is empty."""
    return all(a < b + b_size and b < a + a_size for (a, a_size), (b, b_size) in zip(one, other, strict=True))


def join_records(by_rank: Iterable[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """All tensors, from the records of what each rank has of them.

    Raises:
        CheckpointError: the pieces of a tensor leave gaps, overlap, or differ in shape or dtype.
    """
    found: dict[str, TensorRecord] = {}
    for records in by_rank:
        for name, record in records.items():
            known = found.setdefault(name, record._replace(pieces=()))
            if known[:2] != record[:2]:
                raise CheckpointError(f"ranks do not have the same {name!r}, but {known[:2]} and {record[:2]}")
            found[name] = known._replace(pieces=known.pieces + record.pieces)
    return {name: record.ordered(name) for name, record in found.items()}


class Manifest(NamedTuple):
    """What a checkpoint consists of. Everything in it is plain JSON.

    Attributes:
        number: of the checkpoint among those of its directory; users give the step.
        world_size: ranks that have saved, replicas included.
        versions: versions of streamshard and torch, and the time of the save; for people.
        files: all files except the manifest. Pieces refer to them by their place in this list.
        tensors: by name.
        state: everything except tensors.
        generation: orders the checkpoints of a directory, without clocks: one more than the largest generation in the
            directory when the checkpoint was published.
    """

    number: int
    world_size: int
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any]
    generation: int = 0

    def encode(self) -> bytes:
        """The file's content."""
        files = [record._asdict() for record in self.files]
        tensors = {}
        for name, (shape, dtype, pieces) in self.tensors.items():
            places = [piece if piece.box else piece[:3] for piece in pieces]
            tensors[name] = {"shape": shape, "dtype": name_of(dtype), "pieces": places}
        content = {"format": FORMAT, **self._asdict(), "files": files, "tensors": tensors}
        return sealed(json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


def sealed(body: bytes) -> bytes:
    """A manifest's file with this JSON inside, and its SHA-256 in the first line."""
    return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: there is none, it is damaged or malformed, or another version has written it.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:  # other errors do not say whether the checkpoint is whole
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    body = text[len(_HEAD.format("0" * 64)) : -len(_TAIL)]
    if text != sealed(body):
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the one in its first line")
    try:
        content = json.loads(body)
        if (found := content.pop("format")) != FORMAT:
            raise CheckpointError(f"it has format {found!r:.20}, and this version reads format {FORMAT}")
        return _manifest_of(**content)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error


def _manifest_of(files: Any, tensors: Any, **others: Any) -> Manifest:
    """The manifest with these contents, which may come from anybody."""
    records = tuple(FileRecord(**record) for record in files)
    if strange := [record.name for record in records if not _FILE_NAME.fullmatch(record.name)]:
        raise CheckpointError(f"files have the names {strange!r:.80}, wanted some in the directory")
    found = {}
    for name, told in tensors.items():
        pieces = tuple(_piece_of(*piece) for piece in told["pieces"])
        found[name] = record = TensorRecord(tuple(told["shape"]), dtype_named(told["dtype"]), pieces).ordered(name)
        if any(each.stop - each.start > records[each.file].size_bytes // record.dtype.itemsize for each in pieces):
            raise CheckpointError(f"tensor {name!r:.80} exceeds its files")
    return Manifest(files=records, tensors=found, **others)


def _piece_of(file: int, start: int, stop: int, box: Iterable[tuple[int, int]] = ()) -> PieceRecord:
    """The piece. JSON has lists in the place of tuples."""
    return PieceRecord(file, start, stop, tuple((first, size) for first, size in box))


def name_of_rank(name: str, rank: int) -> str:
    """The name in files of a tensor of which each rank has saved its own. See [Note: names of tensors]."""
    return f"rank{rank}/{name}"


def name_of_replica(name: str, replica: int) -> str:
    """The name in files of a tensor of which each replica but the first has saved its own."""
    return f"replica{replica}/{name}"


class CheckpointFiles(OpenFiles):
    """The files of one checkpoint, read by ranges of the tensors that are spread over them.

    Args:
        path: the checkpoint.
        manifest: what is in it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest = manifest

    def verify_together(self, ranks: RankGroup) -> None:
        """Compare the files with their checksums; each rank reads an equal share of all bytes.

        Raises:
            CheckpointError: on all ranks, names the file that is damaged.
        """
        share = ranks.number, ranks.total_size
        run_on_all_ranks(ranks, f"verify {self.root}", lambda: verify_files(self.root, self.manifest.files, *share))

    def find(self, name: str, start: int, target: torch.Tensor) -> Iterator[Found]:
        """Where elements [start, start + n) of the tensor `name` lie, as arguments of `copy_range` that fill `target`.

        The files stay mapped, so the copies work even if the files are deleted.

        Args:
            name: of the tensor.
            start: first element.
            target: [n] 1-D contiguous, any device.

        Raises:
            CheckpointError: names what is not where the manifest says.
        """
        record, stop = self.manifest.tensors[name], start + target.numel()
        whole = torch.empty(record.shape, device="meta")
        for piece in record.pieces:
            box = whole[tuple(slice(first, first + size) for first, size in piece.box)] if piece.box else whole
            place, wanted = 0, []
            for run, numel in contiguous_runs(box, piece.start, piece.stop - piece.start):
                first, last = max(run, start), min(run + numel, stop)
                if first < last:
                    wanted.append((place + first - run, target[first - start : last - start]))
                place += numel
            if wanted:
                file = self.manifest.files[piece.file].name
                stored = self.stored(file, name)
                if stored.shape != (piece.stop - piece.start,) or stored.dtype != record.dtype:
                    raise CheckpointError(f"{self.root / file} does not hold what it should of {name!r}")
                yield from ((stored, *each) for each in wanted)

    def read_whole(self, name: str, device: torch.device = _CPU) -> torch.Tensor:
        """A tensor, in new memory."""
        record = self.manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.dtype, device=device)
        for each in self.find(name, 0, whole.view(-1)):
            copy_range(*each)
        return whole
