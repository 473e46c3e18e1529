"""Damage to any byte is noticed, and a manifest that a stranger has made leads nowhere else."""

from __future__ import annotations

import itertools
import math
import shutil
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from streamshard import StreamShard, latest, load_checkpoint, save_checkpoint
from streamshard.checkpoint.directory import open_intact
from streamshard.checkpoint.manifest import (
    MANIFEST_NAME,
    CheckpointFiles,
    Manifest,
    PieceRecord,
    TensorRecord,
    are_tiles,
    join_records,
    place_in,
    read_manifest,
)
from streamshard.checkpoint.safetensors_file import FileRecord, copy_ranges, verify_files
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CheckpointError, log
from streamshard.forms import part_of
from tests.checkpoint.crafted import few_files, flip, rewrite, write_body
from tests.checkpoint.runs import start, steps, weights_of
from tests.compare import EXACT, assert_same, full_weights
from tests.faults import case
from tests.models import Stack
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import FP32


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


@on_ranks(2)
def test_damaged_files_are_named_before_anything_changes(context: RankContext, tmp_path: Path) -> None:
    """A bit may flip in any place; every rank says in which file. Their directory loads its newest intact checkpoint.

    The result names the others on every rank, and the log on the first.
    """
    run = start(0)
    older, path = (save_checkpoint(tmp_path, *run, step=step).path for step in (2, 4))
    steps(run, 0, 1)
    before = weights_of(run)
    names = sorted(each.name for each in path.iterdir())
    assert names == ["checkpoint.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    flips = [f"flip {share}" for share in (0.1, 0.6)]
    for name, kind in itertools.product(names, ("cut", "lose", "append", *flips)):
        file = path / name
        if context.rank == 0:
            whole = file.read_bytes()
            if kind.startswith("flip"):
                flip(file, round(float(kind[5:]) * (len(whole) - 1)))
            elif kind == "lose":
                file.unlink()
            else:
                file.write_bytes(whole[:-9] if kind == "cut" else whole + b" ")
        dist.barrier()
        with pytest.raises(CheckpointError, match=name if kind != "lose" or "rank" in name else "no whole checkpoint"):
            load_checkpoint(path, *run)
        dist.barrier()
        if context.rank == 0:
            file.write_bytes(whole)
    assert_same(weights_of(run), before, "weights", EXACT)
    if context.rank == 0:
        flip(file, -1)
    dist.barrier()
    with pytest.raises(CheckpointError, match=f"{name} is damaged: .* Give its directory, {tmp_path}, for the newest"):
        load_checkpoint(path, *run)
    with mock.patch.object(log, "warning") as warn:
        loaded = load_checkpoint(tmp_path, *run)
    assert warn.call_count == (1 if context.rank == 0 else 0)
    assert loaded.path == older and loaded.passed_over.keys() == {path}
    assert "is damaged: its checksums differ" in loaded.passed_over[path]


def _record(rank: int, start: int, stop: int, dtype: torch.dtype = torch.float32) -> dict[str, TensorRecord]:
    """What a rank says of a tensor of six elements."""
    return {"w": TensorRecord((2, 3), dtype, (PieceRecord(rank, start, stop),))}


def test_pieces_of_ranks_that_do_not_fit_are_refused() -> None:
    """A gap, overlaps, another dtype."""
    for first, last in ((5, 6), (3, 6), (4, 5), (4, 7)):
        words = rf"each element of 'w' once, but 0:4 of \(2, 3\) in file 0, {first}:{last} of"
        with pytest.raises(CheckpointError, match=words):
            join_records([_record(0, 0, 4), _record(1, first, last)])
    with pytest.raises(CheckpointError, match=r"the same 'w', but .*float32.* and .*float16"):
        join_records([_record(0, 0, 4), _record(1, 4, 6, dtype=torch.float16)])


def test_boxes_are_tiles_if_each_element_is_in_one_of_them() -> None:
    """Cells of grids; the same with one cell moved, resized or left out."""
    rows, columns = [(0, 2, 5), (2, 2, 5), (4, 1, 5)], [(0, 3, 4), (3, 1, 4)]
    cells = [*itertools.product(rows, columns)]
    assert are_tiles(cells) and are_tiles([()]) and are_tiles([(each,) for each in rows])
    for place, other in itertools.product(range(6), ((0, 2, 5), (1, 2, 5), (4, 2, 5), (0, 5, 5))):
        changed = (other, cells[place][1])
        if changed not in cells:
            assert not are_tiles([*cells[:place], changed, *cells[place + 1 :]])
    assert not any(are_tiles(cells[:place] + cells[place + 1 :]) for place in range(6))


def test_places_in_boxes_are_those_that_are_counted() -> None:
    for box in ((), ((2, 3, 6),), ((1, 2, 4), (0, 3, 3), (2, 1, 5)), ((3, 1, 4), (1, 0, 3))):
        sizes = [size for *_, size in box] or [6]
        inside = part_of(torch.arange(math.prod(sizes)), box).reshape(-1)
        for element in range(math.prod(sizes) + 1):
            assert place_in(box, element) == int((inside < element).sum()), (box, element)


VERSIONS = dict.fromkeys(("streamshard", "torch", "saved_at"), "0")


def _cut(directory: Path, whole: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> CheckpointFiles:
    """A checkpoint of tensor "w". Each piece, (first, last), lies in a file of its own."""
    files, records = [], []
    for number, (first, last) in enumerate(pieces):
        raw, name = save({"w": whole.reshape(-1)[first:last].clone()}), f"rank-{number}.safetensors"
        (directory / name).write_bytes(raw)
        files.append(FileRecord(name, len(raw), [f"{zlib.crc32(raw):08x}"]))
        records.append(PieceRecord(number, first, last))
    tensors = {"w": TensorRecord(tuple(whole.shape), torch.int64, tuple(records)).ordered("w")}
    manifest = Manifest(1, 1, VERSIONS, tuple(files), tensors, {"models": {}, "optimizers": {}, "trees": {}})
    (directory / MANIFEST_NAME).write_bytes(manifest.encode())
    assert read_manifest(directory) == manifest
    return CheckpointFiles(directory, read_manifest(directory))


CUTS: dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]] = {
    "a number": ((), [(0, 1)]),
    "one dimension, out of order": ((7,), [(4, 7), (0, 1), (1, 4)]),
    "within rows": ((2, 4, 3), [(0, 5), (5, 22), (22, 24)]),
    "no elements": ((0, 3), []),
}


@pytest.mark.parametrize("what", CUTS)
def test_a_tensor_saved_in_pieces_is_read_whole_and_by_ranges(tmp_path: Path, what: str) -> None:
    shape, pieces = CUTS[what]
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)
    files = _cut(tmp_path, whole, pieces)
    assert torch.equal(files.read_whole("w"), whole)
    for first, last in itertools.combinations(range(whole.numel() + 1), 2):
        target = torch.zeros(last - first, dtype=torch.int64)
        copy_ranges(files.find("w", first, target))
        assert torch.equal(target, whole.view(-1)[first:last])


def test_a_checkpoint_of_more_files_than_may_be_open_is_read(tmp_path: Path) -> None:
    whole = torch.arange(150)
    files = _cut(tmp_path, whole, [(place, place + 1) for place in range(150)])
    with few_files(100):
        verify_files(tmp_path, files.manifest.files, 0, 1)
        assert torch.equal(files.read_whole("w"), whole)


VALUE = "extra.values[0]"
TENSOR_VALUE = {"$": "tensor", "tensor": VALUE}


def _text(content: Any, value: Any) -> None:
    """What the value "text" of the first rank is."""
    content["state"]["trees"]["extra.text"][0] = value


# What the manifest itself says.
STRANGE: dict[str, Callable[[Any], object]] = {
    "a file outside": lambda c: c["files"][0].update(name="../x"),
    "a dtype that is none": lambda c: c["tensors"][VALUE].update(dtype="load"),
    "no state": lambda c: c.pop("state"),
    "a key with a command": lambda c: c.update({"\x1b[2K": 1}),
}
# What it says of the files' contents and of the run.
STRANGE_VALUES: dict[str, Callable[[Any], object]] = {
    "a file that there is not": lambda c: c["tensors"][VALUE].update(pieces=[[7, 0, 2]]),
    "an attribute of torch": lambda c: _text(c, {"$": "dtype", "value": "load"}),
    "a value of a tensor that there is not": lambda c: _text(c, {**TENSOR_VALUE, "tensor": "extra.text"}),
    "a weight that there is not": lambda c: c["state"]["models"]["model"]["names"].update(x="x"),
}


def test_a_manifest_of_a_stranger_is_refused_and_passed_over(saved: Path, tmp_path: Path) -> None:
    """Nothing is read or written elsewhere, and there is an older checkpoint."""
    strange = tmp_path / "checkpoint-2"
    shutil.copytree(saved, tmp_path / "checkpoint-1")
    for what, change in STRANGE.items():
        shutil.copytree(saved, strange)
        rewrite(strange, lambda content: content.update(number=2))
        assert latest(tmp_path) == strange
        rewrite(strange, change)
        with case(what), pytest.raises(CheckpointError, match=f"{strange}/checkpoint.json cannot be used") as caught:
            open_intact(strange, RankGroup())
        assert len(str(caught.value)) < 1000
        assert all(line.isprintable() for line in "".join(traceback.format_exception(caught.value)).splitlines())
        assert open_intact(tmp_path, RankGroup())[0].root == tmp_path / "checkpoint-1"
        shutil.rmtree(strange)


def _load_strange(context: RankContext, directory: Path) -> None:
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_weights(model)
    for what in STRANGE_VALUES:
        with pytest.raises(CheckpointError, match=f"could not load .*{what}"):
            load_checkpoint(directory / what, model, optimizer)
    assert_same(full_weights(model), before, "weights", EXACT)


def test_values_of_a_stranger_are_refused_before_anything_changes(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    for what, change in STRANGE_VALUES.items():
        shutil.copytree(saved, tmp_path / what)
        rewrite(tmp_path / what, change)
    ranks(1).run(_load_strange, tmp_path)


def test_a_manifest_of_any_other_shape_is_refused(tmp_path: Path) -> None:
    """Whatever Python's parser makes of it."""
    for body in (b"", b"[]", b'{"format":4}', b"\xff", b'{"format":' + b"9" * 5000 + b"}", b"[" * 100_000):
        write_body(tmp_path, body)
        with case(body[:20]), pytest.raises(CheckpointError, match="checkpoint.json cannot be used: "):
            read_manifest(tmp_path)
