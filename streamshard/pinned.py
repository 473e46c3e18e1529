"""Host memory that a device reads and writes by itself (pinned, or page-locked, memory).

torch's own pinned allocator rounds each size up to a power of two, which is up to twice the memory. Here blocks are
mapped, registered with the device and cut into buffers. No buffer is ever pageable: copies would block the host.

A forked child does not get the blocks. If parent and child shared their pages, the parent's next write would move it to
a copy, while the device goes on with the old page. A child that reads a weight or gradient in host memory dies of
SIGSEGV.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from typing import Any

import torch

from streamshard.device import module_of
from streamshard.errors import HostMemoryError

_BLOCK_BYTES = 1 << 28
_ALIGNMENT = 256  # bytes
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages: registering it takes much longer
_ADVICE = [getattr(mmap, name) for name in ("MADV_DONTFORK", "MADV_HUGEPAGE") if hasattr(mmap, name)]  # on Linux

_blocks = weakref.WeakSet[mmap.mmap]()
_inherited: list[mmap.mmap] = []
# A child keeps its parent's blocks for ever: it would unmap memory of its own, and use the parent's device.
os.register_at_fork(after_in_child=lambda: _inherited.extend(_blocks))


class PinnedMemory:
    """Allocates pinned buffers. Blocks are freed with the last tensor in them.

    Args:
        device: reads and writes the memory.

    Attributes:
        nbytes: of all blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # the last one
        self._filled = 0  # its bytes that buffers have

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer [numel] of zeros.

        Raises:
            HostMemoryError: there is no memory, or the machine lets no more be pinned.
        """
        if self._device.type == "meta":  # a plan
            return torch.empty(numel, dtype=dtype, device=self._device)
        n_bytes = numel * dtype.itemsize
        if n_bytes >= _BLOCK_BYTES // 8:  # else the rest of many blocks would be lost
            return self._map(n_bytes).narrow(0, 0, n_bytes).view(dtype)
        if self._filled + n_bytes > self._block.numel():
            self._block, self._filled = self._map(_BLOCK_BYTES), 0
        buffer = self._block.narrow(0, self._filled, n_bytes)
        self._filled += math.ceil(n_bytes / _ALIGNMENT) * _ALIGNMENT
        return buffer.view(dtype)

    def _map(self, n_bytes: int) -> torch.Tensor:
        n_bytes = math.ceil(n_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, n_bytes, flags=_FLAGS)
        except OSError as error:
            raise self._failure(n_bytes, str(error)) from error
        _blocks.add(memory)
        for advice in _ADVICE:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(advice)
        block = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory` alive
        if self._device.type == "cuda":
            module: Any = module_of(self._device)
            try:
                module.check_error(module.cudart().cudaHostRegister(block.data_ptr(), n_bytes, 0))
            except RuntimeError as error:  # CudaError
                with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which raises it
                    torch.ones(1, device=self._device)
                raise self._failure(n_bytes, str(error)) from error
            # Not at exit: it waits for collectives, which a rank that has died never joins.
            weakref.finalize(memory, _unregister, self._device, block.data_ptr()).atexit = False
        self.nbytes += n_bytes
        return block

    def _failure(self, n_bytes: int, why: str) -> HostMemoryError:
        return HostMemoryError(
            f"{n_bytes} bytes of host memory cannot be pinned, beside {self.nbytes} that are ({why}). Look at the "
            "limits: `ulimit -l` (locked memory), the memory of the container or cgroup, and the machine's free memory"
        )


def _unregister(device: torch.device, address: int) -> None:
    module: Any = module_of(device)
    module.synchronize(device)  # copies may be under way
    module.cudart().cudaHostUnregister(address)
