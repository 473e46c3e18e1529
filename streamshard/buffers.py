"""Buffers (rotary tables, batch-norm statistics) are whole on every rank and rank 0's.

They are sent once at construction. Persistent ones (they belong to the state: batch-norm statistics, codebooks) are
sent again after every training pass, as DistributedDataParallel does before every forward. Of the others (rotary
tables, position ids) only those that the first training pass changed are; the rest cost nothing.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from streamshard.transport import Transport

__all__ = ["BufferSync"]


class BufferSync:
    """Keeps buffers equal. Owns nothing.

    Args:
        root: the model.
        transport: of all ranks that have them.

    Attributes:
        is_deferred: passes send nothing at their end; somebody else says when, and whose buffers count.
    """

    def __init__(self, root: nn.Module, transport: Transport) -> None:
        self._root = root
        self._transport = transport
        self.is_deferred = False
        self._changing: list[str] = []
        self._states: dict[str, tuple[int, int]] = {}
        self._may_warn = False

    def send_all(self) -> None:
        """Every buffer from rank 0."""
        self._send([buffer for _, buffer in self._root.named_buffers()])
        self._states = self._read_states()

    def changed(self) -> list[str]:
        """Names of the buffers that are other tensors than at the last call, or were written in place."""
        states = self._read_states()
        names = [name for name, state in states.items() if self._states.get(name) != state]
        self._states = states
        return names

    def learn(self, names: set[str]) -> None:
        """These, on any rank, are what the first training pass changed; persistent buffers come to them."""
        persistent = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._root.named_modules()
            for name, _ in module._buffers.items()  # of a scripted module it is no dict
            if name not in module._non_persistent_buffers_set
        }
        self._changing = sorted(names | persistent)
        self._may_warn = True
        self.after_pass()

    def after_pass(self) -> None:
        """A training pass is over: the changing buffers from rank 0."""
        if not self.is_deferred:
            self.send(0)

    def send(self, source: int) -> None:
        """The changing buffers, from the rank at place `source`."""
        if not self._states or not (self._root.training or torch.is_grad_enabled()):
            return
        strangers = [name for name in self.changed() if name not in self._changing] if self._may_warn else []
        if strangers:
            self._may_warn = False  # once is enough
            warnings.warn(
                f"buffer {strangers[0]!r} changed first after the first training pass: it is not kept equal "
                "on all ranks",
                stacklevel=2,
            )
        if self._changing:
            buffers = dict(self._root.named_buffers())
            self._send([buffers[name] for name in self._changing if name in buffers], source)
            self._states = self._read_states()

    def _read_states(self) -> dict[str, tuple[int, int]]:
        # Inference tensors have no version counter; a new one is a new object.
        return {n: (id(b), 0 if b.is_inference() else b._version) for n, b in self._root.named_buffers()}

    def _send(self, buffers: list[torch.Tensor], source: int = 0) -> None:
        """One broadcast per dtype. Written behind autograd's back: batch norm's backward has saved its statistics."""
        if self._transport.total_size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            if buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for group in by_dtype.values():
            flat = torch.cat([buffer.detach().reshape(-1) for buffer in group])
            is_bool = flat.dtype is torch.bool
            self._transport.broadcast(flat.view(torch.uint8) if is_bool else flat, source)
            for buffer, part in zip(group, torch.split(flat, [b.numel() for b in group]), strict=True):
                buffer.data.copy_(part.view(buffer.shape))
