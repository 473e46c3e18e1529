"""Which elements of a full tensor one rank has."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from streamshard.comm.ranks import Ranks
from streamshard.unit.pieces import Piece

__all__ = ["Sharding"]


class Sharding(NamedTuple):
    """What a `ShardedTensor` is a piece of.

    Attributes:
        piece: of the parameter. A gradient, and the result of an elementwise operation, are cut at the same places.
        is_weight: a parameter, or computed from one; else a gradient.
        is_flat: the full tensor is flattened.
    """

    piece: Piece
    is_weight: bool
    is_flat: bool = False

    @staticmethod
    def of_piece(piece: Piece, *, is_weight: bool) -> Sharding:
        """A parameter's, or its gradient's."""
        return Sharding(piece, is_weight)

    @property
    def ranks(self) -> Ranks:
        """Each rank has other elements. Norms and sums are collectives of these ranks."""
        return self.piece.ranks

    @property
    def whole(self) -> torch.Tensor:
        """[full shape] fp32, meta: answers questions about the shape."""
        return _meta((self.piece.place.numel,) if self.is_flat else self.piece.shape)

    @property
    def what(self) -> str:
        """The tensor's name in errors."""
        return f"{'parameter' if self.is_weight else 'the gradient of parameter'} {self.piece.name!r}"

    def __str__(self) -> str:
        piece, ranks = self.piece, self.ranks
        flat = " flattened" if self.is_flat else ""
        return f"piece {piece.start}:{piece.stop} of {piece.shape}{flat}, rank {ranks.rank} of {ranks.world_size}"

    def is_like(self, other: Sharding) -> bool:
        """Whether each rank has the same elements of both. All ranks get the same answer."""
        return self.whole.shape == other.whole.shape and _cut(self.piece) == _cut(other.piece)

    def takes(self, local: torch.Tensor) -> bool:
        """Whether a plain `local` of the shape of this rank's piece can only be a piece.

        Optimizers keep such tensors. torch would broadcast one that is as long as a row with the full tensor as well.
        """
        shape, (start, stop) = self.piece.shape, (self.piece.start, self.piece.stop)
        if self.is_flat:
            return tuple(local.shape) == (stop - start,)
        is_row = len(shape) > 1 and stop - start == shape[-1] and start % shape[-1] != 0
        return tuple(local.shape) == self.piece.local_shape and not is_row


def _cut(piece: Piece) -> tuple[int, ...]:
    """Equal for parameters of one shape that are cut between ranks at the same places."""
    shard_numel, place = max(piece.segment.shard_numel, 1), piece.place
    first, last = place.offset // shard_numel, (place.offset + place.numel - 1) // shard_numel
    return (piece.ranks.world_size, first) if first == last else (piece.ranks.world_size, shard_numel, place.offset)


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(shape, device="meta")
