"""The all-to-alls of one `WholeParameterOptimizer` step, from pieces to owners and back, in rounds that overlap.

    pieces of gradients and weights -all-to-all-> full on the owner -step-> new weights -all-to-all-> pieces

`Rounds` owns the buffers and the fences. See [Note: rounds].

[Note: rounds]
The pieces of a round are packed (compute stream), exchanged (comm), laid out as full parameters and stepped (compute),
their new weights are exchanged (comm) and copied to the pieces (compute). All rounds use the same buffers. The order on
the compute stream is: lay out round k, pack round k + 1, step round k, finish round k - 1, send round k back. So while
round k is stepped, round k + 1 travels to its owners and round k - 1 back, and each buffer is free when it is written
again. Fences: rule 5 before each exchange (what it sends is written), rule 7 behind it (what arrives is complete). An
owner's own pieces are not exchanged: they are copied to the full parameters before the step, and back afterwards.

The length of a message follows from the plan alone, never from which parameters have a gradient, so ranks that
disagree about gradients get an error and not messages of the wrong length. Behind the elements each rank sends each
rank one number, a digest of which parameters have gradients here. On a device the host reads these numbers before the
next step, so it never waits for the device.
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
from streamshard.plan.memory import Category
from streamshard.unit.shard import Ledger
from streamshard.unit.sharded_parameter import data_of
from streamshard.unit.sharded_tensor import Piece

__all__ = ["Rounds", "WholeParam", "stand_in"]

_ALIGNED_NUMEL = 128  # fp32 elements: 512 bytes, as of tensors that torch allocates, so kernels do the same
_DIGEST_RANGE = 1 << 24  # integers that fp32 holds exactly


class WholeParam(NamedTuple):
    """A sharded parameter whose owner steps the full tensor.

    Attributes:
        param: the user's sharded parameter.
        piece: which elements `param` has.
        owner: the rank of the shard group that steps the parameter.
        whole: on the owner, the [full shape] parameter that its optimizer steps; None on other ranks.
        cost: the cost of its step.
    """

    param: nn.Parameter
    piece: Piece
    owner: int
    whole: nn.Parameter | None
    cost: float


class _Piece(NamedTuple):
    """This rank's piece of a parameter, and where its gradient and weights go: [n] fp32 each."""

    of: WholeParam
    grad: torch.Tensor
    weight: torch.Tensor


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
        plans = [_Plan(params, ranks.rank, ranks.world_size) for params in rounds]
        self._buffers = _Buffers.allocate(plans, ledger)
        self._rounds = [_Round(plan, self._buffers) for plan in plans]

        def fence(rule: Rule, source: StreamName, target: StreamName, what: str) -> Fence:
            return Fence(ranks.streams, rule, source, what, target)

        compute, comm = StreamName.COMPUTE, ranks.stream
        self._packed = fence(Rule.SHARDS_WRITTEN, compute, comm, "pieces for owners")
        self._arrived = fence(Rule.RESULTS_ARRIVED, comm, compute, "whole parameters")
        self._stepped = fence(Rule.SHARDS_WRITTEN, compute, comm, "new weights of owners")
        self._returned = fence(Rule.RESULTS_ARRIVED, comm, compute, "new weights of pieces")
        self._numbers = torch.zeros(ranks.world_size, pin_memory=ranks.streams.device.type != "cpu")
        self._digest = 0
        self._event: Any = None  # on a device: the numbers are on the host
        weakref.finalize(self, _free, weakref.ref(ledger), self._buffers).atexit = False

    def run(self, meanwhile: Callable[[], None], step_round: Callable[[int], None]) -> None:
        """One step of all rounds. Whether ranks have the same gradients is in `grads_differ` afterwards.

        Args:
            meanwhile: called while the first round travels; does not raise.
            step_round: steps what this rank owns of a round, whose weights and gradients are in place; does not raise.
        """
        grads = {id(each): _flat_grad(each) for own in self._rounds for each in own.plan.params}
        self._digest = hash(tuple(grad is not None for grad in grads.values())) % _DIGEST_RANGE
        with self._ranks.guard("an exchange of parameters with their owners"):
            self._send(self._rounds[0], grads)
            meanwhile()
            for number, own in enumerate(self._rounds):
                self._lay_out(own, grads)
                if number + 1 < len(self._rounds):
                    self._send(self._rounds[number + 1], grads)
                if not self._knows_that_grads_differ():
                    step_round(number)
                if number:
                    self._finish(self._rounds[number - 1], grads)
                self._send_back(own, grads)
            self._finish(self._rounds[-1], grads)
            self._read_numbers()

    def grads_differ(self) -> bool:
        """Whether ranks had other gradients in the last step. On a device the host waits until that step is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return bool((self._numbers != self._digest).any())

    # -- one round, in this order -----------------------------------------------------------------------------------

    def _send(self, own: _Round, grads: _Grads) -> None:
        with torch.no_grad():
            _copy_pieces(own.sent, grads)
            self._buffers.pieces.index_fill_(0, own.sent_numbers, self._digest)
        self._packed.record()
        self._packed.wait()  # rule 5
        self._arrived.record(self._ranks.transport.start_all_to_all(own.to_owners))

    def _lay_out(self, own: _Round, grads: _Grads) -> None:
        self._arrived.wait()  # rule 7
        with torch.no_grad():
            _copy(own.laid_out, own.arrived)
            _copy_pieces(own.kept, grads)
            if own is self._rounds[0]:
                self._numbers.copy_(self._buffers.arrived[own.arrived_numbers], non_blocking=True)
        for each, whole, grad, weight, _ in own.wholes:
            whole.data = weight
            whole.grad = grad if grads[id(each)] is not None else None

    def _send_back(self, own: _Round, grads: _Grads) -> None:
        results = {id(each): data_of(whole).reshape(-1) for each, whole, *_ in own.wholes}
        kept = [piece.of for piece in own.kept if grads[id(piece.of)] is not None]
        with torch.no_grad():
            _copy([part for _, part, _ in own.back], [results[id(each)][part_of] for each, _, part_of in own.back])
            _copy(
                [_flat_data(each) for each in kept],
                [results[id(each)][each.piece.start : each.piece.stop] for each in kept],
            )
        self._stepped.record()
        self._stepped.wait()  # rule 5
        self._returned.record(self._ranks.transport.start_all_to_all(own.to_pieces))
        for _, whole, _, _, empty in own.wholes:
            whole.grad = None
            whole.data = empty

    def _finish(self, own: _Round, grads: _Grads) -> None:
        self._returned.wait()  # rule 7
        is_changed = not self._knows_that_grads_differ()
        returned = [(each, part) for each, part in own.returned if is_changed and grads[id(each)] is not None]
        with torch.no_grad():
            _copy([_flat_data(each) for each, _ in returned], [part for _, part in returned])
        # On all ranks, also where one has no elements: a backward of an earlier forward raises.
        torch.autograd.graph.increment_version(
            [each.param for each in own.plan.params if is_changed and grads[id(each)] is not None]
        )

    def _read_numbers(self) -> None:
        streams = self._ranks.streams
        if streams.module is not None:
            self._event = streams.module.Event()
            self._event.record(streams.device_stream(StreamName.COMPUTE))

    def _knows_that_grads_differ(self) -> bool:
        return not self._ranks.streams.has_streams and self.grads_differ()


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, dtype and device of `param` that takes no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


class _Plan:
    """One round on this rank, in numbers."""

    def __init__(self, params: Sequence[WholeParam], rank: int, world_size: int) -> None:
        self.params = params
        self.sent = [each for each in params if each.owner != rank and each.piece.stop > each.piece.start]
        self.owned = [(each, _sources(each.piece, world_size)) for each in params if each.owner == rank]
        self.to_owner = [0] * world_size  # elements of this rank's pieces, by who steps them
        self.from_rank = [0] * world_size  # elements of what this rank steps, by who has them
        for each in self.sent:
            self.to_owner[each.owner] += each.piece.stop - each.piece.start
        for _, sources in self.owned:
            for source, start, stop in sources:
                self.from_rank[source] += stop - start

    def numels(self) -> tuple[int, int, int, int, int]:
        """Of the buffers that this round needs, in the order of `_Buffers`."""
        size, sent, owned = len(self.to_owner), sum(self.to_owner), sum(self.from_rank)
        wholes = 2 * sum(_aligned(each.piece.place.numel) for each, _ in self.owned)
        return (2 * sent + size, 2 * owned + size, wholes, owned, sent)


class _Buffers(NamedTuple):
    """What all rounds use, one after another: [n] fp32 each.

    Attributes:
        pieces: sent to owners: gradients, weights and a number for each rank.
        arrived: the same where it arrives.
        wholes: gradients and weights of what this rank owns.
        results: sent back: new weights.
        returned: the same where it arrives.
    """

    pieces: torch.Tensor
    arrived: torch.Tensor
    wholes: torch.Tensor
    results: torch.Tensor
    returned: torch.Tensor

    @classmethod
    def allocate(cls, plans: Sequence[_Plan], ledger: Ledger) -> _Buffers:
        """As large as the largest round wants each."""
        return cls(*(ledger.allocate(Category.OPTIMIZER_ROUNDS, numel, torch.float32) for numel in _numels(plans)))


def _numels(plans: Sequence[_Plan]) -> list[int]:
    return [max(numels) for numels in zip(*(plan.numels() for plan in plans), strict=True)]


class _Round:
    """One round on this rank: the views of its buffers that are copied from and to. Made once.

    Attributes:
        sent: pieces that others step, and where in a message they go.
        kept: pieces that this rank steps, and where in the whole parameter they lie.
        laid_out, arrived: parts of whole parameters, and what arrives for each.
        wholes: a parameter that this rank owns, what its optimizer steps, the whole gradient and weights, and what lies
            there between steps.
        back: a parameter that this rank owns, where a part of its new weights goes, and which part that is.
        returned: a parameter that others step, and where the new weights of this rank's piece arrive.
        sent_numbers, arrived_numbers: [N] int64, where the numbers are.
        to_owners, to_pieces: the two exchanges.
    """

    def __init__(self, plan: _Plan, buffers: _Buffers) -> None:
        self.plan = plan
        both_to, both_from = [2 * n + 1 for n in plan.to_owner], [2 * n + 1 for n in plan.from_rank]
        one_to, one_from = plan.to_owner, plan.from_rank
        device = buffers.pieces.device
        self.sent_numbers, self.arrived_numbers = _last_of(both_to, device), _last_of(both_from, device)
        self.to_owners = AllToAll(buffers.pieces[: sum(both_to)], both_to, buffers.arrived[: sum(both_from)], both_from)
        self.to_pieces = AllToAll(buffers.results[: sum(one_from)], one_from, buffers.returned[: sum(one_to)], one_to)

        grads, weights = _starts(both_to), [s + n for s, n in zip(_starts(both_to), plan.to_owner, strict=True)]
        returned = _starts(one_to)
        self.sent: list[_Piece] = []
        self.returned: list[tuple[WholeParam, torch.Tensor]] = []
        for each in plan.sent:
            numel, owner = each.piece.stop - each.piece.start, each.owner
            grad, weight = (_take(buffers.pieces, starts, owner, numel) for starts in (grads, weights))
            self.sent.append(_Piece(each, grad, weight))
            self.returned.append((each, _take(buffers.returned, returned, owner, numel)))

        grads, weights = _starts(both_from), [s + n for s, n in zip(_starts(both_from), plan.from_rank, strict=True)]
        back, offset = _starts(one_from), 0
        self.laid_out: list[torch.Tensor] = []
        self.arrived: list[torch.Tensor] = []
        self.kept: list[_Piece] = []
        self.wholes: list[tuple[WholeParam, nn.Parameter, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.back: list[tuple[WholeParam, torch.Tensor, slice]] = []
        for each, sources in plan.owned:
            shape, numel = each.piece.shape, each.piece.place.numel
            grad, weight = (buffers.wholes.narrow(0, offset + k * _aligned(numel), numel) for k in range(2))
            offset += 2 * _aligned(numel)
            for source, start, stop in sources:
                for whole, starts in ((grad, grads), (weight, weights)):
                    self.laid_out.append(whole[start:stop])
                    self.arrived.append(_take(buffers.arrived, starts, source, stop - start))
                part = _take(buffers.results, back, source, stop - start)
                self.back.append((each, part, slice(start, stop)))
            start, stop = each.piece.start, each.piece.stop
            if stop > start:
                self.kept.append(_Piece(each, grad[start:stop], weight[start:stop]))
            assert each.whole is not None
            self.wholes.append((each, each.whole, grad.view(shape), weight.view(shape), stand_in(each.whole)))


def _sources(piece: Piece, world_size: int) -> list[tuple[int, int, int]]:
    """The other ranks that have elements of a parameter, and which: [start, stop)."""
    shard_numel, place = piece.flat_param.shard_numel, piece.place
    if not place.numel:
        return []
    first, last = place.offset // shard_numel, (place.offset + place.numel - 1) // shard_numel
    ranges = [(rank, piece.range_of(rank)) for rank in range(first, min(last + 1, world_size))]
    return [(rank, own.start, own.stop) for rank, own in ranges if rank != piece.ranks.rank]


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNED_NUMEL) * _ALIGNED_NUMEL


def _starts(numels: Sequence[int]) -> list[int]:
    """Where chunks of these lengths begin, one after another."""
    starts, total = [], 0
    for numel in numels:
        starts.append(total)
        total += numel
    return starts


def _last_of(numels: Sequence[int], device: torch.device) -> torch.Tensor:
    """The index of each chunk's last element."""
    ends = [start + numel - 1 for start, numel in zip(_starts(numels), numels, strict=True)]
    return torch.tensor(ends, device=device)


def _take(buffer: torch.Tensor, starts: list[int], rank: int, numel: int) -> torch.Tensor:
    """The next `numel` elements of `rank`'s chunk."""
    start = starts[rank]
    starts[rank] += numel
    return buffer.narrow(0, start, numel)


def _flat_data(each: WholeParam) -> torch.Tensor:
    return data_of(each.param).view(-1)


def _flat_grad(each: WholeParam) -> torch.Tensor | None:
    grad = each.param.grad
    return None if grad is None else grad.as_subclass(torch.Tensor).view(-1)


def _copy_pieces(pieces: Sequence[_Piece], grads: _Grads) -> None:
    """Gradients, of those that have one, and weights, to where they go."""
    found = [(piece.grad, grad) for piece in pieces if (grad := grads[id(piece.of)]) is not None]
    found += [(piece.weight, _flat_data(piece.of)) for piece in pieces]
    _copy([target for target, _ in found], [source for _, source in found])


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _free(ledger_of: weakref.ref[Ledger], buffers: Sequence[torch.Tensor]) -> None:
    ledger = ledger_of()
    if ledger is not None:
        for buffer in buffers:
            ledger.free(buffer)
