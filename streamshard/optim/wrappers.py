"""`DistributedOptimizer` and `LocalSGD`: they add to the step of another optimizer, and forward everything else.

Learning-rate schedulers, `torch.amp.GradScaler`, accelerate and this package's functions for optimizer state take a
wrapper for an ordinary optimizer. A wrapper looks up param groups and state of the inner optimizer each time, because
an optimizer's ``load_state_dict`` replaces these objects.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.ranks import raise_if
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of
from streamshard.device import on_device
from streamshard.errors import ConfigError, OptimizerError, ShardingError

_INNER_NAMES = ("param_groups", "state", "defaults")  # what other code assigns to an optimizer as well
_LOCK = "_streamshard_step_lock"  # in the model's __dict__: all its DistributedOptimizers share it
_COUNTER = "step"  # in state dicts, as PostLocalSGDOptimizer has it


class WrappedOptimizer(Optimizer):
    """Base of optimizers that wrap another optimizer's step.

    Here ``step`` is the inner optimizer's; a subclass overrides it, and any other method that it changes. Hooks that
    are registered on the wrapper belong to the inner optimizer: they run within its step and get it as argument.

    Args:
        optimizer: of the model's parameters or some of them.
        model: made by `StreamShard`.

    Attributes:
        optimizer: the inner optimizer.
        engine: the model's.

    Raises:
        ConfigError: `optimizer` is not an optimizer, or has no parameter of the model.
        ShardingError: `model` is not sharded.
    """

    # A fused optimizer would unscale gradients and skip overflows inside its step, told how by attributes that
    # GradScaler sets on what it is given. Without this it unscales them itself and calls step() only if all is well.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        # Not super().__init__(): it would make param groups, state and hooks of the wrapper's own.
        self.engine = engine_of_both(optimizer, model)
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        """Get other attributes from the inner optimizer: param groups, state, defaults, hooks, methods."""
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set param groups, state and defaults on the inner optimizer; ``step`` (schedulers wrap it) on the wrapper."""
        if name in _INNER_NAMES:
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getstate__(self) -> NoReturn:
        # Called by copy and pickle.
        raise ShardingError(
            f"{type(self).__name__} cannot be copied or pickled, its model is sharded: save "
            "streamshard.full_optimizer_state_dict(model, optimizer)"
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step, with its arguments and result."""
        return self.optimizer.step(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See the inner optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """See the inner optimizer: this rank's pieces. Full state: `streamshard.full_optimizer_state_dict`."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See the inner optimizer. `streamshard.load_optimizer_state_dict` loads full state from rank 0."""
        self.optimizer.load_state_dict(state_dict)


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer whose step returns when all ranks have stepped, and raises on all ranks if it fails on one.

    torch.distributed.optim.DistributedOptimizer does this over RPC. Here each rank already owns its shard and has an
    optimizer for it, so ranks only exchange whether their steps succeeded.

    Any number of threads may call ``step``, of one or several DistributedOptimizers of a model: on each rank one steps
    at a time. The n-th step of one rank waits for the n-th step of the others, in any thread. So every rank needs the
    same number of steps, but threads may step in any order. The caller has to take care of three things:

    - No forward or backward may run meanwhile, in any thread: gradients would change under a step, and ranks would
      issue collectives in different orders.
    - A closure that runs the model, or a hook that takes a norm of gradients, issues collectives inside a step. Then
      threads must step in the same order on all ranks. If such a collective fails on one rank alone, the others wait
      until the process group's timeout, as outside of a step.
    - On CUDA a thread steps on its own current stream, which is the default one unless it sets another.

    Args:
        optimizer: of the model's parameters or some of them, on every rank.
        model: made by `StreamShard`.

    Attributes:
        lock: held by the thread that steps. All DistributedOptimizers of a model share it.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        if isinstance(optimizer, LocalSGD):
            raise ConfigError(
                "DistributedOptimizer around LocalSGD: where a step fails on one rank the others would wait for its "
                "part of an average. Put it inside: LocalSGD(DistributedOptimizer(optimizer, model), model, ...)"
            )
        self.lock: threading.RLock = model.__dict__.setdefault(_LOCK, threading.RLock())

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on this rank, then wait for the other ranks' hosts (one vote). No device waits.

        Args:
            *args, **kwargs: the inner optimizer's. It calls a closure with gradients enabled, any number of times: once
                for torch.optim's optimizers, except LBFGS, which needs full parameters.

        Returns:
            What the inner optimizer's step returns: the closure's loss on this rank, else None.

        Raises:
            OptimizerError: the step raised on some rank. That rank chains the original exception. The other ranks have
                stepped. You can continue with these weights, or load a checkpoint.
            CommunicationError: a rank has died, or did not step.
        """
        ranks = self.engine.ranks
        with self.lock, on_device(self.engine.streams.device):
            result, error = None, None
            try:
                result = super().step(*args, **kwargs)
            except Exception as raised:
                if ranks.failure is not None:  # the others cannot be told
                    raise
                error = raised
            if ranks.any_rank(error is not None):
                ranks.gather_results("step the optimizer", lambda: raise_if(error), OptimizerError)
            return result


class LocalSGD(WrappedOptimizer):
    """An optimizer that lets the replicas of a 2-D mesh drift apart, and averages their weights every `period` steps.

    The algorithm is that of torch.distributed.optim.PostLocalSGDOptimizer with PeriodicModelAverager and DDP's
    post-local SGD hook (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD"). Here an average moves only this
    rank's shard.

    In the first `warmup_steps` steps gradients are averaged over replicas, as without LocalSGD. Later steps reduce
    gradients within each shard group only. Weights are averaged after the first such step, and then after every
    `period` steps.

    Every rank makes the optimizer at the same time, and takes the same number of steps. The state dict has the step
    counter under PostLocalSGDOptimizer's name, ``"step"``. Between averages replicas differ: exports and
    `full_state_dict` hold the first replica's weights.

    Args:
        optimizer: of the model's parameters or some of them.
        model: made by `StreamShard` on a 2-D mesh, replicate x shard.
        period: steps from one average to the next, at least 1.
        warmup_steps: steps before replicas train on their own.

    Attributes:
        step_count: number of steps so far.

    Raises:
        ConfigError: `period` is below 1, the mesh has no replicas, or another optimizer of the same model has other
            `warmup_steps`.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, period: int, warmup_steps: int = 0) -> None:
        super().__init__(optimizer, model)
        if period < 1:
            raise ConfigError(f"period={period}: wanted at least 1")
        replicas = self.engine.reductions.replicas
        if replicas is None:
            raise ConfigError(
                "LocalSGD averages over replicas, this model has one: shard it with a 2-D mesh, replicate x shard, "
                "such as mesh=init_device_mesh(device_type, (replicas, ranks in each))"
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
        """The inner optimizer's state, and the step counter."""
        return {**super().state_dict(), _COUNTER: self.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of this class or of PostLocalSGDOptimizer. Without a counter, warns and restarts the warm-up.

        Args:
            state_dict: this rank's state. For full state use `streamshard.load_optimizer_state_dict`.
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
        """By unit, the pieces to average: those of parameters with a gradient, as in PeriodicModelAverager."""
        ours = {param for group in self.param_groups for param in group["params"] if param.grad is not None}
        for unit in self.engine.units:
            yield [shard.main for shard in unit.params if shard.param in ours]


def engine_of_both(optimizer: object, model: nn.Module) -> Engine:
    """The engine of `model`. Checks that `optimizer` has at least one of its parameters.

    Raises:
        ConfigError: `optimizer` is not an optimizer, or has none of the model's parameters.
        ShardingError: `model` is not sharded.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: wanted a torch.optim.Optimizer")
    engine = engine_of(model)
    ours = {shard.param for shard in engine.param_shards}
    if ours.isdisjoint(param for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} has no parameter of this model: was it made of another model's parameters?"
        )
    return engine
