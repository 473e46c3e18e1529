"""In-place changes that a model's own forward makes to its weights: they persist, as in torch, or raise by name.

Codebooks, clamped weights, embeddings with ``max_norm``, spectral normalisation by hand write to what they compute
with, which here is a slot. What a layer has left of its weights is noticed when it is released, by the version counter
that its compute views share, and kept until the end of the pass. Then all ranks compare: an element that one rank has
changed, or several have changed to the same value, has that value from then on; two values for one element raise.

Whether a model does such things is learnt from its first pass with gradients and its first without: there, contents are
compared as well (an edit through ``.data`` leaves the version as it is), and ranks agree on which units are changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from streamshard.comm.ranks import Ranks
from streamshard.errors import ShardingError
from streamshard.unit.shard import SegmentShard
from streamshard.unit.unit import StreamedUnit

__all__ = ["Edits"]


class Edits:
    """What forwards have written to weights. Owns a copy of each changed unit from its release to the end of the pass.

    Args:
        units: all units.
        ranks: of all ranks that train the model.

    Attributes:
        is_learning: the pass under way shows what is changed in passes like it.
    """

    def __init__(self, units: Sequence[StreamedUnit], ranks: Ranks) -> None:
        self.is_learning = True
        self._units = units
        self._ranks = ranks
        self._known: set[int] = set()  # units that forwards change
        self._learnt: set[bool] = set()  # from passes with gradients, without
        self._changed: dict[int, list[torch.Tensor]] = {}  # by unit, of its segments: this rank's weights

    def begin_pass(self) -> None:
        """A pass begins. Nothing of an earlier one that was given up is left."""
        self._changed.clear()
        self.is_learning = torch.is_grad_enabled() not in self._learnt

    def may_have_changed(self, unit: StreamedUnit) -> bool:
        """Whether `keep` has to look at it."""
        return unit.has_edits or self.is_learning or unit.index in self._known

    def restore(self, unit: StreamedUnit) -> None:
        """The unit's weights have arrived anew: what this pass has changed in them before is there again."""
        if (mine := self._changed.get(unit.index)) is not None:
            for segment, weights in zip(unit.segments, mine, strict=True):
                segment.weights.copy_(weights)

    def keep(self, unit: StreamedUnit) -> None:
        """The unit is about to be released, and was changed, or may have been.

        Raises:
            ShardingError: a weight was given other memory, or this is the first pass that changes the unit.
        """
        if (moved := unit.put_back_views()) is not None:
            raise ShardingError(
                f"parameter {moved!r} was given other memory inside a forward (param.data = ...), where it is a part "
                "of a buffer: copy into it (param.data.copy_(...)), or change it outside of forward"
            )
        is_known = unit.index in self._known
        if is_known or unit.has_edits or self.is_learning and unit.differs_from_shard():
            if not is_known and not self.is_learning:
                raise ShardingError(
                    f"weights of {unit.name!r} were changed in place inside a forward, for the first time after the "
                    "model's first forward: ranks have to agree on such changes, and ask for them only where the first "
                    "forward has made some. Change them outside of forward, or in the first forward too"
                )
            self._changed[unit.index] = [segment.weights.clone() for segment in unit.segments]
            unit.forget_edits()

    def end_pass(self, *, has_failed: bool) -> bool:
        """Write to the main weights what ranks have changed; whether there was anything. Collective.

        Args:
            has_failed: the forward has raised here, so it is none to learn from.

        Raises:
            ShardingError: on all ranks; names a parameter that ranks have changed differently.
        """
        if self.is_learning:
            self.is_learning = False
            # In most models there is nothing to tell.
            if self._ranks.any_rank(has_failed or bool(self._changed)):
                told = self._ranks.gather_objects((has_failed, sorted(self._changed)))
                self._known.update(*(changed for _, changed in told))
                has_failed = any(failed for failed, _ in told)
            if not has_failed:
                self._learnt.add(torch.is_grad_enabled())
        for index in sorted(self._known):
            if any(segment.is_in_slot for segment in self._units[index].segments):
                raise ShardingError(
                    f"weights of {self._units[index].name!r} are changed in place inside a forward. With "
                    "weight_slots='all' what a rank owns is a part of what it computes with, and others read it before "
                    "or after the change: choose a number of slots"
                )
            unit, mine = self._units[index], self._changed.pop(index, None)
            for position, segment in enumerate(unit.segments):
                self._merge(segment, unit.gather_compute(segment), None if mine is None else mine[position])
        return bool(self._known)

    def _merge(self, segment: SegmentShard, before: torch.Tensor, mine: torch.Tensor | None) -> None:
        # Of each changed element the largest value that a rank has given it, and minus the smallest.
        values = torch.full((2, before.numel()), -math.inf, device=before.device)
        if mine is not None:
            mask = mine != before
            values[0] = torch.where(mask, mine.float(), values[0])
            values[1] = torch.where(mask, -mine.float(), values[1])
        self._ranks.all_reduce(values, maximum=True, with_replicas=True)
        largest, smallest = values[0], -values[1]
        is_changed = largest > -math.inf
        conflict = is_changed & (largest != smallest)
        if bool(conflict.any()):
            raise ShardingError(
                f"ranks have changed {segment.name_at(int(conflict.nonzero()[0]))!r} in place, inside a forward, to "
                "different values, of which each rank of DistributedDataParallel would keep its own: make what the "
                "change depends on the same on all ranks (all-reduce it), or make it a buffer, of which rank 0's counts"
            )
        segment.write_main(largest, is_changed)
