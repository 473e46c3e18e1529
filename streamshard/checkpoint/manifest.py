"""The manifest of a checkpoint: the files, and the place of each tensor in them.

The manifest is JSON. Its first line has its own SHA-256, and it lists checksums of all other files. So any changed byte
of a checkpoint is noticed. A save checks that ranks have each element once. Anyone can compute checksums, so
`read_manifest` checks that file names stay inside the directory, and that dtypes are dtypes.

A tensor whose pieces lie as those of an earlier tensor of the same shape names this tensor instead, as moments do their
weight. On 4,096 ranks Llama 70B and its moments have a million pieces.

[Note: names of tensors]
Examples: a weight is "model/layers.0.weight", its moment "optimizer/model/layers.0.weight.exp_avg" (converted from DCP:
"optimizer.state.model/layers.0.weight.exp_avg"), a tensor in `extra` "extra.positions". If ranks or replicas have
different tensors of one name, "rank3/" or "replica1/" comes first. No other name begins so.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.json_codec import CPU, dtype_name, dtype_named
from streamshard.checkpoint.safetensors_file import FILE_NAME, Copy, FileRecord, OpenFiles, copy_ranges
from streamshard.checkpoint.storage import MANIFEST_NAME, Location, storage_of
from streamshard.errors import CheckpointError
from streamshard.forms import Box, part_of

FORMAT = 10

_HEAD = '{{"sha256": "{}", "content":\n'
_TAIL = b"\n}\n"


class PieceRecord(NamedTuple):
    """Elements [start, stop) of a flattened tensor, or of a flattened box in it. The file has them as a 1-D tensor.

    Attributes:
        file: the file's place in the manifest's list of files.
        start: first element.
        stop: one behind the last element.
        box: empty: the whole tensor. Tensor parallelism cuts tensors into boxes.
    """

    file: int
    start: int
    stop: int
    box: Box = ()


class TensorRecord(NamedTuple):
    """A tensor in pieces. Each element is in one piece.

    Attributes:
        shape: of the full tensor.
        dtype: of the tensor.
        pieces: in the order of their boxes, and of their elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[PieceRecord, ...]

    def ordered(self, name: str) -> TensorRecord:
        """The same record with its pieces in order.

        Raises:
            CheckpointError: pieces leave gaps, overlap, or lie outside of the shape.
        """
        pieces = tuple(sorted(self.pieces, key=lambda piece: (piece.box, piece.start, piece.stop)))
        whole = tuple((0, size, size) for size in self.shape)
        # Without elements there are no pieces.
        ranges: dict[Box, list[int]] = {} if pieces else {whole: []}  # by box
        for piece in pieces:
            ranges.setdefault(piece.box or whole, []).extend(piece[1:3])
        fit = {math.prod(size for *_, size in box) for box in ranges} == {math.prod(self.shape)} and are_tiles(ranges)
        if not fit or not all(_is_filled(math.prod(each[1] for each in box), own) for box, own in ranges.items()):
            places = ((each, f"{list(each.box)} of " * bool(each.box)) for each in pieces)
            have = ", ".join(f"{each.start}:{each.stop} of {of}{self.shape} in file {each.file}" for each, of in places)
            raise CheckpointError(f"ranks do not have each element of {name!r:.80} once, but {have or 'none':.300}")
        return self._replace(pieces=pieces)


def _is_filled(numel: int, starts_and_stops: Sequence[int]) -> bool:
    """Whether ranges, in order, have each of `numel` elements once."""
    edges = [0, *starts_and_stops, numel]
    return edges[::2] == edges[1::2] and edges == sorted(edges)  # the latter: no range is backwards


def are_tiles(boxes: Collection[Box]) -> bool:
    """Whether different `boxes` have each element of their tensor once, and are the cells of a grid, as of a mesh."""
    dims = [sorted({*found}) for found in zip(*boxes, strict=True)]
    is_covered = all(
        _is_filled(dim[0][2], [edge for start, length, _ in dim for edge in (start, start + length)]) for dim in dims
    )
    return is_covered and math.prod(map(len, dims)) == len(boxes)


def runs_in(box: Box, start: int, numel: int) -> Iterator[tuple[int, int]]:
    """Elements [start, start + numel) of a flattened `box`, as ranges of the whole tensor: (first element, number)."""
    if not box:
        yield start, numel
        return
    whole = torch.empty([size for *_, size in box], device="meta")
    yield from contiguous_runs(part_of(whole, box), start, numel)


def place_in(box: Box, element: int) -> int:
    """How many elements of a flattened `box` lie before `element` of the whole tensor."""
    place = 0
    for dim, (start, length, _) in enumerate(box):
        at, element = divmod(element, math.prod(size for *_, size in box[dim + 1 :]))
        place = place * length + min(max(at - start, 0), length)
        element *= start <= at < start + length
    return place if box else element


def contiguous_runs(view: torch.Tensor, start: int, numel: int) -> Iterator[tuple[int, int]]:
    """Elements [start, start + numel) of `view` in row-major order, as runs of its storage: (first element, number)."""
    # The stride of a dim of size 1 may be any number.
    dims = [(size, stride) for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1]
    block, end = 1, start + numel  # each `block` elements in row-major order are neighbours in storage
    while dims and dims[-1][1] == block:
        block *= dims.pop()[0]
    while start < end:
        row, within = divmod(start, block)
        position = int(view.storage_offset()) + within
        for size, stride in reversed(dims):
            row, along = divmod(row, size)
            position += along * stride
        length = min(block - within, end - start)
        yield position, length
        start += length


def join_records(by_rank: Iterable[Mapping[str, TensorRecord]]) -> dict[str, TensorRecord]:
    """All tensors, from each rank's records of its own pieces.

    Raises:
        CheckpointError: pieces of a tensor leave gaps or overlap, or their records differ in shape or dtype.
    """
    found: dict[str, tuple[TensorRecord, list[PieceRecord]]] = {}
    for records in by_rank:
        for name, record in records.items():
            known, pieces = found.setdefault(name, (record, []))
            if known[:2] != record[:2]:
                raise CheckpointError(f"ranks do not have the same {name!r}, but {known[:2]} and {record[:2]}")
            pieces.extend(record.pieces)
    return {name: known._replace(pieces=tuple(pieces)).ordered(name) for name, (known, pieces) in found.items()}


class Manifest(NamedTuple):
    """The content of a manifest.

    Attributes:
        number: of the checkpoint, as in ``checkpoint-1000``; usually the step.
        world_size: number of ranks that have saved, replicas included.
        versions: versions of streamshard and torch, and the time of the save; for people.
        files: all files except the manifest.
        tensors: by name.
        state: everything except tensors, as JSON.
        generation: orders the checkpoints of a directory: the time in nanoseconds when the checkpoint was published, or
            one more than the largest generation in the directory, if a clock has stepped back.
    """

    number: int
    world_size: int
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any]
    generation: int = 0

    def encode(self) -> bytes:
        """The file's bytes."""
        files = [record._asdict() for record in self.files]
        first: dict[tuple[object, ...], str] = {}  # by shape and pieces
        tensors = {}
        for name, (shape, dtype, pieces) in self.tensors.items():
            known = first.setdefault((shape, pieces), name)
            tensors[name] = {"shape": shape, "dtype": dtype_name(dtype), "pieces": pieces if known == name else known}
        content = {"format": FORMAT, **self._asdict(), "files": files, "tensors": tensors}
        # NaN is not JSON: `json_codec` writes it otherwise.
        return sealed(json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


def sealed(body: bytes) -> bytes:
    """The bytes of a manifest with the JSON `body`, and its SHA-256 in the first line."""
    return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL


def read_manifest(directory: Location) -> Manifest:
    """Read the manifest of the checkpoint `directory`.

    Raises:
        CheckpointError: there is no manifest, it is damaged or malformed, or another version has written it.
        OSError: the system cannot read it now. The checkpoint may be whole.
    """
    path = directory / MANIFEST_NAME
    try:
        text = storage_of(directory).read_text(MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    body = text[len(_HEAD.format("0" * 64)) : -len(_TAIL)]
    if text != sealed(body):  # also if head or tail differ: `body` was cut by length
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the one in its first line")
    try:
        content = json.loads(body)
        if (found := content.pop("format")) != FORMAT:
            raise CheckpointError(f"it has format {found!r:.20}, and this version reads format {FORMAT}")
        return _manifest_of(**content)
    # Whatever Python makes of JSON that anybody may have written.
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None  # a traceback may hold commands


def _manifest_of(files: Any, tensors: Any, **others: Any) -> Manifest:
    found: dict[str, TensorRecord] = {}
    for name, told in tensors.items():
        shape, dtype, places = tuple(told["shape"]), dtype_named(told["dtype"]), told["pieces"]
        pieces = found[places].pieces if isinstance(places, str) else tuple(_piece_of(*piece) for piece in places)
        found[name] = TensorRecord(shape, dtype, pieces)
    return Manifest(files=tuple(_file_of(**record) for record in files), tensors=found, **others)


def _piece_of(file: int, start: int, stop: int, box: Sequence[Sequence[int]] = ()) -> PieceRecord:
    return PieceRecord(file, start, stop, tuple((first, length, size) for first, length, size in box))


def _file_of(name: str, size_bytes: int, crc32: list[str]) -> FileRecord:
    if not FILE_NAME.fullmatch(name):
        raise CheckpointError(f"a file has the name {name!r:.80}, wanted one in the directory")
    return FileRecord(name, size_bytes, crc32)


def name_of_rank(name: str, rank: int) -> str:
    """The name in files of a tensor that differs between ranks. See [Note: names of tensors]."""
    return f"rank{rank}/{name}"


def name_of_replica(name: str, replica: int) -> str:
    """The name in files of a tensor that differs between replicas. The first replica has no tensor of such a name."""
    return f"replica{replica}/{name}"


def intersect_runs(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """The common elements of two ascending lists of ranges (first element, number).

    Yields:
        For each common range: its place among the elements of `one`, among the elements of `other`, and its length.
    """
    ones, others = iter(one), iter(other)
    mine, theirs = next(ones, None), next(others, None)
    done, their_done = 0, 0  # elements of the ranges passed
    while mine is not None and theirs is not None:
        first, stop = max(mine[0], theirs[0]), min(sum(mine), sum(theirs))
        if first < stop:
            yield done + first - mine[0], their_done + first - theirs[0], stop - first
        if sum(mine) <= sum(theirs):
            done, mine = done + mine[1], next(ones, None)
        else:
            their_done, theirs = their_done + theirs[1], next(others, None)


class CheckpointFiles(OpenFiles):
    """The files of a checkpoint. Reads ranges of tensors whose pieces are in several files.

    Args:
        path: the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, path: Location, manifest: Manifest) -> None:
        super().__init__(path)
        self.manifest = manifest

    def find(self, name: str, start: int, target: torch.Tensor, box: Box = ()) -> Iterator[Copy]:
        """The copies that fill `target` with elements [start, start + n) of the tensor `name`, or of a box in it.

        Mapped files stay mapped, so the copies work even if the files are deleted.

        Args:
            name: of the tensor.
            start: first element.
            target: [n] 1-D contiguous, any device.
            box: see `PieceRecord`.

        Yields:
            What `copy_ranges` takes.
        """
        record = self.manifest.tensors[name]
        for piece in record.pieces:
            wanted, there = (start, target.numel()), (piece.start, piece.stop - piece.start)
            if piece.box == box:  # cut alike: there are no rows to compare
                found = intersect_runs([there], [wanted])
            else:
                found = intersect_runs(runs_in(piece.box, *there), runs_in(box, *wanted))
            for at, place, numel in found:
                stored = self.stored(self.manifest.files[piece.file].name, name)
                yield stored, at, target[place : place + numel]

    def read_whole(self, name: str, device: torch.device = CPU) -> torch.Tensor:
        """A full tensor, in new memory."""
        record = self.manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.dtype, device=device)
        copy_ranges(self.find(name, 0, whole.view(-1)))
        return whole
