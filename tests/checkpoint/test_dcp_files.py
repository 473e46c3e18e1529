"""Directories of torch.distributed.checkpoint that strangers have made harm nobody, and torch's own are read."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from streamshard.checkpoint.dcp import from_dcp
from streamshard.checkpoint.dcp_files import DcpFiles, plain_value, read_pickle
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import write_dcp

RECORDS = "torch.distributed.checkpoint.metadata"
STATE = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 3)}, "optimizer": {"x": [0.5, "text"]}}


def _whole(directory: Path) -> dict[str, Any]:
    files = DcpFiles(directory)
    return {key: files.read(key) for key in files}


def test_tensors_and_values_that_torch_writes_come_back(tmp_path: Path) -> None:
    """Of all dtypes that safetensors has, and of any strides; scalars and empty tensors; values with dtypes in them."""
    dtypes = [torch.uint16, torch.uint64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8]
    state: dict[str, Any] = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in dtypes}
    state |= {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.ones(1).expand(3),
        "number": torch.tensor(3),
    }
    state |= {"empty": torch.zeros(0, 3), "lists": [1, -5, 2**70, 1.5, "é", None, True, (1, 2), torch.float32]}
    write_dcp(tmp_path / "dcp", state)
    found = _whole(tmp_path / "dcp")
    assert found.keys() == state.keys()
    for key, wanted in state.items():
        if isinstance(wanted, torch.Tensor):
            assert found[key].dtype == wanted.dtype and torch.equal(found[key], wanted)
        else:
            assert found[key] == wanted


# ------------------------------------------------------------------------------------------------ pickles


class _Attack:
    """Unpickling it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_pickles_in_dcp_directories_run_no_code(tmp_path: Path) -> None:
    """Neither those of the metadata nor those of values."""
    attack: Any = _Attack(tmp_path / "mark")
    write_dcp(tmp_path / "one", STATE, lambda metadata: setattr(metadata, "planner_data", attack))
    from_dcp(tmp_path / "one", tmp_path / "run")
    write_dcp(tmp_path / "two", STATE | {"optimizer": {"param_groups": [{"params": ["weight"], "lr": attack}]}})
    with pytest.raises(CheckpointError, match=r"cannot read 'optimizer.*lr' of .*two: .*it holds posix.mkdir"):
        from_dcp(tmp_path / "two", tmp_path / "run")
    assert not (tmp_path / "mark").exists()


def _named(name: str) -> bytes:
    return f"c{RECORDS}\n{name}\n".encode()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_named("Metadata") + b"}\x8c\x01x\x88sb", "gives a state to torch.*Metadata"),
        (b"(" + _named("Metadata") + b"oN}\x8c\x01x\x88s\x86b", "an instruction that DCP's files do not need"),
        (b"}K\x01K\x01s", "keys that are neither strings nor records"),
        (b"K\x01\x93", "IndexError: pop from empty list"),
        (b"]K\x01\x93", "STACK_GLOBAL requires str"),
        (b"h\x07", "Memo value not found at index 7"),
        (b"]q\xffj\xff\xff\xff\x7f", "Memo value not found at index 2147483647"),
        (b"]" + b"\x85" * 100_000, "something else in the place of a Metadata"),
        (b"X\xff\xff\xff\x7fabc", "EOFError"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc", "an instruction that DCP's files do not need"),
        (b"", "IndexError: pop from empty list"),
    ],
    ids=["build", "slots", "numbers", "empty", "name", "memo", "place", "deep", "length", "bytes", "nothing"],
)
def test_pickles_that_dcp_does_not_write_are_refused(tmp_path: Path, body: bytes, told: str) -> None:
    """No attribute of a class is set: it would stay for the whole process."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + body + b".")
    with pytest.raises(CheckpointError, match=f"cannot read '.metadata' of .*{told}"):
        DcpFiles(tmp_path)
    assert not hasattr(Metadata, "x")


@pytest.mark.parametrize(
    "body",
    [b"]" * 300_000, b"(" * 300_000, b"]r\xff\xff\xff\x7f", b"\x95" + b"\xff" * 7 + b"\x7f"],
    ids=["lists", "marks", "memo", "frame"],
)
def test_a_pickle_takes_memory_in_proportion_to_its_bytes(body: bytes) -> None:
    """Whatever lengths and numbers it has in it: Python's unpickler in C makes a memo as large as these."""
    tracemalloc.start()
    try:
        with contextlib.suppress(IndexError):
            read_pickle(b"\x80\x04" + body + b".")
        assert tracemalloc.get_traced_memory()[1] < 100_000 + 200 * len(body)
    finally:
        tracemalloc.stop()


def test_a_few_bytes_that_stand_for_any_number_of_values_are_refused() -> None:
    """A list of lists of lists, each with the next one twice; and a list with itself in it."""
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    with pytest.raises(CheckpointError, match="stands for more than 1,000,000 values"):
        plain_value(read_pickle(pickle.dumps(value)))
    value.append(value)
    with pytest.raises((CheckpointError, RecursionError)):
        plain_value(read_pickle(pickle.dumps(value)))


# ------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "name", ["../secret", "/{}/secret", "..", ".", "", "sub/../../secret", "a\0", ".hidden", "b" * 300]
)
def test_files_outside_of_the_directory_are_not_read(tmp_path: Path, name: str) -> None:
    write_dcp(tmp_path / "secret", {"model": {"a": torch.ones(2, 3)}})
    (tmp_path / "secret" / "__0_0.distcp").rename(tmp_path / "stolen")

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name.format(tmp_path).replace("secret", "stolen")

    write_dcp(tmp_path / "dcp", {"model": {"a": torch.ones(2, 3)}}, change)
    with pytest.raises(CheckpointError, match="names the file .*, wanted one in the directory"):
        from_dcp(tmp_path / "dcp", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["metadata", "file"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_only_regular_files_are_read(tmp_path: Path, what: str, kind: str) -> None:
    """A pipe that nobody writes to would make the reader wait, and ``/dev/zero`` never ends."""
    write_dcp(tmp_path, STATE)
    path = tmp_path / (".metadata" if what == "metadata" else "__0_0.distcp")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        DcpFiles(tmp_path)
    with pytest.raises(CheckpointError, match="is not a regular file|no directory of torch"):
        from_dcp(tmp_path, tmp_path / "run")


def _tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a"]


def _info(metadata: Any, key: str = "model.a") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def _two_pieces(metadata: Any, *offsets: tuple[int, int]) -> None:
    """Of one row each, both from the one that is there."""
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.a"]
    info = metadata.storage_data.pop(index)
    sizes = torch.Size([1, 3])
    _tensor(metadata).chunks[:] = [ChunkStorageMetadata(torch.Size(each), sizes) for each in offsets]
    other = _info(metadata, "model.b")
    for each, place in zip(offsets, (info, other), strict=True):
        metadata.storage_data[type(index)("model.a", each)] = place
    for each in [index for index in metadata.storage_data if index.fqn == "model.b"]:
        del metadata.storage_data[each]
    del metadata.state_dict_metadata["model.b"]


CLAIMS: dict[str, tuple[Callable[[Any], object], str]] = {
    "shape": (
        lambda each: setattr(_tensor(each), "size", torch.Size([2**40, 3])),
        "do not hold each element of a tensor",
    ),
    "piece": (
        lambda each: vars(_tensor(each)).update(
            size=torch.Size([2**40]), chunks=[ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]
        ),
        "KeyError: .*'\\(0,\\)'",
    ),
    "large": (
        lambda each: vars(_tensor(each)).update(
            size=torch.Size([2**40, 1]), chunks=[ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40, 1]))]
        ),
        "is larger than its file",
    ),
    "same piece twice": (lambda each: _tensor(each).chunks.append(_tensor(each).chunks[0]), "KeyError: .*'\\(0, 0\\)'"),
    "gap": (lambda each: _tensor(each).chunks.clear(), "do not hold each element"),
    "outside": (lambda each: _two_pieces(each, (1, 0), (2, 0)), "a piece is outside of its tensor"),
    "other shape": (lambda each: _two_pieces(each, (0, 0), (1, 0)), "does not hold a piece of shape \\[1, 3\\]"),
    "other dtype": (
        lambda each: setattr(_tensor(each).properties, "dtype", torch.uint16),
        "does not hold a piece of shape .* and torch.uint16",
    ),
    "part": (lambda each: setattr(_info(each), "length", 2**40), "overlap|is shorter than the metadata says"),
    "negative": (lambda each: setattr(_info(each), "offset", -5), "in the place of sizes"),
    "one part for all": (
        lambda each: vars(_info(each)).update(vars(_info(each, "model.b"))),
        "parts of the file .* overlap",
    ),
    "dims": (lambda each: setattr(_tensor(each), "size", torch.Size([1] * 65)), "in the place of sizes"),
    "extension": (lambda each: setattr(_info(each), "transform_descriptors", ["zstd"]), "save them without extensions"),
    "no storage": (lambda each: setattr(each, "storage_data", None), "NoneType"),
    "key": (lambda each: each.state_dict_metadata.update({"\ud800": _tensor(each)}), "surrogates not allowed"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_sizes_that_the_files_do_not_have_are_refused(tmp_path: Path, name: str) -> None:
    """So no work or memory exceeds the files' sizes."""
    change, told = CLAIMS[name]
    write_dcp(tmp_path / "dcp", STATE, change)
    with pytest.raises(CheckpointError, match=f"cannot read .* of .*dcp: .*({told})"):
        from_dcp(tmp_path / "dcp", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pieces_that_overlap_are_refused(tmp_path: Path) -> None:
    """Columns 0 to 1 and column 1 have as many elements as the tensor, and leave column 2 out."""

    def join(metadata: Any) -> None:
        one, other = (metadata.state_dict_metadata[f"model.{name}"] for name in "ab")
        one.size = torch.Size([2, 3])
        other.chunks[0].offsets = torch.Size([0, 1])
        one.chunks += other.chunks
        (index,) = [index for index in metadata.storage_data if index.fqn == "model.b"]
        metadata.storage_data[type(index)("model.a", (0, 1))] = metadata.storage_data.pop(index)
        del metadata.state_dict_metadata["model.b"]

    write_dcp(tmp_path, {"model": {"a": torch.ones(2, 2), "b": torch.ones(2, 1)}}, join)
    with pytest.raises(CheckpointError, match="cannot read 'model.a' of .*: its pieces overlap, and leave gaps"):
        DcpFiles(tmp_path).read("model.a")


def _rewritten(
    data: bytes, change: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """An archive with other entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", compression) as target:
        for name in source.namelist():
            if (content := change(name, source.read(name))) is not None:
                target.writestr(name, content)
    return file.getvalue()


ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (lambda data: _rewritten(data, lambda _, entry: entry, zipfile.ZIP_DEFLATED), "is compressed"),
    "short": (
        lambda data: _rewritten(data, lambda name, entry: entry[:4] if name.endswith("data/0") else entry),
        "does not hold a piece of shape .2, 3. and torch.float32",
    ),
    "no storage": (
        lambda data: _rewritten(data, lambda name, entry: None if name.endswith("data/0") else entry),
        "KeyError",
    ),
    "no pickle": (
        lambda data: _rewritten(data, lambda name, entry: None if name.endswith("pkl") else entry),
        "is no archive of torch.save",
    ),
    "other order": (
        lambda data: _rewritten(data, lambda name, entry: b"big" if name.endswith("byteorder") else entry),
        "its byte order is big, this machine's little",
    ),
    "no tensor": (
        lambda data: _rewritten(data, lambda name, entry: b"]." if name.endswith("pkl") else entry),
        "it is no plain tensor in its file",
    ),
    "damaged": (lambda data: data.replace(torch.arange(6.0).numpy().tobytes(), bytes(24)), "Bad CRC-32"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path, name: str) -> None:
    change, told = ARCHIVES[name]
    stored = tmp_path / "__0_0.distcp"

    def rewrite(metadata: Any) -> None:
        stored.write_bytes(change(stored.read_bytes()))
        _info(metadata).length = stored.stat().st_size

    write_dcp(tmp_path, {"model": {"a": torch.arange(6.0).view(2, 3)}}, rewrite)
    with pytest.raises(CheckpointError, match=f"cannot read 'model.a' of .*: .*{told}"):
        DcpFiles(tmp_path).read("model.a")
