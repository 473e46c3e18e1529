"""Pieces to owners and back: the all-to-alls of one step of whole parameters, in rounds that overlap.

    pieces of gradients and weights -all-to-all-> whole on the owner -step-> new weights -all-to-all-> pieces

`Rounds` owns the buffers and the fences. See [Note: rounds].

[Note: rounds]
Round k uses buffer set k % 2, and the one buffer of whole parameters. Its pieces are packed (compute stream), exchanged
(comm), laid out as whole parameters and stepped (compute), their new weights exchanged (comm) and copied to the pieces
(compute). The order on the compute stream is: finish round k - 2, pack round k, step round k - 1. So round k travels
while round k - 1 is stepped, and a buffer set is free when it is packed again. Fences: rule 5 before each exchange
(what it sends is written), rule 7 behind it (what arrives is complete).

The length of a message follows from the plan alone, never from which parameters have a gradient, so ranks that
disagree about gradients get an error and not messages of the wrong length. Behind the elements each rank sends each
rank one number: on the way to owners a digest of which parameters have gradients here, on the way back whether this
rank has failed. On a device the host reads these numbers before the next step, so it never waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.comm.ranks import Ranks
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.comm.transport import AllToAll
from streamshard.plan.memory import Category
from streamshard.unit.buffers import Ledger
from streamshard.unit.pieces import Piece
from streamshard.unit.sharded_parameter import data_of

__all__ = ["Rounds", "Verdict", "WholeParam", "stand_in"]

_ALIGNED_NUMEL = 128  # fp32 elements: 512 bytes, as of tensors that torch allocates, so kernels do the same
_DIGEST_RANGE = 1 << 24  # integers that fp32 holds exactly


class WholeParam(NamedTuple):
    """A sharded parameter that is stepped whole.

    Attributes:
        param: the user's, a piece.
        number: of the slice that is stepped as a parameter of its own; None: the parameter is stepped as it is.
        piece: what it, or its slice, is a piece of.
        local: which elements of `param` here, flattened, are the piece.
        owner: the rank of the shard group that steps it.
        whole: on the owner, what its optimizer steps; None on other ranks.
        cost: of its step.
    """

    param: nn.Parameter
    number: int | None
    piece: Piece
    local: slice
    owner: int
    whole: nn.Parameter | None
    cost: float


class Verdict(NamedTuple):
    """What ranks have told each other in a step.

    Attributes:
        grads_differ: which parameters have a gradient is not the same on all ranks.
        has_failed: the optimizer has raised on some rank.
    """

    grads_differ: bool
    has_failed: bool


class Rounds:
    """The exchanges of one optimizer. Owns its buffers, which the model's ledger counts, and their fences.

    Args:
        rounds: the parameters of each round; at least one round.
        ranks: the shard group.
        ledger: allocates the buffers; they are freed with this object.

    Attributes:
        address: of the memory of whole parameters and their gradients.
    """

    def __init__(self, rounds: Sequence[Sequence[WholeParam]], ranks: Ranks, ledger: Ledger) -> None:
        self._ranks = ranks
        plans = [_Plan(params, ranks.rank, ranks.world_size) for params in rounds]
        wholes = _allocate(ledger, max(plan.whole_numel for plan in plans))
        self.address = wholes.untyped_storage().data_ptr()
        self._sets = [_BufferSet(number, plans[number::2], wholes, ranks, ledger) for number in range(len(plans))[:2]]
        self._rounds = [_Round(plan, self._sets[number % 2]) for number, plan in enumerate(plans)]
        self._numbers = torch.zeros(2, ranks.world_size, pin_memory=ranks.streams.device.type != "cpu")
        self._digest = 0
        self._event: Any = None  # on a device: the numbers are on the host
        buffers = [wholes, *(buffer for each in self._sets for buffer in (each.pieces, each.received))]
        n_bytes = planned_bytes(plans)
        ledger.rounds_bytes += n_bytes
        weakref.finalize(self, _free, weakref.ref(ledger), buffers, n_bytes).atexit = False

    def run(
        self,
        has_grad: Callable[[WholeParam], bool],
        meanwhile: Callable[[], None],
        step_round: Callable[[int], bool],
    ) -> None:
        """One step of all rounds. What ranks have told each other is in `verdict` afterwards.

        Args:
            has_grad: whether a parameter has a gradient here.
            meanwhile: called while the first round travels; does not raise.
            step_round: steps what this rank owns of a round, whose weights and gradients are in place. It does not
                raise: it returns whether all has gone well so far.
        """
        self._digest = hash(tuple(has_grad(each) for own in self._rounds for each in own.plan.params)) % _DIGEST_RANGE
        count, is_well = len(self._rounds), True
        with self._ranks.guard("an exchange of parameters with their owners"):
            for turn in range(count + 2):
                if turn >= 2:
                    self._finish(turn - 2, has_grad)
                if turn < count:
                    self._send(turn)
                if turn == 0:
                    meanwhile()
                if 1 <= turn <= count:
                    self._lay_out(turn - 1, has_grad)
                    if not self._knows_that_grads_differ():
                        is_well = step_round(turn - 1)
                    self._send_back(turn - 1, is_well=is_well)
            self._read_numbers()

    def verdict(self) -> Verdict:
        """What ranks have told each other in the last step. On a device the host waits until that step is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        digests, failures = self._numbers
        return Verdict(bool((digests != self._digest).any()), bool(failures.any()))

    def forget(self) -> None:
        """The last step's verdict has been told."""
        self._numbers[0].fill_(self._digest)
        self._numbers[1].zero_()

    # -- one round, in this order -----------------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        own, buffers = self._rounds[number], self._sets[number % 2]
        sources, targets = [], []
        for each, grad, weight in own.sent:
            if (found := each.param.grad) is not None:
                sources.append(found.as_subclass(torch.Tensor).view(-1)[each.local])
                targets.append(grad)
            sources.append(data_of(each.param).view(-1)[each.local])
            targets.append(weight)
        with torch.no_grad():
            _copy(targets, sources)
            buffers.pieces.index_fill_(0, own.sent_numbers, self._digest)
        buffers.packed.record()
        buffers.packed.wait()  # rule 5
        buffers.arrived.record(self._ranks.transport.start_all_to_all(own.to_owners))

    def _lay_out(self, number: int, has_grad: Callable[[WholeParam], bool]) -> None:
        own, buffers = self._rounds[number], self._sets[number % 2]
        buffers.arrived.wait()  # rule 7
        with torch.no_grad():
            _copy(own.laid_out, own.arrived)
            if number == 0:
                self._numbers[0].copy_(buffers.received[own.received_numbers], non_blocking=True)
        for each, grad, weight in own.wholes:
            assert each.whole is not None
            each.whole.data = weight
            each.whole.grad = grad if has_grad(each) else None

    def _send_back(self, number: int, *, is_well: bool) -> None:
        own, buffers = self._rounds[number], self._sets[number % 2]
        results = {id(each): data_of(each.whole).reshape(-1) for each, _, _ in own.wholes if each.whole is not None}
        with torch.no_grad():
            _copy([part for _, part, _ in own.back], [results[id(each)][part_of] for each, _, part_of in own.back])
            buffers.received.index_fill_(0, own.back_numbers, 0.0 if is_well else 1.0)
        buffers.stepped.record()
        buffers.stepped.wait()  # rule 5
        buffers.returned.record(self._ranks.transport.start_all_to_all(own.to_pieces))
        for each, _, _ in own.wholes:
            assert each.whole is not None
            each.whole.grad = None
            each.whole.data = stand_in(each.whole)

    def _finish(self, number: int, has_grad: Callable[[WholeParam], bool]) -> None:
        own, buffers = self._rounds[number], self._sets[number % 2]
        buffers.returned.wait()  # rule 7
        changed = [] if self._knows_that_grads_differ() else [each for each in own.plan.params if has_grad(each)]
        with torch.no_grad():
            _copy(
                [data_of(each.param).view(-1)[each.local] for each, _ in own.returned if has_grad(each) and changed],
                [part for each, part in own.returned if has_grad(each) and changed],
            )
            if number == len(self._rounds) - 1:
                self._numbers[1].copy_(buffers.pieces[own.returned_numbers], non_blocking=True)
        # On all ranks, also where one has no elements: a backward of an earlier forward raises.
        torch.autograd.graph.increment_version([each.param for each in changed])

    def _read_numbers(self) -> None:
        streams = self._ranks.streams
        if streams.module is not None:
            self._event = streams.module.Event()
            self._event.record(streams.device_stream(StreamName.COMPUTE))

    def _knows_that_grads_differ(self) -> bool:
        return not self._ranks.streams.has_streams and bool((self._numbers[0] != self._digest).any())


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, dtype and device of `param` that takes no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


class _Plan:
    """One round on this rank, in numbers."""

    def __init__(self, params: Sequence[WholeParam], rank: int, world_size: int) -> None:
        self.params = params
        self.mine = [each for each in params if each.piece.stop > each.piece.start]
        self.owned = [(each, _sources(each.piece, world_size)) for each in params if each.owner == rank]
        self.to_owner = [0] * world_size  # elements of this rank's pieces, by who owns them
        self.from_rank = [0] * world_size  # elements of what this rank owns, by who has them
        for each in self.mine:
            self.to_owner[each.owner] += each.piece.stop - each.piece.start
        for _, sources in self.owned:
            for source, start, stop in sources:
                self.from_rank[source] += stop - start

    @property
    def pieces_numel(self) -> int:
        """What this rank sends to owners: gradients, weights and a number for each rank."""
        return 2 * sum(self.to_owner) + len(self.to_owner)

    @property
    def received_numel(self) -> int:
        """What this rank receives as an owner."""
        return 2 * sum(self.from_rank) + len(self.from_rank)

    @property
    def whole_numel(self) -> int:
        """Whole gradients and weights of what this rank owns."""
        return 2 * sum(_aligned(each.piece.place.numel) for each, _ in self.owned)


class _BufferSet:
    """Buffers of the rounds that take turns in them. Owns their fences.

    Attributes:
        pieces: fp32, sent to owners, and what comes back.
        received: fp32, what owners receive, and what they send back.
        wholes: fp32, gradients and weights of what this rank owns; all sets have the same, for use on one stream.
    """

    def __init__(self, number: int, plans: Sequence[_Plan], wholes: torch.Tensor, ranks: Ranks, ledger: Ledger) -> None:
        self.pieces = _allocate(ledger, max(plan.pieces_numel for plan in plans))
        self.received = _allocate(ledger, max(plan.received_numel for plan in plans))
        self.wholes = wholes

        def fence(rule: Rule, source: StreamName, target: StreamName, what: str) -> Fence:
            return Fence(ranks.streams, rule, source, f"{what}, set {number}", target)

        compute, comm = StreamName.COMPUTE, ranks.stream
        self.packed = fence(Rule.SHARDS_WRITTEN, compute, comm, "pieces for owners")
        self.arrived = fence(Rule.RESULTS_ARRIVED, comm, compute, "whole parameters")
        self.stepped = fence(Rule.SHARDS_WRITTEN, compute, comm, "new weights of owners")
        self.returned = fence(Rule.RESULTS_ARRIVED, comm, compute, "new weights of pieces")


class _Round:
    """One round on this rank: the views of its buffers that are copied from and to. Made once.

    Attributes:
        sent: a parameter of which this rank has elements, and where its gradient and weights go for the owner.
        laid_out, arrived: parts of whole parameters, and what arrives for each.
        wholes: a parameter that this rank owns, its whole gradient and weights.
        back: a parameter that this rank owns, where a part of its new weights goes, and which part that is.
        returned: a parameter of which this rank has elements, and where their new weights arrive.
        sent_numbers, received_numbers, back_numbers, returned_numbers: [N] int64, where the numbers are.
        to_owners, to_pieces: the two exchanges.
    """

    def __init__(self, plan: _Plan, buffers: _BufferSet) -> None:
        self.plan = plan
        both_to, both_from = [2 * n + 1 for n in plan.to_owner], [2 * n + 1 for n in plan.from_rank]
        one_to, one_from = [n + 1 for n in plan.to_owner], [n + 1 for n in plan.from_rank]
        device = buffers.pieces.device
        self.sent_numbers, self.received_numbers = _last_of(both_to, device), _last_of(both_from, device)
        self.back_numbers, self.returned_numbers = _last_of(one_from, device), _last_of(one_to, device)
        self.to_owners = AllToAll(
            buffers.pieces[: sum(both_to)], both_to, buffers.received[: sum(both_from)], both_from
        )
        self.to_pieces = AllToAll(buffers.received[: sum(one_from)], one_from, buffers.pieces[: sum(one_to)], one_to)

        grads, weights = _starts(both_to), [s + n for s, n in zip(_starts(both_to), plan.to_owner, strict=True)]
        returned = _starts(one_to)
        self.sent: list[tuple[WholeParam, torch.Tensor, torch.Tensor]] = []
        self.returned: list[tuple[WholeParam, torch.Tensor]] = []
        for each in plan.mine:
            numel, owner = each.piece.stop - each.piece.start, each.owner
            parts = [_take(buffers.pieces, starts, owner, numel) for starts in (grads, weights, returned)]
            self.sent.append((each, parts[0], parts[1]))
            self.returned.append((each, parts[2]))

        grads, weights = _starts(both_from), [s + n for s, n in zip(_starts(both_from), plan.from_rank, strict=True)]
        back, offset = _starts(one_from), 0
        self.laid_out: list[torch.Tensor] = []
        self.arrived: list[torch.Tensor] = []
        self.wholes: list[tuple[WholeParam, torch.Tensor, torch.Tensor]] = []
        self.back: list[tuple[WholeParam, torch.Tensor, slice]] = []
        for each, sources in plan.owned:
            shape, numel = each.piece.shape, each.piece.place.numel
            grad, weight = (buffers.wholes.narrow(0, offset + k * _aligned(numel), numel) for k in range(2))
            offset += 2 * _aligned(numel)
            for source, start, stop in sources:
                for whole, starts in ((grad, grads), (weight, weights)):
                    self.laid_out.append(whole[start:stop])
                    self.arrived.append(_take(buffers.received, starts, source, stop - start))
                part = _take(buffers.received, back, source, stop - start)
                self.back.append((each, part, slice(start, stop)))
            self.wholes.append((each, grad.view(shape), weight.view(shape)))


def _sources(piece: Piece, world_size: int) -> list[tuple[int, int, int]]:
    """The ranks that have elements of a parameter, and which: [start, stop)."""
    shard_numel, place = piece.segment.shard_numel, piece.place
    if not place.numel:
        return []
    first, last = place.offset // shard_numel, (place.offset + place.numel - 1) // shard_numel
    ranges = [(rank, piece.range_of(rank)) for rank in range(first, min(last + 1, world_size))]
    return [(rank, own.start, own.stop) for rank, own in ranges]


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


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _allocate(ledger: Ledger, numel: int) -> torch.Tensor:
    return ledger.allocate(Category.OPTIMIZER_ROUNDS, numel, torch.float32)


def planned_bytes(plans: Sequence[_Plan]) -> int:
    """What all buffers take: one of whole parameters, and two sets of the others, each for every other round."""
    numel = max(plan.whole_numel for plan in plans)
    for own in (plans[0::2], plans[1::2]):
        numel += max((plan.pieces_numel for plan in own), default=0)
        numel += max((plan.received_numel for plan in own), default=0)
    return 4 * numel


def _free(ledger_of: weakref.ref[Ledger], buffers: Sequence[torch.Tensor], n_bytes: int) -> None:
    ledger = ledger_of()
    if ledger is not None:
        ledger.rounds_bytes -= n_bytes
        for buffer in buffers:
            ledger.free(buffer)
