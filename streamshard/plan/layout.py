"""Where every parameter lies: a pure function from parameter sizes to offsets and per-rank ranges.

No torch here. The engine, the memory report, checkpoints and the exporter all read the same layout object,
so they cannot disagree about which bytes a rank owns. See [Note: flat units].

[Note: flat units]
A unit's parameters are laid out one after another in one flat buffer, each start aligned, the whole padded to a
multiple of the world size N. Rank r owns elements [r * shard_numel, (r + 1) * shard_numel). The partition does
not respect parameter boundaries: a rank owns at most one contiguous range of each parameter, possibly empty
(the range map of Megatron-LM's distributed optimizer, megatron/core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["LocalRange", "ParamLayout", "ParamSize", "UnitLayout", "plan_unit"]

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
    """One parameter inside its unit's flat buffer.

    Attributes:
        name: fully qualified name in the root model; for tied parameters the first registered one.
        shape: the unsharded shape.
        offset: first element in the unit's flat buffer.
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
class UnitLayout:
    """The flat layout of one unit over ``world_size`` ranks. Build it with `plan_unit`.

    Attributes:
        name: fully qualified name of the unit's module; "" is the root's edge unit.
        params: parameters in registration order.
        world_size: number of ranks N of the shard group.
        padded_numel: elements of the flat buffer, a multiple of N.
    """

    name: str
    params: tuple[ParamLayout, ...]
    world_size: int
    padded_numel: int
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
        """The shape of `rank`'s piece: the parameter's own with one rank, else ``[1, .., 1, n]`` of as many dimensions.

        People group parameters for weight decay by their number of dimensions, so that must not change.
        """
        if self.world_size == 1:
            return param.shape
        return (*[1] * (len(param.shape) - 1), self.local_range(param, rank).numel)


def plan_unit(
    name: str,
    sizes: Sequence[ParamSize],
    world_size: int,
    *,
    element_bytes: int = 2,
    pad_numel: int = 1,
) -> UnitLayout:
    """Lay out one unit.

    Args:
        name: fully qualified name of the unit's module.
        sizes: its parameters in registration order, tied ones once.
        world_size: number of ranks N.
        element_bytes: bytes of the narrowest element that will use the layout; it sets the alignment of starts.
        pad_numel: the padded size is a multiple of this as well (``lcm(N, 128, 2**16)`` for NCCL bus bandwidth).

    Returns:
        The layout; ``padded_numel`` is a multiple of N times the alignment, so every rank's shard starts aligned.
    """
    align = max(ALIGNMENT_BYTES // element_bytes, 1)
    offset = 0
    params = []
    for size in sizes:
        offset = -(-offset // align) * align
        params.append(ParamLayout(size.name, size.shape, offset, size.numel))
        offset += size.numel
    multiple = math.lcm(world_size * align, pad_numel)
    padded = -(-offset // multiple) * multiple
    return UnitLayout(name, tuple(params), world_size, padded)
