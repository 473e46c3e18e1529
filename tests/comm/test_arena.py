"""Memory that ranks map of each other: nobody cuts it, nothing is left open, and who lives is seen as it is."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import streamshard.comm.arena as arena
from streamshard.comm.arena import Process, offer_memory


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 13])
def test_an_arena_can_be_neither_cut_nor_grown(nbytes: int) -> None:
    """Whoever read beyond its end would die of SIGBUS."""
    offered = offer_memory(1 << 12)
    assert offered is not None
    memory, offer = offered
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(offer.descriptor, nbytes)
        assert os.fstat(offer.descriptor).st_size == len(memory) == 1 << 12
    finally:
        os.close(offer.descriptor)


@pytest.mark.parametrize("call", ["mmap", "madvise"])
def test_an_arena_that_cannot_be_mapped_leaves_nothing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """No descriptor, no mapping."""
    answer = {"mmap": arena._MAP_FAILED, "madvise": -1}[call]
    before = os.listdir("/proc/self/fd"), _mappings()
    with monkeypatch.context() as patch:
        patch.setattr(arena._libc, call, lambda *_: answer)
        assert offer_memory(1 << 12) is None
    assert (os.listdir("/proc/self/fd"), _mappings()) == before


def test_no_address_space_left_leaves_nothing() -> None:
    """RLIMIT_AS; a fork without room for a copy is a fork all the same."""
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, limits[1]))
    try:
        assert offer_memory(1 << 37) is None
        assert arena._map_private(1 << 37) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert os.listdir("/proc/self/fd") == before


def _mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:streamshard" in line for line in maps)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def _look_at(process: int) -> Process:
    directory = os.open(f"/proc/{process}", os.O_PATH)
    try:
        return Process(directory)
    finally:
        os.close(directory)


def test_a_process_that_is_stopped_is_alive(child: subprocess.Popen[bytes]) -> None:
    """A debugger, a batch system that suspends jobs."""
    process = _look_at(child.pid)
    assert process.is_running()
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process.is_running()


def test_a_process_that_nobody_has_waited_for_is_dead(child: subprocess.Popen[bytes]) -> None:
    """And so it is once somebody has, whoever gets its number then."""
    process = _look_at(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_running()
    child.wait()
    assert not process.is_running()


def test_asking_takes_no_descriptor(child: subprocess.Popen[bytes]) -> None:
    """At the limit of open files a living process is not dead."""
    process, limits = _look_at(child.pid), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        assert process.is_running()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_that_does_not_let_itself_be_asked_is_alive(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is certain counts: others wait until the process group's timeout."""
    process = _look_at(child.pid)

    def refuse(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(os, "pread", refuse)
    assert process.is_running()


def test_nothing_of_a_process_elsewhere_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number means another process here. What the kernel and the namespace of numbers are is compared first."""
    offered, own = offer_memory(1 << 13), offer_memory(1 << 13)
    assert offered is not None
    assert own is not None
    memory, offer = offered
    opened: list[object] = []

    def note(path: object, *_: object, **__: object) -> int:
        opened.append(path)
        raise PermissionError

    try:
        monkeypatch.setattr(os, "open", note)
        assert arena.map_all([None, offer._replace(system="another kernel 4 1")], 0, own[0], 1) is None
        assert opened == []
        assert arena.map_all([None, offer], 0, own[0], 1) is None
        assert opened == [f"/proc/{os.getpid()}"]
    finally:
        monkeypatch.undo()
        os.close(offer.descriptor)
        os.close(own[1].descriptor)
    assert len(memory) == 1 << 13


def test_the_kernel_and_the_namespace_tell_machines_and_containers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one machine have one kernel, and their own process numbers."""
    before = arena._system()
    assert arena._system() == before
    with monkeypatch.context() as patch:
        patch.setattr(arena.Path, "read_text", lambda *_: "another boot\n")
        assert arena._system() != before
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: os.stat_result((0, 17, 4, 0, 0, 0, 0, 0, 0, 0)))
        assert arena._system() != before
