"""The streams, and the fences between them: every wait of the ordering rules is a `Fence`.

On an accelerator streams are real. On the CPU streams are declared: computation runs in the calling thread,
communication in the backend's own threads, and a fence carries the pending work that its wait completes. Observers,
such as the race detector, hear of every record and wait, so any machine can check the order. See [Note: ordering
rules], [Note: observers].

[Note: ordering rules]
1. WEIGHTS_ARRIVED: a unit's forward or backward does not start until its weights are in its slot.
2. SLOT_RELEASED: a slot is not gathered into while an earlier unit in it is still computing.
3. GRADS_DRAINED: a unit's backward does not write a grad slot until the reduction of the slot's earlier unit is done.
4. GRADS_WRITTEN: a reduction does not start until every gradient of its unit is written.
5. SHARDS_WRITTEN: no gather reads a shard before it is written (the cast, the optimizer), nor an exchange its flags.
6. SHARDS_READ: no cast writes a compute shard that a gather still reads.
7. RESULTS_ARRIVED: no result outside of slots is read before it is complete: main grads by the optimizer and by the
   average over replicas, flags by the host, full tensors by the caller.

[Note: observers]
Instruments hear what happens through `Observer` only: they replace no methods. The engine tells all of
`Streams.observers` when it issues a collective, records or waits at a fence, or reaches a `Moment`. The tuple is empty
unless an instrument listens. Several observers do not know of each other, and come and go in any order.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from streamshard.device import has_streams, module_of
from streamshard.errors import ShardingError, StateError

__all__ = ["AllWork", "Collective", "Fence", "Moment", "Observer", "Rule", "StreamName", "Streams", "Work", "as_one"]


class StreamName(enum.Enum):
    """The streams."""

    COMPUTE = "compute"
    COMM = "comm"
    """Between the ranks of a shard group."""
    REPLICA = "replica"
    """Between replicas: over other wires, so that the next gather need not queue behind an average."""


class Rule(enum.IntEnum):
    """The ordering rules, by number. See [Note: ordering rules]."""

    WEIGHTS_ARRIVED = 1
    SLOT_RELEASED = 2
    GRADS_DRAINED = 3
    GRADS_WRITTEN = 4
    SHARDS_WRITTEN = 5
    SHARDS_READ = 6
    RESULTS_ARRIVED = 7


class Work(Protocol):
    """A collective under way in the backend's threads. Waiting twice is allowed and does nothing."""

    def wait(self) -> None:
        """Block the calling thread until the result is in place."""


class AllWork:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """See `Work`."""
        for work in self.works:
            work.wait()


def as_one(works: Sequence[Work | None]) -> Work | None:
    """Several works as the one that a fence records; None on devices, whose streams wait."""
    pending = [work for work in works if work is not None]
    return AllWork(pending) if len(pending) > 1 else pending[0] if pending else None


class Collective(enum.Enum):
    """What moves bytes."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


class Moment(enum.Enum):
    """A point of a step that the compute stream reaches. See `Observer.on_moment`.

    The wait for weights (rule 1) may come after FORWARD_BEGINS and BACKWARD_BEGINS. The root unit's forward is the
    whole pass: the layers' forwards lie inside it. A layer's forward that raises has no end. The pass always has one.
    """

    CAST_BEGINS = enum.auto()
    """Main weights become compute shards; of all units."""
    CAST_ENDS = enum.auto()
    """They are compute shards."""
    FORWARD_BEGINS = enum.auto()
    """A layer of the unit is called in a pass."""
    FORWARD_ENDS = enum.auto()
    """It has computed."""
    RECOMPUTATION_BEGINS = enum.auto()
    """A layer of the unit is called in a backward."""
    RECOMPUTATION_ENDS = enum.auto()
    """It has computed."""
    BACKWARD_BEGINS = enum.auto()
    """Backward moves on to the unit, and is over with those before it; it begins with the root unit."""
    BACKWARD_ENDS = enum.auto()
    """Backward has been through a pass; of all units."""
    GRAD_WRITTEN = enum.auto()
    """A complete gradient has moved into the unit's grad slot (with one rank, into the main grads). On a device it may
    move with others, a little later."""


class Observer:
    """Hears what happens. Each method does nothing unless it is overridden. See [Note: observers]."""

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """`stream` reads and writes these: from here, where a collective is issued, until it is waited for.

        The fence in which it is recorded comes next.

        Args:
            stream: on which it runs.
            collective: which.
            tag: index of the unit that it moves; the number of units if it moves flags; None if it moves neither.
            reads, writes: tensors of any shape and dtype.
        """

    def on_record(self, fence: Fence) -> None:
        """`fence.source` has reached this point; not on an accelerator, once ``fence.work`` is done."""

    def on_wait(self, fence: Fence) -> None:
        """`fence.target` goes on only after what `fence` recorded last."""

    def on_block(self, fence: Fence, work: Work) -> None:
        """The host is about to wait for `work`, which was recorded in `fence`. Not on an accelerator."""

    def on_done(self, fence: Fence, work: Work) -> None:
        """The host has waited for `work`."""

    def on_moment(self, moment: Moment, unit: int | None) -> None:
        """The compute stream is where `moment` says; `unit` is the index of the unit, None where it is of all."""


class Fence:
    """A point in `source` that `target` waits for, on behalf of one rule.

    Owns one event of the device (on an accelerator), recorded anew each time, or the pending `Work` (elsewhere).

    Args:
        streams: whose streams it ties.
        rule: the ordering rule it keeps.
        source: where it is recorded.
        what: what it guards, for messages ("slot 0").
        target: who waits; None: comm for compute, and compute for the others.

    Attributes:
        work: what has to complete for the point to be reached; None on an accelerator, and once it has completed.
    """

    def __init__(
        self, streams: Streams, rule: Rule, source: StreamName, what: str, target: StreamName | None = None
    ) -> None:
        self.rule = rule
        self.what = what
        self.source = source
        self.target = target or (StreamName.COMM if source is StreamName.COMPUTE else StreamName.COMPUTE)
        self._streams = streams
        self._event: Any = None if streams.module is None else streams.module.Event()
        self.work: Work | None = None
        self._recorded = False

    def record(self, work: Work | None = None, stream: Any = None) -> None:
        """Mark this point in `source`; `work` has to complete for it to be reached (not where streams are real).

        `stream` is the device's to record on, where that is not the current one.
        """
        self.complete()
        self.work = work
        self._recorded = True
        if self._event is not None:
            self._event.record(stream or self._streams.device_stream(self.source))
        for observer in self._streams.observers:
            observer.on_record(self)

    def wait(self) -> None:
        """Let `target` go on only after the point recorded last; nothing if none was."""
        dropped = self._streams.dropped_rules
        if not self._recorded or dropped and (self.rule in dropped or self.what in dropped):
            return
        if self._event is not None:
            self._streams.device_stream(self.target).wait_event(self._event)
        else:
            self.complete()
        for observer in self._streams.observers:
            observer.on_wait(self)

    def complete(self) -> None:
        """Complete pending work without declaring a wait: its buffers are about to be reused by the host."""
        work, self.work = self.work, None
        if work is not None:
            for observer in self._streams.observers:
                observer.on_block(self, work)
            work.wait()
            for observer in self._streams.observers:
                observer.on_done(self, work)


class Streams:
    """The streams of one engine. Owns all but the compute stream.

    Args:
        device: where the engine's buffers live.

    Attributes:
        module: ``torch.cuda`` or its kin; None where streams are declared only.
        observers: hear what happens. Whoever has something to say loops over them; see `observed_by`.
        dropped_rules: rules, or fences by what they guard, whose waits are left out. Only for the tests which show that
            each wait is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = module_of(device) if has_streams(device) else None
        self.observers: tuple[Observer, ...] = ()
        self.dropped_rules: frozenset[Rule | str] = frozenset()
        self.current = StreamName.COMPUTE
        # High priority: what moves bytes is small, and late if it queues behind the blocks of a large matmul.
        self._own: dict[StreamName, Any] = {}
        if self.module is not None:
            self._own = {
                name: self.module.Stream(device, priority=-1) for name in StreamName if name is not StreamName.COMPUTE
            }

    @property
    def has_streams(self) -> bool:
        """Whether they are real."""
        return self.module is not None

    def device_stream(self, name: StreamName) -> Any:
        """The device's stream behind `name`; compute is whatever stream the caller computes on."""
        if self.module is None:
            raise StateError("streams", f"on {self.device}", "a device that has streams")
        return self._own.get(name) or self.module.current_stream(self.device)

    def refuse_capture(self) -> None:
        """Raise if the device records a graph of what the caller issues.

        Raises:
            ShardingError: it does.
        """
        if self.module is not None and getattr(self.module, "is_current_stream_capturing", bool)():
            raise ShardingError(
                "a pass of a StreamShard model is captured in a device graph: a replay would repeat this step's "
                "collectives without the host, which decides what follows them. Capture layers: torch.compile(layer, "
                'mode="reduce-overhead"), whose weights stay at the same addresses'
            )

    def keep(self, buffer: torch.Tensor) -> None:
        """Own streams use `buffer`, so its memory is nobody's until they are done, whenever it is freed."""
        if self.module is not None:
            for stream in self._own.values():
                buffer.record_stream(stream)

    @contextlib.contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        """Run the body on the stream of that name: really on an accelerator, as declared elsewhere."""
        outer, self.current = self.current, name
        context: AbstractContextManager[object] = (
            contextlib.nullcontext() if self.module is None else self.module.stream(self.device_stream(name))
        )
        try:
            with context:
                yield
        finally:
            self.current = outer

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Let `observer` hear what happens inside, beside those that do already."""
        self.observers = (*self.observers, observer)
        try:
            yield
        finally:
            self.observers = tuple(other for other in self.observers if other is not observer)

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Let nobody hear what happens inside."""
        observers, self.observers = self.observers, ()
        try:
            yield
        finally:
            self.observers = observers

    def declare(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Tell the observers that a collective is issued. Arguments: see `Observer.on_collective`."""
        for observer in self.observers:
            observer.on_collective(stream, collective, tag, reads, writes)
