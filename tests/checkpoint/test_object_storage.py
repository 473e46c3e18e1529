"""Checkpoints and exports on object storage: no save that has returned is lost, and ranks read what they need."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from streamshard import StreamShard, export_safetensors, latest, load_checkpoint, load_safetensors, save_checkpoint
from streamshard.checkpoint import object_store, save
from streamshard.checkpoint.directory import create_partial, next_number, open_verified, survey
from streamshard.checkpoint.object_store import BEGUN, ObjectStore
from streamshard.checkpoint.storage import MANIFEST_NAME, Url, parse_location, storage_of
from streamshard.comm.ranks import RankGroup
from streamshard.config import parse_path
from streamshard.errors import CheckpointError, ConfigError
from tests.checkpoint import exporting
from tests.checkpoint.changes import Act, Killed, answer_badly, kill, sweep
from tests.checkpoint.crafted import FILE, loaded_number, save_number
from tests.checkpoint.exporting import Plain, filled, sharded
from tests.checkpoint.objects import Kept, at_operation
from tests.checkpoint.runs import start, weights_of
from tests.compare import assert_same
from tests.families import llama
from tests.launched import Launched
from tests.models import Stack
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32


@pytest.fixture
def kept(tmp_path: Path) -> Url:
    return Url(f"kept://{tmp_path}/run")


def test_a_run_that_is_killed_while_another_saves_deletes_no_save_that_has_returned(tmp_path: Path) -> None:
    """The second run begins at any operation of the first, and dies at every second of its own, or ends."""
    times = itertools.count()
    returned = refused = 0
    for at in itertools.count():
        for dies_at in itertools.count(at % 2, 2):
            where = Url(f"kept://{tmp_path}/{next(times)}")
            save_number(where, 1)
            first, second = list[Any](), list[Any]()

            def intrude(at: int, where: Url, saved: list[Any], call: Callable[[], Any]) -> Any:
                with at_operation(at, kill, lasting=True), contextlib.suppress(Killed):
                    saved.append(save_number(where, 3))
                return call()

            with at_operation(at, functools.partial(intrude, dies_at, where, second)) as done:
                try:
                    first.append(save_number(where, 2))
                except CheckpointError as error:
                    assert "give each its own" in str(error) or "is not whole" in str(error)
            if len(done) <= at:
                break
            for path in (*first, *second):
                open_verified(path, RankGroup())
            returned, refused = returned + len(first), refused + (not first)
            assert loaded_number(where) >= 1
            if second:
                break
        if len(done) <= at:
            break
    assert returned > 50 and refused > 5


def test_a_save_that_goes_on_while_another_run_deletes_it_does_not_return(kept: Url) -> None:
    """Whoever publishes comes between any two operations of whoever deletes. One of them gives up."""
    seen, outcomes = set[str](), set[str]()
    for at in range(6):
        where = kept / str(at)
        partial = create_partial(where, "checkpoint-5")
        inside = storage_of(where)

        def publish(name: str, inside: Any, call: Callable[[], Any]) -> Any:
            try:
                inside.publish(name, "checkpoint-5", b"manifest")
                outcomes.add("published")
            except CheckpointError:
                outcomes.add("refused")
            return call()

        outcomes.clear()
        with at_operation(at, functools.partial(publish, partial.path.name, inside)):
            inside.sweep(partial.path.name)
        assert storage_of(partial.path).is_file(MANIFEST_NAME) == (outcomes == {"published"})
        seen |= outcomes
    assert seen == {"published", "refused"}


def test_saves_are_found_numbered_and_deleted_as_on_a_file_system(kept: Url) -> None:
    """By generation, not by number. Directories under other names stay, also if they end with a date."""
    assert latest(kept) is None and next_number(kept) == 1
    assert survey(kept) == []
    paths = [save_number(kept, number) for number in (10, 11, 3)]
    assert latest(str(kept)) == paths[2] and paths[2].name.startswith("checkpoint-3.")
    assert next_number(kept) == 12
    others = {"model.20261130", "checkpoint-500.20261130"}  # of eight hexadecimal digits
    for name in others:
        ObjectStore(kept / name).put("model.safetensors", b"weights")
    for name in storage_of(paths[2]).names():
        (data,) = storage_of(paths[2]).read((name, 0, storage_of(paths[2]).size(name)))
        ObjectStore(kept / "best").put(name, data)
    last = save_number(kept, 3, keep=2)
    assert {entry.path for entry in survey(kept)} == {kept / "best", paths[2], last}
    assert latest(kept) == last
    assert others < {*storage_of(kept).names()} and not storage_of(kept).leftovers()


def test_deleting_asks_for_no_file_by_itself(kept: Url) -> None:
    """A checkpoint of many ranks has many files. Directories in it, which are not ours, go too."""
    path = save_number(kept, 1)
    with at_operation(-1, kill) as done:
        storage_of(kept).delete(path.name)
    assert not storage_of(path).names() and not any(each.startswith("list") and FILE in each for each in done)
    path = save_number(kept, 2)
    ObjectStore(path / "a" / "b").put("notes", b"")
    storage_of(kept).delete(path.name)
    assert not storage_of(kept).names()


def test_a_damaged_checkpoint_is_passed_over(kept: Url) -> None:
    for what, name in (("gone", FILE), ("changed", FILE), ("gone", MANIFEST_NAME), ("changed", MANIFEST_NAME)):
        root = kept / f"{what} {name}"
        save_number(root, 1)
        path = save_number(root, 2)
        data = storage_of(path).read((name, 0, storage_of(path).size(name)))[0]
        store = ObjectStore(path)
        store.unlink(name)
        if what == "changed":
            store.put(name, data[:-1] + b"?")
        assert loaded_number(root) == 1
        assert BEGUN in store.names()
        assert loaded_number(save_number(root, 3).parent) == 3


def test_an_upload_has_parts_and_one_that_fails_leaves_nothing(kept: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is in memory as a whole."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 1000)
    monkeypatch.setattr(object_store, "CHUNK_BYTES", 1000)
    store = storage_of(kept)
    with at_operation(-1, kill) as done, store.writing("file", 9000) as write:
        for number in range(9):
            write(b"%d" % number * 1000, number * 1000)
    assert sum(each.startswith("upload") for each in done) >= 9
    assert store.read(("file", 0, 9000), ("file", 2999, 3001)) == [b"".join(b"%d" % n * 1000 for n in range(9)), b"23"]
    with contextlib.suppress(KeyboardInterrupt), store.writing("other", 5000) as write:
        write(b"1" * 3000, 0)
        raise KeyboardInterrupt
    del write
    gc.collect()  # closes files
    assert store.names() == ["file"]


def test_urls_and_paths_are_told_apart(tmp_path: Path) -> None:
    assert parse_location("directory", f"file://{tmp_path}") == tmp_path
    assert parse_location("directory", "s3://bucket//a///run//") == Url("s3://bucket/a/run")
    assert parse_location("directory", "memory://") == Url("memory://")
    assert parse_location("directory", Url("s3://bucket/run")) == Url("s3://bucket/run")
    with pytest.raises(ConfigError, match="pathlib takes one slash of a URL away"):
        parse_location("directory", Path("s3://bucket/run"))
    for name in ("a*", "a?", "a[1]", "a#1"):
        assert parse_location("directory", f"file://{tmp_path}/{name}") == tmp_path / name
        with pytest.raises(ConfigError, match=r"directory='s3://bucket/a.*as patterns or versions: rename it"):
            parse_location("directory", f"s3://bucket/{name}")
    with pytest.raises(ConfigError, match="wanted a path of this machine"):
        parse_path("path", "s3://bucket/run")


@on_ranks(2)
@pytest.mark.parametrize("missing", ["fsspec.core", "s3fs"])
def test_a_missing_package_raises_on_all_ranks(context: RankContext, missing: str) -> None:
    """On rank 1 alone: the others hear of it. Nothing has been written."""
    model: Any = StreamShard(filled(Plain), ["norm"], precision=FP32)
    url = "s3://bucket/run" if missing == "s3fs" else "memory://run"
    for call in (save_checkpoint, load_checkpoint, export_safetensors, load_safetensors):
        with mock.patch.dict(sys.modules, {missing: None} if context.rank or missing == "s3fs" else {}):
            told = f"rank.*{url}: .*pip install streamshard\\[object-storage\\]"
            arguments = (url, model) if call in (save_checkpoint, load_checkpoint) else (model, url)
            with pytest.raises(CheckpointError, match=told):
                call(*arguments)  # type: ignore[operator]
    assert latest("memory://run") is None


def _end_while_saving(where: str) -> None:
    """And destroys the process group before anything is written."""
    pool, is_destroyed, write = ThreadPoolExecutor(), threading.Event(), save.write_file

    def watch(kind: str, path: str, action: Callable[[], Any]) -> Any:
        time.sleep(0.05)
        return pool.submit(action).result()

    Kept.watch = staticmethod(watch)
    save.write_file = lambda *args: write(*args) if is_destroyed.wait() else None  # type: ignore[assignment, return-value]
    torch.distributed.init_process_group("gloo")
    save_checkpoint(where, StreamShard(Stack()), wait=False)
    torch.distributed.destroy_process_group()
    is_destroyed.set()


@pytest.mark.ranks
def test_a_process_finishes_its_save_before_it_exits(kept: Url, tmp_path: Path) -> None:
    """s3fs and others use executors, which Python ends before it waits for threads."""
    for code, output in Launched(2, tmp_path, _end_while_saving, str(kept)).end():
        assert code == 0, output
        assert latest(kept) is not None, output


def _wide() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def _save_wide(context: RankContext, where: str) -> None:
    save_checkpoint(where, StreamShard(_wide(), precision=FP32))


def _load_wide(context: RankContext, where: str) -> None:
    model: Any = StreamShard(_wide(), precision=FP32, min_unit_size=1 << 30)
    before = Kept.bytes_read
    load_checkpoint(where, model)
    total = sum(param.numel() * 4 for param in _wide().parameters())
    most = total / 2 + total / 3 * 2 + 6 * (1 << 16)  # its files of three, headers, manifest, random states
    assert total / 2 < Kept.bytes_read - before < most
    assert_same(model.full_state_dict(rank0_only=False), _wide().state_dict(), "loaded")


@pytest.mark.ranks
def test_another_number_of_ranks_reads_only_the_ranges_it_needs(ranks: Any, tmp_path: Path) -> None:
    """Each byte is read once by one rank to verify it, and once by its owner."""
    where = f"kept://{tmp_path}/run"
    ranks(3).run(_save_wide, where)
    ranks(2).run(_load_wide, where)


@on_ranks(1)
def test_memory_of_the_process_is_object_storage_too(context: RankContext) -> None:
    """Saved in the background too."""
    run, other = start(0), start(1)
    for wait in (True, False):
        saving = save_checkpoint("memory://run", run.model, extra={"step": 3}, keep=1, wait=wait)
    loaded = load_checkpoint("memory://run", other.model)
    assert loaded["step"] == 3 and loaded.path == saving.path
    assert_same(weights_of(other), weights_of(run), "loaded")
    assert len(storage_of(Url("memory://run")).names()) == 1
    fsspec.filesystem("memory").store.clear()


@on_ranks(2)
@pytest.mark.parametrize("size", ["5GB", "3KB"])
def test_an_export_has_the_files_of_one_on_a_file_system(context: RankContext, tmp_path: Path, size: str) -> None:
    """And loads from there. It is not replaced: another directory takes the next one, by transformers' method too."""
    where, model = f"kept://{tmp_path}/export", sharded(filled(llama))
    names = export_safetensors(model, where, max_shard_size=size)
    without = [re.sub("-[0-9a-f]{8}-", "-", name) for name in names]
    assert export_safetensors(model, tmp_path / "local", max_shard_size=size) == without
    for name, own in zip(names, without, strict=True):
        if name.endswith(".safetensors"):
            assert (tmp_path / "export" / name).read_bytes() == (tmp_path / "local" / own).read_bytes()
    other, wanted = sharded(llama()), filled(llama).state_dict()
    load_safetensors(other, where)
    assert_same(other.full_state_dict(rank0_only=False), wanted, "loaded")
    with pytest.raises(CheckpointError, match=f"{where} has an export, {names[-1]}.*name a new directory"):
        export_safetensors(model, where, max_shard_size=size)
    model.save_pretrained(f"{where}-2", max_shard_size=size)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path / "export-2").state_dict(), wanted, "read")


@on_ranks(1)
def test_two_exports_do_not_mix(context: RankContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes between any two operations of the first."""
    monkeypatch.setattr(Kept, "replaces", True)
    models, outcomes = [sharded(filled(Plain)), sharded(Plain())], set()
    wanted = []
    for number, model in enumerate(models):
        export_safetensors(model, tmp_path / f"of {number}", max_shard_size=180)
        wanted.append(exporting.stored_bytes(tmp_path / f"of {number}"))
    for number in itertools.count():
        where, written = f"kept://{tmp_path}/{number}", []

        def intrude(url: str, written: list[int], call: Callable[[], Any]) -> Any:
            with contextlib.suppress(CheckpointError):  # the first one is there already
                export_safetensors(models[1], url, max_shard_size=180)
                written.append(1)
            return call()

        with (
            at_operation(number, functools.partial(intrude, where, written)) as done,
            contextlib.suppress(CheckpointError),
        ):
            export_safetensors(models[0], where, max_shard_size=180)
            written.append(0)
        if len(done) <= number:
            break
        assert exporting.stored_bytes(tmp_path / str(number)) in [wanted[which] for which in written]
        outcomes.add(tuple(written))
    assert outcomes >= {(0,), (1,)}


@on_ranks(1)
@pytest.mark.parametrize("act", [kill, answer_badly])
def test_a_kill_or_an_error_leaves_no_export_or_all_of_it(context: RankContext, act: Act, tmp_path: Path) -> None:
    """If there is none, the next one succeeds, and sweeps up."""
    model, outcomes = sharded(filled(Plain)), set()
    export = functools.partial(export_safetensors, model, max_shard_size=180)
    for number, where, error in sweep(at_operation, act, lambda number: f"kept://{tmp_path}/{number}", export):
        found = exporting.stored_bytes(tmp_path / str(number))
        outcomes.add(found is not None)
        assert found is not None or error is not None
        if found is None:
            export(where)
            found = exporting.stored_bytes(tmp_path / str(number))
            assert not any(path.is_dir() for path in (tmp_path / str(number)).iterdir())
        assert found == exporting.read_by_us(Url(where))
    assert outcomes == {True, False}
