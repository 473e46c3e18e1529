"""Read the files of torch.distributed.checkpoint (DCP), which anybody may have made. No names are translated here.

A directory has a pickle, ``.metadata``. It says in which part of which file each piece of a tensor, and each value,
lies. Each part is an archive as ``torch.save`` writes it: a pickle, and the tensor's bytes. Pickles are read as data
(`pickle_data`), archives by Python's zipfile module, which compares their checksums.

[Note: sizes that a file claims]
No work or memory exceeds the files' sizes, whatever they say about themselves. Parts of files do not overlap. Each
belongs to one piece of one tensor, which is not larger than the part. Pieces hold each element of a tensor once.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint.json_codec import dtype_named
from streamshard.checkpoint.pickle_data import Made, Named, plain_value, read_pickle
from streamshard.checkpoint.safetensors_file import FILE_NAME, open_regular, read_text
from streamshard.errors import CheckpointError

METADATA_NAME = ".metadata"

_MAX_DIMS = 64


class _Part(NamedTuple):
    """The bytes [start, start + size_bytes) of a file."""

    file: str
    start: int
    size_bytes: int


class _Piece(NamedTuple):
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    part: _Part


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[_Piece]


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
            found = _fields(read_pickle(io.BytesIO(read_text(root / METADATA_NAME))), "Metadata")
            parts = _parts_of(found["storage_data"])
            self._check_sizes(part for own in parts.values() for part in own.values())
            for key, each in found["state_dict_metadata"].items():
                key.encode()  # a name of a file's header
                if _is_made(each, "BytesStorageMetadata"):
                    self._values[key] = parts[key].pop("None")
                else:
                    self.tensors[key] = _tensor_of(_fields(each, "TensorStorageMetadata"), parts.get(key, {}))

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn errors about malformed files into a CheckpointError that names `what`."""
        try:
            yield
        except Exception as error:  # Python's modules and torch raise errors of many kinds about malformed files
            kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
            cause = str(error).partition("\n")[0]
            raise CheckpointError(f"cannot read {what!r:.200} of {self.root}: {kind}{cause}") from error

    def _check_sizes(self, parts: Iterator[_Part]) -> None:
        """Compare the parts with their files. See [Note: sizes that a file claims]."""
        ends: dict[str, int] = {}
        for name, start, size_bytes in sorted(parts):
            if start < ends.get(name, 0) or size_bytes < 0:
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

    def _whole(self, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[_Piece]) -> torch.Tensor:
        """A tensor made of its pieces."""
        whole, is_read = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
        for piece in pieces:
            box = tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True))
            whole[box] = self._stored(piece, dtype)
            is_read[box] = True
        if not is_read.all():
            raise CheckpointError("its pieces overlap, and leave gaps")
        return whole

    def _stored(self, piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
        """A piece, as it is stored."""
        archive, folder, found = self._opened(piece.part)
        match found:
            case Made(Named(_, "_rebuild_tensor_v2"), (storage, int(start), size, strides, _, _)):
                width = dtype.itemsize
            case Made(Named(_, "_rebuild_tensor_v3"), (storage, int(start), size, strides, _, _, Named(_, name))):
                width = 1 if dtype_named(name) == dtype else 0
            case _:
                raise CheckpointError("it is no plain tensor in its file")
        match storage:
            case Made(None, ("storage", Named(), str(number), _, int(count))):
                data = bytearray(_content(archive, f"{folder}data/{number}"))
            case _:
                raise CheckpointError("it has no storage in its file")
        if size != piece.sizes or count * width != len(data) or math.prod(size) * dtype.itemsize > len(data):
            raise CheckpointError(f"its file does not hold a piece of shape {list(piece.sizes)} and {dtype}")
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
        return archive, folder, read_pickle(io.BytesIO(_content(archive, pickles[0])))


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """An entry of an archive. torch.save does not compress; a compressed entry could have any size."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{name} is compressed")
    return archive.read(entry)


# ------------------------------------------------------------------------------------------------ metadata


def _is_made(found: Any, name: str) -> bool:
    """Whether it is a record of DCP's, by the name of the record's class."""
    return isinstance(found, Made) and isinstance(found.by, Named) and found.by.name == name


def _fields(found: Any, name: str) -> dict[str, Any]:
    if not _is_made(found, name) or not isinstance(found.state, dict):
        raise CheckpointError(f"it has something else in the place of a {name}")
    return found.state


def _parts_of(storage_data: Mapping[Any, Any]) -> dict[str, dict[str, _Part]]:
    """Parts of files, by key, and then by the piece's offsets as text. Numbers could be chosen to collide in a dict."""
    parts: dict[str, dict[str, _Part]] = {}
    for index, each in storage_data.items():
        place, info = _fields(index, "MetadataIndex"), _fields(each, "_StorageInfo")
        key, file, start, size_bytes = place["fqn"], info["relative_path"], info["offset"], info["length"]
        if not isinstance(key, str) or not isinstance(file, str):
            raise CheckpointError("it has something else in the place of names")
        if not FILE_NAME.fullmatch(file):
            raise CheckpointError(f"it names the file {file!r:.80}, wanted one in the directory")
        if info.get("transform_descriptors"):
            raise CheckpointError("its files are compressed: save them without extensions")
        if not type(start) is type(size_bytes) is int or start < 0:
            raise CheckpointError(f"it has parts of {file!r} that begin nowhere")
        offset = place.get("offset")
        where = "None" if offset is None else str(_sizes(offset))
        parts.setdefault(key, {})[where] = _Part(file, start, size_bytes)
    return parts


def _sizes(found: Any) -> tuple[int, ...]:
    """Sizes or offsets, which are plain numbers."""
    if type(found) is tuple and len(found) <= _MAX_DIMS and all(type(each) is int and each >= 0 for each in found):
        return found
    raise CheckpointError("it has something else in the place of sizes")


def _tensor_of(record: Mapping[str, Any], parts: dict[str, _Part]) -> _Tensor:
    """A tensor, whose pieces lie inside it and have as many elements.

    Args:
        record: its metadata.
        parts: where its pieces are, by their offsets as text; loses them.
    """
    shape, dtype = _sizes(record["size"]), dtype_named(record["properties"].state[0].name)
    pieces = []
    for chunk in record["chunks"]:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        part = parts.pop(str(offsets))
        if any(start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(f"a piece is outside of its tensor of shape {list(shape)}")
        if math.prod(sizes) * dtype.itemsize > part.size_bytes:
            raise CheckpointError(f"a piece of shape {list(sizes)} is larger than its file")
        pieces.append(_Piece(offsets, sizes, part))
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        raise CheckpointError(f"pieces do not hold each element of a tensor of shape {list(shape)} once")
    return _Tensor(shape, dtype, pieces)
