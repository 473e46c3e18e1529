"""What is under way: one `Forward`, one `Backward`; and what an autograd graph remembers of the forward that made it.

A `Pass` and its `Use`s belong to the graph, and live as long as it does. A `Forward` and a `Backward` belong to the
engine and last until it leaves them, by whatever way: nothing of either has to be reset.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from streamshard.plan.program import Schedule
from streamshard.unit.unit import StreamedUnit

__all__ = ["Backward", "Forward", "Pass", "Use"]


class Pass:
    """One outermost forward with gradients. The graph that it made keeps it; nothing depends on whether that lives.

    Attributes:
        visits: what the program issued, units outside the program included, in order; filled at the end.
        versions: of the sharded parameters, by index, see `StreamedUnit.versions`: of the root unit and of units with
            slots of their own whose weights were read. Their compute views are in the graph as they are.
    """

    __slots__ = ("versions", "visits")

    def __init__(self, versions: dict[int, list[int]]) -> None:
        self.visits: tuple[int, ...] = ()
        self.versions = versions


class Use:
    """One use of a unit by a graph: what its saved tensors and outputs refer to when backward needs the unit.

    Attributes:
        versions: of the unit's sharded parameters when it ran, see `StreamedUnit.versions`.
        is_inside: the unit, which is resident, ran inside another one's layer, whose turn goes on.
    """

    __slots__ = ("is_inside", "pass_", "unit", "versions")

    def __init__(self, unit: StreamedUnit, pass_: Pass, versions: list[int], *, is_inside: bool = False) -> None:
        self.is_inside = is_inside
        self.unit = unit
        self.pass_ = pass_
        self.versions = versions


class Forward:
    """One outermost forward while it runs.

    Attributes:
        schedule: hands out its gathers.
        pass_: what its graph will remember.
        running: units of the layers whose forward is running, one inside the other.
        in_place: indices of units in slots of their own that were used: what their compute views are like counts.
        read: those of them whose weights were read while none of their layers ran.
        learns: it has gradients, and there are units that no such pass has used: ranks may depart differently.
    """

    __slots__ = ("in_place", "learns", "pass_", "read", "running", "schedule")

    def __init__(self, schedule: Schedule, pass_: Pass, *, learns: bool) -> None:
        self.learns = learns
        self.schedule = schedule
        self.pass_ = pass_
        self.running: list[StreamedUnit] = []
        self.in_place: set[int] = set()
        self.read: set[int] = set()


class Backward:
    """One backward while it runs. See [Note: several passes] in `streamshard.engine.engine`.

    Attributes:
        schedule: hands out gathers and reductions of the pass that it has reached last.
        pass_: that pass; None while none was reached.
        closed: passes that it has been through.
        computing: the unit whose backward is running; None between units.
        running: units of the layers that are being recomputed, one inside the other.
        leaves_unreduced: gradients stay in their slots.
    """

    __slots__ = ("_at_end", "closed", "computing", "leaves_unreduced", "pass_", "running", "schedule")

    def __init__(
        self,
        schedule: Schedule,
        at_end: Callable[[], None],
        on_exception: Callable[[], None],
        *,
        leaves_unreduced: bool,
    ) -> None:
        # autograd holds `at_end` as long as the backward runs. This object goes when that is called.
        self._at_end = weakref.ref(at_end, lambda _: on_exception())
        self.schedule = schedule
        self.pass_: Pass | None = None
        self.closed: list[Pass] = []
        self.computing: StreamedUnit | None = None
        self.running: list[StreamedUnit] = []
        self.leaves_unreduced = leaves_unreduced

    @property
    def has_ended(self) -> bool:
        """Whether autograd has left it, by an exception if it is still the engine's."""
        return self._at_end() is None
