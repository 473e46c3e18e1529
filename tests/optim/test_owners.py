"""Owners of whole parameters: balanced, deterministic, and in rounds of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamshard.optim.rounds import assign_owners, plan_rounds


def _rounds(costs: Sequence[float], numels: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """By round, the indices of its parameters."""
    params: list[Any] = []
    for cost, numel, owner in zip(costs, numels, owners, strict=True):
        params.append(
            SimpleNamespace(cost=cost, owner=owner, piece=SimpleNamespace(place=SimpleNamespace(numel=numel)))
        )
    return [
        [next(k for k, one in enumerate(params) if one is each) for each in own] for own in plan_rounds(params, limit)
    ]


def _forced(costs: Sequence[float], ranks: int) -> float:
    """What some rank has at least: the largest parameter, and two of the first N + 1 share a rank."""
    ordered = sorted(costs, reverse=True)
    return max([*ordered[:1], ordered[ranks - 1] + ordered[ranks] if len(costs) > ranks else 0.0])


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_four_thirds_of_the_least_possible(costs: list[int], ranks: int) -> None:
    """The least possible is at least the mean, and what large parameters force."""
    loads = [0.0] * ranks
    owners = assign_owners(costs, loads)
    assert loads == [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == k) for k in range(ranks)]
    assert owners == assign_owners(list(costs), [0.0] * ranks)
    least = max([sum(costs) / ranks, _forced(costs, ranks)])
    assert max(loads) <= 4 / 3 * least + 1e-9


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=40), st.integers(1, 5), st.integers(1, 80))
def test_no_rank_owns_more_in_a_round_than_fits(sizes: list[tuple[int, int]], ranks: int, limit: int) -> None:
    """Or a single parameter that is larger; each parameter is in one round."""
    costs, numels = [float(cost) for cost, _ in sizes], [numel for _, numel in sizes]
    owners = assign_owners(costs, [0.0] * ranks)
    rounds = _rounds(costs, numels, owners, limit)
    assert sorted(index for each in rounds for index in each) == list(range(len(sizes)))
    assert all(each == sorted(each) and each for each in rounds)
    for each in rounds:
        for rank in range(ranks):
            own = [numels[index] for index in each if owners[index] == rank]
            assert sum(own) <= limit or len(own) == 1


def test_all_ranks_work_in_each_round() -> None:
    """Sixteen equal matrices on four ranks, two to a round."""
    rounds = _rounds([1.0] * 16, [10] * 16, assign_owners([1.0] * 16, [0.0] * 4), 20)
    assert rounds == [list(range(8)), list(range(8, 16))]
