"""The preallocated buffers: every byte the engine holds is allocated here, once, under a category.

`Ledger` allocates; `WeightSlot` and `GradSlot` are the full-unit buffers. See [Note: slots] in
`streamshard.plan.memory`, [Note: segments] in `streamshard.plan.segments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from streamshard.comm.streams import Fence, Rule, StreamName, Streams
from streamshard.plan.memory import Category
from streamshard.plan.structure import leave_inference_mode

__all__ = ["GradSlot", "Ledger", "Scratch", "WeightSlot", "lies_in"]


class Visible(Protocol):
    """See `Transport.allocate_visible`."""

    def __call__(self, numel: int, dtype: torch.dtype, *, is_users: bool) -> torch.Tensor: ...


class Ledger:
    """Allocates buffers and knows them all. Owns every buffer of the engine.

    Args:
        streams: both use them; they live on its device.
        allocate_visible: allocates what other ranks may read, see `Transport.allocate_visible`.

    Attributes:
        buffers: all of them, with what each is for.
        rounds_bytes: what the plans of optimizers of whole parameters take, for the memory report.
    """

    def __init__(self, streams: Streams, allocate_visible: Visible | None = None) -> None:
        self._streams = streams
        self._allocate_visible = allocate_visible
        self.buffers: list[tuple[Category, torch.Tensor]] = []
        self.rounds_bytes = 0

    def allocate(
        self,
        category: Category,
        numel: int,
        dtype: torch.dtype,
        *,
        is_visible: bool = False,
        is_users: bool = False,
    ) -> torch.Tensor:
        """A new buffer [numel] of zeros, so that padding never holds a NaN.

        Args:
            category, numel, dtype: what, how much, of which type.
            is_visible: whether other ranks may read it (compute shards, grad slots).
            is_users: whether the user sees it too (main weights, main grads), if other ranks may read it.
        """
        with leave_inference_mode():
            if is_visible and self._allocate_visible is not None:
                buffer = self._allocate_visible(numel, dtype, is_users=is_users)
            else:
                buffer = torch.zeros(numel, dtype=dtype, device=self._streams.device)
            self._streams.keep(buffer)
        self.buffers.append((category, buffer))
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Forget `buffer`, which nobody needs any more."""
        self.buffers = [(kind, held) for kind, held in self.buffers if held is not buffer]

    def held_bytes(self, category: Category) -> int:
        """Bytes held under `category`, counted on the live tensors."""
        return sum(buffer.untyped_storage().nbytes() for kind, buffer in self.buffers if kind is category)


class WeightSlot:
    """A buffer for the weights of a whole unit. Owns its two fences.

    Attributes:
        buffer: [bytes of its largest unit] uint8; with one rank, the compute shard of its unit's first segment.
        more: with one rank, the compute shards of the other segments.
        content: index of the unit whose weights it holds or is receiving; None if nobody's.
        arrived: rule 1, set after the gather.
        released: rule 2, set after a unit's last use.
        is_shared: whether several units take turns in it.
    """

    def __init__(self, buffer: torch.Tensor, streams: Streams, what: str, *, is_shared: bool) -> None:
        self.buffer = buffer
        self.more: Sequence[torch.Tensor] = ()
        self.is_shared = is_shared
        self.content: int | None = None
        self.arrived = Fence(streams, Rule.WEIGHTS_ARRIVED, StreamName.COMM, what)
        self.released = Fence(streams, Rule.SLOT_RELEASED, StreamName.COMPUTE, what)

    @property
    def first_byte(self) -> int:
        """Its address."""
        return self.buffer.data_ptr()

    @property
    def last_byte(self) -> int:
        """The address behind it."""
        return self.buffer.data_ptr() + self.buffer.numel() * self.buffer.element_size()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in it."""
        try:
            return any(lies_in(tensor, buffer) for buffer in (self.buffer, *self.more))
        except (RuntimeError, NotImplementedError):  # tensors without storage: sparse ones, tracers
            return False


def lies_in(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Whether the memory of `tensor` begins in that of `buffer`."""
    start = buffer.data_ptr()
    return start <= tensor.data_ptr() < start + buffer.nbytes


class Scratch:
    """What reductions need beside a grad slot.

    Args:
        n_bytes: what the most demanding of its units needs.
        ledger: allocates.

    Attributes:
        buffer: [n_bytes] uint8.
        drained: the fence behind the last reductions that use it, a grad slot's.
    """

    def __init__(self, n_bytes: int, ledger: Ledger) -> None:
        self.drained: Fence | None = None
        self.buffer = ledger.allocate(Category.SCRATCH, n_bytes, torch.uint8)

    def take(self) -> None:
        """Return once nobody uses it any more. On CUDA reductions come one after the other anyway."""
        drained, self.drained = self.drained, None
        if drained is not None:
            drained.complete()


_COLLECTED_BYTES = 1 << 20


class GradSlot:
    """Room for the gradients of a whole unit. Owns its two fences.

    On a device with streams, where each copy is a launch, small gradients are copied together: collected until there is
    a mebibyte of them, or somebody is about to read or add to what the slot holds (`flush`).

    Args:
        n_bytes: of its largest unit.
        ledger, streams: see there.
        scratch: what reductions from this slot need beside it.
        what: names it in messages.
        holds_main_grads: the user sees this rank's ranges of it: they are main grads of the one unit that it serves.

    Attributes:
        buffer: [n_bytes] uint8.
        content: index of the unit whose unreduced gradients it holds; None if nobody's.
        has_streams: gradients may come on several streams of a device, which `join`; elsewhere nobody has to.
        written: rule 4, set after a unit's last gradient.
        drained: rule 3, set after the reduction.
    """

    def __init__(
        self,
        n_bytes: int,
        ledger: Ledger,
        streams: Streams,
        scratch: Scratch,
        what: str,
        *,
        holds_main_grads: bool,
    ) -> None:
        self.buffer = ledger.allocate(
            Category.GRAD_SLOTS, n_bytes, torch.uint8, is_visible=True, is_users=holds_main_grads
        )
        self.content: int | None = None
        self.written = Fence(streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, what)
        self.drained = Fence(streams, Rule.GRADS_DRAINED, StreamName.COMM, what)
        self.scratch = scratch
        self.has_streams = streams.has_streams
        self._streams = streams
        self._writers: list[Any] = []  # streams of the device on which gradients have been written
        self._places: list[torch.Tensor] = []  # of gradients that are collected
        self._collected: list[torch.Tensor] = []
        self._collected_bytes = 0
        self._collected_on: Any = None  # the stream of the device on which all of them have been made

    def open(self, unit: int) -> None:
        """It is `unit`'s from here on (rule 3)."""
        self._forget_collected()
        self._writers.clear()
        self.drained.wait()
        if self.has_streams:
            self._writers.append(self._streams.device_stream(StreamName.COMPUTE))
        self.content = unit

    def join(self) -> None:
        """The current stream of the device is about to write: it waits as the first one has.

        autograd makes a gradient on the stream of the forward, which a layer may change (shared experts, say), and
        lets that of the caller wait for all of them at the end of backward only.
        """
        stream = self._streams.device_stream(StreamName.COMPUTE)
        if stream not in self._writers:
            self.drained.wait()  # rule 3
            self._writers.append(stream)

    def write(self, place: torch.Tensor, grad: torch.Tensor, *, adds: bool) -> None:
        """Copy a gradient to its place, at once or with others, or add it to what is there. The current stream.

        Args:
            place: what of it is the parameter's, of its shape.
            grad: of that shape, any dtype; nobody else's.
            adds: to a gradient that is there.
        """
        if self.has_streams:
            self.join()
        if adds:
            self.flush()
            place.add_(grad)
        elif self.has_streams and (n_bytes := grad.untyped_storage().nbytes()) <= _COLLECTED_BYTES:
            self._collect(place, grad, n_bytes)
        else:
            place.copy_(grad)

    def _collect(self, place: torch.Tensor, grad: torch.Tensor, n_bytes: int) -> None:
        stream = self._streams.device_stream(StreamName.COMPUTE)
        if self._collected_bytes + n_bytes > _COLLECTED_BYTES or stream != self._collected_on:
            self.flush()
        self._collected_on = stream
        self._collected_bytes += n_bytes
        self._places.append(place)
        self._collected.append(grad)

    def flush(self) -> None:
        """What was collected moves to its place, on the stream on which it was made."""
        if self._collected:
            with self._streams.module.stream(self._collected_on):
                torch._foreach_copy_(self._places, self._collected)
            self._forget_collected()

    def _forget_collected(self) -> None:
        self._places, self._collected, self._collected_bytes, self._collected_on = [], [], 0, None

    def finish_writing(self) -> None:
        """Nothing is written any more: the comm stream goes on after what was, on whatever stream (rule 4)."""
        self.flush()
        for stream in self._writers or (None,):
            self.written.record(stream=stream)
            self.written.wait()
