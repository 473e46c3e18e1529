"""Blocks of pinned memory: how they are registered and freed, and what a forked child has of them."""

from __future__ import annotations

import gc
import mmap
import re
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

from streamshard.errors import HostMemoryError
from streamshard.pinned import PinnedMemory
from tests.launched import Launched, in_child, run_script

CUDA = torch.device("cuda", 0)
PAGES = 16 * mmap.PAGESIZE


class Runtime(mock.Mock):
    """Stands for ``torch.cuda`` and its runtime, which has an error if `error` is one."""

    error = 0

    def cudart(self) -> Runtime:
        return self

    def check_error(self, code: object) -> None:
        if self.error:
            raise RuntimeError(f"error {self.error}")

    @property
    def calls(self) -> list[tuple[object, ...]]:
        """Of other functions: name and arguments."""
        return [(name, *args) for name, args, _ in self.method_calls]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr("streamshard.pinned.module_of", lambda device: made)
    return made


def test_a_block_is_registered_whole_and_freed_with_its_last_buffer_when_no_copy_runs(runtime: Runtime) -> None:
    memory = PinnedMemory(CUDA)
    held = [memory.allocate(numel, torch.float32) for numel in (3, 5)]
    address = held[0].data_ptr()
    (registered,) = runtime.calls
    assert registered[:3] == ("cudaHostRegister", address, memory.nbytes)
    assert all(address <= each.data_ptr() < address + memory.nbytes - each.nbytes for each in held)
    del memory, held[0]
    assert runtime.calls == [registered]
    held.clear()
    assert runtime.calls == [registered, ("synchronize", CUDA), ("cudaHostUnregister", address)]


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
    assert [call[0] for call in runtime.calls] == ["cudaHostRegister"]


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


def test_a_forked_child_has_no_pinned_memory_and_frees_none(runtime: Runtime) -> None:
    """It may run, and forget its parent's model. Only if it reads a weight there, it ends."""
    memory = [PinnedMemory(CUDA)._map(PAGES)]

    def let_go() -> None:
        own = mmap.mmap(-1, PAGES)
        memory.clear()
        gc.collect()
        own.write(bytes(PAGES))
        assert [call[0] for call in runtime.calls] == ["cudaHostRegister"]

    assert in_child(let_go) == (0, "None")
    assert in_child(lambda: in_child(let_go)) == (0, "(0, 'None')")
    assert in_child(memory[0].sum) == (-signal.SIGSEGV, "")
    assert memory[0].sum() == 0
