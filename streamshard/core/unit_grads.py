"""The gradients of one unit, from autograd to ``.grad``.

    autograd -collect-> gradient slot -`Unit.start_reduce`-> main grads -give-> ``.grad``

New gradients wait where autograd has made them: in ``.grad`` of unsharded parameters, in their own dtype, until the
unit's backward is over. Then one call copies them into the slot. A tied head's gradient comes before ([Note: tied
weights] in `streamshard.core.tied`). See [Note: slots] in `streamshard.planning.memory`.

[Note: two gradients of one parameter]
Within one backward autograd adds the gradients of a parameter, in the parameter's compute dtype, as under DDP and
FSDP2: uses in one graph, and everything else that comes before the unit's reduction. Everything that comes after it
(another pass, another backward) is a reduction of its own, and is added to main grads in fp32.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Sequence
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import StreamName
from streamshard.core.params import FlatParam, Lookup, Param, use_of
from streamshard.core.slots import GradSlot
from streamshard.errors import StateError
from streamshard.guards.sharded_parameter import drop_unreduced, keep_unreduced
from streamshard.guards.sharded_tensor import WHY_EARLIER, Life, ShardedTensor
from streamshard.torch_private import AsTensors, get_grad, set_grad, storage_uses, tensor_uses

# Measured as `_renew` counts: interpreters differ in how often a call refers to its argument.
_REFERENCES = 1 + max(map(getrefcount, [object()]))  # to `Param.given` in Python: in the parameter and a list
_ATTRIBUTES = 2  # of a gradient: its piece and its life
_is_there = partial(operator.is_not, None)
_sharded_of, _given_of, _was_given, _main_grads_of = map(
    operator.attrgetter, ("sharded", "given", "was_given", "main_grads")
)
_lookup_grad_of = operator.attrgetter("grad")
_RANGES = 8  # of rows of an embedding: one range of its gradient exists at a time


class GradState(enum.IntEnum):
    """What a unit's main grads hold. New gradients, and those in its slot (`GradSlot.content`), are beside them."""

    GIVEN = enum.auto()
    """``.grad`` of parameters is their part of main grads, or None. So it is between backwards, if none wait."""
    EMPTY = enum.auto()
    """In backwards until gradients are given: main grads hold nothing, so the next reduction overwrites them."""
    FILLED = enum.auto()
    """As before: main grads hold ``.grad`` from before, or earlier reductions, to which the next one adds."""


GRAD_TRANSITIONS = {
    GradState.GIVEN: (GradState.EMPTY, GradState.FILLED),
    GradState.EMPTY: (GradState.FILLED,),
    GradState.FILLED: (GradState.FILLED, GradState.GIVEN),
}


class UnitGrads:
    """See the module.

    Args:
        index: of the unit.
        trained: its flat parameters that train.
        slot: its gradient slot.
        ranks: the shard group.

    Attributes:
        params: the parameters whose gradient has memory; the unit fills it.
        state: see `GradState`.
        has_unreduced: an earlier backward has left gradients unreduced, on this rank or on another one.
        early: the parameters whose gradient this backward has given already.
    """

    def __init__(self, index: int, trained: Sequence[FlatParam], slot: GradSlot, ranks: Communicator) -> None:
        self.index, self.trained, self.slot = index, trained, slot
        self.params: list[Param] = []
        self.state = GradState.GIVEN
        self.has_unreduced = False
        self._ranks = ranks
        self.early: set[Param] = set()
        self._dropping = [flat for flat in trained if flat.may_drop]
        self._has_memory = not self._dropping
        self._life = Life()  # of the gradients that parameters have now

    def __del__(self) -> None:
        """If the model goes in the middle of a backward, reductions may still write main grads on other streams."""
        if self.state is not type(self.state).GIVEN:  # at exit names of modules may be gone
            for flat in self._dropping:
                self._ranks.streams.keep(flat.main_grads)

    def move(self, state: GradState) -> None:
        """Go over to `state`.

        Raises:
            StateError: the table has no such transition.
        """
        if state not in GRAD_TRANSITIONS[self.state]:
            what = f"the gradients of {self.slot.drained.what}"
            raise StateError(what, self.state.name, f"a state before {state.name}")
        self.state = state

    def drop(self) -> None:
        """A forward begins. Without gradients, main grads need no memory until the next reduction."""
        if not (self._dropping and self._has_memory) or self.has_unreduced:
            return
        with AsTensors():
            if any(map(_is_there, map(get_grad, map(_sharded_of, self.params)))):
                return
        is_shared = not self._renew()  # before the memory goes: others may hold it
        self._has_memory = False
        for grads in map(_main_grads_of, self._dropping):
            if is_shared:  # leave the memory to others
                grads.data = torch.empty_like(grads)
            grads.untyped_storage().resize_(0)

    def make_memory(self) -> None:
        """Main grads are about to be written. On the compute stream: it has waited for their last use, see `drop`."""
        if not self._has_memory:
            self._has_memory = True
            for grads in map(_main_grads_of, self._dropping):
                grads.untyped_storage().resize_(grads.nbytes)

    # -- a backward -----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """A backward begins, and gradients wait: forget those that the user has dropped (``zero_grad()``)."""
        for param in self.params:
            # Also what only other ranks have made: this rank has its shard.
            if param.is_left and not drop_unreduced(param.sharded):
                param.is_left = False
                param.forget_grad(in_slot=self.slot.content is not None)

    def collect(self, others: Collection[Any]) -> None:
        """Copy new gradients into the slot, and zeros for the others (rule 3). Compute stream.

        Args:
            others: further streams of the device on which some gradients were made.
        """
        current: Any = self._wait_for(others) if others else None
        if self.state is GradState.GIVEN:
            self._take_back()
        is_empty = self.slot.content != self.index
        if is_empty:
            self.slot.open(self.index)
            if self.state is GradState.FILLED:
                self._leave_slot()
        # On one rank main grads may lie in the slot, and are added to there.
        is_filled = self.state is GradState.FILLED and any(flat.is_main_in_slot for flat in self.trained)
        adds = is_filled or not is_empty
        made: list[Param] = []
        grads: list[torch.Tensor] = []
        absent: list[torch.Tensor] = []
        beside: list[torch.Tensor] = []  # read here, too
        with AsTensors():
            for param in self.params:
                if (grad := get_grad(param.unsharded)) is not None:
                    set_grad(param.unsharded, None)
                if param.lookups or param.is_tied_written:
                    beside += self._write_parts(param, grad, adds=adds)
                elif grad is None:
                    absent.append(param.in_slot)
                    continue
                else:
                    made.append(param)
                    grads.append(grad)
                param.is_used = True
        if absent and not adds:  # the places of frozen parameters too: main grads may be kept and added to
            torch._foreach_zero_(absent)
        write_grads(made, grads, adds=adds)
        # Else the allocator lends the memory to the stream that made it before these copies have read it.
        for grad in (*grads, *beside) if others else ():
            grad.record_stream(current)

    def _write_parts(self, param: Param, grad: torch.Tensor | None, *, adds: bool) -> list[torch.Tensor]:
        """Write a gradient made in parts: early (of a tied head), by look-ups, and `grad`. Returns the tensors read."""
        parts = list(map(_lookup_grad_of, param.lookups))
        if param.is_tied_written and grad is not None:
            self.write_tied(param, grad, ())
            parts.append(grad)
        if param.lookups:
            dense = param.in_slot if param.is_tied_written else grad
            write_lookups(param.in_slot, param.lookups, dense, adds=adds)
        param.is_tied_written = False
        return parts

    def write_tied(self, param: Param, grad: torch.Tensor, others: Collection[Any]) -> None:
        """Write a gradient of `param`, or add it, in the place of its weight, which nobody needs any more.

        The other weights of the unit stay. `collect` adds what comes later. See there for the arguments.
        """
        current: Any = self._wait_for(others) if others else None
        if self.slot.weights is not None:
            self.slot.weights.shard_read.complete()  # rule 6
        param.in_slot.add_(grad) if param.is_tied_written else param.in_slot.copy_(grad)
        param.is_tied_written = param.is_used = True
        if others:
            grad.record_stream(current)

    def _wait_for(self, others: Collection[Any]) -> Any:
        current: Any = self._ranks.streams.device_stream(StreamName.COMPUTE)
        for stream in others:
            current.wait_stream(stream)
        return current

    def _take_back(self) -> None:
        """Take ``.grad`` of all parameters, until `give`. Autograd may put another gradient there (of a penalty)."""
        with AsTensors():
            held = list(map(get_grad, map(_sharded_of, self.params)))
            if not any(map(_is_there, held)):
                self._renew()
                self.move(GradState.EMPTY)
                return
            self.make_memory()  # a new `.grad` of the user's is copied there
            is_exchanged = False  # the user has put another tensor in the place of a gradient that was given, or None
            for param, grad in zip(self.params, held, strict=True):
                param.is_kept = grad is not None
                is_exchanged |= param.was_given if grad is None else not param.adopt_grad(grad)
                set_grad(param.sharded, None)
            if is_exchanged:
                self._end_life()
        self.move(GradState.FILLED)
        for param in self.params:
            if not param.is_kept:
                param.clear_main_grad()

    def _leave_slot(self) -> None:
        """Main grads that lie in the slot are added to. Move them to memory of their own, unless they are all of it."""
        if self._ranks.grad_divisor == 1.0 and all(flat.layout.is_whole for flat in self.trained):
            return  # else the next reduction would divide earlier gradients again
        for flat in (moved := [flat for flat in self.trained if flat.is_main_in_slot]):
            flat.leave_slot()
            for param in flat.params:
                flat.place_grad(param)
        if moved:
            self._end_life()

    def _renew(self) -> bool:
        """No parameter has ``.grad``. Its tensors serve again, unless others refer to one, or have marked it.

        Returns:
            Whether nobody else refers to their memory either.
        """
        if not any(map(_was_given, self.params)):
            return True
        with AsTensors():
            given = list(filter(_is_there, map(_given_of, self.params)))
            own = len(self.trained) + len(given)  # tensors in the memory of main grads
            is_alone = sum(map(storage_uses, map(_main_grads_of, self.trained))) == own
            is_alone = is_alone and {*map(getrefcount, given)} == {_REFERENCES}
            is_alone = is_alone and {*map(tensor_uses, given)} == {1}  # by graphs; torch 2.13 counts both
            is_alone = is_alone and {*map(len, map(vars, given))} == {_ATTRIBUTES}
        if not is_alone:
            self._end_life()
        for param in self.params:
            param.was_given = False
        return is_alone

    def _end_life(self) -> None:
        """Gradients of the unit that the user still holds raise from now on."""
        self._life.why_over = WHY_EARLIER
        self._life = Life()
        for param in self.params:
            param.given, param.was_given = None, False

    # -- the end of a backward ------------------------------------------------------------------------------------

    def may_have_grad(self, param: Param) -> bool:
        """Whether any rank may have a gradient of `param`: it is trainable, or has unreduced gradients.

        Inside `AsTensors`, because the unsharded parameter may be absent.
        """
        return param.has_room and (self.has_unreduced or param.unsharded.requires_grad)

    @property
    def may_give_early(self) -> bool:
        """Gradients may be given, and main grads dropped, before the end of the backward. Never over sockets."""
        return bool(self.trained) and self._dropping == self.trained and self.slot.weights is not None

    def give_early(self) -> list[nn.Parameter]:
        """Make main grads, which are reduced, ``.grad`` of the parameters that this rank has used. Returns these."""
        with AsTensors():
            used = [param for param in self.params if param.is_used and self.may_have_grad(param)]
            for param in used:
                self._give_to(param)
                param.is_kept = False  # `is_used` stays: other ranks are told
        self.early.update(used)
        return [param.sharded for param in used]

    def drop_early(self) -> None:
        """Drop main grads, if the gradients of all parameters were given early, and cleared."""
        with AsTensors():
            is_over = all(param in self.early or not self.may_have_grad(param) for param in self.params)
        if is_over:
            self.drop()

    def _give_to(self, param: Param) -> None:
        """Make `given` ``.grad``. A gradient that autograd has put there meanwhile (of a penalty) is added.

        Inside `AsTensors`.
        """
        if param.given is None:  # kept over steps: to make and free it takes a quarter of a layer's host time
            param.given = ShardedTensor.wrap(param.main_grad, param.grad_piece, self._life)
        if (own := get_grad(param.sharded)) is not None:
            param.piece.settle()
            param.given.add_(own)
        set_grad(param.sharded, param.given)
        param.was_given = True

    def give(self, params: Sequence[Param], used: Sequence[bool] | None) -> list[nn.Parameter]:
        """Make main grads ``.grad`` of parameters that held one, or that ranks have used.

        Args:
            params: all parameters of the unit.
            used: which of them any rank has used; None: the same as this rank.

        Returns:
            The used ones.
        """
        new = []
        with AsTensors():
            for param, is_used in zip(params, used or map(use_of, params), strict=True):
                is_new = is_used and param not in self.early and (used is None or self.may_have_grad(param))
                if is_new or param.is_kept:
                    self._give_to(param)
                if is_new:
                    new.append(param.sharded)
                param.is_used = param.is_kept = param.is_left = False
        self.early.clear()
        self.move(GradState.GIVEN)
        self.has_unreduced = False
        return new

    def leave(self, *, is_trainable: bool) -> None:
        """End a backward with gradients left in the slot, or with sums that were not reduced over replicas."""
        self.has_unreduced = self.has_unreduced or is_trainable
        if self.state is GradState.GIVEN:
            return
        in_slot = self.slot.content is not None
        for param in self.params:
            with AsTensors():
                trains = param.unsharded.requires_grad
            # In main grads without one here too: other ranks may have one.
            if param.is_left or param.is_kept or param.is_used or (trains and not in_slot):
                param.is_left = True
                keep_unreduced(param.sharded)

    def discard(self, params: Sequence[Param]) -> None:
        """The backward has failed: discard all gradients of the unit, and free the slot."""
        for param in params:
            with AsTensors():
                set_grad(param.unsharded, None)
            param.is_used = param.is_kept = param.is_tied_written = param.is_left = False
            param.lookups.clear()
            if param.has_room and param.sharded.grad is param.given:
                param.sharded.grad = None
        self.early.clear()
        self.state, self.has_unreduced = GradState.GIVEN, False  # whatever they were
        if self.slot.content == self.index:
            self.slot.content = None


def write_grads(params: Sequence[Param], grads: Sequence[torch.Tensor], *, adds: bool) -> None:
    """Copy gradients [full shape] into the slot of their unit, or add them to the gradients there.

    Args:
        params: of one unit, whose slot is open.
        grads: one for each.
        adds: to the gradients in the slot.
    """
    # Of mixed dtypes one call would launch a kernel for each tensor.
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for param, grad in zip(params, grads, strict=True):
        if param.form.inner:
            grad = param.form.local_grad(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        places, given = alike.setdefault((param.in_slot.dtype, grad.dtype), ([], []))
        places.append(param.in_slot)
        given.append(grad)
    for places, given in alike.values():
        torch._foreach_add_(places, given) if adds else torch._foreach_copy_(places, given)


def write_lookups(place: torch.Tensor, lookups: list[Lookup], dense: torch.Tensor | None, *, adds: bool) -> None:
    """Write the gradient of an embedding's weight into its slot, range by range. Frees `lookups`.

    torch makes it as large as the weight, with a row of zeros for each token that the batch does not have. It would be
    the largest tensor of a backward's end. The same kernel makes one range of rows at a time: each row has the same
    bits.

    Args:
        place: [rows, width], in the slot.
        lookups: of the weight, in the order of backward.
        dense: [rows, width], the gradient of other uses of the weight, such as a tied head; changed. `place` itself if
            this gradient is there already.
        adds: to the gradient in the slot.
    """
    step = max(1, -(-len(place) // _RANGES))
    for first in range(0, len(place), step):
        part = place[first : first + step]
        others = len(part)  # one row more, for the tokens outside of the range
        total = None if dense is None else dense[first : first + step]
        for grad, indices, padding in lookups:
            local = indices - first
            local = local.masked_fill((local < 0) | (local >= others) | (indices == padding), others)
            # As its padding row the kernel leaves out the last one.
            made = torch.ops.aten.embedding_dense_backward(grad, local, others + 1, others, False)[:others]
            total = made if total is None else total.add_(made)
        assert total is not None
        if dense is not place:
            part.add_(total) if adds else part.copy_(total)
        del total, made  # before the next range is made
    lookups.clear()
