"""Where every parameter lies: in which flat parameter of its unit, at which offset, and on which rank. Pure data.

The engine, the memory report, checkpoints and the exporter read the same layout object, so they agree on the bytes of
each rank. See [Note: flat parameters] and [Note: layout].

[Note: flat parameters]
A unit's parameters lie in *flat parameters*, `flat_params` in the code. The parameters in one have the same compute
dtype and storage dtype, and all of them train or none does. Most units have one flat parameter, for example all bf16
weights of a layer. Each flat parameter takes one all-gather and, if it trains, one reduction. A unit's all-gather is
that of its flat parameters in order, followed by one fence. In a weight slot a unit's flat parameters lie one after
another, those that train first; gradients have the same places.

Trainable parameters are kept in fp32. Frozen parameters have no updates to add up, so they keep their own dtype, unless
layers compute in fp32. If storage dtype and compute dtype are equal, the main weights are the all-gather input.

[Note: layout]
In a flat parameter, parameters lie one after another. Each start is aligned, and the buffer is padded to a multiple of
the world size N. Rank r owns elements [r * shard_numel, (r + 1) * shard_numel), wherever parameters begin. So a rank
owns at most one contiguous range of each parameter, possibly empty (the range map of Megatron-LM's
distributed optimizer, megatron/core/optimizer/distrib_optimizer.py).

Starts and shards are multiples of 16 elements. GPU kernels load 16 bytes at once. CPU kernels compute the elements that
fill no vector apart, and torch's fused Adam rounds them in another way: with aligned cuts these are the last elements
of a parameter, on any number of ranks.

With `align_pieces_to`, each parameter is cut only between blocks of that many elements (*grains*). Shards are whole
grains, and a parameter that does not fit into the rest of a grain starts with the next one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from streamshard.config import Precision, ReductionMode
from streamshard.forms import form_of

if TYPE_CHECKING:
    from streamshard.planning.discovery import FoundParam, FoundUnit

ALIGNMENT = 16  # elements: see [Note: layout]


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

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether each rank owns all elements: there is one rank."""
        return self.world_size == 1

    @property
    def reaches_all_ranks(self) -> bool:
        """Whether each rank owns elements of parameters, not only padding."""
        # Padding is at the end, and gaps are shorter than a shard: if the last rank has elements, all ranks have.
        return any(self.local_range(param, self.world_size - 1).numel for param in self.params)

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
            return LocalRange(0, 0, 0)  # an offset inside the shard, where views of no elements begin
        return LocalRange(start, stop, param.offset + start - shard_start)

    def local_shape(self, param: ParamLayout, rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s piece: the parameter's own with one rank, else ``[1, .., 1, n]``.

        Both have as many dimensions as the parameter, by which training scripts choose weight decay.
        """
        if self.is_whole:
            return param.shape
        return (*[1] * (len(param.shape) - 1), self.local_range(param, rank).numel)


def plan_flat_param(sizes: Sequence[ParamLayout], world_size: int, *, align_pieces_to: int) -> FlatParamLayout:
    """Lay out one flat parameter. See [Note: layout].

    Args:
        sizes: the parameters in registration order, tied ones once.
        world_size: number of ranks N.
        align_pieces_to: parameters are cut only at multiples of this many of their elements.

    Returns:
        The layout; ``padded_numel`` is a multiple of N times the alignment, so every rank's shard starts aligned.
    """
    grain = ALIGNMENT if world_size == 1 else math.lcm(ALIGNMENT, align_pieces_to)  # one rank cuts nothing
    params, end = [], 0
    for size in sizes:
        start = _round_up(end, ALIGNMENT)
        if start % grain + size.numel > grain:
            start = _round_up(start, grain)
        params.append(ParamLayout(size.name, size.shape, start))
        end = start + size.numel
    return FlatParamLayout(tuple(params), world_size, _round_up(end, world_size * grain))


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


# -- flat parameters of a unit ------------------------------------------------------------------------------------


class FlatParamKind(NamedTuple):
    """The properties that all parameters of a flat parameter share.

    Attributes:
        trains: the parameters required gradients when the model was sharded.
        compute_dtype: dtype of the unsharded parameters.
        wire_dtype: dtype of all-gathers.
        main_dtype: dtype of the main weights: fp32 if `trains`.
        grad_dtype: dtype of gradients in their slot: `compute_dtype`, or that of ``grad_slots="all"``.
        mode: how gradients are reduced.
        is_packed: the bytes are moved as they are, see `streamshard.forms`.
        is_expert: see `FoundParam`.
    """

    trains: bool
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    main_dtype: torch.dtype
    grad_dtype: torch.dtype
    mode: ReductionMode
    is_packed: bool = False
    is_expert: bool = False


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
        # What is kept in fp32 is sent in fp32 too: users have a reason, such as an overflow.
        return FlatParamKind(trains, fp32, fp32 if in_fp32 else wire, fp32, fp32, precision.fp32_reduction_mode)
    main = fp32 if trains else dtype
    return FlatParamKind(trains, compute, wire, main, precision.sent_grad_dtype, precision.reduction_mode)


class FlatParamPlan(NamedTuple):
    """One flat parameter, and where it lies.

    Attributes:
        tag: its number in the model, the same on all ranks; the tag of its messages.
        kind: see `FlatParamKind`.
        found: its parameters, as they were before sharding.
        numel: elements of its parameters, unpacked: a packed byte may hold two.
        layout: where they lie.
        weights: bytes of the unit's weight slot: ``padded_numel`` elements of the compute dtype.
        wire: bytes of the wire buffer beside the slot; empty if it is all-gathered in the compute dtype.
        grads: bytes of the slot of the unit's gradients; empty if it is frozen.
    """

    tag: int
    kind: FlatParamKind
    found: Sequence[FoundParam]
    numel: int
    layout: FlatParamLayout
    weights: range
    wire: range
    grads: range


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
        """Parameters of all flat parameters, packed or not."""
        return sum(flat_param.numel for flat_param in self.flat_params)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the unit in a weight slot."""
        return self.flat_params[-1].weights.stop


def plan_units(
    units: Sequence[FoundUnit],
    precision: Precision,
    in_fp32: Collection[nn.Parameter],
    world_size: int,
    expert_ranks: int = 0,
    *,
    align_pieces_to: int,
    adds_in_slots: bool = False,
) -> list[UnitLayout]:
    """Lay out all units.

    Args:
        units: root unit first.
        precision: the model's.
        in_fp32: layers compute with these parameters in fp32.
        world_size: number of ranks N.
        expert_ranks: number of ranks with the same experts; 0: there are no DTensors of experts.
        align_pieces_to: see `plan_flat_param`.
        adds_in_slots: gradients of several backwards are added up in grad slots, in the dtype of `precision`. Else the
            slots have the gradients' own dtype.
    """
    layouts: list[UnitLayout] = []
    tags = itertools.count()
    for unit in units:
        flat_params: list[FlatParamPlan] = []
        weights = wire = grads = range(0)
        for kind, params in _by_kind(unit.params, precision, in_fp32):
            n_ranks = expert_ranks if kind.is_expert else world_size
            if n_ranks == 1:  # nothing is sent, so nothing is rounded to a message's dtype
                kind = kind._replace(wire_dtype=kind.compute_dtype, grad_dtype=torch.float32, mode=ReductionMode.FP32)
            if kind.trains and not adds_in_slots:
                kind = kind._replace(grad_dtype=kind.compute_dtype)  # gradients take the place of weights
            memory = [form_of(found.param).memory(found.param) for found in params]
            sizes = [ParamLayout(p.names[0], tuple(m.shape)) for p, m in zip(params, memory, strict=True)]
            layout = plan_flat_param(sizes, n_ranks, align_pieces_to=align_pieces_to)
            numel, is_wire = layout.padded_numel, kind.wire_dtype is not kind.compute_dtype
            weights = range(weights.stop, weights.stop + numel * kind.compute_dtype.itemsize)
            wire = range(wire.stop, wire.stop + is_wire * numel * kind.wire_dtype.itemsize)
            grads = range(grads.stop, grads.stop + kind.trains * numel * kind.grad_dtype.itemsize)
            count = sum(form_of(each.param).numel(each.param) for each in params)
            flat_params.append(FlatParamPlan(next(tags), kind, params, count, layout, weights, wire, grads))
        layouts.append(UnitLayout(unit.name, tuple(flat_params)))
    return layouts


def _by_kind(
    params: Sequence[FoundParam], precision: Precision, in_fp32: Collection[nn.Parameter]
) -> list[tuple[FlatParamKind, list[FoundParam]]]:
    """The flat parameters of a unit, those that train first. See [Note: flat parameters]."""
    parts: dict[FlatParamKind, list[FoundParam]] = {}
    for found in params:
        param = found.param
        if form_of(param).is_packed:
            dtype = form_of(param).memory(param).dtype
            kind = FlatParamKind(False, dtype, dtype, dtype, torch.float32, ReductionMode.FP32, is_packed=True)
        else:
            kind = kind_of(param.dtype, precision, trains=param.requires_grad, in_fp32=param in in_fp32)
        kind = kind._replace(is_expert=found.is_expert)
        parts.setdefault(kind, []).append(found)
    if not parts:
        # The last flat parameter says where the unit ends.
        parts[kind_of(torch.float32, precision, trains=False, in_fp32=False)] = []
    # So gradients have the offsets of their weights, whose place they take.
    return sorted(parts.items(), key=lambda part: not part[0].trains)
