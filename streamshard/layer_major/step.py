"""Forward and backward of all micro-batches of a step, layer by layer.

[Note: the turn]
The last layer, with all that follows it, is the *turn*: each micro-batch runs forward from there to its loss, and
backward again, before the next one does. So one micro-batch's logits exist at a time.

    forward    layer 0: micro-batches 0, 1, 2    layer 1: 0, 1, 2
    turn       0 forward, 0 backward, 1 forward, 1 backward, 2 forward, 2 backward
    backward   layer 1: 0, 1, 2    layer 0: 0, 1, 2

The engine sees one forward pass, up to the turn, and one backward, in which the turn's forwards run as recomputations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from streamshard.core.backward import Backward
from streamshard.core.engine import Engine, Graph
from streamshard.core.forward import begin_forward
from streamshard.core.unit import Unit
from streamshard.errors import StreamShardError, log
from streamshard.layer_major.micro_batch import MicroBatch, new_greenlets, refuse_pause
from streamshard.layer_major.own_state import Attributes, take_state, with_other_numbers
from streamshard.layer_major.sums import Sums
from streamshard.planning.structure import replacing

# Elements of a parameter of the root unit, such as a tied head, whose gradients do not wait for those of the layers
# before the turn, with which autograd would add them in half precision: all of them would take too much memory.
LARGE = 1 << 20


class Visit(NamedTuple):
    """A unit, and the micro-batches that have a segment there.

    Attributes:
        unit: None before the first one.
        micro_batches: in order.
    """

    unit: Unit | None
    micro_batches: list[MicroBatch]


class _Backward(Backward):
    """A backward of several calls of autograd, with the forwards of the turn.

    Segments of any streamed unit may make gradients of resident units. So these are reduced at the end, but for the
    last unit, which is reduced behind the turn. A backward that fails reduces them in the same order, on all ranks.

    Args:
        engine: the model's.
        last: the unit that passes use last.

    Attributes:
        resident: units that are still to be reduced, in order.
    """

    is_over = False

    def __init__(self, engine: Engine, last: Unit) -> None:
        super().__init__(engine)
        self.resident = sorted(engine.resident, key=lambda unit: unit is not last)
        self._last = last

    @property
    def is_current(self) -> bool:
        """See `Phase`."""
        return True

    def callback_of(self) -> object:
        """See `Backward`. Nothing of autograd's outlives its calls."""
        return None if self.is_over else self

    def come_to(self, unit: Unit) -> None:
        """Begin the last visit of `unit`, behind which no micro-batch of this rank comes to the unit again.

        Nodes report it too (`need`), unless this rank has run the unit without gradients, or less often than others.
        """
        schedule = self._schedule
        if not unit.is_streamed or unit.index not in schedule.visits:
            return
        last = len(schedule.visits) - 1 - schedule.visits[::-1].index(unit.index)
        if last > schedule.position or schedule.current != unit.index:
            self._begin_visit(unit, last)

    def end_turn(self) -> None:
        """All micro-batches are through the last unit: reduce it, if it is resident."""
        if self.resident[:1] == [self._last]:
            self._engine.reductions.start(self.resident.pop(0))

    def reduce_streamed(self) -> None:
        """All visits are over: reduce the streamed units that are left."""
        self._engine.issue(self._schedule.advance_to())

    def _close_pass(self) -> None:
        """See `Backward`. Also reduces the resident units that are left, after an exception."""
        self.end_turn()
        super()._close_pass()
        while self.resident:
            self._engine.reductions.start(self.resident.pop(0))


class LayerMajorStep:
    """See the module.

    Args:
        engine: the model's, whose order of units is settled.
        sums: see `Sums`.
        attributes: see `Attributes`.
        losses: each computes the loss of a micro-batch.
    """

    def __init__(
        self, engine: Engine, sums: Sums, attributes: Attributes, losses: Sequence[Callable[[], torch.Tensor]]
    ) -> None:
        self._engine, self._sums, self._attributes = engine, sums, attributes
        self._losses = losses
        self._micro_batches: list[MicroBatch] = []
        self._visits: list[Visit] = []
        self._position = 0  # in the order of units
        self._root_unit, self._last = engine.root_unit, engine.units[engine.order.order[-1]]

    def run(self) -> list[torch.Tensor]:
        """The losses [], detached, in order. Gradients are there afterwards, as after a backward."""
        new, device = new_greenlets(), self._engine.streams.device
        outer = take_state(device)
        outer.put()  # `take_state` has emptied the stacks of the thread
        states = with_other_numbers(outer, len(self._losses))
        units = {unit.guard: unit for unit in self._engine.units}
        self._micro_batches = [
            MicroBatch(loss, units, state, new, self._last, self._attributes)
            for loss, state in zip(self._losses, states, strict=True)
        ]
        self._sums.swap()
        try:
            with torch.no_grad():  # each forward has its own state
                self._run_backward(self._run_forward())
        except Exception as error:
            if not isinstance(error, StreamShardError):  # which names the loop, where it helps
                log.error("model.accumulate ran micro-batches in turns: if a loop with loss.backward() runs, use that")
            raise
        finally:
            self._sums.swap()
            self._engine.reductions.used.micro_batches = 1
        # `put` enters hooks and modes once more.
        take_state(device)
        outer._replace(random=self._micro_batches[0].state.random).put()  # else each step would draw the same numbers
        return [micro_batch.loss for micro_batch in self._micro_batches]

    def _resume(self, micro_batch: MicroBatch) -> None:
        micro_batch.begin_segment()
        self._root_unit.bind_leaves(micro_batch.leaves_of(self._root_unit))
        with replacing((vars(self._engine), "micro_batch", micro_batch)):
            micro_batch.resume()

    def _end_forwards(self) -> None:
        for micro_batch in self._micro_batches:
            micro_batch.end()

    # -- up to the turn -------------------------------------------------------------------------------------------

    def _run_forward(self) -> Graph:
        engine, error = self._engine, None
        with torch.enable_grad():
            # With gradients: it asks torch whether the pass has a graph.
            forward = begin_forward(engine, frozenset(range(len(engine.units))), (), is_whole_model=True)
        forward.gather_residents()  # micro-batches that leave out layers come to them before others have come to these
        try:
            self._visits.append(Visit(None, self._micro_batches))
            for micro_batch in self._micro_batches:
                self._resume(micro_batch)
            while (visit := self._next_visit()) is not None and self._position < len(engine.order.order) - 1:
                self._visits.append(visit)
                for micro_batch in visit.micro_batches:
                    self._resume(micro_batch)
        except BaseException as caught:
            error = caught
            self._end_forwards()
            raise
        finally:
            with torch.enable_grad():
                graph = forward.finish(error)
            error = None  # its traceback refers to this frame
        assert graph is not None
        return graph

    def _next_visit(self) -> Visit | None:
        """The first unit, in the order of units, for which a micro-batch waits."""
        waiting = [each for each in self._micro_batches if not each.is_done]
        if not waiting:
            return None
        units = {each.unit for each in waiting if each.unit is not None}
        self._position, unit = min((self._place_of(unit), unit.index) for unit in units)
        chosen = self._engine.units[unit]
        return Visit(chosen, [each for each in waiting if each.unit is chosen])

    def _place_of(self, unit: Unit) -> int:
        """The place of the next visit of `unit` in the order of units."""
        order = self._engine.order.order
        return order.index(unit.index, self._position if unit.index in order[self._position :] else 0)

    # -- the turn, and back ---------------------------------------------------------------------------------------

    def _run_backward(self, graph: Graph) -> None:
        engine = self._engine
        engine.phase = backward = _Backward(engine, self._last)
        engine.reductions.used.micro_batches = len(self._micro_batches)
        try:
            backward.begin()
            # The others are reduced at the end.
            graph.visits = tuple(unit for unit in graph.visits if engine.units[unit].is_streamed)
            backward.enter(graph)
            turn = self._next_visit() or Visit(self._last, [])  # all may have skipped the last unit
            self._visits.append(turn)
            # Reversed: a unit's first visit counts, to which backward comes last.
            first_of = {visit.unit: place for place, visit in reversed(list(enumerate(self._visits)))}
            for place, visit in reversed(list(enumerate(self._visits))):
                closing = visit.unit if first_of[visit.unit] == place else None  # no micro-batch comes to it again
                # Else gradients of another unit, which is not reduced yet, may have the slot of sums.
                if closing is not None:
                    backward.come_to(closing)
                for micro_batch in visit.micro_batches:
                    if visit is turn:
                        self._resume(micro_batch)
                        if not micro_batch.is_done and micro_batch.unit is not None:
                            refuse_pause(micro_batch.unit)
                    micro_batch.run_segment_backward()
                    if closing is not None:
                        self._collect(closing, micro_batch)
                    if visit is turn or visit.unit is None:
                        self._collect(self._root_unit, micro_batch, at_least=LARGE if visit is turn else 0)
                if closing is not None:
                    for micro_batch in self._micro_batches:  # that have come to the unit only later
                        self._collect(closing, micro_batch)
                if visit is turn:
                    backward.end_turn()
            backward.reduce_streamed()
            while backward.resident:
                unit = backward.resident.pop(0)
                for micro_batch in self._micro_batches:
                    self._collect(unit, micro_batch)
                engine.reductions.start(unit)
            for micro_batch in self._micro_batches:
                micro_batch.refuse_left()
            backward.finish()
        except BaseException:
            self._end_forwards()
            backward.is_over = True  # else `recover` would wait for autograd to let go
            backward.break_off(None)
            engine.recover()
            raise

    def _collect(self, unit: Unit, micro_batch: MicroBatch, *, at_least: int = 0) -> None:
        """Add the gradients of `unit` that `micro_batch` has made, of parameters with so many elements."""
        if micro_batch.give(unit, at_least):
            self._engine.reductions.collect(unit)


def can_run(engine: Engine) -> bool:
    """Whether earlier passes have shown the order of layers, and where embedding and head lie, and it can be run.

    A resident unit that passes use last is reduced first. So it must not be used before, as a head for early exits is.
    """
    if not engine.order.is_settled or engine.ends is not None or not any(unit.is_streamed for unit in engine.units):
        return False
    *others, last = engine.order.order
    return engine.units[last].is_streamed or last not in others
