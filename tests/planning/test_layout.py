"""Where parameters lie: nothing overlaps, nothing is lost, every start is aligned."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamshard.planning.layout import ALIGNMENT, FlatParamLayout, LocalRange, ParamLayout, plan_flat_param
from tests.models import TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, assert_trains_like_plain, engine_inside, lm_step

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
sizes = st.lists(shapes, max_size=8).map(lambda all: [ParamLayout(f"p{k}", shape) for k, shape in enumerate(all)])
world_sizes = st.integers(1, 9)
alignments: st.SearchStrategy[Any] = st.sampled_from([1, 2, 3, 7, 16, 100])


def _plan(params: list[ParamLayout], world_size: int, pieces: int = 1) -> FlatParamLayout:
    return plan_flat_param(params, world_size, align_pieces_to=pieces)


@given(sizes, world_sizes, alignments)
def test_parameters_lie_in_order_aligned_and_are_cut_between_blocks(
    params: list[ParamLayout], world_size: int, pieces: int
) -> None:
    """Nothing overlaps. Parameters and shards start aligned. Pieces begin and end with blocks, or the parameter."""
    layout = _plan(params, world_size, pieces)
    end = 0
    for size, param in zip(params, layout.params, strict=True):
        assert (param.name, param.shape, param.numel) == (size.name, size.shape, math.prod(size.shape))
        assert param.offset >= end
        end = param.offset + param.numel
        for rank in range(world_size):
            local = layout.local_range(param, rank)
            assert local.start % pieces == 0
            assert local.stop % pieces == 0 or local.stop == param.numel
            shape = layout.local_shape(param, rank)
            assert math.prod(shape) == local.numel
            assert len(shape) == len(param.shape) or not param.shape
            assert shape == param.shape if world_size == 1 else set(shape[:-1]) <= {1}
    assert end <= layout.padded_numel
    assert layout.numel == sum(size.numel for size in params)
    assert layout.shard_numel * world_size == layout.padded_numel
    for start in [param.offset for param in layout.params] + [rank * layout.shard_numel for rank in range(world_size)]:
        assert start % ALIGNMENT == 0
    if pieces == 1:
        assert layout.padded_numel - end < world_size * ALIGNMENT  # no more than needed
    assert _plan(params, world_size, pieces) == layout


@given(sizes, world_sizes, alignments)
def test_the_ranks_ranges_tile_every_parameter(params: list[ParamLayout], world_size: int, pieces: int) -> None:
    """In rank order, each element once, at the place in the shard that the flat buffer gives it."""
    layout = _plan(params, world_size, pieces=pieces)
    for param in layout.params:
        owned = []
        for rank in range(world_size):
            local = layout.local_range(param, rank)
            owned += range(local.start, local.stop)
            assert 0 <= local.shard_offset <= local.shard_offset + local.numel <= layout.shard_numel
            if local.numel:
                assert rank * layout.shard_numel + local.shard_offset == param.offset + local.start
            else:
                assert local == LocalRange(0, 0, 0)
        assert owned == list(range(param.numel))


@on_ranks(3)
def test_a_transformer_with_aligned_pieces_trains_like_plain_pytorch(context: RankContext) -> None:
    """Gradients are collected, and lie where their weights do."""
    model: Any = assert_trains_like_plain(context, TinyLM, lm_step, optimizer=adamw, align_pieces_to=24)
    report = model.memory_report()
    layouts = [flat_param.layout for unit in engine_inside(model).units for flat_param in unit.flat_params]
    assert report.padding == sum(layout.padded_numel - layout.numel for layout in layouts) / report.numel > 0
