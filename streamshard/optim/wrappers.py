"""`DistributedOptimizer` and `LocalSGD`: each wraps another optimizer, the inner optimizer, and adds to its step.

Learning-rate schedulers, `torch.amp.GradScaler`, accelerate and StreamShard's functions for optimizer state treat a
wrapper as an ordinary optimizer. A wrapper looks up the inner optimizer's param groups and state each time, because
``load_state_dict`` replaces these objects.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.ranks import raise_if
from streamshard.core.module_state import engine_of_both
from streamshard.core.optimizer_kinds import params_in
from streamshard.device import on_device
from streamshard.errors import ConfigError, OptimizerError, ShardingError
from streamshard.planning.structure import replacing

_INNER_NAMES = ("param_groups", "state", "defaults")  # schedulers and loaders assign these attributes too
_LOCK = "_streamshard_step_lock"  # key in the model's __dict__: all DistributedOptimizers of a model share the lock
_COUNTER = "step"  # key in state dicts, the same as PostLocalSGDOptimizer's


class WrappedOptimizer(Optimizer):
    """Base of the wrappers: calls the inner optimizer's methods. A subclass overrides the methods that it changes.

    Hooks that you register on the wrapper are hooks of the inner optimizer: they run in its step, and get it as
    argument.

    Args:
        optimizer: the inner optimizer, of some or all parameters of the model.
        model: made by `StreamShard`.

    Attributes:
        optimizer: the inner optimizer.
        engine: the model's engine.

    Raises:
        ConfigError: `optimizer` is not an optimizer, or has no parameter of the model.
        ShardingError: `model` is not sharded.
    """

    # GradScaler would set attributes on the wrapper, by which a fused inner optimizer unscales gradients in its step.
    # With False, GradScaler unscales gradients itself, and skips step() if a gradient has overflowed.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        # No super().__init__(): it would give the wrapper its own param groups, state and hooks.
        self.engine = engine_of_both(optimizer, model)
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        """Get any other attribute from the inner optimizer: param groups, state, defaults, hooks, methods."""
        if name == "optimizer":  # in the constructor: there is no inner optimizer yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set param groups, state and defaults on the inner optimizer; all others, such as ``step``, on the wrapper."""
        if name in _INNER_NAMES:
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getstate__(self) -> NoReturn:
        # copy and pickle call this method.
        advice = "save streamshard.full_optimizer_state_dict(model, optimizer)"
        raise ShardingError(f"{type(self).__name__} cannot be copied or pickled, its model is sharded: {advice}")

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
    """An optimizer whose step ends when all ranks have stepped. If a step fails on one rank, all ranks raise.

    torch.distributed.optim.DistributedOptimizer does this over RPC. Here each rank has an optimizer for its own shard,
    so ranks only exchange whether their steps succeeded.

    Several threads may call ``step``, also of several DistributedOptimizers of one model. On each rank one thread steps
    at a time. Each rank's n-th step waits for the n-th step of all other ranks, whichever threads call them. So all
    ranks need the same number of steps, and threads may step in any order. The caller takes care of three things:

    - No forward or backward runs during a step, in any thread. Otherwise gradients would change under the step, and
      ranks would issue collectives in different orders.
    - A closure that runs the model, or a hook that takes a norm of gradients, issues collectives inside a step. Then
      threads step in the same order on all ranks. If such a collective fails on one rank alone, the other ranks wait
      until the process group's timeout, as outside of a step.
    - On CUDA a thread steps on its own current stream: the default stream, unless the thread sets another one.

    Args:
        optimizer: the inner optimizer, of some or all parameters of the model, on every rank.
        model: made by `StreamShard`.

    Attributes:
        lock: the thread that steps holds it. All DistributedOptimizers of a model share it.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer, model)
        if isinstance(optimizer, LocalSGD):
            # If a step failed on one rank, other ranks would wait in an average.
            advice = "Put it inside: LocalSGD(DistributedOptimizer(optimizer, model), model, ...)"
            raise ConfigError(f"DistributedOptimizer around LocalSGD cannot tell all ranks of an error. {advice}")
        self.lock: threading.RLock = model.__dict__.setdefault(_LOCK, threading.RLock())

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step on this rank, then wait until all ranks have stepped. Hosts wait for each other; no device waits.

        Args:
            *args, **kwargs: of the inner optimizer's step.

        Returns:
            What the inner optimizer's step returns: the closure's loss on this rank, or None.

        Raises:
            OptimizerError: the step raised on some rank. That rank chains its own exception. The other ranks have
                stepped. You can continue with these weights, or load a checkpoint.
            CommunicationError: a rank has died, or did not step.
        """
        ranks = self.engine.ranks
        # Each thread has a current device of its own, at first device 0.
        with self.lock, on_device(self.engine.streams.device):
            result, error = None, None
            try:
                result = super().step(*args, **kwargs)
            except Exception as raised:
                if ranks.failure is not None:  # this rank cannot tell other ranks
                    raise
                error = raised
            self.engine.progress.has_stepped = True  # on ranks with an error too: all are told
            ranks.gather_results("step the optimizer", lambda: raise_if(error), OptimizerError)
            return result


class LocalSGD(WrappedOptimizer):
    """An optimizer that lets the replicas of a 2-D mesh drift apart, and averages their weights every `period` steps.

    The algorithm is torch.distributed.optim.PostLocalSGDOptimizer's, with PeriodicModelAverager and DDP's post-local
    SGD hook (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD"). Each rank averages only its shard.

    The first `warmup_steps` steps average gradients over replicas, as without LocalSGD. Later steps reduce gradients
    within each shard group only. The first of these later steps averages weights, and then every `period`-th step.

    All ranks make the optimizer at the same time, and take the same number of steps. After the warm-up a step of any
    other optimizer raises, because replicas would drift apart for good. To average gradients for n steps again, delete
    this optimizer right after an average, and make another one with ``warmup_steps=n``.

    The state dict has the step counter under PostLocalSGDOptimizer's name, ``"step"``. Between averages replicas
    differ: exports and `full_state_dict` hold the first replica's weights.

    Args:
        optimizer: the inner optimizer, of some or all parameters of the model.
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
            mesh = "mesh=init_device_mesh(device_type, (replicas, ranks in each))"
            raise ConfigError(
                f"LocalSGD averages over replicas, this model has one: shard it with a 2-D mesh, {mesh}, "
                "and without shard_over_replicas and sums_in_rank_order"
            )
        self.replicas = replicas
        for other in replicas.optimizers:
            if other.warmup_steps != warmup_steps:
                raise ConfigError(
                    f"warmup_steps={warmup_steps}: another optimizer of this model has {other.warmup_steps}, and "
                    "gradients of one backward are averaged over replicas or not"
                )
        replicas.optimizers.add(self)
        self.period = period
        self.warmup_steps = warmup_steps
        self._count(0)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step, then an average if one is due: a collective for each unit."""
        with replacing((vars(self.engine.progress), "is_local", False)):  # it refuses all other optimizers' steps
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
            self.engine.warn_once("the state dict has no step counter of local SGD: the warm-up begins anew")
        self._count(count or 0)

    def _count(self, count: int) -> None:
        self.step_count = count
        self.replicas.averages_grads = count < self.warmup_steps
        self.engine.progress.is_local = not self.replicas.averages_grads

    def _pieces(self) -> Iterator[list[torch.Tensor]]:
        """By unit, the pieces to average: of parameters with a gradient, as PeriodicModelAverager does."""
        ours = {param for param in params_in(self.param_groups) if param.grad is not None}
        for unit in self.engine.units:
            yield [param.main for param in unit.params if param.sharded in ours]
