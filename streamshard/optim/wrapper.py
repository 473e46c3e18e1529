"""`WrappedOptimizer`: the base of optimizers that add to the step of another one, and forward everything else.

Learning-rate schedulers, `torch.amp.GradScaler`, accelerate and this package's functions for optimizer state take the
wrapper for an ordinary optimizer. The wrapper looks up param groups and state of the inner optimizer each time, because
an optimizer's ``load_state_dict`` replaces these objects.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from streamshard.engine.engine import Engine
from streamshard.engine.module_state import engine_of
from streamshard.errors import ConfigError, ShardingError

__all__ = ["WrappedOptimizer", "engine_of_both"]

_INNER_NAMES = ("param_groups", "state", "defaults")  # what other code assigns to an optimizer as well


class WrappedOptimizer(Optimizer):
    """Base of optimizers that do something around the step of another one.

    A subclass overrides ``step``, which here is the inner optimizer's, and whatever else it changes. Hooks registered
    on the wrapper are the inner optimizer's: they run within its step and are given it.

    Args:
        optimizer: of the model's parameters or some of them.
        model: made by `StreamShard`.

    Attributes:
        optimizer: the inner one.
        engine: the model's.

    Raises:
        ConfigError: `optimizer` is none, or has no parameter of the model.
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
        """Whatever the wrapper does not have: param groups, state, defaults, hooks, an optimizer's own methods."""
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Param groups, state and defaults are the inner optimizer's, ``step`` (schedulers wrap it) the wrapper's."""
        if name in _INNER_NAMES:
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optimizer!r}"

    def __getstate__(self) -> NoReturn:
        # Called by copy and pickle.
        raise ShardingError(
            f"{type(self).__name__} cannot be copied or pickled, its model is sharded: save "
            "streamshard.full_optimizer_state_dict(model, optimizer)"
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step; arguments and result are its."""
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


def engine_of_both(optimizer: object, model: nn.Module) -> Engine:
    """The engine of `model`, of whose parameters `optimizer` has at least one.

    Raises:
        ConfigError: `optimizer` is something else, or has other parameters.
        ShardingError: `model` is not sharded.
    """
    if not isinstance(optimizer, Optimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        what = "the class" if isinstance(optimizer, type) else "a"
        raise ConfigError(f"optimizer is {what} {name}: wanted a torch.optim.Optimizer that has been made")
    engine = engine_of(model)
    ours = {shard.param for shard in engine.param_shards}
    if ours.isdisjoint(param for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} has no parameter of this model: was it made of another model's parameters?"
        )
    return engine
