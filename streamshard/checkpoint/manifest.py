"""The manifest of a checkpoint: which files there are, and where in them each tensor lies.

The manifest is JSON. Its first line holds its own SHA-256, and it lists checksums of all other files, so any changed
byte of a checkpoint is noticed. Anyone can compute checksums, so `read_manifest` also checks that file names stay
inside the directory, and that no tensor is larger than its files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.safetensors_file import FileRecord, OpenFiles, contiguous_runs, copy_range, verify_files
from streamshard.comm.objects import RankGroup, run_on_all_ranks
from streamshard.errors import CheckpointError
from streamshard.torch_private import is_traceable_wrapper_subclass
from streamshard.unit.sharded_tensor import is_piece

MANIFEST_NAME = "checkpoint.json"
FORMAT = 4

_HEAD = '{{"sha256": "{}", "content":\n'
_TAIL = "\n}\n"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")  # in the checkpoint's directory, and not hidden there


class PieceRecord(NamedTuple):
    """A piece of a tensor, in file number `file`, under the tensor's name, 1-D.

    The piece holds elements [start, stop) of the flattened box. For example, columns 4 to 8 of a tensor of shape [6, 8]
    are the box ((0, 6), (4, 8)), and elements [4, 12) of this box are rows 1 and 2 of these columns.

    Attributes:
        box: start and stop in each dimension of the whole tensor; None is the whole tensor.
    """

    file: int
    start: int
    stop: int
    box: tuple[tuple[int, int], ...] | None = None

    def box_in(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The box, in a whole tensor of this shape."""
        return tuple((0, size) for size in shape) if self.box is None else self.box

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside the whole tensor, and the piece inside the box. It may come from anybody.

        Raises:
            ValueError: the box does not have a start and a stop in each dimension.
        """
        box = self.box_in(shape)
        numbers = (self.start, self.stop, *shape, *chain.from_iterable(box))
        return (
            all(type(number) is int for number in numbers)
            and all(0 <= lower <= upper <= size for (lower, upper), size in zip(box, shape, strict=True))
            and 0 <= self.start <= self.stop <= math.prod(upper - lower for lower, upper in box)
        )


class Read(NamedTuple):
    """`target` becomes elements [start, start + n) of the saved tensor `name`. `target` is 1-D and contiguous."""

    name: str
    start: int
    target: torch.Tensor


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, in pieces that together hold each of its elements once.

    Attributes:
        shape: of the whole.
        dtype: name of a torch.dtype.
        pieces: in any order.
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

    def runs_of(self, piece: PieceRecord) -> Iterator[tuple[int, int]]:
        """Where the elements of `piece` lie in the flattened tensor: (first element, number), in the piece's order."""
        if piece.box is None:
            return iter([(piece.start, piece.stop - piece.start)])
        box = torch.empty(self.shape, device="meta")[tuple(slice(*each) for each in piece.box)]
        return contiguous_runs(box, piece.start, piece.stop - piece.start)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. Everything in it is plain JSON.

    Attributes:
        number: of the checkpoint among those of its directory; users give the step.
        world_size: ranks that have saved, replicas included.
        replicas: how many copies of the model they held.
        versions: versions of streamshard and torch, and the time of the save; for people.
        files: all files except the manifest. Pieces refer to them by their place in this list.
        tensors: by name.
        state: everything except tensors.
        generation: orders the checkpoints of a directory, without clocks: one more than the largest generation in the
            directory when the checkpoint was published.
    """

    number: int
    world_size: int
    replicas: int
    versions: Mapping[str, str]
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorRecord]
    state: Mapping[str, Any] = field(repr=False)
    generation: int = 0

    def encode(self) -> bytes:
        """The file's content."""
        content = {**asdict(self), "files": [record._asdict() for record in self.files]}
        for record in content["tensors"].values():
            record["pieces"] = [piece[:3] if piece.box is None else piece for piece in record["pieces"]]
        body = json.dumps({"format": FORMAT, **content}, allow_nan=False, separators=(",", ":")).encode()
        return _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()


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
    head_bytes = len(_HEAD.format("0" * 64))
    body = text[head_bytes : -len(_TAIL)]
    expected = _HEAD.format(hashlib.sha256(body).hexdigest()).encode() + body + _TAIL.encode()
    if text != expected:
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
    found = {
        name: TensorRecord(tuple(each["shape"]), each["dtype"], tuple(_piece_of(*piece) for piece in each["pieces"]))
        for name, each in tensors.items()
    }
    for name, record in found.items():
        itemsize = record.torch_dtype.itemsize
        if not all(piece.is_inside(record.shape) for piece in record.pieces):
            raise CheckpointError(f"tensor {name!r:.80} has pieces outside of its shape {list(record.shape)!r:.80}")
        if any(piece.stop - piece.start > records[piece.file].size_bytes // itemsize for piece in record.pieces):
            raise CheckpointError(f"tensor {name!r:.80} exceeds its files")
        runs = sorted(run for piece in record.pieces for run in record.runs_of(piece) if run[1])
        if [start for start, _ in runs] + [record.numel] != [0] + [start + numel for start, numel in runs]:
            raise CheckpointError(f"the pieces of tensor {name!r:.80} leave out some elements, or hold some twice")
    return Manifest(files=records, tensors=found, **others)


def _piece_of(file: int, start: int, stop: int, box: Iterable[tuple[int, int]] | None = None) -> PieceRecord:
    """The piece. JSON has lists in the place of tuples."""
    return PieceRecord(file, start, stop, None if box is None else tuple((lower, upper) for lower, upper in box))


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

    def map_for(self, read: Read) -> None:
        """Map the files that hold what `read` wants, so that `read_tensor` works even if they are deleted."""
        for piece, _ in self._overlaps(read):
            self.open(self._name(piece))

    def read_tensor(self, read: Read) -> None:
        """Fill the target of `read`.

        Raises:
            CheckpointError: names what is not where the manifest says.
        """
        dtype = self.manifest.tensors[read.name].torch_dtype
        for piece, runs in self._overlaps(read):
            stored = self.stored(self._name(piece), read.name)
            if stored.shape != (piece.stop - piece.start,) or stored.dtype != dtype:
                raise CheckpointError(f"{self.root / self._name(piece)} does not hold what it should of {read.name!r}")
            for place, first, last in runs:
                copy_range(stored, place, read.target[first - read.start : last - read.start])

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor, in new CPU memory."""
        record = self.manifest.tensors[name]
        whole = torch.empty(record.shape, dtype=record.torch_dtype)
        self.read_tensor(Read(name, 0, whole.view(-1)))
        return whole

    def _name(self, piece: PieceRecord) -> str:
        return self.manifest.files[piece.file].name

    def _overlaps(self, read: Read) -> Iterator[tuple[PieceRecord, list[tuple[int, int, int]]]]:
        """Pieces that hold some of what is read, each with runs of it.

        A run is (place in the piece, first, last): elements [first, last) of the whole lie there.
        """
        record, stop = self.manifest.tensors[read.name], read.start + read.target.numel()
        for piece in record.pieces:
            place, runs = 0, []
            for start, numel in record.runs_of(piece):
                first, last = max(start, read.start), min(start + numel, stop)
                if first < last:
                    runs.append((place + first - start, first, last))
                place += numel
            if runs:
                yield piece, runs


# ------------------------------------------------------------------------------------------------ values as JSON
#
# JSON has no tuples, no infinite numbers, and only strings as keys of dicts. Such a value becomes an object with the
# key "$", which names its kind. Any other object is refused: to read it back, a checkpoint would need its class's code.

_KIND = "$"
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON. Its tensors are put into `tensors`, detached, not copied.

    Args:
        value: None, numbers, strings, lists, tuples, dicts, counters, tensors, NumPy numbers, dtypes, and nested ones.
        path: its name. Names of its tensors begin with it.
        tensors: by name; gains those of `value`.

    Raises:
        CheckpointError: names the path of any other value, or of one that contains itself.
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply, or contains itself: it cannot be saved") from error


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(each, f"{path}[{place}]", tensors) for place, each in enumerate(value)]
        return items if type(value) is list else {_KIND: "tuple", "items": items}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        return _encode(value.item(), path, tensors)
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, strings, lists, "
        "tuples, dicts and tensors. Give an object with state_dict() and load_state_dict() by itself, "
        "extra={name: object}, and any other object as the values that it is made of"
    )


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of layout {value.layout}: a checkpoint holds plain tensors. Give "
            "value.full_tensor(), value.to_dense() and the like, or the tensors that it is made of"
        )
    if is_piece(value):
        raise CheckpointError(
            f"{path} is one rank's piece of a sharded tensor: a checkpoint holds pieces of models and of moments only. "
            "Average weights in a second sharded model, average = StreamShard(Model().requires_grad_(False)), and "
            'save both: model={"model": model, "average": average} (docs/guide/optimizers.md, Averages of weights). '
            "Of a number give float(value)"
        )
    if value.is_meta:
        raise CheckpointError(f"{path} is on the meta device: it has no values yet")
    data = value.detach().as_subclass(torch.Tensor)
    where = {} if data.device.type == "cpu" else {"device": data.device.type}
    if not data.shape and not data.dtype.is_complex:
        number = _encode(data.item(), path, tensors)
        return {_KIND: "number", "dtype": str(data.dtype).removeprefix("torch."), "value": number, **where}
    return {_KIND: "tensor", "tensor": _keep(data, path, tensors), **where}


def _keep(data: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Put `data` into `tensors`. Returns its name: the path, made unique (a key may have a dot in it)."""
    while path in tensors:
        path += "'"
    tensors[path] = data
    return path


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """An OrderedDict or a defaultdict comes back as a dict."""
    kind = "Counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(each, f"{path}.{key}", tensors) for key, each in value.items()}
    items = [
        [_encode(key, f"a key of {path}", tensors), _encode(each, f"{path}[{key!r}]", tensors)]
        for key, each in value.items()
    ]
    return {_KIND: kind, "items": items}


def dtype_named(name: object) -> torch.dtype:
    """The dtype with this name, such as ``"bfloat16"``.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(f"{name!r:.80} is not the name of a dtype")


def decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """The value that was given to `encode`. `saved` may come from anybody: nothing in it is run or imported.

    Args:
        saved: the JSON.
        tensor_of: gives a new tensor in CPU memory, by its name.
        device: for tensors that were not in CPU memory.

    Raises:
        CheckpointError: `encode` gives no such JSON.
    """
    try:
        return _decode(saved, tensor_of, device)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"a saved value is malformed: {type(error).__name__}: {error}") from error


def _decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    if isinstance(saved, list):
        return [_decode(each, tensor_of, device) for each in saved]
    if not isinstance(saved, dict):
        return saved
    kind = saved.get(_KIND)
    if kind is None:
        return {key: _decode(each, tensor_of, device) for key, each in saved.items()}
    where = device if "device" in saved else torch.device("cpu")
    if kind == "float":
        return float(saved["value"])
    if kind == "number":
        return torch.tensor(_decode(saved["value"], tensor_of, device), dtype=dtype_named(saved["dtype"])).to(where)
    if kind == "tensor":
        return tensor_of(saved["tensor"]).to(where)
    if kind == "dtype":
        return dtype_named(saved["value"])
    items = _decode(saved["items"], tensor_of, device)
    if kind == "tuple":
        return tuple(items)
    if kind in ("dict", "Counter"):
        return (Counter if kind == "Counter" else dict)(dict(items))
    raise CheckpointError(f"a value of kind {kind!r:.80}, which this version of streamshard does not know")
