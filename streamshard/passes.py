"""What an autograd graph remembers of the forward that made it, so that its backward can be served."""

from __future__ import annotations

from streamshard.unit import StreamedUnit

__all__ = ["Pass", "Run"]


class Pass:
    """One outermost forward with gradients. Kept alive by the graph it made; the engine only looks on, weakly.

    Attributes:
        visits: what the program issued, units outside the program included, in order; filled at the end.
    """

    __slots__ = ("__weakref__", "visits")

    def __init__(self) -> None:
        self.visits: tuple[int, ...] = ()


class Run:
    """One forward of one unit: what its saved tensors and outputs refer to when backward needs the unit."""

    __slots__ = ("pass_", "unit")

    def __init__(self, unit: StreamedUnit, pass_: Pass) -> None:
        self.unit = unit
        self.pass_ = pass_
