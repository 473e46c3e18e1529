"""Files and directories that are not what they should be are refused; what is read is one moment's."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch

from streamshard.checkpoint import load as loading
from streamshard.checkpoint.export import encode_index, plan_files
from streamshard.checkpoint.load import read_directory
from streamshard.checkpoint.safetensors_file import TensorSpec
from streamshard.errors import CheckpointError
from tests.checkpoint.test_safetensors_file import write_empty


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
        (b'"F32"', b'"C64"', "dtype C64, which cannot be loaded"),
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
    write_empty(tmp_path, plan_files([TensorSpec(name, (2,), torch.float32) for name in "ab"], 100))
    _damage(tmp_path, "model.safetensors", old, new)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{message}"):
        read_directory(tmp_path)


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "inserted"])
def test_file_of_another_length_raises(change: str, tmp_path: Path) -> None:
    """Neither too few bytes nor too many are what the header describes."""
    write_empty(tmp_path, plan_files([TensorSpec("a", (2,), torch.float32)], 100))
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
        assert stored.stored["a"].shape == (size_bytes,)


def test_directory_replaced_again_and_again_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader does not try for ever."""
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4)
    write_empty(tmp_path, files, encode_index(files, 2))
    index = tmp_path / "model.safetensors.index.json"
    read_index = loading.files_of_index

    def replace_index(text: bytes) -> dict[str, str]:
        (tmp_path / "new").write_bytes(text)
        (tmp_path / "new").replace(index)
        return read_index(text)

    monkeypatch.setattr(loading, "files_of_index", replace_index)
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
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4)
    write_empty(tmp_path, files, encode_index(files, 2))
    _damage(tmp_path, "model.safetensors.index.json", old, new)
    with pytest.raises(CheckpointError, match=message):
        read_directory(tmp_path)


def test_directory_without_weights_raises(tmp_path: Path) -> None:
    """Numbered files alone are no export: the index comes last."""
    files = plan_files([TensorSpec(name, (1,), torch.float32) for name in "ab"], 4)
    write_empty(tmp_path, files)
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        read_directory(tmp_path)
