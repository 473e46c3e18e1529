"""When everything happens: one short method per event of a training step, from enter to finish_backward.

The engine owns the sweeps (which unit is next), the phase, and nothing else: buffers are the ledger's, journeys the
units'. Hooks call in, units are told what to do. See [Note: one program], [Note: ordering rules], [Note: need].

[Note: need]
Backward needs a unit's weights when one of its saved tensors is unpacked: each unit's forward runs under saved-tensor
hooks which hold back the slot's views (0.03 ms of host time per layer, docs/log.md). That is exact whatever the loss
is made of. A hook on the outputs' graph nodes says it earlier, and also when recomputation inside the unit
(torch.utils.checkpoint) has hidden its saved tensors from us. Being needed closes every unit before: their gradients
are complete, because autograd runs nodes latest-created first, and what a unit used twice still has to come is known
from the program: its reduction stands behind its last visit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.autograd import Variable

from streamshard.buffers import BufferSync
from streamshard.errors import ShardingError
from streamshard.passes import Pass, Run
from streamshard.planner import Needs
from streamshard.program import Op, OpKind, Sweep, merge_order
from streamshard.reductions import Reductions
from streamshard.shard import ParamShard
from streamshard.slots import Ledger, SlotPlan
from streamshard.streams import Fence, Rule, StreamName, Streams
from streamshard.structure import refuse_transforms
from streamshard.transport import Transport
from streamshard.unit import Member, StreamedUnit

__all__ = ["Engine", "UnevenSteps", "in_backward"]

EDGE = 0  # index of the edge unit


def in_backward() -> bool:
    """Whether the calling thread is inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


class UnevenSteps(Protocol):
    """What is told of a step so that ranks that have run out of inputs can follow: see `streamshard.optim.join`."""

    def before_pass(self) -> None:
        """An outermost forward begins."""

    def before_clipping(self, max_norm: float, norm_type: float, skip_above: float | None) -> None:
        """``model.clip_grad_norm_`` was called."""


class Engine:
    """Streams units through slots.

    Args:
        units: all units; the edge unit first, then blocks in registration order.
        plan: which unit uses which slot.
        transport, streams, ledger, buffers: see there. The engine owns the two step-boundary fences.
        needs: what memory depends on, the dtypes in force among it; for reports.
        reductions: where a backward's gradients go.

    Attributes:
        why_slots: how many slots there are, and why, for reports.
        check_structure: raises if the model is not what was sharded; called before each pass that casts.
        uneven: set while ranks may run out of inputs.
        is_synced: False inside ``no_sync()``: weights cannot have changed since the last pass, so what slots hold is
            reused.
        step_lock: held by the thread that is in an optimizer's step, see `streamshard.DistributedOptimizer`.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        plan: SlotPlan,
        transport: Transport,
        streams: Streams,
        ledger: Ledger,
        buffers: BufferSync,
        needs: Needs,
        reductions: Reductions,
    ) -> None:
        self.units = list(units)
        self.transport = transport
        self.streams = streams
        self.ledger = ledger
        self.buffers = buffers
        self.reductions = reductions
        self.why_slots = ""
        self.check_structure: Callable[[], None] = lambda: None
        self.is_synced = True
        self.step_lock = threading.RLock()
        self.uneven: weakref.ref[UnevenSteps] | None = None
        self.depth = 0  # of forwards of modules that the engine watches
        self.order: tuple[int, ...] = tuple(range(len(units)))
        self._has_learnt = False
        self.plan = plan
        self.needs = needs
        self.precision = needs.precision
        self._slot_of = plan.weights
        self._weights_are_current = False
        self._forward: Sweep | None = None
        self._pass: Pass | None = None
        self._pending: list[weakref.ref[Pass]] = []
        self._backward: Sweep | None = None
        self._backward_passes: list[Pass] = []
        self._computing: StreamedUnit | None = None  # the unit whose backward is running
        self._holds_grads = False  # this backward leaves its gradients in their slots
        self._cast_done = Fence(streams, Rule.STEP_BOUNDARY, StreamName.COMPUTE, "compute shards")
        self._gathers_done = Fence(streams, Rule.STEP_BOUNDARY, StreamName.COMM, "gathered shards")

    @property
    def edge(self) -> StreamedUnit:
        """The unit of everything outside the blocks."""
        return self.units[EDGE]

    @property
    def param_shards(self) -> list[ParamShard]:
        """This rank's part of every parameter, edge unit first."""
        return [shard for unit in self.units for shard in unit.shard.params]

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds the whole model: nothing is gathered or reduced."""
        return self.transport.world_size == 1

    def set_synced(self, is_synced: bool) -> None:
        """Leave (True) or enter (False) a stretch of passes between which weights do not change."""
        self.is_synced = is_synced
        if is_synced:
            self._weights_are_current = False

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward is under way, in whatever thread."""
        return self.depth > 0 or self._backward is not None

    @property
    def casts_next(self) -> bool:
        """Whether the next pass takes over weights anew: they may have changed since the last one."""
        return not self._weights_are_current

    def follow(self, *, is_synced: bool, casts: bool) -> None:
        """Let the next pass be as it is on other ranks. Arguments: see `is_synced` and `casts_next`."""
        self.is_synced = is_synced
        self._weights_are_current = not casts

    # -- forward --------------------------------------------------------------------------------------------------

    def enter(self, units: frozenset[int]) -> None:
        """The forward of a watched module begins; the outermost one begins a pass over `units`."""
        self.depth += 1
        if self.depth > 1 or self._backward is not None and in_backward():
            return
        try:
            self._begin_pass(units)
        except BaseException:
            self.depth -= 1
            raise

    def exit(self, error: BaseException | None) -> Pass | None:
        """The forward of a watched module is over; the outermost one ends the pass, which is returned."""
        self.depth -= 1
        if self.depth > 0 or self._forward is None:
            return None
        return self._end_pass(error)

    def _begin_pass(self, units: frozenset[int]) -> None:
        self.settle()
        refuse_transforms()
        if self.uneven is not None and (uneven := self.uneven()) is not None:
            uneven.before_pass()
        if not self._weights_are_current:
            self._cast()
        visits = [index for index in self.order if index in units or index == EDGE]
        self._forward = Sweep(visits, self._slot_of, reduce=False)
        self._pass = Pass()
        self._ask(self.edge)
        self.edge.bind()

    def _cast(self) -> None:
        """Main weights to compute shards, between the last pass's gathers and this one's (rule 5)."""
        self.check_structure()
        self._drain_gathers()
        self._await_readers()
        with torch.no_grad():
            for unit in self.units:
                unit.refresh()
                unit.weight_slot.content = unit.index if self.is_alone or not unit.views else None
        self._cast_done.record()
        self._cast_done.wait()  # rule 5: no gather reads what is still being cast
        with self.transport.guard("the start of a forward"):
            self.transport.publish_shards([unit.shard.compute for unit in self.units])

    def _await_readers(self) -> None:
        with self.transport.guard("waiting for all ranks between two forwards"):
            self._gathers_done.record(self.transport.retract_shards())
            self._gathers_done.wait()  # rule 5: no cast writes what a gather still reads

    def pre_forward(self, member: Member) -> Run:
        """`member` is about to compute: its weights are in place and bound afterwards."""
        unit = member.unit
        if self._backward is not None and in_backward():
            self._recompute(unit)
            return Run(unit, self._backward_passes[-1])
        self._ask(unit)
        member.bind()
        assert self._pass is not None
        return Run(unit, self._pass)

    def post_forward(self, member: Member) -> None:
        """`member` has computed. Its slot goes to another unit once one is asked for."""
        if self._backward is not None and in_backward():
            return  # recomputed: it stays until its reduction
        member.unit.release(member)

    def _ask(self, unit: StreamedUnit) -> None:
        """Issue what the program has up to `unit`, and let compute wait for its weights (rule 1)."""
        assert self._forward is not None
        self._issue(self._forward.ask(unit.index))
        self._acquire(unit)

    def _end_pass(self, error: BaseException | None) -> Pass | None:
        sweep, pass_ = self._forward, self._pass
        assert sweep is not None
        self._forward = self._pass = None
        self.edge.release()
        if error is not None and (self.transport.has_failed or not isinstance(error, Exception)):
            return None
        self._issue(sweep.finish())
        if self.precision.param_dtype is torch.float32:
            self._await_readers()  # gathers read the main weights themselves, which the user may edit from here on
        self._weights_are_current = not self.is_synced
        if error is not None or pass_ is None:
            return None
        if torch.is_grad_enabled():
            pass_.visits = tuple(sweep.log)
            self._pending.append(weakref.ref(pass_))
            if not self._has_learnt:
                self._learn(sweep)
                return pass_
        if self.is_synced:
            self.buffers.after_pass()
        return pass_ if torch.is_grad_enabled() else None

    def _learn(self, sweep: Sweep) -> None:
        """After the first training pass, once: adopt the order in which units ran if it was the same on all ranks."""
        self._has_learnt = True
        order = merge_order(range(len(self.units)), sweep.used)
        heard = self.transport.gather_objects((order, self.buffers.changed()))
        if len({tuple(other) for other, _ in heard}) == 1:
            self.order = order
        self.buffers.learn({name for _, names in heard for name in names})

    # -- gathers --------------------------------------------------------------------------------------------------

    def _issue(self, ops: Sequence[Op]) -> None:
        for op in ops:
            unit = self.units[op.unit]
            if op.kind is OpKind.REDUCE:
                self.reductions.due.discard(op.unit)
                if not self._holds_grads:
                    self.reductions.start(unit)
            elif unit.weight_slot.content != unit.index:
                self._gather(unit)

    def _gather(self, unit: StreamedUnit) -> None:
        holder = unit.weight_slot.content
        if holder is not None and self.units[holder].is_bound and self.units[holder] is not unit:
            self.units[holder].release()
        with self.transport.guard("the gather of", unit.name):
            unit.start_gather()

    def _acquire(self, unit: StreamedUnit) -> None:
        if unit.weight_slot.content != unit.index:
            self._gather(unit)
        with self.transport.guard("the gather of", unit.name):
            unit.finish_gather()

    def _drain_gathers(self) -> None:
        for unit in self.units:
            with self.transport.guard("the gather of", unit.name):
                unit.weight_slot.arrived.settle()

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self, pass_: Pass) -> None:
        """Backward through `pass_` begins: the program is what the pending passes issued, reversed."""
        if self._backward is not None:
            if pass_ not in self._backward_passes:
                self._close_all()
                self._sweep_back([pass_])
            return
        self._holds_grads = self.plan.keeps_grads and not self.is_synced and not self.is_alone
        if self.plan.keeps_grads:
            for unit in self.units:
                unit.resume_grads()
        pending = [p for ref in self._pending if (p := ref()) is not None]
        self._pending = []
        self._sweep_back([*(p for p in pending if p is not pass_), pass_] if pass_ not in pending else pending)
        Variable._execution_engine.queue_callback(self.finish_backward)
        self._acquire(self.edge)
        self.edge.bind()

    def _sweep_back(self, passes: list[Pass]) -> None:
        visits = [unit for p in reversed(passes) for unit in reversed(p.visits)]
        self._backward = Sweep(visits, self._slot_of, reduce=True)
        self.reductions.due = set(visits)
        self._backward_passes = passes
        self._issue(self._backward.release_before(0))

    def need(self, run: Run) -> None:
        """Backward is about to read the weights of `run`'s unit (rule 1). Called any number of times."""
        unit = run.unit
        if self._computing is unit and unit.is_bound:
            return
        if torch.is_grad_enabled() and not self.is_alone:
            raise ShardingError(
                f"backward(create_graph=True) through {unit.name!r}: its weights leave their slot afterwards, so "
                "with more than one rank gradients cannot be differentiated again"
            )
        self.begin_backward(run.pass_)
        self._advance(unit)
        self._acquire(unit)
        unit.bind()

    def _recompute(self, unit: StreamedUnit) -> None:
        """Forward inside backward. The next unit of the program is simply early; any other is fetched beside it."""
        sweep = self._backward
        assert sweep is not None
        if self._computing is not unit:
            start = sweep.released + (self._computing is not None)
            if start < len(sweep.visits) and sweep.visits[start] == unit.index:
                self._advance(unit)
        self._acquire(unit)
        unit.bind()

    def _advance(self, unit: StreamedUnit) -> None:
        """Move on to `unit`'s next visit: units before it are over, so their slots and gradients go (rules 2 and 4)."""
        sweep = self._backward
        assert sweep is not None
        if self._computing is unit:
            return
        visit = sweep.find(unit.index)
        if visit is None:  # outside the program, or needed again after its turn
            return
        self._computing = unit
        for other in self.units[1:]:
            if other.is_bound and other is not unit:
                other.release()
        self._issue(sweep.release_before(visit))

    def on_grad(self, unit: StreamedUnit, place: int, grad: torch.Tensor) -> None:
        """A gradient is complete, as far as this graph goes: it moves into the grad slot (rule 3)."""
        if self._computing is not unit:
            if self._backward is None:
                self.begin_backward(self._last_pass())
            if unit is not self.edge:
                self._advance(unit)
        self.reductions.take(unit, place, grad)

    def _last_pass(self) -> Pass:
        """The latest pass that is still alive: for a graph in which no unit's weights are needed."""
        for ref in reversed(self._pending):
            if (pass_ := ref()) is not None:
                return pass_
        return Pass()

    def _close_all(self) -> None:
        """The sweep is over: issue what is left, let go of every unit."""
        sweep = self._backward
        assert sweep is not None
        for unit in self.units[1:]:
            if unit.is_bound:
                unit.release()
        self._computing = None
        self._issue(sweep.finish())
        if not self._holds_grads:
            self.reductions.start_late_ones()

    def finish_backward(self) -> None:
        """The end of backward: last reductions, then gradients for the optimizer (rule 5)."""
        if self._backward is None:
            return
        self._close_all()
        if self._forward is None:
            self.edge.release()
        if self._holds_grads:
            for unit in self.units:
                unit.hold_grads()
            self._leave_backward()
            return
        given = self.reductions.finish()
        self._leave_backward()
        if self.reductions.check is not None:
            self.reductions.check()
        for param in given:  # last: a hook may step and clear the gradient
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                hook(param)

    def _leave_backward(self) -> None:
        self._backward = None
        self._backward_passes = []

    # -- when things go wrong -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Leave a backward that an exception has ended, so that the next pass is right.

        What the program has left is issued first: ranks that failed at different points stay in step.
        """
        if self._backward is None or in_backward():
            return
        try:
            if not self.transport.has_failed:
                self._close_all()
                self.reductions.complete()
        finally:
            for unit in self.units:
                if unit.is_bound:
                    unit.release()
                if unit.reductions:
                    unit.finish_reduce([False] * len(unit.views))
                if self._holds_grads:
                    unit.hold_grads()
                    continue
                if unit.grad_slot is not None:
                    unit.grad_slot.content = None
                unit.used = [False] * len(unit.views)
            self._backward = None
            self._backward_passes = []
            self._pending = []
            self._computing = None
