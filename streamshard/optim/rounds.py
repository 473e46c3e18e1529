"""The all-to-alls of one `WholeParameterOptimizer` step, from pieces to owners and back, in rounds that overlap.

    pieces of gradients and weights -all-to-all-> full on the owner -step-> new weights -all-to-all-> pieces

`Rounds` owns the buffers and the fences. See [Note: rounds].

[Note: rounds]
The pieces of a round are packed (compute stream), exchanged (comm), laid out as full parameters and
stepped (compute), their new weights are exchanged (comm) and copied to the pieces (compute). All rounds use the same
buffers. The order on the compute stream is: lay out round k, pack round k + 1, step round k, finish round k - 1, send
round k back. So while round k is stepped, round k + 1 travels to its owners and round k - 1 back, and each buffer is
free when it is written again. Fences: rule 5 before each exchange (what it sends is written), rule 7 behind it (what
arrives is complete). An owner sends its own pieces to itself, like all others.

The length of a message depends only on the plan, never on which parameters have a gradient. So ranks that disagree
about gradients get an error, not messages of the wrong length. Before the first exchange ranks compare digests of which
parameters have gradients. On a device the host reads the result before the next step, so it never waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.comm.transport import AllToAll
from streamshard.planning.memory import Category
from streamshard.unit.shard import Ledger
from streamshard.unit.sharded_parameter import data_of
from streamshard.unit.sharded_tensor import Piece

_ALIGNED_NUMEL = 128  # fp32 elements: 512 bytes, as of tensors that torch allocates, so kernels do the same
_DIGEST_RANGE = 1 << 24  # integers that fp32 holds exactly


class WholeParam(NamedTuple):
    """A sharded parameter whose owner steps the full tensor.

    Attributes:
        param: the user's sharded parameter.
        piece: which elements of the full tensor this rank has.
        owner: the rank of the shard group that steps the parameter.
        whole: on the owner, the [full shape] parameter that its optimizer steps; None on other ranks.
        cost: the cost of its step.
    """

    param: nn.Parameter
    piece: Piece
    owner: int
    whole: nn.Parameter | None
    cost: float


_Grads = Mapping[int, "torch.Tensor | None"]  # by ids of WholeParams, this rank's pieces of their gradients


class Rounds:
    """The exchanges of one optimizer. Owns its buffers, which the model's ledger counts, and their fences.

    Args:
        rounds: the parameters of each round; at least one round.
        ranks: the shard group.
        ledger: allocates the buffers; they are freed with this object.
    """

    def __init__(self, rounds: Sequence[Sequence[WholeParam]], ranks: Communicator, ledger: Ledger) -> None:
        self._ranks = ranks
        self._rounds = [_Round(params, ranks) for params in rounds]
        numels = [max(each) for each in zip(*(own.numels() for own in self._rounds), strict=True)]
        buffers = [ledger.allocate(Category.OPTIMIZER_ROUNDS, numel, torch.float32) for numel in numels]
        for own in self._rounds:
            own.take_views(*buffers)

        def fence(rule: Rule, source: StreamName, target: StreamName, what: str) -> Fence:
            return Fence(ranks.streams, rule, source, what, target)

        compute, comm = StreamName.COMPUTE, ranks.stream
        self._packed = fence(Rule.SHARDS_WRITTEN, compute, comm, "pieces for owners")
        self._arrived = fence(Rule.RESULTS_ARRIVED, comm, compute, "whole parameters")
        self._stepped = fence(Rule.SHARDS_WRITTEN, compute, comm, "new weights of owners")
        self._returned = fence(Rule.RESULTS_ARRIVED, comm, compute, "new weights of pieces")
        device = ranks.streams.device
        self._digests = torch.zeros(2, device=device)
        self._largest = torch.zeros(2, pin_memory=device.type != "cpu")  # over ranks
        self._event: Any = None  # on a device: `_largest` is on the host
        weakref.finalize(self, _free, weakref.ref(ledger), buffers).atexit = False

    def run(self, meanwhile: Callable[[], None], step_round: Callable[[int], None]) -> None:
        """One step of all rounds, inside ``torch.no_grad()``. `grads_differ` tells afterwards whether ranks disagreed.

        On a CPU nothing is stepped if ranks have gradients for different parameters.

        Args:
            meanwhile: called while the first round travels; does not raise.
            step_round: called when a round's weights and gradients have arrived; steps the parameters that this rank
                owns. Does not raise.
        """
        grads = {id(each): _flat_grad(each) for own in self._rounds for each in own.params}
        self._compare(hash(tuple(grad is not None for grad in grads.values())) % _DIGEST_RANGE)
        if not self._ranks.streams.has_streams and self.grads_differ():
            return
        with self._ranks.guard("an exchange of parameters with their owners"):
            self._send(self._rounds[0], grads)
            meanwhile()
            for number, own in enumerate(self._rounds):
                self._lay_out(own, grads)
                if number + 1 < len(self._rounds):
                    self._send(self._rounds[number + 1], grads)
                step_round(number)
                if number:
                    self._finish(self._rounds[number - 1], grads)
                self._send_back(own)
            self._finish(self._rounds[-1], grads)

    def grads_differ(self) -> bool:
        """Whether ranks disagreed in the last step. On a device the host waits until that step has begun."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return bool(self._largest[0] != -self._largest[1])

    def _compare(self, digest: int) -> None:
        """Start to compare this rank's digest with those of the others. Collective."""
        for place, value in zip(self._digests, (digest, -digest), strict=True):
            place.fill_(value)
        self._ranks.all_reduce(self._digests, maximum=True)
        self._largest.copy_(self._digests, non_blocking=True)
        streams = self._ranks.streams
        if streams.module is not None:
            self._event = streams.module.Event()
            self._event.record(streams.device_stream(StreamName.COMPUTE))

    # -- one round, in this order -----------------------------------------------------------------------------------

    def _send(self, own: _Round, grads: _Grads) -> None:
        found = [(place, grad) for each, place, _ in own.sent if (grad := grads[id(each)]) is not None]
        _copy([*found, *((place, _flat_data(each)) for each, _, place in own.sent)])
        self._packed.record()
        self._packed.wait()  # rule 5
        self._arrived.record(self._ranks.transport.start_all_to_all(own.to_owners))

    def _lay_out(self, own: _Round, grads: _Grads) -> None:
        self._arrived.wait()  # rule 7
        _copy(own.arrived)
        for each, whole, grad, weight, _ in own.wholes:
            whole.data = weight
            whole.grad = grad if grads[id(each)] is not None else None

    def _send_back(self, own: _Round) -> None:
        results = {id(whole): data_of(whole).reshape(-1) for _, whole, *_ in own.wholes}
        _copy([(place, results[id(whole)][part]) for whole, place, part in own.results])
        self._stepped.record()
        self._stepped.wait()  # rule 5
        self._returned.record(self._ranks.transport.start_all_to_all(own.to_pieces))
        for _, whole, _, _, empty in own.wholes:
            whole.grad = None
            whole.data = empty

    def _finish(self, own: _Round, grads: _Grads) -> None:
        self._returned.wait()  # rule 7
        _copy([(_flat_data(each), place) for each, place in own.returned if grads[id(each)] is not None])
        # On all ranks, also where one has no elements: a backward of an earlier forward raises.
        torch.autograd.graph.increment_version([each.param for each in own.params if grads[id(each)] is not None])


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape, dtype and device of `param` that takes no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


class _Round:
    """One round on this rank: which pieces go where, and the views of the buffers that are copied. Made once.

    Attributes:
        params: the parameters of the round, of all owners.
        sent: for each parameter of which this rank has elements: the parameter, and the buffer views for its gradient
            and its weights, [n] fp32 each.
        arrived: pairs of a part of a full gradient or weight, and the buffer view in which it arrives.
        wholes: for each parameter that this rank owns: the parameter, the one that its optimizer steps, the full
            gradient and weights, and the tensor that replaces them between steps.
        results: for each part of new weights: the stepped parameter, the buffer view for the part, and which part it
            is.
        returned: for each parameter of which this rank has elements: the parameter, and the buffer view in which its
            new weights arrive.
        to_owners, to_pieces: the two exchanges.
    """

    to_owners: AllToAll
    to_pieces: AllToAll

    def __init__(self, params: Sequence[WholeParam], ranks: Communicator) -> None:
        self.params = params
        self.sent: list[tuple[WholeParam, torch.Tensor, torch.Tensor]] = []
        self.arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.wholes: list[tuple[WholeParam, nn.Parameter, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.results: list[tuple[nn.Parameter, torch.Tensor, slice]] = []
        self.returned: list[tuple[WholeParam, torch.Tensor]] = []
        self._to_owner = [0] * ranks.world_size  # elements of this rank's pieces, by who steps them
        self._from_rank = [0] * ranks.world_size  # elements of what this rank steps, by who has them
        for each in params:
            self._to_owner[each.owner] += each.piece.stop - each.piece.start
            if each.whole is not None:
                for rank, part in _parts(each.piece):
                    self._from_rank[rank] += part.stop - part.start

    def numels(self) -> tuple[int, int, int, int, int]:
        """Number of elements of the buffers that this round needs, in the order of `take_views`' arguments."""
        sent, owned = sum(self._to_owner), sum(self._from_rank)
        wholes = sum(2 * _aligned(each.piece.place.numel) for each in self.params if each.whole is not None)
        return 2 * sent, 2 * owned, wholes, owned, sent

    def take_views(
        self,
        pieces: torch.Tensor,
        arrived: torch.Tensor,
        wholes: torch.Tensor,
        results: torch.Tensor,
        returned: torch.Tensor,
    ) -> None:
        """Take views of the buffers, which all rounds use one after another.

        Args:
            pieces: sent to owners: the gradient and the weights of one piece after another.
            arrived: the same where it arrives.
            wholes: full gradients and weights of the parameters that this rank owns.
            results: sent back: new weights.
            returned: the same where it arrives.
        """
        to_owner, from_rank = self._to_owner, self._from_rank
        self.to_owners = _exchange(pieces, [2 * n for n in to_owner], arrived, [2 * n for n in from_rank])
        self.to_pieces = _exchange(results, from_rank, returned, to_owner)
        both, new = _Cursor(pieces, [2 * n for n in to_owner]), _Cursor(returned, to_owner)
        theirs, back = _Cursor(arrived, [2 * n for n in from_rank]), _Cursor(results, from_rank)
        own = _Cursor(wholes, [wholes.numel()])
        for each in self.params:
            if numel := each.piece.stop - each.piece.start:
                self.sent.append((each, both.take(each.owner, numel), both.take(each.owner, numel)))
                self.returned.append((each, new.take(each.owner, numel)))
            if each.whole is None:
                continue
            shape, numel = each.piece.shape, each.piece.place.numel
            grad, weight = (own.take(0, _aligned(numel))[:numel] for _ in range(2))
            for rank, part in _parts(each.piece):
                self.arrived += [(whole[part], theirs.take(rank, part.stop - part.start)) for whole in (grad, weight)]
                self.results.append((each.whole, back.take(rank, part.stop - part.start), part))
            self.wholes.append((each, each.whole, grad.view(shape), weight.view(shape), stand_in(each.whole)))


class _Cursor:
    """A buffer with a chunk for each rank. Elements are taken from each chunk one after another."""

    def __init__(self, buffer: torch.Tensor, numels: Sequence[int]) -> None:
        self._buffer = buffer
        self._next = [sum(numels[:rank]) for rank in range(len(numels))]

    def take(self, rank: int, numel: int) -> torch.Tensor:
        """The next `numel` elements of `rank`'s chunk."""
        start = self._next[rank]
        self._next[rank] += numel
        return self._buffer.narrow(0, start, numel)


def _exchange(
    send: torch.Tensor, send_numels: Sequence[int], received: torch.Tensor, received_numels: Sequence[int]
) -> AllToAll:
    return AllToAll(send[: sum(send_numels)], send_numels, received[: sum(received_numels)], received_numels)


def _parts(piece: Piece) -> list[tuple[int, slice]]:
    """The ranks that have elements of a parameter, and which elements."""
    ranges = [(rank, piece.range_of(rank)) for rank in range(piece.ranks.world_size)]
    return [(rank, slice(own.start, own.stop)) for rank, own in ranges if own.numel]


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNED_NUMEL) * _ALIGNED_NUMEL


def _flat_data(each: WholeParam) -> torch.Tensor:
    return data_of(each.param).view(-1)


def _flat_grad(each: WholeParam) -> torch.Tensor | None:
    grad = each.param.grad
    return None if grad is None else grad.as_subclass(torch.Tensor).view(-1)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        targets, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(targets, sources)


def _free(ledger_of: weakref.ref[Ledger], buffers: Sequence[torch.Tensor]) -> None:
    ledger = ledger_of()
    if ledger is not None:
        for buffer in buffers:
            ledger.free(buffer)
