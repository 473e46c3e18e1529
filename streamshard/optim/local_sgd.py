"""Local SGD over replicas: each replica trains on its own for some steps, then their weights are averaged.

The algorithm is that of torch.distributed.optim.PostLocalSGDOptimizer with PeriodicModelAverager and DDP's post-local
SGD hook (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD"). Here an average moves only this rank's shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.errors import ConfigError, RankMismatchError
from streamshard.optim.wrapper import WrappedOptimizer

__all__ = ["LocalSGD"]

_COUNTER = "step"  # in state dicts, as PostLocalSGDOptimizer has it


class LocalSGD(WrappedOptimizer):
    """An optimizer that lets the replicas of a 2-D mesh drift apart, and averages their weights every `period` steps.

    In the first `warmup_steps` steps gradients are averaged over replicas, as without LocalSGD. From then on gradients
    are reduced within each shard group only. Weights are averaged after the first step without averaged gradients, and
    after every `period` steps from there.

    Every rank makes the optimizer at the same time, and steps equally often. The state dict has the step counter under
    PostLocalSGDOptimizer's name, ``"step"``. Between averages replicas differ: exports and `full_state_dict` hold the
    first replica's weights.

    Args:
        optimizer: of the model's parameters or some of them.
        model: made by `StreamShard` on a 2-D mesh, replicate x shard.
        period: steps from one average to the next, at least 1.
        warmup_steps: steps before replicas train on their own.

    Attributes:
        step_count: number of steps so far.

    Raises:
        ConfigError: a number that cannot work, a mesh without replicas, or another `warmup_steps` than that of another
            optimizer of the same model.
        RankMismatchError: other numbers on another rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        period: int,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(optimizer, model)
        for name, value, least in (("period", period, 1), ("warmup_steps", warmup_steps, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r}: wanted an integer of at least {least}")
        replicas = self.engine.reductions.replicas
        if replicas is None:
            raise ConfigError(
                "LocalSGD averages over replicas, this model has one: shard it with a 2-D mesh, replicate x shard, "
                "such as mesh=init_device_mesh(device_type, (replicas, ranks in each))"
            )
        heard = self.engine.ranks.gather_objects((period, warmup_steps))
        for rank, theirs in enumerate(heard):
            if theirs != heard[0]:
                raise RankMismatchError(
                    f"LocalSGD: (period, warmup_steps) are {heard[0]} on rank 0, {theirs} on rank {rank}"
                )
        self.replicas = replicas
        self.replicas.agree_on_warmup(warmup_steps)
        self.period = period
        self.warmup_steps = warmup_steps
        self._count(0)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step, then the average if one is due: a collective for each unit."""
        result = super().step(*args, **kwargs)
        since = self.step_count - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            self.replicas.average(self._pieces())
        self._count(self.step_count + 1)
        return result

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the counter."""
        return {**super().state_dict(), _COUNTER: self.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State of this class, or of PostLocalSGDOptimizer. Without a counter the warm-up begins anew, with a warning.

        Args:
            state_dict: this rank's; a whole one is loaded by `streamshard.load_optimizer_state_dict`.
        """
        inner = dict(state_dict)
        count = inner.pop(_COUNTER, None)
        super().load_state_dict(inner)
        if count is None:
            warnings.warn("the state dict has no step counter of local SGD: the warm-up begins anew", stacklevel=2)
        self._count(count or 0)

    def _count(self, count: int) -> None:
        self.step_count = count
        self.replicas.averages_grads = count < self.warmup_steps

    def _pieces(self) -> Iterator[list[torch.Tensor]]:
        """The pieces to average, by unit: of parameters that have a gradient, as in PeriodicModelAverager."""
        ours = {param for group in self.param_groups for param in group["params"] if param.grad is not None}
        for unit in self.engine.units:
            yield [shard.main for shard in unit.params if shard.param in ours]
