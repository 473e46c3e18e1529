"""A device with streams, played on the CPU: the path of accelerators runs where there is none.

    with simulated_device() as device:
        model = StreamShard(build())          # NcclTransport, over gloo; fences are events
        with late(model):                     # collectives are done when something waits for their stream, not before
            train(model)

Tensors lie in the CPU's memory, and what computes runs at once in the calling thread, as it does there. Collectives are
early (at once) or late: a stream holds back what was put on it until another one waits for an event behind it. A wait
that is left out is then seen as NaN or as old numbers. What compute does is never late, so that a missing wait *for* it
(rules 2 and 4) is what `streamshard.inspect.races` is for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from streamshard import device as devices
from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Work
from streamshard.inspect import engine_inside
from streamshard.inspect.adversary import AdversarialTransport


class SimulatedStream:
    """Runs what was put on it in order, when it is waited for.

    Attributes:
        waited_for: how far this stream has waited for each other one.
        is_late: it holds back its waits too.
    """

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.waited_for: dict[SimulatedStream, int] = {}
        self.is_late = False
        self.ticks = 0  # grows with every event that is recorded here
        self._held: deque[tuple[int, Callable[[], None]]] = deque()

    def put(self, action: Callable[[], None]) -> None:
        """Hold `action` back."""
        self._held.append((self.ticks, action))

    def run(self, until: int | None = None) -> None:
        """Do what was put here before `until` (None: all)."""
        while self._held and (until is None or self._held[0][0] < until):
            self._held.popleft()[1]()

    def synchronize(self) -> None:
        """The host waits until all that was put here is done."""
        self.run()

    def wait_event(self, event: SimulatedEvent) -> None:
        """Go on only after what `event` recorded last. A stream that is late waits when it gets there."""
        stream, tick = event.stream, event.tick
        if stream is not None and stream is not self:
            if self.is_late:
                self.put(lambda: stream.run(tick))
            else:
                stream.run(tick)
            self.waited_for[stream] = max(tick, self.waited_for.get(stream, 0))

    def wait_stream(self, other: SimulatedStream) -> None:
        """Go on only after everything on `other`."""
        event = SimulatedEvent()
        event.record(other)
        self.wait_event(event)


class SimulatedEvent:
    """A point of a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: SimulatedStream | None = None
        self.tick = 0

    def record(self, stream: SimulatedStream) -> None:
        """Mark where `stream` is now."""
        stream.ticks += 1
        self.stream, self.tick = stream, stream.ticks

    def synchronize(self) -> None:
        """The host waits until it is reached."""
        if self.stream is not None:
            self.stream.run(self.tick)


class SimulatedDevice:
    """What takes the place of ``torch.cuda``.

    Attributes:
        synchronizations: how often the host has waited for the device.
        is_capturing: it records a graph.
        kept: the streams that memory is kept for when it is freed, by its address.
    """

    Stream = SimulatedStream
    Event = SimulatedEvent

    def __init__(self) -> None:
        self.synchronizations = 0
        self.is_capturing = False
        self.kept: dict[int, set[SimulatedStream]] = {}
        self._compute = SimulatedStream()
        self._local = threading.local()

    def current_stream(self, device: object = None) -> SimulatedStream:
        """Of the calling thread."""
        current: SimulatedStream = getattr(self._local, "stream", self._compute)
        return current

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` the current one of the calling thread."""
        outer, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = outer

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is recorded."""
        return self.is_capturing

    def device_count(self) -> int:
        """Of a machine."""
        return 1

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Memory of `tensor` is nobody's, once it is freed, until `stream` has done what is on it by then."""
        self.kept.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream)

    def empty_cache(self) -> None:
        """What nobody uses is not kept here."""

    def synchronize(self, device: object = None) -> None:
        """The host waits."""
        self.synchronizations += 1


@contextlib.contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """The CPU has streams inside; models that are sharded there keep them."""
    device = SimulatedDevice()
    with (
        mock.patch.dict(devices.stand_ins, {"cpu": device}),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream)),
    ):
        yield device


class LateTransport(AdversarialTransport):
    """Puts collectives on their stream, whose waits are events: of them the transport knows nothing."""

    def _start(self, start: Callable[[], Work | None], after: Callable[[], None] | None = None) -> Work | None:
        def do() -> None:
            with self.streams.unobserved():
                assert start() is None
            if after is not None:
                with self.streams.on(self.stream):
                    after()

        self.held.put(do)
        return None

    def complete(self, until: object = None) -> None:
        """Whoever talks to other ranks does so after what was issued before, as on one communicator."""
        self.held.run()

    @property
    def held(self) -> SimulatedStream:
        """Where what it starts is held back."""
        stream: SimulatedStream = self.streams.device_stream(self.stream)
        return stream


@contextlib.contextmanager
def late(model: nn.Module) -> Iterator[None]:
    """Collectives of `model` are as late as its waits allow; they spoil what must not be looked at meanwhile."""
    engine = engine_inside(model)
    replicas = engine.reductions.replicas
    all_ranks: list[Communicator] = [engine.ranks] if replicas is None else [engine.ranks, replicas.ranks]
    transports = [LateTransport(ranks) for ranks in all_ranks]
    for ranks, transport in zip(all_ranks, transports, strict=True):
        ranks.transport = transport
        transport.held.is_late = True
    yield
    for ranks, transport in zip(all_ranks, transports, strict=True):
        transport.complete()
        ranks.transport = transport.inner
        transport.held.is_late = False


@contextlib.contextmanager
def backward_elsewhere() -> Iterator[None]:
    """Backwards run in a thread of their own, as on devices, which have one for autograd."""
    calls: queue.Queue[tuple[Callable[[], Any], queue.Queue[Any]] | None] = queue.Queue()

    def serve() -> None:
        while (call := calls.get()) is not None:
            function, answers = call
            try:
                answers.put((function(), None))
            except BaseException as error:
                answers.put((None, error))
            del call, function, answers

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is thread:
            original(self, *args, **kwargs)
            return
        answers: queue.Queue[Any] = queue.Queue()
        calls.put((lambda: original(self, *args, **kwargs), answers))
        error = answers.get()[1]
        if error is not None:
            raise error

    try:
        with mock.patch.object(torch.Tensor, "backward", backward):
            yield
    finally:
        calls.put(None)
        thread.join()
