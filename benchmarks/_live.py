"""Bytes of tensors that are alive on the CPU, also of those that another thread frees, as gloo's threads do.

torch's profiler records the frees of the profiled thread only. A tensor that gloo's thread frees last stays in its sum
for good, so a model that was broadcast, or gathered by FSDP2, seems to hold megabytes that nobody has.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "shared_bytes"]


class LiveBytes(TorchDispatchMode):
    """Counts each storage once, views not. While it is entered, it also counts what each operator takes and returns.

    Memory that an operator takes and frees itself is not seen. Memory that ranks share is not counted: see
    `shared_bytes`.

    Attributes:
        held_bytes: of all tensors that Python knew when this object was made.
        peak_bytes: the most after an operator, while the mode was entered.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._shared = _shared_ranges()
        self._storages: dict[int, StorageWeakRef] = {}  # by address of the storage object
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor):  # isinstance would ask proxies, which warn
                self._note(found)
        self.held_bytes = self.peak_bytes = self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count."""
        result = func(*args, **(kwargs or {}))
        # What it takes too: FSDP2 gives a storage its bytes back without an operator.
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        found = [self._note(each) for each in tensors]
        if any(found):  # counting takes a millisecond per 3000 storages
            self.peak_bytes = max(self.peak_bytes, self._count())
        return result

    def _note(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has a storage that was not known."""
        if is_traceable_wrapper_subclass(tensor):  # such as a DTensor
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return sum(self._note(part) for part in parts if isinstance(part, torch.Tensor)) > 0
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no storage
            storage = tensor.untyped_storage()
            address = storage.data_ptr() if storage.device.type == "cpu" else 0
            is_new = bool(address) and storage._cdata not in self._storages
            if is_new and not any(start <= address < stop for start, stop in self._shared):
                self._storages[storage._cdata] = StorageWeakRef(storage)
                return True
        return False

    def _count(self) -> int:
        total, dead = 0, []
        for key, known in self._storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)  # type: ignore[attr-defined]
            if storage is None:
                dead.append(key)
            else:
                total += storage.nbytes()
        for key in dead:
            del self._storages[key]
        return total


def shared_bytes(ranks: int) -> int:
    """Bytes of one rank's file of the memory that `ranks` ranks of StreamShard share. Every rank has all files open."""
    files = {}
    for link in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("/memfd:streamshard"):
                status = os.stat(link)
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values()) // ranks


def _shared_ranges() -> list[tuple[int, int]]:
    """Addresses at which memory of StreamShard's ranks is mapped."""
    maps = re.findall(r"^(\w+)-(\w+) .*/memfd:streamshard", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [(int(start, 16), int(stop, 16)) for start, stop in maps]
