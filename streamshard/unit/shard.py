"""The memory of one rank, all of it allocated once: slots of units, and this rank's shard of each flat parameter.

`Ledger` allocates. `WeightSlot` and `GradSlot` hold full units. `FlatParamShard` is one rank's part of a flat
parameter: the main weights and the all-gather input. The user's Parameter objects stay the same objects, so an
optimizer built before sharding keeps working; their data become pieces of the main weights. See [Note: slots] in
`streamshard.planning.memory`, [Note: flat parameters] in `streamshard.planning.flat_params`.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName, Streams
from streamshard.errors import ShardingError
from streamshard.planning.flat_params import FlatParam
from streamshard.planning.layout import LocalRange, ParamLayout
from streamshard.planning.memory import Category
from streamshard.planning.structure import leave_inference_mode
from streamshard.torch_private import AsTensors, swap_tensor
from streamshard.unit.sharded_parameter import be_piece
from streamshard.unit.sharded_tensor import Piece


class Ledger:
    """Allocates buffers and knows them all. Owns every buffer of the engine.

    Args:
        streams: both use them; they live on its device.
        allocate_visible: allocates what other ranks may read, see `Transport.allocate_visible`.

    Attributes:
        buffers: all of them, with what each is for.
    """

    def __init__(self, streams: Streams, allocate_visible: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._streams = streams
        self._allocate_visible = allocate_visible
        self.buffers: list[tuple[Category, torch.Tensor]] = []

    def allocate(self, category: Category, numel: int, dtype: torch.dtype, *, is_visible: bool = False) -> torch.Tensor:
        """A new buffer [numel] of zeros, so that padding never holds a NaN.

        Args:
            category, numel, dtype: what, how much, of which type.
            is_visible: whether other ranks may read it (all-gather inputs, grad slots).
        """
        with leave_inference_mode():
            if is_visible:
                buffer = self._allocate_visible(numel, dtype)
            else:
                buffer = torch.zeros(numel, dtype=dtype, device=self._streams.device)
            self._streams.keep(buffer)
        self.buffers.append((category, buffer))
        return buffer

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        """Forget `buffers`, which nobody needs any more."""
        freed = set(map(id, buffers))
        self.buffers = [(kind, held) for kind, held in self.buffers if id(held) not in freed]

    def held_bytes(self, category: Category) -> int:
        """Bytes held under `category`, counted on the live tensors."""
        return sum(buffer.untyped_storage().nbytes() for kind, buffer in self.buffers if kind is category)


class WeightSlot:
    """A buffer for the full weights of a unit. Owns its two fences.

    Attributes:
        buffer: [bytes of its largest unit] uint8; with one rank, the all-gather input of its unit's first flat
            parameter.
        content: index of the unit whose weights the slot holds or receives; None: of no unit.
        arrived: fence of rule 1, recorded after the all-gather.
        released: fence of rule 2, recorded after a unit's last use.
        is_shared: whether several units use the slot.
        is_in_wire_dtype: the weights have arrived, or will, in the wire buffer, and `StreamedUnit.finish_gather` has
            to convert them.
    """

    def __init__(self, buffer: torch.Tensor, streams: Streams, what: str, *, is_shared: bool) -> None:
        self.buffer = buffer
        self._first_byte = buffer.data_ptr()
        self.is_shared = is_shared
        self.content: int | None = None
        self.is_in_wire_dtype = False
        self.arrived = Fence(streams, Rule.WEIGHTS_ARRIVED, StreamName.COMM, what)
        self.released = Fence(streams, Rule.SLOT_RELEASED, StreamName.COMPUTE, what)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the slot."""
        try:
            return 0 <= tensor.data_ptr() - self._first_byte < self.buffer.nbytes
        except (RuntimeError, NotImplementedError):  # tensors without storage: sparse ones, tracers
            return False


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


class GradSlot:
    """A buffer for the full gradients of a unit. Owns its two fences.

    Args:
        n_bytes: bytes of the largest of its units.
        ledger, streams: allocate the buffer, and order its uses.
        scratch: memory that reductions from this slot need beside the slot.
        what: the slot's name in messages.

    Attributes:
        buffer: [n_bytes] uint8.
        content: index of the unit whose unreduced gradients the slot holds; None: of no unit.
        written: fence of rule 4, recorded after a unit's last gradient.
        drained: fence of rule 3, recorded after the reduction.
    """

    def __init__(
        self,
        n_bytes: int,
        ledger: Ledger,
        streams: Streams,
        scratch: Scratch,
        what: str,
    ) -> None:
        self.buffer = ledger.allocate(Category.GRAD_SLOTS, n_bytes, torch.uint8, is_visible=True)
        self.content: int | None = None
        self.written = Fence(streams, Rule.GRADS_WRITTEN, StreamName.COMPUTE, what)
        self.drained = Fence(streams, Rule.GRADS_DRAINED, StreamName.COMM, what)
        self.scratch = scratch
        self._streams = streams
        self._writers: list[Any] = []  # the device's streams on which gradients are written

    def open(self, unit: int) -> None:
        """The slot is `unit`'s from here on (rule 3)."""
        self._writers.clear()
        self.join()
        self.content = unit

    def join(self) -> None:
        """The device's current stream is about to write: it waits (rule 3).

        Autograd computes a gradient on the stream that ran the forward. A layer may use a stream of its own, as shared
        experts do. The caller's stream waits for such streams only when backward ends.
        """
        stream = self._streams.device_stream(StreamName.COMPUTE)
        if stream not in self._writers:
            self.drained.wait(stream)  # rule 3
            self._writers.append(stream)

    def finish_writing(self) -> None:
        """Nothing is written any more: the comm stream goes on after what was, on whatever stream (rule 4)."""
        for stream in self._writers:
            self.written.record(stream=stream)
            self.written.wait()


@dataclasses.dataclass(frozen=True, eq=False)
class ParamShard:
    """This rank's part of one parameter. A key of dicts by identity: layouts name all parameters of the unit.

    Attributes:
        name: fully qualified name in the root model.
        aliases: further names of the same (tied) parameter.
        param: the user's Parameter; its data is the piece, of shape `FlatParamLayout.local_shape`.
        layout: where the full parameter lies in its flat parameter.
        local: which elements of the flattened parameter this rank owns.
        dtype: the parameter's dtype before sharding.
        piece: the memory of the piece in the main weights, as StreamShard has put it under `param`.
        what: what the parameter is a piece of.
    """

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter
    layout: ParamLayout
    local: LocalRange
    dtype: torch.dtype
    piece: torch.Tensor
    what: Piece

    @property
    def main(self) -> torch.Tensor:
        """[local.numel]: this rank's main weights, wherever the user has put them since."""
        with AsTensors():
            return self.param.detach().view(-1)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The range of `flat` [shard_numel] that is this parameter's, in the sharded parameter's shape."""
        return flat.narrow(0, self.local.shard_offset, self.local.numel).view(self.piece.shape)


class FlatParamShard:
    """One flat parameter's state on this rank. Owns nothing: buffers are the ledger's.

    Args:
        plan: what it is, and where it lies.
        slot: the unit's weight slot; None: with one rank, that computes with the all-gather input, in compute_dtype.
        wire: [bytes of the largest unit of the slot] uint8, the wire buffer beside the slot; None with one rank.
        ranks: names this rank and the shard group.
        ledger: allocates.
        is_in_slot: no other unit uses the slot: the all-gather input is this rank's range of it.

    Attributes:
        tag: of its messages.
        kind: its dtypes, and whether it trains.
        layout: of its parameters.
        main: [shard_numel] main_dtype. What the user's Parameters are views of.
        gather_input: [shard_numel] wire_dtype; `main` itself, if that is of the same dtype.
        gathered: [padded_numel] wire_dtype, what all-gathers write; `weights` itself, if that is of the same dtype.
        weights: [padded_numel] compute_dtype, what layers compute with.
        params: filled by `add`.
    """

    def __init__(
        self,
        plan: FlatParam,
        slot: WeightSlot | None,
        wire: torch.Tensor | None,
        ranks: Communicator,
        ledger: Ledger,
        *,
        is_in_slot: bool,
    ) -> None:
        self.tag, self.kind, self.layout = plan.tag, plan.kind, plan.layout
        self.params: list[ParamShard] = []
        self._ranks = ranks
        self._ledger_of = weakref.ref(ledger)
        numel, main_dtype = plan.layout.shard_numel, plan.kind.main_dtype
        dtype = plan.kind.compute_dtype if slot is None else plan.kind.wire_dtype
        is_cast = main_dtype is not dtype
        kept_as = Category.MAIN_WEIGHTS if plan.kind.trains else Category.FROZEN_WEIGHTS
        if slot is not None:
            self.weights = self.gathered = slot.buffer.narrow(0, *plan.weights).view(plan.kind.compute_dtype)
        if wire is not None and dtype is not plan.kind.compute_dtype:
            self.gathered = wire.narrow(0, *plan.wire).view(dtype)
        if slot is not None and is_in_slot and self.gathered is self.weights:
            self.gather_input = self.weights.narrow(0, ranks.rank * numel, numel)
        else:
            category = Category.ALL_GATHER_INPUTS if is_cast else kept_as
            self.gather_input = ledger.allocate(category, numel, dtype, is_visible=True)
        if slot is None:
            self.weights = self.gathered = self.gather_input
        self.main = ledger.allocate(kept_as, numel, main_dtype) if is_cast else self.gather_input

    def add(
        self, layout: ParamLayout, aliases: tuple[str, ...], param: nn.Parameter, full: torch.Tensor | None
    ) -> ParamShard:
        """Take over one parameter: `param` becomes this rank's piece of `full`.

        Args:
            layout: the parameter's place in the flat parameter.
            aliases: its further names.
            param: the user's Parameter; its data are replaced.
            full: [numel], the weights to shard, any dtype and device; None: it is empty, of NaN.
        """
        local = self.layout.local_range(layout, self._ranks.rank)
        piece = self.main.narrow(0, local.shard_offset, local.numel)
        piece = piece.view(self.layout.local_shape(layout, self._ranks.rank))
        if full is None:
            piece.fill_(math.nan)
        else:
            piece.view(-1).copy_(full[local.start : local.stop])
        if self._ranks.world_size == 1:  # a storage of its own, or accelerate and safetensors take parameters for tied
            piece = from_dlpack(piece)
        places = (local.start, local.stop, tuple(piece.shape))
        what = Piece(layout.name, layout.shape, *places, self._ranks, self.layout, layout, self._ledger_of)
        shard = ParamShard(layout.name, aliases, param, layout, local, param.dtype, piece, what)
        param.grad = None
        _put_under(param, piece)
        self.params.append(shard)
        be_piece(param, what)
        return shard

    def to_wire(self) -> None:
        """Cast main weights to the all-gather input, for all all-gathers of the next pass. Compute stream.

        Inside `AsTensors`.

        Raises:
            ShardingError: a parameter was given other memory, which its collectives would not see.
        """
        for shard in self.params:
            if shard.local.numel and shard.param.data_ptr() != shard.piece.data_ptr():
                raise ShardingError(
                    f"parameter {shard.name!r} was given other memory (param.data = ..., .half(), .to()), and layers "
                    "compute with the memory that StreamShard has given it: copy into that (param.data.copy_). Instead "
                    "of .half() use Precision(param_dtype=...), for full tensors load_state_dict or "
                    "summon_full_params()"
                )
        if self.gather_input is not self.main:
            self.gather_input.copy_(self.main)

    def from_wire(self) -> None:
        """Convert what an all-gather has written to what layers compute with. Compute stream."""
        if self.gathered is not self.weights:
            self.weights.copy_(self.gathered)


def _put_under(param: nn.Parameter, piece: torch.Tensor) -> None:
    """Let `param`, whoever holds it, look at the memory of `piece`."""
    if not param.is_meta:
        param.data = piece
        return
    # Not to be assigned across devices of such different kinds. torch.utils.swap_tensors refuses what somebody refers
    # to weakly, as RNNs do to their weights.
    fresh = nn.Parameter(piece.data, requires_grad=param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(fresh, hooks, getattr(param, hooks))
    swap_tensor(param, fresh)
