"""What one rank has of a tensor whose elements lie on several: the whole's form, and which of its elements.

Nothing here communicates or computes with values. A tensor on the meta device stands for the whole, and torch itself
says what a view, a row or a slice of it is; what a rank has of that are those of its elements that lie there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from streamshard.comm.ranks import Ranks
from streamshard.unit.pieces import Piece

__all__ = ["Run", "Sharding"]

Run = tuple[int, int]


class Sharding(NamedTuple):
    """What a piece is of the whole.

    Attributes:
        ranks: each has other elements; norms and sums are collectives of it.
        whole: on the meta device, its shape. Its strides are those of a view where dimensions were exchanged, and
            count the elements of what that is a view of. None where only all ranks together know how many there are.
        runs: of the flattened whole, or of what it is a view of, the elements ``[start, stop)`` that this rank has.
        is_weight: a parameter, or computed from one; else a gradient.
        name: of the parameter; empty where pieces of several were put one behind the other.
    """

    ranks: Ranks
    whole: torch.Tensor | None
    runs: tuple[Run, ...]
    is_weight: bool
    name: str = ""

    @staticmethod
    def of_piece(piece: Piece, *, is_weight: bool) -> Sharding:
        """A parameter's, or its gradient's."""
        runs = ((piece.start, piece.stop),) if piece.start < piece.stop else ()
        return Sharding(piece.ranks, _whole(piece.shape), runs, is_weight, piece.name)

    @property
    def is_in_order(self) -> bool:
        """Its elements are where `runs` says: no dimensions were exchanged, nothing was selected by a mask."""
        return self.whole is not None and self.whole.is_contiguous()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """This rank's, if it is in order: as many dimensions as the whole, but one at least."""
        assert self.whole is not None
        shape, numel = self.whole.shape, sum(stop - start for start, stop in self.runs)
        return (*[1] * (len(shape) - 1), numel)

    def is_like(self, other: Sharding) -> bool:
        """Whether a rank has the same elements of both, in the same order."""
        if self.whole is None or other.whole is None:  # what one mask has selected, or was computed from it
            return self is other
        same = self.runs == other.runs and self.whole.shape == other.whole.shape
        return same and self.whole.stride() == other.whole.stride()

    # -- others, derived from it --

    def viewed(self, whole: torch.Tensor) -> Sharding:
        """Of all its elements, in the form of `whole`, a view of its own."""
        return self._replace(whole=_whole(whole.shape) if whole.is_contiguous() else whole)

    def selected(self) -> Sharding:
        """Of elements chosen by their values."""
        return self._replace(whole=None, runs=())

    def part(self, part: torch.Tensor) -> tuple[int, int, Sharding] | None:
        """Of `part`, a view of `whole`.

        Returns:
            Which of this rank's elements belong to it, ``[start, stop)``, and what they are. None if the part's
            elements do not lie one behind the other in the whole.
        """
        if not self.is_in_order or not part.is_contiguous():
            return None
        first = int(part.storage_offset())
        end = first + part.numel()
        before = sum(max(min(stop, first) - start, 0) for start, stop in self.runs)
        inside = [(max(start, first), min(stop, end)) for start, stop in self.runs]
        runs = tuple((start - first, stop - first) for start, stop in inside if start < stop)
        stop = before + sum(stop - start for start, stop in runs)
        return before, stop, self._replace(whole=_whole(part.shape), runs=runs)

    @staticmethod
    def joined(parts: Sequence[Sharding]) -> Sharding:
        """Of flat ones, put one behind the other."""
        sizes = [part.whole.numel() for part in parts if part.whole is not None]
        ends = list(itertools.accumulate(sizes))
        runs = tuple(
            (end - size + start, end - size + stop)
            for part, end, size in zip(parts, ends, sizes, strict=True)
            for start, stop in part.runs
            if start < stop
        )
        return parts[0]._replace(whole=_whole((ends[-1],)), runs=runs, name="")

    # -- what other tensors have for it --

    def takes(self, shape: Iterable[int]) -> bool:
        """Whether a tensor of `shape` has an element for each of the whole's, as torch broadcasts it."""
        if not self.is_in_order:
            return False
        assert self.whole is not None
        own, given = tuple(self.whole.shape), tuple(shape)
        pairs = zip(reversed(own), reversed(given), strict=False)
        return len(given) <= len(own) and all(theirs in (1, mine) for mine, theirs in pairs)

    def is_ambiguous(self, shape: Sequence[int]) -> bool:
        """Of `shape`, this rank's: whether torch would broadcast it with the whole as well, to another result."""
        if self.whole is None or not all(shape):
            return False
        if self.takes(shape):  # a row: the same, where this rank has one
            return any(start % shape[-1] for start, _ in self.runs)
        pairs = zip(reversed(self.whole.shape), reversed(shape), strict=False)
        return all(mine == theirs or 1 in (mine, theirs) for mine, theirs in pairs)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """[local_shape]: of `value`, which every rank has, of a shape that it `takes`, this rank's."""
        assert self.whole is not None
        flat = value.expand(self.whole.shape).reshape(-1)
        return torch.cat([flat[start:stop] for start, stop in self.runs] or [flat[:0]]).view(self.local_shape)


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(shape, device="meta")
