"""Whatever happens while an export replaces another, readers find one of the two, whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from streamshard.checkpoint import export as exports_module
from streamshard.checkpoint import load as loading
from streamshard.checkpoint import safetensors_file
from streamshard.checkpoint.export import export_shards
from streamshard.checkpoint.load import read_directory
from streamshard.checkpoint.safetensors_file import SUMS_NAME
from streamshard.errors import CheckpointError
from tests.checkpoint import exporting
from tests.checkpoint.exporting import (
    Plain,
    ThreadGroup,
    assert_sums,
    export,
    filled,
    names_in,
    shards_for,
    stored_bytes,
)
from tests.families import llama
from tests.launched import Launched

# Limits of a file's bytes at which the model takes three files and two. What is tried grows with the square of that.
THREE, TWO = 180, 250
# As (old, new) max_shard_size: the same file, the same number of files, fewer, more, one to several and back.
SIZES = [("5GB", "5GB"), (TWO, TWO), (THREE, TWO), (TWO, THREE), ("5GB", TWO), (TWO, "5GB")]
CALLS = ("open", "ftruncate", "pwrite", "fsync", "replace", "unlink", "mkdir", "rmdir")


class Exports(NamedTuple):
    """An export and the one that replaces it, each also in a directory of its own."""

    old: Path
    new: Path
    replace: Callable[[Path], None]

    def found(self, directory: Path) -> str:
        """Which of the two readers find: libraries that go by Hugging Face's rules, and ours."""
        state = stored_bytes(directory)
        assert state is not None
        assert read_by_us(directory) == state
        return "old" if state == stored_bytes(self.old) else "new" if state == stored_bytes(self.new) else "neither"

    def copy_old(self, directory: Path) -> Path:
        shutil.copytree(self.old, directory)
        return directory


def read_by_us(directory: Path) -> dict[str, bytes]:
    with read_directory(directory) as stored:
        stored.verify_share(0, 1, lambda count: None)
        return {name: stored.read_all(each.file)[each.offset :][: each.n_bytes] for name, each in stored.stored.items()}


def kinds_in(directory: Path) -> list[str]:
    """Names of files, without the tokens of exports that have replaced others."""
    return [re.sub("-[0-9a-f]{8}-", "-", name) for name in names_in(directory)]


def make_exports(
    root: Path,
    old_size: int | str,
    new_size: int | str,
    make: Callable[[], nn.Module] = Plain,
    old_dtype: torch.dtype = torch.float32,
) -> Exports:
    """Two of the same class, with other values."""
    new = make()
    exports = Exports(root / "old", root / "new", lambda directory: _export_alone(new, directory, new_size))
    _export_alone(filled(make, old_dtype), exports.old, old_size)
    exports.replace(exports.new)
    return exports


def _export_alone(model: nn.Module, directory: Path, size: int | str) -> None:
    """In this thread, as one rank."""
    group = ThreadGroup(0, threading.Barrier(1), [None])
    export_shards(model, shards_for(model, 0, 1), group, directory, None, size)


@pytest.fixture(autouse=True)
def disks_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of syncs would be all that these tests do."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture
def at_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``with at_call(n, act) as reached:`` calls ``act(real_call)`` instead of the n-th change to the file system.

    `lasting`: instead of all later ones as well. `reached()` tells whether there were that many.
    """
    real = {name: getattr(os, name) for name in CALLS}

    @contextlib.contextmanager
    def arm(
        number: int, act: Callable[[Callable[[], Any]], Any], lasting: bool = False
    ) -> Iterator[Callable[[], bool]]:
        count = 0

        def watch(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if name == "open" and not args[1] & os.O_CREAT:
                    return real[name](*args, **kwargs)
                count += 1
                if count - 1 == number or lasting and count > number:
                    return act(lambda: real[name](*args, **kwargs))
                return real[name](*args, **kwargs)

            return call

        for name in CALLS:
            monkeypatch.setattr(os, name, watch(name))
        try:
            yield lambda: count > number
        finally:
            for name in CALLS:
                monkeypatch.setattr(os, name, real[name])

    yield arm


def _kill(call: Callable[[], Any]) -> None:
    raise Killed


def _fail(call: Callable[[], Any]) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _fail_after(call: Callable[[], Any]) -> None:
    """As network file systems do when the answer is lost."""
    call()
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_sizes_give_the_numbers_of_files_that_they_are_for(tmp_path: Path) -> None:
    """Several, and another number of several."""
    for size, count in ((THREE, 3), (TWO, 2)):
        _export_alone(Plain(), tmp_path / str(count), size)
        assert len(list((tmp_path / str(count)).glob(f"model-*-of-{count:05}.safetensors"))) == count


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_export_killed_anywhere_leaves_the_old_one_or_the_new(
    old: int | str, new: int | str, tmp_path: Path, at_call: Callable[..., Any]
) -> None:
    """After every single change to the file system; the next export sweeps up what is left."""
    exports = make_exports(tmp_path, old, new)
    found: list[str] = []
    for number in itertools.count():
        directory = exports.copy_old(tmp_path / str(number))
        with at_call(number, _kill, lasting=True) as reached, contextlib.suppress(Killed):
            exports.replace(directory)
        if not reached():
            break
        found.append(exports.found(directory))
        exports.replace(directory)
        assert kinds_in(directory) == names_in(exports.new)
        assert exports.found(directory) == "new"
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)
    assert kinds_in(directory) == names_in(exports.new)


@pytest.mark.ranks
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_export_killed_by_the_system(tmp_path: Path) -> None:
    """The same with processes that are really killed, after every third call of publishing."""
    ((code, output),) = Launched(0, tmp_path, _killing_children, tmp_path).end(timeout_s=100.0)
    assert code == 0, output
    assert output.split() == ["old", "new"]


def _killing_children(root: Path) -> None:
    os.fsync = lambda descriptor: None
    exports = make_exports(root, 150, 150)
    found = []
    for number in range(0, 10_000, 3):
        directory = exports.copy_old(root / str(number))
        child = os.fork()
        if not child:
            exports_module._publish = _dying_at(number)
            exports.replace(directory)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        found.append(exports.found(directory))
        exports.replace(directory)
        assert kinds_in(directory) == names_in(exports.new)
    print(*dict.fromkeys(found), flush=True)


def _dying_at(number: int) -> Callable[..., None]:
    count, real_publish = 0, exports_module._publish

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*args, **kwargs)

        return dying

    def publish(*args: Any) -> None:
        for name in CALLS:
            setattr(os, name, watch(getattr(os, name)))
        real_publish(*args)

    return publish


@pytest.mark.parametrize(
    ("act", "old", "new"), [*((_fail, *sizes) for sizes in SIZES), *((_fail_after, *sizes) for sizes in SIZES[::2])]
)
def test_error_anywhere_leaves_the_old_one_or_the_new(
    old: int | str, new: int | str, act: Callable[..., Any], tmp_path: Path, at_call: Callable[..., Any]
) -> None:
    """One call fails, whether or not it was carried out; of the old export that is kept no file is changed or added."""
    exports = make_exports(tmp_path, old, new)
    found = set()
    for number in itertools.count():
        directory = exports.copy_old(tmp_path / str(number))
        with at_call(number, act) as reached:
            raised = None
            try:
                exports.replace(directory)
            except CheckpointError as error:
                raised = error
        if not reached():
            break
        which = exports.found(directory)
        found.add(which)
        if raised is None:
            assert which == "new"  # it could be made up for
        elif which == "old":
            assert {*names_in(directory), SUMS_NAME} == {*names_in(exports.old)}
        exports.replace(directory)
        assert kinds_in(directory) == names_in(exports.new)
    assert found == {"old", "new"}


def test_directory_in_the_way_is_named_and_nothing_changes(tmp_path: Path) -> None:
    """Found before anything is written."""
    exports = make_exports(tmp_path, "5GB", 150)
    for blocked in ("model.safetensors.index.json", SUMS_NAME):
        directory = exports.copy_old(tmp_path / blocked)
        (directory / blocked).unlink(missing_ok=True)
        (directory / blocked).mkdir()
        with pytest.raises(CheckpointError, match=f"{blocked} is a directory"):
            exports.replace(directory)
        assert stored_bytes(directory) == stored_bytes(exports.old)
        assert names_in(directory) == sorted({*names_in(exports.old), blocked})


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    """Directories of Hugging Face's cache are made of links to files that others share."""
    exports = make_exports(tmp_path, 150, 150)
    directory = tmp_path / "out"
    directory.mkdir()
    for name in names_in(exports.old):
        (directory / name).symlink_to(exports.old / name)
    before = stored_bytes(exports.old)
    exports.replace(directory)
    assert exports.found(directory) == "new"
    assert stored_bytes(exports.old) == before
    assert not any(path.is_symlink() for path in directory.iterdir())


def test_export_replaces_one_with_more_files(tmp_path: Path) -> None:
    """Files of the earlier export are gone, other files stay."""
    model = filled(llama)
    export(model, tmp_path, 2, max_shard_size="3KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    many = len(names_in(tmp_path))
    export(model, tmp_path, 2, max_shard_size="20KB")
    names = names_in(tmp_path)
    assert "tokenizer.json" in names
    assert 5 < len(names) < many
    export(model, tmp_path, 2)
    ours = ["model.safetensors", SUMS_NAME]
    assert names_in(tmp_path) == ["config.json", "generation_config.json", *ours, "tokenizer.json"]


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_reader_beside_a_writer_reads_one_export(
    old: int | str, new: int | str, tmp_path: Path, at_call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer comes between any two steps of the reader, and gets as far as any step of publishing."""
    exports = make_exports(tmp_path, old, new)
    real_publish = exports_module._publish
    looked = ((safetensors_file, "_open"), (loading, "_front"), (loading, "parse_sums"))
    real = {name: getattr(module, name) for module, name in looked}

    def read_while(directory: Path, step: int, number: int) -> tuple[bool, bool]:
        """Whether the reader took as many steps, and whether the writer was through in as many calls."""
        steps, through = 0, False

        def publish(*args: Any) -> None:
            nonlocal through
            with at_call(number, _kill, lasting=True):
                real_publish(*args)
            through = True

        def watch(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps - 1 == step:
                    with monkeypatch.context() as patch, contextlib.suppress(Killed):
                        patch.setattr(exports_module, "_publish", publish)
                        exports.replace(directory)
                return real[name](*args)

            return call

        with monkeypatch.context() as patch:
            for module, name in looked:
                patch.setattr(module, name, watch(name))
            assert read_by_us(directory) in states
        return steps > step, through

    states = [stored_bytes(exports.old), stored_bytes(exports.new)]
    for step in itertools.count():
        for number in itertools.count():
            reached, through = read_while(exports.copy_old(tmp_path / f"{step} {number}"), step, number)
            if through or not reached:
                break
        if not reached:
            break


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_reader_that_follows_the_index_finds_one_export_or_a_missing_file(
    old: int | str, new: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers and others open file after file by name. The writer comes between any two of these."""
    exports = make_exports(tmp_path, old, new)
    real = exporting.safe_open
    found = set()
    for step in itertools.count():
        directory = exports.copy_old(tmp_path / str(step))
        steps = 0

        def safe_open(*args: Any, step: int = step, directory: Path = directory) -> Any:
            nonlocal steps
            steps += 1
            if steps - 1 == step:
                exports.replace(directory)
            return real(*args)

        monkeypatch.setattr(exporting, "safe_open", safe_open)
        try:
            state = stored_bytes(directory)
        except FileNotFoundError:
            found.add("missing")
        else:
            assert state in (stored_bytes(exports.old), stored_bytes(exports.new))
        monkeypatch.setattr(exporting, "safe_open", real)
        if steps <= step:
            break
        assert exports.found(directory) == "new"
    assert "missing" in found or old == "5GB"


def test_no_name_of_a_numbered_file_is_used_again(tmp_path: Path) -> None:
    """A directory without weights gets save_pretrained's names; every later export has names that are new."""
    model = filled(Plain)
    seen: set[str] = set()
    for number, size in enumerate((TWO, TWO, "5GB", TWO, THREE, TWO)):
        _export_alone(model, tmp_path, size)
        numbered = {name for name in names_in(tmp_path) if name.startswith("model-")}
        assert numbered.isdisjoint(seen)
        standard = {name for name in numbered if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
        assert standard == (numbered if number == 0 else set())
        assert all(name.endswith(".safetensors") for name in numbered)
        assert_sums(tmp_path)
        seen |= numbered


def test_sweep_keeps_what_is_not_an_exports(tmp_path: Path) -> None:
    """Names that look alike are the user's; while the index cannot be read, its files stay."""
    _export_alone(filled(Plain), tmp_path, TWO)
    own = ["model-fp16-00001-of-00002.safetensors", "model-old.partial", "model.safetensors.partial", "model-1.bin"]
    for name in own:
        (tmp_path / name).write_text("mine")
    before = set(names_in(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{")
    exports_module._sweep(tmp_path)
    assert set(names_in(tmp_path)) == before
    _export_alone(filled(Plain), tmp_path, TWO)
    assert set(own) < set(names_in(tmp_path))
    assert "model-00001-of-00002.safetensors" not in names_in(tmp_path)


class Turns:
    """Two threads, of which one runs at a time. Each pauses once, before a call, for the other to run.

    Args:
        pauses: by thread, how many calls it makes before it pauses. The first one begins.
    """

    def __init__(self, pauses: dict[str, int]) -> None:
        self._left = pauses
        self._may_run = {name: threading.Semaphore(0) for name in self._left}
        self._over: set[str] = set()

    def call(self) -> None:
        """Before a change to the file system."""
        name = threading.current_thread().name
        if name in self._left:
            self._left[name] -= 1
            if self._left[name] == -1:
                self._pass_on(name)
                self._may_run[name].acquire()

    def run(self, actions: dict[str, Callable[[], None]]) -> None:
        """Each in its thread, until both are over."""

        def act(name: str) -> None:
            self._may_run[name].acquire()
            try:
                actions[name]()
            finally:
                self._over.add(name)
                self._pass_on(name)

        threads = [threading.Thread(target=act, args=(name,), name=name) for name in actions]
        for thread in threads:
            thread.start()
        self._may_run["new"].release()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def _pass_on(self, name: str) -> None:
        other = "other" if name == "new" else "new"
        self._may_run[name if other in self._over else other].release()


@pytest.mark.parametrize(("size", "is_fresh"), [(TWO, True), (TWO, False), ("5GB", False)])
def test_two_exports_at_once_are_not_mixed(
    size: int | str, is_fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pauses before any call. Another begins and pauses before any call. The first ends, then the other does.

    Of the pairs of calls every eleventh is tried.
    """
    monkeypatch.setattr(exports_module, "VISIBLE_WITHIN_S", 0.0)
    exports = make_exports(tmp_path, TWO, size)
    other = filled(Plain)
    with torch.no_grad():
        other.scale += 1
    _export_alone(other, tmp_path / "other", size)
    states = {name: stored_bytes(tmp_path / name) for name in ("old", "new", "other")}
    real = {name: getattr(os, name) for name in CALLS}
    calls = 0

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if name != "open" or args[1] & os.O_CREAT:
                turns.call()
                calls += 1
            return real[name](*args, **kwargs)

        return call

    def export_to(directory: Path, name: str) -> None:
        try:
            exports.replace(directory) if name == "new" else _export_alone(other, directory, size)
        except CheckpointError:
            raised.add(name)

    found: set[str] = set()
    last = 0
    for first in itertools.count():
        for second in range(7 * first % 11, 1000, 11):
            directory = tmp_path / f"{first} {second}"
            if not is_fresh:
                exports.copy_old(directory)
            raised: set[str] = set()
            turns, calls = Turns({"new": first, "other": second}), 0
            with monkeypatch.context() as patch:
                for name in CALLS:
                    patch.setattr(os, name, watch(name))
                turns.run({name: partial(export_to, directory, name) for name in ("new", "other")})
            last = max(last, calls)
            state = stored_bytes(directory)
            assert state is None and is_fresh or state in states.values()
            which = next((name for name, each in states.items() if each == state), "nothing")
            assert which in ("new", "other") or len(raised) == 2
            if state is not None:
                assert read_by_us(directory) == state
            found.add(which)
            shutil.rmtree(directory)
            if second > last / 2:
                break
        if first > last / 2:
            break
    assert found >= {"new", "other"}
