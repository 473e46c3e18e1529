"""The memory that units share, allocated once: weight slots, gradient slots, and the ledger that allocates them.

A slot holds one full unit at a time: its weights, and in the same memory its gradients, once backward has left the
weights. With slots for all units, and over sockets, gradients have slots of their own. See [Note: slots] in
`streamshard.planning.memory` and [Note: ordering rules] in `streamshard.comm.streams`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from streamshard.comm.streams import Fence, Rule, StreamName, Streams, Work
from streamshard.comm.transport import Transport
from streamshard.errors import StateError
from streamshard.nested import map_tensors, tensors_in
from streamshard.planning.memory import Category
from streamshard.planning.structure import leave_inference_mode


class Ledger:
    """Allocates buffers and knows them. Owns every buffer of the engine, but for chunks of late steps.

    Args:
        streams: they use the buffers, which live on their device.
        transport: allocates memory that other ranks may read, see `Transport.allocate_visible`.

    Attributes:
        buffers: all of them, each with its category.
        on_host: the `id` of each buffer in host memory.
        host: allocates host memory, and copies between it and the device, see `HostState`; None without ``offload``.
    """

    def __init__(self, streams: Streams, transport: Transport) -> None:
        self._streams, self._transport = streams, transport
        self.buffers: list[tuple[Category, torch.Tensor]] = []
        self.on_host: set[int] = set()
        self.host: Any = None

    def allocate(
        self, category: Category, numel: int, dtype: torch.dtype, *, is_visible: bool = False, is_on_host: bool = False
    ) -> torch.Tensor:
        """A new buffer [numel] of zeros, so that padding never holds a NaN.

        Args:
            category, numel, dtype: its use, length and type.
            is_visible: other ranks may read it (main weights that are sent as they are, slots).
            is_on_host: it lies in pinned host memory.
        """
        with leave_inference_mode():
            if is_on_host:
                buffer: torch.Tensor = self.host.allocate(numel, dtype)
                self.on_host.add(id(buffer))
            elif is_visible:
                buffer = self._transport.allocate_visible(numel, dtype)
            else:
                buffer = torch.zeros(numel, dtype=dtype, device=self._streams.device)
            if not is_on_host:
                self.keep(buffer)
        self.buffers.append((category, buffer))
        return buffer

    def keep(self, buffer: torch.Tensor) -> None:
        """See `Streams.keep`."""
        self._streams.keep(buffer)

    def hold(self, category: Category, tensor: torch.Tensor) -> None:
        """Count `tensor`, which others have made: the user's model, or main grads whose memory comes and goes."""
        self.buffers.append((category, tensor))

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        """Forget `buffers`. Nobody uses them any more."""
        freed = set(map(id, buffers))  # `in` a list would compare elements
        for buffer in buffers:
            self._transport.free_visible(buffer)
        self.buffers = [(kind, held) for kind, held in self.buffers if id(held) not in freed]

    def held_bytes(self, category: Category, *, is_on_host: bool = False) -> int:
        """Bytes held under `category` on the device, or in host memory, counted on the live tensors."""
        held = [buf for kind, buf in self.buffers if kind is category and (id(buf) in self.on_host) is is_on_host]
        if is_on_host:  # in common blocks
            return sum(buffer.nbytes for buffer in held)
        return sum(buffer.untyped_storage().nbytes() for buffer in held)


# -- weights ----------------------------------------------------------------------------------------------------------


class WeightState(enum.IntEnum):
    """The state of a weight slot."""

    EMPTY = enum.auto()
    """No weights, or weights that may have changed since."""
    ARRIVING = enum.auto()
    """An all-gather writes the slot, or has written it: compute has not waited."""
    READY = enum.auto()
    """Compute may read the weights."""


WEIGHT_TRANSITIONS = {
    WeightState.EMPTY: (WeightState.ARRIVING, WeightState.EMPTY),
    WeightState.ARRIVING: (WeightState.READY, WeightState.ARRIVING, WeightState.EMPTY),  # the last two: left unused
    WeightState.READY: (WeightState.READY, WeightState.ARRIVING, WeightState.EMPTY),
}


class WeightSlot:
    """A buffer for the full weights of one unit at a time. Owns its three fences.

    Attributes:
        buffer: [bytes of its largest unit] uint8.
        state: see `WeightState`.
        content: index of the unit whose weights the slot holds or receives; None: of no unit.
        arrived: fence of rule 1, recorded after the all-gather.
        released: fence of rule 2, recorded after a unit's last use.
        shard_read: fence of rule 6, recorded after the all-gather: all ranks have read this rank's shard. On a device
            the comm stream orders this.
        is_shared: several units use the slot.
    """

    def __init__(self, buffer: torch.Tensor, streams: Streams, what: str, *, is_shared: bool) -> None:
        self.state = WeightState.EMPTY
        self.content: int | None = None
        self.buffer = buffer
        self._first_byte = buffer.data_ptr()  # kept: `holds` is asked for each tensor that autograd saves
        self.is_shared = is_shared
        self.arrived = Fence(streams, Rule.WEIGHTS_ARRIVED, StreamName.COMM, what)
        self.released = Fence(streams, Rule.SLOT_RELEASED, StreamName.COMPUTE, what)
        self.shard_read = Fence(streams, Rule.SHARDS_READ, StreamName.COMM, f"shards in {what}", at=self.arrived)

    def move(self, state: WeightState, content: int | None) -> None:
        """Go over to `state`, with weights of unit `content`.

        Raises:
            StateError: the table has no such transition.
        """
        if state not in WEIGHT_TRANSITIONS[self.state]:
            raise StateError(self.arrived.what, self.state.name, f"a state before {state.name}")
        self.state, self.content = state, content

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the slot."""
        try:
            return 0 <= tensor.data_ptr() - self._first_byte < self.buffer.nbytes
        except RuntimeError:  # tensors without storage: sparse ones, tracers
            return False

    def without_weights(self, output: Any) -> Any:
        """`output` of a layer, with copies of weights, and of views of weights: another unit takes the slot."""
        if not any(map(self.holds, tensors_in(output))):
            return output
        return map_tensors(output, lambda tensor: tensor.clone() if self.holds(tensor) else tensor)


# -- gradients --------------------------------------------------------------------------------------------------------


class Scratch:
    """Memory that reductions need beside a gradient slot. It is there from the first of a backward to the last one.

    Args:
        n_bytes: for the most demanding of its units.
        ledger: allocates.
        keeps_memory: it always has memory.

    Attributes:
        buffer: [n_bytes] uint8.
        keeps_memory: see above.
        drained: the fence behind the last reductions that use it, a gradient slot's.
    """

    keeps_memory = True  # until there is some

    def __init__(self, n_bytes: int, ledger: Ledger, *, keeps_memory: bool) -> None:
        self.drained: Fence | None = None
        self._ledger = ledger
        self.buffer, self.keeps_memory = ledger.allocate(Category.SCRATCH, n_bytes, torch.uint8), keeps_memory

    def __del__(self) -> None:
        """If the model goes in the middle of a backward, reductions may still use memory that came after `drop`."""
        if not self.keeps_memory and self.buffer.untyped_storage().nbytes():
            self._ledger.keep(self.buffer)

    def drop(self) -> None:
        """Free the memory: all views of it are made, and compute waits for all uses."""
        if not self.keeps_memory:
            self.buffer.untyped_storage().resize_(0)


class GradSlot:
    """A buffer for the full gradients of one unit at a time. Owns its two fences.

    Args:
        buffer: [bytes of the largest of its units] uint8. With `weights` it is theirs.
        weights: the weight slot whose second tenant gradients are; None: the buffer holds gradients only.
        streams: order its uses.
        scratch: memory that reductions from this slot need beside the slot.
        what: the slot's name in messages.

    Attributes:
        content: index of the unit whose unreduced gradients are in the slot. None: of no unit; a tied head's may lie
            there, and a reduction may still read the slot (`drained`).
        written: fence of rule 4, recorded after a unit's gradients.
        drained: fence of rule 3, recorded after the reduction.
    """

    def __init__(
        self, buffer: torch.Tensor, weights: WeightSlot | None, streams: Streams, scratch: Scratch, what: str
    ) -> None:
        self.buffer, self.weights, self.scratch = buffer, weights, scratch
        self.content: int | None = None
        self.written = Fence(streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, what)
        self.drained = Fence(streams, Rule.GRADS_DRAINED, StreamName.COMM, what)

    def open(self, unit: int) -> None:
        """Give the slot to gradients of `unit`: compute waits until the slot is free (rule 3).

        Raises:
            StateError: it holds gradients of another unit.
        """
        if self.content is not None:
            raise StateError(self.drained.what, f"with gradients of unit {self.content}", "an empty slot")
        self.content = unit
        if self.weights is None or self.weights.content is None:
            self.drained.wait()  # rule 3
            return
        # The slot's weights were all-gathered behind its last reduction, and give way to gradients.
        if self.weights.state is WeightState.ARRIVING:  # this rank has skipped the unit
            self.weights.arrived.wait()  # rule 1
        self.weights.shard_read.complete()  # rule 6: other ranks may still read this rank's part of them
        self.weights.move(WeightState.EMPTY, None)

    def finish_writing(self) -> None:
        """The gradients are written: the comm stream waits (rule 4)."""
        scratch = self.scratch.buffer
        if not scratch.untyped_storage().nbytes():  # `drop` has freed it, behind its last use
            scratch.untyped_storage().resize_(scratch.nbytes)
        self.written.record()
        self.written.wait()  # rule 4
        # On CUDA reductions come one after the other. On the CPU an earlier one may still use the scratch.
        if (before := self.scratch.drained) is not None and scratch.nbytes:
            before.complete()

    def close(self, works: Sequence[Work | None]) -> None:
        """The reductions, whose works these are, have started: the slot and its scratch are free behind them."""
        self.content = None
        self.drained.record(*works)
        self.scratch.drained = self.drained
