"""A manifest is what this package writes, or an error that names the file: whoever has made it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamshard import StreamShard, latest, save_checkpoint
from streamshard.__main__ import _describe
from streamshard.checkpoint.export import export_checkpoint
from streamshard.checkpoint.json_codec import decode
from streamshard.checkpoint.manifest import CheckpointFiles, check_sizes, read_manifest
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import content_of, rewrite, write_body
from tests.models import Stack
from tests.ranks import RankContext, RankPool
from tests.reference import FP32

CPU = torch.device("cpu")


def _save(context: RankContext, directory: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    loose = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [loose]}])
    for param in (*model.parameters(), loose):
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    extra = {"dtype": torch.float32, "values": [{1: (2.5, b"x")}, float("inf"), {3}, torch.ones(2), CPU], "text": "a"}
    save_checkpoint(directory, model, optimizer, scheduler, extra={**extra, "rank": context.rank}, step=1)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks with a value of every kind."""
    directory = tmp_path_factory.mktemp("runs") / "saved"
    ranks(2).run(_save, directory)
    return directory / "checkpoint-1"


def _read_all(checkpoint: Path) -> None:
    """Whatever reads a manifest without a run."""
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    _describe(manifest)
    with CheckpointFiles(checkpoint, manifest) as files:
        for tree in manifest.state["trees"].values():
            for rank, each in enumerate([tree["all"]] if "all" in tree else tree["ranks"]):
                suffix = "" if "all" in tree else f"@rank{rank}"
                decode(each, lambda name, suffix=suffix: files.read_whole(name + suffix), CPU)  # type: ignore[misc]
        for optimizer in manifest.state["optimizers"].values():
            for group in optimizer["groups"]:
                decode(group["options"], files.read_whole, CPU)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON; of lists and dicts with many, of the first two and the last two in it."""
    yield path
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, each in inside if len(inside) < 8 else inside[:2] + inside[-2:]:
        yield from _places(each, (*path, key))


REMOVED = object()
OTHERS = [REMOVED, None, -1, 1 << 62, 1 << 70, "../x", [[]], {"$": "load"}]


def test_whatever_value_is_another_it_is_a_checkpoint_or_an_error_that_names_it(saved: Path, tmp_path: Path) -> None:
    """Each value in turn is left out, of another type, negative, huge, or names something that is not there."""
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved, path)
    content = content_of(path)
    _read_all(path)
    refused = 0
    for place in _places(content):
        for other in OTHERS:
            changed = {"": copy.copy(content)}
            inner, keys = changed, ("", *place)
            for key in keys[:-1]:
                inner[key] = copy.copy(inner[key])
                inner = inner[key]
            if other is REMOVED:
                del inner[keys[-1]]
            else:
                inner[keys[-1]] = other  # type: ignore[assignment]
            write_body(path, json.dumps(changed.get("")).encode())
            try:
                _read_all(path)
            except CheckpointError as error:
                assert str(path) in str(error) or "a saved value is malformed" in str(error)
                refused += 1
    assert refused > 1000


def _set(content: Any, *path: Any) -> None:
    for key in path[:-2]:
        content = content[key]
    content[path[-2]] = path[-1]


TENSOR, TREES = ("tensors", "extra.values[3]"), ("state", "trees")
STRANGE: dict[str, tuple[Callable[[Any], object], str]] = {
    "a file outside": (lambda c: _set(c, "files", 0, "name", "../x"), "files cannot have the name '../x'"),
    "the directory itself": (lambda c: _set(c, "files", 0, "name", ".."), r"files cannot have the name '\.\.'"),
    "a device": (lambda c: _set(c, "files", 0, "name", "/dev/zero"), "files cannot have the name"),
    "a file twice": (lambda c: _set(c, "files", 1, c["files"][0]), "there are two files"),
    "an attribute of torch": (
        lambda c: _set(c, *TREES, "extra.dtype", "all", "value", "load"),
        "extra.dtype",
    ),
    "a dtype that is none": (
        lambda c: _set(c, *TENSOR, "dtype", "load"),
        "'load' is not the name",
    ),
    "a file that there is not": (lambda c: _set(c, *TENSOR, "pieces", [[7, 0, 2]]), "cannot be 7"),
    "more than is in a file": (
        lambda c: c["tensors"]["extra.values[3]"].update(shape=[1 << 40], pieces=[[0, 0, 1 << 40]]),
        "the size of a piece",
    ),
    "an export outside": (
        lambda c: _set(c, "state", "models", "model", "export", "files", {"../evil.json": "{}"}),
        "cannot have the name '../evil.json'",
    ),
    "a tensor that there is not": (
        lambda c: _set(c, *TREES, "extra.text", "all", {"$": "tensor", "tensor": "x"}),
        "extra.text.*malformed",
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_manifest_of_a_stranger_is_refused_and_passed_over(saved: Path, tmp_path: Path, what: str) -> None:
    """Nothing is read or written elsewhere, and there is an older checkpoint."""
    change, words = STRANGE[what]
    for number in (1, 2):
        shutil.copytree(saved, tmp_path / f"checkpoint-{number}")
        rewrite(tmp_path / f"checkpoint-{number}", lambda content: content.update(number=number))  # noqa: B023
    strange = tmp_path / "checkpoint-2"
    assert latest(tmp_path) == strange
    rewrite(strange, change)
    with pytest.raises(CheckpointError, match=f"{strange}/checkpoint.json is malformed: .*{words}"):
        read_manifest(strange)
    with pytest.raises(CheckpointError):
        export_checkpoint(strange, tmp_path / "out")
    assert latest(tmp_path) == tmp_path / "checkpoint-1"


def test_a_piece_may_be_of_a_box_of_its_tensor_which_is_not_read_yet(saved: Path, tmp_path: Path) -> None:
    """The boxes have to lie in the tensor and to have all of its elements."""
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved, path)
    name, record = next(item for item in content_of(path)["tensors"].items() if len(item[1]["shape"]) == 2)
    rows, columns = record["shape"]
    boxes = [[[0, 0], [rows, 1]], [[0, 1], [rows, columns - 1]]]
    pieces = [[0, 0, rows, boxes[0]], [0, 0, rows * (columns - 1), boxes[1]]]
    rewrite(path, lambda content: content["tensors"][name].update(pieces=pieces))
    manifest = read_manifest(path)
    assert manifest.tensors[name].pieces[1].box == ((0, 1), (rows, columns - 1))
    assert content_of(path)["tensors"] == json.loads(manifest.encode().split(b"\n", 1)[1][:-3])["tensors"]
    with CheckpointFiles(path, manifest) as files, pytest.raises(CheckpointError, match="which this version does not"):
        files.read_whole(name)
    for wrong in (pieces[:1], [pieces[0], [0, 0, rows, [[0, columns], [rows, 1]]]], [[0, 0, rows, [[0], [rows]]]]):
        rewrite(path, lambda content: content["tensors"][name].update(pieces=wrong))  # noqa: B023
        with pytest.raises(CheckpointError, match="checkpoint.json is malformed"):
            read_manifest(path)


@pytest.mark.parametrize("inner", ["[{}]", '{{"a": {}}}', '{{"$": "tuple", "items": [{}]}}'])
@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_value_that_is_nested_too_deeply_is_refused(saved: Path, tmp_path: Path, inner: str, depth: int) -> None:
    """As it is when it is saved."""
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved, path)
    rewrite(path, lambda content: _set(content, "state", "trees", "extra.text", "all", "DEEP"))
    before, after = inner.format("DEEP").split("DEEP")
    body = json.dumps(content_of(path)).replace('"DEEP"', before * depth + "1" + after * depth)
    write_body(path, body.encode())
    with pytest.raises(CheckpointError, match="checkpoint.json is malformed: .*(nested too deeply|RecursionError)"):
        read_manifest(path)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"{}", b'{"format":2}', b"\xff", b'{"format":' + b"9" * 5000 + b"}"]
)
def test_a_manifest_of_any_other_shape_is_refused(tmp_path: Path, body: bytes) -> None:
    """Whatever Python's parser makes of it."""
    write_body(tmp_path, body)
    with pytest.raises(CheckpointError, match="checkpoint.json is malformed: "):
        read_manifest(tmp_path)
