"""StreamedUnit: one unit's weights, with a method for each step of their way, in order.

    main weights -cast-> all-gather input -all-gather-> weight slot -forward, backward->
    [gradients: `streamshard.unit.grads`] -optimizer-> main weights

The unit knows how to do each step, the engine knows when. See [Note: slots] and [Note: ordering rules].
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import as_one
from streamshard.errors import ShardingError
from streamshard.planning.flat_params import UnitLayout
from streamshard.planning.structure import refuse_marks
from streamshard.torch_private import AsTensors
from streamshard.unit.grads import UnitGrads
from streamshard.unit.shard import FlatParamShard, ParamShard, WeightSlot
from streamshard.unit.unsharded_parameter import UnshardedParameter, Writes, be_absent, be_present


@dataclasses.dataclass(eq=False, repr=False)
class StreamedUnit:
    """Parameters that are all-gathered and reduced together: of a repeated layer, several small ones, or the root unit.

    A unit is *bound* while one of its layers runs, and in backward from the first use of its weights until its
    reduction: its modules hold unsharded parameters.

    Args:
        index: position in the engine's list of units; index 0 is the root unit.
        layout: the unit's flat parameters, and where they lie.
        flat_params: this rank's part of each flat parameter; `FlatParamShard.add` fills them later.
        weight_slot: the all-gather writes the weights there.
        grads: the unit's gradients.
        ranks: the shard group.
        is_streamed: the unit shares the block slots; else it is resident and has a slot of its own.

    Attributes:
        name: fully qualified name of the module, for messages.
        params: this rank's part of each parameter, in the order of the flat parameters; complete when
            `make_unsharded` is called.
        views: the unsharded parameters, one for each of `params`, made once; see [Note: absent weights].
        is_bound: modules hold the unsharded parameters, else the sharded parameters.
        writes: notices writes of forwards to `views`.
    """

    index: int
    layout: UnitLayout
    flat_params: Sequence[FlatParamShard]
    weight_slot: WeightSlot
    grads: UnitGrads
    ranks: Communicator
    is_streamed: bool

    def __post_init__(self) -> None:
        self.name = self.layout.name or "the root unit"
        self.params: list[ParamShard] = []
        self.writes = Writes(self.name)
        self.views: list[UnshardedParameter] = []
        self._sharded: list[nn.Parameter] = []  # parameters, in the same order
        self._trains: list[bool] = []  # ``requires_grad`` of `views`, as `take_trainability` or a layer has left it
        self.is_bound = False
        # Entries of a module's `__dict__`: module, key, value while sharded, value while bound. Exchanging a module's
        # `_parameters` is one assignment, whatever the number of parameters. Weak: the model holds this object.
        self._bindings: list[tuple[weakref.ref[nn.Module], str, tuple[object, object]]] = []
        self.is_trainable = False

    # -- construction ---------------------------------------------------------------------------------------------

    def make_unsharded(self) -> None:
        """Make the unsharded parameters, views of the slot.

        They are views of aliases of the slot with version counters of their own: autograd must not take an all-gather
        for an in-place edit of saved tensors.
        """
        for flat_param in self.flat_params:
            for param in flat_param.params:
                alias = flat_param.weights.data
                view = UnshardedParameter(_whole(alias, param), requires_grad=True)
                self.params.append(param)
                self.views.append(view)
                self._trains.append(True)
                self.grads.add(param, view)
                self.writes.watch(view, alias, param.param, param.name)
        self._sharded = [param.param for param in self.params]

    def add_binding(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        """While the unit is bound, ``owner.__dict__[key]`` is `computing`, else `sharded`."""
        self._bindings.append((weakref.ref(owner), key, (sharded, computing)))

    # -- the journey ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Cast the weights as the user has left them to all-gather inputs. Compute stream.

        Raises:
            ShardingError: a parameter has a hook that would never run, or was given memory that cannot be used.
        """
        with AsTensors():
            for param in self.params:
                if param.param._backward_hooks:
                    raise ShardingError(
                        f"a hook on parameter {param.name!r} would never run, its gradient is made by a reduction: use "
                        "register_post_accumulate_grad_hook, which is called with the sharded gradient"
                    )
                refuse_marks(param.name, param.param)
            for flat_param in self.flat_params:
                flat_param.to_wire()

    def take_trainability(self) -> None:
        """Set ``requires_grad`` of the unsharded parameters to that of the sharded parameters.

        Called in forward and in backward: in torch a parameter gets a gradient if it required one in both.
        """
        with AsTensors():  # an AbsentWeight would answer for the sharded parameter
            wanted = [param.requires_grad for param in self._sharded]
            if wanted != self._trains:
                for view, trains in zip(self.views, wanted, strict=True):
                    view.requires_grad_(trains)
                self._trains = wanted
        self.is_trainable = any(wanted) and bool(self.grads.flat_params)

    def end_use(self) -> None:
        """Layers have computed in a forward: keep which weights they froze or unfroze, and refuse what they wrote."""
        with AsTensors():
            trains = [view.requires_grad for view in self.views]
            if trains != self._trains:
                for param, wanted in zip(self._sharded, trains, strict=True):
                    param.requires_grad_(wanted)
                self._trains = trains
        self.writes.refuse()

    def versions(self) -> list[int]:
        """A number per sharded parameter that grows with each in-place change of it, such as an optimizer's step."""
        with AsTensors():
            return [param._version for param in self._sharded]

    def start_gather(self) -> None:
        """Start the all-gather into the weight slot. Comm stream; the slot is this unit's from here on."""
        slot = self.weight_slot
        slot.released.wait()  # rule 2
        slot.arrived.complete()  # a unit that was all-gathered and then skipped: its messages are still under way
        start = self.ranks.transport.start_gather
        slot.is_in_wire_dtype = any(flat.gathered is not flat.weights for flat in self.flat_params)
        work = as_one([start(flat.gather_input, flat.gathered, flat.tag) for flat in self.flat_params])
        slot.content = self.index
        slot.arrived.record(work)

    def finish_gather(self) -> None:
        """Let the compute stream wait until the weights are in the slot."""
        slot = self.weight_slot
        slot.arrived.wait()  # rule 1
        if slot.is_in_wire_dtype:
            for flat_param in self.flat_params:
                flat_param.from_wire()
            slot.is_in_wire_dtype = False

    def bind(self) -> None:
        """Let the unit's modules hold the unsharded parameters. A second call does nothing."""
        if not self.is_bound:
            self._set_bound(True)

    def release(self) -> None:
        """Reshard: modules hold the sharded parameters again, and the slot is free when compute has come here."""
        if self.is_bound:
            self._set_bound(False)
        self.weight_slot.released.record()

    def _set_bound(self, is_bound: bool) -> None:
        self.is_bound = is_bound
        if self.is_streamed:
            if is_bound:
                be_present(self.views)
                self.writes.forget()
            else:
                be_absent(self.views)
                if self.weight_slot.is_shared:
                    self.writes.expire()
        for owner_of, key, values in self._bindings:
            if (owner := owner_of()) is not None:
                owner.__dict__[key] = values[is_bound]

    # -- outside of steps -----------------------------------------------------------------------------------------

    def gather_whole(self, pieces: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """All-gather `pieces` into full tensors, in new memory on this device. Collective; the host waits.

        Args:
            pieces: one per parameter: this rank's [local.numel], or None if no rank has one. A flat parameter without
                any piece is left out.

        Returns:
            One per parameter: [full shape], in the dtype of the main weights; None where a flat parameter was left out.
        """
        wholes: list[torch.Tensor | None] = []
        for flat_param in self.flat_params:
            own = pieces[len(wholes) : len(wholes) + len(flat_param.params)]
            if all(piece is None for piece in own):
                wholes += own
                continue
            layout = flat_param.layout
            flat = torch.zeros_like(flat_param.main)
            for param, piece in zip(flat_param.params, own, strict=True):
                if piece is not None:
                    flat.narrow(0, param.local.shard_offset, param.local.numel).copy_(piece)
            full = flat
            if layout.world_size > 1:
                full = torch.empty(layout.padded_numel, dtype=flat.dtype, device=flat.device)
                self.ranks.transport.gather_now(flat, full, flat_param.tag)
            wholes += [_whole(full, param) for param in flat_param.params]
        return wholes


def _whole(full: torch.Tensor, param: ParamShard) -> torch.Tensor:
    """The view of `full` [padded_numel] that is the parameter's, in its full shape."""
    return full.narrow(0, param.layout.offset, param.layout.numel).view(param.layout.shape)
