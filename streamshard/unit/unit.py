"""StreamedUnit: one unit's journey, its methods in the order of travel.

    main weights -cast-> compute shard -all-gather-> weight slot -forward, backward->
    grad slot -reduce-scatter (mean)-> main grads -optimizer-> main weights

The unit knows how each step is done, the engine knows when. See [Note: slots] and [Note: ordering rules].
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from streamshard.comm.streams import Work
from streamshard.comm.transport import Reduction, Transport
from streamshard.errors import ShardingError, StateError
from streamshard.plan.structure import refuse_step_in_backward
from streamshard.unit.buffers import GradSlot, WeightSlot
from streamshard.unit.pieces import HeldGrad
from streamshard.unit.shard import UnitShard

__all__ = ["Member", "StreamedUnit", "take_grad"]


class _Binding:
    """Two versions of one entry of a module's ``__dict__``: sharded and computing.

    Swapping a module's whole ``_parameters`` dict is one assignment, whatever the number of parameters.
    """

    __slots__ = ("computing", "key", "owner", "sharded")

    def __init__(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        self.owner = weakref.ref(owner)  # which holds all of this: a model goes when nobody has it any more
        self.key = key
        self.sharded = sharded
        self.computing = computing


class Member:
    """One layer of a unit, with all modules inside it: what is bound while that layer's forward runs.

    Args:
        unit: whose weights it computes with.
    """

    __slots__ = ("_bindings", "_unit_of", "is_bound")

    def __init__(self, unit: StreamedUnit) -> None:
        self._unit_of = weakref.ref(unit)  # which holds this
        self.is_bound = False
        self._bindings: list[_Binding] = []

    @property
    def unit(self) -> StreamedUnit:
        """Whose weights it computes with."""
        unit = self._unit_of()
        if unit is None:
            raise StateError("a layer", "without its unit", "a model that is alive")
        return unit

    def add_binding(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        """While it is bound, ``owner.__dict__[key]`` is `computing`, else `sharded`."""
        self._bindings.append(_Binding(owner, key, sharded, computing))

    def bind(self) -> None:
        """Let its modules compute with the slot: compute views take the place of the sharded parameters."""
        if not self.is_bound:
            self.is_bound = True
            unit = self.unit
            unit.bound_members += 1
            unit.is_bound = True
            for binding in self._bindings:
                if (owner := binding.owner()) is not None:
                    owner.__dict__[binding.key] = binding.computing

    def unbind(self) -> None:
        """Its modules hold the sharded parameters again."""
        if self.is_bound:
            self.is_bound = False
            unit = self.unit
            unit.bound_members -= 1
            unit.is_bound = unit.bound_members > 0
            for binding in self._bindings:
                if (owner := binding.owner()) is not None:
                    owner.__dict__[binding.key] = binding.sharded


class StreamedUnit:
    """What is gathered and reduced together: a repeated layer, several small ones, or what is outside (the edge unit).

    A layer's forward binds that member alone. From its need in backward until its reduction a unit is bound as a whole,
    because recomputation calls the modules inside directly.

    Args:
        index: position in the engine's list of units; index 0 is the edge unit.
        name: fully qualified name of its module, for messages.
        shard: this rank's state.
        weight_slot: where its weights are gathered to.
        grad_slot: where its gradients are collected; None with one rank, which writes to the main grads.
        transport: moves its bytes.
        scratch_numel: elements of scratch that its reductions need.

    Attributes:
        weights: [padded_numel] param_dtype, its part of the weight slot.
        views: its compute views, one nn.Parameter per parameter, made once.
        written: which parameters have a gradient in the grad slot in this backward.
        members: its layers; the edge unit has one for all its modules.
        bound_members: how many of them hold the compute views (else the sharded parameters).
        is_bound: whether any does; kept beside the count because it is asked at every saved weight of a backward.
        aside: by place, gradients that had to leave the grad slot before their reduction.
        reductions: how many of its reductions this backward has started.
        has_unreduced: whether gradients were written since the last of them.
        on_grad: called with each complete gradient of a compute view; set by `make_views`.
    """

    def __init__(
        self,
        index: int,
        name: str,
        shard: UnitShard,
        weight_slot: WeightSlot,
        grad_slot: GradSlot | None,
        transport: Transport,
        scratch_numel: int,
    ) -> None:
        self.index = index
        self.name = name
        self.shard = shard
        self.weight_slot = weight_slot
        self.grad_slot = grad_slot
        self.on_grad: Callable[[StreamedUnit, int, torch.Tensor], None]
        self.views: list[nn.Parameter] = []
        self._params: list[nn.Parameter] = []  # the sharded ones, in the same order
        self.written: list[bool] = []
        self.used: list[bool] = []
        self.aside: dict[int, torch.Tensor] = {}
        self.reductions = 0
        self.has_unreduced = False
        self._has_taken = False  # whether this backward has taken over what parameters held
        self._adds = False  # whether main grads hold something that the next reduction adds to
        self._held: list[HeldGrad | None] = []  # by parameter, what stands for gradients left in the slot
        # By place, of parameters that have been held: their graph nodes, which live and keep their hook while these do.
        self._own_grad_hooks: dict[int, Any] = {}
        self.members: list[Member] = []
        self.bound_members = 0
        self.is_bound = False
        self.is_trainable = False
        self._transport = transport
        self._grad_views: list[torch.Tensor] = []
        self.weights = weight_slot.buffer.narrow(0, 0, shard.layout.padded_numel)
        self._seen_version = 0  # of the compute views, which share one counter
        self._grads: torch.Tensor | None = None  # its part of the grad slot
        self._main_grads_are_in_slot = False
        self.scratch_numel = scratch_numel

    # -- construction ---------------------------------------------------------------------------------------------

    def make_views(self, on_grad: Callable[[StreamedUnit, int, torch.Tensor], None]) -> None:
        """Make the compute views; `on_grad` is called with each complete gradient of a view.

        The views are made from an alias of the slot with a version counter of its own: gathers write the slot behind
        autograd's back, on purpose, and must not look like in-place edits of saved tensors.
        """
        self.on_grad = on_grad
        alias = self.weights.data
        for place, param in enumerate(self.shard.params):
            flat = alias.narrow(0, param.layout.offset, param.layout.numel)
            view = nn.Parameter(flat.view(param.layout.shape), requires_grad=True)
            view.register_post_accumulate_grad_hook(_grad_taker(self, place))
            self.views.append(view)
        self._params = [param.param for param in self.shard.params]
        self.written = [False] * len(self.views)
        self.used = [False] * len(self.views)
        self._held = [None] * len(self.views)

    def allocate_grads(self) -> None:
        """Make the main grads, and what gradients are written to, when the unit first trains."""
        layout, slot = self.shard.layout, self.grad_slot
        if slot is None:
            flat = self.shard.place_grad(None)
        else:
            flat = self._grads = slot.allocate().narrow(0, 0, layout.padded_numel)
            self._main_grads_are_in_slot = slot.holds_main_grads
            own = flat.narrow(0, self._transport.rank * layout.shard_numel, layout.shard_numel)
            self.shard.place_grad(own if self._main_grads_are_in_slot else None)
        for param in self.shard.params:
            self._grad_views.append(flat.narrow(0, param.layout.offset, param.layout.numel).view(param.layout.shape))

    def add_member(self) -> Member:
        """Another layer of it, to which bindings are still to be added."""
        self.members.append(Member(self))
        return self.members[-1]

    # -- the journey ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over the weights as the user has left them. Compute stream.

        Raises:
            ShardingError: a parameter has a hook that would never run, or was given memory that cannot be used.
        """
        for param in self.shard.params:
            if param.param._backward_hooks:
                raise ShardingError(
                    f"a hook on parameter {param.name!r} would never run, its gradient is made by a reduction: use "
                    "register_post_accumulate_grad_hook, which is called with the sharded gradient"
                )
            if "_in_backward_optimizers" in param.param.__dict__:
                refuse_step_in_backward(param.name)
        self.shard.cast()
        if self.grad_slot is None and self.shard.compute is not self.weights:
            self._follow_moved_weights()

    def take_trainability(self) -> None:
        """Let compute views need gradients as the sharded parameters do now.

        Asked when a graph is made and when it is differentiated, because both decide in torch: a parameter gets a
        gradient if it needed one in the forward and still does in the backward.
        """
        trainable = False
        for param, view in zip(self._params, self.views, strict=True):
            wanted = param.requires_grad
            trainable = trainable or wanted
            if view.requires_grad is not wanted:
                view.requires_grad_(wanted)
        self.is_trainable = trainable
        if trainable and self.shard.grad is None:
            self.allocate_grads()

    def give_trainability(self) -> None:
        """The unit is about to be released: what was frozen or thawed in a forward stays so."""
        for param, view in zip(self._params, self.views, strict=True):
            if param.requires_grad is not view.requires_grad:
                param.requires_grad_(view.requires_grad)

    def versions(self) -> list[int]:
        """A number per sharded parameter that grows with each in-place change of it, such as an optimizer's step."""
        return [param._version for param in self._params]

    @property
    def has_edits(self) -> bool:
        """Whether somebody has written to the compute views since `forget_edits`: gathers do not count."""
        return bool(self.views) and self.views[0]._version != self._seen_version

    def forget_edits(self) -> None:
        """What was written to the compute views so far is known, or not of interest."""
        if self.views:
            self._seen_version = self.views[0]._version

    def differs_from_shard(self) -> bool:
        """Whether this rank's range of the slot is something else than its compute shard. The host waits."""
        own = self.weights.narrow(
            0, self._transport.rank * self.shard.layout.shard_numel, self.shard.layout.shard_numel
        )
        return not torch.equal(own, self.shard.compute)

    def put_back_views(self) -> str | None:
        """Let all compute views be parts of the slot again; the name of the first that was not, None if all were."""
        moved = None
        for param, view in zip(self.shard.params, self.views, strict=True):
            if param.layout.numel and not self.weight_slot.holds(view):
                moved = moved or param.name
                flat = self.weights.data.narrow(0, param.layout.offset, param.layout.numel)
                view.data = flat.view(param.layout.shape)
        return moved

    def name_at(self, offset: int) -> str:
        """The parameter that has element `offset` of the unit."""
        inside = (p for p in self.shard.params if p.layout.offset <= offset < p.layout.offset + p.layout.numel)
        return next(inside).name

    def _follow_moved_weights(self) -> None:
        """One rank, fp32, and the user put other memory under a parameter: bind to what is there now."""
        self.weights = self.weight_slot.buffer = self.shard.compute
        for param, view in zip(self.shard.params, self.views, strict=True):
            flat = self.weights.data.narrow(0, param.layout.offset, param.layout.numel)
            view.data = flat.view(param.layout.shape)
        self.forget_edits()

    def start_gather(self) -> None:
        """Compute shard to weight slot. Comm stream; the slot is this unit's from here on."""
        slot = self.weight_slot
        slot.released.wait()  # rule 2
        slot.arrived.settle()  # a unit that was gathered and then skipped: its messages are still under way
        work: Work | None = self._transport.start_gather(self.shard.compute, self.weights, self.index)
        slot.content = self.index
        slot.arrived.record(work)

    def finish_gather(self) -> None:
        """Let the compute stream go on only with the weights in place."""
        self.weight_slot.arrived.wait()  # rule 1

    def bind(self) -> None:
        """Bind all members."""
        for member in self.members:
            member.bind()

    def release(self, member: Member | None = None) -> None:
        """The weights of `member`, or of all, were used for the last time for now."""
        for layer in self.members if member is None else (member,):
            layer.unbind()
        self.weight_slot.released.record()

    def copy_out(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of `weight`, which lies in the slot: that may go to another unit then."""
        with torch.no_grad():
            copy = weight.clone()
        self.weight_slot.released.record()
        return copy

    def open_grads(self) -> None:
        """Make the grad slot this unit's. Compute stream; with one rank the main grads themselves are written.

        Gradients that parameters hold from an earlier backward are moved into the main grads first, to be added to.
        """
        is_first, self._has_taken = not self._has_taken, True
        if is_first:
            self._adds = self.shard.take_grads()
        slot = self.grad_slot
        if slot is None:
            if is_first:
                self.written = [self._adds] * len(self.views)
            return
        slot.drained.wait()  # rule 3
        slot.content = self.index
        self.written = [self._adds and self._main_grads_are_in_slot] * len(self.views)
        if self.written[0]:
            self._spread_main_grads()
        for place, grad in self.aside.items():
            self.write_grad(place, grad)
        self.aside = {}

    def set_grads_aside(self) -> None:
        """Leave the grad slot, which another unit needs, until this unit opens it again. Compute stream.

        Only where layers of one unit run on both sides of another's: what came first is kept in memory of its own.
        """
        assert self.grad_slot is not None
        self.grad_slot.content = None
        self.aside = {place: self._grad_views[place].clone() for place, done in enumerate(self.written) if done}

    def _spread_main_grads(self) -> None:
        """Main grads in the slot are to be added to: N times them here and zeros elsewhere have them as their mean."""
        layout, grads = self.shard.layout, self._grads
        assert grads is not None
        for rank, chunk in enumerate(grads.view(layout.world_size, -1)):
            chunk.mul_(layout.world_size) if rank == self._transport.rank else chunk.zero_()

    def write_grad(self, place: int, grad: torch.Tensor) -> None:
        """Gradient `place` [shape of the parameter] into the grad slot: the one copy gradients see. Compute stream."""
        target = self._grad_views[place]
        self.used[place] = self.has_unreduced = True
        if grad.is_sparse:
            grad = grad.to_dense()
        if self.written[place]:
            target.add_(grad)
        else:
            target.copy_(grad)
            self.written[place] = True

    def start_reduce(self) -> Work | None:
        """Grad slot to main grads. Parameters without a gradient contribute zeros, never another unit's leftovers."""
        self.reductions += 1
        self.has_unreduced = False
        for place, (view, is_held) in enumerate(zip(self.views, self.shard.held, strict=True)):
            if (view.requires_grad or is_held) and not self.written[place]:  # a frozen one may have kept a gradient
                self._grad_views[place].zero_()
        slot, out = self.grad_slot, self.shard.grad
        if slot is None or self._grads is None or out is None:
            self.written = [True] * len(self.views)
            return None
        slot.written.record()
        slot.written.wait()  # rule 4
        accumulate, self._adds = self._adds and not self._main_grads_are_in_slot, True
        scratch = slot.scratch.take(self.scratch_numel)
        work = self._transport.start_reduce(Reduction(self._grads, out, scratch, accumulate, self.index))
        slot.content = None
        slot.scratch.work = work
        slot.drained.record(work)
        return work

    def hold_grads(self) -> None:
        """Leave gradients in the slot, not reduced: parameters get a stand-in that says so, until the next backward."""
        if not self._has_taken:
            return
        if not self._main_grads_are_in_slot and not self._adds and self.shard.grad is not None:
            self.shard.grad.zero_()
            self._adds = True
        for place, param in enumerate(self._params):
            if param.grad is not None:
                self._add_own_grad(place, param.grad)
            if self.used[place] or self.shard.held[place]:
                if place not in self._own_grad_hooks:
                    self._watch_own_grads(place)
                stand_in = HeldGrad.wrap(self.shard.grad_pieces[place], self.shard.params[place].name)
                stand_in.on_zero = functools.partial(self._forget, place)
                self._held[place] = param.grad = stand_in

    def resume_grads(self) -> None:
        """Take the stand-ins back. Gradients whose stand-in was cleared meanwhile are forgotten."""
        for place, stand_in in enumerate(self._held):
            if stand_in is None:
                continue
            param, self._held[place] = self._params[place], None
            grad, param.grad = param.grad, None
            if grad is not stand_in:
                self._forget(place)
                self.used[place] = self.shard.held[place] = False
                if grad is not None:
                    self._add_own_grad(place, grad)

    def _forget(self, place: int) -> None:
        """The gradient of parameter `place` that waits in the slot, or in the main grads, is zero from now on."""
        self._grad_views[place].zero_()
        self.shard.grad_pieces[place].zero_()

    def _add_own_grad(self, place: int, grad: torch.Tensor) -> None:
        """Add what autograd, or the user, has given to the sharded parameter itself: no other rank has a part in it."""
        if self._main_grads_are_in_slot:
            if not self.written[place]:
                self._grad_views[place].zero_()
                self.written[place] = True
            self.shard.grad_pieces[place].add_(grad, alpha=self.shard.layout.world_size)  # of which the mean is taken
        else:
            self.shard.grad_pieces[place].add_(grad)
        self.shard.held[place] = True

    def _watch_own_grads(self, place: int) -> None:
        """While a stand-in is held, autograd adds to it in place: to what it stands for, of which the mean is taken."""
        node = torch.autograd.graph.get_gradient_edge(self._params[place]).node
        unit_of, factor = weakref.ref(self), self.shard.layout.world_size

        def scale(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
            unit = unit_of()
            if unit is None or grads[0] is None or unit._held[place] is None or not unit._main_grads_are_in_slot:
                return None
            return (grads[0] * factor,) if unit._params[place].grad is unit._held[place] else None

        node.register_prehook(scale)
        self._own_grad_hooks[place] = node

    def finish_reduce(self, used: Sequence[bool]) -> list[nn.Parameter]:
        """Main grads become the sharded parameters' ``.grad``, for those that some rank used, which are returned."""
        trained = [view.requires_grad and is_used for view, is_used in zip(self.views, used, strict=True)]
        self.reductions = 0
        self.has_unreduced = False
        self.used = [False] * len(self.views)
        if not self._has_taken:
            return []
        self._has_taken = False
        return self.shard.give_grads(trained)

    # -- outside of steps -----------------------------------------------------------------------------------------

    def gather_compute(self) -> torch.Tensor:
        """The weights as they were cast last: [padded_numel] param_dtype, new memory. Collective, blocks."""
        full = torch.empty_like(self.weights)
        if self.shard.layout.world_size == 1:  # the compute shard itself is computed with, and may be changed
            for shard in self.shard.params:
                shard.shaped(full).copy_(shard.param.detach())
            return full
        self._transport.gather_now(self.shard.compute, full, self.index)
        return full

    def gather_full(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Every rank's `pieces` put together: [padded_numel] fp32, new memory on this device. Collective, blocks.

        Args:
            pieces: one per parameter, [local.numel] fp32, this rank's.
        """
        layout = self.shard.layout
        flat = torch.zeros_like(self.shard.main)
        for param, piece in zip(self.shard.params, pieces, strict=True):
            flat.narrow(0, param.local.shard_offset, param.local.numel).copy_(piece)
        if layout.world_size == 1:
            return flat
        full = torch.empty(layout.padded_numel, dtype=flat.dtype, device=flat.device)
        self._transport.gather_now(flat, full, self.index)
        return full


def _grad_taker(unit: StreamedUnit, place: int) -> Callable[[torch.Tensor], None]:
    # Weak: the garbage collector does not see what a tensor's hook holds, and the unit holds the tensor.
    unit_of = weakref.ref(unit)

    def take(view: torch.Tensor) -> None:
        grad, view.grad = view.grad, None
        unit = unit_of()
        if grad is not None and unit is not None:
            take_grad(unit, place, grad)

    return take


def take_grad(unit: StreamedUnit, place: int, grad: torch.Tensor) -> None:
    """A graph has made `grad`, shape of the compute view, for the parameter at `place`.

    Raises:
        ShardingError: it is part of a graph itself.
    """
    if grad.requires_grad:
        name = unit.shard.params[place].name
        raise ShardingError(f"backward(create_graph=True): gradients of {name!r} cannot be differentiated again")
    unit.on_grad(unit, place, grad)
