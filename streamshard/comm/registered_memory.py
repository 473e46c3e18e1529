"""`RegisteredMemory`: a memory pool of NCCL's that is registered with the communicators that send from it.

NCCL reads and writes registered buffers directly, where it would otherwise copy through buffers of its own. See
[decision 24](docs/internals/decisions/0024-registered-memory.md).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from streamshard.comm.groups import is_closed
from streamshard.comm.transport import Peers
from streamshard.device import on_device
from streamshard.errors import ConfigError
from streamshard.torch_private import backend_of


class RegisteredMemory:
    """The pool of one model. Owns torch's pool; buffers in it are the ledger's.

    When this object is freed, the pool is deregistered: the host waits until no collective under way uses it.

    Args:
        communicators: the shard group's, then the replicate axis's if there is one.

    Raises:
        ConfigError: the backend has no memory to register.
    """

    def __init__(self, communicators: Sequence[Peers]) -> None:
        streams = communicators[0].streams
        self._device = streams.device
        self._module = streams.module
        self._communicators = [ranks for ranks in communicators if ranks.world_size > 1]
        backend = backend_of(communicators[0].group, self._device)
        try:
            if not hasattr(backend, "register_mem_pool"):
                raise RuntimeError("it has no function for it")
            with on_device(self._device):  # torch makes a pool for the current device
                self._pool = self._module.MemPool(backend.mem_allocator)
        except RuntimeError as error:
            raise ConfigError(
                f"registered_memory=True: the backend {backend.name()!r} of the parameters' device, {self._device}, "
                f"cannot register memory ({error}). NCCL on GPUs can. Leave registered_memory out: results are the same"
            ) from error

    def inside(self) -> AbstractContextManager[object]:
        """A context in which this thread allocates tensors in the pool. A single rank needs none: it sends nothing."""
        if not self._communicators:
            return contextlib.nullcontext()
        return self._module.use_mem_pool(self._pool, self._device)  # type: ignore[no-any-return]  # any accelerator's

    def register(self) -> None:
        """Register what has been allocated. torch registers what is allocated in the pool later by itself."""
        parts = []
        for ranks in self._communicators:
            backend_of(ranks.group, self._device).register_mem_pool(self._pool)
            parts.append((weakref.ref(ranks.group), ranks.streams.device_stream(ranks.stream)))
        # Not at exit, where other ranks may never issue what this one waits for: the group's end deregisters too.
        weakref.finalize(self, _deregister, self._pool, self._device, parts).atexit = False

    def unused_bytes(self) -> int:
        """Bytes of the pool's segments that no buffer uses."""
        return sum(segment["total_size"] - segment["allocated_size"] for segment in self._pool.snapshot())


def _deregister(pool: Any, device: torch.device, parts: Sequence[tuple[weakref.ref[dist.ProcessGroup], Any]]) -> None:
    """Deregister `pool` with each group that is still alive, behind the collectives on the group's stream."""
    for group_of, stream in parts:
        group = group_of()
        if group is not None and not is_closed(group):  # else a rank has failed, and the stream may wait for ever
            stream.synchronize()
            with contextlib.suppress(RuntimeError):  # the group was destroyed, and with it what was registered
                backend_of(group, device).deregister_mem_pool(pool)
