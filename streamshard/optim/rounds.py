"""Which rank steps which full parameter, and the all-to-alls of a step: from pieces to owners and back, in rounds.

    pieces of gradients and weights -all-to-all-> full on the owner -step-> new weights -all-to-all-> pieces

`assign_owners` balances the cost of a step over ranks. `plan_rounds` bounds the memory of a round. All ranks compute
the same. `Rounds` owns the buffers and the fences. See [Note: rounds].

[Note: rounds]
The compute stream packs the pieces of a round, the comm stream exchanges them, and the compute stream lays them out as
full parameters and steps these. Then the comm stream exchanges the new weights, and the compute stream copies them to
the pieces. All rounds use the same buffers. The order on the compute stream is: lay out round k, pack round k + 1, step
round k, finish round k - 1, send round k back. So while the owners step round k, round k + 1 travels to its owners and
round k - 1 back, and each buffer is free when it is written again. Fences: rule 5 before each exchange (the sent buffer
is written), rule 7 behind it (the received buffer is complete). An owner sends its own pieces to itself too.

The plan alone decides the lengths of messages, whichever parameters have a gradient. So ranks that disagree about
gradients get an error, not messages of the wrong length: before the first exchange each rank sends a digest of which
parameters have gradients. On a device the host reads the result before the next step, so it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.comm.transport import AllToAll
from streamshard.errors import RankMismatchError
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_parameter import data_of
from streamshard.planning.memory import Category

_ALIGNED_NUMEL = 128  # fp32 elements, 512 bytes: torch aligns its own tensors so, and kernels may depend on it
_DIGEST_RANGE = 1 << 24  # integers that fp32 holds exactly


class WholeParam(NamedTuple):
    """A sharded parameter whose owner steps the full tensor.

    Attributes:
        param: the user's sharded parameter.
        piece: describes this rank's elements of the full tensor.
        owner: the rank of the shard group that steps the parameter.
        whole: on the owner, the [full shape] parameter that its optimizer steps; None on other ranks.
        cost: the cost of its step.
    """

    param: nn.Parameter
    piece: Piece
    owner: int
    whole: nn.Parameter | None
    cost: float


_Grads = Mapping[int, "torch.Tensor | None"]  # by id of a WholeParam, this rank's piece of its gradient


def assign_owners(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Give each parameter to the rank with the least load so far, the most expensive parameter first.

    Greedy by decreasing cost (Graham 1969, "Bounds on Multiprocessing Timing Anomalies"; ZeroRedundancyOptimizer does
    the same by size): if all loads are 0 before, the busiest rank gets at most 4/3 of the smallest possible load.
    Parameters of equal cost keep their order, so neighbours in the model go to different ranks.

    Args:
        costs: cost of each parameter's step, in any unit; at least 0.
        loads: by rank, the cost of the parameters that it owns already, in the same unit. Changed in place: the cost of
            each assigned parameter is added.

    Returns:
        The owner of each parameter: a rank.
    """
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def plan_rounds(params: Sequence[WholeParam], round_numel: int) -> list[list[WholeParam]]:
    """Put parameters into rounds, so that no rank owns more than `round_numel` elements in one.

    A larger parameter is the only one of its owner in its round. Rounds are filled in the order in which
    `assign_owners` assigned parameters, so in each round all ranks have about the same load.

    Args:
        params: in any order, which each round keeps.
        round_numel: the largest number of elements that a rank owns in one round; at least 1.
    """
    rounds: list[list[int]] = []
    owned: dict[tuple[int, int], int] = {}  # elements, by round and rank
    for index in sorted(range(len(params)), key=lambda index: (-params[index].cost, index)):
        rank, numel = params[index].owner, params[index].piece.place.numel
        place = 0
        while owned.get((place, rank), 0) + numel > max(round_numel, numel):
            place += 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(index)
        owned[place, rank] = owned.get((place, rank), 0) + numel
    return [[params[index] for index in sorted(each)] for each in rounds]


class Rounds:
    """The exchanges of one optimizer. Owns its fences, and its buffers, which the model's ledger counts.

    Args:
        rounds: the parameters of each round; at least one round.
        ranks: the shard group.
    """

    def __init__(self, rounds: Sequence[Sequence[WholeParam]], ranks: Communicator) -> None:
        self._ranks = ranks
        self._ledger_of = rounds[0][0].piece.ledger_of
        self._buffers: list[torch.Tensor] = []  # one by one: if one cannot be allocated, `__del__` frees the others
        for numels in zip(*map(_buffer_numels, rounds), strict=True):
            self._buffers.append(self._ledger_of().allocate(Category.OPTIMIZER_ROUNDS, max(numels), torch.float32))
        self._rounds = [_Round(params, ranks, self._buffers) for params in rounds]

        streams, compute, comm = ranks.streams, StreamName.COMPUTE, ranks.stream
        self._packed = Fence(streams, Rule.SHARDS_WRITTEN, compute, "pieces for owners", comm)
        self._arrived = Fence(streams, Rule.RESULTS_ARRIVED, comm, "whole parameters", compute)
        self._stepped = Fence(streams, Rule.SHARDS_WRITTEN, compute, "new weights of owners", comm)
        self._returned = Fence(streams, Rule.RESULTS_ARRIVED, comm, "new weights of pieces", compute)
        device = ranks.streams.device
        self._digests = torch.zeros(2, device=device)
        self._largest = torch.zeros(2, pin_memory=device.type != "cpu")  # the maximum over ranks, on the host
        self._had_grads: dict[str, bool] = {}  # by name, in the last step; empty once it was checked
        self._event: Any = None  # on a device: `_largest` has arrived

    def __del__(self) -> None:
        if (ledger := self._ledger_of()) is not None:  # the model may have gone first
            ledger.free(self._buffers)

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        """One step of all rounds, inside ``torch.no_grad()``.

        Args:
            steps: functions that do not raise. The first one runs while the first round travels. Then comes one for
                each round: it steps this rank's parameters of the round, when their weights and gradients are there.

        Raises:
            RankMismatchError: see `check`. On a CPU nothing was stepped; on a device the error is about the last step.
        """
        self._ranks.refuse_in_hook()
        self.check()  # on a device: of the last step
        grads = {id(each): _flat_grad(each) for own in self._rounds for each in own.params}
        self._had_grads = {each.piece.name: grads[id(each)] is not None for own in self._rounds for each in own.params}
        # Processes hash numbers alike, and text each in its own way.
        self._compare(hash(tuple(self._had_grads.values())) % _DIGEST_RANGE)
        # On a CPU the result is here already. A device would make the host wait, so the next step looks at it.
        if not self._ranks.streams.has_streams:
            self.check()
        with self._ranks.waiting("an exchange of parameters with their owners"):
            self._send(self._rounds[0], grads)
            steps[0]()
            for number, (own, step) in enumerate(zip(self._rounds, steps[1:], strict=True)):
                self._lay_out(own, grads)
                if number + 1 < len(self._rounds):  # the next round travels while this one is stepped
                    self._send(self._rounds[number + 1], grads)
                step()
                if number:
                    self._finish(self._rounds[number - 1], grads)
                self._send_back(own)
            self._finish(self._rounds[-1], grads)

    def check(self) -> None:
        """Compare which parameters had gradients in the last step on each rank. Collective only if ranks differ.

        Raises:
            RankMismatchError: on all ranks; names the first parameter that had a gradient on some ranks only.
        """
        had_grads, self._had_grads = self._had_grads, {}
        if not had_grads or not self.grads_differ():
            return
        by_rank = self._ranks.gather_objects("compare gradients", list(had_grads.values()), with_replicas=False)
        for name, *found in zip(had_grads, *by_rank, strict=True):
            if len(set(found)) > 1:
                # On a device the host does not read other ranks' numbers before it steps.
                outcome = "load a checkpoint" if self._ranks.streams.has_streams else "nothing was stepped"
                having = [rank for rank, had in enumerate(found) if had]
                advice = f"{outcome}. Set grad = None on all ranks or on none"
                raise RankMismatchError(f"parameter {name!r} had a gradient on ranks {having} only: {advice}")

    def grads_differ(self) -> bool:
        """Whether ranks disagreed in the last step. On a device the host waits until that step has begun."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return bool(self._largest[0] != -self._largest[1])

    def _compare(self, digest: int) -> None:
        """Start to compare the digests of all ranks: the maximum of each, and of its negative. Collective."""
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
        found = [(place, grad) for each, place, *_ in own.sent if (grad := grads[id(each)]) is not None]
        _copy([*found, *((place, _flat_data(each)) for each, _, place, _ in own.sent)])
        self._packed.record()
        self._packed.wait()  # rule 5
        self._arrived.record(self._ranks.transport.start_all_to_all(own.to_owners))

    def _lay_out(self, own: _Round, grads: _Grads) -> None:
        self._arrived.wait()  # rule 7
        _copy(own.arrived)
        for each, whole, grad, weight, _ in own.wholes:
            whole.data = weight
            whole.grad = grad if grads[id(each)] is not None else None  # on all ranks or on none: see `check`

    def _send_back(self, own: _Round) -> None:
        results = {id(whole): data_of(whole).reshape(-1) for _, whole, *_ in own.wholes}
        _copy([(place, results[id(whole)][part]) for whole, place, part in own.results])
        self._stepped.record()
        self._stepped.wait()  # rule 5
        self._returned.record(self._ranks.transport.start_all_to_all(own.to_pieces))
        for _, whole, _, _, empty in own.wholes:
            whole.grad = None
            whole.data = empty  # the buffers are the next round's

    def _finish(self, own: _Round, grads: _Grads) -> None:
        self._returned.wait()  # rule 7
        _copy([(_flat_data(each), place) for each, _, _, place in own.sent if grads[id(each)] is not None])
        # On all ranks, also without elements: so a backward of an earlier forward raises everywhere.
        torch.autograd.graph.increment_version([each.param for each in own.params if grads[id(each)] is not None])


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape, dtype and device of `param` that takes no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


def _buffer_numels(params: Sequence[WholeParam]) -> tuple[int, ...]:
    """Elements of the buffers that a round of these parameters needs, in the order of `_Round`'s arguments."""
    sent = sum(map(_own_numel, params))
    owned = [each.piece.place.numel for each in params if each.whole is not None]
    return 2 * sent, 2 * sum(owned), 2 * sum(map(_aligned, owned)), sum(owned), sent


class _Round:
    """One round on this rank: its two exchanges, and the buffer views to copy before and after them.

    In a message parameters lie in the order of `params`.

    Args:
        params: the parameters of the round, of all owners.
        ranks: the shard group.
        buffers: five buffers, of `_buffer_numels` elements or more; all rounds use them, one after another:
            gradients and weights of pieces to send to owners; the same as received by an owner; full gradients and
            weights of the parameters that this rank owns; new weights to send back; new weights of pieces as received.

    Attributes:
        params: see above.
        sent: for each parameter of which this rank has elements: the parameter, and the buffer views of its gradient,
            weights and new weights, [n] fp32 each.
        arrived: pairs: a part of a full gradient or weight, and the buffer view that has received it.
        wholes: for each parameter that this rank owns: the parameter, the full one that the optimizer steps, its
            gradient and weights, and the tensor that replaces both between steps.
        results: for each part of new weights: the stepped parameter, the buffer view to send, and the part as a slice.
        to_owners, to_pieces: the two exchanges.
    """

    def __init__(self, params: Sequence[WholeParam], ranks: Communicator, buffers: Sequence[torch.Tensor]) -> None:
        everyone = range(ranks.world_size)
        mine = [(each, n) for rank in everyone for each in params if each.owner == rank and (n := _own_numel(each))]
        owned = [(each, each.whole) for each in params if each.whole is not None]
        to_owner = [sum(n for each, n in mine if each.owner == rank) for rank in everyone]
        from_rank = [sum(each.piece.range_of(rank).numel for each, _ in owned) for rank in everyone]
        pieces, arrived, wholes, results, returned = buffers
        self.params = params
        self.to_owners = _exchange(pieces, [2 * n for n in to_owner], arrived, [2 * n for n in from_rank])
        self.to_pieces = _exchange(results, from_rank, returned, to_owner)
        piece, part, whole, result, new = map(_taking, buffers)
        self.sent = [(each, piece(n), piece(n), new(n)) for each, n in mine]
        self.wholes = []
        for each, target in owned:
            grad, weight = (whole(_aligned(target.numel()))[: target.numel()].view(target.shape) for _ in range(2))
            self.wholes.append((each, target, grad, weight, stand_in(target)))
        self.arrived, self.results = [], []
        for rank in everyone:
            for each, target, grad, weight, _ in self.wholes:
                start, stop, _ = each.piece.range_of(rank)
                if start < stop:
                    self.arrived += [(full.view(-1)[start:stop], part(stop - start)) for full in (grad, weight)]
                    self.results.append((target, result(stop - start), slice(start, stop)))


def _taking(buffer: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """A function that returns the next `numel` elements of `buffer` at each call."""
    start = 0

    def take(numel: int) -> torch.Tensor:
        nonlocal start
        start += numel
        return buffer[start - numel : start]

    return take


def _exchange(
    send: torch.Tensor, send_numels: list[int], received: torch.Tensor, received_numels: list[int]
) -> AllToAll:
    return AllToAll(send[: sum(send_numels)], send_numels, received[: sum(received_numels)], received_numels)


def _own_numel(each: WholeParam) -> int:
    return each.piece.stop - each.piece.start


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
