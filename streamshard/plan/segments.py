"""The flat parameters of a unit, called segments: which of its parameters move together. Pure data.

[Note: flat parameters]
A unit's parameters lie in *segments*. All parameters of a flat parameter have one compute dtype and one storage dtype,
and all of them train or none does. Most units have one flat parameter. Each flat parameter is one flat buffer, one
all-gather and, if it trains, one reduction. A unit's all-gather is its flat parameters' all-gathers in order, behind
one fence. In a weight slot a unit's flat parameters lie one after another; in a grad slot only those that train.

Trainable parameters are kept in fp32. Frozen parameters have no gradients to add up, so they keep their own dtype,
unless layers compute in fp32. Where the storage dtype is the compute dtype, the main weights are the all-gather input.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from streamshard.config import Precision, ReductionMode
from streamshard.plan.layout import ParamLayout, ParamSize, SegmentLayout, plan_segment

__all__ = ["PlannedSegment", "SegmentKind", "UnitLayout", "kind_of", "plan_units"]


class SegmentKind(NamedTuple):
    """What the parameters of a flat parameter have in common.

    Attributes:
        trains: they need gradients when the model is sharded.
        compute_dtype: what layers compute with.
        main_dtype: what they are kept in.
        grad_dtype: what grad slots hold of them.
        mode: how their gradients are reduced.
    """

    trains: bool
    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    mode: ReductionMode


def kind_of(dtype: torch.dtype, precision: Precision, *, trains: bool, in_fp32: bool) -> SegmentKind:
    """The kind of a parameter's flat parameter.

    Args:
        dtype: the parameter's own.
        precision: of the model.
        trains: it needs a gradient.
        in_fp32: it is computed with in fp32 whatever the model is.
    """
    fp32 = torch.float32
    if in_fp32 or precision.param_dtype is fp32:
        return SegmentKind(trains, fp32, fp32, fp32, ReductionMode.FP32)
    main = fp32 if trains else dtype
    return SegmentKind(trains, precision.param_dtype, main, precision.slot_grad_dtype, precision.reduction_mode)


class PlannedSegment(NamedTuple):
    """One flat parameter, and where it lies.

    Attributes:
        tag: its number among all of the model's: the same on all ranks, of its messages.
        unit: index of its unit.
        kind: see there.
        layout: of its parameters.
        weight_start: where it begins in its unit's weight slot, in bytes.
        grad_start: where it begins in its unit's grad slot, in bytes, if it trains.
    """

    tag: int
    unit: int
    kind: SegmentKind
    layout: SegmentLayout
    weight_start: int
    grad_start: int

    @property
    def weight_bytes(self) -> int:
        """Of the whole flat parameter in a weight slot."""
        return self.layout.padded_numel * self.kind.compute_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Of the whole flat parameter in a grad slot; none if it is frozen."""
        if not self.kind.trains:
            return 0
        return self.layout.padded_numel * self.kind.grad_dtype.itemsize


class UnitLayout:
    """The flat parameters of one unit, those that train first. Made by `plan_units`.

    Args:
        name: fully qualified name of the unit's module; "" is the root's root unit.
        segments: at least one, which is empty if the unit has no parameters.
    """

    def __init__(self, name: str, segments: Sequence[PlannedSegment]) -> None:
        self.name = name
        self.segments = tuple(segments)

    @cached_property
    def params(self) -> tuple[ParamLayout, ...]:
        """Of all flat parameters, one after the other."""
        return tuple(param for segment in self.segments for param in segment.layout.params)

    @property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(segment.layout.numel for segment in self.segments)

    @property
    def padded_numel(self) -> int:
        """Elements of all flat parameters."""
        return sum(segment.layout.padded_numel for segment in self.segments)

    @property
    def weight_bytes(self) -> int:
        """Of the unit in a weight slot."""
        return sum(segment.weight_bytes for segment in self.segments)

    @property
    def grad_bytes(self) -> int:
        """Of the unit in a grad slot."""
        return sum(segment.grad_bytes for segment in self.segments)


def plan_units(
    names: Sequence[str],
    units: Sequence[Sequence[tuple[SegmentKind, Sequence[ParamSize]]]],
    world_size: int,
    *,
    pad_numel: int,
    align_pieces_to: int,
) -> list[UnitLayout]:
    """Lay out all units.

    Args:
        names: of the units.
        units: by unit, its segments: their kinds, and what lies in them.
        world_size: number of ranks N.
        pad_numel, align_pieces_to: see `plan_segment`.
    """
    layouts: list[UnitLayout] = []
    tag = 0
    for index, (name, parts) in enumerate(zip(names, units, strict=True)):
        segments: list[PlannedSegment] = []
        weight_start = grad_start = 0
        for kind, sizes in parts:
            element_bytes = kind.compute_dtype.itemsize
            layout = plan_segment(
                sizes, world_size, element_bytes=element_bytes, pad_numel=pad_numel, align_pieces_to=align_pieces_to
            )
            segment = PlannedSegment(tag, index, kind, layout, weight_start, grad_start)
            segments.append(segment)
            tag += 1
            weight_start += segment.weight_bytes
            grad_start += segment.grad_bytes
        layouts.append(UnitLayout(name, segments))
    return layouts
