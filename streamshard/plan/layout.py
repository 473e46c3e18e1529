"""Where every parameter lies: a pure function from parameter sizes to offsets and per-rank ranges.

No torch here. The engine, the memory report, checkpoints and the exporter all read the same layout object,
so they cannot disagree about which bytes a rank owns. See [Note: flat segments].

[Note: flat segments]
A segment's parameters are laid out one after another in one flat buffer, each start aligned, the whole padded to a
multiple of the world size N. Rank r owns elements [r * shard_numel, (r + 1) * shard_numel). The partition does
not respect parameter boundaries: a rank owns at most one contiguous range of each parameter, possibly empty
(the range map of Megatron-LM's distributed optimizer, megatron/core/optimizer/distrib_optimizer.py).

Where pieces are to be whole blocks, or whole rows, of their parameter, each parameter has a grain: it is cut at
multiples of so many elements only. All shards are of one size, so that cuts are where they are; what moves are the
parameters. One that holds a cut starts later, by less than a grain, so that the cut falls between two grains; one
larger than a shard holds several, so its grain divides the shard as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamshard.config import PieceAlignment

__all__ = ["LocalRange", "ParamLayout", "ParamSize", "SegmentLayout", "plan_segment"]

ALIGNMENT_BYTES = 16  # vectorised loads of GPU kernels want 16-byte aligned starts


class ParamSize(NamedTuple):
    """What the planner has to know of one parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParamLayout:
    """One parameter inside its segment's flat buffer.

    Attributes:
        name: fully qualified name in the root model; for tied parameters the first registered one.
        shape: the unsharded shape.
        offset: first element in the segment's flat buffer.
        numel: number of elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


class LocalRange(NamedTuple):
    """The part of one parameter that one rank owns; empty when ``start == stop``.

    ``start`` and ``stop`` count elements of the flattened parameter, ``shard_offset`` elements of the rank's shard.
    """

    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SegmentLayout:
    """The flat layout of one segment over ``world_size`` ranks. Build it with `plan_segment`.

    Attributes:
        params: parameters in registration order.
        world_size: number of ranks N of the shard group.
        padded_numel: elements of the flat buffer, a multiple of N.
        has_rows: pieces are whole rows, and have their shape.
    """

    params: tuple[ParamLayout, ...]
    world_size: int
    padded_numel: int
    has_rows: bool = False
    _shard_numel: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shard_numel", self.padded_numel // self.world_size)

    @property
    def shard_numel(self) -> int:
        """Elements each rank owns: ``padded_numel / N``."""
        return self._shard_numel

    @property
    def numel(self) -> int:
        """Elements that belong to parameters: ``padded_numel`` less alignment gaps and padding."""
        return sum(param.numel for param in self.params)

    def local_range(self, param: ParamLayout, rank: int) -> LocalRange:
        """The contiguous part of `param` that `rank` owns."""
        shard_start = rank * self.shard_numel
        start = min(max(shard_start - param.offset, 0), param.numel)
        stop = min(max(shard_start + self.shard_numel - param.offset, 0), param.numel)
        if start >= stop:
            return LocalRange(0, 0, 0)
        return LocalRange(start, stop, param.offset + start - shard_start)

    def local_shape(self, param: ParamLayout, rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s piece, of as many dimensions as the parameter: people choose weight decay by that.

        The parameter's own with one rank, ``[rows, ..]`` where pieces are whole rows, else ``[1, .., 1, n]``.
        """
        if self.world_size == 1:
            return param.shape
        numel = self.local_range(param, rank).numel
        if self.has_rows and len(param.shape) > 1 and param.numel:
            return (numel // _row_numel(param.shape), *param.shape[1:])
        return (*[1] * (len(param.shape) - 1), numel)


def plan_segment(
    sizes: Sequence[ParamSize],
    world_size: int,
    *,
    element_bytes: int = 2,
    pad_numel: int = 1,
    align_pieces_to: PieceAlignment = 1,
) -> SegmentLayout:
    """Lay out one segment. See [Note: flat segments].

    Args:
        sizes: its parameters in registration order, tied ones once.
        world_size: number of ranks N.
        element_bytes: bytes of the narrowest element that will use the layout; it sets the alignment of starts.
        pad_numel: the padded size is a multiple of this as well (``lcm(N, 128, 2**16)`` for NCCL bus bandwidth).
        align_pieces_to: parameters are cut at multiples of so many of their elements, or between rows, only.

    Returns:
        The layout; ``padded_numel`` is a multiple of N times the alignment, so every rank's shard starts aligned.
    """
    align = max(ALIGNMENT_BYTES // element_bytes, 1)
    if world_size == 1:
        align_pieces_to = 1  # nothing is cut
    grains = [math.lcm(align, _row_numel(s.shape) if align_pieces_to == "row" else align_pieces_to) for s in sizes]
    total = _place(sizes, grains, align, None)[-1]
    least = -(-total // world_size)
    while True:
        shard_numel = _shard_numel(sizes, grains, least, math.lcm(world_size * align, pad_numel) // world_size)
        *offsets, end = _place(sizes, grains, align, shard_numel)
        missing = end - world_size * shard_numel
        if missing <= 0:
            break
        least = shard_numel + -(-missing // world_size)
    params = tuple(ParamLayout(s.name, s.shape, offset, s.numel) for s, offset in zip(sizes, offsets, strict=True))
    return SegmentLayout(params, world_size, world_size * shard_numel, align_pieces_to == "row")


def _row_numel(shape: tuple[int, ...]) -> int:
    """Elements of one step along the first dimension."""
    return max(math.prod(shape[1:]), 1)


def _shard_numel(sizes: Sequence[ParamSize], grains: Sequence[int], least: int, multiple: int) -> int:
    """The smallest size of a shard, `least` or more, that the grains of all parameters larger than it divide.

    Two grains may have few multiples in common. Then a shard that the largest parameters fit in is smaller.
    """

    def fitting(bound: int) -> int:
        cut_often = (grain for size, grain in zip(sizes, grains, strict=True) if size.numel > bound)
        common = math.lcm(multiple, *cut_often)
        return -(-bound // common) * common

    return min(fitting(bound) for bound in {least, *(size.numel for size in sizes if size.numel > least)})


def _place(sizes: Sequence[ParamSize], grains: Sequence[int], align: int, shard_numel: int | None) -> list[int]:
    """Where parameters start, one after another, and where the last one ends.

    With a size of shards the first cut in each is at a multiple of its grain; the others are, if it divides the shard.
    """
    offset = 0
    offsets = []
    for size, grain in zip(sizes, grains, strict=True):
        offset = -(-offset // align) * align
        if shard_numel:
            before_cut = -offset % shard_numel
            if before_cut < size.numel:
                offset += before_cut % grain
        offsets.append(offset)
        offset += size.numel
    return [*offsets, offset]
