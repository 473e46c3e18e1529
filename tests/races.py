"""A race detector: finds accesses of two streams to the same bytes that no fence orders.

    from tests.races import detect_races

    with detect_races(model):              # raises RaceError at the end if not
        model(batch).loss.backward()
        optimizer.step()

`detect_races` yields a `RaceDetector`, which finds a `Race` between two `Access`. The detector works on the CPU and on
CUDA. It checks which fences were recorded and waited for, not which access ran first, so it finds a missing wait even
if the results were right. It costs host time at every operation. See [Note: clocks].

[Note: clocks]
Each stream has a vector clock: how far it has come, and how far it knows the others to have come. A fence's record
takes a snapshot of its source's clock, a wait joins the snapshot to its target's. An access at time t of one stream
happens before whatever another stream does once it knows of t. Two accesses of different streams to overlapping bytes,
at least one of them a write, of which neither happens before the other, are a race (the vector clocks of Fidge and
Mattern, as race detectors like ThreadSanitizer use them).

A dispatch mode sees what computes, backward and optimizer included. Transports declare collectives when they issue
them. A collective may run at any time until something waits for it. So it counts from where it was issued, on the CPU
too, where the first wait runs its last part.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.comm.streams import Collective, Fence, Observer, Rule, StreamName
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of
from streamshard.nested import tensors_in
from streamshard.planning.memory import Category
from streamshard.torch_private import AsTensors, OpOverload, TorchDispatchMode


class RaceError(Exception):
    """Two streams access the same bytes and no fence orders them."""


class Access(NamedTuple):
    """One access of a stream, at a time of its clock, to bytes of a buffer, counted from the buffer's start.

    `what` is the operation, or the collective and its unit.
    """

    stream: StreamName
    is_write: bool
    what: str
    start: int
    stop: int
    time: int

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.is_write else 'reads'} on the {self.stream.value} stream"


class Race(NamedTuple):
    """Two accesses that no fence orders, in the order in which they were issued, and the bytes that both touch.

    `rule` is the ordering rule whose wait would order them; None if no rule is about such a pair.
    """

    category: Category
    buffer: str
    first: Access
    second: Access
    start: int
    stop: int
    rule: Rule | None

    def __str__(self) -> str:
        rule = "no rule is about this" if self.rule is None else f"missing: rule {self.rule.value} ({self.rule.name})"
        return f"{self.buffer}, bytes {self.start} to {self.stop}: {self.first}, then {self.second}; {rule}"


@contextlib.contextmanager
def detect_races(model: nn.Module, *, raise_at_exit: bool = True) -> Iterator[RaceDetector]:
    """Find races on the engine's buffers in everything that runs inside the context.

    Enter the context between steps, and run at least one whole step inside. Two steps show more, because the second
    reuses the slots of the first. Every rank checks itself.

    Args:
        model: made by `StreamShard`.
        raise_at_exit: raise for the races found once the body is done; else look at ``found`` of what is yielded.

    Raises:
        RaceError: there were races.
    """
    detector = RaceDetector(engine_of(model))
    with detector.engine.streams.observed_by(detector), _Watch(detector):
        yield detector
    if raise_at_exit and detector.found:
        shown = "\n  ".join(map(str, detector.found[:20]))
        raise RaceError(f"{len(detector.found)} race(s) on rank {detector.engine.ranks.rank}\n  {shown}")


class _Buffer(NamedTuple):
    """A watched range of memory, and by stream the latest access to each range until all other streams know of it.

    `user` is the stream of the calling thread's operations on it: HOST for host memory.
    """

    address: int
    n_bytes: int
    category: Category
    name: str
    user: StreamName
    history: dict[StreamName, dict[tuple[int, int, bool], Access]]


class RaceDetector(Observer):
    """Keeps the clocks and what each stream did last with every byte. Owns no tensors.

    Args:
        engine: its ledger says what to watch.

    Attributes:
        found: the races so far, each pair of operations on a buffer once.
        accesses: how many accesses were looked at; zero means that nothing was watched.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: list[Race] = []
        self.accesses = 0
        streams = [StreamName.COMPUTE, StreamName.COMM]  # others would never know of anything
        if engine.reductions.replicas is not None or engine.outer is not None:
            streams.append(StreamName.REPLICA)
        if engine.host is not None:
            streams += [StreamName.FETCH, StreamName.STORE, StreamName.HOST]
        self._clocks = {stream: dict.fromkeys(streams, 0) for stream in streams}
        for stream, clock in self._clocks.items():
            clock[stream] = 1  # so that nothing is known of the other streams at first
        self._snapshots: dict[Fence, dict[StreamName, int]] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._buffers: list[_Buffer] = []
        self._watched: list[int] = []  # addresses in the ledger

    def on_record(self, fence: Fence) -> None:
        clock = self._clocks[fence.source]
        self._snapshots[fence] = dict(clock)
        clock[fence.source] += 1

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        self._join(target, self._snapshots.get(fence, {}))

    def _join(self, target: StreamName, known: dict[StreamName, int]) -> None:
        clock = self._clocks[target]
        for stream, time in known.items():
            clock[stream] = max(clock[stream], time)

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        if (host := self._clocks.get(StreamName.HOST)) is not None:  # it does things in order, launches included
            self._join(stream, host)
            host[StreamName.HOST] += 1
        names, what = self.engine.ranks.recorder.names, collective.value
        if tag is not None and tag < len(names):
            what += f" of {_quoted(names[tag])}"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._add(stream, tensor, is_write, what)

    def on_operation(self, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        """An operation seen by the dispatch mode. Those of other streams are parts of collectives, declared as such."""
        if self.engine.streams.current is StreamName.COMPUTE:
            buffer = self._find(tensor)
            self._add(StreamName.COMPUTE if buffer is None else buffer.user, tensor, write, what)

    def _add(self, stream: StreamName, tensor: torch.Tensor, write: bool, what: str) -> None:
        buffer = self._find(tensor)
        if buffer is None:
            return
        self.accesses += 1
        clock = self._clocks[stream]
        start, stop = _bytes_of(tensor, buffer.address)
        access = Access(stream, write, what, start, stop, clock[stream])
        for other, history in buffer.history.items():
            if other is stream:
                continue
            known = min(known_to[other] for who, known_to in self._clocks.items() if who is not other)
            for key, earlier in list(history.items()):
                if earlier.time <= known:
                    del history[key]  # and before all that any stream will ever do
                elif earlier.time <= clock[other]:
                    continue
                elif earlier.start < stop and start < earlier.stop and (write or earlier.is_write):
                    self._report(buffer, earlier, access)
        buffer.history[stream][start, stop, write] = access

    def _report(self, buffer: _Buffer, first: Access, second: Access) -> None:
        key = (buffer.address, first[:3], second[:3])
        if key not in self._seen:
            self._seen.add(key)
            start, stop = max(first.start, second.start), min(first.stop, second.stop)
            rule = _missing_rule(buffer.category, first, second)
            self.found.append(Race(buffer.category, buffer.name, first, second, start, stop, rule))

    def _find(self, tensor: torch.Tensor) -> _Buffer | None:
        if [buffer.data_ptr() for _, buffer in self.engine.ledger.buffers] != self._watched:
            self._watch_buffers()
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._buffers, address, key=_address) - 1
        found = self._buffers[index] if index >= 0 and tensor.numel() else None
        return found if found is not None and address < found.address + found.n_bytes else None

    def _watch_buffers(self) -> None:
        """Look at the ledger, again when an optimizer or main grads have got or lost memory."""
        known, names = {each.address: each.history for each in self._buffers}, _describe(self.engine)
        self._buffers = []
        self._watched = [buffer.data_ptr() for _, buffer in self.engine.ledger.buffers]
        for category, tensor in self.engine.ledger.buffers:
            address = tensor.data_ptr()
            history = known.get(address, {stream: {} for stream in self._clocks})
            user = StreamName.HOST if id(tensor) in self.engine.ledger.on_host else StreamName.COMPUTE
            name = names.get(address, category.value)
            self._buffers.append(_Buffer(address, tensor.nbytes, category, name, user, history))
        self._buffers.sort(key=_address)


def _quoted(unit: str) -> str:
    return repr(unit) if "root unit" not in unit else unit


def _address(buffer: _Buffer) -> int:
    return buffer.address


def _bytes_of(tensor: torch.Tensor, base: int) -> tuple[int, int]:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr() - base
    return start, start + extent * tensor.element_size()


def _describe(engine: Engine) -> dict[int, str]:
    names: dict[int, str] = {}
    for unit in engine.units:
        weights, slot = unit.weight_slot, unit.grads.slot
        names.setdefault(weights.buffer.data_ptr(), weights.arrived.what)
        names.setdefault(slot.buffer.data_ptr(), slot.drained.what)
        names.setdefault(slot.scratch.buffer.data_ptr(), f"scratch of {slot.drained.what}")
        for flat in unit.flat_params:
            kept_as = Category.MAIN_WEIGHTS if flat.kind.trains else Category.FROZEN_WEIGHTS
            sent = flat.sent_shard if engine.outer else flat.host_input
            own = {Category.MAIN_GRADS: flat.main_grads, kept_as: flat.main, Category.ALL_GATHER_INPUTS: sent}
            for category, tensor in own.items():
                names.setdefault(tensor.data_ptr(), f"{category.value} of {_quoted(unit.name)}")
    return names


def _missing_rule(category: Category, first: Access, second: Access) -> Rule | None:
    """The rule that orders `first` before `second`, which another stream does with such a buffer."""
    if first.stream is StreamName.REPLICA:
        by_category = {Category.ALL_GATHER_INPUTS: Rule.SHARDS_WRITTEN, Category.STAGING: Rule.GRADS_DRAINED}
        return by_category.get(category, Rule.RESULTS_ARRIVED)
    is_compute_first = first.stream is StreamName.COMPUTE
    if category is Category.STAGING and first.stream is StreamName.COMM:
        return Rule.RESULTS_ARRIVED
    if first.stream in (StreamName.STORE, StreamName.HOST) or first.stream is StreamName.FETCH and not first.is_write:
        return Rule.HOST_COPIED
    if first.stream is StreamName.FETCH:
        return Rule.SHARDS_WRITTEN
    is_of_gradients = first.what.startswith("aten._foreach_") or second.what.startswith(Collective.REDUCE_SCATTER.value)
    if category is Category.WEIGHT_SLOTS and is_compute_first and is_of_gradients:
        return Rule.GRADS_WRITTEN
    is_reduced = first.what.startswith(Collective.REDUCE_SCATTER.value)
    if is_reduced and second.stream is StreamName.FETCH and category is Category.WEIGHT_SLOTS:
        return Rule.SLOT_RELEASED
    if category in (Category.WEIGHT_SLOTS, Category.WIRE_BUFFERS):
        return Rule.SLOT_RELEASED if is_compute_first else Rule.WEIGHTS_ARRIVED
    if category in (Category.GRAD_SLOTS, Category.SCRATCH):
        return Rule.GRADS_WRITTEN if is_compute_first else Rule.GRADS_DRAINED
    if category is Category.MAIN_GRADS and is_compute_first:
        return Rule.GRADS_WRITTEN  # a reduction into main grads that the optimizer still reads starts too early
    if category in (Category.MAIN_GRADS, Category.FLAGS):
        return Rule.SHARDS_WRITTEN if is_compute_first else Rule.RESULTS_ARRIVED
    return Rule.SHARDS_WRITTEN if is_compute_first else Rule.SHARDS_READ


@cache
def _touched(operation: OpOverload) -> list[tuple[int, str, bool]]:
    """The tensor arguments that an operation touches: position, name, and whether it writes them.

    From the schema's alias annotations: ``a!`` is a write, ``a`` a view, which touches nothing, none a read.
    """
    name = operation._schema.name.split("::")[-1]
    # Collectives are declared by the transport. Some operations look at a tensor's shape only.
    if operation.namespace in ("c10d", "_c10d_functional", "prim"):
        return []
    if name.endswith(("_like", "is_set_to")) or name.startswith("new_") or torch.Tag.inplace_view in operation.tags:
        return []
    touched = []
    for position, argument in enumerate(operation._schema.arguments):
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            return []
        if "Tensor" in str(argument.type):
            touched.append((position, argument.name, alias is not None))
    return touched


class _Watch(TorchDispatchMode):
    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._detector = detector

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with AsTensors():
            for position, name, is_write in _touched(func):
                self._look(args[position] if position < len(args) else kwargs.get(name), is_write, func)
        return func(*args, **kwargs)

    def _look(self, value: Any, is_write: bool, func: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.layout is torch.strided and tensor.device.type != "meta":
                self._detector.on_operation(tensor, write=is_write, what=str(func))
