"""One rank's part of each parameter and of each flat parameter: weights and gradients.

    main weights -cast, all-gather-> weight slot (unsharded parameter) ... gradient slot ... main grads

`FlatParam` is one flat parameter: the memory that its collectives move. `Param` is one parameter in it: the user's
Parameter object, which stays the same object, the unsharded parameter, and the places of its gradient. See [Note: flat
parameters] in `streamshard.planning.layout`.
"""

from __future__ import annotations

import math
import operator
import weakref
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from streamshard.comm.communicator import Communicator
from streamshard.comm.transport import Gather, Reduction
from streamshard.core.slots import GradSlot, Ledger, WeightSlot
from streamshard.forms import Form, form_of, take_form
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_parameter import be_piece, exchange
from streamshard.guards.sharded_tensor import ShardedTensor
from streamshard.guards.weights import UnshardedParameter, WeightGuard, classes_of
from streamshard.planning.layout import FlatParamPlan, ParamLayout
from streamshard.planning.memory import Category
from streamshard.torch_private import AsTensors, make_subclass

use_of = operator.attrgetter("is_used")  # of a `Param`


class Lookup(NamedTuple):
    """The gradient of one look-up's output, of which `write_lookups` makes that of the weight.

    Attributes:
        grad: [..., width] dtype of the weight.
        indices: [...], the rows that were looked up.
        padding: a row without gradient; -1: none.
    """

    grad: torch.Tensor
    indices: torch.Tensor
    padding: int


class Param:
    """One parameter on this rank. Made by `FlatParam.add`. Two are equal only if they are the same object.

    Args:
        piece: describes the piece, also for tensors that outlive the model.
        aliases: further names of the same (tied) parameter.
        sharded: the user's Parameter.

    Attributes:
        name: fully qualified name in the root model.
        layout: where the full parameter lies in its flat parameter.
        local: which elements of the flattened parameter this rank owns.
        form, whole_class: the parameter's form and class before sharding.
        dtype: before sharding, of the memory of the parameter.
        unsharded: [full shape] compute dtype, the parameter that layers compute with: a view of the weight slot.
        has_room: there is memory for the gradient: the parameter trained when the model was sharded.
        in_slot: [full shape] grad_dtype, the gradient's place in the gradient slot.
        is_used: this rank's graphs have made a gradient since the last one was given; other ranks are told.
        is_kept: main grads hold ``.grad`` from before this backward, to which the reduction is added.
        is_tied_written: a part of the gradient is in the slot already, see [Note: tied weights].
        is_left: the gradient waits unreduced, or for an average over replicas, for a later backward.
        flat_main_grads: [shard_numel] fp32, of the flat parameter; may have no memory (`FlatParam.may_drop`).
        lookups: gradients of outputs of an embedding, of which its gradient is made.
        sums: its parts of the shard group's sums that wait for other replicas. See `OuterShards`.
        grad_piece: describes the gradient.
        given: [local shape] fp32, the main grads as ``.grad`` of the sharded parameter; None: not made.
        was_given: `given` has been ``.grad`` since it was made, or since `UnitGrads` last found no other holder of it.
    """

    unsharded: UnshardedParameter
    in_slot: torch.Tensor
    flat_main_grads: torch.Tensor
    grad_piece: Piece

    def __init__(self, piece: Piece, aliases: tuple[str, ...], param: nn.Parameter) -> None:
        self.name, self.layout, self.aliases = piece.name, piece.place, aliases
        self.piece, self.sharded = piece, param
        self.local = piece.range_of(piece.ranks.rank)
        self.form, self.whole_class = take_form(param), type(param)
        self.dtype = self.form.memory(param).dtype
        # Kept: each step makes the view anew, for each parameter.
        self._strides = torch.empty(self.piece.local_shape, device="meta").stride()
        self.has_room = False
        self.is_used = self.is_kept = self.is_tied_written = self.is_left = False
        self.given: ShardedTensor | None = None
        self.was_given = False
        self.lookups: list[Lookup] = []
        self.sums: list[torch.Tensor] = []

    @property
    def main(self) -> torch.Tensor:
        """[local.numel]: this rank's main weights, wherever the user has put them since. To read or write at once."""
        self.piece.settle()
        with AsTensors():
            return self.form.memory(self.sharded).detach().view(-1)

    @property
    def main_grad(self) -> torch.Tensor:
        """[local shape] fp32, the parameter's part of the main grads, which have memory."""
        offset = self.flat_main_grads.storage_offset() + self.local.shard_offset
        # One call, 1 us of host time; a narrow and a view take 4.
        return self.flat_main_grads.as_strided(self.piece.local_shape, self._strides, offset)

    # -- the gradient ---------------------------------------------------------------------------------------------

    def is_given(self, grad: torch.Tensor) -> bool:
        """Whether `grad` is `given`, still in the main grads' memory."""
        with AsTensors():
            if grad is not self.given or not grad.numel():  # an empty tensor has no address
                return grad is self.given
            return grad.data_ptr() == self.flat_main_grads.data_ptr() + 4 * self.local.shard_offset  # in fp32

    def adopt_grad(self, grad: torch.Tensor) -> bool:
        """Copy `grad`, the parameter's ``.grad``, into the main grads, unless it `is_given`. Returns whether it is."""
        if not (is_given := self.is_given(grad)):
            self.piece.settle()
            self.main_grad.copy_(grad)
        return is_given

    def clear_main_grad(self) -> None:
        """Zero the main grads of the parameter, if they have memory."""
        self.piece.settle()
        if self.flat_main_grads.untyped_storage().nbytes():
            self.main_grad.zero_()

    def forget_grad(self, *, in_slot: bool) -> None:
        """The user has dropped the gradient that waited (``zero_grad()``), in main grads or in the slot too."""
        self.clear_main_grad()
        for part in self.sums:
            part.zero_()  # further micro-batches add to it
        if in_slot:
            self.in_slot.zero_()
        self.is_used = self.is_kept = False


class FlatParam:
    """One flat parameter on this rank. Owns nothing: buffers are the ledger's.

    By default `ranks`, `gather_ranks` and `reduce_ranks` are one `Communicator`, the unit's. They differ for experts,
    and if state is cut over replicas.

    Args:
        plan: its kind, and where it lies.
        slot: the unit's weight slot.
        wire: [bytes of the largest unit of the slot] uint8, the wire buffer beside the slot.
        ranks: the ranks that cut it: the shard group, or the ranks with the same experts.
        ledger: allocates.
        keeps_slot: no other unit uses the slot: main weights that are sent as they are lie in it.
        is_on_host: main weights, main grads and all-gather inputs lie in host memory (``offload``).

    Attributes:
        tag: of its messages.
        ranks: see above.
        kind: its dtypes, and whether it trains.
        layout: of its parameters.
        main: [shard_numel] main_dtype. The user's Parameters are views of it.
        gather_ranks: the ranks of its all-gathers in a step: `ranks`, or the shard group if state is cut over replicas.
        reduce_ranks: the ranks of its reductions in a step: `gather_ranks`, or `ranks` if these add in rank order.
        gather: its all-gather of all elements. Its shard is `main`, with ``offload`` this rank's range of `gathered`.
            If state is cut over replicas, it is an all-gather over replicas into `sent_shard`.
        unit_gathers: its all-gathers in a step, over `gather_ranks`.
        sent_shard: [R * shard_numel] wire_dtype, what this rank sends in the shard group if state is cut over R
            replicas; empty otherwise.
        host_input: [shard_numel] wire_dtype, with ``offload``: copied to that range. It is `main` itself, if that is of
            the same dtype. Empty without ``offload``.
        gathered: [padded_numel] wire_dtype, written by all-gathers; `weights` itself, if that is of the same dtype.
        weights: [padded_numel] compute_dtype. Layers compute with views of it.
        grads: [padded_numel] grad_dtype, its range of the gradient slot; empty if it is frozen.
        main_grads: [shard_numel] fp32; empty if it is frozen.
        scratch: grad_dtype, for its reductions; empty if it is frozen.
        is_main_in_slot: main grads are this rank's range of the gradient slot, until a reduction adds to them.
        may_drop: main grads have memory only from a reduction until ``zero_grad()``.
        params: filled by `add`.
    """

    def __init__(
        self,
        plan: FlatParamPlan,
        slot: WeightSlot,
        wire: torch.Tensor,
        ranks: Communicator,
        ledger: Ledger,
        gather_ranks: Communicator,
        *,
        keeps_slot: bool,
        is_on_host: bool,
    ) -> None:
        self.gather_ranks = self.reduce_ranks = gather_ranks
        self._is_outer = gather_ranks is not ranks
        self.is_on_host, self.host_input = is_on_host, torch.empty(0)
        self.tag, self.kind, self.layout = plan.tag, plan.kind, plan.layout
        self.params: list[Param] = []
        self.is_main_in_slot = self.may_drop = False
        self.grads = self.main_grads = self.scratch = torch.empty(0)
        # Weak: pieces may outlive the model, and the ledger holds its buffers.
        self._plan, self.ranks, self._ledger_of = plan, ranks, weakref.ref(ledger)
        numel, kind = plan.layout.shard_numel, plan.kind
        is_cast = kind.main_dtype is not kind.wire_dtype
        is_sent_as_is = not (is_cast or is_on_host)
        kept_as = Category.MAIN_WEIGHTS if kind.trains else Category.FROZEN_WEIGHTS
        self._use_slot(slot)
        if kind.wire_dtype is not kind.compute_dtype:
            self.gathered = _bytes_as(wire, plan.wire, kind.wire_dtype)
        own = self._own_part
        # The slot is the unit's alone, so this rank's range of it never holds other weights.
        if keeps_slot and is_sent_as_is and self.gathered is self.weights and not self._is_outer:
            self.main = own
        else:
            # Weights that are cast are read in the slot, so these need not be visible.
            self.main = ledger.allocate(
                kept_as, numel, kind.main_dtype, is_visible=is_sent_as_is, is_on_host=is_on_host
            )
        self.sent_shard = torch.empty(0)
        if self._is_outer:
            category, size = Category.ALL_GATHER_INPUTS, ranks.world_size // gather_ranks.world_size * numel
            self.sent_shard = ledger.allocate(category, size, kind.wire_dtype, is_visible=True)
        self._make_gathers()
        if is_on_host:
            self.host_input = self.main
            if is_cast:
                self.host_input = ledger.allocate(Category.ALL_GATHER_INPUTS, numel, kind.wire_dtype, is_on_host=True)
        for found in plan.found:
            for tensor in form_of(found.param).beside(found.param).values():
                ledger.hold(Category.QUANTIZATION, tensor)

    @property
    def _own_part(self) -> torch.Tensor:
        """[shard_numel]: this rank's range of `gathered`."""
        numel = self.layout.shard_numel
        return self.gathered.narrow(0, self.ranks.rank * numel, numel)

    def _cut(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`tensor` in equal parts: one for each replica if state is cut over replicas too, else one."""
        parts = self.ranks.world_size // self.gather_ranks.world_size
        return tensor.view(parts, tensor.numel() // parts).unbind() if parts > 1 else (tensor,)

    def _use_slot(self, slot: WeightSlot) -> None:
        self.weights = self.gathered = _bytes_as(slot.buffer, self._plan.weights, self.kind.compute_dtype)

    def _make_gathers(self) -> None:
        """Make `gather` and `unit_gathers`. Called again when the unit goes over to another slot."""
        is_cast, own = self.kind.main_dtype is not self.kind.wire_dtype and not self.is_on_host, self._own_part
        if not self._is_outer:
            shard = own if self.is_on_host else self.main
            self.gather = Gather(shard, self.gathered, self.tag, own if is_cast else None)
            self.unit_gathers = [self.gather]
            return
        shards = self._cut(self.sent_shard)
        cast_to = shards[self.ranks.rank // self.gather_ranks.world_size] if is_cast else None
        self.gather = Gather(self.main, self.sent_shard, self.tag, cast_to)
        # A tag for each part: on CPUs the parts are under way at the same time.
        pairs = enumerate(zip(shards, self._cut(self.gathered), strict=True), self.tag * len(shards))
        self.unit_gathers = [Gather(shard, slot, tag) for tag, (shard, slot) in pairs]

    def scratch_numel(self, dtype: torch.dtype, limit: int) -> int:
        """Elements of scratch for the reductions of a step, which run side by side on CPUs.

        Args:
            dtype: of gradients in their slot, and of the scratch.
            limit: see `Transport.scratch_numel`.
        """
        parts, numel = self.ranks.world_size // self.reduce_ranks.world_size, self.layout.shard_numel
        return parts * self.reduce_ranks.transport.scratch_numel(numel, self.kind.mode, dtype, limit // parts)

    def unit_reductions(self, out: torch.Tensor, *, adds: bool, divisor: float) -> list[Reduction]:
        """The reductions of a unit's step, whose ranks are `reduce_ranks`.

        Args:
            out: main grads; [R * shard_numel] if they come over R replicas afterwards.
            adds: see `Reduction.accumulate`.
            divisor: see `Reduction`.
        """
        if self.reduce_ranks is self.ranks:
            return [Reduction(self.grads, out, self.scratch, self.kind.mode, adds, self.tag, divisor)]
        parts = list(zip(self._cut(self.grads), self._cut(out), self._cut(self.scratch), strict=True))
        tagged = enumerate(parts, self.tag * len(parts))
        return [Reduction(*each, self.kind.mode, adds, tag, divisor) for tag, each in tagged]

    def move_weights(self, slot: WeightSlot, guard: WeightGuard) -> None:
        """Go over to `slot`, with all unsharded parameters. There is no wire buffer."""
        self._use_slot(slot)
        self._make_gathers()
        for param in self.params:
            whole = param.form.unsharded(self.part_of(self.weights.data, param.layout))
            guard.use_memory(param.unsharded.place, self.weights.data, whole, param.form.inner)

    def move_grads(self, slot: GradSlot) -> None:
        """Go over to `slot`, which is empty."""
        self.grads = _bytes_as(slot.buffer, self._plan.grads, self.kind.grad_dtype)
        for param in self.params:
            param.in_slot = self.part_of(self.grads, param.layout)

    def allocate_grads(self, slot: GradSlot, scratch: range, *, keeps_slot: bool, keeps_memory: bool) -> None:
        """Allocate memory for the gradients of a flat parameter that trains.

        Args:
            slot: the unit's gradient slot.
            scratch: the range of the slot's scratch for its reductions.
            keeps_slot: no other unit uses the slot. If the slot is fp32, main grads are this rank's range of it.
            keeps_memory: main grads always have memory. In host memory and in slots they have in any case.
        """
        numel, dtype = self.layout.shard_numel, self.kind.grad_dtype
        self.grads = _bytes_as(slot.buffer, self._plan.grads, dtype)
        self.scratch = _bytes_as(slot.scratch.buffer, scratch, dtype)
        self.is_main_in_slot = keeps_slot and dtype is torch.float32
        self.may_drop = not (keeps_memory or self.is_main_in_slot or self.is_on_host)
        if self.is_main_in_slot:
            self.main_grads = self.grads.narrow(0, self.ranks.rank * numel, numel)
        elif self.may_drop:
            # Not by the ledger: compute waits for all uses before this memory goes, so no other stream holds it back.
            self.main_grads = torch.empty(numel, dtype=torch.float32, device=self.main.device)
            # Only the storage: the tensors in it stay, and have memory again in the next reduction.
            self.main_grads.untyped_storage().resize_(0)
            self._ledger.hold(Category.MAIN_GRADS, self.main_grads)
        else:
            self.main_grads = self._new_main_grads()

    @property
    def _ledger(self) -> Ledger:
        return cast(Ledger, self._ledger_of())  # it goes with its model, whose ledger this is

    def _new_main_grads(self) -> torch.Tensor:
        numel = self.layout.shard_numel
        return self._ledger.allocate(Category.MAIN_GRADS, numel, torch.float32, is_on_host=self.is_on_host)

    def add(
        self, layout: ParamLayout, aliases: tuple[str, ...], param: nn.Parameter, full: torch.Tensor | None
    ) -> Param:
        """Take over one parameter: `param` becomes this rank's piece of `full`.

        Args:
            layout: the parameter's place in the flat parameter.
            aliases: its further names.
            param: the user's Parameter; its data are replaced.
            full: [numel], the weights to shard, any dtype and device; None: it is empty, of NaN.
        """
        local = self.layout.local_range(layout, self.ranks.rank)
        main_weights = self.main.narrow(0, local.shard_offset, local.numel)
        main_weights = main_weights.view(self.layout.local_shape(layout, self.ranks.rank))
        if full is None:
            main_weights.fill_(math.nan)  # none of a packed parameter is empty
        else:
            main_weights.view(-1).copy_(full[local.start : local.stop])
        if self.layout.is_whole:  # a storage of its own, or accelerate and safetensors take parameters for tied
            main_weights = from_dlpack(main_weights)
        places = (local.start, local.stop, tuple(main_weights.shape))
        form, ranks = form_of(param), self.ranks  # before `Param` takes the form away
        facts = layout.name, form.shape(param), *places, ranks, self.layout, layout, self._ledger_of
        counts = ranks.counts_parts if form.box else ranks.counts_copies
        piece = Piece(*facts, trains=self.kind.trains, is_on_host=self.is_on_host, box=form.box, counts=counts)
        added = Param(piece, aliases, param)
        _put_under(param, added.form, main_weights, is_ordinary=piece.is_ordinary)
        self.params.append(added)
        be_piece(param, piece)  # not before: the plain parameter that it makes takes the memory of now
        return added

    def make_unsharded(self, param: Param, guard: WeightGuard) -> None:
        """Make the unsharded parameter of `param`, watched by `guard`, and give its gradient a place.

        It is a view of an alias of the slot with a version counter of its own: autograd must not take an all-gather for
        an in-place edit of saved tensors.
        """
        alias, form = self.weights.data, param.form
        whole = form.unsharded(self.part_of(alias, param.layout))
        classes = classes_of(type(whole) if form.inner else param.whole_class, form.inner)
        if not form.inner:
            # Frozen ones too require a gradient here: torch registers hooks on no other tensors. A pass sets it right.
            whole = make_subclass(classes[1], whole, not self.kind.is_packed)
        param.unsharded = cast(UnshardedParameter, whole)
        # A tensor around another one has a version counter of its own.
        aliases = (alias, whole.detach()) if form.inner and not self.kind.is_packed else (alias,)
        guard.watch(param.unsharded, classes, aliases, param.sharded, param.name)
        if self.kind.trains:
            self.place_grad(param)

    def part_of(self, full: torch.Tensor, param: ParamLayout) -> torch.Tensor:
        """The parameter's range of `full` [padded_numel], a view in its full shape."""
        return full.narrow(0, param.offset, param.numel).view(param.shape)

    def place_grad(self, param: Param) -> None:
        """Tell `param` where its gradient lies in the slot and in the main grads."""
        param.has_room = True
        param.in_slot, param.grad_piece = self.part_of(self.grads, param.layout), param.piece.of_grad()
        param.flat_main_grads = self.main_grads

    def place_sums(self, sums: torch.Tensor) -> None:
        """Tell parameters where in `sums` [R * shard_numel], a shard of each replica, their gradients wait."""
        first = self.ranks.rank % self.gather_ranks.world_size  # ranks are numbered replica by replica
        for replica, part in enumerate(self._cut(sums)):
            for param in self.params:
                local = self.layout.local_range(param.layout, first + replica * self.gather_ranks.world_size)
                param.sums.append(part.narrow(0, local.shard_offset, local.numel))

    def leave_slot(self) -> None:
        """Give main grads memory of their own, because a reduction adds to them. Compute stream."""
        self.is_main_in_slot = False
        self.main_grads = self._new_main_grads().copy_(self.main_grads)


def _put_under(param: nn.Parameter, form: Form, main_weights: torch.Tensor, *, is_ordinary: bool) -> None:
    """Give `param`, which stays the same object, the memory of `main_weights`."""
    if not param.is_meta and not form.part:
        param.data = main_weights
        return
    # `.data` cannot be assigned from meta to a device, nor to a tensor that consists of others.
    # torch.utils.swap_tensors refuses tensors with weak references, and RNNs have such references to their weights.
    memory = form.around(main_weights.data) if is_ordinary else main_weights.data
    fresh = nn.Parameter(memory, requires_grad=param.requires_grad)
    # The exchange takes the tensor and its hooks away: the fresh one needs the same.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(fresh, hooks, getattr(param, hooks))
    exchange(param, fresh, form.part)


def _bytes_as(buffer: torch.Tensor, place: range, dtype: torch.dtype) -> torch.Tensor:
    """The bytes `place` of `buffer` [n_bytes] uint8, as 1-D `dtype`."""
    return buffer.narrow(0, place.start, len(place)).view(dtype)
