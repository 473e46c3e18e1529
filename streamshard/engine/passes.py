"""What an autograd graph remembers of the forward that made it, so that its backward can be served."""

from __future__ import annotations

from streamshard.unit.unit import StreamedUnit

__all__ = ["Pass", "Run"]


class Pass:
    """One outermost forward with gradients. The graph that it made keeps it; nothing depends on whether that lives.

    Attributes:
        visits: what the program issued, units outside the program included, in order; filled at the end.
        borrowed: indices of units whose weights were read while none of their layers ran.
        edge_versions: of the edge unit's sharded parameters, see `StreamedUnit.versions`.
    """

    __slots__ = ("borrowed", "edge_versions", "visits")

    def __init__(self, edge_versions: list[int]) -> None:
        self.visits: tuple[int, ...] = ()
        self.borrowed: set[int] = set()
        self.edge_versions = edge_versions


class Run:
    """One forward of one unit: what its saved tensors and outputs refer to when backward needs the unit.

    Attributes:
        versions: of the unit's sharded parameters when it ran, see `StreamedUnit.versions`.
        is_borrowed: no forward of the unit, but one that read its weights.
    """

    __slots__ = ("is_borrowed", "pass_", "unit", "versions")

    def __init__(self, unit: StreamedUnit, pass_: Pass, versions: list[int], *, is_borrowed: bool = False) -> None:
        self.is_borrowed = is_borrowed
        self.unit = unit
        self.pass_ = pass_
        self.versions = versions
