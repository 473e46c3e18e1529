"""A transport that delays messages as long as the ordering rules allow. If a wait is missing, results become NaN.

    from tests.adversary import make_adversarial

    with make_adversarial(model):          # a debugging tool: nothing overlaps any more
        train(model)                       # bit by bit what it gives without

A real network is usually fast enough to hide a missing wait. This transport is late on purpose. A weight slot holds NaN
until its all-gather is waited for. A grad slot is read only when its reduction is waited for, and then holds NaN. So
reads and writes that come too early give NaN.

On the CPU, computation runs in the calling thread, so waits for the compute stream (rules 2 and 4) cannot be missed.
`tests.races` checks those. On CUDA, collectives are delayed on their stream, and with ``offload`` copies too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Collective, StreamName, Streams, Work
from streamshard.comm.transport import AllToAll, Gather, Reduction, Transport
from streamshard.config import ReductionMode
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of

_DELAY_CYCLES = 2_000_000  # about a millisecond of a GPU


@contextlib.contextmanager
def unobserved(streams: Streams) -> Iterator[None]:
    observers, streams.observers = streams.observers, ()
    try:
        yield
    finally:
        streams.observers = observers


def communicators_of(engine: Engine) -> list[Communicator]:
    """All ranks that this rank exchanges units' bytes with: its shard group, experts, replicas."""
    axes = (engine.reductions.replicas, engine.outer)
    flats = (flat for unit in engine.units for flat in unit.flat_params)
    of_units = (ranks for flat in flats for ranks in (flat.ranks, flat.gather_ranks))
    return list(dict.fromkeys([engine.ranks, *of_units, *(axis.ranks for axis in axes if axis is not None)]))


@contextlib.contextmanager
def make_adversarial(model: nn.Module) -> Iterator[AdversarialTransport]:
    """Inside the context the collectives of `model` are as late as the engine's waits allow. For every rank.

    Leave the context before a collective of your own: a rank that has not waited for a gather yet would hold up the
    others for ever. Yields the shard group's transport.

    Args:
        model: made by `StreamShard`.
    """
    engine = engine_of(model)
    pending: deque[_Late] = deque()
    transports = [(ranks, AdversarialTransport(ranks, pending)) for ranks in communicators_of(engine)]
    for ranks, transport in transports:
        ranks.transport = transport
    if (host := engine.host) is not None:
        launch = host.launch

        def launch_late(stream: StreamName, what: Collective, action: Callable[[], None], *touched: Any) -> None:
            def run() -> None:
                delay(engine.streams)
                action()

            launch(stream, what, run, *touched)

        host.launch = launch_late  # type: ignore[assignment, method-assign]
    try:
        yield transports[0][1]
        transports[0][1].complete()  # after an error the others may not be there to complete anything with
    finally:
        for ranks, transport in transports:
            ranks.transport = transport.inner
        if host is not None:
            del host.launch


def delay(streams: Streams) -> None:
    """Let the device's current stream be busy for a while."""
    if sleep := getattr(streams.module, "_sleep", None):
        sleep(_DELAY_CYCLES)


class AdversarialTransport(Transport):
    """Wraps a transport; see the module.

    Collectives are done in the order in which they were started, which is the same on every rank: being waited for does
    all earlier ones first. So ranks stay in step although each is late in its own way.

    Args:
        ranks: whose transport really moves bytes.
        pending: the queue of collectives that are not done yet, of all transports of a model; None: a new one.
    """

    def __init__(self, ranks: Communicator, pending: deque[_Late] | None = None) -> None:
        super().__init__(ranks)
        self.inner = ranks.transport
        self._pending: deque[_Late] = deque() if pending is None else pending

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`. Until it is waited for the slot holds NaN and the shard has not been read."""
        if gather.is_of_step:
            self._issue(None, Collective.ALL_GATHER, gather.tag, reads=(gather.shard,), writes=(gather.slot,))
            self._spoil(gather.slot, gather.shard)
        return self._start_gather(lambda: self.inner.start_gather(gather))

    def _spoil(self, slot: torch.Tensor, keep: torch.Tensor | None) -> None:
        with self.streams.on(self.stream):
            _spoil(slot, keep)

    def _start_gather(self, gather: Callable[[], Work | None]) -> Work | None:
        readers: list[Work | None] = []

        def start() -> Work | None:
            work = gather()
            readers.extend(self.inner.readers((work,)))
            return work

        late = self._start(start)
        if late is not None:
            late.readers = readers
        return late

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. The slot is read when that is waited for, and holds NaN afterwards."""
        written = (reduction.slot, reduction.scratch, reduction.out)
        self._issue(None, Collective.REDUCE_SCATTER, reduction.tag, writes=written)
        return self._start(
            lambda: self.inner.start_reduce(reduction), lambda: _spoil(reduction.slot, keep=reduction.out)
        )

    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        self._issue(None, Collective.ALL_REDUCE, tag, writes=(tensor,))
        return self._start(lambda: self.inner.start_average(tensor, tag))

    def start_flags(self, flags: torch.Tensor, gathered: torch.Tensor, tag: int) -> Work | None:
        """See `Transport.start_flags`. Until it is waited for `gathered` holds 255s."""
        self._issue(None, Collective.ALL_GATHER, tag, reads=(flags,), writes=(gathered,))
        with self.streams.on(self.stream):
            _spoil(gathered)
        return self._start_gather(lambda: self.inner.start_flags(flags, gathered, tag))

    def flags_numel(self, count: int) -> int:
        return self.inner.flags_numel(count)

    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """See `Transport.start_all_to_all`. What is received holds NaN until then, what was sent afterwards."""
        written = (exchange.send, exchange.received)
        self._issue(None, Collective.ALL_TO_ALL, None, writes=written)
        with self.streams.on(self.stream):
            _spoil(exchange.received)
        return self._start(lambda: self.inner.start_all_to_all(exchange), lambda: _spoil(exchange.send))

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, dtype: torch.dtype, limit: int) -> int:
        return self.inner.scratch_numel(shard_numel, mode, dtype, limit)

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.inner.allocate_visible(numel, dtype)

    def readers(self, works: Sequence[Work | None]) -> Sequence[Work | None]:
        return [_Readers(work, work.readers) for work in works if isinstance(work, _Late)]

    def leave(self) -> None:
        self.inner.leave()

    def complete(self, until: _Late | None = None) -> None:
        """Do what is pending, in order, up to `until` (None: all)."""
        while self._pending and (until is None or not until.is_done):
            self._pending.popleft().complete(self.streams)

    def before_talk(self) -> None:
        """See `Transport.before_talk`. The others may wait for our part of something."""
        self.complete()

    def advance(self) -> None:
        """See `Transport.advance`: nothing is early here."""

    def _start(self, start: Callable[[], Work | None], after: Callable[[], None] | None = None) -> _Late | None:
        late = _Late(self, start, after)
        if self.streams.has_streams:
            # Waits are events there, of which the host knows nothing: the device has to be slow.
            with self.streams.on(self.stream):
                delay(self.streams)
            late.complete(self.streams)
            return None
        self._pending.append(late)
        return late


class _Late:
    """A collective that is done when it is waited for, all earlier ones first.

    Attributes:
        readers: of an all-gather that is done, see `Transport.readers`.
    """

    readers: list[Work | None]

    def __init__(
        self, transport: AdversarialTransport, start: Callable[[], Work | None], after: Callable[[], None] | None
    ) -> None:
        self.is_done = False
        self._transport = transport
        self._start = start
        self._after = after

    def wait(self) -> None:
        self._transport.complete(self)

    def complete(self, streams: Streams) -> None:
        """Really do it, now. The start has declared it, so observers do not hear of it again."""
        self.is_done = True
        with unobserved(streams):
            work = self._start()
            if work is not None:
                work.wait()
        if self._after is not None:
            with streams.on(self._transport.stream):
                self._after()


class _Readers(NamedTuple):
    """Work that ends when no rank reads the shards of a late all-gather; see `Transport.readers`."""

    late: Work
    readers: list[Work | None]

    def wait(self) -> None:
        self.late.wait()
        for each in self.readers:
            if each is not None:
                each.wait()


def _spoil(slot: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """NaN, or all bits set where there is no NaN; but not what is this rank's own (all-gather input, main grads)."""
    parts = [slot]
    if keep is not None and keep.dtype is slot.dtype:
        start = (keep.data_ptr() - slot.data_ptr()) // slot.element_size()
        if 0 <= start < slot.numel():
            parts = [slot[:start], slot[start + keep.numel() :]]
    with torch.no_grad():
        for part in parts:
            part.fill_(float("nan")) if part.is_floating_point() else part.fill_(torch.iinfo(part.dtype).max)
