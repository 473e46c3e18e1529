"""Blocks of pinned memory: how they are registered and freed."""

from __future__ import annotations

import gc
import mmap
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
        import torch
        from streamshard import pinned
        from tests.test_pinned import CUDA, Runtime
        runtime = Runtime()
        runtime.synchronize = lambda device: print("waits")
        pinned.module_of = lambda device: runtime
        held, freed = (pinned.PinnedMemory(CUDA).allocate(1, torch.float32) for _ in range(2))
        del freed
        print("ends", flush=True)
    """
    assert Launched(0, tmp_path, run_script, script).end() == [(0, "waits\nends\n")]
