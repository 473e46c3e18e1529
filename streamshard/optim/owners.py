"""Which rank steps which full parameter, and in which round. Pure functions: every rank computes the same answer.

No torch here. `assign_owners` balances the cost of a step over ranks. `plan_rounds` bounds the memory of a round.
"""

from __future__ import annotations

from collections.abc import Sequence


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


def plan_rounds(
    costs: Sequence[float], numels: Sequence[int], owners: Sequence[int], round_numel: int
) -> list[list[int]]:
    """Put parameters into rounds, so that no rank owns more than `round_numel` elements in one.

    A larger parameter is the only one of its owner in its round. Rounds are filled in the order in which
    `assign_owners` assigned parameters, so in each round all ranks have about the same load.

    Args:
        costs, owners: as in `assign_owners`.
        numels: elements of each parameter.
        round_numel: the largest number of elements that a rank owns in one round; at least 1.

    Returns:
        By round, the indices of its parameters, ascending.
    """
    rounds: list[list[int]] = []
    owned: dict[tuple[int, int], int] = {}  # elements, by round and rank
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank, numel = owners[index], numels[index]
        place = 0
        while owned.get((place, rank), 0) + numel > max(round_numel, numel):
            place += 1
        if place == len(rounds):
            rounds.append([])
        rounds[place].append(index)
        owned[place, rank] = owned.get((place, rank), 0) + numel
    return [sorted(each) for each in rounds]
