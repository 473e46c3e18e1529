"""Choices of slots with their bytes: which of them fit a budget, and which one to take.

Pure functions: `streamshard.tools.plan` counts the bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from streamshard.config import GradSlots, SlotCount
from streamshard.errors import ConfigError
from streamshard.tools.activations import Activations
from streamshard.tools.host_time import Exchanged
from streamshard.tools.memory import MemoryReport

_MARGIN = 20  # a budget's twentieth is for fragmentation
_CONTEXT_BYTES = 3 * 2**29  # of a GPU. Assumed, not measured: for the CUDA context and NCCL's communicators
_MOST_RANKS = 2**16


@dataclasses.dataclass(frozen=True)
class Stage:
    """Memory and communication of each rank with one choice of slots.

    Attributes:
        name: such as "ZeRO-3".
        weight_slots, grad_slots: the arguments of `StreamShard`.
        memory: the planned ``memory_report()``.
        total_bytes, host_total_bytes: the sums on the device and in host memory, with those for Adam.
        sent_bytes: bytes that the rank sends inside its replica in one forward and one backward, which are a step
            without accumulation, or by ``model.accumulate``.
        exchanged: by pass; and `loop`, of a forward and a backward of a loop over micro-batches.
    """

    name: str
    weight_slots: SlotCount
    grad_slots: GradSlots
    memory: MemoryReport
    total_bytes: int
    host_total_bytes: int
    sent_bytes: int
    exchanged: Exchanged
    loop: Exchanged

    @property
    def start_bytes(self) -> int:
        """`total_bytes` at the start of backward: main grads and scratch have no memory yet."""
        return self.total_bytes - self.memory.dropped_bytes


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits a budget.

    Attributes:
        budget_bytes: given, of a rank.
        margin_bytes: the part of it that stays free, for what a plan cannot know.
        plain, checkpointed: names of the stages that fit without activation checkpointing, and of those that need it.
        choice: the stage that sends least, a plain one if there is any. None: nothing fits.
    """

    budget_bytes: int
    margin_bytes: int
    plain: Sequence[str]
    checkpointed: Sequence[str]
    choice: str | None

    def lines(self, size: Callable[[int], str], *, counts_activations: bool) -> Iterator[str]:
        """In words."""
        on_gpu = ", the CUDA context and NCCL (assumed)" * (self.margin_bytes > self.budget_bytes // _MARGIN)
        margin = size(self.margin_bytes)
        yield f"of {size(self.budget_bytes)} per rank, {margin} stay free for fragmentation{on_gpu}"
        if self.choice is None:
            yield "nothing fits. More ranks make room, and so do offload and an 8-bit Adam"
            return
        if self.plain:
            yield f"fits: {', '.join(self.plain)}"
        if self.checkpointed:
            yield f"fits with activation checkpointing: {', '.join(self.checkpointed)}"
        how = "without" if self.plain else "with"
        yield f"take: {self.choice}" + f", {how} activation checkpointing" * counts_activations


def choose(stages: Sequence[Stage], budget_bytes: int, activations: Activations | None, *, on_gpus: bool) -> Fit:
    """Which of `stages` fit into a budget, beside activations if these are known, and which one to take."""
    margin_bytes = budget_bytes // _MARGIN + on_gpus * _CONTEXT_BYTES
    known = Activations(0, 0) if activations is None else activations
    left = budget_bytes - margin_bytes
    plain = [stage for stage in stages if stage.total_bytes + known.without <= left]
    checkpointed = [stage for stage in stages if stage not in plain and stage.total_bytes + known.checkpointed <= left]

    def cost(stage: Stage) -> tuple[int, int]:
        # With ``offload``, a unit that is still in a slot does not come from host memory again.
        return stage.sent_bytes, -stage.total_bytes if stage.host_total_bytes else stage.total_bytes

    names = [stage.name for stage in plain], [stage.name for stage in checkpointed]
    best = min(plain or checkpointed, key=cost, default=None)
    return Fit(budget_bytes, margin_bytes, *names, None if best is None else best.name)


def fewest_ranks(fits: Callable[[int], bool]) -> int | None:
    """The smallest number of ranks for which `fits` holds; None if there is none."""
    low, high = 0, 1
    with contextlib.suppress(ConfigError):  # so many ranks do not sum in 16 bits
        while high <= _MOST_RANKS:  # bisection takes it that more ranks need no more memory each
            if fits(high):
                return low + 1 + bisect.bisect_left(range(low + 1, high), True, key=fits)
            low, high = high, 2 * high
    return None
