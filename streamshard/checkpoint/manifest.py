"""The manifest of a checkpoint: what lies where, and how it is read. A directory is a checkpoint if it holds one.

It is JSON, with the SHA-256 of itself in its first line and checksums of all other files inside: whatever byte of a
checkpoint changes is noticed. A checksum does not say who wrote the file, so `read_manifest` checks every value. Code
that reads a `Manifest` needs no checks of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.json_codec import check_tree, dtype_named
from streamshard.checkpoint.safetensors_file import CHUNK_BYTES, FileRecord, OpenFiles
from streamshard.comm.objects import RankGroup, run_on_all_ranks
from streamshard.errors import CheckpointError
from streamshard.log import progress

__all__ = [
    "LARGEST",
    "MANIFEST_NAME",
    "Box",
    "CheckpointFiles",
    "Manifest",
    "PieceRecord",
    "Read",
    "TensorRecord",
    "check_sizes",
    "read_manifest",
]

MANIFEST_NAME = "checkpoint.json"
FORMAT = 2

_HEAD = '{{"sha256": "{}", "content":\n'
_TAIL = "\n}\n"


class Box(NamedTuple):
    """A part of a tensor that is cut along several dims: where it begins along each, and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class PieceRecord(NamedTuple):
    """Elements [start, stop) of a flattened tensor are in file number `file`, under the tensor's name, 1-D.

    Attributes:
        file: see above.
        start, stop: see above.
        box: elements are counted in this part of the tensor, flattened; None: in the whole tensor. Nothing writes or
            reads boxes yet. Parameters that are sharded along another mesh axis as well will need them.
    """

    file: int
    start: int
    stop: int
    box: Box | None = None


class Read(NamedTuple):
    """`target` becomes elements [start, start + n) of the saved tensor `name`. It is 1-D and contiguous."""

    name: str
    start: int
    target: torch.Tensor


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, in pieces that lie one after another.

    Attributes:
        shape: of the whole.
        dtype: name of a torch.dtype.
        pieces: by `start`, box after box.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceRecord, ...]

    @property
    def numel(self) -> int:
        """Of the whole."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype with that name."""
        return dtype_named(self.dtype)

    @property
    def size_bytes(self) -> int:
        """Of the whole."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. Everything in it is plain JSON.

    Attributes:
        number: of the checkpoint among those of its directory; users give the step.
        world_size: ranks that have saved, replicas included.
        replicas: how many copies of the model they held.
        versions: of streamshard and torch, and when, for people.
        files: beside the manifest, in the order in which pieces count them.
        tensors: by name.
        state: everything that is no tensor.
        generation: orders the checkpoints of a directory: each has one more than the largest that was there when it
            was published. No clock decides.
    """

    number: int
    world_size: int
    replicas: int
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any] = field(repr=False)
    generation: int = 0

    def numel_of_params(self, model: str) -> int:
        """How many numbers the parameters of a saved model are."""
        return sum(self.tensors[f"{model}/{param}"].numel for param in self.state["models"][model]["params"])

    def encode(self) -> bytes:
        """The file's content."""
        content = {**asdict(self), "files": [record._asdict() for record in self.files]}
        content["tensors"] = {
            name: {
                "shape": record.shape,
                "dtype": record.dtype,
                "pieces": [piece if piece.box else piece[:-1] for piece in record.pieces],
            }
            for name, record in self.tensors.items()
        }
        body = json.dumps({"format": FORMAT, **content}, allow_nan=False, separators=(",", ":")).encode()
        return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version has written it.
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no {MANIFEST_NAME}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    head_bytes = len(_HEAD.format("0" * 64))
    body = text[head_bytes : -len(_TAIL)]
    expected = _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()
    if text != expected:
        raise CheckpointError(f"{path} is damaged: it is not what its checksum says")
    try:
        content = json.loads(body)
        found = content["format"]
        if found == FORMAT:
            check_manifest(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is malformed: {error}") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        versions = content.get("versions")
        by = versions.get("streamshard", "?") if isinstance(versions, dict) else "?"
        raise CheckpointError(
            f"{path} has format {found!r:.20}, written by streamshard {by!s:.20}; this version reads format {FORMAT}: "
            "load it with that version"
        )
    tensors = {
        name: TensorRecord(
            tuple(record["shape"]), record["dtype"], tuple(_piece_record(*each) for each in record["pieces"])
        )
        for name, record in content["tensors"].items()
    }
    return Manifest(
        content["number"],
        content["world_size"],
        content["replicas"],
        content["versions"],
        tuple(FileRecord(**record) for record in content["files"]),
        tensors,
        content["state"],
        content.get("generation", 0),
    )


def _piece_record(file: int, start: int, stop: int, box: Any = None) -> PieceRecord:
    return PieceRecord(file, start, stop, None if box is None else Box(*map(tuple, box)))


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError unless all files are there, as long as they were. Their contents are not looked at."""
    for record in manifest.files:
        told = f"the checkpoint {directory} is not whole: {record.name}"
        try:
            size_bytes = os.stat(directory / record.name).st_size
        except OSError as error:
            raise CheckpointError(f"{told}: {error.strerror}") from error
        if size_bytes != record.size_bytes:
            raise CheckpointError(f"{told} has {size_bytes} bytes, was written with {record.size_bytes}")


class CheckpointFiles(OpenFiles):
    """The files of one checkpoint, read by ranges of the tensors that are spread over them.

    Args:
        path: the checkpoint.
        manifest: what is in it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, [record.name for record in manifest.files])
        self.manifest = manifest

    def verify_together(self, ranks: RankGroup) -> None:
        """Compare the files with their checksums; each rank reads an equal share of all bytes.

        Raises:
            CheckpointError: on all ranks, names the file that is damaged.
        """
        records = self.manifest.files
        total = sum(record.size_bytes for record in records) // ranks.total_size
        with progress(f"verifying {self.root.name}", total, shows=ranks.is_first) as advance:
            share = ranks.number, ranks.total_size
            run_on_all_ranks(ranks, f"verify {self.root}", lambda: self.verify(records, *share, advance))

    def read_tensor(self, read: Read) -> None:
        """Fill the target of `read`.

        Raises:
            CheckpointError: names what is not where the manifest says.
        """
        dtype = self.manifest.tensors[read.name].torch_dtype
        for piece, first, last in self._overlaps(read):
            stored = self.tensors(piece.file).get(read.name)
            if stored is None or stored[2:] != ((piece.stop - piece.start,), dtype):
                raise CheckpointError(f"{self.path(piece.file)} does not hold what it should of {read.name!r}")
            self.read(stored, first - piece.start, read.target[first - read.start : last - read.start])

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, in new CPU memory."""
        record = self.manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.torch_dtype)
        self.read_tensor(Read(name, 0, whole.view(-1)))
        return whole

    def open_for(self, reads: Iterable[Read]) -> None:
        """Open what will be read, as far as that many files may be open.

        Raises:
            CheckpointError: something was put in the checkpoint's place since its manifest was read.
        """
        for read in reads:
            for piece, _, _ in self._overlaps(read):
                self.tensors(piece.file)
        if read_manifest(self.root) != self.manifest:
            raise CheckpointError(f"{self.root} was replaced while it was being loaded: load again")

    def _overlaps(self, read: Read) -> Iterator[tuple[PieceRecord, int, int]]:
        """Pieces that hold some of what is read, and which elements [first, last) of the whole."""
        stop = read.start + read.target.numel()
        for piece in self.manifest.tensors[read.name].pieces:
            if piece.box is not None:
                raise CheckpointError(f"{read.name!r} was saved in boxes, which this version does not read")
            first, last = max(piece.start, read.start), min(piece.stop, stop)
            if first < last:
                yield piece, first, last


# ------------------------------------------------------------------------------------------------ schema


LARGEST = (1 << 63) - 1
"""Of the numbers in a manifest."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")  # in the checkpoint's directory, and not hidden there
_CRC32 = re.compile(r"[0-9a-f]{8}")
_MOST_DIMS = 64  # as many as torch has

_Json = Mapping[str, Any]


def check_manifest(content: Any) -> None:
    """Raise a CheckpointError that names the place of the first value that no `Manifest` would have."""
    _object("it", content)
    for name, least in (("number", 0), ("world_size", 1), ("replicas", 1)):
        _integer(name, _get(content, name), least)
    _integer("generation", content.get("generation", 0))
    versions = _object("versions", _get(content, "versions"))
    for name in ("streamshard", "torch", "saved_at"):
        _text(f"versions.{name}", _get(versions, name))
    sizes = _check_files(_get(content, "files"))
    tensors = _object("tensors", _get(content, "tensors"))
    for name, record in tensors.items():
        _check_tensor(name, record, sizes)
    state = _object("state", _get(content, "state"))
    for name, model in _object("models", _get(state, "models")).items():
        _check_model(name, model, tensors)
    for name, optimizer in _object("optimizers", _get(state, "optimizers")).items():
        _check_optimizer(name, optimizer, tensors)
    for name, tree in _object("trees", _get(state, "trees")).items():
        if "all" in _object(name, tree):
            _check_tree(name, tree["all"], tensors)
            continue
        for rank, each in enumerate(_list(name, _get(tree, "ranks"), least=1)):
            _check_tree(name, each, tensors, f"@rank{rank}")


def _check_files(files: Any) -> list[int]:
    """Returns their sizes."""
    sizes: dict[str, int] = {}
    for record in _list("files", files):
        name = _file_name("files", _get(_object("files", record), "name"))
        if name in sizes:
            raise CheckpointError(f"there are two files {name!r}")
        sizes[name] = _integer(f"the size of {name!r}", _get(record, "size_bytes"))
        sums = _texts(f"the checksums of {name!r}", _get(record, "crc32"))
        _want(all(map(_CRC32.fullmatch, sums)), f"the checksums of {name!r}", sums)
        _want(len(sums) == -(-sizes[name] // CHUNK_BYTES), f"the number of checksums of {name!r}", len(sums))
        _want(len(record) == 3, f"the record of {name!r}", list(record))
    return list(sizes.values())


def _check_tensor(name: str, record: Any, sizes_bytes: list[int]) -> None:
    what = f"tensor {name!r:.200}"
    numel = _check_shape(what, _get(_object(what, record), "shape"))
    itemsize = dtype_named(_get(record, "dtype")).itemsize
    ends = {_WHOLE: 0}  # by box
    for piece in _list(what, _get(record, "pieces")):
        _want(isinstance(piece, list) and len(piece) in (3, 4), f"a piece of {what}", piece)
        file, start, stop = (_integer(f"a piece of {what}", each) for each in piece[:3])
        _want(file < len(sizes_bytes), f"the file of a piece of {what}", file)
        box = _check_box(what, piece[3], record["shape"]) if piece[3:] else _WHOLE
        if start != ends.setdefault(box, 0) or stop < start:
            raise CheckpointError(f"the pieces of {what} do not follow one another at element {ends[box]}")
        _want((stop - start) * itemsize <= sizes_bytes[file], f"the size of a piece of {what}", stop - start)
        ends[box] = stop
    if sum(ends.values()) != numel or any(
        end != math.prod(box.shape) for box, end in ends.items() if box is not _WHOLE
    ):
        raise CheckpointError(f"the pieces of {what} end at element {sum(ends.values())} of {numel}")


_WHOLE = Box((), ())


def _check_box(what: str, box: Any, shape: list[int]) -> Box:
    is_pair = isinstance(box, list) and [len(_list(what, each)) for each in box] == [len(shape)] * 2
    _want(is_pair and shape, f"a box of {what}", box)
    for offset, size, whole in zip(*box, shape, strict=True):
        _want(_integer(what, offset) + _integer(what, size) <= whole, f"a box of {what}", box)
    return Box(*map(tuple, box))


def _check_shape(what: str, shape: Any) -> int:
    """Returns the number of elements."""
    _want(len(_list(what, shape)) <= _MOST_DIMS, f"the shape of {what}", shape)
    for size in shape:
        _integer(f"the shape of {what}", size)
    _want(math.prod(max(size, 1) for size in shape) <= LARGEST, f"the shape of {what}", shape)
    return math.prod(shape)


def _check_model(name: str, model: Any, tensors: _Json) -> None:
    _class_name(name, _get(_object(name, model), "class"))
    params = _object(f"{name}: params", _get(model, "params"))
    for param, own in params.items():
        dtype_named(_get(_object(f"{name}: {param!r}", own), "dtype"))
        _texts(f"{name}: aliases", _get(own, "aliases"))
    buffers = _texts(f"{name}: buffers", _get(model, "buffers"))
    for group in _list(f"{name}: equal", model.get("equal", [])):
        _texts(f"{name}: equal", group)
    for each in (*params, *buffers):
        _want(f"{name}/{each}" in tensors, f"{name} without a tensor for", each)
    _check_dict(name, _get(model, "extra_state"), tensors)
    export = _object(f"{name}: export", _get(model, "export"))
    if "error" in export:
        _text(f"{name}: export", export["error"])
        return
    for file, text in _object(f"{name}: export", _get(export, "files")).items():
        _text(_file_name(f"{name}: export", file), text)
    if _get(export, "custom_code") is not None:
        _text(f"{name}: export", export["custom_code"])
    for tensor in _list(f"{name}: export", _get(export, "tensors")):
        _check_exported(name, tensor, tensors)


def _check_exported(model: str, tensor: Any, tensors: _Json) -> None:
    what = f"{model}: a tensor of its export"
    _want(isinstance(tensor, list) and len(tensor) == 4, what, tensor)
    numel = _check_shape(_text(what, tensor[0]), tensor[1])
    dtype_named(tensor[2])
    end = 0
    for run in _list(what, tensor[3]):
        _want(isinstance(run, list) and len(run) == 4, what, run)
        source = f"{model}/{_text(what, run[0])}"
        source_start, start, count = (_integer(what, each) for each in run[1:])
        _want(source in tensors and start == end, what, run)
        _want(source_start + count <= math.prod(tensors[source]["shape"]), what, run)
        end += count
    _want(end == numel, f"{what}: {tensor[0]!r:.200}: its end", end)


def _check_optimizer(name: str, optimizer: Any, tensors: _Json) -> None:
    _class_name(name, _get(_object(name, optimizer), "class"))
    for group in _list(f"{name}: groups", _get(optimizer, "groups")):
        _texts(f"{name}: params", _get(_object(f"{name}: groups", group), "params"))
        if group.get("param_names") is not None:
            _texts(f"{name}: param_names", group["param_names"])
        _check_dict(f"{name}: options", _get(group, "options"), tensors)
    for param, own in _object(f"{name}: state", _get(optimizer, "state")).items():
        for key, value in _object(f"{name}: {param!r}", own).items():
            if isinstance(value, dict) and value.get("$") == "moment":
                _text(f"{name}: {key!r}", _get(value, "tensor"))  # which nobody has where nobody has elements
            else:
                _check_tree(name, value, tensors)
    for value in _object(f"{name}: values", _get(optimizer, "values")).values():
        _check_tree(name, value, tensors)
    for key in ("others", "shared"):
        _check_dict(f"{name}: {key}", _get(optimizer, key), tensors)


def _check_dict(name: str, saved: Any, tensors: _Json) -> None:
    """A tree that is a dict when it is decoded."""
    _want(_object(name, saved).get("$") in (None, "dict"), name, saved)
    _check_tree(name, saved, tensors)


def _check_tree(name: str, saved: Any, tensors: _Json, suffix: str = "") -> None:
    try:
        check_tree(saved, tensors, suffix)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r:.80}: {error}") from error


def _get(value: _Json, key: str) -> Any:
    if key not in value:
        raise CheckpointError(f"it has no {key!r}")
    return value[key]


def _want(is_sound: object, what: str, value: object) -> None:
    if not is_sound:
        raise CheckpointError(f"{what} cannot be {value!r:.80}")


def _object(what: str, value: Any) -> dict[str, Any]:
    _want(isinstance(value, dict), what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _list(what: str, value: Any, least: int = 0) -> list[Any]:
    _want(isinstance(value, list) and len(value) >= least, what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _text(what: str, value: Any) -> str:
    _want(isinstance(value, str), what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _texts(what: str, value: Any) -> list[str]:
    return [_text(what, each) for each in _list(what, value)]


def _class_name(what: str, value: Any) -> None:
    if value is not None:
        _text(f"{what}: class", value)


def _integer(what: str, value: Any, least: int = 0) -> int:
    _want(type(value) is int and least <= value <= LARGEST, what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _file_name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise CheckpointError(f"{what} cannot have the name {value!r:.80}: wanted the name of a file in the directory")
    return value
