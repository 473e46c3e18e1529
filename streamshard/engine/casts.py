"""The cast of main weights to all-gather inputs, between the all-gathers of one pass and those of the next.

The units that a pass begins with are cast first, with a fence of their own: on a device, the first all-gathers run
while the rest of the model is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StepEvent, StreamName
from streamshard.unit.unit import StreamedUnit

_FIRST_UNITS = 3  # a forward begins with the root unit, the embedding, and a layer


class Casts:
    """Casts weights as the user has left them, if they may have changed. Owns the three fences between passes.

    Args:
        units: all units.
        ranks: the shard group, whose transport all-gathers.

    Attributes:
        check_structure: raises if modules or parameters were exchanged since sharding; called before each cast.
        is_synced: False inside ``no_sync()``: weights do not change between passes, so slots' contents are reused.
    """

    def __init__(self, units: Sequence[StreamedUnit], ranks: Communicator) -> None:
        self.check_structure: Callable[[], None] = lambda: None
        self.is_synced = True
        self._units = units
        self._ranks = ranks
        self._are_current = False
        self._versions: list[list[int]] = []  # of the weights that were cast last, inside no_sync()
        self._first: frozenset[int] = frozenset()  # units that the pass begins with, by index
        what = "all-gather inputs"
        self._first_done = Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, what)
        self._all_done = Fence(ranks.streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, what)
        self._awaits_all = False  # comm has not waited for `_all_done` yet
        self._gathers_done = Fence(ranks.streams, Rule.SHARDS_READ, StreamName.COMM, "gathered shards")

    def set_synced(self, is_synced: bool) -> None:
        """Leave (True) or enter (False) a stretch of passes between which weights do not change."""
        self.is_synced = is_synced
        if is_synced:
            self._are_current = False

    @property
    def are_due(self) -> bool:
        """Whether the next pass casts: weights may have changed since the last one."""
        return not self._are_current

    def expire(self) -> None:
        """Weights may have changed: the next pass casts, inside ``no_sync()`` too."""
        self._are_current = False

    def set_structure_check(self, check: Callable[[], None]) -> None:
        """Call `check`, which raises if the model is not the one that was sharded, before each cast."""
        self.check_structure = check

    def begin_pass(self, order: Sequence[int]) -> None:
        """A pass is about to all-gather: cast, if weights may have changed.

        Args:
            order: of units, by index, in which the pass all-gathers them.
        """
        if not self._are_current or self._versions != [unit.versions() for unit in self._units]:
            self._first = frozenset(order[:_FIRST_UNITS])
            self.cast()

    def before_gather(self, unit: StreamedUnit) -> None:
        """`unit` is about to be all-gathered: let comm wait for the cast of its weights (rule 5)."""
        if self._awaits_all and unit.index not in self._first:
            self._awaits_all = False
            self._all_done.wait()

    def end_pass(self) -> None:
        """A pass has issued its last all-gather. Wait for readers of the main weights: the user may write now."""
        flat_params = [flat_param for unit in self._units for flat_param in unit.flat_params]
        if any(flat_param.main is flat_param.gather_input for flat_param in flat_params):  # all-gathers read these
            self._drain_gathers()
            self._await_readers()
        self._are_current = not self.is_synced

    def cast(self) -> None:
        """Cast main weights to all-gather inputs (rules 5 and 6). Compute stream; collective."""
        self._ranks.streams.observe(StepEvent.CAST_BEGINS, None)
        self.check_structure()
        self._drain_gathers()
        self._await_readers()
        self._refresh([unit for unit in self._units if unit.index in self._first])
        self._first_done.record()
        self._first_done.wait()  # rule 5: no all-gather reads an input that is still being cast
        self._refresh([unit for unit in self._units if unit.index not in self._first])
        self._all_done.record()
        self._awaits_all = True
        if not self.is_synced:
            self._versions = [unit.versions() for unit in self._units]
        with self._ranks.guard("the start of a forward"):
            self._ranks.transport.publish_shards()
        self._ranks.streams.observe(StepEvent.CAST_ENDS, None)

    def _refresh(self, units: Sequence[StreamedUnit]) -> None:
        is_alone = self._ranks.world_size == 1
        with torch.no_grad():
            for unit in units:
                unit.refresh()
                unit.weight_slot.content = unit.index if is_alone or not unit.views else None

    def _drain_gathers(self) -> None:
        for unit in self._units:
            with self._ranks.guard("the gather of", unit.name):
                unit.weight_slot.arrived.complete()

    def _await_readers(self) -> None:
        with self._ranks.guard("waiting for all ranks between two forwards"):
            self._gathers_done.record(self._ranks.transport.retract_shards())
            self._gathers_done.wait()  # rule 6: no cast writes an input that an all-gather still reads
