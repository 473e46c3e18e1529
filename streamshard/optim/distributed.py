"""`DistributedOptimizer`: steps of several threads run one at a time, and an error on one rank is raised on all.

torch.distributed.optim.DistributedOptimizer does this over RPC. Here each rank already owns its shard and has an
optimizer for it, so ranks only exchange whether the step has worked.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from streamshard.comm.objects import raise_if
from streamshard.device import on_device
from streamshard.errors import ConfigError, OptimizerError
from streamshard.optim.local_sgd import LocalSGD
from streamshard.optim.wrapper import WrappedOptimizer

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer whose step is over when it is over on all ranks, and fails on all if it fails on one.

    Any number of threads may call ``step``, of one or several DistributedOptimizers of a model: on each rank one steps
    at a time. The n-th step of one rank meets the n-th of the others, whichever threads they are in, so threads need no
    common order, only the same number of steps on every rank. Three things remain to the caller:

    - No forward or backward may run meanwhile, in any thread: gradients would change under a step, and ranks would
      issue collectives in different orders.
    - A closure that runs the model, or a hook that takes a norm of gradients, issues collectives inside a step. Then
      threads must step in the same order on all ranks, and what fails there on one rank alone leaves the others waiting
      until the process group's timeout, as it does outside of a step.
    - On CUDA a thread steps on its own current stream, which is the default one unless it sets another.

    Args:
        optimizer: of the model's parameters or some of them, on every rank.
        model: made by `StreamShard`.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        if isinstance(optimizer, LocalSGD):
            raise ConfigError(
                "DistributedOptimizer around LocalSGD: where a step fails on one rank the others would wait for its "
                "part of an average. Put it inside: LocalSGD(DistributedOptimizer(optimizer, model), model, ...)"
            )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on this rank and wait for the others: one vote of the hosts, for which no device waits.

        Args:
            *args, **kwargs: the inner optimizer's. A closure is called by it, as often as it likes (once for all
                optimizers of torch.optim but LBFGS, which needs whole parameters), with gradients enabled.

        Returns:
            What the inner optimizer's step returns: the closure's loss on this rank, else None.

        Raises:
            OptimizerError: the step raised on some rank; on that rank, from what it raised. Ranks where it did not have
                stepped. The model can be used: with their new weights, or after loading others.
            CommunicationError: a rank has died, or did not step.
        """
        ranks = self.engine.ranks
        with self.engine.step_lock, on_device(self.engine.streams.device):
            result, error = None, None
            try:
                result = super().step(*args, **kwargs)
            except Exception as raised:
                if ranks.has_failed:  # the others cannot be told
                    raise
                error = raised
            if ranks.any_rank(error is not None):
                ranks.gather_results("step the optimizer", lambda: raise_if(error), OptimizerError)
            return result
