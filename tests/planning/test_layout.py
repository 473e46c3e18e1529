"""Where parameters lie: nothing overlaps, nothing is lost, every start is aligned."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamshard.planning.layout import ALIGNMENT, LocalRange, ParamLayout, plan_flat_param

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
sizes = st.lists(shapes, max_size=8).map(lambda all: [ParamLayout(f"p{k}", shape) for k, shape in enumerate(all)])
world_sizes = st.integers(1, 9)
alignments: st.SearchStrategy[Any] = st.sampled_from([1, 2, 3, 7, 16, 100])


@given(sizes, world_sizes, alignments)
def test_parameters_lie_in_order_aligned_and_ranks_ranges_tile_them(
    params: list[ParamLayout], world_size: int, pieces: int
) -> None:
    """Parameters and shards start aligned. Ranges, in rank order, begin and end with blocks, or the parameter."""
    layout = plan_flat_param(params, world_size, align_pieces_to=pieces)
    end = 0
    for size, param in zip(params, layout.params, strict=True):
        assert (param.name, param.shape, param.numel) == (size.name, size.shape, math.prod(size.shape))
        assert param.offset >= end
        end, owned = param.offset + param.numel, []
        for rank in range(world_size):
            local = layout.local_range(param, rank)
            owned += range(local.start, local.stop)
            assert 0 <= local.shard_offset <= local.shard_offset + local.numel <= layout.shard_numel
            assert local == LocalRange(0, 0, 0) or (
                rank * layout.shard_numel + local.shard_offset == param.offset + local.start and local.numel
            )
            assert local.start % pieces == 0
            assert local.stop % pieces == 0 or local.stop == param.numel
            shape = layout.local_shape(param, rank)
            assert math.prod(shape) == local.numel
            assert len(shape) == len(param.shape) or not param.shape
            assert shape == param.shape if world_size == 1 else set(shape[:-1]) <= {1}
        assert owned == list(range(param.numel))
    assert end <= layout.padded_numel
    assert layout.numel == sum(size.numel for size in params)
    assert layout.shard_numel * world_size == layout.padded_numel
    for start in [param.offset for param in layout.params] + [rank * layout.shard_numel for rank in range(world_size)]:
        assert start % ALIGNMENT == 0
    if pieces == 1:
        assert layout.padded_numel - end < world_size * ALIGNMENT  # no more than needed
    assert plan_flat_param(params, world_size, align_pieces_to=pieces) == layout
