"""The gradients of one unit, with a method for each step of their way, in order.

    autograd -write, collect-> grad slot -start_reduce-> main grads -finish-> ``.grad`` of the sharded parameters

`UnitGrads.write` copies a large gradient into the slot as soon as autograd has made it. Small gradients stay in
``.grad`` of the unsharded parameters until the unit is reduced. `UnitGrads.collect` copies them together, since small
copies cost the host's time for a call. If another unit needs the slot in between, gradients are *spilled*: copied to
memory of their own. If a backward does not reduce (``no_sync()`` with a grad slot for each unit), gradients wait in the
slot, and using ``.grad`` raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import StepEvent, Streams, Work, as_one
from streamshard.comm.transport import Reduction
from streamshard.errors import ShardingError
from streamshard.planning.flat_params import ByteRange, FlatParam
from streamshard.planning.memory import Category
from streamshard.torch_private import AsTensors, get_grad, set_grad
from streamshard.unit.shard import GradSlot, Ledger, ParamShard
from streamshard.unit.sharded_parameter import drop_unreduced, keep_unreduced, put_grad
from streamshard.unit.sharded_tensor import Life, Piece, ShardedTensor

_WHY_EARLIER = (
    "was kept from an earlier backward, and a later one writes to its memory: keep p.grad.clone() where a gradient is "
    "needed after zero_grad()"
)

# Upper limit for the small gradients of one unit. They need this memory in addition to the slot.
_COLLECTED_BYTES = 1 << 20


class FlatParamGrads:
    """Memory for the gradients of one flat parameter that trains. Owns nothing: buffers are the ledger's.

    Args:
        plan: the flat parameter's place and dtypes.
        slot: collects gradients; None with one rank, where gradients are written to the main grads.
        ranks: the shard group, over which gradients are reduced.
        ledger: allocates main grads.
        scratch: the reductions' part of the slot's scratch.
        keeps_slot: no other unit uses the slot. If it is fp32, main grads are this rank's range of it.

    Attributes:
        layout: where its parameters lie.
        tag: of the messages of its reductions and averages.
        ranks: see Args.
        is_main_in_slot: main grads are this rank's range of the slot, until `leave_slot`.
        main: [shard_numel] fp32.
        all: [padded_numel] grad_dtype, where gradients are written: its range of the slot, or `main`.
    """

    def __init__(
        self,
        plan: FlatParam,
        slot: GradSlot | None,
        ranks: Communicator,
        ledger: Ledger,
        scratch: ByteRange,
        *,
        keeps_slot: bool,
    ) -> None:
        self.layout, self.tag, self.ranks = plan.layout, plan.tag, ranks
        self.is_main_in_slot = keeps_slot and slot is not None and plan.kind.grad_dtype is torch.float32
        self._mode = plan.kind.mode
        self._ledger = ledger
        self._scratch = torch.empty(0)
        if slot is not None:
            self.all = slot.buffer.narrow(0, *plan.grads).view(plan.kind.grad_dtype)
            self._scratch = slot.scratch.buffer.narrow(0, *scratch).view(plan.kind.grad_dtype)
        numel = plan.layout.shard_numel
        if self.is_main_in_slot:
            self.main = self.all.narrow(0, ranks.rank * numel, numel)
        else:
            self.main = ledger.allocate(Category.MAIN_GRADS, numel, torch.float32)
        if slot is None:
            self.all = self.main

    def leave_slot(self) -> None:
        """Give main grads memory of their own, because a reduction adds to them. Compute stream."""
        self.is_main_in_slot = False
        main = self._ledger.allocate(Category.MAIN_GRADS, self.main.numel(), torch.float32)
        self.main = main.copy_(self.main)

    def start_reduce(self, *, accumulate: bool) -> Work | None:
        """Reduce its part of the slot into main grads, or add to them. Comm stream."""
        reduction = Reduction(self.all, self.main, self._scratch, self._mode, accumulate, self.tag)
        return self.ranks.transport.start_reduce(reduction)


class ParamGrad:
    """The gradient of one parameter: where it lies, and what this backward has done to it.

    Args:
        shard: this rank's part of the parameter.
        view: the unsharded parameter; gradients have its shape.
        memory: of its flat parameter; None if the parameter was frozen when the model was sharded.

    Attributes:
        has_room: there is memory for the gradient.
        in_slot: [shape of `view`] grad_dtype, the place in the grad slot; with one rank, fp32 in the main grads.
        in_main: [local shape] fp32, this rank's piece of the main grads, which has become ``.grad``; None: not yet.
        is_written: this backward has written `in_slot`, or is about to, see `UnitGrads.write`.
        is_used: this rank's graphs have made a gradient; the other ranks are told.
        is_kept: `in_main` holds the ``.grad`` from before this backward, to which the reduction is added.
        waits: the gradient stays in the slot, or in main grads that replicas have not averaged, until a later backward.
        spilled: [shape of `view`] grad_dtype, a copy of `in_slot` from before another unit took the slot.
        is_small: `UnitGrads.collect` copies the gradient.
    """

    in_slot: torch.Tensor
    _memory: FlatParamGrads
    _local: torch.Tensor  # `in_main` as a plain tensor
    _piece: Piece  # what it is a piece of

    def __init__(self, shard: ParamShard, view: nn.Parameter, memory: FlatParamGrads | None) -> None:
        self.shard = shard
        self.view = view
        self.has_room = memory is not None
        self.is_written = False
        self.is_used = False
        self.is_kept = False
        self.waits = False
        self.is_small = False
        self.spilled: torch.Tensor | None = None
        self.in_main: ShardedTensor | None = None
        if memory is not None:
            layout = shard.layout
            self.in_slot = memory.all.narrow(0, layout.offset, layout.numel).view(layout.shape)
            self._memory, self._piece = memory, shard.what.of_grad()
            self.find()

    def find(self) -> None:
        """Look up where the main grads lie. Each step reads the result, so it is kept."""
        self._local = self.shard.shaped(self._memory.main)

    def take(self) -> bool:
        """Move ``.grad``, if there is one, into the main grads. Inside `AsTensors`.

        Returns:
            Whether ``.grad`` is `in_main`, as the last backward has left it, and lies where it lay (``grad.data = x``).
        """
        grad = get_grad(self.shard.param)
        self.is_kept = grad is not None
        is_same = grad is self.in_main
        if is_same and grad is not None and grad.numel():
            is_same = grad.data_ptr() == self._local.data_ptr()
        if grad is not None:
            if not is_same:
                self._local.copy_(grad)
            put_grad(self.shard.param, None)
        return is_same

    def give(self, life: Life) -> None:
        """Make the piece of the main grads ``.grad``, plus what autograd has put there meanwhile (of a penalty).

        Inside `AsTensors`.
        """
        param = self.shard.param
        if self.in_main is None:
            self.in_main = ShardedTensor.wrap(self._local.detach(), self._piece, life)
        if (own := get_grad(param)) is not None:
            self.in_main.add_(own)
        drop_unreduced(param)
        set_grad(param, self.in_main)

    def forget(self, *, is_in_slot: bool) -> None:
        """Zero the gradient in the main grads, and in the slot if it waits there."""
        if is_in_slot:
            self.in_slot.zero_()
        self.clear()
        self.is_used = self.is_kept = False

    def clear(self) -> None:
        """Zero the piece of the main grads."""
        self._local.zero_()


class UnitGrads:
    """The gradients of one unit. Owns nothing: buffers are the ledger's.

    Args:
        index: the unit's index.
        slot: collects gradients; None with one rank, where gradients are written to the main grads.
        flat_params: the unit's flat parameters that train, in order.

    Attributes:
        params: in the order of the unit's parameters; filled by `add`.
        reductions: how many reductions of the unit this backward has started.
        has_unreduced: whether gradients were written since the last reduction.
        waits: an earlier backward may have left such gradients, here or on other ranks. They are reduced even if the
            unit is frozen by then.
    """

    def __init__(self, index: int, slot: GradSlot | None, flat_params: Sequence[FlatParamGrads]) -> None:
        self.slot = slot
        self.params: list[ParamGrad] = []
        self.flat_params = tuple(flat_params)
        self.reductions = 0
        self.has_unreduced = False
        self.waits = False
        self._index = index
        self._life = Life()  # of the gradients that parameters have now
        self._trained: list[ParamGrad] = []  # trainable ones of `params`
        self._small: list[ParamGrad] = []  # whose gradients `collect` copies
        self._small_bytes = 0
        self._has_taken = False  # whether this backward has moved ``.grad`` into main grads
        self._adds = False  # main grads hold something that the next reduction adds to

    def add(self, shard: ParamShard, view: nn.Parameter) -> None:
        """Add a parameter of the unit, with its unsharded parameter `view`."""
        memory = next((each for each in self.flat_params if each.layout is shard.what.flat_param), None)
        grad = ParamGrad(shard, view, memory)
        self.params.append(grad)
        if memory is not None:
            self._trained.append(grad)
            with AsTensors():
                n_bytes = view.nbytes
            grad.is_small = self._small_bytes + n_bytes <= _COLLECTED_BYTES
            if grad.is_small:
                self._small.append(grad)
                self._small_bytes += n_bytes

    @property
    def _streams(self) -> Streams:
        return self.flat_params[0].ranks.streams

    @property
    def is_open(self) -> bool:
        """Whether gradients can be written: the slot is this unit's."""
        if self.slot is None:
            return self._has_taken
        return self.slot.content == self._index

    def open(self) -> None:
        """Make the slot this unit's (rule 3). Compute stream; with one rank gradients are written to the main grads.

        Gradients that parameters hold from an earlier backward move into the main grads first, to be added to.
        """
        is_first, self._has_taken = not self._has_taken, True
        if is_first:
            self._take()
        if self.slot is not None:
            self.slot.open(self._index)
            if self._adds:
                self._leave_slot()
        elif not is_first:
            return
        for grad in self._trained:
            grad.is_written = self.slot is None and self._adds
        for param_index, grad in enumerate(self.params):
            if grad.spilled is not None:
                spilled, grad.spilled = grad.spilled, None
                self.write(param_index, spilled)

    def _leave_slot(self) -> None:
        """Move main grads that lie in the slot to memory of their own: gradients are about to be written there."""
        for flat_param in self.flat_params:
            if flat_param.is_main_in_slot:
                flat_param.leave_slot()
                for grad in self._trained:
                    grad.find()
                self._renew()

    def _renew(self) -> None:
        """Gradients of the unit that the user still holds raise from now on."""
        self._life.why_over = _WHY_EARLIER
        self._life = Life()
        for grad in self._trained:
            grad.in_main = None

    def _take(self) -> None:
        """Take ``.grad`` of all parameters, until `finish`: what autograd puts there meanwhile is its own."""
        with AsTensors():
            are_same = [grad.take() for grad in self._trained]
        if not all(are_same):
            self._renew()
        self._adds = any(grad.is_kept for grad in self._trained)
        if self._adds:
            for grad in self._trained:
                if not grad.is_kept:
                    grad.clear()

    def write(self, param_index: int, value: torch.Tensor) -> None:
        """Copy gradient `value` [shape of the unsharded parameter] into the slot. Its only copy. Compute stream.

        Raises:
            ShardingError: the parameter was frozen when the model was sharded.
        """
        grad = self.params[param_index]
        if not grad.has_room:
            raise ShardingError(
                f"parameter {grad.shard.name!r} was frozen when StreamShard(model) was called and trains now: there is "
                "no room for its gradient. Freeze it after StreamShard(model), as often as you like"
            )
        self._write([(grad, value)])

    def collect(self, stream: Any) -> None:
        """Copy the small gradients that autograd has left into the slot, which is open.

        Args:
            stream: the device's stream that has made them, whose allocator owns them.
        """
        with self._streams.on_device_stream(stream):
            self._write(self._pop_left())

    def _pop_left(self) -> list[tuple[ParamGrad, torch.Tensor]]:
        left = []
        with AsTensors():
            for grad in self._small:
                if (value := get_grad(grad.view)) is not None:
                    set_grad(grad.view, None)
                    left.append((grad, value))
        return left

    def _write(self, values: Sequence[tuple[ParamGrad, torch.Tensor]]) -> None:
        """Copy gradients [shape of the unsharded parameter] into the slot, or add to what this backward has written."""
        self.has_unreduced = True
        if self.slot is not None:
            self.slot.join()
        fresh: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], ...]] = defaultdict(lambda: ([], []))
        for grad, value in values:
            if value.is_sparse:
                value = value.to_dense()
            if grad.is_written:
                grad.in_slot.add_(value)
            else:
                places, given = fresh[grad.in_slot.dtype, value.dtype]
                places.append(grad.in_slot)
                given.append(value)
            grad.is_used = grad.is_written = True
        for places, given in fresh.values():  # of mixed dtypes one call would launch a kernel for each tensor
            torch._foreach_copy_(places, given)
        self._streams.observe(StepEvent.GRAD_WRITTEN, self._index)

    def spill(self) -> None:
        """Copy gradients out of the slot, which another unit needs, until this unit opens it again. Compute stream.

        Happens only if a unit's layers run before and after those of another unit in the same slot.
        """
        assert self.slot is not None
        self.slot.content = None
        for grad in self.params:
            if grad.is_written:
                grad.spilled = grad.in_slot.clone()

    def start_reduce(self) -> Work | None:
        """Start the reduction from slot to main grads (rule 4). Parameters without a gradient contribute zeros."""
        self.reductions += 1
        self.has_unreduced = False
        slot = self.slot
        if slot is not None:
            slot.join()
        for grad in self._trained:
            if not grad.is_written and (grad.is_kept or self.counts(grad)):  # or frozen, with a kept gradient
                grad.in_slot.zero_()
            grad.is_written = True
        accumulate, self._adds = self._adds, True
        if slot is None:
            return None
        slot.finish_writing()
        slot.scratch.take()
        work = as_one([flat_param.start_reduce(accumulate=accumulate) for flat_param in self.flat_params])
        slot.content = None
        slot.drained.record(work)
        slot.scratch.drained = slot.drained
        return work

    def finish(self, used: Sequence[bool]) -> list[nn.Parameter]:
        """Make main grads ``.grad`` of parameters that held one, or that any rank `used`. Returns the latter."""
        self.reductions = 0
        self.has_unreduced = False
        given = []
        with AsTensors():
            for grad, is_used in zip(self.params, used, strict=True):
                is_new = is_used and grad.has_room and (grad.view.requires_grad or self.waits)
                if self._has_taken and (grad.is_kept or is_new):
                    grad.give(self._life)
                    if is_new:
                        given.append(grad.shard.param)
                grad.is_used = False
        self._has_taken = self.waits = False
        return given

    def counts(self, grad: ParamGrad) -> bool:
        """Whether any rank may have a gradient of the parameter: it is trainable, or has unreduced gradients."""
        if not grad.has_room:
            return False
        with AsTensors():  # the view may be absent
            return grad.view.requires_grad or self.waits

    def give_up(self) -> None:
        """The backward has failed: discard all gradients of the unit, and free the slot."""
        self._pop_left()
        for grad in self.params:
            grad.is_written = grad.is_used = grad.is_kept = False
            grad.spilled = None
            if grad.has_room and grad.shard.param.grad is grad.in_main:
                grad.shard.param.grad = None
        self.reductions = 0
        self.has_unreduced = self._has_taken = self.waits = False
        if self.slot is not None and self.slot.content == self._index:
            self.slot.content = None

    # -- gradients that wait ----------------------------------------------------------------------------------------

    def leave_unreduced(self, *, has_trained: bool) -> None:
        """End a backward with gradients left in the slot, or in main grads that replicas have not averaged.

        Args:
            has_trained: whether the unit was trainable in this backward.
        """
        self.waits = self.waits or has_trained
        if not self._has_taken:
            return
        for grad in self._trained:
            if grad.is_used or grad.is_kept or not self.is_open:  # main grads have the other ranks' too
                grad.waits = True
                keep_unreduced(grad.shard.param)

    def resume(self) -> None:
        """A backward begins: add to waiting gradients, and forget those that the user has dropped (``zero_grad()``)."""
        for grad in self._trained:
            if not grad.waits:
                continue
            grad.waits = False
            if not drop_unreduced(grad.shard.param):
                grad.forget(is_in_slot=self.is_open)
