"""What one rank owns of one unit's weights: the main weights, and the compute shard that its gathers send.

The user's Parameter objects stay what they were, so an optimizer built before sharding keeps working; their data become
pieces of the main weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from streamshard.comm.ranks import Ranks
from streamshard.errors import ShardingError
from streamshard.plan.layout import LocalRange, ParamLayout, UnitLayout
from streamshard.plan.memory import Category
from streamshard.plan.structure import is_meta
from streamshard.unit.buffers import Ledger
from streamshard.unit.pieces import Piece, refuse_saving, remember_piece

__all__ = ["ParamShard", "UnitShard"]


class ParamShard(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        name: fully qualified name in the root model.
        aliases: further names of the same (tied) parameter.
        param: the user's Parameter; its data is the piece, fp32, of shape `UnitLayout.local_shape`.
        layout: where the whole parameter lies in its unit.
        local: which elements of the flattened parameter this rank owns.
        dtype: the parameter's dtype before sharding.
        piece: the memory of the piece in the main weights, as `param` first had it.
        has_rows: pieces are whole rows, on all ranks.
    """

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter
    layout: ParamLayout
    local: LocalRange
    dtype: torch.dtype
    piece: torch.Tensor
    has_rows: bool = False

    @property
    def main(self) -> torch.Tensor:
        """[local.numel] fp32: this rank's main weights, wherever the user has put them since."""
        return self.param.detach().view(-1)

    def what(self, ranks: Ranks) -> Piece:
        """What the parameter is a piece of; `ranks` is the shard group's."""
        start, stop = self.local.start, self.local.stop
        return Piece(self.name, self.layout.shape, start, stop, tuple(self.piece.shape), ranks, self.has_rows)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The range of `flat` [shard_numel] that is this parameter's, in the sharded parameter's shape."""
        return flat.narrow(0, self.local.shard_offset, self.local.numel).view(self.piece.shape)


class UnitShard:
    """One unit's state on this rank. Owns nothing: buffers are the ledger's.

    Args:
        layout: the unit's layout.
        ranks: names this rank and the shard group.
        ledger: allocates.
        param_dtype: dtype of the compute shard; with fp32 it is the main weights themselves.
        weights: [shard_numel] param_dtype, this rank's range of a weight slot that is the unit's alone: the compute
            shard is that range. None: it has memory of its own.

    Attributes:
        main: [shard_numel] fp32.
        compute: [shard_numel] param_dtype.
        params: filled by `add`.
        is_in_slot: the compute shard is a range of a weight slot.
    """

    def __init__(
        self,
        layout: UnitLayout,
        ranks: Ranks,
        ledger: Ledger,
        param_dtype: torch.dtype,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.params: list[ParamShard] = []
        self.is_in_slot = weights is not None
        numel, is_cast = layout.shard_numel, param_dtype is not torch.float32
        if weights is None:
            category = Category.COMPUTE_SHARDS if is_cast else Category.MAIN_WEIGHTS
            weights = ledger.allocate(category, numel, param_dtype, is_visible=True, is_users=not is_cast)
        self.compute = weights
        self.main = ledger.allocate(Category.MAIN_WEIGHTS, numel, torch.float32) if is_cast else weights
        self._ranks = ranks
        self._ledger = ledger
        if ranks.world_size > 1 and numel:
            refuse_saving(self.main)

    def add(
        self, layout: ParamLayout, aliases: tuple[str, ...], param: nn.Parameter, full: torch.Tensor | None
    ) -> ParamShard:
        """Take over one parameter: `param` becomes this rank's piece of `full`.

        Args:
            layout: the parameter's place in the unit.
            aliases: its further names.
            param: the user's Parameter; its data are replaced.
            full: [numel], the weights to shard, any dtype and device; None: it is empty, of NaN.
        """
        local = self.layout.local_range(layout, self._ranks.rank)
        piece = self.main.narrow(0, local.shard_offset, local.numel)
        piece = piece.view(self.layout.local_shape(layout, self._ranks.rank))
        if full is None:
            piece.fill_(math.nan)
        else:
            piece.view(-1).copy_(full[local.start : local.stop])
        has_rows = self.layout.has_rows and len(layout.shape) > 1
        shard = ParamShard(layout.name, aliases, param, layout, local, param.dtype, piece, has_rows)
        param.grad = None
        _put_under(param, piece)
        self.params.append(shard)
        remember_piece(param, shard.what(self._ranks))
        return shard

    def cast(self) -> None:
        """Main weights to compute shard, for all gathers of the pass that begins. Runs on the compute stream.

        The user may have put other memory under a parameter (``p.data = ema``): then that is what is cast, and the main
        weights' own memory, which may be somebody's backup, is left alone.
        """
        moved = [p for p in self.params if p.local.numel and p.param.data_ptr() != p.piece.data_ptr()]
        if not moved:
            if self.compute is not self.main:
                self.compute.copy_(self.main)
            return
        for shard in moved:
            _check_moved(shard)
        if self.compute is self.main:
            if self.is_in_slot:
                raise ShardingError(
                    f"parameter {moved[0].name!r} was given other memory (param.data = ...). With weight_slots='all' "
                    "in fp32 its own is part of the slot that layers compute with and would be overwritten: copy into "
                    "it (param.data.copy_), or choose fewer slots"
                )
            numel = self.layout.shard_numel
            self.compute = self._ledger.allocate(Category.COMPUTE_SHARDS, numel, torch.float32, is_visible=True)
        for shard in self.params:
            shard.shaped(self.compute).copy_(shard.param.detach())

    def write_main(self, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Overwrite main weights of this rank where `mask` is set. The user has not changed them: versions stay.

        Args:
            values: [padded_numel] fp32, the whole unit.
            mask: [padded_numel] bool.
        """
        for shard in self.params:
            own = slice(shard.layout.offset + shard.local.start, shard.layout.offset + shard.local.stop)
            main = shard.param.data.view(-1)
            kept = main.to(self.compute.dtype).float() == values[own]  # finer than what was computed with
            main.copy_(torch.where(mask[own] & ~kept, values[own], main))


def _put_under(param: nn.Parameter, piece: torch.Tensor) -> None:
    """Let `param`, whoever holds it, look at the memory of `piece`."""
    if not is_meta(param):
        param.data = piece
        return
    # Not to be assigned across devices of such different kinds. torch.utils.swap_tensors refuses what somebody refers
    # to weakly, as RNNs do to their weights.
    fresh = nn.Parameter(piece.data, requires_grad=param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(fresh, hooks, getattr(param, hooks))
    torch._C._swap_tensor_impl(param, fresh)


def _check_moved(shard: ParamShard) -> None:
    param, piece = shard.param, shard.piece
    if param.numel() != piece.numel() or param.dtype is not piece.dtype or param.device != piece.device:
        raise ShardingError(
            f"parameter {shard.name!r} was replaced by {tuple(param.shape)} {param.dtype} on {param.device}; its main "
            f"weights on this rank are {tuple(piece.shape)} {piece.dtype} on {piece.device}. Instead of .half() "
            "or .to() use Precision(param_dtype=...), for full tensors load_state_dict or "
            "summon_full_params(writeback=True)"
        )
