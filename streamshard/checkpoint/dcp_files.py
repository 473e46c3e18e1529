"""Read the files of torch.distributed.checkpoint (DCP), which anybody may have made. No names are translated here.

A directory has a pickle, ``.metadata``. It says in which part of which file each piece of a tensor, and each value,
lies. Each part is an archive as ``torch.save`` writes it: a pickle, and the tensor's bytes. Python's zipfile module
reads archives, and compares their checksums.

[Note: sizes that a file claims]
No work or memory exceeds the files' sizes, whatever they say about themselves. Parts of files do not overlap. Each
belongs to one piece of one tensor, which is not larger than the part. Pieces hold each element of a tensor once.

[Note: pickles as data]
Python's and torch's unpicklers find a class or function for each name in a pickle, call it, and set attributes of the
results. `read_pickle` only records the name, the arguments and the state: it imports, calls and changes nothing. Its
time and memory are in proportion to the bytes that it reads.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from streamshard.checkpoint.json_codec import dtype_named
from streamshard.checkpoint.safetensors_file import FILE_NAME, open_regular, read_text
from streamshard.errors import CheckpointError

METADATA_NAME = ".metadata"

_MAX_DIMS = 64
# A few bytes of a pickle can stand for a list of lists of lists with the same elements, and so for any number of them.
_MAX_VALUES = 1_000_000


class _Part(NamedTuple):
    """The bytes [start, start + size_bytes) of a file."""

    file: str
    start: int
    size_bytes: int


class _Box(NamedTuple):
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: _Part


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[_Box]


class DcpFiles:
    """One directory of DCP.

    Args:
        root: the directory.

    Attributes:
        tensors: by key.

    Raises:
        CheckpointError: the metadata cannot be read, or is not the metadata of files that are there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tensors: dict[str, _Tensor] = {}
        self._values: dict[str, _Part] = {}
        with self._reading(METADATA_NAME):
            found = _fields(read_pickle(read_text(root / METADATA_NAME)), "Metadata")
            parts = dict(map(_place_of, found["storage_data"].items()))
            self._check_sizes(parts.values())
            for key, each in found["state_dict_metadata"].items():
                key.encode()  # a name of a file's header
                if _is_made(each, "BytesStorageMetadata"):
                    self._values[key] = parts.pop((key, "None"))
                else:
                    self.tensors[key] = _tensor_of(key, _fields(each, "TensorStorageMetadata"), parts)

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn errors about malformed files into a CheckpointError that names `what`."""
        try:
            yield
        except Exception as error:  # Python's modules and torch raise errors of many kinds about malformed files
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            cause = str(error).partition("\n")[0]
            raise CheckpointError(f"cannot read {what!r:.200} of {self.root}: {kind}{cause}") from error

    def _check_sizes(self, parts: Iterable[_Part]) -> None:
        """Compare the parts with their files. See [Note: sizes that a file claims]."""
        ends: dict[str, int] = {}
        for name, start, size_bytes in sorted(parts):
            if start < ends.get(name, 0):
                raise CheckpointError(f"parts of the file {name!r} overlap")
            ends[name] = start + size_bytes
        for name, end in ends.items():
            with open_regular(self.root / name) as file:
                if end > os.fstat(file.fileno()).st_size:
                    raise CheckpointError(f"the file {name!r} is shorter than the metadata says")

    def __iter__(self) -> Iterator[str]:
        """The keys of tensors and values."""
        yield from (*self.tensors, *self._values)

    def read(self, key: str) -> Any:
        """A whole tensor, in new CPU memory, or a value: numbers, strings, lists, tuples, dicts, dtypes.

        Raises:
            CheckpointError: names the tensor or value that cannot be read.
        """
        with self._reading(key):
            if key in self.tensors:
                return self._whole(*self.tensors[key])
            return plain_value(self._opened(self._values[key])[2])

    def _whole(self, shape: tuple[int, ...], dtype: torch.dtype, boxes: Sequence[_Box]) -> torch.Tensor:
        """A tensor made of its boxes."""
        whole, is_read = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for box in boxes:
            place = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            whole[place] = self._stored(box, dtype)
            is_read[place] = True
        if not is_read.all():
            raise CheckpointError("its pieces overlap, and leave gaps")
        return whole

    def _stored(self, box: _Box, dtype: torch.dtype) -> torch.Tensor:
        """A box, as it is stored."""
        archive, folder, found = self._opened(box.part)
        match found:
            case Made(
                Named() as by,
                (Made(None, ("storage", Named(), str(number), _, int(count))), int(start), size, strides, _, _, *rest),
            ) if by.endswith(("._rebuild_tensor_v2", "._rebuild_tensor_v3")):
                width = dtype.itemsize if not rest else 1 if _dtype(rest[0]) == dtype else 0
            case _:
                raise CheckpointError("it is no plain tensor in its file")
        data = bytearray(_content(archive, f"{folder}data/{number}"))
        if size != box.sizes or count * width != len(data) or math.prod(size) * dtype.itemsize > len(data):
            raise CheckpointError(f"its file does not hold a piece of shape {list(box.sizes)} and {dtype}")
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(size, _sizes(strides), start)

    def _opened(self, part: _Part) -> tuple[zipfile.ZipFile, str, Any]:
        """The archive in a part of a file, the folder of its entries, and its pickle's content."""
        with open_regular(self.root / part.file) as file:
            file.seek(part.start)
            archive = zipfile.ZipFile(io.BytesIO(file.read(part.size_bytes)))
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError("it is no archive of torch.save")
        folder = pickles[0].removesuffix("data.pkl")
        if (order := _content(archive, f"{folder}byteorder").decode("ascii")) != sys.byteorder:
            raise CheckpointError(f"its byte order is {order}, this machine's {sys.byteorder}")
        return archive, folder, read_pickle(_content(archive, pickles[0]))


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """An entry of an archive. torch.save does not compress; a compressed entry could have any size."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{name} is compressed")
    return archive.read(entry)


# ------------------------------------------------------------------------------------------------ metadata


def _is_made(found: Any, name: str) -> bool:
    """Whether it is a record of DCP's, by the name of the record's class."""
    return isinstance(found, Made) and isinstance(found.by, Named) and found.by.rpartition(".")[2] == name


def _fields(found: Any, name: str) -> dict[str, Any]:
    if not _is_made(found, name) or not isinstance(found.state, dict):
        raise CheckpointError(f"it has something else in the place of a {name}")
    return found.state


def _place_of(item: tuple[Any, Any]) -> tuple[tuple[str, str], _Part]:
    """The part of a file, by key and by offsets as text. Numbers could be chosen to collide in a dict."""
    place, info = _fields(item[0], "MetadataIndex"), _fields(item[1], "_StorageInfo")
    key, file = place["fqn"], info["relative_path"]
    if not isinstance(key, str) or not isinstance(file, str):
        raise CheckpointError("it has something else in the place of names")
    if not FILE_NAME.fullmatch(file):
        raise CheckpointError(f"it names the file {file!r:.80}, wanted one in the directory")
    if info.get("transform_descriptors"):
        raise CheckpointError("its files are compressed: save them without extensions")
    start, size_bytes = _sizes((info["offset"], info["length"]))
    offsets = str(place.get("offset") and _sizes(place["offset"]))
    return (key, offsets), _Part(file, start, size_bytes)


def _sizes(found: Any) -> tuple[int, ...]:
    """Sizes or offsets, which are plain numbers."""
    if type(found) is tuple and len(found) <= _MAX_DIMS and all(type(each) is int and each >= 0 for each in found):
        return found
    raise CheckpointError("it has something else in the place of sizes")


def _tensor_of(key: str, record: Mapping[str, Any], parts: dict[tuple[str, str], _Part]) -> _Tensor:
    """A tensor, whose boxes lie inside it and have as many elements.

    Args:
        key: the tensor's.
        record: its metadata.
        parts: where boxes are, by key and by offsets as text; loses the boxes of this tensor.
    """
    shape, dtype = _sizes(record["size"]), _dtype(record["properties"].state[0])
    boxes = []
    for chunk in record["chunks"]:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        part = parts.pop((key, str(offsets)))
        if any(start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(f"a piece is outside of its tensor of shape {list(shape)}")
        if math.prod(sizes) * dtype.itemsize > part.size_bytes:
            raise CheckpointError(f"a piece of shape {list(sizes)} is larger than its file")
        boxes.append(_Box(offsets, sizes, part))
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        raise CheckpointError(f"pieces do not hold each element of a tensor of shape {list(shape)} once")
    return _Tensor(shape, dtype, boxes)


# ------------------------------------------------------------------------------------------------ pickles


class Named(str):
    """The full name of a class or function in a pickle."""


def _dtype(found: Any) -> torch.dtype:
    return dtype_named(found.removeprefix("torch.") if isinstance(found, Named) else found)


@dataclass(eq=False)
class Made:
    """An object that unpickling would make.

    Attributes:
        by: the class or function; None: the program that unpickles, from `arguments` (a persistent id).
        arguments: of the call.
        state: attributes that the object would get.
    """

    by: Any
    arguments: Any
    state: Any = None


class _Dict(dict[Any, Any]):
    """A dict whose keys are strings and `Made`. Numbers can be chosen so that a dict of them takes quadratic time."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | Made):
            raise CheckpointError("it has a dict with keys that are neither strings nor records")
        super().__setitem__(key, value)


_TAKEN_OVER = """PROTO FRAME STOP MARK BINGET LONG_BINGET MEMOIZE BINPUT LONG_BINPUT NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE
    EMPTY_LIST APPEND APPENDS SETITEM SETITEMS GLOBAL STACK_GLOBAL BINPERSID"""


class _Reader(pickle._Unpickler):
    """Python's unpickler in Python. It makes records instead of objects, and knows only instructions of DCP's files.

    See [Note: pickles as data].
    """

    stack: list[Any]  # the unpickler's

    def find_class(self, module: str, name: str) -> Any:
        return Named(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return Made(None, pid)

    def _make(self) -> None:
        """Put a record in the place of a call. Sizes are tuples here, and ordered dicts are dicts."""
        arguments, by = self.stack.pop(), self.stack.pop()
        if by == "torch.Size":
            (made,) = arguments
        else:
            made = _Dict() if by == "collections.OrderedDict" and arguments == () else Made(by, arguments)
        self.stack.append(made)

    def _build(self) -> None:
        """Give a record its state."""
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made) or made.state is not None:
            raise CheckpointError(f"it gives a state to {_kind_of(made)}")
        made.state = state

    def _refuse(self) -> None:
        raise CheckpointError("it has an instruction that DCP's files do not need")

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(pickle._Unpickler.dispatch, _refuse),
        **{
            code: pickle._Unpickler.dispatch[code]
            for (code,) in (getattr(pickle, name) for name in _TAKEN_OVER.split())
        },
        pickle.EMPTY_DICT[0]: lambda self: self.stack.append(_Dict()),
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _build,
    }


def read_pickle(data: bytes) -> Any:
    """The content of a pickle: None, numbers, strings, lists, tuples, dicts, `Named` and `Made`.

    Raises:
        Exception: of many kinds; the pickle is malformed, or has instructions that DCP's files do not need.
    """
    return _Reader(io.BytesIO(data)).load()


def plain_value(found: Any) -> Any:
    """The value that `read_pickle` has found, if it consists of numbers, strings, lists, tuples, dicts and dtypes.

    Raises:
        CheckpointError: names the kind of another value, or there are more than a million values.
        RecursionError: the value contains itself.
    """
    count = 0

    def copy(each: Any) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            raise CheckpointError(f"it stands for more than {_MAX_VALUES:,} values")
        if each is None or type(each) in (bool, int, float, str):
            return each
        if type(each) in (list, tuple):
            return type(each)(map(copy, each))
        if isinstance(each, dict) and all(isinstance(key, str) for key in each):
            return {key: copy(item) for key, item in each.items()}
        if isinstance(each, Named) and each.startswith("torch."):
            return _dtype(each)
        raise CheckpointError(
            f"it holds {_kind_of(each)}; StreamShard reads numbers, strings, lists, tuples, dicts and dtypes only"
        )

    return copy(found)


def _kind_of(found: Any) -> str:
    named = found.by if isinstance(found, Made) else found
    return f"{named:.80}" if isinstance(named, Named) else f"a {type(found).__name__}"
