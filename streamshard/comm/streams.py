"""The two streams and the fences that tie them: every wait of the ordering rules is a `Fence` made here.

On CUDA both streams are real. On the CPU they are declared: computation runs in the calling thread, communication in
the backend's own threads, and a fence carries the pending work that its wait completes. An observer (the race detector
of `streamshard.inspect`) sees every record and wait on both, so every machine can check the order.
See [Note: ordering rules].

[Note: ordering rules]
1. WEIGHTS_ARRIVED: a unit's forward or backward does not start until its weights are in its slot.
2. SLOT_RELEASED: a slot is not gathered into while an earlier unit in it is still computing.
3. GRADS_DRAINED: a unit's backward does not write a grad slot until the reduction of the slot's earlier unit is done.
4. GRADS_WRITTEN: a reduction does not start until every gradient of its unit is written.
5. SHARDS_WRITTEN: no gather reads a shard before it is written (the cast, the optimizer), nor an exchange its flags.
6. SHARDS_READ: no cast writes a compute shard that a gather still reads.
7. RESULTS_ARRIVED: what arrives outside of slots is not read before it is complete: main grads by the optimizer, flags
   by the host, whole tensors by whoever asked for them.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from streamshard.errors import StateError

__all__ = ["AllWork", "Fence", "Observer", "Rule", "StreamName", "Streams", "Work"]


class StreamName(enum.Enum):
    """The two streams."""

    COMPUTE = "compute"
    COMM = "comm"


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
        self._works = works

    def wait(self) -> None:
        """See `Work`."""
        for work in self._works:
            work.wait()


class Observer(Protocol):
    """Sees what the engine declares. The race detector is one."""

    def on_record(self, fence: Fence) -> None:
        """`fence.source` has reached this point."""

    def on_wait(self, fence: Fence) -> None:
        """`fence.target` goes on only after what `fence` recorded last."""

    def on_access(self, stream: StreamName, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        """`stream` reads or writes `tensor` in a collective: from here, where it is issued, until it is waited for."""


class Fence:
    """A point in `source` that `target` waits for, on behalf of one rule.

    Owns one CUDA event (on CUDA), recorded anew each time, or the pending `Work` (elsewhere).

    Args:
        streams: the pair of streams it ties.
        rule: the ordering rule it keeps.
        what: what it guards, for messages ("slot 0").
    """

    def __init__(self, streams: Streams, rule: Rule, source: StreamName, what: str) -> None:
        self.rule = rule
        self.what = what
        self.source = source
        self.target = StreamName.COMM if source is StreamName.COMPUTE else StreamName.COMPUTE
        self._streams = streams
        self._event = torch.cuda.Event() if streams.is_cuda else None
        self._work: Work | None = None
        self._recorded = False

    def record(self, work: Work | None = None) -> None:
        """Mark this point in `source`; `work` is what has to complete for the point to be reached (not on CUDA)."""
        self.complete()
        self._work = work
        self._recorded = True
        if self._event is not None:
            self._event.record(self._streams.cuda_stream(self.source))
        if self._streams.observer is not None:
            self._streams.observer.on_record(self)

    def wait(self) -> None:
        """Let `target` go on only after the point recorded last; nothing if none was."""
        dropped = self._streams.dropped_rules
        if not self._recorded or dropped and (self.rule in dropped or self.what in dropped):
            return
        if self._event is not None:
            self._streams.cuda_stream(self.target).wait_event(self._event)
        else:
            self.complete()
        if self._streams.observer is not None:
            self._streams.observer.on_wait(self)

    def complete(self) -> None:
        """Complete pending work without declaring a wait: its buffers are about to be reused by the host."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class Streams:
    """The compute stream and the comm stream of one engine. Owns the comm stream.

    Args:
        device: where the engine's buffers live.

    Attributes:
        observer: sees records, waits and accesses; None costs nothing.
        dropped_rules: rules, or fences by what they guard, whose waits are left out. Only for the tests which show that
            each wait is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.observer: Observer | None = None
        self.dropped_rules: frozenset[Rule | str] = frozenset()
        self.current = StreamName.COMPUTE
        self._comm = torch.cuda.Stream(device) if self.is_cuda else None

    def cuda_stream(self, name: StreamName) -> torch.cuda.Stream:
        """The CUDA stream behind `name`; compute is whatever stream the caller computes on."""
        if self._comm is None:
            raise StateError("streams", f"on {self.device}", "a CUDA device")
        return self._comm if name is StreamName.COMM else torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on_comm(self) -> Iterator[None]:
        """Run the body on the comm stream: really on CUDA, as declared elsewhere."""
        outer, self.current = self.current, StreamName.COMM
        context: AbstractContextManager[object] = (
            torch.cuda.stream(self._comm) if self._comm is not None else contextlib.nullcontext()
        )
        try:
            with context:
                yield
        finally:
            self.current = outer

    def declare_access(self, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        """Tell the observer, if there is one, that the comm stream reads or writes `tensor`."""
        if self.observer is not None:
            self.observer.on_access(StreamName.COMM, tensor, write=write, what=what)
