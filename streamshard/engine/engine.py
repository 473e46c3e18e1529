"""When everything happens: one short method per event of a training step, from open_forward to finish_backward.

The engine owns the phase, a `Forward` and a `Backward` while there are such, and nothing else: buffers are the
ledger's, journeys the units'. Hooks call in, units are told what to do. See [Note: one program], [Note: ordering
rules], [Note: need].

[Note: need]
Backward needs a unit's weights when one of its saved tensors is unpacked: each unit's forward runs under saved-tensor
hooks which hold back the slot's views (0.03 ms of host time per layer, docs/internals/log.md). That is exact whatever
the loss is made of. A hook on the outputs' graph nodes says it earlier, and also when recomputation inside the unit
(torch.utils.checkpoint) has hidden its saved tensors from us. Being needed closes every unit before: their gradients
are complete, because autograd runs nodes latest-created first, and what a unit used twice still has to come is known
from the program: its reduction stands behind its last visit.

[Note: several passes]
A backward takes each pass when it reaches it: nobody is asked beforehand which graphs exist or are still alive, because
the answer could differ between ranks, and with it the collectives. autograd runs nodes latest-created first, so the
passes of one backward come one after the other, the latest first. A unit is reduced at the end of its turn in each of
them, and adds up in the main grads; the root unit, once, at the end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence

import torch
from torch.autograd import Variable

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Moment, Streams
from streamshard.compiling import untraced
from streamshard.engine.buffer_sync import BufferSync
from streamshard.engine.casts import Casts
from streamshard.engine.inputs import Inputs
from streamshard.engine.passes import Backward, Forward, Pass, Use
from streamshard.engine.reductions import Reductions
from streamshard.errors import ShardingError, warn_user
from streamshard.log import log
from streamshard.plan.memory import Sizing
from streamshard.plan.program import (
    Op,
    OpKind,
    Schedule,
    first_order,
    is_part_of,
    join_orders,
    merge_order,
)
from streamshard.plan.slots import SlotPlan
from streamshard.plan.structure import refuse_transforms
from streamshard.unit.absent_weight import be_absent, be_present
from streamshard.unit.asked_grads import graph_is_made, graph_is_reached
from streamshard.unit.buffers import Ledger
from streamshard.unit.shard import ParamShard, SegmentShard
from streamshard.unit.unit import StreamedUnit

__all__ = ["Engine", "in_backward"]

ROOT_UNIT = 0  # index of the root unit


def in_backward() -> bool:
    """Whether the calling thread is inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


class Engine:
    """Streams units through slots.

    Args:
        units: all units; the root unit first, then blocks in registration order.
        plan: which unit uses which slot.
        ranks, streams, ledger, buffers: see there.
        sizing: what memory depends on, the dtypes in force among it; for reports.
        reductions: where a backward's gradients go.

    Attributes:
        casts: takes over what the user has left of the weights.
        why_slots: how many slots there are, and why, for reports.
        inputs: whether ranks may run out of them; another object while they may.
        is_whole: parameters hold whole tensors, for a while (``summon_full_params``).
        empty: names of parameters, then buffers, that were on the meta device and that nobody has given values since.
        turn_spans: the addresses of slots that units take turns in, first and last (exclusive) of each.
        turn_bytes: those between which all of them lie.
        step_lock: held by the thread that is in an optimizer's step, see `streamshard.DistributedOptimizer`.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        plan: SlotPlan,
        ranks: Ranks,
        streams: Streams,
        ledger: Ledger,
        buffers: BufferSync,
        sizing: Sizing,
        reductions: Reductions,
    ) -> None:
        self.units = list(units)
        self.ranks = ranks
        self.streams = streams
        self.ledger = ledger
        self.buffers = buffers
        self.reductions = reductions
        self.casts = Casts(self.units, ranks)
        self.why_slots = ""
        self.is_whole = False
        self.empty: dict[str, None] = {}
        self.step_lock = threading.RLock()
        self.inputs = Inputs()
        self.depth = 0  # of forwards of modules that the engine watches
        self.order = first_order(plan.shared)
        self._known: tuple[int, ...] = ()  # the order of all units that training passes have used so far
        self._has_learnt = False  # it has all that take turns, or ranks could not agree
        self.plan = plan
        self.sizing = sizing
        self.precision = sizing.precision
        self._slot_of = plan.weights
        self._turns = plan.shared
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        self._leaving = threading.RLock()  # held by the thread that leaves a backward which an exception has ended
        self._looks_for_autocast = self.precision.param_dtype is torch.float32 and not self.is_alone
        self._entering: frozenset[int] | None = None  # the units of a pass that begins when weights are first read
        self._is_delivering = False  # gradients are final: hooks of the sharded parameters run
        slots = {unit.weight_slot for unit in units if unit.weight_slot.is_shared}
        self.turn_spans = [(slot.first_byte, slot.last_byte) for slot in slots]
        self.turn_bytes = min(self.turn_spans, default=(0, 0))[0], max(self.turn_spans, default=(0, 0))[1]
        self._resident = [unit for unit in self.units[1:] if not unit.is_streamed]

    @property
    def root_unit(self) -> StreamedUnit:
        """The unit of everything outside the blocks."""
        return self.units[ROOT_UNIT]

    @property
    def param_shards(self) -> list[ParamShard]:
        """This rank's part of every parameter, root unit first."""
        return [shard for unit in self.units for shard in unit.params]

    @property
    def segments(self) -> list[SegmentShard]:
        """Of all units: their places are the tags of their messages."""
        return [segment for unit in self.units for segment in unit.segments]

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds the whole model: nothing is gathered or reduced."""
        return self.ranks.world_size == 1

    @property
    def is_computing(self) -> bool:
        """Whether a forward or a backward is under way, in whatever thread."""
        return self.depth > 0 or self._backward is not None

    @property
    def leaves_unreduced_next(self) -> bool:
        """Whether the next backward leaves its gradients in their slots."""
        return self.plan.keeps_grads and not self.casts.is_synced and not self.is_alone

    def refuse_empty(self, what: str) -> None:
        """Raise if weights or buffers are empty; `what` is about to be done.

        Raises:
            ShardingError: names the first of them.
        """
        if self.empty:
            first = next(iter(self.empty))
            kind = "parameter" if any(first == shard.name for shard in self.param_shards) else "buffer"
            more = f", and {len(self.empty) - 1} more," if len(self.empty) > 1 else ""
            raise ShardingError(
                f"{what}, but {kind} {first!r}{more} is empty: it was on the meta device, and nothing has given it "
                "values since. Give it values on all ranks: load_safetensors(model, directory), load_checkpoint, "
                "model.load_state_dict, init_weights(model), or by a function of yours, init_weights(model, function)"
            )

    def fill(self, names: Iterable[str]) -> None:
        """Parameters and buffers of these names have values from now on."""
        for name in names:
            self.empty.pop(name, None)

    # -- forward --------------------------------------------------------------------------------------------------

    def open_forward(self, units: frozenset[int], *, is_whole: bool, at_first_read: bool = False) -> None:
        """The forward of a watched module begins; the outermost one begins a pass over `units`.

        Args:
            units: what may be used.
            is_whole: the module is the model, not a part of it.
            at_first_read: the pass begins only when weights are asked for: hooks that run before may change them.
        """
        self.depth += 1
        if self.depth > 1 or self._recomputing is not None:
            return
        try:
            self._meet(is_whole=is_whole)
            self._entering = units
            if not at_first_read:
                self._begin_if_entering()
        except BaseException:
            self.depth -= 1
            self._forward = self._entering = None
            raise

    def _meet(self, *, is_whole: bool) -> None:
        """What comes before a pass, and before hooks of the model's own: it sees the buffers that it computes with."""
        self.settle()
        refuse_transforms()
        self.streams.refuse_capture()
        self.refuse_empty("a forward")
        self.inputs.before_pass()
        if is_whole:  # as under DDP, a call of a part of the model is none of it
            trains = torch.is_grad_enabled() and self.casts.is_synced
            self.buffers.before_pass(trains=trains, source=self.inputs.buffer_source)

    def _begin_if_entering(self) -> None:
        units, self._entering = self._entering, None
        if units is not None:
            self._begin_pass(units)

    def close_forward(self, error: BaseException | None) -> Pass | None:
        """The forward of a watched module is over; the outermost one ends the pass, which is returned."""
        self.depth -= 1
        if self.depth > 0:
            return None
        if error is None:
            self._begin_if_entering()
        self._entering = None
        return None if self._forward is None else self._end_pass(error)

    def _begin_pass(self, units: frozenset[int]) -> None:
        if self._looks_for_autocast and torch.is_autocast_enabled(self.streams.device.type):
            self._looks_for_autocast = False
            warn_user(
                "autocast around layers that compute with fp32 weights: autograd keeps a half-precision copy of each "
                "weight until backward, in the end the whole model's, on every rank. Without autocast, "
                "Precision(param_dtype=torch.bfloat16) keeps none, and gathers half as many bytes"
            )
        self.casts.begin_pass()
        for unit in self._resident:
            be_absent(unit.views)
        visits = [index for index in self.order if index in units or index == ROOT_UNIT]
        pass_ = Pass({ROOT_UNIT: self.root_unit.versions()} if torch.is_grad_enabled() else {})
        learns = torch.is_grad_enabled() and not self._has_learnt and not self.is_alone
        self._forward = Forward(Schedule(visits, self._slot_of, self._turns, reduce=False), pass_, learns=learns)
        for observer in self.streams.observers:
            observer.on_moment(Moment.FORWARD_BEGINS, ROOT_UNIT)
        self._reach(self._forward, self.root_unit)
        self._bind(self.root_unit)

    def pre_forward(self, unit: StreamedUnit) -> Use:
        """A layer of `unit` is about to compute: its weights are in place and bound afterwards."""
        if (backward := self._recomputing) is not None:
            self._recompute(backward, unit)
            backward.running.append(unit)
            for observer in self.streams.observers:
                observer.on_moment(Moment.RECOMPUTATION_BEGINS, unit.index)
            return Use(unit, self._recomputed_pass(backward), unit.versions())
        self._begin_if_entering()
        forward = self._forward
        assert forward is not None
        for observer in self.streams.observers:
            observer.on_moment(Moment.FORWARD_BEGINS, unit.index)
        is_inside = bool(forward.running) and not unit.is_streamed
        if is_inside:  # beside the program: the outer layer's turn goes on
            self.use_in_place(unit)
        else:
            self._reach(forward, unit)
        self._bind(unit)
        forward.running.append(unit)
        versions = unit.versions() if torch.is_grad_enabled() else []
        return Use(unit, forward.pass_, versions, is_inside=is_inside)

    def post_forward(self, unit: StreamedUnit) -> None:
        """A layer of `unit` has computed. Its slot goes to another unit once one is asked for."""
        if (backward := self._recomputing) is not None:  # it stays until its reduction
            for observer in self.streams.observers:
                observer.on_moment(Moment.RECOMPUTATION_ENDS, unit.index)
            backward.running.pop()
            unit.writes.refuse()
            if backward.running:
                self._recompute(backward, backward.running[-1])
            return
        forward = self._forward
        assert forward is not None
        for observer in self.streams.observers:
            observer.on_moment(Moment.FORWARD_ENDS, unit.index)
        forward.running.pop()
        try:
            self._leave(unit)
        finally:
            if unit not in forward.running:  # a layer of it around this one goes on
                unit.release()
        if forward.running and unit.is_streamed:  # the outer layer goes on: its weights may have left
            outer = forward.running[-1]
            self._reach(forward, outer)
            self._bind(outer)

    def _bind(self, unit: StreamedUnit) -> None:
        """`unit` computes with its slot from here on. What it was like before is remembered."""
        if not unit.is_bound:  # else a layer of it is running, which may have changed it
            self._look_at(unit)
            unit.bind()

    def _look_at(self, unit: StreamedUnit) -> None:
        """Somebody is about to see the unit's compute views. They are as they were left, if they stay in place."""
        forward = self._forward
        if not unit.is_streamed and forward is not None:
            if unit.index in forward.in_place:
                return
            forward.in_place.add(unit.index)
            if unit is not self.root_unit:
                be_present(unit.views)
        unit.take_trainability()
        unit.writes.forget()

    def _leave(self, unit: StreamedUnit) -> None:
        """Whoever has computed with the unit's views has done so: weights as they were, what was frozen stays so."""
        unit.give_trainability()
        unit.writes.refuse()

    @property
    def _recomputing(self) -> Backward | None:
        """The backward that what runs forward now does so for; None in a pass."""
        return self._backward if self._backward is not None and in_backward() else None

    def _recomputed_pass(self, backward: Backward) -> Pass:
        """The pass that backward goes through; of a graph of root parameters alone, one without visits."""
        if backward.pass_ is None:
            backward.pass_ = Pass({ROOT_UNIT: self.root_unit.versions()})
        return backward.pass_

    def _reach(self, forward: Forward, unit: StreamedUnit) -> None:
        """Issue what the program has up to `unit`, and let compute wait for its weights (rule 1)."""
        schedule = forward.schedule
        if forward.learns and schedule.departs(unit.index):
            self._issue(schedule.finish())  # as on ranks that do not depart
            while self._serve(schedule, unit.index) != unit.index:
                pass
            schedule.reach_served(unit.index)
        else:
            self._issue(schedule.reach(unit.index))
        self.acquire(unit)

    def _serve(self, schedule: Schedule, asked: int | None) -> int | None:
        """All ranks are behind the program, and gather a unit that one has asked for. Collective.

        Args:
            schedule: the program.
            asked: the unit that this rank has asked for; None at the end of its forward.

        Returns:
            The unit; None if nobody has asked.
        """
        if not self.ranks.any_rank(asked is not None):
            return None
        chosen: int = min(unit for unit in self.ranks.gather_objects(asked) if unit is not None)
        schedule.serve(chosen)
        if self.units[chosen].weight_slot.content != chosen:
            self._gather(self.units[chosen])
        return chosen

    @property
    def is_in_forward(self) -> bool:
        """Whether a pass is under way."""
        return self._forward is not None

    @property
    def is_in_pass(self) -> bool:
        """Whether weights may be asked for: in a pass, and in a backward, which may recompute."""
        if self._forward is not None or self._entering is not None:
            return True
        return not self._is_delivering and in_backward()

    def read(self, unit: StreamedUnit) -> None:
        """Weights of `unit`, which is resident, are read: they are in place from here on.

        Its compute views may go into the graph: backward finds them as they are. Nobody says when they are read last: a
        slot of a unit's own is gathered into only behind a cast, before which all computing was (rule 5).
        """
        self._begin_if_entering()
        if self._forward is None:
            if self._backward is None:
                self.begin_backward(None)  # that nobody has announced
            self.acquire(unit)
            be_present(unit.views)
        elif unit is not self.root_unit:
            self.use_in_place(unit)

    def use_in_place(self, unit: StreamedUnit) -> None:
        """Weights of `unit`, which stays, are computed with beside the program: nobody's turn ends. Inside a pass."""
        forward = self._forward
        assert forward is not None
        self.acquire(unit)
        self._look_at(unit)
        forward.read.add(unit.index)
        forward.schedule.read(unit.index, is_inside=bool(forward.running))
        forward.pass_.versions.setdefault(unit.index, unit.versions())

    def _end_pass(self, error: BaseException | None) -> Pass | None:
        forward, self._forward = self._forward, None
        assert forward is not None
        for observer in self.streams.observers:
            observer.on_moment(Moment.FORWARD_ENDS, ROOT_UNIT)
        refused: ShardingError | None = None
        if error is None:
            try:
                for index in (ROOT_UNIT, *sorted(forward.read)):
                    self._leave(self.units[index])
            except ShardingError as raised:
                error = refused = raised
        for unit in self.units:
            if unit.is_bound:
                unit.release()
        if error is not None and (self.ranks.has_failed or not isinstance(error, Exception)):
            return None
        self._issue(forward.schedule.finish())
        while forward.learns and self._serve(forward.schedule, None) is not None:
            pass
        self.casts.end_pass()
        # A rank whose forward has failed takes part in what ranks tell each other.
        has_failed = error is not None
        if forward.learns:
            self._learn(forward.schedule, has_failed=has_failed)
        if refused is not None:
            raise refused
        if has_failed or not torch.is_grad_enabled():
            return None
        forward.pass_.visits = tuple(forward.schedule.log)
        graph_is_made(self.ranks)
        return forward.pass_

    def _learn(self, schedule: Schedule, *, has_failed: bool) -> None:
        """After a training pass: the order in which units ran, and ran before, is the program from now on.

        Ranks may have skipped units. If what they have used is no part of one order, the program stays as it is.

        Args:
            schedule: of the pass.
            has_failed: the forward has raised here: then the next one counts.
        """
        used = None if has_failed else tuple(schedule.used)
        has_news = schedule.has_served or used is None or not is_part_of(used, self._known)
        if self.ranks.any_rank(has_news):
            everywhere = dict.fromkeys(self.ranks.gather_objects(used))
            if None in everywhere:
                return
            known = join_orders((self._known, *everywhere), self.order)
            if known is None:
                self._has_learnt = True
            else:
                self._known = known
                self.order = merge_order(known, self._turns)
            if schedule.has_served and (order := join_orders(everywhere, self.order)) is not None:
                schedule.tidy(merge_order(order, self._turns))
        if not self._has_learnt:
            self._has_learnt = all(unit in self._known for unit, turns in enumerate(self._turns) if turns)

    # -- gathers --------------------------------------------------------------------------------------------------

    def _issue(self, ops: Sequence[Op]) -> None:
        for op in ops:
            unit = self.units[op.unit]
            if op.kind is OpKind.REDUCE:
                self.reductions.due.discard(op.unit)
                if self._backward is None or not self._backward.leaves_unreduced:
                    self.reductions.start(unit)
            elif unit.weight_slot.content != unit.index:
                self._gather(unit)

    def _gather(self, unit: StreamedUnit) -> None:
        holder = unit.weight_slot.content
        if holder is not None and self.units[holder].is_bound and self.units[holder] is not unit:
            if self._forward is not None:  # a layer that has called another: it finds its weights as they were
                self._leave(self.units[holder])
            self.units[holder].release()
        with self.ranks.guard("the gather of", unit.name):
            unit.start_gather()

    def acquire(self, unit: StreamedUnit) -> None:
        """Compute waits for the unit's weights (rule 1), which are gathered if they are elsewhere."""
        if unit.weight_slot.content != unit.index:
            self._gather(unit)
        with self.ranks.guard("the gather of", unit.name):
            unit.finish_gather()

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self, pass_: Pass | None) -> None:
        """Backward has reached `pass_`: its program is what the pass issued, reversed. See [Note: several passes].

        Args:
            pass_: None for a graph in which no unit's weights are needed and no output of a pass occurs.
        """
        backward = self._running_backward() or self._open_backward()
        if pass_ is None or pass_ is backward.pass_ or pass_ in backward.closed:
            return
        if backward.pass_ is not None:
            backward.closed.append(backward.pass_)
            self._close_all(backward)
        backward.pass_ = pass_
        visits = [unit for unit in reversed(pass_.visits) if unit != ROOT_UNIT]
        backward.schedule = Schedule(visits, self._slot_of, self._turns, reduce=True)
        self.reductions.due = set(visits)
        for index, versions in pass_.versions.items():  # ranks may raise at different units: all have the same program
            self._check_versions(self.units[index], versions)
        self._issue(backward.schedule.release_before(0))
        for index in pass_.versions:
            self.acquire(self.units[index])

    def _open_backward(self) -> Backward:
        for unit in self.units:
            unit.take_trainability()
            if self.plan.keeps_grads:
                unit.grads.resume()
        graph_is_reached(self.ranks)
        nothing = Schedule([], self._slot_of, self._turns, reduce=True)
        at_end = functools.partial(untraced, self.finish_backward)
        backward = self._backward = Backward(nothing, at_end, self._let_go, leaves_unreduced=self.leaves_unreduced_next)
        self.reductions.due = set()
        Variable._execution_engine.queue_callback(at_end)
        for observer in self.streams.observers:
            observer.on_moment(Moment.BACKWARD_BEGINS, ROOT_UNIT)
        self.acquire(self.root_unit)
        self.root_unit.bind()
        return backward

    def need(self, use: Use) -> None:
        """Backward is about to read the weights of `use`'s unit (rule 1). Called any number of times."""
        unit = use.unit
        backward, forward = self._running_backward(), self._forward
        if backward is not None and backward.computing is unit and unit.is_bound and not use.is_inside:
            return
        is_inside_forward = forward is not None and use.pass_ is forward.pass_
        if torch.is_grad_enabled() and unit.weight_slot.is_shared and not (is_inside_forward and self._runs(unit)):
            raise ShardingError(
                f"backward(create_graph=True) through {unit.name!r}: its weights leave their slot afterwards, so "
                "with more than one rank gradients cannot be differentiated again"
            )
        if is_inside_forward and forward is not None:  # torch.autograd.grad() in the model's own forward
            self._check_versions(unit, use.versions)
            if unit.is_streamed:  # beside the program: backward has to come by there
                forward.schedule.depart(unit.index)
        else:
            self.begin_backward(use.pass_)
            self._check_versions(unit, use.versions)
            backward = self._backward
            if backward is not None and use.pass_ is backward.pass_ and not use.is_inside:
                self._advance(backward, unit)
        self.acquire(unit)
        if not use.is_inside:
            unit.bind()

    def _runs(self, unit: StreamedUnit) -> bool:
        """Whether a layer of `unit` is in its forward."""
        return self._forward is not None and unit in self._forward.running

    def _check_versions(self, unit: StreamedUnit, versions: list[int]) -> None:
        """Raise, as autograd does, if weights were changed in place since the forward whose backward this is."""
        if versions != (now := unit.versions()):
            changed = [s.name for s, was, now_ in zip(unit.params, versions, now, strict=True) if was != now_]
            raise ShardingError(
                f"parameter {changed[0]!r} was modified by an inplace operation (optimizer.step(), load_state_dict, "
                ".copy_()) between a forward and its backward, whose gradients would mix old activations with new "
                "weights: run the backward first, or the forward again"
            )

    def _recompute(self, backward: Backward, unit: StreamedUnit) -> None:
        """Forward inside backward. The next unit of the program is simply early; any other is fetched beside it."""
        schedule = backward.schedule
        if backward.computing is not unit:
            start = schedule.released + (backward.computing is not None)
            if start < len(schedule.visits) and schedule.visits[start] == unit.index:
                self._advance(backward, unit)
        self.acquire(unit)
        unit.bind()

    def _advance(self, backward: Backward, unit: StreamedUnit) -> None:
        """Move on to `unit`'s next visit: units before it are over, so their slots and gradients go (rules 2 and 4)."""
        if backward.computing is unit:
            return
        visit = backward.schedule.find(unit.index)
        if visit is None:  # outside the program, or needed again after its turn
            return
        if not unit.is_streamed and visit > backward.schedule.released + (backward.computing is not None):
            return  # it needs no turn, and those whose turn is before may still come
        backward.computing = unit
        for observer in self.streams.observers:
            observer.on_moment(Moment.BACKWARD_BEGINS, unit.index)
        for other in self.units[1:]:
            if other.is_bound and other is not unit:
                other.release()
        self._issue(backward.schedule.release_before(visit))

    def on_grad(self, unit: StreamedUnit, param_index: int, grad: torch.Tensor) -> None:
        """A gradient is complete, as far as this graph goes: it moves into the grad slot (rule 3)."""
        backward = self._running_backward()
        if backward is None or backward.computing is not unit:
            if self._forward is not None:
                name = unit.params[param_index].name
                raise ShardingError(
                    f"backward() inside the model's forward has made a gradient of {name!r}, "
                    "which is reduced over ranks only in a backward after it: use torch.autograd.grad(..., inputs) for "
                    "what the forward needs"
                )
            backward = backward or self._open_backward()
            if unit.is_streamed:
                self._advance(backward, unit)
        scale = self.inputs.grad_scale
        self.reductions.take(unit, param_index, grad if scale == 1.0 else grad * scale)
        for observer in self.streams.observers:
            observer.on_moment(Moment.GRAD_WRITTEN, unit.index)

    def _close_all(self, backward: Backward) -> None:
        """The schedule is over: issue what is left, let go of every unit."""
        for observer in self.streams.observers:
            observer.on_moment(Moment.BACKWARD_ENDS, None)
        for unit in self.units[1:]:
            if unit.is_bound:
                unit.release()
        backward.computing = None
        self._issue(backward.schedule.finish())
        if not backward.leaves_unreduced:
            self.reductions.start_late_ones()

    def finish_backward(self) -> None:
        """The end of backward: last reductions, then gradients for the optimizer (rule 7)."""
        backward = self._backward
        if backward is None:
            return
        self._close_all(backward)
        self._reduce_root_unit(backward)
        if self._forward is None:
            self.root_unit.release()
        if backward.leaves_unreduced:
            for unit in self.units:
                unit.grads.leave_unreduced(has_trained=unit.is_trainable)
            self._backward = None
            return
        given = self.reductions.finish()
        self._backward = None
        if self.reductions.check is not None:
            self.reductions.check()
        self._is_delivering = True
        try:
            for param in given:  # last: a hook may step and clear the gradient
                with torch._C.DisableTorchFunctionSubclass():
                    hooks = param._post_accumulate_grad_hooks
                for hook in (hooks or {}).values():
                    hook(param)
        finally:
            self._is_delivering = False

    def _reduce_root_unit(self, backward: Backward) -> None:
        if not backward.leaves_unreduced:
            self.reductions.start(self.root_unit)

    # -- when things go wrong -------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """An exception has ended a backward: modules hold the sharded parameters again. Any of autograd's threads."""
        with self._leaving:
            if self._backward is not None and self._backward.has_ended:
                for unit in self.units:
                    if unit.is_bound:
                        unit.release()

    def _running_backward(self) -> Backward | None:
        """The backward under way, if one is: autograd has let go of one that an exception has ended."""
        if self._backward is not None and self._backward.has_ended:
            self.settle()
        return self._backward

    def settle(self) -> None:
        """Leave a backward that an exception has ended, so that the next pass is right: nothing is left of gradients.

        Nor of those that were added to: what has come of them differs between parameters, and ranks. What the program
        has left is issued first, so that ranks that failed at different points stay in step.
        """
        with self._leaving:
            backward = self._backward
            if backward is not None and (backward.has_ended or not in_backward()):
                self._settle(backward)

    def _settle(self, backward: Backward) -> None:
        log.warning("a backward has ended with an exception: all gradients of the model are discarded")
        try:
            if not self.ranks.has_failed:
                self._close_all(backward)
                self._reduce_root_unit(backward)
                self.reductions.complete()
        finally:
            for unit in self.units:
                unit.release()
                unit.grads.give_up()
            self._backward = None
