"""Which rank steps which full parameter, and the all-to-alls of a step: from pieces to owners and back, in rounds.

    pieces of gradients and weights -all-to-all-> full on the owner -step-> new weights -all-to-all-> pieces

`assign_owners` balances the cost of a step over ranks. `plan_rounds` bounds the memory of a round. All ranks compute
the same. See [Note: rounds].

[Note: rounds]
The compute stream packs the pieces of a round, the comm stream exchanges them, and the compute stream lays them out as
full parameters and steps these. Then the comm stream exchanges the new weights, and the compute stream copies them to
the pieces. So while the owners step round k, round k + 1 travels to its owners and round k - 1 back. Fences: rule 5
before each exchange (the sent tensor is written), rule 7 behind it (the received tensor is complete). An owner sends
its own pieces to itself too.

The plan alone decides the lengths of messages, whichever parameters have a gradient. If ranks disagree about a
gradient, CPU ranks raise before they step. On a device no host waits for the news of other ranks: the parameter becomes
NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Fence, Rule, StreamName
from streamshard.comm.transport import AllToAll
from streamshard.errors import RankMismatchError
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_parameter import data_of


@dataclass(frozen=True, eq=False)
class WholeParam:
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


class Round:
    """Parameters that travel together, and their exchanges on this rank.

    In a message each gradient lies before its weights.

    Args:
        params: of all owners, at least one.
        ranks: the shard group.

    Attributes:
        pieces: the parameters, those of the first owner first.
    """

    def __init__(self, params: Sequence[WholeParam], ranks: Communicator) -> None:
        everyone = range(ranks.world_size)
        self._ranks = ranks
        self.pieces = [each for rank in everyone for each in params if each.owner == rank]
        self._to_owners = [sum(_own_numel(each) for each in params if each.owner == rank) for rank in everyone]
        self._owned = [(each, each.whole) for each in params if each.whole is not None]
        # By rank, its elements of each parameter that this rank owns.
        self._ranges = [[each.piece.range_of(rank) for each, _ in self._owned] for rank in everyone]
        self._from_ranks = [sum(each.numel for each in ranges) for ranges in self._ranges]
        self._stepped: list[WholeParam] = []  # they had a gradient in `send`

    def send(self) -> None:
        """Send this rank's pieces to their owners."""
        self._stepped = [each for each in self.pieces if each.param.grad is not None]
        pieces = []
        for each in self.pieces:
            weight, grad = _flat_data(each), each.param.grad
            sent = torch.full_like(weight, math.nan) if grad is None else grad.as_subclass(torch.Tensor).view(-1)
            pieces += [sent, weight]
        twice = ([2 * numel for numel in numels] for numels in (self._to_owners, self._from_ranks))
        self._start("pieces for owners", pieces, *twice)

    def lay_out(self) -> None:
        """Give the parameters that this rank owns their full gradients and weights."""
        parts = self._receive([each.numel for ranges in self._ranges for each in ranges for _ in ("grad", "weight")])
        stride = 2 * len(self._owned)
        for index, (each, whole) in enumerate(self._owned):
            grad, weight = (torch.cat(parts[2 * index + k :: stride]).view(whole.shape) for k in range(2))
            has_grad = each.param.grad is not None
            # Without a gradient here no rank has sent any.
            whole.data = weight if has_grad else weight.where(grad.isnan().all(), math.nan)
            whole.grad = grad if has_grad else None

    def send_back(self) -> None:
        """Send the new weights of the parameters that this rank owns."""
        results = [data_of(whole).reshape(-1) for _, whole in self._owned]
        pieces = [full[own.start : own.stop] for each in self._ranges for full, own in zip(results, each, strict=True)]
        self._start("new weights of owners", pieces, self._from_ranks, self._to_owners)
        for each, whole in self._owned:
            whole.data, whole.grad = stand_in(each.param), None

    def finish(self) -> None:
        """Copy the new weights into this rank's pieces."""
        new = dict(zip(self.pieces, self._receive([_own_numel(each) for each in self.pieces]), strict=True))
        if self._stepped:
            torch._foreach_copy_([_flat_data(each) for each in self._stepped], [new[each] for each in self._stepped])
        # On all ranks, also without elements: so a backward of an earlier forward raises everywhere.
        torch.autograd.graph.increment_version([each.param for each in self._stepped])

    def _start(self, what: str, pieces: list[torch.Tensor], send: list[int], received: list[int]) -> None:
        nothing = torch.empty(0, dtype=torch.float32, device=self._ranks.streams.device)
        sent = torch.cat([nothing, *pieces])  # this rank may own none
        self._exchange = AllToAll(sent, send, sent.new_empty(sum(received)), received)
        streams, comm = self._ranks.streams, self._ranks.stream
        packed = Fence(streams, Rule.SHARDS_WRITTEN, StreamName.COMPUTE, what, comm)
        packed.record()
        packed.wait()  # rule 5
        self._arrived = Fence(streams, Rule.RESULTS_ARRIVED, comm, f"{what}, received")
        self._arrived.record(self._ranks.transport.start_all_to_all(self._exchange))

    def _receive(self, numels: list[int]) -> tuple[torch.Tensor, ...]:
        self._arrived.wait()  # rule 7
        parts: tuple[torch.Tensor, ...] = self._exchange.received.split(numels)
        del self._exchange  # the allocator may give the sent tensor's memory to the next round
        return parts


def run_rounds(rounds: Sequence[Round], steps: Sequence[Callable[[], None]], ranks: Communicator) -> None:
    """One step of all rounds, inside ``torch.no_grad()``.

    Args:
        rounds: at least one.
        steps: functions that do not raise. The first one runs while the first round travels. Then comes one for each
            round: it steps this rank's parameters of the round, when their weights and gradients are there.
        ranks: the shard group.

    Raises:
        RankMismatchError: on CPUs: ranks disagree about a gradient. Nothing was stepped.
    """
    ranks.refuse_in_hook()
    if not ranks.streams.has_streams:
        _refuse_different_grads([each for own in rounds for each in own.pieces], ranks)
    with ranks.waiting("an exchange of parameters with their owners"):
        rounds[0].send()
        steps[0]()
        for number, (own, step) in enumerate(zip(rounds, steps[1:], strict=True)):
            own.lay_out()
            if number + 1 < len(rounds):  # the next round travels while this one is stepped
                rounds[number + 1].send()
            step()
            if number:
                rounds[number - 1].finish()
            own.send_back()
        rounds[-1].finish()


def _refuse_different_grads(pieces: Sequence[WholeParam], ranks: Communicator) -> None:
    had = [each.param.grad is not None for each in pieces]
    by_rank = ranks.gather_objects("compare gradients", had, with_replicas=False)
    for each, *found in zip(pieces, *by_rank, strict=True):
        if len(set(found)) > 1:
            having = [rank for rank, has_grad in enumerate(found) if has_grad]
            raise RankMismatchError(
                f"parameter {each.piece.name!r} had a gradient on ranks {having} only: nothing was stepped. Set grad = "
                "None on all ranks or on none"
            )


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape, dtype and device of `param` that takes no memory."""
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


def _own_numel(each: WholeParam) -> int:
    return each.piece.stop - each.piece.start


def _flat_data(each: WholeParam) -> torch.Tensor:
    return data_of(each.param).view(-1)
