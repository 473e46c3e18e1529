"""One unit: the parameters that are cast, all-gathered, reduced and given together. One method per step of their way.

    main weights -start_gather-> weight slot -set_bound-> forward, backward -release->
    autograd -collect-> gradient slot -start_reduce-> main grads -give-> ``.grad`` -optimizer-> main weights

The unit knows how to do each step, `streamshard.core.engine` and its passes know when. Gradients are in
`streamshard.core.unit_grads`. See [Note: slots], [Note: ordering rules].

[Note: earlier gradients]
A backward adds to the gradients that parameters hold when it begins (``.grad``), and to its own earlier reductions.

    main grads hold              where                 a gradient is        a reduction
    nothing (EMPTY)              anywhere              copied to the slot   overwrites main grads
    earlier gradients (FILLED)   memory of their own   copied to the slot   adds to main grads
    the same                     they are the slot     added to the slot    leaves them, on one rank
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import StepPart, Work
from streamshard.core.params import FlatParam, Param
from streamshard.core.slots import GradSlot, WeightSlot, WeightState
from streamshard.core.unit_grads import GradState, UnitGrads
from streamshard.guards.weights import WeightGuard, leaf_of
from streamshard.planning.layout import UnitLayout
from streamshard.torch_private import AsTensors

# For `map`, which loops in C: each call of a layer asks all of its parameters.
_main_grads_of = operator.attrgetter("main_grads")
_versions_of, _trains_of = operator.attrgetter("_version"), operator.attrgetter("requires_grad")


class Home(Protocol):
    """Where a unit's weights come from and its gradients go, if all-gathers do not read main weights on the device.

    home                                   `fetch`                        after the reductions
    `HostState`, host memory               copies this rank's shard       `end_reduction` copies results to the host
    `OuterShards`, shards of all replicas  gathers them over replicas     `OverReplicas.add` reduces over replicas

    Attributes:
        is_on_host: main weights and main grads lie in host memory.
    """

    is_on_host: bool

    def fetch(self, unit: Unit) -> None:
        """Put this rank's part of the weights, if they have changed, where all-gathers read it. Comm waits for it."""

    def begin_reduction(self, unit: Unit, *, adds: bool) -> tuple[list[torch.Tensor], bool]:
        """The unit's reductions start next.

        Args:
            unit: its gradients are written.
            adds: main grads hold gradients, to which these are added.

        Returns:
            Where each flat parameter that trains is reduced to, and whether these reductions add to what is there.
        """

    def end_reduction(self, unit: Unit, buffers: Sequence[torch.Tensor]) -> None:
        """The reductions into `buffers` have started."""


class Unit:
    """The parameters of a layer, of several small layers, of a large module, or of the root unit. Owns no buffers.

    A unit is *bound* while its modules hold unsharded parameters: while one of its layers runs, and in backward from
    the first use of its weights until the next unit's visit. The root unit is bound for a whole pass, and a head that
    code reads until the forward ends.

    Args:
        index: position in the engine's list of units; index 0 is the root unit.
        layout: the unit's flat parameters, and where they lie.
        flat_params: this rank's part of each flat parameter; `FlatParam.add` fills them later.
        weight_slot: the all-gather writes the weights there.
        grad_slot: gradients are copied there, and reduced from there; see [Note: slots].
        ranks: the shard group.
        is_streamed: the unit shares the block slots; else it is resident and has a weight slot of its own.
        home: of the unit's state; None: it is this rank's shard, on the device.
        gather_ranks: the ranks of its all-gathers and reductions; None: `ranks`.

    Attributes:
        name: fully qualified name of the module, for messages.
        params: this rank's part of each parameter, in the order of the flat parameters; filled by `make_unsharded`.
        trained: the flat parameters that train.
        is_bound: modules hold the unsharded parameters, else the sharded parameters.
        is_trainable: a parameter requires a gradient, and the unit has room for gradients; see `copy_trainability`.
        trains: ``requires_grad`` of unsharded parameters.
        is_sent_as_is: an all-gather reads main weights themselves, which are not cast, or shards cast before.
        versions_cast: with ``offload``, `versions` at the last cast. Empty: unknown.
        grads: its gradients.
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
        home: Home | None = None,
        gather_ranks: Communicator | None = None,
    ) -> None:
        self.home, self.gather_ranks = home, gather_ranks or ranks
        self.index, self.layout, self.flat_params = index, layout, tuple(flat_params)
        self.weight_slot, self.ranks, self.is_streamed = weight_slot, ranks, is_streamed
        self.name = layout.name or "the root unit"
        self.params: list[Param] = []
        self.is_bound = self.is_trainable = False
        self.is_sent_as_is = any(
            flat.unit_gathers[0].cast_to is None and not flat.is_on_host for flat in self.flat_params
        )
        self.guard = WeightGuard(weight_slot.is_shared)
        self.gathering = ranks.waiting("the gather of", self.name)
        self.reducing = ranks.waiting("the reduction of", self.name)
        self._streams = ranks.streams
        self._sharded: list[nn.Parameter] = []  # the user's parameters, in the order of `params`
        self.trains: list[bool] = []
        self.versions_cast: list[int] = []
        # Entries of a module's `__dict__`: module, key, value while sharded, value while bound. Weak: models own units.
        self._bindings: list[tuple[weakref.ref[nn.Module], str, tuple[object, object]]] = []
        self.trained = [flat for flat in self.flat_params if flat.kind.trains]
        self.grads = UnitGrads(index, self.trained, grad_slot, ranks)

    @property
    def is_on_host(self) -> bool:
        """Whether the unit's state lies in host memory."""
        return self.home is not None and self.home.is_on_host

    def make_unsharded(self) -> None:
        """Make the unsharded parameters, views of the slot."""
        for flat in self.flat_params:
            for param in flat.params:
                flat.make_unsharded(param, self.guard)
                self.params.append(param)
                if param.has_room:
                    self.grads.params.append(param)
        self._sharded = [param.sharded for param in self.params]
        # `FlatParam.make_unsharded` lets all but packed ones require a gradient.
        self.trains = [not param.form.is_packed for param in self.params]
        if not self.params:  # nothing will ever be gathered
            self.weight_slot.move(WeightState.ARRIVING, self.index)

    def use_slots(self, weight_slot: WeightSlot, grad_slot: GradSlot) -> None:
        """Go over to other slots. No pass runs, and neither slot has gradients."""
        for flat in self.flat_params:
            if weight_slot is not self.weight_slot:
                flat.move_weights(weight_slot, self.guard)
            if flat.kind.trains and grad_slot is not self.grads.slot:
                flat.move_grads(grad_slot)
        self.weight_slot, self.grads.slot = weight_slot, grad_slot

    def add_binding(self, owner: nn.Module, key: str, sharded: object, computing: object) -> None:
        """While the unit is bound, ``owner.__dict__[key]`` is `computing`, else `sharded`."""
        self._bindings.append((weakref.ref(owner), key, (sharded, computing)))

    # -- weights --------------------------------------------------------------------------------------------------

    def count_step(self, params: Collection[Param]) -> None:
        """A late step of `params` is due. It writes the all-gather input on the host too, which needs no cast then."""
        was_cast = self.versions_cast == self.versions()
        with AsTensors():
            torch.autograd.graph.increment_version([param.sharded for param in params])
        if was_cast:
            self.versions_cast = self.versions()

    def start_gather(self) -> None:
        """Start the all-gather, which casts the weights, into the weight slot. The slot is this unit's from here on."""
        slot, transport = self.weight_slot, self.gather_ranks.transport
        self._streams.observe(StepPart.ALL_GATHER, self.index, begins=True)
        slot.released.wait()  # rule 2
        if self.grads.slot.weights is not None:
            self.grads.slot.drained.complete()  # rule 2; on a device the comm stream orders both
        slot.arrived.complete()  # a unit that was all-gathered and then skipped: its messages are still under way
        slot.shard_read.complete()  # rule 6
        slot.move(WeightState.ARRIVING, self.index)
        if self.home is not None:
            self.home.fetch(self)
        works: list[Work | None] = []
        for flat in self.flat_params:
            for gather in flat.unit_gathers:
                works.append(flat.gather_ranks.transport.start_gather(gather))
        slot.arrived.record(*works)
        slot.shard_read.record(*transport.readers(works))  # after the gathers: it counts those that were started
        self._streams.observe(StepPart.ALL_GATHER, self.index, begins=False)

    def wait_until_ready(self) -> None:
        """Let the compute stream wait until the weights are in the slot, and convert what was sent in another dtype."""
        slot = self.weight_slot
        with self.gathering:
            slot.arrived.wait()  # rule 1
        if slot.state is WeightState.ARRIVING:  # else an earlier wait has converted them
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
            self.guard.set_present(is_bound)  # resident ones stay present, from their first use in a pass on
        for owner_of, key, values in self._bindings:
            if (owner := owner_of()) is not None:
                # `nn.Module.__setattr__` costs host time, and models redefine it.
                owner.__dict__[key] = values[is_bound]

    def new_leaves(self) -> list[nn.Parameter]:
        """Parameters in the memory of the unsharded ones, with gradients of their own; frozen ones are the same."""
        with AsTensors():
            return [leaf_of(param.unsharded, kind) for param, kind in zip(self.params, self.guard.kinds, strict=True)]

    def bind_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        """Let the unit's modules, which hold unsharded parameters, hold `leaves` instead until the next `set_bound`."""
        chosen = {id(param.unsharded): leaf for param, leaf in zip(self.params, leaves, strict=True)}
        for owner_of, key, (_, computing) in self._bindings:
            if (owner := owner_of()) is None:
                continue
            if isinstance(computing, dict):
                owner.__dict__[key] = {name: chosen.get(id(weight), weight) for name, weight in computing.items()}
            elif isinstance(computing, list):  # the list that RNNs keep for cuDNN
                owner.__dict__[key] = [chosen.get(id(weight), weight) for weight in computing]

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
            if wanted != self.trains:
                for param, trains in zip(self.params, wanted, strict=True):
                    param.unsharded.requires_grad_(trains)
                self.trains = wanted
        self.is_trainable = bool(self.trained) and any(wanted)

    def end_use(self) -> None:
        """Layers have computed in a forward: take over changes of ``requires_grad``, and refuse writes to weights."""
        with AsTensors():
            trains = list(map(_trains_of, self.guard.views))
            if trains != self.trains:
                for param, wanted in zip(self._sharded, trains, strict=True):
                    param.requires_grad_(wanted)
                self.trains = trains
        self.guard.end_use()

    def versions(self) -> list[int]:
        """A number per sharded parameter that grows with each in-place change of it, such as an optimizer's step."""
        with AsTensors():
            return list(map(_versions_of, self._sharded))

    # -- gradients ------------------------------------------------------------------------------------------------

    def start_reduce(self) -> list[Work | None]:
        """Start the reduction from slot to main grads (rule 4)."""
        grads, adds = self.grads, self.grads.state is GradState.FILLED
        if grads.slot.weights is not None and not self.is_streamed:
            self.guard.mark_gone()
        self._streams.observe(StepPart.REDUCTION, self.index, begins=True)
        grads.make_memory()  # not before: the copied gradients are freed now
        buffers = list(map(_main_grads_of, self.trained))
        if self.home is not None:  # before `finish_writing`: it may allocate sums, and compute zeroes them
            buffers, adds = self.home.begin_reduction(self, adds=adds)
        grads.slot.finish_writing()
        works = []
        for flat, out in zip(self.trained, buffers, strict=True):
            # The divisor is the unit's, of experts too: each rank of the shard group has a batch.
            for reduction in flat.unit_reductions(out, adds=adds, divisor=self.ranks.grad_divisor):
                works.append(flat.reduce_ranks.transport.start_reduce(reduction))
        if self.home is not None:
            self.home.end_reduction(self, buffers)
        grads.move(GradState.FILLED)
        grads.slot.close(works)
        self._streams.observe(StepPart.REDUCTION, self.index, begins=False)
        return works
