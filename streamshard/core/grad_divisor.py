"""The number by which reductions divide the sum of all ranks' gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from streamshard.comm.communicator import Communicator
from streamshard.core.unit import Unit
from streamshard.errors import ConfigError, RankMismatchError


class GradDivisor:
    """Sets `Communicator.grad_divisor` of the shard group, and of the ranks with the same experts.

    Args:
        units: all units.
        ranks: the shard group.
        n_averaged: the replicas, which average their quotients; 1 if there are none, or if all ranks add at once.
    """

    def __init__(self, units: Sequence[Unit], ranks: Communicator, n_averaged: int) -> None:
        self._units, self._ranks, self._n_averaged = units, ranks, n_averaged

    def choose(self, factor: float) -> None:
        """Divide sums over all ranks, replicas included, by `factor` from now on. Collective.

        Raises:
            ConfigError: on all ranks: `factor` is no positive, finite number, or parameters have gradients.
            RankMismatchError: ranks have given different factors.
        """
        ranks = self._ranks

        def check() -> float:
            if not isinstance(factor, int | float) or not 0.0 < factor < math.inf:
                raise ConfigError(f"factor={factor!r}: wanted a positive, finite number, such as 1.0 for sums")
            held = [param.name for unit in self._units for param in unit.params if param.sharded.grad is not None]
            # The same factor again is no change: gradients may be there.
            if held and factor / self._n_averaged != ranks.grad_divisor:
                raise ConfigError(
                    f"parameter {held[0]!r} has a gradient, which was divided by another factor: call it before "
                    "the first backward of a step, after zero_grad() with set_to_none=True"
                )
            return factor

        # Checked in the exchange: if one rank refuses, no rank changes its divisor.
        factors = set(ranks.gather_results("set the gradient divide factor", check, ConfigError))
        if len(factors) > 1:
            raise RankMismatchError(
                f"set_gradient_divide_factor: ranks have given {sorted(factors)}. Give one factor on all ranks, such "
                "as the number of tokens of all ranks together"
            )
        self.set(factors.pop() / self._n_averaged)

    def set(self, divisor: float) -> None:
        """Divide sums over the shard group by `divisor` from now on."""
        self._ranks.grad_divisor = divisor
        for flat in (flat for unit in self._units for flat in unit.flat_params if flat.ranks is not self._ranks):
            # Of experts: for sums in a loss.
            # `global_sum` multiplies it by their `n_parts`: the product is the one that all other parameters have.
            flat.ranks.grad_divisor = divisor * self._ranks.n_parts / flat.ranks.n_parts

    def scale_unreduced(self, factor: float) -> None:
        """Multiply gradients that wait for a later reduction in their slots. No backward runs."""
        # The divisor of the later reduction divides these too: `factor` corrects what it would do to them.
        waiting = [unit for unit in self._units if factor != 1.0 and unit.grads.slot.content == unit.index]
        with torch.no_grad():
            for grads in (flat.grads for unit in waiting for flat in unit.trained):
                grads.mul_(factor)

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Sums over the shard group are not divided inside, on any rank: for backwards whose losses are."""
        before = self._ranks.grad_divisor
        self.set(1.0)
        try:
            yield
        finally:
            self.set(before)
