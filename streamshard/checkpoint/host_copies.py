"""What a save in the background writes: copies in host memory, of which training waits for as few as possible.

Owns that memory, which is kept from save to save. See [Note: state that is copied late].

[Note: state that is copied late]
A call copies at once whatever anybody may change at any time: main weights, buffers, values. Two thirds of a run with
AdamW are moments, which nothing but a step changes; they are copied while the next forward and backward run, and a step
that comes earlier waits. Who puts other tensors in their place (``load_state_dict``) need not wait: the copy is made of
those that were there. Who writes to them in place is found by autograd's count of changes, and that save fails, so that
no checkpoint has half of an edit. The count grows when a write is over, so it is looked at as late as may be: by the
next step, which comes after what its thread has done before and counts changes of its own, or once all is written, by
when a write that the copy has met is long over. On the CPU the thread that writes copies, and the step blocks; on a
device a stream copies, for which the step's stream waits and no host.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Set
from typing import Any

import torch

from streamshard.checkpoint.piece_file import Piece
from streamshard.device import has_streams, module_of, on_device
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError

__all__ = ["HostCopies"]

_memory: weakref.WeakKeyDictionary[Engine, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


class HostCopies:
    """Copies of what one save writes. Made when it is called; what cannot be copied is told by `finish`.

    Args:
        engine: keeps the memory.
        pieces: what is saved.
        late: names of those that may be copied later than now. See [Note: state that is copied late].
    """

    def __init__(self, engine: Engine, pieces: list[Piece], late: Set[str]) -> None:
        self._device = engine.streams.device
        self._copies: list[Piece] = []
        self._late: list[tuple[torch.Tensor, Piece, int]] = []  # a copy, what it is of, and the changes until now
        self._event: Any = None  # on a device: everything is copied
        self._is_copied = threading.Event()
        self._lock = threading.Lock()  # between a step and the thread
        self._edited: list[str] | None = None
        self._failure: Exception | None = None
        try:
            self._begin(_memory_for(engine, pieces), pieces, late)
        except Exception as error:  # the other ranks hear of it where they meet next
            self._failure = error

    def finish(self) -> list[Piece]:
        """The copies, once they are complete. Called once, by a thread beside training.

        Raises:
            Exception: whatever kept the call from copying.
        """
        try:
            if self._failure is not None:
                raise self._failure
            if self._event is not None:
                with on_device(self._device):
                    self._event.synchronize()
            else:
                for copy, piece, _ in self._late:
                    copy.copy_(piece.data)
            return self._copies
        finally:
            self._is_copied.set()

    def let_step(self) -> None:
        """Return when a step may change everything; on a device, once the current stream waits until it may."""
        if self._event is None:
            self._is_copied.wait()
        elif not self._is_copied.is_set():
            module_of(self._device).current_stream(self._device).wait_event(self._event)
        self._look_for_edits()

    def check(self) -> None:
        """To be called after `finish`, when nothing is left to be done but to publish.

        Raises:
            CheckpointError: names what was written to meanwhile.
        """
        if edited := self._look_for_edits():
            others = f" (and {len(edited) - 1} others)" if edited[1:] else ""
            raise CheckpointError(
                f"{edited[0]!r} was written to in place{others} while it was being saved, by something that is no step "
                "of its optimizer: edit an optimizer's state before save_checkpoint(..., wait=False), after the next "
                "step(), or after the handle's wait()"
            )

    def _begin(self, memory: dict[str, torch.Tensor], pieces: list[Piece], late: Set[str]) -> None:
        for piece in pieces:
            copy = memory[piece.name]
            self._copies.append(piece._replace(data=copy))
            if piece.name in late and not piece.data.is_inference():  # which has no count of changes
                self._late.append((copy, piece, piece.data._version))
            else:
                copy.copy_(piece.data, non_blocking=True)
        if has_streams(self._device):
            module = module_of(self._device)
            stream = module.Stream(self._device)
            stream.wait_stream(module.current_stream(self._device))
            with module.stream(stream):
                for copy, piece, _ in self._late:
                    copy.copy_(piece.data, non_blocking=True)
            event = module.Event()
            event.record(stream)
            self._event = event

    def _look_for_edits(self) -> list[str]:
        """What has changed since the call, when this is asked first; lets go of what is copied."""
        with self._lock:
            if self._edited is None:
                self._edited = [piece.name for _, piece, before in self._late if piece.data._version != before]
            if self._is_copied.is_set():
                self._late.clear()
            return self._edited


def _memory_for(engine: Engine, pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """A tensor in host memory for each of `pieces`, the same as the last time."""
    kept = _memory.setdefault(engine, {})
    for name in kept.keys() - {piece.name for piece in pieces}:
        del kept[name]
    for piece in pieces:
        copy = kept.get(piece.name)
        if copy is None or copy.dtype != piece.data.dtype or copy.shape != piece.data.shape:
            with torch.inference_mode(False):  # to be written to again, outside of it
                pinned = engine.streams.device.type != "cpu"
                kept[piece.name] = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=pinned)
    return kept
