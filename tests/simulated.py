"""A device with streams, played on the CPU: the path of accelerators runs where there is none.

    with simulated_device() as device:
        model = StreamShard(build())          # NcclTransport, over gloo; fences are events
        with late(model):                     # collectives are done when something waits for their stream, not before
            train(model)
        with checking_streams(device) as streams, streams.of(model):
            train(model)                      # raises at the end if operations are on a stream that is not theirs

Tensors lie in the CPU's memory, and what computes runs at once in the calling thread, as it does there. Collectives are
early (at once) or late: a stream holds back what was put on it until another one waits for an event behind it. A wait
that is left out is then seen as NaN or as old numbers. What compute does is never late, so that a missing wait *for* it
(rules 2 and 4) is what `tests.races` is for, which looks at fences, and `checking_streams`, which looks at events.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import device as devices
from streamshard.comm import tree
from streamshard.comm.streams import Collective, Observer, StreamName, Work
from streamshard.core import graph_hooks
from streamshard.core.backward import Backward
from streamshard.core.engine import Engine
from streamshard.nested import tensors_in
from streamshard.pinned import PinnedMemory
from streamshard.torch_private import AsTensors, get_grad
from tests.adversary import AdversarialTransport, communicators_of, unobserved
from tests.counts import engine_inside
from tests.races import _bytes_of, _touched, detect_races

CPU = torch.device("cpu")


class SimulatedStream:
    """Runs what was put on it in order, when it is waited for.

    Attributes:
        host: see `SimulatedDevice`; None until the stream was the current one.
        waited_for: how far this stream has waited for each other one, whether itself or through others.
        is_late: it holds back its waits too.
        clock_ms: the time on the device when it is done. Only tests of times let it pass.
    """

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.host: SimulatedStream | None = None
        self.device = device
        self.priority = priority
        self.waited_for: dict[SimulatedStream, int] = {}
        self.is_late = False
        self.clock_ms = 0.0
        self.ticks = 0  # grows with every event that is recorded here
        self._held: deque[tuple[int, Callable[[], None]]] = deque()

    def put(self, action: Callable[[], None]) -> None:
        self._held.append((self.ticks, action))

    def run(self, until: int | None = None) -> None:
        """Do what was put here before `until` (None: all)."""
        while self._held and (until is None or self._held[0][0] < until):
            self._held.popleft()[1]()

    def synchronize(self) -> None:
        event = SimulatedEvent(host=self.host)
        event.record(self)
        event.synchronize()

    def wait_event(self, event: SimulatedEvent) -> None:
        """Go on only after what `event` recorded last. A stream that is late waits when it gets there."""
        stream, tick = event.stream, event.tick
        if stream is not None and stream is not self:
            if self.is_late:
                self.put(lambda: stream.run(tick))
            else:
                stream.run(tick)
            self.learn(event)
            self.clock_ms = max(self.clock_ms, event.clock_ms)

    def learn(self, event: SimulatedEvent) -> None:
        """What is done here from now on is done after `event`."""
        for stream, tick in event.known.items():
            self.waited_for[stream] = max(tick, self.waited_for.get(stream, 0))

    def wait_stream(self, other: SimulatedStream) -> None:
        event = SimulatedEvent()
        event.record(other)
        self.wait_event(event)


class SimulatedEvent:
    """A point of a stream."""

    def __init__(self, enable_timing: bool = False, host: SimulatedStream | None = None) -> None:
        self.stream: SimulatedStream | None = None
        self.tick = 0
        self.clock_ms = 0.0
        self.known: dict[SimulatedStream, int] = {}
        self._host = host

    def record(self, stream: SimulatedStream) -> None:
        stream.ticks += 1
        self.stream, self.tick, self.clock_ms = stream, stream.ticks, stream.clock_ms
        self.known = {**stream.waited_for, stream: stream.ticks}

    def elapsed_time(self, later: SimulatedEvent) -> float:
        return later.clock_ms - self.clock_ms

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.tick)
        if self._host is not None:
            self._host.learn(self)


class SimulatedDevice:
    """What takes the place of ``torch.cuda``. Another device is the current one.

    Attributes:
        host: what Python does with memory by itself.
        compute: the stream that is the current one of each thread at first.
        is_capturing: it records a graph.
        kept: the streams that memory is kept for when it is freed, by its address.
        pinned: blocks of host memory, which only the host and copies use.
    """

    Stream = SimulatedStream

    def __init__(self) -> None:
        self.host = SimulatedStream()
        self.Event = functools.partial(SimulatedEvent, host=self.host)
        self.is_capturing = False
        self.kept: dict[int, set[SimulatedStream]] = {}
        self.pinned: list[torch.Tensor] = []
        self.compute = SimulatedStream()
        self._of_another_device = SimulatedStream()
        self._local = threading.local()
        self.default_generators = [torch.Generator()]
        self.is_current_stream_capturing = lambda: self.is_capturing
        self.device_count = lambda: 1
        self.max_memory_allocated = lambda device=None: 0
        self.synchronize = self.empty_cache = lambda *_: None

    def set_stream(self, stream: SimulatedStream) -> None:
        self._local.stream = stream

    def current_stream(self, device: object = None) -> SimulatedStream:
        """Of the calling thread; without a name that of the current device, which is another one."""
        if device is None:
            return self._of_another_device
        current: SimulatedStream = getattr(self._local, "stream", self.compute)
        current.host = self.host
        return current

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` the current one of the calling thread."""
        outer, self._local.stream = self.current_stream(CPU), stream
        try:
            yield
        finally:
            self._local.stream = outer

    def record_stream(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """Memory of `tensor` is nobody's, once it is freed, until `stream` has done what is on it by then."""
        self.kept.setdefault(tensor.untyped_storage().data_ptr(), set()).add(stream)

    def map_block(self, memory: PinnedMemory, n_bytes: int) -> torch.Tensor:
        self.pinned.append(_map_block(memory, n_bytes))
        return self.pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return is_inside(tensor, self.pinned)


_map_block = PinnedMemory._map


@contextlib.contextmanager
def simulated_device() -> Iterator[SimulatedDevice]:
    """The CPU has streams inside; models that are sharded there keep them."""
    device, real = SimulatedDevice(), devices.get_device_module

    def address_of_current(index: int | None) -> int:
        return id(device.current_stream(CPU if index is CPU.index else None))

    with (
        mock.patch.object(devices, "get_device_module", lambda kind: device if kind == "cpu" else real(kind)),
        mock.patch.object(devices, "WITHOUT_STREAMS", ("meta",)),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream)),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: device.is_pinned(tensor)),
        mock.patch.object(PinnedMemory, "_map", lambda memory, n_bytes: device.map_block(memory, n_bytes)),
        mock.patch("streamshard.comm.streams.raw_stream_of", lambda _: address_of_current),
    ):
        yield device


class _Access(NamedTuple):
    """An operation at bytes of a storage, as `tick` was its stream's."""

    stream: SimulatedStream
    start: int
    stop: int
    is_write: bool
    tick: int
    what: str

    def is_before(self, stream: SimulatedStream) -> bool:
        """Whether what `stream` does from now on is ordered behind it."""
        return stream is self.stream or self.tick < stream.waited_for.get(self.stream, 0)


class _Memory(NamedTuple):
    """A storage: the stream that has allocated it, if that was seen, its latest accesses, what is called at its end."""

    home: SimulatedStream | None
    accesses: dict[tuple[object, ...], _Access]
    end: weakref.finalize[Any, Any]


class StreamChecker(TorchDispatchMode, Observer):
    """Looks at which stream each operation runs on, collectives included.

    Attributes:
        found: what is wrong: operations of two streams on the same bytes that no event orders; memory that goes back
            to the stream that allocated it while another one may use it; collectives on a stream that is not theirs,
            or on two streams of one communicator, or with a shard at another rank's place.
        collectives: of torch, by name and stream.
        in_place: by name, how many collectives had their shard inside of the whole.
        leaves: streams on which gradients of parameters were made.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.found: list[str] = []
        self.collectives: Counter[tuple[str, SimulatedStream]] = Counter()
        self.accesses = 0
        self.leaves: set[SimulatedStream] = set()
        self._device = device
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[SimulatedStream, list[_Access]] = defaultdict(list)
        self._declared: SimulatedStream | None = None
        self._of_group: dict[str, SimulatedStream] = {}  # by communicator, the stream of its collectives
        self.in_place: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Collectives that `model` declares inside have to be on the streams that it says. Fences have to order all."""
        self._streams, self._is_alone = engine_inside(model).streams, engine_inside(model).ranks.world_size == 1
        with self._streams.observed_by(self), detect_races(model, raise_at_exit=False) as races:
            yield
        self.found += map(str, races.found)  # these name the rule that is broken

    def on_collective(
        self, stream: StreamName, collective: Collective, tag: int | None, reads: Any, writes: Any
    ) -> None:
        if stream is not StreamName.COMM or not self._is_alone:  # else no operator of c10d follows
            self._declared = self._streams.device_stream(stream)

    def _check_place(self, func: Any, args: Any) -> None:
        """NCCL allows a shard inside of the whole only at this rank's place."""
        if func._opname in ("_reduce_scatter_base_", "_allgather_base_"):
            shard, whole = sorted(args[:2], key=torch.Tensor.numel)
            place = shard.data_ptr() - whole.data_ptr()
            if not 0 <= place < whole.nbytes:
                return
            self.in_place[func._opname] += 1
            if place != dist.ProcessGroup.unbox(args[2]).rank() * shard.nbytes:
                self.found.append(f"{func} is not in place, but its tensors overlap")

    def _check_blocking(self, func: Any, both: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """A copy between host and device lets the host wait, unless it is told not to."""
        is_waited_for = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if is_waited_for and {self._device.is_pinned(each) for each in both[:2]} == {False, True}:
            self.found.append(f"{func} between host and device blocks the host")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream, result = self._device.current_stream(CPU), func(*args, **kwargs)
        with AsTensors():
            if func._opname in ("send", "recv_") and args[3] == tree.TAG:  # of objects, between hosts
                return result
            if func.namespace == "c10d":
                self.collectives[func._opname, stream] += 1
                if self._declared not in (None, stream):
                    self.found.append(f"{func} is on another stream than its transport's")
                self._declared = None
                place = [argument.name for argument in func._schema.arguments].index("process_group")
                group = dist.ProcessGroup.unbox(args[place]).group_name
                if self._of_group.setdefault(group, stream) is not stream:
                    self.found.append(f"{func} is on another stream than earlier collectives of its communicator")
                self._check_place(func, args)
                touched = [(each, place == 0) for place, value in enumerate(args) for each in tensors_in(value)]
                outputs = []
            else:
                places = [(args[at] if at < len(args) else kwargs.get(name), w) for at, name, w in _touched(func)]
                touched = [(each, is_write) for value, is_write in places for each in tensors_in(value)]
                outputs = [each for each in tensors_in(result) if each.layout is torch.strided]
            if func._opname in ("copy_", "_to_copy") and stream is not self._device.compute:
                self._check_blocking(func, [*tensors_in(args), *outputs], args, kwargs)
            given = {_address(each) for each in tensors_in((args, kwargs)) if each.layout is torch.strided}
            for tensor, is_write in touched:
                self._note(tensor, is_write, stream, str(func))
            for tensor in outputs:
                if _address(tensor) not in given and tensor.numel():
                    self._allocate(tensor, stream)
                    self._note(tensor, True, stream, str(func))
        return result

    def accesses_to(self, tensor: torch.Tensor) -> list[_Access]:
        """The latest ones of each stream to the memory of `tensor`."""
        return list(self._memory[_address(tensor)].accesses.values()) if _address(tensor) in self._memory else []

    def _is_ordered(self, access: _Access, stream: SimulatedStream) -> bool:
        """Whether what `stream` does from now on is behind `access`, by its own waits or those of the host before."""
        return access.is_before(stream) or access.is_before(self._device.host)

    def _allocate(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """The allocator may give `stream` all that was freed, at whatever address: torch on CPUs has its own habits."""
        for access in self._freed.pop(stream, ()):
            if not self._is_ordered(access, stream):
                self.found.append(f"memory was freed while another stream may be at {access.what}")
        self._know(tensor, stream)

    def _know(self, tensor: torch.Tensor, home: SimulatedStream | None) -> _Memory:
        address = _address(tensor)
        end = weakref.finalize(tensor.untyped_storage(), self._free, address)
        self._memory[address] = memory = _Memory(home, {}, end)
        return memory

    def _free(self, address: int) -> None:
        memory, kept = self._memory.get(address), self._device.kept.pop(address, ())
        if memory is None or memory.end.alive:  # of a tensor that has moved, and whose place another one has
            return
        del self._memory[address]
        if memory.home is not None:
            self._freed[memory.home] += [each for each in memory.accesses.values() if each.stream not in kept]

    def close(self) -> None:
        for memory in self._memory.values():
            memory.end.detach()

    def _note(self, tensor: torch.Tensor, is_write: bool, stream: SimulatedStream, what: str) -> None:
        if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.device != CPU:
            return
        self.accesses += 1
        if stream is self._device.compute and self._device.is_pinned(tensor):
            stream = self._device.host
        address = _address(tensor)
        accesses = (self._memory.get(address) or self._know(tensor, None)).accesses  # None: allocated elsewhere
        start, stop = _bytes_of(tensor, address)
        access = _Access(stream, start, stop, is_write, stream.ticks, what)
        for other in accesses.values():
            is_shared = start < other.stop and other.start < stop and (is_write or other.is_write)
            if is_shared and not self._is_ordered(other, stream):
                self.found.append(f"{other.what}, then {what} on another stream, {tuple(tensor.shape)} {tensor.dtype}")
        accesses.pop(access[:4], None)  # the latest is last
        accesses[access[:4]] = access


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _grad_of(param: torch.Tensor) -> torch.Tensor | None:
    with AsTensors():
        return get_grad(param)


@contextlib.contextmanager
def checking_streams(device: SimulatedDevice) -> Iterator[StreamChecker]:
    """Raise at the end for what is on a wrong stream of `device`, in this thread.

    Gradients of parameters are taken on the stream that has made them. The stream of whoever calls backward waits for
    those streams before the end of backward. So does autograd with a device's own streams.
    """
    checker, finish = StreamChecker(device), Backward.finish

    def there(hook: Callable[..., Any], grad_of: Callable[[Any], torch.Tensor | None]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if (grad := grad_of(args[-1])) is None:  # kept as gradients of look-ups
                return hook(*args)
            stream = [access.stream for access in checker.accesses_to(grad) if access.is_write][-1]
            checker.leaves.add(stream)
            with device.stream(stream):
                return hook(*args)

        return called

    def finish_behind(self: Backward) -> None:
        for stream in checker.leaves:
            device.current_stream(CPU).wait_stream(stream)
        finish(self)

    with (
        checker,
        mock.patch.object(Backward, "finish", finish_behind),
        mock.patch.object(graph_hooks, "_on_gradient", there(graph_hooks._on_gradient, _grad_of)),
        mock.patch.object(graph_hooks, "_keep_lookup", there(graph_hooks._keep_lookup, operator.itemgetter(0))),
        contextlib.closing(checker),
    ):
        yield checker
    assert checker.accesses > 100
    assert not checker.found, "\n".join([*checker.found[:10], *checker.found[-10:]])


class LateTransport(AdversarialTransport):
    """Puts collectives on their stream, whose waits are events: of them the transport knows nothing."""

    def _start(self, start: Callable[[], Work | None], after: Callable[[], None] | None = None) -> Work | None:
        def do() -> None:
            with unobserved(self.streams):
                assert start() is None
            if after is not None:
                with self.streams.on(self.stream):
                    after()

        self.held.put(do)
        return None

    def _spoil(self, slot: torch.Tensor, keep: torch.Tensor | None) -> None:
        """Behind what is held back: a reduction may still read the slot."""

        def do() -> None:
            with self.streams.on(self.stream):
                super(LateTransport, self)._spoil(slot, keep)

        self.held.put(do)

    def complete(self, until: object = None) -> None:
        """Whoever talks to other ranks does so after what was issued before, as on one communicator."""
        self.held.run()

    @property
    def held(self) -> SimulatedStream:
        """Where what it starts is held back."""
        return self.streams.device_stream(self.stream)


@contextlib.contextmanager
def late(model: nn.Module) -> Iterator[None]:
    """Collectives of `model` are as late as its waits allow; they spoil what must not be looked at meanwhile."""
    engine = engine_inside(model)
    transports = [(ranks, LateTransport(ranks)) for ranks in communicators_of(engine)]
    for ranks, transport in transports:
        ranks.transport = transport
        transport.held.is_late = True
    with late_copies(engine) if engine.host is not None else contextlib.nullcontext():
        yield
    for ranks, transport in transports:
        transport.complete()
        ranks.transport = transport.inner
        transport.held.is_late = False


@contextlib.contextmanager
def late_copies(engine: Engine) -> Iterator[None]:
    host, launch, streams = engine.host, engine.host.launch, engine.streams
    copying = [streams.device_stream(name) for name in (StreamName.FETCH, StreamName.STORE)]

    def put(
        stream: StreamName, what: Collective, action: Callable[[], None], reads: Any = (), writes: Any = ()
    ) -> None:
        def run() -> None:
            with streams.on(stream), torch.no_grad():
                action()

        launch(stream, what, lambda: streams.device_stream(stream).put(run), reads, writes)

    for each in copying:
        each.is_late = True
    with mock.patch.object(host, "launch", put):
        yield
        host.settle()
    for each in copying:
        each.run()
        each.is_late = False


def is_inside(tensor: torch.Tensor, blocks: list[torch.Tensor]) -> bool:
    """Whether `tensor` lies in one of the `blocks` of memory."""
    return any(0 <= tensor.data_ptr() - block.data_ptr() < block.nbytes for block in blocks)


@contextlib.contextmanager
def backward_elsewhere() -> Iterator[None]:
    """Backwards run in a thread of their own, as on devices, which have one for autograd."""
    original = torch.Tensor.backward
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.current_thread).result()

        def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is thread:
                original(self, *args, **kwargs)
            else:
                pool.submit(original, self, *args, **kwargs).result()

        with mock.patch.object(torch.Tensor, "backward", backward):
            yield
