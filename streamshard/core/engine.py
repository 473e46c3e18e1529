"""The common part of forwards and backwards: the units, the pass under way, and all-gathers.

`streamshard.core.forward` and `streamshard.core.backward` have the events of a training step in their order, and
`streamshard.core.edge` and `streamshard.core.graph_hooks` call them. Units know how each transfer is done. See
[Note: one program] in `streamshard.planning.program` and [Note: ordering rules] in `streamshard.comm.streams`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.config import Precision
from streamshard.core.grad_divisor import GradDivisor
from streamshard.core.params import Param
from streamshard.core.profiler import ProfilerNames
from streamshard.core.reductions import Reductions
from streamshard.core.slots import Ledger, WeightState
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError, warn_user
from streamshard.guards.loop import Members
from streamshard.planning.memory import SlotPlan
from streamshard.planning.program import Op, UnitOrder
from streamshard.torch_private import AsTensors

if TYPE_CHECKING:
    from streamshard.core.buffer_sync import BufferSync
    from streamshard.core.ends import Ends
    from streamshard.core.host import HostState
    from streamshard.core.outer_shards import OuterShards
    from streamshard.core.tied import TiedHead

ROOT_UNIT = 0  # index of the root unit


@dataclasses.dataclass(eq=False)
class Graph:
    """The facts of a forward that its autograd graph keeps. Lives as long as the graph.

    Attributes:
        plan: which unit has used which slot.
        versions: by unit, see `Unit.versions`: of the root unit, and of each other unit whose weights were read while
            none of its layers ran. The graph holds these unsharded parameters themselves.
        called: units of which this rank has called layers.
        called_again: resident units of which this rank has called layers several times.
        silent: units of which this rank has called layers only without a graph: a reentrant checkpoint recomputes them.
        visits: of the forward, in order (`Schedule.log`); filled at its end.
    """

    plan: SlotPlan
    versions: dict[int, list[int]]
    called: set[int] = dataclasses.field(default_factory=set)
    called_again: set[int] = dataclasses.field(default_factory=set)
    silent: set[int] = dataclasses.field(default_factory=set)
    visits: tuple[int, ...] = ()


class Use(NamedTuple):
    """One call of a unit's layer. The nodes of its outputs keep it for backward.

    Attributes:
        unit: the layer's unit.
        graph: of the forward.
        versions: of the unit's sharded parameters at the call, see `Unit.versions`.
        is_inside: the unit is resident, and its layer ran inside a layer of another unit.
        is_first: no layer of the unit was called before in the forward, so backward comes to this call last.
    """

    unit: Unit
    graph: Graph
    versions: list[int]
    is_inside: bool = False
    is_first: bool = False


class Phase(Protocol):
    """The forward or backward under way: a `Forward`, or a `Backward` with the forwards that it recomputes.

    Attributes:
        is_forward: which of the two.
    """

    is_forward: bool

    @property
    def is_current(self) -> bool:
        """Whether a module that is called now belongs to this pass."""

    def pre_forward(self, unit: Unit) -> Use:
        """A layer of `unit` is about to compute: afterwards the unit's weights are in place and bound."""

    def post_forward(self, unit: Unit) -> None:
        """A layer of `unit` has computed, or raised."""

    def read(self, unit: Unit, name: str = "") -> None:
        """Code outside of the unit's layers reads a weight: put the weights of `unit` in place.

        Args:
            unit: resident, or at an end of the model.
            name: of the weight. Empty: it is only looked up, which never raises.
        """

    def recover(self) -> None:
        """If an exception has ended this pass, clean up: the engine is between passes afterwards. Else do nothing."""


_ALL_KINDS = (True, False)


class Changes:
    """Says which weights may have changed since the pass before, with one answer on all ranks.

    [Note: changes]
    Ranks gather what has changed, so they must agree. Versions of one parameter do not: a load, or an optimizer that
    writes where it has state, leaves out a rank whose piece has no elements. So a change of one weight counts for all
    of its kind: weights that train (True), or frozen ones (False). Each rank has elements of a kind and sees its
    changes, or the kind counts as changed in every pass.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._versions: dict[bool, list[int]] = {}
        flats = [flat for unit in units for flat in unit.flat_params]
        seen = {flat.kind.trains for flat in flats if flat.layout.reaches_all_ranks}
        self._unseen = {flat.kind.trains for flat in flats} - seen

    def find(self) -> Collection[bool]:
        """The kinds of weights that may have changed since the last call."""
        now: dict[bool, list[int]] = {}
        # Else each `_version` would be a call of `ShardedTensor.__torch_function__`.
        with AsTensors():
            for flat in (flat for unit in self._units for flat in unit.flat_params):
                now.setdefault(flat.kind.trains, []).extend(param.sharded._version for param in flat.params)
        before, self._versions = self._versions, now
        return self._unseen.union(kind for kind in now if now[kind] != before.get(kind))

    def forget(self) -> None:
        """Weights may have changed in ways that versions do not count, or not on all ranks."""
        self._versions = {}


@dataclasses.dataclass(eq=False, repr=False)
class Engine:
    """Streams units through slots.

    Args:
        units: all units: the root unit first, then in registration order.
        plan: which unit uses which slot.
        why_slots: why there are so many slots, for reports.
        ranks: the shard group.
        ledger: owns all device buffers.
        buffers: keeps the model's buffers equal on all ranks.
        precision: the dtypes.
        reductions: takes gradients.
        host: copies state that lies in host memory; None: it lies on the device.
        outer: exchanges between replicas over which state is cut too; None: it is cut over `ranks` only.

    Attributes:
        streams: the streams on which compute and communication run.
        root_unit: the unit of everything outside of the other units.
        is_whole: this rank's shards are the whole units.
        is_synced: False inside ``no_sync()``: weights do not change between passes, so slots' contents are reused.
        are_weights_current: the last pass ran in this ``no_sync()``: the next one casts only weights that have changed.
        members_of: returns the model's modules; None once the model is gone.
        divisor: of sums of gradients.
        progress: how far the training loop has come.
        resident: the units that do not take turns, but for the root unit.
        profiler: names the work of units while a profiler runs.
        phase: the pass under way, in any thread; None between passes.
        order: of units, in which the next pass all-gathers them.
        inputs: the `UnevenInputs` that announces passes, inside Join; else None.
        tied: the heads that share their weights with embeddings.
        ends: watches how the first passes use embedding and head; None once that is decided.
        is_summoned: parameters hold full tensors, inside ``summon_full_params``, so that no pass may begin.
        is_loss_unseen: no pass with gradients has returned so far.
        micro_batch: whose forward runs, while forwards of several take turns (`streamshard.layer_major`).
        sums: slots for the gradients of several micro-batches, see `streamshard.layer_major.sums`; None: not made yet.
        empty: names of the parameters and buffers that still have no values: they were on the meta device.
        weights_written: fence of rule 5, recorded when a pass begins: the user has written the main weights before.
    """

    units: list[Unit]
    plan: SlotPlan
    why_slots: str
    ranks: Communicator
    ledger: Ledger
    buffers: BufferSync
    precision: Precision
    reductions: Reductions
    host: HostState | None = None
    outer: OuterShards | None = None

    def __post_init__(self) -> None:
        self.streams = self.ranks.streams
        self.root_unit = self.units[ROOT_UNIT]
        self.is_whole = all(flat.layout.is_whole for unit in self.units for flat in unit.flat_params)
        self.is_synced = True
        self.are_weights_current = False
        self._changes = Changes(self.units)
        self.members_of: Callable[[], Members | None] = lambda: None
        self.divisor = GradDivisor(
            self.units, self.ranks, 1 if self.reductions.replicas is None else self.ranks.n_replicas
        )
        self.progress = self.reductions.progress
        self.phase: Phase | None = None
        self.order = UnitOrder(self.plan.is_streamed)
        # Any: `streamshard.integrations`, which sets it, lies above this package.
        self.inputs: Any = None
        self.ends: Ends | None = None
        self.tied: list[TiedHead] = []
        self.is_summoned = False
        self.is_loss_unseen = True
        self.micro_batch: Any = None  # a `streamshard.layer_major.micro_batch.MicroBatch`
        self.sums: Any = None
        self.empty: dict[str, None] = {}
        self.profiler = ProfilerNames(self.streams, [unit.layout.name or "root" for unit in self.units])
        self._warnings: set[str] = set()
        self._ending = self.ranks.waiting("waiting for all ranks at the end of a pass")
        self.resident = [unit for unit in self.units[1:] if not unit.is_streamed]
        self.weights_written = Fence(self.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, "main weights")

    @property
    def params(self) -> list[Param]:
        """This rank's part of every parameter, root unit first."""
        return [param for unit in self.units for param in unit.params]

    # -- passes ---------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Phase | None:
        """The pass to which a read of a weight belongs now; None: there is none."""
        phase = self.phase
        # Compiled code asks too, which cannot trace a question for the thread.
        return phase if phase is not None and (phase.is_forward or phase.is_current) else None

    def recover(self) -> None:
        """Clean up after a backward that an exception has ended. Does nothing in a pass or between passes."""
        if self.phase is not None:
            self.phase.recover()

    def warn_once(self, message: str) -> None:
        """Warn the user on the first rank, unless this message was given before."""
        if self.ranks.is_first and message not in self._warnings:
            self._warnings.add(message)
            warn_user(message)

    # -- embedding and head ---------------------------------------------------------------------------------------

    def watch_ends(self, ends: Ends) -> None:
        """A pass begins: decide whether embedding and head take turns with the blocks, or watch how it uses them."""
        # The order is settled in the same pass on all ranks, so all decide in the next one.
        if self.order.is_settled and torch.is_grad_enabled():
            self._join(ends.decide(self.order.order, self.plan, self.ranks))
            if ends.is_decided:
                self.ends = None
        ends.begin_pass()

    def predict_ends(self) -> None:
        """Decide as for most models, before any pass."""
        if self.ends is not None:
            self._join(self.ends.predict(self.plan))
            self.ends = None

    def _join(self, plan: SlotPlan | None) -> None:
        """Embedding and head have joined the blocks, as `plan` says."""
        if plan is None:
            return
        self.plan = plan
        self.resident = [unit for unit in self.resident if unit.index not in plan.ends]
        names = [repr(self.units[unit].name) for unit in sorted(plan.ends)]
        self.why_slots += f"; {' and '.join(names)} {'take' if names[1:] else 'takes'} turns with the layers"

    # -- values ---------------------------------------------------------------------------------------------------

    def set_empty(self, names: Iterable[str]) -> None:
        """The parameters and buffers of these names, and no others, have no values: they were on the meta device."""
        self.empty = dict.fromkeys(names)

    def fill(self, names: Iterable[str]) -> None:
        """Parameters and buffers of these names have values from now on."""
        for name in names:
            self.empty.pop(name, None)

    def refuse_empty(self, what: str) -> None:
        """Raise if parameters or buffers have no values; `what` is about to be done.

        Raises:
            ShardingError: names the first of them.
        """
        if self.empty:
            first = next(iter(self.empty))
            kind = "parameter" if any(first == param.name for param in self.params) else "buffer"
            more = f", and {len(self.empty) - 1} more," if len(self.empty) > 1 else ""
            raise ShardingError(
                f"{what}, but {kind} {first!r}{more} is empty: it was on the meta device, and nothing has given it "
                "values since. Give it values on all ranks: load_safetensors(model, directory), load_checkpoint, "
                "model.load_state_dict, init_weights(model), or by a function of yours, init_weights(model, function)"
            )

    # -- weights --------------------------------------------------------------------------------------------------

    def set_synced(self, is_synced: bool) -> None:
        """Leave (True) or enter (False) a stretch of passes between which weights do not change."""
        self.is_synced = is_synced
        if is_synced:  # weights may change before the next stretch
            self.are_weights_current = False

    def expire_weights(self) -> None:
        """Weights may have changed: the next pass casts them, inside ``no_sync()`` and in host memory too.

        Called on all ranks, whether they have elements of these weights or not.
        """
        self._changes.forget()
        for unit in self.units:
            # State in host memory is cast by its own versions.
            unit.versions_cast = []

    def expire_slots(self) -> Collection[bool]:
        """A pass begins: slots keep only weights that have not changed. Returns the kinds of weights that may have."""
        changed: Collection[bool] = _ALL_KINDS
        # Else each pass gathers all weights: nobody has to know which have changed.
        if self.host is not None or self.outer is not None or not self.is_synced:
            changed = self._changes.find()
        # Of one rank, versions do not count writes through ``.data``.
        trusts_all = self.are_weights_current and not self.is_whole
        for unit in self.units:
            slot, kinds = unit.weight_slot, changed if trusts_all or unit.home is not None else _ALL_KINDS
            # A unit without parameters counts as gathered for good, see `Unit.make_unsharded`.
            if slot.content != unit.index or not unit.params:  # another unit's weights stay
                continue
            if any(flat.kind.trains in kinds for flat in unit.flat_params):
                slot.move(WeightState.EMPTY, None)  # without a wait: the next all-gather waits (rule 2)
        return changed

    def check_structure(self) -> None:
        """Raise if modules or parameters were exchanged since sharding."""
        if (members := self.members_of()) is not None:
            members.check()

    def all_gather(self, unit: Unit) -> None:
        """Start the unit's all-gather, if its slot holds another unit or nothing."""
        slot = unit.weight_slot
        if slot.content == unit.index:  # perhaps still arriving: who computes waits in `wait_until_ready`
            return
        # The holder's modules must not compute with this unit's weights.
        if slot.content is not None and (holder := self.units[slot.content]).is_bound:
            holder.release()
        with unit.gathering:
            unit.start_gather()

    def issue(self, ops: Iterable[Op]) -> None:
        """Issue collectives of the program, in order."""
        for op in ops:
            unit = self.units[op.unit]
            if op.is_reduction:
                self.reductions.start(unit)
            else:
                self.all_gather(unit)

    def finish_reading(self) -> None:
        """A pass is over, and the user may write main weights: wait for all-gathers that read them (rule 6).

        Compute has waited for most of them. But other ranks may still read weights that are sent as they are.
        """
        with self._ending:
            for unit in self.units:
                if unit.is_sent_as_is or unit.weight_slot.state is WeightState.ARRIVING:
                    unit.weight_slot.shard_read.wait()  # rule 6
