"""One backward, from the loss to the gradients for the optimizer, in the order of events.

[Note: pre-backward]
Autograd runs the nodes that were created last first. So a prehook on the nodes of a layer's outputs says in time that
backward needs the layer's weights. Gradients of units that were visited before are then complete, except those with
another visit to come: a unit is reduced after its last visit. A backward that comes to a layer by another way raises,
see [Note: absent weights] in `streamshard.guards.weights`.

[Note: several passes]
A backward may go through several passes. It takes each one when it reaches it, and does not ask beforehand which
graphs exist or are alive: the answer could differ between ranks, and with it the collectives. Autograd reaches the
latest pass first. A unit is reduced once for each pass, which adds to the fp32 gradients. The root unit is reduced
once, at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from streamshard.comm.streams import StepPart
from streamshard.core.engine import ROOT_UNIT, Engine, Graph, Phase, Use
from streamshard.core.reductions import call_hooks
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError, log
from streamshard.planning.program import Schedule
from streamshard.torch_private import graph_task_id, is_profiled

_LETS_GO_WITHIN_S = 1.0  # after an exception, how long autograd may hold the callback of its backward


class Backward(Phase):
    """A backward, with the forwards that it recomputes. See [Note: several passes].

    Args:
        engine: the model's.

    Attributes:
        graph: of the pass that this backward has reached last; None if it has reached none.
        task: number of autograd's task.
        callback_of: returns None once autograd is done with this backward. If this backward is still the engine's pass
            by then, an exception has ended it.
    """

    is_forward = False

    callback_of: Callable[[], object]

    def __init__(self, engine: Engine) -> None:
        self.graph: Graph | None = None
        self.task = graph_task_id()
        self._engine = engine
        self._follows_step = False  # an optimizer has stepped since the last backward
        # One rank's reductions send nothing that `no_sync` could save.
        is_local = not engine.is_synced and not engine.is_whole
        self._leaves_unreduced = is_local and engine.plan.keeps_grads
        over_replicas = engine.reductions.over_replicas
        leaves = over_replicas is not None and over_replicas.averages_grads
        self._leaves_to_replicas = is_local and leaves and not engine.plan.keeps_grads
        self._schedule = Schedule([], engine.plan, reduce=True)  # until a pass is entered
        self._closed: list[Graph] = []  # of passes that it has been through
        # Resident units that this rank has called several times, until backward comes to the first call. Their
        # reduction would be too early before. Other ranks may have called them only once.
        self._waiting: set[int] = set()
        self._read: list[Unit] = []  # whose weights code of the pass has read, outside of their layers
        self._bound: dict[Unit, None] = {}  # units of layers that it has bound: in deep models few of many
        self._unbound: set[Unit] = set()  # units that are used without being bound
        self._recomputing: list[Unit] = []  # units of the layers that run forward, one inside the other

    @property
    def is_current(self) -> bool:
        """See `Phase`."""
        return graph_task_id() != -1 and self.callback_of() is not None

    def begin(self) -> None:
        """Bind the root unit: backward may need its weights any time."""
        engine = self._engine
        if is_profiled() or engine.profiler.is_on:
            engine.profiler.look()
        engine.streams.observe(StepPart.BACKWARD, ROOT_UNIT, begins=True)
        for unit in engine.units:
            unit.copy_trainability()
            if unit.grads.has_unreduced:
                unit.grads.resume()
        engine.progress.is_unreached = False
        self._follows_step = engine.progress.has_stepped
        engine.progress.has_stepped = False  # hooks may step inside this backward
        engine.reductions.begin(is_synced=engine.is_synced, reduces=not self._leaves_unreduced)
        # This backward's all-gathers cast weights anew. A write through `.data` since the forward counts in no version,
        # so it is not refused.
        engine.weights_written.record()
        engine.weights_written.wait()  # rule 5
        for head in engine.tied:
            head.put_back()
        self._unshard(engine.root_unit, binds=True)

    def break_off(self, callback: object) -> None:
        """Autograd has dropped its callback. If an exception has ended the backward, reshard units. In any thread."""
        if self._engine.phase is self:
            # So the first gradient of the next backward begins one, which cleans up after this one.
            self._engine.reductions.is_open = False
            self._engine.profiler.close()
            # No collectives here, perhaps in a thread of autograd's: the next pass issues them (`recover`).
            for unit in self._engine.units:
                if unit.is_bound:
                    unit.release()

    # -- weights --------------------------------------------------------------------------------------------------

    def enter(self, graph: Graph) -> None:
        """Backward has come to the pass of `graph`: the program is the forward's visits, reversed."""
        if graph is self.graph or graph in self._closed:  # one pass may have many outputs and layers
            return
        engine = self._engine
        if self.graph is not None:
            self._closed.append(self.graph)
            self._close_pass()
        self.graph = graph
        self._waiting = set(graph.called_again)
        self._read = list(map(engine.units.__getitem__, graph.versions.keys() - {ROOT_UNIT}))
        visits = list(filter(None, reversed(graph.visits)))  # without the root unit, which is reduced at the end
        plan = engine.plan
        self._schedule = Schedule(visits, plan, reduce=True)
        # The program is set before anything raises: `recover` issues its rest, the same on all ranks.
        if graph.plan is not plan:
            refuse_moved(engine)
        for index, versions in graph.versions.items():
            if versions != engine.units[index].versions():
                refuse_changed(engine.units[index], versions)
        engine.issue(self._schedule.advance_to(0))  # all-gathers that wait for no visit
        # The graph holds these weights themselves. Any node may read them, and no prehook tells before.
        for index in graph.versions:
            unit = engine.units[index]
            self._unshard(unit, binds=unit.is_streamed)

    def need(self, use: Use) -> None:
        """Backward is about to read the weights of a unit: put them in place (rule 1)."""
        self.enter(use.graph)
        if use.versions != use.unit.versions():
            refuse_changed(use.unit, use.versions)
        # A pass that backward has left has no program any more. A call inside a layer belongs to the visit of that
        # layer.
        if use.graph is self.graph and not use.is_inside:
            if use.is_first:
                self._waiting.discard(use.unit.index)
            self._advance(use.unit)
        if use.unit.index not in self._engine.plan.weightless:  # a look-up's backward reads indices only
            self._unshard(use.unit, binds=not use.is_inside)

    def _unshard(self, unit: Unit, *, binds: bool = False) -> None:
        """Let compute wait for the unit's weights (rule 1), which are all-gathered unless they are in the slot."""
        self._engine.all_gather(unit)
        unit.wait_until_ready()
        if binds:
            unit.set_bound(True)
            self._bound[unit] = None
        else:
            self._unbound.add(unit)
        if unit.guard.is_gone:
            unit.guard.set_present(True)

    def _advance(self, unit: Unit) -> None:
        """Move on to the next visit of `unit`: visits before it are over (rules 2 and 4)."""
        schedule = self._schedule
        if schedule.current == unit.index:  # layers of a unit share a visit
            return
        visit = schedule.find(unit.index)
        if visit is None:  # outside of the program, or needed again after its visit
            return
        if not unit.is_streamed:  # its weights stay, and the visits before may still come
            # Code that has read weights outside of their layers may still come, too: no prehook tells.
            if any(other.is_bound for other in self._read if other is not unit):
                return
            if visit > schedule.following or not self._waiting.isdisjoint(schedule.visits[schedule.position : visit]):
                return
        self._begin_visit(unit, visit)

    def _begin_visit(self, unit: Unit, visit: int) -> None:
        """`unit` computes from now on: visits before number `visit`, its own, are over."""
        engine = self._engine
        engine.streams.observe(StepPart.BACKWARD, unit.index, begins=True)
        for other in self._bound:
            if other.is_bound and other is not unit and other is not engine.root_unit:
                other.release()
        self._bound = {unit: None} if unit.is_bound else {}
        self._schedule.current = unit.index
        engine.issue(self._schedule.advance_to(visit))

    def read(self, unit: Unit, name: str = "") -> None:
        """See `Phase`. Recomputed code of the root unit reads it. A look-up alone does not gather it."""
        if self._engine.ends is not None:
            self._engine.ends.saved.add(unit.index)
        if not unit.is_streamed:
            self._unshard(unit)
            unit.guard.set_classes(is_present=True)
        elif name or unit.weight_slot.content == unit.index:
            self._recompute(unit)

    # -- recomputation --------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> Use:
        """See `Phase`. The next unit that this rank has called is simply early, any other is beside the program."""
        if self._engine.ends is not None:
            self._engine.ends.saved.add(unit.index)
        self._recompute(unit)
        self._recomputing.append(unit)
        self._engine.streams.observe(StepPart.RECOMPUTATION, unit.index, begins=True)
        if self.graph is None:  # the backward has only met parameters of the root unit
            self.graph = Graph(self._engine.plan, {ROOT_UNIT: self._engine.root_unit.versions()})
        return Use(unit, self.graph, unit.versions())

    def post_forward(self, unit: Unit) -> None:
        """See `Phase`. The unit stays in place until its reduction."""
        self._engine.streams.observe(StepPart.RECOMPUTATION, unit.index, begins=False)
        self._recomputing.pop()
        unit.guard.end_use()
        if self._recomputing:
            self._recompute(self._recomputing[-1])  # the inner layer's visit may have released it

    def _recompute(self, unit: Unit) -> None:
        # Does a visit begin with this recomputation? Usually not: a checkpoint recomputes its units in the order of
        # forward, while the last one's backward runs, and nodes of a unit's outputs tell when its own begins (`need`).
        # A reentrant checkpoint has no such nodes, and recomputes all its units before the last one's backward: that
        # one's visit begins when it is recomputed.
        # Backward of resident units between has come before, if their nodes tell.
        if unit.is_streamed and self.graph is not None and unit.index in self.graph.silent:
            visit, following = self._schedule.find(unit.index), self._schedule.following
            to_come = self.graph.called - {each.index for each in self._engine.resident} | self.graph.silent
            if visit is not None and to_come.isdisjoint(self._schedule.visits[following:visit]):
                self._advance(unit)
        self._unshard(unit, binds=True)

    # -- the end --------------------------------------------------------------------------------------------------

    def _close_pass(self) -> None:
        """Issue the rest of the pass's program, and reshard all units but the root unit."""
        engine = self._engine
        engine.streams.observe(StepPart.BACKWARD, None, begins=False)
        for unit in engine.units[1:]:
            # Unbound weights were read too: the next all-gather into the slot waits for these reads.
            if unit.is_bound or unit in self._unbound:
                unit.release()
        self._unbound.clear()
        self._schedule.current = None
        engine.issue(self._schedule.advance_to())
        for unit in engine.units[1:]:  # whose gradients came after their reduction
            if unit.index in engine.reductions.made:
                engine.reductions.start(unit)

    def finish(self) -> None:
        """Autograd has run the whole graph: the last reductions, then gradients for the optimizer (rule 7)."""
        engine = self._engine
        if engine.phase is not self:
            return
        if engine.ends is not None:
            engine.ends.end_backward([*self._closed, *filter(None, (self.graph,))])
        self._close_pass()
        engine.root_unit.release()  # its gradients take the place of its weights
        engine.reductions.start(engine.root_unit)
        for head in engine.tied:
            head.end()
        engine.reductions.is_open = False
        engine.finish_reading()
        if self._leaves_to_replicas:
            engine.reductions.complete()
        if self._leaves_unreduced or self._leaves_to_replicas:
            engine.progress.has_stepped |= self._follows_step  # for the next exchange of flags: this backward has none
            for unit in engine.units:
                unit.grads.leave(is_trainable=unit.is_trainable)
            engine.phase = None
            return
        given = engine.reductions.finish(follows_step=self._follows_step)
        engine.phase = None
        # Behind the end of the pass: the model can go on if this raises.
        engine.reductions.used.refuse_out_of_step()
        call_hooks(given, engine.progress)  # last: a hook may step and clear the gradient

    def recover(self) -> None:
        """See `Phase`. Discard all gradients of the model: some are incomplete.

        The rest of the program is issued first, so that ranks that failed at different points stay in step.
        """
        if graph_task_id() != -1 and self.callback_of() is not None:  # called from inside this backward
            return
        deadline = time.monotonic() + _LETS_GO_WITHIN_S
        while self.callback_of() is not None:  # a thread of autograd's may hold it a moment longer than the exception
            if time.monotonic() > deadline:
                return  # the backward runs in another thread
            time.sleep(0.01)
        engine = self._engine
        stepped = "Hooks have stepped some parameters: load a checkpoint"
        advice = stepped if engine.progress.has_stepped else "Repeat the step"
        log.warning("a backward has ended with an exception: all gradients of the model are discarded. %s", advice)
        engine.progress.has_stepped |= self._follows_step
        try:
            if engine.ranks.failure is None:  # else each collective would raise
                self._close_pass()
                engine.root_unit.release()
                engine.reductions.start(engine.root_unit)
                engine.reductions.complete()
        finally:
            if engine.reductions.over_replicas is not None:
                engine.reductions.over_replicas.forget()
            for unit in engine.units:
                unit.release()
                unit.grads.discard(unit.params)
            engine.phase = None


def refuse_moved(engine: Engine) -> NoReturn:
    """Raise: a graph that was through a backward before embedding and head have joined goes through another one."""
    names = [engine.units[unit].name for unit in sorted(engine.plan.ends)]
    raise ShardingError(
        f"a second backward goes through a forward from before {' and '.join(map(repr, names))} took turns with the "
        f"layers, in other memory: keep them in place, StreamShard(model, resident={names})"
    )


def refuse_changed(unit: Unit, versions: list[int]) -> NoReturn:
    """Raise, as autograd does: weights were changed in place since their forward, when they had these `versions`."""
    pairs = zip(unit.params, versions, unit.versions(), strict=True)
    changed = [param.name for param, was, now in pairs if was != now]
    raise ShardingError(
        f"parameter {changed[0]!r} was modified by an inplace operation (optimizer.step(), load_state_dict, "
        ".copy_()) between a forward and its backward, whose gradients would mix old activations with new "
        "weights: run the backward first, or the forward again"
    )
