"""The format and the split over files are those of the safetensors library and huggingface_hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from streamshard.checkpoint.export import FileNames, StoredDirectory, encode_index, plan_files
from streamshard.checkpoint.safetensors_file import _DTYPE_NAMES, FileLayout
from streamshard.checkpoint.storage import Url
from streamshard.config import parse_bytes
from streamshard.errors import CheckpointError, ConfigError
from tests.checkpoint.objects import Kept

METADATA = {"format": "pt"}
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__")


def _described(least: int) -> Any:
    """Shapes with sizes from `least`, and dtypes, by name."""
    shapes = st.lists(st.integers(least, 4), max_size=3).map(tuple)
    return st.dictionaries(names, st.tuples(shapes, st.sampled_from([*_DTYPE_NAMES])), max_size=12)


NAMES = FileNames("model")


READERS: dict[str, Callable[[Path], StoredDirectory]] = {
    "mapped": lambda directory: StoredDirectory(directory, NAMES),
    "ranges": lambda directory: StoredDirectory(Url(f"{Kept.protocol}://{directory}"), NAMES),
}
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def _metas(described: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in described.items()}


def _zeros(described: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(shape, dtype=torch.uint8).to(torch.float32).to(dtype)
        for name, (shape, dtype) in described.items()
    }


def write_empty(directory: Path, files: Sequence[FileLayout], index: bytes | None = None) -> None:
    for file in files:
        (directory / file.name).write_bytes(file.header + b"\0" * (file.size_bytes - len(file.header)))
    if index is not None:
        (directory / "model.safetensors.index.json").write_bytes(index)


def write_two(directory: Path) -> Sequence[FileLayout]:
    """Tensors "a" and "b", each in a file, and the index."""
    files = plan_files(_metas(dict.fromkeys("ab", ((1,), torch.float32))), 4, NAMES)
    write_empty(directory, files, encode_index(files, 2))
    return files


@given(_described(0))
def test_file_equals_the_librarys(described: dict[str, Any]) -> None:
    """Header, order and padding are the library's own, for every dtype, shape and name; so is alignment."""
    (file,) = plan_files(_metas(described), 1 << 30, NAMES)
    assert file.header + b"\0" * (file.size_bytes - len(file.header)) == save(_zeros(described), METADATA)
    assert len(file.header) % 8 == 0
    assert all(file.places[name][0] % dtype.itemsize == 0 for name, (_, dtype) in described.items())


@given(_described(1), st.integers(1, 200))  # it takes empty tensors for one another's views, all at address 0
def test_split_equals_huggingface_hubs(described: dict[str, Any], max_bytes: int) -> None:
    files = plan_files(_metas(described), max_bytes, NAMES)
    theirs = split_torch_state_dict_into_shards(_zeros(described), max_shard_size=max_bytes)
    want = theirs.filename_to_tensors or {"model.safetensors": []}
    assert {file.name: set(file.places) for file in files} == {name: set(held) for name, held in want.items()}
    index = json.loads(encode_index(files, 0))
    assert index["metadata"] == {**theirs.metadata, "total_parameters": 0}
    assert index["weight_map"] == theirs.tensor_to_filename


def test_sizes() -> None:
    """As in 80G, the same as 80GB. The message about others repeats what was given."""
    for size in (0, -1, "0GB", "5", "GB", "5Gi", "-1MB", "infGB", "nanKB", None, 1.5, ""):
        with pytest.raises(ConfigError, match=f"max_shard_size={size!r}.*wanted a positive number of bytes"):
            parse_bytes("max_shard_size", size)  # type: ignore[arg-type]
    assert parse_bytes("budget", "80G") == parse_bytes("budget", " 80 gb ") == 80 * 10**9
    assert parse_bytes("budget", "1.5k") == 1500


def test_dtype_without_a_name_raises() -> None:
    """The error names the tensor."""
    with pytest.raises(CheckpointError, match="'a' is torch.complex64, which not every version of safetensors reads"):
        plan_files(_metas({"a": ((1,), torch.complex64)}), 100, NAMES)


@given(_described(0), st.integers(1, 200))
def test_files_are_read_as_they_were_planned(tmp_path_factory: Any, described: dict[str, Any], max_bytes: int) -> None:
    """Every tensor is found, with its shape and dtype, where the plan put it."""
    directory = tmp_path_factory.mktemp("planned")
    files = plan_files(_metas(described), max_bytes, NAMES)
    write_empty(directory, files, encode_index(files, 0) if len(files) > 1 else None)
    for read in READERS.values():
        found = read(directory).tensors
        assert {name: (each.shape, each.dtype) for name, each in found.items()} == described


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@each_reader
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        *(
            (FILE, old, new, "cannot read .*model.safetensors")
            for old, new in (
                (b"[0,8]", b"[0,4]"),
                (b'"shape":[2]', b'"shape":[9]'),
                (b'{"__meta', b'["__meta'),
                (b"[8,16]", b"[0,8] "),  # two tensors in one place
                (b"[8,16]", b"[9,17]"),  # a gap
                (b"\0" * 16, b"\0" * 14),  # shorter
            )
        ),
        (INDEX, b"weight_map", b"weight_mop", "is not an index"),
        (INDEX, b'"model-00001', b'"../model-00001', "not a file of its own directory"),
        (INDEX, b'"a": "model-00001', b'"a": "model-00002', "cannot read 'a' of .*model-00002-of-00002.safetensors"),
        (INDEX, b'"a": "model-00001-of-00002.safetensors"', b'"a": 3', "names 3"),
        (INDEX, b"{", b"", "is not an index"),
        (INDEX, b'"a": "model-00001', b'"a": "\\ud800model-00001', "cannot read"),
    ],
)
def test_damaged_files_raise(name: str, old: bytes, new: bytes, message: str, tmp_path: Path, read: Any) -> None:
    """A header that contradicts itself or the file is not believed.

    An index that leads out of its directory, or to a file that has no such tensor, is not followed.
    """
    if name == INDEX:
        write_two(tmp_path)
    else:
        write_empty(tmp_path, plan_files(_metas(dict.fromkeys("ab", ((2,), torch.float32))), 100, NAMES))
    content = (tmp_path / name).read_bytes()
    assert old in content
    (tmp_path / name).write_bytes(content.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_a_pipe_or_directory_in_place_of_a_file_raises_at_once(tmp_path: Path) -> None:
    """Opening a pipe waits for somebody to write to it; directories and links to nothing are no files either."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        path = tmp_path / name
        for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir), (partial(os.symlink, "nothing"), os.unlink)):
            make(path)
            with pytest.raises(CheckpointError, match="has neither"):
                StoredDirectory(tmp_path, NAMES)
            remove(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_an_index_that_leads_to_no_regular_file_raises_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """The library would wait for a pipe's writer."""
    files = write_two(tmp_path)
    path = tmp_path / files[0].name
    path.unlink()
    make(path)
    with pytest.raises(CheckpointError, match=f"{path} is not a regular file"):
        StoredDirectory(tmp_path, NAMES)


@each_reader
def test_directory_without_weights_raises(tmp_path: Path, read: Callable[[Path], StoredDirectory]) -> None:
    """Numbered files alone are no export: the index comes last."""
    write_two(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        read(tmp_path)
