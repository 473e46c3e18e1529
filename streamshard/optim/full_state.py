"""An optimizer's full state, as for the unsharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.optimizer_state import gather_state, scatter_state
from streamshard.core.engine import Engine
from streamshard.core.optimizer_kinds import params_in
from streamshard.errors import ConfigError
from streamshard.guards.sharded_tensor import piece_of
from streamshard.optim.wrappers import engine_of_both


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, rank0_only: bool = True) -> dict[str, Any]:
    """The full state of `optimizer`, as for the unsharded model, in CPU memory. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: an optimizer of the model's parameters, or some of them: elementwise, or a `WholeParameterOptimizer`.
        rank0_only: other ranks get an empty dict.

    Returns:
        The format of ``Optimizer.state_dict()``, which plain torch and ZeroRedundancyOptimizer load:
        ``{"state": {number: {name: value}}, "param_groups": [..]}``.

    Raises:
        ConfigError, ShardingError, RankMismatchError: on every rank; names the state that cannot be combined.
    """
    return gather_state(_engine_of_all(optimizer, model), optimizer, rank0_only)


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Load a full optimizer state, made on any number of ranks or without sharding. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: has the class of the optimizer that the state is from, and the same parameters in the same order.
        state_dict: from `full_optimizer_state_dict`, plain torch, or ZeroRedundancyOptimizer after
            ``consolidate_state_dict``. Rank 0's counts; other ranks may pass None.

    Raises:
        ConfigError, ShardingError: on every rank, before anything is changed; names the first parameter that is wrong.
    """
    scatter_state(_engine_of_all(optimizer, model), optimizer, state_dict)


def _engine_of_all(optimizer: Optimizer, model: nn.Module) -> Engine:
    """The engine of `model`. Raises if `optimizer` has none of its parameters, or a piece of another model's."""
    engine = engine_of_both(optimizer, model)
    ours = {param.sharded for param in engine.params}
    for piece in (piece_of(param) for param in params_in(optimizer.param_groups) if param not in ours):
        if piece is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} steps {piece.name!r} of another sharded model too: make one optimizer for "
                'each model, or call save_checkpoint(directory, {"a": a, "b": b}, optimizer) and load_checkpoint'
            )
    return engine
