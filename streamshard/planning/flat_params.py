"""The flat parameters of a unit, `flat_params` in the code: which of the unit's parameters move together. Pure data.

[Note: flat parameters]
A unit's parameters lie in *flat parameters*. The parameters in one have the same compute dtype and storage dtype, and
all of them train or none does. Most units have one flat parameter, for example all bf16 weights of a layer. Each flat
parameter takes one all-gather and, if it trains, one reduction. A unit's all-gather is that of its flat parameters in
order, followed by one fence. In a weight slot a unit's flat parameters lie one after another; in a grad slot only those
that train.

Trainable parameters are kept in fp32. Frozen parameters have no updates to add up, so they keep their own dtype, unless
layers compute in fp32. If storage dtype and compute dtype are equal, the main weights are the all-gather input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from streamshard.config import Precision, ReductionMode
from streamshard.planning.layout import FlatParamLayout, ParamLayout, plan_flat_param

if TYPE_CHECKING:
    from streamshard.planning.discovery import FoundParam


class FlatParamKind(NamedTuple):
    """The properties that all parameters of a flat parameter share.

    Attributes:
        trains: the parameters required gradients when the model was sharded.
        compute_dtype: dtype of the unsharded parameters.
        wire_dtype: dtype of all-gathers.
        main_dtype: dtype of the main weights: fp32 if `trains`.
        grad_dtype: dtype of gradients in grad slots.
        mode: how gradients are reduced.
    """

    trains: bool
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    mode: ReductionMode

    def on_one_rank(self) -> FlatParamKind:
        """The kind where nothing is sent: no rounding to dtypes of messages."""
        return self._replace(wire_dtype=self.compute_dtype, grad_dtype=torch.float32, mode=ReductionMode.FP32)


def kind_of(dtype: torch.dtype, precision: Precision, *, trains: bool, in_fp32: bool) -> FlatParamKind:
    """The kind of the flat parameter that a parameter belongs to.

    Args:
        dtype: the parameter's own.
        precision: the model's.
        trains: the parameter requires a gradient.
        in_fp32: layers compute with it in fp32, whatever ``param_dtype`` is.
    """
    fp32 = torch.float32
    compute = precision.param_dtype or dtype
    wire = precision.wire_dtype or compute
    if in_fp32 or compute is fp32:
        return FlatParamKind(trains, fp32, fp32 if in_fp32 else wire, fp32, fp32, ReductionMode.FP32)
    main = fp32 if trains else dtype
    return FlatParamKind(trains, compute, wire, main, precision.slot_grad_dtype, precision.reduction_mode)


class ByteRange(NamedTuple):
    """A range of a buffer, in bytes."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """Behind the last byte."""
        return self.start + self.size


class FlatParamPlan(NamedTuple):
    """One flat parameter, and where it lies.

    Attributes:
        tag: its number in the model, the same on all ranks; the tag of its messages.
        kind: see `FlatParamKind`.
        layout: where its parameters lie.
        weights: in the unit's weight slot: ``padded_numel`` elements of the compute dtype.
        wire: in the wire buffer beside the slot; empty if it is all-gathered in the compute dtype.
        grads: in the unit's grad slot; empty if it is frozen.
    """

    tag: int
    kind: FlatParamKind
    layout: FlatParamLayout
    weights: ByteRange
    wire: ByteRange
    grads: ByteRange


class UnitLayout(NamedTuple):
    """The flat parameters of one unit. Trainable ones come first. Made by `plan_units`.

    Attributes:
        name: fully qualified name of the unit's module; "" for the root unit.
        flat_params: at least one flat parameter, which is empty if the unit has no parameters.
    """

    name: str
    flat_params: tuple[FlatParamPlan, ...]

    @property
    def params(self) -> tuple[ParamLayout, ...]:
        """The parameters of all flat parameters, in order."""
        return tuple(param for flat_param in self.flat_params for param in flat_param.layout.params)

    @property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(flat_param.layout.numel for flat_param in self.flat_params)

    @property
    def padded_numel(self) -> int:
        """Elements of all flat parameters, padding included."""
        return sum(flat_param.layout.padded_numel for flat_param in self.flat_params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the unit in a weight slot."""
        return self.flat_params[-1].weights.stop

    @property
    def wire_bytes(self) -> int:
        """Bytes of the unit in a wire buffer."""
        return self.flat_params[-1].wire.stop

    @property
    def grad_bytes(self) -> int:
        """Bytes of the unit in a grad slot."""
        return self.flat_params[-1].grads.stop


def plan_units(
    names: Sequence[str],
    units: Sequence[Sequence[tuple[FlatParamKind, Sequence[FoundParam]]]],
    world_size: int,
    *,
    align_pieces_to: int,
) -> list[UnitLayout]:
    """Lay out all units.

    Args:
        names: the units' names.
        units: by unit, its flat parameters: the kind and the parameters of each.
        world_size: number of ranks N.
        align_pieces_to: see `plan_flat_param`.
    """
    layouts: list[UnitLayout] = []
    tag = 0
    for name, parts in zip(names, units, strict=True):
        flat_params: list[FlatParamPlan] = []
        weights = wire = grads = ByteRange(0, 0)
        for kind, params in parts:
            if world_size == 1:
                kind = kind.on_one_rank()
            sizes = [ParamLayout(found.names[0], tuple(found.param.shape)) for found in params]
            element_bytes = min(kind.compute_dtype.itemsize, kind.wire_dtype.itemsize)
            layout = plan_flat_param(sizes, world_size, element_bytes=element_bytes, align_pieces_to=align_pieces_to)
            numel, is_wire = layout.padded_numel, kind.wire_dtype is not kind.compute_dtype
            weights = ByteRange(weights.stop, numel * kind.compute_dtype.itemsize)
            wire = ByteRange(wire.stop, is_wire * numel * kind.wire_dtype.itemsize)
            grads = ByteRange(grads.stop, kind.trains * numel * kind.grad_dtype.itemsize)
            flat_params.append(FlatParamPlan(tag, kind, layout, weights, wire, grads))
            tag += 1
        layouts.append(UnitLayout(name, tuple(flat_params)))
    return layouts
