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
NO_TOKENS = "give batch and seq"


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
class Room:
    """The memory of a rank.

    Attributes:
        budget_bytes: given.
        margin_bytes: the part of it that stays free, for what a plan cannot know.
        activations: None: not known, so not counted.
    """

    budget_bytes: int
    margin_bytes: int
    activations: Activations | None

    @classmethod
    def of(cls, budget_bytes: int, activations: Activations | None, *, on_gpus: bool) -> Room:
        """With the margin of such a budget."""
        return cls(budget_bytes, budget_bytes // _MARGIN + on_gpus * _CONTEXT_BYTES, activations)

    def left(self, *, is_checkpointed: bool) -> int:
        """Bytes for the engine and the optimizer. Checkpointing is used only if it saves memory."""
        known = Activations(0, 0) if self.activations is None else self.activations
        return self.budget_bytes - self.margin_bytes - (min(known) if is_checkpointed else known.without)

    def fits(self, total_bytes: int) -> bool:
        """With activation checkpointing, if that is needed."""
        return total_bytes <= self.left(is_checkpointed=True)

    def needs_checkpointing(self, total_bytes: int) -> bool:
        """Whether so much fits only with activation checkpointing."""
        return total_bytes > self.left(is_checkpointed=False)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits a budget.

    Attributes:
        room: the memory of a rank.
        fitting: names of the stages that fit.
        checkpointed: those of them that need activation checkpointing.
        choice: of those that fit, the one that sends least; stages without checkpointing go first. None: nothing fits.
    """

    room: Room
    fitting: Sequence[str]
    checkpointed: Sequence[str]
    choice: str | None

    def lines(self, size: Callable[[int], str]) -> Iterator[str]:
        """In words."""
        budget, margin = self.room.budget_bytes, self.room.margin_bytes
        on_gpu = ", the CUDA context and NCCL (assumed)" * (margin > budget // _MARGIN)
        yield f"of {size(budget)} per rank, {size(margin)} stay free for fragmentation{on_gpu}"
        if self.choice is None:
            yield "nothing fits. More ranks make room, and so do offload and an 8-bit Adam"
            return
        plain = [name for name in self.fitting if name not in self.checkpointed]
        if plain:
            yield f"fits: {', '.join(plain)}"
        if self.checkpointed:
            yield f"fits with activation checkpointing: {', '.join(self.checkpointed)}"
        how = "with" if self.choice in self.checkpointed else "without"
        yield f"take: {self.choice}" + f", {how} activation checkpointing" * (self.room.activations is not None)


def choose(stages: Sequence[Stage], room: Room) -> Fit:
    """Which of `stages` fit into `room`, and which one to take."""
    fitting = [stage for stage in stages if room.fits(stage.total_bytes)]
    checkpointed = [stage.name for stage in fitting if room.needs_checkpointing(stage.total_bytes)]

    def cost(stage: Stage) -> tuple[bool, int, int]:
        # With ``offload``, a unit that is still in a slot does not come from host memory again.
        size = -stage.total_bytes if stage.host_total_bytes else stage.total_bytes
        return stage.name in checkpointed, stage.sent_bytes, size

    order = sorted(fitting, key=cost)
    return Fit(room, [stage.name for stage in fitting], checkpointed, order[0].name if order else None)


def fewest_ranks(fits: Callable[[int], bool]) -> int | None:
    """The smallest number of ranks for which `fits` holds; None if there is none."""
    low, high = 0, 1
    with contextlib.suppress(ConfigError):  # so many ranks do not sum in 16 bits
        while high <= _MOST_RANKS:  # bisection takes it that more ranks need no more memory each
            if fits(high):
                return low + 1 + bisect.bisect_left(range(low + 1, high), True, key=fits)
            low, high = high, 2 * high
    return None
