"""A transport that delays messages as long as the ordering rules allow. If a wait is missing, results become NaN.

    from streamshard.inspect.adversary import make_adversarial

    with make_adversarial(model):          # a debugging tool: nothing overlaps any more
        train(model)                       # bit by bit what it gives without

A real network is usually fast enough to hide a missing wait. This transport is late on purpose. A weight slot holds NaN
until its all-gather is waited for. A grad slot is read only when its reduction is waited for, and then holds NaN. So
reads and writes that come too early give NaN.

On the CPU, computation runs in the calling thread, so waits for the compute stream (rules 2 and 4) cannot be missed.
`streamshard.inspect.races` checks those. On CUDA, collectives are delayed on their stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Collective, Streams, Work
from streamshard.comm.transport import AllToAll, Reduction, Transport
from streamshard.config import ReductionMode
from streamshard.inspect import engine_inside

__all__ = ["AdversarialTransport", "Adversary", "make_adversarial"]

_DELAY_CYCLES = 2_000_000  # about a millisecond of a GPU


def make_adversarial(model: nn.Module) -> Adversary:
    """From now on the collectives of `model` are as late as the engine's waits allow. Call it on every rank.

    Call `Adversary.restore` before a collective of your own: a rank that has not waited for a gather yet would hold up
    the others for ever.

    Args:
        model: made by `StreamShard`.

    Returns:
        What ends it: call ``restore()``, or use it as a context manager.
    """
    engine = engine_inside(model)
    replicas = engine.reductions.replicas
    return Adversary(engine.ranks) if replicas is None else Adversary(engine.ranks, replicas.ranks)


class Adversary:
    """Adversarial transports in the place of a model's own ones. They have one queue.

    Args:
        *all_ranks: whose transports are replaced: the shard group's, that of replicas.

    Attributes:
        transport: the shard group's.
    """

    def __init__(self, *all_ranks: Communicator) -> None:
        pending: deque[_Late] = deque()
        self._replaced = [(ranks, AdversarialTransport(ranks, pending)) for ranks in all_ranks]
        for ranks, transport in self._replaced:
            ranks.transport = transport
        self.transport = self._replaced[0][1]

    def restore(self) -> None:
        """Complete what is pending and give the ranks their own transports back. Twice is once."""
        self.transport.complete()
        self._give_back()

    def _give_back(self) -> None:
        for ranks, transport in self._replaced:
            ranks.transport = transport.inner

    def __enter__(self) -> Adversary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.restore()
        else:
            self._give_back()  # the others may not be there to complete anything with


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

    def start_gather(
        self, shard: torch.Tensor, slot: torch.Tensor, tag: int, *, is_published: bool = True
    ) -> Work | None:
        """See `Transport.start_gather`. Until it is waited for the slot holds NaN and the shard has not been read."""
        if not is_published:
            return self._start(lambda: self.inner.start_gather(shard, slot, tag, is_published=False))
        self.streams.declare(self.stream, Collective.ALL_GATHER, tag, reads=(shard,), writes=(slot,))
        with self.streams.on(self.stream):
            _spoil(slot, keep=shard)
        return self._start(lambda: self.inner.start_gather(shard, slot, tag))

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`. The slot is read when that is waited for, and holds NaN afterwards."""
        written = (reduction.slot, reduction.scratch, reduction.out)
        self.streams.declare(self.stream, Collective.REDUCE_SCATTER, reduction.tag, writes=written)
        return self._start(
            lambda: self.inner.start_reduce(reduction), lambda: _spoil(reduction.slot, keep=reduction.out)
        )

    def start_average(self, tensor: torch.Tensor, tag: int | None) -> Work | None:
        """See `Transport.start_average`."""
        self.streams.declare(self.stream, Collective.ALL_REDUCE, tag, writes=(tensor,))
        return self._start(lambda: self.inner.start_average(tensor, tag))

    def start_all_to_all(self, exchange: AllToAll) -> Work | None:
        """See `Transport.start_all_to_all`. What is received holds NaN until then, what was sent afterwards."""
        written = (exchange.send, exchange.received)
        self.streams.declare(self.stream, Collective.ALL_TO_ALL, None, writes=written)
        with self.streams.on(self.stream):
            _fill_nan(exchange.received)
        return self._start(lambda: self.inner.start_all_to_all(exchange), lambda: _fill_nan(exchange.send))

    def scratch_numel(self, shard_numel: int, mode: ReductionMode, *, adds: bool) -> int:
        """See `Transport.scratch_numel`."""
        return self.inner.scratch_numel(shard_numel, mode, adds=adds)

    def allocate_visible(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Transport.allocate_visible`."""
        return self.inner.allocate_visible(numel, dtype)

    def retract_shards(self) -> Work | None:
        """See `Transport.retract_shards`. What has not been read by then never is."""
        self.complete()
        return self.inner.retract_shards()

    def publish_shards(self) -> None:
        """See `Transport.publish_shards`."""
        self.inner.publish_shards()

    def leave(self) -> None:
        """See `Transport.leave`."""
        self.inner.leave()

    def complete(self, until: _Late | None = None) -> None:
        """Do what is pending, in order, up to `until` (None: all)."""
        while self._pending and (until is None or not until.is_done):
            self._pending.popleft().complete(self.streams)

    def before_talk(self) -> None:
        """See `Transport.before_talk`. The others may wait for our part of something."""
        self.complete()

    def progress(self) -> None:
        """See `Transport.progress`: nothing is early here."""

    def _start(self, start: Callable[[], Work | None], after: Callable[[], None] | None = None) -> Work | None:
        late = _Late(self, start, after)
        if self.streams.has_streams:
            # Waits are events there, of which the host knows nothing: the device has to be slow.
            with self.streams.on(self.stream):
                _be_slow(self.streams)
            late.complete(self.streams)
            return None
        self._pending.append(late)
        return late


class _Late:
    """A collective that is done when it is waited for, all earlier ones first."""

    def __init__(
        self, transport: AdversarialTransport, start: Callable[[], Work | None], after: Callable[[], None] | None
    ) -> None:
        self.is_done = False
        self._transport = transport
        self._start = start
        self._after = after

    def wait(self) -> None:
        """See `streamshard.comm.streams.Work`."""
        self._transport.complete(self)

    def complete(self, streams: Streams) -> None:
        """Really do it, now. The start has declared it, so observers do not hear of it again."""
        self.is_done = True
        with streams.unobserved():
            work = self._start()
            if work is not None:
                work.wait()
        if self._after is not None:
            with streams.on(self._transport.stream):
                self._after()


def _spoil(slot: torch.Tensor, keep: torch.Tensor) -> None:
    """NaN, or all bits set where there is no NaN; but not what is this rank's own (compute shard, main grads)."""
    start = (keep.data_ptr() - slot.data_ptr()) // slot.element_size()
    parts = [slot]
    if keep.dtype is slot.dtype and 0 <= start < slot.numel():
        parts = [slot[:start], slot[start + keep.numel() :]]
    with torch.no_grad():
        for part in parts:
            part.fill_(float("nan")) if part.is_floating_point() else part.fill_(torch.iinfo(part.dtype).max)


def _fill_nan(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan"))


def _be_slow(streams: Streams) -> None:
    if sleep := getattr(streams.module, "_sleep", None):
        sleep(_DELAY_CYCLES)
