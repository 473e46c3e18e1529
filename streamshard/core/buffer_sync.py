"""Buffers, which are full on every rank. Persistent ones are broadcast from rank 0 before a forward.

As under DistributedDataParallel (torch/nn/parallel/distributed.py, ``_sync_buffers``), rank 0 broadcasts persistent
buffers before a forward of the whole model, if the forward before trained and was outside of ``no_sync()``. Until
then each rank keeps its own forward's writes (batch norm's statistics). Non-persistent buffers (rotary
tables, masks, caches) are broadcast once, when the model is sharded, and are each rank's own afterwards. So are
buffers that are registered later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError
from streamshard.forms import DTensorForm, form_of
from streamshard.torch_private import is_traceable_wrapper_subclass


class _Place(NamedTuple):
    """Where a buffer is registered, and its shape and dtype when the model was sharded."""

    owner: weakref.ref[nn.Module]
    key: str
    shape: torch.Size
    dtype: torch.dtype


class BufferSync:
    """Keeps persistent buffers equal on all ranks. Owns nothing.

    Args:
        ranks: all ranks of the model, replicas included.

    Attributes:
        are_sent: there are other ranks, and persistent buffers.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._state: dict[str, _Place] = {}
        self._is_due = True  # as under DDP, the first forward broadcasts too
        self.are_sent = False

    def start(self, root: nn.Module) -> None:
        """Take over a model's buffers: rank 0 sends all of them. Collective."""
        for name, buffer in root.named_buffers():
            path, _, key = name.rpartition(".")
            owner = root.get_submodule(path)
            if key not in owner._non_persistent_buffers_set:
                # The place, not the tensor: a forward may assign another. Weak: the model owns this object.
                self._state[name] = _Place(weakref.ref(owner), key, buffer.shape, buffer.dtype)
        self.are_sent = self._ranks.total_size > 1 and bool(self._state)
        if self._ranks.total_size > 1:
            self._send(root.buffers(), source=0)

    def before_pass(self, *, trains: bool, source: int) -> None:
        """A forward of the whole model begins: if the last one trained, broadcast the source's persistent buffers.

        Args:
            trains: this forward has gradients, and is not inside ``no_sync()``.
            source: number of the rank that broadcasts its buffers.

        Raises:
            ShardingError: a persistent buffer was removed, or has another shape or dtype.
        """
        if self._is_due:
            self.sync(source)
        self._is_due = trains

    def sync(self, source: int) -> None:
        """Broadcast the persistent buffers of rank number `source` now. Collective."""
        try:
            # All are found before the first is sent: an error in between would leave other ranks in a broadcast.
            buffers = {name: self._find(name, place) for name, place in self._state.items()}
        except ShardingError as error:
            self._ranks.fail(str(error))  # others are about to broadcast
            raise
        self._send(buffers.values(), source)

    def _find(self, name: str, place: _Place) -> torch.Tensor:
        owner = place.owner()
        buffer = None if owner is None else owner._buffers.get(place.key)
        if buffer is None or (buffer.shape, buffer.dtype) != (place.shape, place.dtype):
            now = "is gone" if buffer is None else "has another shape or dtype by now"
            path, _, key = name.rpartition(".")
            module = f"model.get_submodule({path!r})" if path else "model"
            raise ShardingError(
                f"buffer {name!r} was {tuple(place.shape)} {place.dtype}, and {now}: ranks broadcast persistent "
                "buffers, whose shapes and dtypes must not change. If a forward gives it its shape, run one before "
                "StreamShard(model). Or, before StreamShard(model), let each rank keep its own: "
                f"{module}.register_buffer({key!r}, {module}.{key}, persistent=False)"
            )
        return buffer

    def _send(self, buffers: Iterable[torch.Tensor], source: int) -> None:
        """Broadcast `buffers`, in one message for each dtype.

        Writes to ``.data``: a graph may have saved a buffer, as under DDP.
        """
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            if buffer.numel():
                # A DTensor here has a copy on each rank, see `check_buffers`: its local tensor is all of it.
                by_dtype.setdefault(buffer.dtype, []).append(form_of(buffer).memory(buffer.data))
        for alike in by_dtype.values():
            message = torch.cat([buffer.reshape(-1) for buffer in alike])
            self._ranks.broadcast(message.view(torch.uint8), source)  # NCCL and gloo send only some dtypes
            if self._ranks.total_rank != source:
                parts = message.split([buffer.numel() for buffer in alike])
                torch._foreach_copy_(alike, [part.view(to.shape) for part, to in zip(parts, alike, strict=True)])


def check_buffers(root: nn.Module) -> None:
    """Raise if ranks cannot send a buffer to each other. A buffer on the meta device is accepted.

    Raises:
        ShardingError: a buffer is sparse, quantized, expanded, or a tensor subclass made of other tensors, except a
            DTensor whose values all ranks have.
    """
    for name, buffer in root.named_buffers():
        if isinstance(form := form_of(buffer), DTensorForm) and not form.box:
            continue
        is_dense = buffer.layout is torch.strided and not buffer.is_quantized
        is_dense = is_dense and not is_traceable_wrapper_subclass(buffer)
        # torch refuses to write to expanded memory.
        if not is_dense or any(step == 0 and n > 1 for step, n in zip(buffer.stride(), buffer.shape, strict=True)):
            kind = f"{type(buffer).__name__}, {buffer.dtype}, {buffer.layout}" if not is_dense else "expanded"
            raise ShardingError(
                f"buffer {name!r} is not dense ({kind}), and ranks keep buffers equal by sending them to each other. "
                "Register a clone() of an expanded one, the dense parts of any other (a sparse one's indices and "
                "values), or keep it as a plain attribute"
            )
