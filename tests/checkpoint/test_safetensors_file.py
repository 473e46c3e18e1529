"""The format and the split over files are those of the safetensors library and huggingface_hub."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from streamshard.checkpoint import safetensors_file
from streamshard.checkpoint.safetensors_file import (
    FileLayout,
    TensorSpec,
    encode_index,
    plan_files,
    read_directory,
)
from streamshard.config import parse_bytes
from streamshard.errors import CheckpointError, ConfigError

METADATA = {"format": "pt"}
DTYPES = [
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.float32,
    torch.uint32,
    torch.int32,
    torch.bfloat16,
    torch.float16,
    torch.uint16,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
]
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=12)
# huggingface_hub takes empty tensors for one another's views, their storages all having address 0.
filled = st.dictionaries(
    names, st.tuples(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=12
)


def _specs(described: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, shape, dtype) for name, (shape, dtype) in described.items()]


def _zeros(described: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=torch.uint8).to(torch.float32).to(dtype)
        for name, (shape, dtype) in described.items()
    }


def _write(directory: Path, files: tuple[FileLayout, ...], index: bytes | None = None) -> None:
    for file in files:
        (directory / file.name).write_bytes(file.header + b"\0" * (file.size_bytes - len(file.header)))
    if index is not None:
        (directory / "model.safetensors.index.json").write_bytes(index)


@given(tensors)
def test_file_equals_the_librarys(described: dict[str, Any]) -> None:
    """Header, order and padding are the library's own, for every dtype, shape and name; so is alignment."""
    (file,) = plan_files(_specs(described), 1 << 30, METADATA)
    assert file.header + b"\0" * (file.size_bytes - len(file.header)) == save(_zeros(described), METADATA)
    assert len(file.header) % 8 == 0
    assert all(file.offsets[name] % dtype.itemsize == 0 for name, (_, dtype) in described.items())


@given(filled, st.integers(1, 200))
def test_split_equals_huggingface_hubs(described: dict[str, Any], max_bytes: int) -> None:
    """The same tensors in files of the same names."""
    files = plan_files(_specs(described), max_bytes, METADATA)
    theirs = split_torch_state_dict_into_shards(_zeros(described), max_shard_size=max_bytes)
    want = theirs.filename_to_tensors or {"model.safetensors": []}
    assert {file.name: set(file.offsets) for file in files} == {name: set(held) for name, held in want.items()}
    index = json.loads(encode_index(files, None))
    assert index["metadata"] == theirs.metadata
    assert index["weight_map"] == theirs.tensor_to_filename


def test_tensor_larger_than_a_file_gets_one_of_its_own() -> None:
    """It is numbered before the file being filled, which goes on being filled."""
    specs = [TensorSpec(name, (numel,), torch.uint8) for name, numel in (("a", 3), ("big", 50), ("b", 3), ("c", 6))]
    assert [list(file.offsets) for file in plan_files(specs, 10, METADATA)] == [["big"], ["a", "b"], ["c"]]


def test_index_counts_parameters_and_bytes() -> None:
    """What `save_pretrained` writes: sorted, indented, one newline."""
    files = plan_files([TensorSpec("b", (2,), torch.float32), TensorSpec("a", (1,), torch.float32)], 8, METADATA)
    assert encode_index(files, 3).decode() == (
        '{\n  "metadata": {\n    "total_parameters": 3,\n    "total_size": 12\n  },\n  "weight_map": {\n'
        '    "a": "model-00002-of-00002.safetensors",\n    "b": "model-00001-of-00002.safetensors"\n  }\n}\n'
    )


@pytest.mark.parametrize(
    ("size", "in_bytes"),
    [(7, 7), ("5GB", 5 * 10**9), (" 1.5 mb ", 1_500_000), ("2TB", 2 * 10**12), ("12KB", 12_000), ("70GiB", 70 * 2**30)],
)
def test_sizes_are_decimal_unless_they_say_otherwise(size: int | str, in_bytes: int) -> None:
    """As huggingface_hub reads them; memory is counted in GiB."""
    assert parse_bytes("max_shard_size", size) == in_bytes


@pytest.mark.parametrize("size", [0, -1, "0GB", "5", "GB", "5Gi", "-1MB", "infGB", "nanKB", None, 1.5, ""])
def test_sizes_that_are_none_raise(size: Any) -> None:
    """The message repeats what was given and shows an example."""
    with pytest.raises(ConfigError, match="max_shard_size=.*wanted a positive number of bytes"):
        parse_bytes("max_shard_size", size)


def test_two_tensors_of_one_name_raise() -> None:
    """A header cannot hold both."""
    with pytest.raises(CheckpointError, match="several tensors are named 'a'"):
        plan_files([TensorSpec("a", (1,), torch.float32), TensorSpec("a", (1,), torch.float32)], 100, METADATA)


def test_dtype_without_a_name_raises() -> None:
    """The format has no such thing; the tensor is named."""
    with pytest.raises(CheckpointError, match="'a' is torch.complex128, which safetensors cannot hold"):
        plan_files([TensorSpec("a", (1,), torch.complex128)], 100, METADATA)


@given(tensors, st.integers(1, 200))
def test_what_is_planned_is_what_is_read(tmp_path_factory: Any, described: dict[str, Any], max_bytes: int) -> None:
    """Reading headers finds every tensor at the byte where the plan put it."""
    directory = tmp_path_factory.mktemp("planned")
    files = plan_files(_specs(described), max_bytes, METADATA)
    _write(directory, files, encode_index(files, None) if len(files) > 1 else None)
    with read_directory(directory) as stored:
        found = stored.tensors
        assert {name: (each.shape, each.dtype) for name, each in found.items()} == described
        for file in files:
            for name, offset in file.offsets.items():
                assert found[name].file.name == directory / file.name
                assert found[name].offset == offset or not math.prod(found[name].shape)


def test_library_opens_what_is_planned(tmp_path: Path) -> None:
    """`safe_open` accepts header and length, and sees the metadata."""
    files = plan_files([TensorSpec("a", (2, 3), torch.bfloat16)], 100, METADATA)
    _write(tmp_path, files)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == METADATA
        assert opened.get_tensor("a").shape == (2, 3)


def _store(directory: Path, header: bytes, content: bytes = b"") -> Path:
    """A file with that header, whatever it says."""
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    return path


def _damage(tmp_path: Path, name: str, old: bytes, new: bytes) -> None:
    path = tmp_path / name
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"F32"', b'"C64"', "damaged"),  # twice as long
        (b'"F32","shape":[2]', b'"C64","shape":[1]', "dtype C64, which cannot be loaded"),
        (b'"F32"', b'"F77"', "damaged"),
        (b"[0,8]", b"[0,4]", "damaged"),
        (b"[0,8]", b"[9,8]", "damaged"),
        (b"[0,8]", b"[0.,8", "damaged"),
        (b'"shape":[2]', b'"shape":[9]', "damaged"),
        (b'"shape"', b'"shapE"', "damaged"),
        (b'{"__meta', b'["__meta', "damaged"),
        (b"\0{", b"\x7f{", "damaged"),
        (b'"b"', b'"a"', "damaged"),  # a name twice
        (b"[8,16]", b"[0,8] ", "damaged"),  # two tensors in one place
        (b"[8,16]", b"[9,17]", "damaged"),  # a gap
    ],
)
def test_damaged_files_raise(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    """A header that contradicts itself or the file is not believed."""
    _write(tmp_path, plan_files([TensorSpec(name, (2,), torch.float32) for name in "ab"], 100, METADATA))
    _damage(tmp_path, "model.safetensors", old, new)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{message}"):
        read_directory(tmp_path)


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "inserted"])
def test_file_of_another_length_raises(change: str, tmp_path: Path) -> None:
    """Neither too few bytes nor too many are what the header describes."""
    _write(tmp_path, plan_files([TensorSpec("a", (2,), torch.float32)], 100, METADATA))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    damaged = {
        "cut": content[:-1],
        "longer": content + b"x",
        "empty": b"",
        "inserted": content[:-3] + b"x" + content[-3:],
    }
    path.write_bytes(damaged[change])
    with pytest.raises(CheckpointError, match="damaged"):
        read_directory(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_header_in_another_encoding_raises(encoding: str, tmp_path: Path) -> None:
    """Python would read it."""
    _store(tmp_path, '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'.encode(encoding))
    with pytest.raises(CheckpointError, match="damaged"):
        read_directory(tmp_path)


def test_shape_of_many_dimensions_raises(tmp_path: Path) -> None:
    """The product of a million sizes is not taken: it would have a million digits."""
    shape = ",".join(["9"] * 1_000_000)
    _store(tmp_path, ('{"a":{"dtype":"F32","shape":[' + shape + '],"data_offsets":[0,4]}}').encode(), b"1234")
    with pytest.raises(CheckpointError, match="damaged"):
        read_directory(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    """Opening a pipe waits for somebody to write to it; directories and links to nothing are no files either."""
    path = tmp_path / name
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir), (partial(os.symlink, "nothing"), os.unlink)):
        make(path)
        with pytest.raises(CheckpointError, match="has neither"):
            read_directory(tmp_path)
        remove(path)


def test_file_larger_than_memory_is_opened(tmp_path: Path) -> None:
    """Nothing is reserved for what is not read. The file is full of holes."""
    size_bytes = 1 << 43
    header = json.dumps({"a": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    os.truncate(_store(tmp_path, header), 8 + len(header) + size_bytes)
    with read_directory(tmp_path) as stored:
        assert stored.tensors["a"].shape == (size_bytes,)


def test_library_and_we_open_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens files by name: another of the same size may have come in between, with other tensors."""
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "other")
    assert (tmp_path / "other").stat().st_size == (tmp_path / "model.safetensors").stat().st_size

    def replace_first(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(safetensors_file, "safe_open", safe_open)
        (tmp_path / "other").replace(tmp_path / "model.safetensors")
        return safe_open(*args, **kwargs)

    monkeypatch.setattr(safetensors_file, "safe_open", replace_first)
    with read_directory(tmp_path) as stored:
        found = stored.tensors["b"]
        found.file.seek(found.offset)
        assert found.file.read() == bytes(torch.ones(4).numpy())


def test_directory_replaced_again_and_again_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader does not try for ever."""
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4, METADATA)
    _write(tmp_path, files, encode_index(files, 2))
    index = tmp_path / "model.safetensors.index.json"
    read_index = safetensors_file.files_of_index

    def replace_index(text: bytes) -> dict[str, str]:
        (tmp_path / "new").write_bytes(text)
        (tmp_path / "new").replace(index)
        return read_index(text)

    monkeypatch.setattr(safetensors_file, "files_of_index", replace_index)
    with pytest.raises(CheckpointError, match="was replaced 10 times while it was being opened"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"weight_map", b"weight_mop", "is not an index"),
        (b'"model-00001', b'"../model-00001', "not a file of its own directory"),
        (b'"a": "model-00001', b'"a": "model-00002', "says 'a' is in model-00002-of-00002.safetensors, which does not"),
        (b'"a": "model-00001', b'"c": "model-00001', "holds 'a', which model.safetensors.index.json does not say"),
        (b'"a": "model-00001-of-00002.safetensors"', b'"a": 3', "3 is no file name"),
        (b'"a": "model-00001-of-00002.safetensors"', b'"a": ".."', "cannot read"),
        (b'"a": "model-00001-of-00002.safetensors"', b'"a": "\\u0000"', "cannot read"),
        (b'"weight_map"', b'"weight_map": ' + b"[" * 100_000 + b', "x"', "is not an index"),
        (b'"a": "model-00001', b'"a": "model-00003', "cannot read"),
        (b"{", b"", "is not an index"),
    ],
)
def test_damaged_index_raises(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    """An index that leads out of its directory, or to a file that has no such tensor, is not followed."""
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4, METADATA)
    _write(tmp_path, files, encode_index(files, 2))
    _damage(tmp_path, "model.safetensors.index.json", old, new)
    with pytest.raises(CheckpointError, match=message):
        read_directory(tmp_path)


def test_directory_without_weights_raises(tmp_path: Path) -> None:
    """Numbered files alone are no export: the index comes last."""
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4, METADATA)
    _write(tmp_path, files)
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        read_directory(tmp_path)
