"""Streams, the fences between them, and the log of what a rank issues. A wait of the ordering rules is a `Fence`.

On an accelerator streams are the device's. On the CPU streams are names only: computation runs in the calling thread,
communication in the backend's threads, and a fence holds the pending works that its wait completes. Observers, such as
the race detector, are told of every record and wait, so any machine can check the order. See [Note: ordering rules],
[Note: observers].

[Note: ordering rules]
1. WEIGHTS_ARRIVED: a unit's forward or backward does not start until its weights are in its slot.
2. SLOT_RELEASED: a slot is not gathered into while an earlier unit in it is still computing, nor while its gradients
   are being reduced.
3. GRADS_DRAINED: no gradients are written into a slot until the reduction of the earlier gradients in it is done. If
   weights were gathered into the slot since, this follows from rules 2 and 1.
4. GRADS_WRITTEN: a reduction does not start until every gradient of its unit is written.
5. SHARDS_WRITTEN: no all-gather reads a shard before it is written, nor an exchange its flags.
6. SHARDS_READ: no code after a pass writes main weights that an all-gather still reads. No all-gather casts, and no
   gradient is copied, into this rank's range of a slot that another rank still reads. The host writes no flags that an
   exchange reads.
7. RESULTS_ARRIVED: no result outside of slots is read before it is complete: main grads by the optimizer, by the
   average over replicas and by their copy to host memory, flags by the host, full tensors by the caller.
8. HOST_COPIED: memory that a copy to the host reads or writes is not used before the copy is complete; nor by the
   host, if a copy to the device reads it.

[Note: observers]
Instruments (race detector, trace) derive from `Observer`; they replace no methods. The engine calls all
`Streams.observers` when it issues a collective, records a fence, waits for one, or begins or ends a `StepPart`. Without
an instrument the tuple is empty. Observers are independent of each other, and may be added and removed in any order.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from streamshard.device import has_streams, module_of, raw_stream_of
from streamshard.errors import CommunicationError


class StreamName(enum.Enum):
    """The streams."""

    COMPUTE = "compute"
    COMM = "comm"
    """Between the ranks of a shard group."""
    REPLICA = "replica"
    """Between replicas. A stream of its own, so that the next all-gather need not wait behind an average."""
    FETCH = "fetch"
    """From host memory to the device, and optimizer steps on the way (``offload``)."""
    STORE = "store"
    """From the device to host memory (``offload``)."""
    HOST = "host"
    """The thread that calls StreamShard: it reads and writes host memory (``offload``)."""


class Rule(enum.IntEnum):
    """The ordering rules, by number. See [Note: ordering rules]."""

    WEIGHTS_ARRIVED = 1
    SLOT_RELEASED = 2
    GRADS_DRAINED = 3
    GRADS_WRITTEN = 4
    SHARDS_WRITTEN = 5
    SHARDS_READ = 6
    RESULTS_ARRIVED = 7
    HOST_COPIED = 8


class Work(Protocol):
    """A pending collective in the backend's threads. A second wait does nothing."""

    def wait(self) -> None:
        """Block the calling thread until the result is in place."""


class Collective(enum.Enum):
    """The kinds of collectives."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    COPY = "copy"
    """Between host memory and the device, on one rank."""
    STEP = "step"
    """An optimizer's step of a chunk, on one rank."""
    NORMS = "norms"
    """Of reduced gradients, on one rank."""


class StepPart(enum.Enum):
    """A part of a step, which begins and ends on the compute stream. See `Observer.on_event`.

    The wait for weights (rule 1) may come after a forward or backward begins. The root unit's forward is the whole
    pass: the layers' forwards lie inside it. A forward that raises ends too. Only if the weights could not be put in
    place, its beginning comes alone.
    """

    CAST = "cast"
    """The host casts weights in host memory that the user has changed (``offload``)."""
    ALL_GATHER = "all_gather"
    """The host issues the unit's all-gather."""
    FORWARD = "forward"
    """A layer of the unit is called in a pass."""
    RECOMPUTATION = "recomputation"
    """A layer of the unit is called in a backward."""
    BACKWARD = "backward"
    """Begins when backward moves on to the unit, and has finished the units before it; the root unit comes first. Ends
    once, for all units."""
    REDUCTION = "reduce_scatter"
    """The host issues the reduction of the unit's gradients."""
    OPTIMIZER = "optimizer"
    """Any optimizer of the process steps. Only `streamshard.tools.trace` reports this."""


class Observer:
    """Base class of instruments. Each method does nothing unless overridden. See [Note: observers]."""

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """A collective is issued. It may read and write its tensors from now until a wait for it.

        The next `on_record` is of the fence that records this collective.

        Args:
            stream: the stream on which it runs.
            collective: its kind.
            tag: number of the flat parameter whose data it moves; their number for flags; None for other data.
            reads: tensors that it reads, of any shape and dtype.
            writes: tensors that it writes.
        """

    def on_record(self, fence: Fence) -> None:
        """`fence` is recorded at this point of its source. On the CPU the point is reached when its work is done."""

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        """`target` waits for the point that `fence` recorded last."""

    def on_block(self, fence: Fence, target: StreamName, works: Sequence[Work]) -> None:
        """`target` begins to wait: on the CPU the host, for `works`; on an accelerator the stream (no works)."""

    def on_done(self, fence: Fence, works: Sequence[Work]) -> None:
        """The host has waited for `works`. Only on the CPU."""

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        """`part` of the unit with index `unit` begins or ends on the compute stream; None: of all units."""


class Fence:
    """A point in stream `source` for which other streams wait, because of one ordering rule.

    Owns one device event, recorded again each time (on an accelerator), or the pending `Work` objects (on the CPU).

    Args:
        streams: the engine's streams.
        rule: the ordering rule that it enforces.
        source: the stream that records it.
        what: the guarded object, for messages ("slot 0").
        target: the stream that waits, unless `wait` names another; None: comm if `source` is compute, else compute.
        at: a fence of the same source whose point this fence shares, for another rule: `record` follows its `record`.

    Attributes:
        works: the pending works of the point; none on an accelerator, and when they are done.
    """

    def __init__(
        self,
        streams: Streams,
        rule: Rule,
        source: StreamName,
        what: str,
        target: StreamName | None = None,
        *,
        at: Fence | None = None,
    ) -> None:
        self.rule = rule
        self.what = what
        self.source = source
        self.target = target or (StreamName.COMM if source is StreamName.COMPUTE else StreamName.COMPUTE)
        self._streams = streams
        self._event: Any = None if streams.module is None else streams.module.Event()
        self._records = self._event is not None and at is None
        if at is not None:
            self._event = at._event
        self.works: Sequence[Work] = ()
        self._recorded = False

    def record(self, *works: Work | None, stream: Any = None) -> None:
        """Mark this point in `source`.

        Args:
            *works: on the CPU, the works that have to complete before the point is reached; None on an accelerator.
            stream: the device's stream to record on; None: the stream of `source`.
        """
        # Only this fence knows the works of its last point. `if`: a call costs host time, for each fence of each layer.
        if self.works:
            self.complete()
        self.works = [*filter(None, works)]
        self._recorded = True
        if self._records:
            self._event.record(stream or self._streams.device_stream(self.source))
        for observer in self._streams.observers:
            observer.on_record(self)

    def wait(self, target: StreamName | None = None) -> None:
        """Let a stream wait for the point recorded last. Does nothing if none was recorded.

        Args:
            target: the stream; None: the fence's own.
        """
        if not self._recorded:  # a slot that nobody has used yet is free
            return
        target = target or self.target
        if self._event is not None:
            for observer in self._streams.observers:
                observer.on_block(self, target, ())
            if target is StreamName.HOST:
                self._event.synchronize()
            else:
                self._streams.device_stream(target).wait_event(self._event)
        elif self.works:
            self.complete()
        for observer in self._streams.observers:
            observer.on_wait(self, target)

    def complete(self) -> None:
        """Complete pending works: the CPU is about to reuse their buffers. On an accelerator there are none."""
        works, self.works = self.works, ()
        if works:
            for observer in self._streams.observers:
                observer.on_block(self, self.target, works)
            for work in works:
                work.wait()
            for observer in self._streams.observers:
                observer.on_done(self, works)


class _OnStream:
    """See `Streams.on`. A generator would take twice as long, for each collective."""

    __slots__ = ("_context", "_name", "_outer", "_streams")

    def __init__(self, streams: Streams, name: StreamName) -> None:
        self._streams, self._name = streams, name
        module = streams.module
        self._context: Any = None if module is None else module.stream(streams.device_stream(name))

    def __enter__(self) -> None:
        self._outer, self._streams.current = self._streams.current, self._name
        if self._context is not None:
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._streams.current = self._outer
        if self._context is not None:
            self._context.__exit__(*error)


class Streams:
    """The streams of one engine. Owns all but the compute stream.

    Args:
        device: the device of the engine's buffers.
        has_host: state lies in host memory, so there are streams for copies.

    Attributes:
        module: torch's module for the device, such as ``torch.cuda``; None on the CPU.
        has_streams: streams are the device's, not names only.
        observers: the current observers; see `observed_by`.
        current: the stream to which the running code gives its work; see `on`.
    """

    def __init__(self, device: torch.device, *, has_host: bool = False) -> None:
        self.device = device
        self.module: Any = module_of(device) if has_streams(device) else None
        self.has_streams = self.module is not None
        self.observers: tuple[Observer, ...] = ()
        # On the CPU one thread runs all streams: by this name the race detector tells whose an operation is.
        self.current = StreamName.COMPUTE
        self._raw = raw_stream_of(device)
        self._compute: tuple[Any, Any] = (None, None)  # the stream that was the current one last, behind its address
        self._own: dict[StreamName, Any] = {}
        if self.module is not None:
            copies = (StreamName.FETCH, StreamName.STORE) if has_host else ()
            names = (StreamName.COMM, StreamName.REPLICA, *copies)
            # High priority: communication kernels are small, and would be late behind the blocks of a large matmul.
            self._own = {name: self.module.Stream(device, priority=-1) for name in names}

    def device_stream(self, name: StreamName) -> Any:
        """The device's stream of this name; for compute, the caller's current stream. None on the CPU.

        Raises:
            KeyError: there is no such stream, so work that is meant for it must not go to another one.
        """
        if self.module is None:
            return None
        if name is not StreamName.COMPUTE:
            return self._own[name]
        if self._raw is None:  # another accelerator than CUDA
            return self.module.current_stream(self.device)
        # On CUDA ``current_stream`` makes an object for each call, which takes ten times as long as the address.
        address, stream = self._compute  # exchanged as one: autograd calls from threads of its own
        current = self._raw(self.device.index)
        if current != address:
            stream = self.module.current_stream(self.device)
            self._compute = current, stream
        return stream

    def on_device_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Run the body on `stream`, what `device_stream` has returned. The current stream does not wait for it."""
        # On the CPU both are None, and there is no module to ask.
        is_current = stream == self.device_stream(StreamName.COMPUTE)
        return contextlib.nullcontext() if is_current else self.module.stream(stream)

    def keep(self, buffer: torch.Tensor) -> None:
        """Tell the allocator that our streams use `buffer`: its memory is reused only after their work is done."""
        # An optimizer's numbers may lie on the CPU, whose allocator knows no streams.
        if self.module is not None and buffer.device.type == self.device.type:
            for stream in self._own.values():
                buffer.record_stream(stream)

    def observe(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        """Report an event to the race detector, the trace and other observers."""
        for observer in self.observers:
            observer.on_event(part, unit, begins=begins)

    def on(self, name: StreamName) -> _OnStream:
        """Run the body on the stream of this name. On the CPU only the name changes; there the context is reusable."""
        return _OnStream(self, name)

    @contextlib.contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Add `observer` to the observers inside the context."""
        # A new tuple: autograd's threads may be in a loop over the old one.
        self.observers = (*self.observers, observer)
        try:
            yield
        finally:
            self.observers = tuple(other for other in self.observers if other is not observer)


# -- the host ------------------------------------------------------------------------------------------------------

_ENTRIES = 512  # that a log keeps: two steps of 80 layers, and ranks are less than one apart

Entry = tuple[int, int, int]
"""An entry's number in the log, the kind, the tag of the flat parameter."""


class IssueLog:
    """The last collectives that this rank has issued, and what its host waits for. Other threads read it.

    Attributes:
        count: how many collectives have been issued in all.
        digest: a hash of all of them, in order.
        time_s: Unix time of the last one.
        waits: the waits that the host is in, the innermost one last.
        waiting_since_s: Unix time at which the host entered the last wait.
        failure: how a collective has failed; None: none has. After a failure no `RankWait` can be entered.
    """

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        # Unix time: other ranks read it, and monotonic clocks begin at another moment on each machine.
        self.time_s = self.waiting_since_s = time.time()
        self.waits: list[RankWait] = []
        self.failure: str | None = None
        self._entries: deque[Entry] = deque(maxlen=_ENTRIES)

    def add(self, kind: int, tag: int = 0) -> None:
        """Record that this rank issues `kind`, a `RecordKind`, for the flat parameter of `tag`."""
        entry = (self.count, kind, tag)
        self.digest = hash((self.digest, entry))  # of integers, which every process hashes alike
        self._entries.append(entry)
        self.count += 1
        self.time_s = time.time()

    def entries(self) -> dict[int, Entry]:
        """The entries that the log still has, by number."""
        # A copy: this rank may add entries while another thread reads.
        return {entry[0]: entry for entry in list(self._entries)}


class RankWait:
    """A context around a wait for other ranks, which may be entered again and again.

    Args:
        log: of the ranks.
        end: called with this wait and an error that leaves it. See `streamshard.comm.ranks.RankGroup.end_wait`.
        action: what happens inside, such as "the gather of".
        subject: what `action` is about, such as a unit's name; "" if nothing.

    Raises:
        CommunicationError: on entry, if a collective of the ranks has failed before.
    """

    __slots__ = ("_action", "_end", "_log", "_subject")

    def __init__(
        self, log: IssueLog, end: Callable[[RankWait, BaseException], None], action: str, subject: str = ""
    ) -> None:
        self._log = log
        self._end = end
        self._action = action
        self._subject = subject

    def __str__(self) -> str:
        """The wait, in words. Made when somebody asks: each layer has several waits."""
        return f"{self._action} {self._subject!r}" if self._subject else self._action

    def __enter__(self) -> None:
        log = self._log
        # Connections are closed by now: a backend's error would hide the first failure.
        if log.failure is not None:
            raise CommunicationError(f"{self} is not possible any more: {log.failure}")
        log.waiting_since_s = time.time()  # first: the watchdog looks at the latest wait
        log.waits.append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Before `_end`, which may raise: the watchdog would look after a wait that is over.
        self._log.waits.pop()
        if error is not None:
            self._end(self, error)
