"""Where every parameter lies: pure functions from parameter sizes to offsets and per-rank ranges. No torch here.

The engine, the memory report, checkpoints and the exporter read the same layout object, so they agree on the bytes of
each rank. See [Note: layout].

[Note: layout]
In a flat parameter, parameters lie one after another. Each start is aligned, and the buffer is padded to a multiple of
the world size N. Rank r owns elements [r * shard_numel, (r + 1) * shard_numel), wherever parameters begin. So a rank
owns at most one contiguous range of each parameter, possibly empty (the range map of Megatron-LM's
distributed optimizer, megatron/core/optimizer/distrib_optimizer.py).

With `align_pieces_to`, each parameter is cut only between blocks of that many elements (*grains*). Shards are whole
grains, and a parameter that does not fit into the rest of a grain starts with the next one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT_BYTES = 16  # vectorised loads of GPU kernels want 16-byte aligned starts


@dataclass(frozen=True)
class ParamLayout:
    """One parameter inside its flat parameter.

    Attributes:
        name: fully qualified name in the root model; for tied parameters the first registered one.
        shape: the unsharded shape.
        offset: first element in the flat parameter; `plan_flat_param` chooses it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


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
class FlatParamLayout:
    """The layout of one flat parameter over ``world_size`` ranks. Build it with `plan_flat_param`.

    Attributes:
        params: parameters in registration order.
        world_size: number of ranks N of the shard group.
        padded_numel: elements of the flat parameter with gaps and padding, a multiple of N.
    """

    params: tuple[ParamLayout, ...]
    world_size: int
    padded_numel: int

    @property
    def shard_numel(self) -> int:
        """Elements each rank owns: ``padded_numel / N``."""
        return self.padded_numel // self.world_size

    @property
    def is_whole(self) -> bool:
        """Whether each rank owns all elements: there is one rank."""
        return self.world_size == 1

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
        """The shape of `rank`'s piece: the parameter's own with one rank, else ``[1, .., 1, n]``.

        Both have as many dimensions as the parameter, by which training scripts choose weight decay.
        """
        if self.is_whole:
            return param.shape
        return (*[1] * (len(param.shape) - 1), self.local_range(param, rank).numel)


def plan_flat_param(
    sizes: Sequence[ParamLayout], world_size: int, *, element_bytes: int, align_pieces_to: int
) -> FlatParamLayout:
    """Lay out one flat parameter. See [Note: layout].

    Args:
        sizes: the parameters in registration order, tied ones once.
        world_size: number of ranks N.
        element_bytes: bytes of the narrowest element that will use the layout; it sets the alignment of starts.
        align_pieces_to: parameters are cut only at multiples of this many of their elements.

    Returns:
        The layout; ``padded_numel`` is a multiple of N times the alignment, so every rank's shard starts aligned.
    """
    align = max(ALIGNMENT_BYTES // element_bytes, 1)
    grain = align if world_size == 1 else math.lcm(align, align_pieces_to)  # one rank cuts nothing
    params, end = [], 0
    for size in sizes:
        start = _round_up(end, align)
        if start % grain + size.numel > grain:
            start = _round_up(start, grain)
        params.append(ParamLayout(size.name, size.shape, start))
        end = start + size.numel
    return FlatParamLayout(tuple(params), world_size, _round_up(end, world_size * grain))


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
