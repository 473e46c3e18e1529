"""One forward pass, from the call of the model to its return, in the order of events.

For a unit without a visit left in the order see [Note: out of order] in `streamshard.planning.program`.
"""

from __future__ import annotations

import threading

import torch

from streamshard.comm.flight_recorder import RecordKind
from streamshard.comm.streams import StepPart
from streamshard.core.engine import ROOT_UNIT, Engine, Graph, Phase, Use
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.loop import refuse_other_inputs, refuse_transforms
from streamshard.guards.weights import refuse_read
from streamshard.planning.program import Schedule
from streamshard.torch_private import is_profiled


def begin_forward(engine: Engine, units: frozenset[int], inputs: object, *, is_whole_model: bool) -> Forward:
    """A forward pass begins: the root unit's weights are in place and bound afterwards.

    Args:
        engine: between passes.
        units: which units the pass may use, the root unit included.
        inputs: the arguments of the call.
        is_whole_model: the model is called, not a part of it. As under DDP, a part leaves buffers alone.

    Raises:
        ShardingError: no pass can begin; says why.
        RankMismatchError: see `refuse_other_inputs`.
        CommunicationError: the process group has been destroyed.
    """
    if engine.phase is not None:
        engine.phase.recover()  # of a failed backward; one that runs in another thread is refused next
    _refuse_pass(engine)
    if is_profiled() or engine.profiler.is_on:
        engine.profiler.look()
    if engine.inputs is not None:
        engine.inputs.before_pass()  # before any collective: ranks without inputs have to join them
    if engine.ends is not None:
        engine.watch_ends(engine.ends)
    # In the first passes only: the hosts wait for each other.
    if engine.ranks.n_parts > 1 and is_whole_model and torch.is_grad_enabled() and not engine.order.is_settled:
        refuse_other_inputs(engine.ranks, inputs)
    if is_whole_model and engine.buffers.are_sent:
        trains = torch.is_grad_enabled() and engine.is_synced
        source = 0 if engine.inputs is None else engine.inputs.buffer_source
        engine.buffers.before_pass(trains=trains, source=source)
    engine.check_structure()
    for unit in engine.units:
        unit.guard.check()
    # So errors can name ranks that run more forwards, also forwards that gather nothing.
    engine.ranks.recorder.log.add(RecordKind.FORWARD)
    changed = engine.expire_slots()
    # Before activations need the memory: gradients that were cleared since the last pass.
    for unit in engine.units:
        unit.grads.drop()
    if engine.outer is not None:
        engine.outer.begin_pass(engine.units, changed)
    forward = Forward(engine, units)
    for head in engine.tied:
        head.put_back()
    engine.phase = forward  # last: an error above leaves the engine between passes
    return forward


def _refuse_pass(engine: Engine) -> None:
    """Raise if no pass can begin. See `begin_forward`."""
    if engine.phase is not None:
        other = "forward" if engine.phase.is_forward else "backward"
        raise ShardingError(
            f"a forward begins in one thread while a {other} of the same model runs in another, and their layers would "
            "take each other's buffers: call the model afterwards"
        )
    if engine.is_summoned:
        raise ShardingError(
            "a forward inside summon_full_params, where parameters hold full tensors, but layers compute with "
            "all-gathered ones. Call the model, or generate, outside of summon_full_params"
        )
    refuse_transforms(engine.streams)
    if engine.empty:
        engine.refuse_empty("a forward")
    if engine.host is not None:
        engine.host.refuse_failed()
    if engine.ranks.users_group_of() is None:
        engine.ranks.refuse_destroyed()


class Forward(Phase):
    """See `begin_forward`. Issues the first all-gathers, and binds the root unit.

    Args:
        engine: the model's.
        units: which units the pass may use.
    """

    is_forward = True

    def __init__(self, engine: Engine, units: frozenset[int]) -> None:
        self._thread = threading.get_ident()
        self._has_graph = has_graph = torch.is_grad_enabled()
        visits = list(filter(units.__contains__, engine.order.order))
        self.graph = Graph(engine.plan, {ROOT_UNIT: engine.root_unit.versions()} if has_graph else {})
        self._engine = engine
        self._schedule = Schedule(visits, engine.plan, reduce=False)
        self._learns = has_graph and not engine.order.is_settled
        self._running: list[Unit] = []  # units of the layers that are running, one inside the other
        self._used: set[int] = set()  # resident units that were used
        self._beside: set[int] = set()  # resident units that are used beside the program
        self._reporting: set[int] = set()  # units of layers whose nodes will tell when backward comes to them
        # They were present since the last pass, and their slots may have expired: the first read all-gathers.
        for unit in engine.resident:
            unit.guard.set_classes(is_present=False)
        engine.streams.observe(StepPart.FORWARD, ROOT_UNIT, begins=True)
        engine.weights_written.record()
        engine.weights_written.wait()  # rule 5
        self._reach(engine.root_unit)
        self._begin_use(engine.root_unit)
        engine.root_unit.set_bound(True)

    @property
    def is_current(self) -> bool:
        """See `Phase`. A call in another thread would be a pass of its own."""
        return threading.get_ident() == self._thread

    # -- layers ---------------------------------------------------------------------------------------------------

    def gather_residents(self) -> None:
        """All-gather resident units now, but for the last one, and use them beside the program, in any order."""
        last = self._engine.order.order[-1]
        self._beside = {unit.index for unit in self._engine.resident if unit.index != last}
        for index in sorted(self._beside):
            self._engine.all_gather(self._engine.units[index])

    def pre_forward(self, unit: Unit) -> Use:
        """See `Phase`. A resident unit's layer inside another unit's layer does not end the other unit's visit.

        Raises:
            ShardingError: a layer of another streamed unit runs.
        """
        self._engine.streams.observe(StepPart.FORWARD, unit.index, begins=True)
        outer = self._running_beside(unit) if self._running else None  # a call for each layer would cost host time
        if unit.is_streamed and outer is not None:
            raise ShardingError(
                f"a layer of {outer.name!r} calls a layer of {unit.name!r}, and both take turns in the same "
                f"buffers: keep one of them in place, StreamShard(model, resident=[{unit.name!r}])"
            )
        if self._engine.ends is not None:
            self._engine.ends.use(unit, is_inside=outer is not None)
        is_inside = bool(self._running) and not unit.is_streamed
        if is_inside:
            self._use_in_place(unit)
        else:
            self._reach(unit)
        if not unit.is_bound:  # else a layer of the unit is running, and may have changed the unit
            self._begin_use(unit)
            unit.set_bound(True)
        self._running.append(unit)
        is_first = unit.index not in self.graph.called
        self.graph.called.add(unit.index)
        if not is_first and not unit.is_streamed:
            self.graph.called_again.add(unit.index)
        (self._reporting if torch.is_grad_enabled() else self.graph.silent).add(unit.index)
        return Use(unit, self.graph, unit.versions(), is_inside, is_first)

    def post_forward(self, unit: Unit) -> None:
        """See `Phase`. The unit's slot stays as it is until another unit needs it."""
        self._engine.streams.observe(StepPart.FORWARD, unit.index, begins=False)
        self._running.pop()
        try:
            unit.end_use()
        finally:
            if unit not in self._running:  # a layer of the unit may have run inside another one
                unit.release()

    def read(self, unit: Unit, name: str = "") -> None:
        """See `Phase`. A read of the head, behind the blocks, is a visit of it.

        Raises:
            ShardingError: other units need the slot. Without gradients too: a view of the weights may live on.
        """
        outer = self._running_beside(unit)
        if self._engine.ends is not None:
            self._engine.ends.use(unit, is_read=True, is_inside=outer is not None)
        if not unit.is_streamed:
            self._use_in_place(unit)
        elif outer is not None or not self._schedule.is_last(unit.index):
            if name:
                refuse_read(name)
        else:
            self._reach(unit)
            self._begin_use(unit)
            unit.set_bound(True)
            self.graph.versions.setdefault(unit.index, unit.versions())

    def _running_beside(self, unit: Unit) -> Unit | None:
        """Another unit of which a layer runs, and which takes turns in the block slots."""
        return next((outer for outer in self._running if outer.is_streamed and outer is not unit), None)

    def recover(self) -> None:
        """See `Phase`. The call of the model itself ends a forward, whatever happens."""

    def _reach(self, unit: Unit) -> None:
        """Issue the program up to `unit`, and let compute wait for the unit's weights (rule 1)."""
        if unit.index in self._beside:
            self._use_in_place(unit)
            return
        schedule = self._schedule
        if self._learns and schedule.is_out_of_order(unit.index):
            self._engine.issue(schedule.advance_to())
            while self._gather_on_request(unit.index) != unit.index:  # other ranks' requests may come first
                pass
        self._engine.issue(schedule.reach(unit.index))
        self._engine.all_gather(unit)  # unless it is in its slot
        unit.wait_until_ready()

    def _gather_on_request(self, wanted: int | None) -> int | None:
        """All ranks have issued the whole program, and all-gather a unit that one of them wants. Collective.

        Args:
            wanted: by this rank; None at the end of its forward.

        Returns:
            The unit that was all-gathered; None if no rank wants any.
        """
        engine = self._engine
        everywhere = engine.ranks.gather_objects("all-gather a unit out of order", wanted)
        # Several ranks may want another one each: all choose alike.
        chosen: int | None = min((unit for unit in everywhere if unit is not None), default=None)
        if chosen is None:
            return None
        self._schedule.add_request(chosen)
        engine.all_gather(engine.units[chosen])
        return chosen

    def _use_in_place(self, unit: Unit) -> None:
        """Compute with the resident `unit` beside the program: no other unit's visit ends."""
        self._engine.all_gather(unit)
        unit.wait_until_ready()
        self._begin_use(unit)
        self._schedule.read(unit.index, is_inside=bool(self._running))
        self.graph.versions.setdefault(unit.index, unit.versions())

    def _begin_use(self, unit: Unit) -> None:
        """Layers may compute with the weights: forget earlier writes, copy ``requires_grad``. A resident unit: once."""
        if not unit.is_streamed:
            if unit.index in self._used:
                return
            self._used.add(unit.index)
            unit.guard.set_present(True)
        unit.copy_trainability()

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, error: BaseException | None) -> Graph | None:
        """The model returns, or raises `error`. The engine is between passes afterwards.

        Returns:
            The facts that the autograd graph of the pass keeps; None without gradients, or after an error.

        Raises:
            ShardingError: the forward has changed a weight in place.
            Exception: a late step has failed in this forward.
        """
        engine = self._engine
        engine.phase = None
        engine.streams.observe(StepPart.FORWARD, ROOT_UNIT, begins=False)
        if error is not None:
            engine.profiler.close()  # a layer that was refused has begun
        refused: ShardingError | None = None  # raised last: the rest of the program comes first, for other ranks
        if error is None:
            try:
                # A streamed unit's use has ended with its layer.
                for unit in map(engine.units.__getitem__, sorted({ROOT_UNIT, *self.graph.versions})):
                    if unit.is_bound or not unit.is_streamed:
                        unit.end_use()
            except ShardingError as raised:
                error = refused = raised
        for unit in engine.units:
            if unit.is_bound or unit.index in self.graph.versions:
                unit.release()
        if self._has_graph:
            for unit in engine.units[1:]:
                unit.guard.end_pass()
        # After a failure each collective raises, and an interrupt (Ctrl-C) must not wait for other ranks.
        if error is not None and (engine.ranks.failure is not None or not isinstance(error, Exception)):
            return None
        # A rank with a failed forward still takes part in the exchanges.
        engine.issue(self._schedule.advance_to())
        while self._learns and self._gather_on_request(None) is not None:
            pass
        engine.finish_reading()
        engine.are_weights_current = not engine.is_synced
        if self._learns:
            engine.order.learn(self._schedule, engine.ranks.gather_objects, has_failed=error is not None)
        if engine.host is not None:
            engine.host.raise_failure()  # not before: other ranks wait in the exchanges above
        if refused is not None:
            raise refused
        if error is not None or not torch.is_grad_enabled():
            return None
        self.graph.visits = tuple(self._schedule.log)
        self.graph.silent -= self._reporting
        if engine.ends is not None:
            engine.ends.end_pass(self.graph)
        engine.progress.is_unreached = True
        return self.graph
