"""The gradients of one unit, its methods in the order in which a gradient meets them.

    autograd -write-> grad slot -start_reduce-> main grads -finish-> ``.grad`` of the sharded parameters

Where a unit's slot has to go to another unit in between, gradients are parked; where a backward is not to reduce
(``no_sync()`` with a grad slot each), they are left in the slot, and `UnreducedGrad` stands for them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Work
from streamshard.comm.transport import Reduction
from streamshard.config import ReductionMode
from streamshard.plan.memory import Category
from streamshard.unit.buffers import GradSlot, Ledger
from streamshard.unit.shard import ParamShard, UnitShard
from streamshard.unit.sharded_grad import ShardedGrad
from streamshard.unit.step_grads import put_back
from streamshard.unit.unreduced_grad import UnreducedGrad

__all__ = ["ParamGrad", "UnitGrads"]


class ParamGrad:
    """The gradient of one parameter: where it lies, and what this backward has done to it.

    Attributes:
        shard: this rank's part of the parameter.
        view: the parameter's compute view; gradients are of its shape.
        in_slot: [shape of the view] slot_grad_dtype, its place in the grad slot; with one rank, in the main grads.
        in_main: fp32, its piece of the main grads.
        is_written: this backward has something in `in_slot`.
        is_used: this rank's graphs have made a gradient, to be told to the other ranks.
        is_kept: `in_main` holds what ``.grad`` held before this backward, which is added to.
        stand_in: what ``.grad`` is while the gradient waits in the slot.
        parked: a copy of what was in the slot when that went to another unit.
        node: the sharded parameter's own node in autograd's graph, once the gradient has waited; lives with its hook.
    """

    __slots__ = (
        "__weakref__",
        "in_main",
        "in_slot",
        "is_kept",
        "is_used",
        "is_written",
        "node",
        "parked",
        "shard",
        "stand_in",
        "view",
    )
    in_slot: torch.Tensor
    in_main: ShardedGrad

    def __init__(self, shard: ParamShard, view: nn.Parameter) -> None:
        self.shard = shard
        self.view = view
        self.is_written = False
        self.is_used = False
        self.is_kept = False
        self.stand_in: UnreducedGrad | None = None
        self.parked: torch.Tensor | None = None
        self.node: Any = None

    def take(self) -> None:
        """Move what ``.grad`` holds into the main grads.

        One that the user replaced is copied. One that was cleared and is kept elsewhere becomes its keeper's own: main
        grads are about to be written.
        """
        piece, grad = self.in_main, self.shard.param.grad
        if sys.getrefcount(piece) > _OWN_REFERENCES and grad is not piece and piece.numel():
            self.disown()
        self.is_kept = grad is not None
        if grad is not None:
            self.shard.param.grad = None
            if grad.data_ptr() != self.in_main.data_ptr():
                self.in_main.copy_(grad)

    def disown(self) -> None:
        """Whoever has the gradient keeps it as it is; `in_main` is another tensor from now on, on the same memory."""
        kept = self.in_main
        self.in_main = ShardedGrad.wrap(kept.as_subclass(torch.Tensor).detach(), kept.ranks, kept.has_rows)
        kept.data = kept.clone()

    def give(self) -> nn.Parameter:
        """The piece of the main grads becomes ``.grad``, with what autograd has put there meanwhile (a penalty)."""
        param = self.shard.param
        if param.grad is not None:
            self.in_main.add_(param.grad)
        param.grad = self.in_main
        return param

    def forget(self) -> None:
        """What waits in the slot, or in the main grads, is zero from now on."""
        self.in_slot.zero_()
        self.in_main.zero_()


class UnitGrads:
    """The gradients of one unit. Owns nothing: buffers are the ledger's.

    Args:
        index: of the unit, the tag of its reductions.
        shard: this rank's state.
        slot: where gradients are collected; None with one rank, which writes to the main grads.
        ranks: between whom it is reduced.
        ledger: allocates main grads.
        mode: how it is reduced.
        scratch_numel: elements of scratch that its reductions need.

    Attributes:
        params: in the order of the unit's parameters; filled by `add`.
        main: [shard_numel] fp32; None until `allocate`: a unit that is frozen altogether needs none.
        all: [padded_numel] slot_grad_dtype, the unit's part of the slot; None without slot, and until `allocate`.
        reductions: how many of its reductions this backward has started.
        has_unreduced: whether gradients were written since the last of them.
        waits: an earlier backward, in which the unit trained, may have left gradients in a slot, here or on other
            ranks: they are reduced although the unit may be frozen by then.
    """

    def __init__(
        self,
        index: int,
        shard: UnitShard,
        slot: GradSlot | None,
        ranks: Ranks,
        ledger: Ledger,
        mode: ReductionMode,
        scratch_numel: int,
    ) -> None:
        self.slot = slot
        self.params: list[ParamGrad] = []
        self.main: torch.Tensor | None = None
        self.reductions = 0
        self.has_unreduced = False
        self.waits = False
        self._index = index
        self._shard = shard
        self._ranks = ranks
        self._ledger = ledger
        self._mode = mode
        self._scratch_numel = scratch_numel
        self.all: torch.Tensor | None = None
        self._is_main_in_slot = False
        self._has_taken = False  # whether this backward has taken over what parameters held
        self._adds = False  # whether main grads hold something that the next reduction adds to

    def add(self, shard: ParamShard, view: nn.Parameter) -> None:
        """Another parameter of the unit, and its compute view."""
        self.params.append(ParamGrad(shard, view))

    def reserve(self) -> None:
        """Take the memory for main grads, and for what gradients are written to. A second call does nothing."""
        if self.main is not None:
            return
        layout, slot = self._shard.layout, self.slot
        own = None
        if slot is not None:
            self.all = slot.allocate().narrow(0, 0, layout.padded_numel)
            self._is_main_in_slot = slot.holds_main_grads
            if self._is_main_in_slot:
                own = self.all.narrow(0, self._ranks.rank * layout.shard_numel, layout.shard_numel)
        self.main = own
        if own is None:
            self.main = self._ledger.allocate(Category.MAIN_GRADS, layout.shard_numel, torch.float32)

    def allocate(self) -> None:
        """Main grads, and what gradients are written to. When the unit first trains."""
        self.reserve()
        assert self.main is not None
        flat = self.main if self.all is None else self.all
        for grad in self.params:
            layout = grad.shard.layout
            grad.in_slot = flat.narrow(0, layout.offset, layout.numel).view(layout.shape)
            grad.in_main = ShardedGrad.wrap(grad.shard.shaped(self.main), self._ranks, grad.shard.has_rows)

    @property
    def is_open(self) -> bool:
        """Whether gradients can be written: the slot is this unit's."""
        if self.slot is None:
            return any(grad.is_used for grad in self.params)
        return self.slot.content == self._index

    def open(self) -> None:
        """Make the slot this unit's. Compute stream; with one rank the main grads themselves are written.

        Gradients that parameters hold from an earlier backward are moved into the main grads first, to be added to.
        """
        is_first, self._has_taken = not self._has_taken, True
        if is_first:
            self._take()
        slot = self.slot
        if slot is None:
            if is_first:
                self._set_written(self._adds)
            return
        slot.open(self._index)
        self._set_written(self._adds and self._is_main_in_slot)
        if self._adds and self._is_main_in_slot:
            self._spread_main()
        for param_index, grad in enumerate(self.params):
            if grad.parked is not None:
                parked, grad.parked = grad.parked, None
                self.write(param_index, parked)

    def _take(self) -> None:
        """Until `finish` parameters hold no gradient: what autograd puts there meanwhile is told apart from ours."""
        put_back(grad.shard.param for grad in self.params)
        for grad in self.params:
            grad.take()
        self._adds = any(grad.is_kept for grad in self.params)
        if self._adds:
            for grad in self.params:
                if not grad.is_kept:
                    grad.in_main.zero_()

    def _set_written(self, is_written: bool) -> None:
        for grad in self.params:
            grad.is_written = is_written

    def _spread_main(self) -> None:
        """Main grads in the slot are to be added to: N times them here and zeros elsewhere have them as their mean."""
        layout = self._shard.layout
        assert self.all is not None
        for rank, chunk in enumerate(self.all.view(layout.world_size, -1)):
            chunk.mul_(layout.world_size) if rank == self._ranks.rank else chunk.zero_()

    def write(self, param_index: int, value: torch.Tensor) -> None:
        """Gradient `param_index` [shape of the view] into the slot: the one copy that gradients see. Compute stream."""
        grad = self.params[param_index]
        grad.is_used = self.has_unreduced = True
        if value.is_sparse:
            value = value.to_dense()
        if self.slot is not None:
            self.slot.write(grad.in_slot, value, adds=grad.is_written)
        elif grad.is_written:
            grad.in_slot.add_(value)
        else:
            grad.in_slot.copy_(value)
        grad.is_written = True

    def park(self) -> None:
        """Leave the slot, which another unit needs, until this unit opens it again. Compute stream.

        Only where layers of one unit run on both sides of another's: what came first is kept in memory of its own.
        """
        assert self.slot is not None
        self.slot.flush()
        self.slot.content = None
        for grad in self.params:
            if grad.is_written:
                grad.parked = grad.in_slot.clone()

    def start_reduce(self) -> Work | None:
        """Slot to main grads. Parameters without a gradient contribute zeros, never another unit's leftovers."""
        self.reductions += 1
        self.has_unreduced = False
        if self.slot is not None and self.slot.has_streams:
            self.slot.join()
        for grad in self.params:
            if (self.counts(grad) or grad.is_kept) and not grad.is_written:  # a frozen one may have kept one
                grad.in_slot.zero_()
        slot = self.slot
        if slot is None or self.all is None or self.main is None:
            self._set_written(True)
            return None
        slot.finish_writing()
        accumulate, self._adds = self._adds and not self._is_main_in_slot, True
        scratch = slot.scratch.take(self._scratch_numel)
        reduction = Reduction(self.all, self.main, scratch, self._mode, accumulate, self._index)
        work = self._ranks.transport.start_reduce(reduction)
        slot.content = None
        slot.drained.record(work)
        slot.scratch.drained = slot.drained
        return work

    def finish(self, used: Sequence[bool]) -> list[nn.Parameter]:
        """Main grads become ``.grad`` of the parameters that held one, or that some rank `used`; returns the latter."""
        self.reductions = 0
        self.has_unreduced = False
        given = []
        for grad, is_used in zip(self.params, used, strict=True):
            is_new = is_used and self.counts(grad)
            if self._has_taken and (grad.is_kept or is_new):
                param = grad.give()
                if is_new:
                    given.append(param)
            grad.is_used = False
        self._has_taken = self.waits = False
        return given

    def counts(self, grad: ParamGrad) -> bool:
        """Whether some rank may have a gradient of the parameter: it trains now, or did when gradients were left."""
        with torch._C.DisableTorchFunctionSubclass():  # it may be away
            return grad.view.requires_grad or self.waits

    def give_up(self) -> None:
        """The backward has failed: parameters hold what they held before, and the slot is nobody's."""
        self.finish([False] * len(self.params))
        if self.slot is not None:
            self.slot.content = None

    # -- gradients that wait ----------------------------------------------------------------------------------------

    def leave_unreduced(self, *, has_trained: bool) -> None:
        """End a backward with gradients left in the slot: parameters get stand-ins that say so.

        Args:
            has_trained: whether the unit had a part in the backward, on whatever rank.
        """
        self.waits = self.waits or has_trained
        if not self._has_taken:
            return
        if self.slot is not None:
            self.slot.flush()
        if not self._is_main_in_slot and not self._adds and self.main is not None:
            self.main.zero_()
            self._adds = True
        for grad in self.params:
            param = grad.shard.param
            if param.grad is not None:
                self._add_own(grad, param.grad)
            if grad.is_used or grad.is_kept:
                if grad.node is None:
                    self._watch_own(grad)
                stand_in = UnreducedGrad.wrap(grad.in_main, grad.shard.name)
                stand_in.on_zero = _forgetting(grad)
                grad.stand_in = param.grad = stand_in

    def resume(self) -> None:
        """Take the stand-ins back. Gradients whose stand-in was cleared meanwhile are forgotten."""
        put_back(grad.shard.param for grad in self.params)
        for grad in self.params:
            stand_in = grad.stand_in
            if stand_in is None:
                continue
            grad.stand_in = None
            own, grad.shard.param.grad = grad.shard.param.grad, None
            if own is not stand_in:
                grad.forget()
                grad.is_used = grad.is_kept = False
                if own is not None:
                    self._add_own(grad, own)

    def _add_own(self, grad: ParamGrad, own: torch.Tensor) -> None:
        """Add what autograd, or the user, has given to the sharded parameter itself: no other rank has a part in it."""
        if self._is_main_in_slot:
            if not grad.is_written:
                grad.in_slot.zero_()
                grad.is_written = True
            grad.in_main.add_(own, alpha=self._shard.layout.world_size)  # of which the mean is taken
        else:
            grad.in_main.add_(own)
        grad.is_kept = True

    def _watch_own(self, grad: ParamGrad) -> None:
        """While a stand-in is held, autograd adds to it in place: to what it stands for, of which the mean is taken."""
        param = grad.shard.param
        trains = param.requires_grad
        param.requires_grad_(True)  # a frozen one has a node too, for when it trains again
        node = torch.autograd.graph.get_gradient_edge(param).node
        param.requires_grad_(trains)
        grads_of, factor, param_index = weakref.ref(self), self._shard.layout.world_size, self.params.index(grad)

        def scale(values: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            grads = grads_of()
            if grads is None or values[0] is None or not grads._is_main_in_slot:
                return None
            grad = grads.params[param_index]
            if grad.stand_in is None or grad.shard.param.grad is not grad.stand_in:
                return None
            return (values[0] * factor,)

        node.register_prehook(scale)
        grad.node = node


def _forgetting(grad: ParamGrad) -> Callable[[], None]:
    """`ParamGrad.forget`, for what the parameter holds, which must not keep what keeps the parameter."""
    grad_of = weakref.ref(grad)

    def forget() -> None:
        if (alive := grad_of()) is not None:
            alive.forget()

    return forget


def _own_references() -> int:
    """What `sys.getrefcount` says of what only an attribute and a local name have: Python's versions differ."""

    class Holder:
        __slots__ = ("held",)
        held: object

    holder = Holder()
    holder.held = object()
    held = holder.held
    return sys.getrefcount(held)


_OWN_REFERENCES = _own_references()
