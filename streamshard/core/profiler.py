"""Names for torch.profiler: ``StreamShard::all_gather layers.3``, and so for each part of each unit's step.

An observer like the instruments, added while a profiler runs. A pass looks once whether one does, so that a run without
a profiler pays nothing per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.profiler import record_function

from streamshard.comm.streams import Observer, StepPart, Streams
from streamshard.torch_private import is_profiled


class ProfilerNames(Observer):
    """Marks the work of units for torch.profiler.

    Args:
        streams: the engine's, which report the work.
        names: of the units.

    Attributes:
        is_on: a profiler ran when the last pass began.
    """

    def __init__(self, streams: Streams, names: Sequence[str]) -> None:
        self._streams = streams
        self._names = names
        self.is_on = False
        self._open: dict[tuple[StepPart, int | None], Any] = {}  # by part and unit, the range that has begun

    def look(self) -> None:
        """A pass begins: mark its work if a profiler runs."""
        observers, was_on = self._streams.observers, self.is_on
        self.is_on = is_profiled()
        if self.is_on and not was_on:
            self._streams.observers = (*observers, self)
        elif was_on and not self.is_on:
            self._streams.observers = tuple(each for each in observers if each is not self)
            self.close()

    def close(self) -> None:
        """End all ranges, because an exception has ended the pass or the profiler is gone."""
        while self._open:
            # The latest first: ranges of the profiler are nested.
            self._open.popitem()[1].__exit__(None, None, None)

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        """See `Observer`. A unit's backward ends where the next unit's begins."""
        if part is StepPart.BACKWARD:
            for key in [key for key in self._open if key[0] is part]:
                self._open.pop(key).__exit__(None, None, None)
        # None: it began before the profiler, or an exception has closed it.
        elif not begins and (begun := self._open.pop((part, unit), None)) is not None:
            begun.__exit__(None, None, None)
        if begins and unit is not None:
            self._open[part, unit] = record_function(f"StreamShard::{part.value} {self._names[unit]}")
            self._open[part, unit].__enter__()
