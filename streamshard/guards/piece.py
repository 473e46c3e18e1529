"""`Piece` describes the elements of a parameter, or of its gradient, that a rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.transport import AllToAll
from streamshard.forms import Box, part_of
from streamshard.planning.layout import FlatParamLayout, LocalRange, ParamLayout


class Piece(NamedTuple):
    """Describes a piece: its full tensor, and this rank's elements.

    Attributes:
        name: of the parameter.
        shape: of the full parameter.
        start, stop: which elements of the flattened parameter, or of the flattened `box`, this rank has.
        local_shape: of this rank's elements.
        ranks: of the shard group. Each has other elements; norms and sums are collectives of these ranks.
        flat_param, place: the layouts of the flat parameter and of the parameter in it: which elements each rank has.
        ledger_of: returns the model's `Ledger` (see `streamshard.core.slots`), None once the model is gone.
        is_weight: the tensor is the parameter, or computed from it; else its gradient. All are cut at the same places.
        trains: the parameter required a gradient when the model was sharded; else it never gets one.
        is_on_host: the parameter's state lies in host memory (``offload``).
        box: see `streamshard.forms.Form`.
        counts: sums and norms count the elements of this rank. False: a rank outside of the shard group has a copy,
            and counts it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    local_shape: tuple[int, ...]
    ranks: Communicator
    flat_param: FlatParamLayout
    place: ParamLayout
    ledger_of: Callable[[], Any]
    is_weight: bool = True
    trains: bool = True
    is_on_host: bool = False
    box: Box = ()
    counts: bool = True

    @property
    def is_ordinary(self) -> bool:
        """Whether its parameter stays an ordinary one: it is whole, and no parameter of the model is in host memory.

        Readers of host memory have to wait for copies. An optimizer steps parameters of one class.
        """
        ledger = self.ledger_of()
        return self.is_whole and (ledger is None or ledger.host is None)

    @property
    def host(self) -> Any:
        """The `HostState` with the parameter's state; None: it lies on the device, or the model is gone."""
        ledger = self.ledger_of() if self.is_on_host else None
        return None if ledger is None else ledger.host

    def settle(self) -> None:
        """The values are about to be read or written: copies of host memory are complete afterwards."""
        if (host := self.host) is not None:
            host.settle()

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the full tensor, and norms and sums need no other rank."""
        # One rank in the shard group may still have a part of a DTensor only.
        return self.flat_param.is_whole and self.ranks.is_alone

    @property
    def full(self) -> torch.Tensor:
        """[full shape] fp32, meta: answers questions about the shape."""
        return torch.empty(self.shape, device="meta")

    @property
    def what(self) -> str:
        """The tensor's name in errors."""
        return f"{'parameter' if self.is_weight else 'the gradient of parameter'} {self.name!r}"

    def __str__(self) -> str:
        part = f" of {self.place.shape}" * bool(self.box)
        ranks = f"rank {self.ranks.rank} of {self.ranks.world_size}"
        return f"piece {self.start}:{self.stop}{part} of {self.shape}, {ranks}"

    def of_grad(self) -> Piece:
        """The same elements of the gradient."""
        return self._replace(is_weight=False)

    def range_of(self, rank: int) -> LocalRange:
        """Which elements of the flattened parameter `rank` of the shard group has."""
        return self.flat_param.local_range(self.place, rank)

    def counted(self, number: torch.Tensor) -> torch.Tensor:
        """`number`, which is of this rank's elements, as sums over ranks add it: see `counts`.

        A copy counts as 0, but its gradient is that of the element that counts. So copies stay equal.
        """
        if self.counts:
            return number
        return number - number.detach() if number.requires_grad else torch.zeros_like(number)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of `whole`, in new memory: [local_shape]."""
        part = part_of(whole.detach(), self.box)
        # A view would keep the whole tensor.
        return part.reshape(-1)[self.start : self.stop].clone().view(self.local_shape)

    @property
    def _cuts(self) -> tuple[object, ...]:
        # Not start and stop: on one rank alone they may be equal. Not `ranks`: an average of a model has its own.
        return self.shape, self.box, self.place.offset, self.flat_param.shard_numel, self.ranks.world_size

    def is_like(self, other: Piece) -> bool:
        """Whether both are cut at the same places. All ranks get the same answer."""
        return self._cuts == other._cuts

    def can_recut(self, other: Piece) -> bool:
        """Whether `recut` takes a piece described by `other`. All ranks get the same answer."""
        return (self.shape, self.box) == (other.shape, other.box) and self.ranks.are_the_ranks_of(other.ranks)

    def recut(self, local: torch.Tensor, other: Piece) -> torch.Tensor:
        """The elements that this piece describes, from `local`, a plain tensor that `other` describes. Collective.

        Ranks own ranges in rank order. So the elements for each rank already lie one after another in `local`.
        """
        everyone, rank = range(self.ranks.world_size), self.ranks.rank
        sent = [_overlap(other.range_of(rank), self.range_of(each)) for each in everyone]
        # By the layouts each rank knows what others send: no sizes are exchanged.
        received = [_overlap(other.range_of(each), self.range_of(rank)) for each in everyone]
        source = local.detach().to(self.ranks.streams.device).reshape(-1)  # it may lie in host memory
        result = source.new_empty(sum(received))
        self.ranks.exchange_now(AllToAll(source, sent, result, received))
        return result.view(self.local_shape).to(local.device)

    def takes(self, local: torch.Tensor) -> bool:
        """Whether `local`, a plain tensor, may be used as a piece. Optimizers keep plain tensors of the piece's shape.

        No, if it is as long as a row: it may be a row, and torch would broadcast it.
        """
        row = self.place.shape[-1] if len(self.shape) > 1 else 0
        # A piece that is exactly one row may meet a row: broadcasting changes nothing.
        is_row = self.stop - self.start == row and self.start % max(row, 1) != 0
        return tuple(local.shape) == self.local_shape and not is_row


def _overlap(one: LocalRange, other: LocalRange) -> int:
    return max(min(one.stop, other.stop) - max(one.start, other.start), 0)
