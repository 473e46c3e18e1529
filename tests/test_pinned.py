"""Blocks of pinned memory: how they are registered and freed, and what a forked child has of them."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from streamshard.errors import HostMemoryError
from streamshard.pinned import PinnedMemory
from tests.launched import Launched, run_script

CUDA = torch.device("cuda", 0)
PAGES = 16 * mmap.PAGESIZE


class Runtime:
    """A CUDA runtime that notes calls, and has an error."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.error = 0

    def cudart(self) -> Runtime:
        """As in ``torch.cuda``."""
        return self

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        """As in CUDA."""
        self.calls.append(("register", address, n_bytes))
        return self.error

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802  # CUDA's name
        """As in CUDA."""
        self.calls.append(("unregister", address))

    def synchronize(self, device: torch.device) -> None:
        """As in ``torch.cuda``."""
        self.calls.append(("synchronize", device))

    def check_error(self, code: int) -> None:
        """As in ``torch.cuda``."""
        if code:
            raise RuntimeError(f"error {code}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """The runtime of a device that is not there."""
    made = Runtime()
    monkeypatch.setattr("streamshard.pinned.module_of", lambda device: made)
    return made


def test_a_block_is_registered_whole_and_freed_with_its_last_buffer_when_no_copy_runs(runtime: Runtime) -> None:
    memory = PinnedMemory(CUDA)
    held = [memory.allocate(numel, torch.float32) for numel in (3, 5)]
    address = held[0].data_ptr()
    (registered,) = runtime.calls
    assert registered == ("register", address, memory.nbytes)
    assert all(address <= each.data_ptr() < address + memory.nbytes - each.nbytes for each in held)
    del memory, held[0]
    assert runtime.calls == [registered]
    held.clear()
    assert runtime.calls == [registered, ("synchronize", CUDA), ("unregister", address)]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
def test_a_block_may_have_huge_pages(runtime: Runtime) -> None:
    """Registering 4 KiB at a time takes several times as long."""
    block = PinnedMemory(CUDA)._map(PAGES)
    flags = re.findall(r"^(\w+)-(\w+) (?s:.*?)^VmFlags:(.*)$", Path("/proc/self/smaps").read_text(), re.MULTILINE)
    (found,) = (each for start, end, each in flags if int(start, 16) <= block.data_ptr() < int(end, 16))
    assert "hg" in found.split()


def test_memory_that_cannot_be_pinned_raises_and_its_error_meets_one_kernel(runtime: Runtime) -> None:
    """CUDA keeps an error until the next kernel. StreamShard starts one, which fails, and is not told of."""
    runtime.error = 2
    with (
        mock.patch.object(torch, "ones", side_effect=RuntimeError) as kernel,
        pytest.raises(HostMemoryError, match=r"65536 bytes of host memory cannot be pinned.*\(error 2\)"),
    ):
        PinnedMemory(CUDA)._map(PAGES)
    kernel.assert_called_once_with(1, device=CUDA)
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]


def test_a_process_ends_without_waiting_for_its_device(tmp_path: Path) -> None:
    """A collective may run there whose other ranks have died."""
    script = """
        import atexit, torch
        from streamshard import pinned
        from tests.test_pinned import CUDA, Runtime
        runtime = Runtime()
        runtime.synchronize = lambda device: print("waits")
        pinned.module_of = lambda device: runtime
        held, freed = (pinned.PinnedMemory(CUDA).allocate(1, torch.float32) for _ in range(2))
        del freed
        print("ends", flush=True)
        atexit._run_exitfuncs()  # a process of multiprocessing runs none itself
    """
    assert Launched(0, tmp_path, run_script, script).end() == [(0, "waits\nends\n")]


def _status_of_child(function: Callable[[], object]) -> int:
    """What a forked child ends with: 0 after `function` has returned, 1 after an error, minus a signal's number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        faulthandler.disable()  # it would tell of signals
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_no_pinned_memory_and_frees_none(runtime: Runtime) -> None:
    """It may run, and forget its parent's model. Only if it reads a weight there, it ends."""
    memory = [PinnedMemory(CUDA)._map(PAGES)]

    def let_go() -> None:
        own = mmap.mmap(-1, PAGES)
        memory.clear()
        gc.collect()
        own.write(bytes(PAGES))
        assert [call[0] for call in runtime.calls] == ["register"]

    assert _status_of_child(let_go) == 0
    assert _status_of_child(lambda: _status_of_child(let_go) and os._exit(2)) == 0
    assert _status_of_child(memory[0].sum) == -signal.SIGSEGV
    assert memory[0].sum() == 0
