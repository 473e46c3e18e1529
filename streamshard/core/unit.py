"""One unit: the parameters that are cast, all-gathered, reduced and given together. One method per step of their way.

    main weights -start_gather-> weight slot -set_bound-> forward, backward -release->
    autograd -write, collect-> gradient slot -start_reduce-> main grads -give-> ``.grad`` -optimizer-> main weights

The unit knows how to do each step, `streamshard.core.engine` and its passes know when. Large gradients are written to
the slot as soon as autograd has made them. Small ones stay in ``.grad`` of unsharded parameters until one call copies
them all. If another unit needs the slot in between, gradients are spilled. See [Note: slots], [Note: ordering rules].

[Note: earlier gradients]
A backward adds to the gradients that parameters hold when it begins (``.grad``), and to its own earlier reductions.

    main grads hold              where                 a gradient is        a reduction
    nothing                      anywhere              copied to the slot   overwrites main grads
    earlier gradients (_adds)    memory of their own   copied to the slot   adds to main grads
    the same (_adds_in_slot)     they are the slot     added to the slot    leaves them, on one rank
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import StepEvent, Work
from streamshard.comm.transport import Reduction
from streamshard.core.params import FlatParam, GradState, Param, move_all, use_of, write_all
from streamshard.core.slots import GradSlot, SlotState, WeightSlot, WeightState
from streamshard.guards.sharded_parameter import drop_unreduced, keep_unreduced
from streamshard.guards.sharded_tensor import WHY_EARLIER, Life
from streamshard.guards.weights import WeightGuard
from streamshard.planning.layout import UnitLayout
from streamshard.torch_private import AsTensors, get_grad, set_grad

if TYPE_CHECKING:
    from streamshard.core.host import HostState

# Upper limit for the small gradients of one unit. They need this memory in addition to the slot.
_COLLECTED_BYTES = 1 << 20

_versions_of, _trains_of = operator.attrgetter("_version"), operator.attrgetter("requires_grad")


class Unit:
    """The parameters of a repeated layer, of several small layers, or of the root unit. Owns no buffers.

    A unit is *bound* while its modules hold unsharded parameters: while one of its layers runs, and in backward from
    the first use of its weights until its reduction.

    Args:
        index: position in the engine's list of units; index 0 is the root unit.
        layout: the unit's flat parameters, and where they lie.
        flat_params: this rank's part of each flat parameter; `FlatParam.add` fills them later.
        weight_slot: the all-gather writes the weights there.
        grad_slot: backward writes the gradients there.
        ranks: the shard group.
        is_streamed: the unit shares the block slots; else it is resident and has a weight slot of its own.
        host: the unit's state lies in host memory; None: it lies on the device.

    Attributes:
        name: fully qualified name of the module, for messages.
        params: this rank's part of each parameter, in the order of the flat parameters; filled by `make_unsharded`.
        trained: the flat parameters that train.
        is_bound: modules hold the unsharded parameters, else the sharded parameters.
        is_trainable: a parameter requires a gradient, and has room for it; see `copy_trainability`.
        is_sent_as_is: an all-gather reads main weights themselves, which are not cast.
        versions_sent: `versions` at the last all-gather; with ``offload`` at the last cast. Empty: unknown.
        has_small_grads: autograd has left small gradients of this backward in ``.grad`` of unsharded parameters.
        has_taken: this backward has moved ``.grad`` of parameters into main grads.
        has_spilled: gradients are in copies, because another unit has taken the slot.
        has_unreduced: an earlier backward has left gradients unreduced, on this rank or on another one.
        guard: refuses reads of weights that are absent, and writes to weights.
        gathering, reducing: contexts around the unit's collectives, and around waits for them.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        flat_params: Sequence[FlatParam],
        weight_slot: WeightSlot,
        grad_slot: GradSlot,
        ranks: Communicator,
        *,
        is_streamed: bool,
        host: HostState | None = None,
    ) -> None:
        self.index, self.layout, self.flat_params, self.host = index, layout, tuple(flat_params), host
        self.weight_slot, self.grad_slot, self.ranks, self.is_streamed = weight_slot, grad_slot, ranks, is_streamed
        self.name = layout.name or "the root unit"
        self.params: list[Param] = []
        self.is_bound = self.is_trainable = False
        self.is_sent_as_is = any(flat.gather.cast_to is None and not flat.is_on_host for flat in self.flat_params)
        self.has_small_grads = self.has_taken = self.has_spilled = self.has_unreduced = False
        self.guard = WeightGuard(weight_slot.is_shared)
        self.gathering = ranks.waiting("the gather of", self.name)
        self.reducing = ranks.waiting("the reduction of", self.name)
        self._streams = ranks.streams
        self._sharded: list[nn.Parameter] = []  # the user's parameters, in the order of `params`
        self._trains: list[bool] = []  # ``requires_grad`` of unsharded parameters
        self.versions_sent: list[int] = []
        # Entries of a module's `__dict__`: module, key, value while sharded, value while bound. Weak: models own units.
        self._bindings: list[tuple[weakref.ref[nn.Module], str, tuple[object, object]]] = []
        self.trained = [flat for flat in self.flat_params if flat.kind.trains]
        self._with_room: list[Param] = []  # params whose gradient has memory
        self._life = Life()  # of the gradients that parameters have now
        self._adds = False  # see [Note: earlier gradients]
        self._adds_in_slot = False

    def make_unsharded(self) -> None:
        """Make the unsharded parameters, views of the slot, and choose the small ones."""
        small_bytes = 0
        for flat in self.flat_params:
            for param in flat.params:
                flat.make_unsharded(param, self.guard)
                self.params.append(param)
                if param.has_room:
                    self._with_room.append(param)
                    param.is_small = small_bytes + param.unsharded.nbytes <= _COLLECTED_BYTES
                    small_bytes += param.unsharded.nbytes * param.is_small
        self._sharded = [param.sharded for param in self.params]
        self._trains = [not param.form.is_packed for param in self.params]
        if not self.params:  # nothing will ever be gathered
            self.weight_slot.move(WeightState.ARRIVING, self.index)

    def add_binding(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        """While the unit is bound, ``owner.__dict__[key]`` is `computing`, else `sharded`."""
        self._bindings.append((weakref.ref(owner), key, (sharded, computing)))

    # -- weights --------------------------------------------------------------------------------------------------

    def expire(self, *, trusts_versions: bool) -> None:
        """A pass begins: the weights are gathered anew, if they may have changed.

        Args:
            trusts_versions: weights of the same versions have not changed. Versions miss writes through ``.data`` on
                one rank, and by kernels that take an address.
        """
        if self.weight_slot.content != self.index or not self.params:  # another unit's weights stay
            return
        if not trusts_versions or self.versions_sent != self.versions():
            self.weight_slot.move(WeightState.EMPTY, None)

    def expire_stepped(self, params: Collection[Param]) -> None:
        """A late step of `params` is due. It writes the all-gather input on the host too, which needs no cast then."""
        was_cast = self.versions_sent == self.versions()
        with AsTensors():
            torch.autograd.graph.increment_version([param.sharded for param in params])
        self.expire(trusts_versions=True)
        if was_cast:
            self.versions_sent = self.versions()

    def start_gather(self, *, notes_versions: bool) -> None:
        """Start the all-gather, which casts the weights, into the weight slot. The slot is this unit's from here on.

        Args:
            notes_versions: for `expire`.
        """
        slot, transport = self.weight_slot, self.ranks.transport
        self._streams.observe(StepEvent.GATHER_BEGINS, self.index)
        slot.released.wait()  # rule 2
        slot.arrived.complete()  # a unit that was all-gathered and then skipped: its messages are still under way
        slot.read.complete()  # rule 6
        slot.move(WeightState.ARRIVING, self.index)
        if self.host is not None:
            self.host.fetch(self)
        else:
            self.versions_sent = self.versions() if notes_versions else []
        works: list[Work | None] = []
        for flat in self.flat_params:
            works.append(flat.ranks.transport.start_gather(flat.gather))
        slot.arrived.record(*works)
        slot.read.record(*transport.readers(works))
        self._streams.observe(StepEvent.GATHER_ENDS, self.index)

    def wait_until_ready(self) -> None:
        """Let the compute stream wait until the weights are in the slot."""
        slot = self.weight_slot
        with self.gathering:
            slot.arrived.wait()  # rule 1
        if slot.state is WeightState.ARRIVING:
            for flat in self.flat_params:
                if flat.gathered is not flat.weights:
                    flat.weights.copy_(flat.gathered)
        slot.move(WeightState.READY, self.index)

    def set_bound(self, is_bound: bool) -> None:
        """Let the unit's modules hold the unsharded parameters, or the sharded ones. A second call does nothing."""
        if is_bound is self.is_bound:
            return
        self.is_bound = is_bound
        if self.is_streamed:
            self.guard.set_present(is_bound)
        for owner_of, key, values in self._bindings:
            if (owner := owner_of()) is not None:
                owner.__dict__[key] = values[is_bound]

    def release(self) -> None:
        """Reshard: modules hold the sharded parameters again, and the slot is free when compute has come here."""
        self.set_bound(False)
        self.weight_slot.released.record()

    def copy_trainability(self) -> None:
        """Copy ``requires_grad`` from the sharded to the unsharded parameters.

        Called in forward and in backward: in torch a parameter gets a gradient if it required one in both.
        """
        with AsTensors():  # an AbsentWeight would answer for the sharded parameter
            wanted = list(map(_trains_of, self._sharded))
            if wanted != self._trains:
                for param, trains in zip(self.params, wanted, strict=True):
                    param.unsharded.requires_grad_(trains)
                self._trains = wanted
        self.is_trainable = bool(self.trained) and any(wanted)

    def end_use(self) -> None:
        """Layers have computed in a forward: take over changes of ``requires_grad``, and refuse writes to weights."""
        with AsTensors():
            trains = list(map(_trains_of, self.guard.views))
            if trains != self._trains:
                for param, wanted in zip(self._sharded, trains, strict=True):
                    param.requires_grad_(wanted)
                self._trains = trains
        self.guard.end_use()

    def versions(self) -> list[int]:
        """A number per sharded parameter that grows with each in-place change of it, such as an optimizer's step."""
        with AsTensors():
            return list(map(_versions_of, self._sharded))

    # -- gradients ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the gradient slot is this unit's: its gradients are written there, or wait there."""
        return self.grad_slot.content == self.index

    def open(self) -> None:
        """Make the gradient slot this unit's (rule 3). Compute stream.

        Gradients that parameters hold from an earlier backward move into the main grads first, to be added to.
        """
        if not self.has_taken:
            self.has_taken = True
            self._take()
        self.grad_slot.open(self.index)
        if self._adds:
            self._leave_slot()
        self._adds_in_slot = self._adds and any(flat.is_main_in_slot for flat in self.trained)
        if self.has_spilled:
            self.has_spilled = False
            params = [param for param in self._with_room if param.state is GradState.SPILLED]
            self.write(params, [param.pop_spilled() for param in params])

    def _take(self) -> None:
        """Take ``.grad`` of all parameters, until `give`. Autograd may put another gradient there (of a penalty)."""
        are_same = True
        self._adds = False
        given = []
        with AsTensors():
            for param in self._with_room:
                are_same = param.take_grad() and are_same
                self._adds = self._adds or param.is_kept
                if param.state is GradState.GIVEN:
                    given.append(param)
        move_all(given, GradState.NONE)
        if not are_same:
            self._renew()
        if self._adds:
            for param in self._with_room:
                if not param.is_kept:
                    param.clear_main_grad()

    def _leave_slot(self) -> None:
        """Main grads that lie in the slot are added to. Move them to memory of their own, unless they are all of it."""
        if self.ranks.grad_divisor == 1.0 and all(flat.layout.is_whole for flat in self.trained):
            return  # else the next reduction would divide earlier gradients again
        for flat in (moved := [flat for flat in self.trained if flat.is_main_in_slot]):
            flat.leave_slot()
            for param in flat.params:
                flat.place_grad(param)
        if moved:
            self._renew()

    def _renew(self) -> None:
        """Gradients of the unit that the user still holds raise from now on."""
        self._life.why_over = WHY_EARLIER
        self._life = Life()
        for param in self._with_room:
            param.given = None

    def write(self, params: Sequence[Param], grads: Sequence[torch.Tensor]) -> None:
        """Copy gradients [full shapes] into the open slot. Their only copy. Compute stream."""
        self.grad_slot.add_writer()
        write_all(params, grads, adds=self._adds_in_slot)
        self._streams.observe(StepEvent.GRAD_WRITTEN, self.index)

    def collect(self, stream: Any) -> None:
        """Copy the small gradients that autograd has left, if there are any, into the slot, which is open.

        Args:
            stream: the device's stream that has made them. The allocator gives their memory back to this stream.
        """
        if not self.has_small_grads:
            return
        self.has_small_grads = False
        left, grads = [], []
        with self._streams.on_device_stream(stream):
            with AsTensors():
                for param in self._with_room:
                    if (grad := get_grad(param.unsharded)) is not None:
                        set_grad(param.unsharded, None)
                        left.append(param)
                        grads.append(grad)
            self.write(left, grads)

    def spill(self) -> None:
        """Copy gradients out of the slot, which another unit needs, until this unit opens it again. Compute stream.

        Happens if a unit's layers run before and after another unit's layers in the same slot.
        """
        self.grad_slot.wait_for_writers()
        self.grad_slot.move(SlotState.FREE, None)
        self.has_spilled = True
        for param in self._with_room:
            if param.state is GradState.IN_SLOT:
                param.spill()

    def start_reduce(self) -> list[Work | None]:
        """Start the reduction from slot to main grads (rule 4). Parameters without a gradient contribute zeros."""
        slot = self.grad_slot
        self._streams.observe(StepEvent.REDUCTION_BEGINS, self.index)
        slot.add_writer()
        written = []
        for param in self._with_room:
            if param.state is GradState.IN_SLOT:
                written.append(param)
            elif not self._adds_in_slot:  # the range of a frozen parameter too: main grads may be kept and added to
                param.in_slot.zero_()
        move_all(written, GradState.REDUCED)
        slot.finish_writing()
        staging = () if self.host is None else self.host.begin_reduction(self, adds=self._adds)
        works = []
        for place, flat in enumerate(self.trained):
            out = staging[place] if staging else flat.main_grads
            given = flat.grads, out, flat.scratch, flat.kind.mode, self._adds, flat.tag
            works.append(flat.ranks.transport.start_reduce(Reduction(*given, self.ranks.grad_divisor)))
        if self.host is not None:
            self.host.end_reduction(self, staging)
        self._adds = True
        slot.drain(works)
        self._streams.observe(StepEvent.REDUCTION_ENDS, self.index)
        return works

    def give(self, used: Sequence[bool] | None) -> list[nn.Parameter]:
        """Make main grads ``.grad`` of parameters that held one, or that ranks have used.

        Args:
            used: which of the parameters any rank has used; None: the same as this rank.

        Returns:
            The used ones.
        """
        given, new = [], []
        with AsTensors():
            for param, is_used in zip(self.params, used or map(use_of, self.params), strict=True):
                param.is_used = False
                if not param.has_room:
                    continue
                is_new = is_used and (self.has_unreduced or param.unsharded.requires_grad)
                if self.has_taken and (param.is_kept or is_new):
                    param.give_grad(self._life)
                    given.append(param)
                    if is_new:
                        new.append(param.sharded)
                elif param.state is GradState.REDUCED:  # frozen in backward
                    move_all((param,), GradState.NONE)
        move_all(given, GradState.GIVEN)
        self.has_taken = self.has_unreduced = False
        return new

    def may_have_grad(self, param: Param) -> bool:
        """Whether any rank may have a gradient of the parameter: it is trainable, or has unreduced gradients."""
        with AsTensors():  # the unsharded parameter may be absent
            return param.has_room and (self.has_unreduced or param.unsharded.requires_grad)

    def discard_grads(self) -> None:
        """The backward has failed: discard all gradients of the unit, and free the slot."""
        for param in self.params:
            with AsTensors():
                set_grad(param.unsharded, None)
            param.discard_grad()
        self.has_small_grads = self.has_taken = self.has_spilled = self.has_unreduced = False
        if self.is_open:
            self.grad_slot.move(SlotState.FREE, None)

    def leave_unreduced(self) -> None:
        """End a backward with gradients left in the slot, or in main grads that replicas have not averaged."""
        self.has_unreduced = self.has_unreduced or self.is_trainable
        if not self.has_taken:
            return
        for param in self._with_room:
            with AsTensors():
                trains = param.unsharded.requires_grad
            if self.is_open and param.state is not GradState.IN_SLOT:
                if not param.is_kept:
                    continue
                param.in_slot.zero_()
            elif not (param.is_kept or trains or param.state is not GradState.NONE):
                continue  # frozen
            move_all((param,), GradState.UNREDUCED)  # in main grads without one here too: other ranks may have one
            keep_unreduced(param.sharded)
        if self.is_open:
            self.grad_slot.move(SlotState.HELD, self.index)

    def resume(self) -> None:
        """A backward begins: add to waiting gradients; forget them if the user has dropped them (``zero_grad()``)."""
        if not self.has_unreduced:
            return
        if self.is_open:
            self.grad_slot.move(SlotState.OPEN, self.index)
        for param in self._with_room:
            if param.state is GradState.UNREDUCED:
                if drop_unreduced(param.sharded):
                    move_all((param,), GradState.IN_SLOT if self.is_open else GradState.REDUCED)
                else:
                    param.forget_grad()
