"""StreamedUnit: one unit's journey, its methods in the order of travel.

    main weights -cast-> compute shard -all-gather-> weight slot -forward, backward->
    [gradients: `streamshard.unit.grads`] -optimizer-> main weights

The unit knows how each step is done, the engine knows when. See [Note: slots] and [Note: ordering rules].
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import as_one
from streamshard.errors import ShardingError
from streamshard.plan.segments import UnitLayout
from streamshard.plan.structure import refuse_marks
from streamshard.torch_private import AsTensors
from streamshard.unit.grads import UnitGrads
from streamshard.unit.shard import ParamShard, SegmentShard, WeightSlot
from streamshard.unit.unsharded_parameter import ComputeView, Writes, be_absent, be_present

__all__ = ["StreamedUnit"]


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


class StreamedUnit:
    """What is gathered and reduced together: a repeated layer, several small ones, or what is outside (the root unit).

    It is bound as a whole while one of its layers runs, and from its need in backward until its reduction.

    Args:
        index: position in the engine's list of units; index 0 is the root unit.
        layout: its segments, and where they lie.
        segments: this rank's state of each, before `add` has filled them.
        weight_slot: where its weights are gathered to.
        grads: its gradients.
        ranks: moves its bytes.
        is_streamed: in the block slots; else it stays in slots of its own, in place once gathered.

    Attributes:
        name: fully qualified name of its module, for messages.
        params: this rank's part of its parameters, segment by segment; complete when `make_views` is called.
        views: its compute views, one per parameter, made once; see [Note: absent weights].
        view_ids: their ids.
        is_bound: its modules hold the compute views, else the sharded parameters.
        writes: notices what forwards write to `views`.
    """

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        segments: Sequence[SegmentShard],
        weight_slot: WeightSlot,
        grads: UnitGrads,
        ranks: Ranks,
        *,
        is_streamed: bool,
    ) -> None:
        self.is_streamed = is_streamed
        self.index = index
        self.name = layout.name or "the root unit"
        self.layout = layout
        self.segments = tuple(segments)
        self.params: list[ParamShard] = []
        self.weight_slot = weight_slot
        self.grads = grads
        self.writes = Writes()
        self.views: list[ComputeView] = []
        self.view_ids: frozenset[int] = frozenset()
        self._sharded: list[nn.Parameter] = []  # parameters, in the same order
        self.is_bound = False
        self._bindings: list[_Binding] = []
        self.is_trainable = False
        self._ranks = ranks

    # -- construction ---------------------------------------------------------------------------------------------

    def make_views(self) -> None:
        """Make the compute views.

        The views are made from aliases of the slot with version counters of their own: gathers write the slot behind
        autograd's back, on purpose, and must not look like in-place edits of saved tensors.
        """
        for segment in self.segments:
            for param in segment.params:
                alias = segment.weights.data
                view = ComputeView(_whole(alias, param), requires_grad=True)
                self.params.append(param)
                self.views.append(view)
                self.grads.add(param, view)
                self.writes.watch(view, alias, param.param, param.name)
        self._sharded = [param.param for param in self.params]
        self.view_ids = frozenset(map(id, self.views))

    def _with_views(self) -> Iterator[tuple[SegmentShard, ParamShard, ComputeView]]:
        """Each parameter with its segment and its compute view."""
        views = iter(self.views)
        return ((segment, param, next(views)) for segment in self.segments for param in segment.params)

    def add_binding(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        """While the unit is bound, ``owner.__dict__[key]`` is `computing`, else `sharded`."""
        self._bindings.append(_Binding(owner, key, sharded, computing))

    # -- the journey ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take over the weights as the user has left them. Compute stream.

        Raises:
            ShardingError: a parameter has a hook that would never run, or was given memory that cannot be used.
        """
        with AsTensors():
            self._check_hooks()
            for segment in self.segments:
                segment.cast()
            if self.grads.slot is None and any(segment.compute is not segment.weights for segment in self.segments):
                self._follow_moved_weights()

    def _check_hooks(self) -> None:
        for param in self.params:
            if param.param._backward_hooks:
                raise ShardingError(
                    f"a hook on parameter {param.name!r} would never run, its gradient is made by a reduction: use "
                    "register_post_accumulate_grad_hook, which is called with the sharded gradient"
                )
            refuse_marks(param.name, param.param)

    def take_trainability(self) -> None:
        """Let compute views need gradients as the sharded parameters do now.

        Asked when a graph is made and when it is differentiated, because both decide in torch: a parameter gets a
        gradient if it needed one in the forward and still does in the backward.
        """
        trainable = False
        with AsTensors():  # the views themselves, whatever their class
            for param, view in zip(self._sharded, self.views, strict=True):
                wanted = param.requires_grad
                trainable = trainable or wanted
                if view.requires_grad is not wanted:
                    view.requires_grad_(wanted)
        self.is_trainable = trainable and bool(self.grads.segments)

    def give_trainability(self) -> None:
        """The unit is about to be released: what was frozen or unfrozen in a forward stays so."""
        with AsTensors():
            for param, view in zip(self._sharded, self.views, strict=True):
                if param.requires_grad is not view.requires_grad:
                    param.requires_grad_(view.requires_grad)

    def versions(self) -> list[int]:
        """A number per sharded parameter that grows with each in-place change of it, such as an optimizer's step."""
        with AsTensors():
            return [param._version for param in self._sharded]

    def _follow_moved_weights(self) -> None:
        """One rank, and the user put other memory under a parameter: bind to what is there now."""
        for segment, param, view in self._with_views():
            if segment.compute is not segment.weights:
                ComputeView.move(view, _whole(segment.compute.data, param))  # it may be absent
        for segment in self.segments:
            segment.weights = segment.compute

    def start_gather(self) -> None:
        """Compute shards to weight slot. Comm stream; the slot is this unit's from here on."""
        slot = self.weight_slot
        slot.released.wait()  # rule 2
        slot.arrived.complete()  # a unit that was gathered and then skipped: its messages are still under way
        start = self._ranks.transport.start_gather
        work = as_one([start(segment.compute, segment.weights, segment.tag) for segment in self.segments])
        slot.content = self.index
        slot.arrived.record(work)

    def finish_gather(self) -> None:
        """Let the compute stream go on only with the weights in place."""
        self.weight_slot.arrived.wait()  # rule 1

    def bind(self) -> None:
        """Let its modules compute with the slot: compute views take the place of the sharded parameters."""
        if not self.is_bound:
            self.is_bound = True
            if self.is_streamed:
                be_present(self.views)
            for binding in self._bindings:
                if (owner := binding.owner()) is not None:
                    owner.__dict__[binding.key] = binding.computing

    def release(self) -> None:
        """Its weights were used for the last time for now: its modules hold the sharded parameters again."""
        if self.is_bound:
            self.is_bound = False
            if self.is_streamed:
                be_absent(self.views)
            for binding in self._bindings:
                if (owner := binding.owner()) is not None:
                    owner.__dict__[binding.key] = binding.sharded
        self.weight_slot.released.record()

    # -- outside of steps -----------------------------------------------------------------------------------------

    def gather_whole(
        self, pieces: Sequence[torch.Tensor | None], dtype: torch.dtype | None = None
    ) -> list[torch.Tensor | None]:
        """Every rank's `pieces` put together: whole parameters, new memory on this device. Collective, blocks.

        Args:
            pieces: one per parameter, [local.numel], this rank's. None: of no rank; a segment without any is left out.
            dtype: of what is put together; None: that of the main weights.

        Returns:
            One per parameter, in its shape; None where a segment was left out.
        """
        wholes: list[torch.Tensor | None] = []
        for segment in self.segments:
            own = pieces[len(wholes) : len(wholes) + len(segment.params)]
            if all(piece is None for piece in own):
                wholes += own
                continue
            layout = segment.layout
            flat = torch.zeros_like(segment.main, dtype=dtype)
            for param, piece in zip(segment.params, own, strict=True):
                if piece is not None:
                    flat.narrow(0, param.local.shard_offset, param.local.numel).copy_(piece)
            full = flat
            if layout.world_size > 1:
                full = torch.empty(layout.padded_numel, dtype=flat.dtype, device=flat.device)
                self._ranks.transport.gather_now(flat, full, segment.tag)
            wholes += [_whole(full, param) for param in segment.params]
        return wholes


def _whole(full: torch.Tensor, param: ParamShard) -> torch.Tensor:
    """The part of `full` [padded_numel] that is the parameter's, in its shape."""
    return full.narrow(0, param.layout.offset, param.layout.numel).view(param.layout.shape)
