"""Damage to any byte is noticed, and a manifest that a stranger has made leads nowhere else."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from streamshard import StreamShard, latest, load_checkpoint, save_checkpoint
from streamshard.checkpoint.dcp import to_dcp
from streamshard.checkpoint.manifest import (
    MANIFEST_NAME,
    Box,
    CheckpointFiles,
    Manifest,
    PieceRecord,
    TensorRecord,
    join_records,
    read_manifest,
)
from streamshard.checkpoint.safetensors_file import FileRecord, copy_range
from streamshard.errors import CheckpointError
from tests.checkpoint.crafted import rewrite, split, write_body
from tests.checkpoint.runs import start, steps, weights_of
from tests.models import Stack
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import EXACT, FP32, assert_same, full_weights


def _save(context: RankContext, directory: Path) -> None:
    torch.manual_seed(0)
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    extra = {"scheduler": scheduler, "dtype": torch.float32, "values": [torch.ones(2)], "text": "a"}
    save_checkpoint(directory, model, optimizer, extra, step=1)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank."""
    directory = tmp_path_factory.mktemp("runs") / "saved"
    ranks(1).run(_save, directory)
    return directory / "checkpoint-1"


# ------------------------------------------------------------------------------------------------ damage


@on_ranks(2)
def test_files_that_are_cut_lost_longer_or_flipped_are_named_before_anything_changes(
    context: RankContext, tmp_path: Path
) -> None:
    """A bit may flip in any place; every rank says in which file."""
    run = start(0)
    steps(run, 0, 1)
    path = save_checkpoint(tmp_path / "good", *run).path
    before = weights_of(run)
    names = sorted(each.name for each in path.iterdir())
    assert names == ["checkpoint.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    damaged = tmp_path / "damaged"
    flips = [f"flip {share}" for share in (0.0, 0.1, 0.35, 0.6, 0.85, 1.0)]
    for name, kind in itertools.product(names, ("cut", "lose", "append", *flips)):
        if context.rank == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(path, damaged)
            content = bytearray((damaged / name).read_bytes())
            if kind.startswith("flip"):
                content[round(float(kind[5:]) * (len(content) - 1))] ^= 4
            (damaged / name).write_bytes(content + b" " * (kind == "append") if kind != "cut" else content[:-9])
            if kind == "lose":
                os.unlink(damaged / name)
        dist.barrier()
        with pytest.raises(CheckpointError, match=name if kind != "lose" or "rank" in name else "no whole checkpoint"):
            load_checkpoint(damaged, *run)
        dist.barrier()
    assert_same(weights_of(run), before, "weights", EXACT)


@on_ranks(2)
def test_the_error_about_a_damaged_latest_checkpoint_names_the_newest_intact_one(
    context: RankContext, tmp_path: Path
) -> None:
    """Another checkpoint beside it may be damaged too. If none is intact, the error names none."""
    run = start(0)
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, *run, step=step)

    def damage(*steps: int) -> None:
        for step in steps if context.rank == 0 else ():
            file = tmp_path / f"checkpoint-{step}" / "rank-00001-of-00002.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        dist.barrier()

    damage(3, 4)
    for directory in (tmp_path, tmp_path / "checkpoint-4"):
        words = "checkpoint-4/rank-00001.* is damaged: .* newest intact checkpoint beside it is .*/checkpoint-2$"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(directory, *run)
    load_checkpoint(tmp_path / "checkpoint-2", *run)
    damage(1, 2)
    with pytest.raises(CheckpointError, match="is damaged: its checksums differ from those in the manifest$"):
        load_checkpoint(tmp_path, *run)


# ------------------------------------------------------------------------------------------------ many files


def _load(context: RankContext, one: Path, many: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    load_checkpoint(one, model)
    wanted = full_weights(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    _with_few_files(lambda: load_checkpoint(many, model))
    assert_same(full_weights(model), wanted, "weights", EXACT)


def _with_few_files(action: Callable[[], object], spare: int = 100) -> None:
    """Run `action`, which may open `spare` files more than are open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_checkpoint_of_more_files_than_may_be_open_is_read(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    """Loaded and converted: the result is that of one file."""
    many = tmp_path / "run" / "checkpoint-1"
    shutil.copytree(saved, many)
    split(many, 150)
    _with_few_files(lambda: to_dcp(many, tmp_path / "dcp"))
    ranks(1).run(_load, saved, many)


# ------------------------------------------------------------------------------------------------ pieces


def _record(
    rank: int, start: int, stop: int, box: Box = (), dtype: torch.dtype = torch.float32
) -> dict[str, TensorRecord]:
    """What a rank says of a tensor of six elements."""
    return {"w": TensorRecord((2, 3), dtype, (PieceRecord(rank, start, stop, box),))}


def test_pieces_of_ranks_become_one_record_in_the_order_of_their_elements() -> None:
    empty = {"w": TensorRecord((2, 3), torch.float32, ())}
    found = join_records([_record(0, 4, 6), empty, _record(2, 0, 4)])
    assert found == {"w": TensorRecord((2, 3), torch.float32, (PieceRecord(2, 0, 4), PieceRecord(0, 4, 6)))}


@pytest.mark.parametrize("other", [(1, 5, 6), (1, 3, 6), (1, 4, 5), (1, 4, 7)])
def test_pieces_of_ranks_with_a_gap_or_an_overlap_are_refused(other: tuple[int, int, int]) -> None:
    words = rf"each element of 'w' once, but 0:4 of \(2, 3\) in file 0, {other[1]}:{other[2]} of"
    with pytest.raises(CheckpointError, match=words):
        join_records([_record(0, 0, 4), _record(*other)])


def test_ranks_that_have_a_tensor_in_two_dtypes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the same 'w', but .*float32.* and .*float16"):
        join_records([_record(0, 0, 4), _record(1, 4, 6, dtype=torch.float16)])


# ------------------------------------------------------------------------------------------------ boxes


def _boxed(directory: Path, whole: torch.Tensor, pieces: Sequence[tuple[int, int, Box]]) -> CheckpointFiles:
    """A checkpoint of tensor "w". Each piece, (first, last, box), lies in a file of its own."""
    files, records = [], []
    for number, (first, last, box) in enumerate(pieces):
        inside = whole[tuple(slice(place, place + size) for place, size in box)]
        raw, name = save({"w": inside.reshape(-1)[first:last].clone()}), f"rank-{number}.safetensors"
        (directory / name).write_bytes(raw)
        files.append(FileRecord(name, len(raw), [f"{zlib.crc32(raw):08x}"]))
        records.append(PieceRecord(number, first, last, box))
    tensors = {"w": TensorRecord(tuple(whole.shape), torch.int64, tuple(records)).ordered("w")}
    manifest = Manifest(1, 1, {}, tuple(files), tensors, {})
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    assert read_manifest(directory) == manifest
    return CheckpointFiles(directory, read_manifest(directory))


BOXED: dict[str, tuple[tuple[int, ...], list[tuple[int, int, Box]]]] = {
    "a number": ((), [(0, 1, ())]),
    "one dimension": ((7,), [(0, 3, ((4, 3),)), (0, 1, ((0, 4),)), (1, 4, ((0, 4),))]),
    "rows": ((4, 3), [(0, 6, ((0, 2), (0, 3))), (0, 6, ((2, 2), (0, 3)))]),
    "columns, split within a row": (
        (4, 6),
        [(0, 7, ((0, 4), (0, 4))), (7, 16, ((0, 4), (0, 4))), (0, 8, ((0, 4), (4, 2)))],
    ),
    "a row beside columns": ((3, 4), [(0, 4, ((0, 1), (0, 4))), (0, 2, ((1, 2), (0, 1))), (0, 6, ((1, 2), (1, 3)))]),
    "an empty box": ((2, 3), [(0, 0, ((0, 2), (3, 0))), (0, 6, ((0, 2), (0, 3)))]),
    "three dimensions, the middle one": (
        (2, 4, 3),
        [(0, 5, ((0, 2), (0, 2), (0, 3))), (5, 12, ((0, 2), (0, 2), (0, 3))), (0, 12, ((0, 2), (2, 2), (0, 3)))],
    ),
    "three dimensions, the first and the last": (
        (2, 3, 4),
        [(0, 5, ((0, 2), (0, 3), (0, 3))), (5, 18, ((0, 2), (0, 3), (0, 3))), (0, 3, ((0, 1), (0, 3), (3, 1)))]
        + [(0, 3, ((1, 1), (0, 3), (3, 1)))],
    ),
}


@pytest.mark.parametrize("what", BOXED)
def test_a_tensor_saved_in_boxes_is_read_whole_and_by_ranges(tmp_path: Path, what: str) -> None:
    shape, pieces = BOXED[what]
    numel = math.prod(shape)
    whole = torch.arange(1, numel + 1).view(shape)
    files = _boxed(tmp_path, whole, pieces)
    assert torch.equal(files.read_whole("w"), whole)
    for first, last in itertools.combinations(range(numel + 1), 2):
        target = torch.zeros(last - first, dtype=torch.int64)
        for each in files.find("w", first, target):
            copy_range(*each)
        assert torch.equal(target, whole.view(-1)[first:last])


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        (
            "columns, split within a row",
            [(0, 0, 4), (4, 6, 3), (0, 4, 2), (2, 10, 2), (4, 16, 2), (6, 22, 2), (0, 9, 1), (1, 12, 4), (5, 18, 4)],
        ),
        ("three dimensions, the middle one", [(0, 0, 5), (0, 6, 6), (6, 18, 6), (0, 5, 1), (1, 12, 6)]),
    ],
)
def test_elements_that_lie_together_in_a_box_are_read_together(
    tmp_path: Path, what: str, wanted: list[tuple[int, int, int]]
) -> None:
    """Trailing dimensions that the box has in full make longer runs."""
    shape, pieces = BOXED[what]
    files = _boxed(tmp_path, torch.zeros(shape, dtype=torch.int64), pieces)
    found = files.find("w", 0, torch.empty(math.prod(shape), dtype=torch.int64))
    runs = [(place, int(target.storage_offset()), target.numel()) for _, place, target in found]
    assert runs == wanted


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((1, 0, 1, ((0, 2), (2, 1))), id="half of a box"),
        pytest.param((1, 0, 1, ((0, 1), (2, 1))), id="a box too few"),
        pytest.param((1, 0, 2, ((0, 2), (1, 1))), id="as many elements, and some of them twice"),
        pytest.param((1, 0, 2, ((0, 2), (3, 1))), id="as many elements, and some outside"),
        pytest.param((1, 4, 6), id="a range of the whole tensor"),
    ],
)
def test_boxes_with_a_gap_or_an_overlap_are_refused(other: Any) -> None:
    columns = _record(0, 0, 4, ((0, 2), (0, 2)))
    assert join_records([columns, _record(1, 0, 2, ((0, 2), (2, 1)))])
    with pytest.raises(CheckpointError, match="each element of 'w' once"):
        join_records([columns, _record(*other)])


def test_a_save_writes_no_boxes(saved: Path) -> None:
    content = json.loads((saved / MANIFEST_NAME).read_bytes())["content"]
    assert {len(piece) for each in content["tensors"].values() for piece in each["pieces"]} == {3}


# ------------------------------------------------------------------------------------------------ strangers


def _set(content: Any, *path: Any) -> None:
    for key in path[:-2]:
        content = content[key]
    content[path[-2]] = path[-1]


TENSOR, TREES = ("tensors", "extra.values[0]"), ("state", "trees")
STRANGE: dict[str, Callable[[Any], object]] = {
    "a file outside": lambda c: _set(c, "files", 0, "name", "../x"),
    "the directory itself": lambda c: _set(c, "files", 0, "name", ".."),
    "a device": lambda c: _set(c, "files", 0, "name", "/dev/zero"),
    "a dtype that is none": lambda c: _set(c, *TENSOR, "dtype", "load"),
    "a file that there is not": lambda c: _set(c, *TENSOR, "pieces", [[7, 0, 2]]),
    "a hole": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 1]]),
    "an element twice": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 1], [0, 0, 1]]),
    "a shape that is too large": lambda c: c["tensors"]["extra.values[0]"].update(
        shape=[1 << 40], pieces=[[0, 0, 1 << 40]]
    ),
    "a range before the tensor": lambda c: _set(c, *TENSOR, "pieces", [[0, -1, 1]]),
    "a range that is not of integers": lambda c: _set(c, *TENSOR, "pieces", [[0, 0.0, 2.0]]),
    "a piece with more": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[0, 2]], 0]]),
    "negative sizes": lambda c: c["tensors"]["extra.values[0]"].update(shape=[-1, -2]),
    "an element of a box twice": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 1, [[0, 1]]], [0, 0, 1, [[0, 1]]]]),
    "a box outside of the shape": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[1, 2]]]]),
    "a box before the shape": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[-1, 2]]]]),
    "a box of a negative size": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2], [0, 0, 0, [[2, -1]]]]),
    "a box of other dimensions": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[0, 2], [0, 1]]]]),
    "a box without a size": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[2]]]]),
    "a box that is not of integers": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[0, 2.0]]]]),
    "a range outside of its box": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 2, [[0, 1]]]]),
    "a range that ends before its start": lambda c: _set(c, *TENSOR, "pieces", [[0, 0, 3], [0, 3, 2]]),
    "no state": lambda c: c.pop("state"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_malicious_manifest_is_refused_and_skipped(saved: Path, tmp_path: Path, what: str) -> None:
    """Nothing outside of the directory is read or written. An older checkpoint is used instead."""
    for number in (1, 2):
        shutil.copytree(saved, tmp_path / f"checkpoint-{number}")
        rewrite(tmp_path / f"checkpoint-{number}", lambda content: content.update(number=number))  # noqa: B023
    strange = tmp_path / "checkpoint-2"
    assert latest(tmp_path) == strange
    rewrite(strange, STRANGE[what])
    with pytest.raises(CheckpointError, match=f"{strange}/checkpoint.json cannot be used"):
        read_manifest(strange)
    assert latest(tmp_path) == tmp_path / "checkpoint-1"


def _load_strange(context: RankContext, path: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    before = full_weights(model)
    with pytest.raises(CheckpointError, match="malformed|KeyError|is not the name of a dtype|nested"):
        load_checkpoint(path, model)
    assert_same(full_weights(model), before, "weights", EXACT)


STRANGE_TREES: list[Any] = [
    {"$": "dtype", "value": "load"},
    {"$": "tensor", "tensor": "x"},
    {"$": "load"},
    {"$": "tuple"},
]


@pytest.mark.parametrize("number", range(len(STRANGE_TREES)))
def test_a_malicious_value_is_refused_before_anything_changes(
    ranks: RankPool, saved: Path, tmp_path: Path, number: int
) -> None:
    """For example an attribute of torch in place of a dtype, which would reach the user's objects."""
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved, path)
    rewrite(path, lambda c: _set(c, *TREES, "extra.text", 0, STRANGE_TREES[number]))
    ranks(1).run(_load_strange, path)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"{}", b'{"format":4}', b"\xff", b'{"format":' + b"9" * 5000 + b"}", b"[" * 100_000]
)
def test_a_manifest_of_any_other_shape_is_refused(tmp_path: Path, body: bytes) -> None:
    """For example numbers and nested lists that Python's parser accepts."""
    write_body(tmp_path, body)
    with pytest.raises(CheckpointError, match="checkpoint.json cannot be used: "):
        read_manifest(tmp_path)
