"""Instruments for a sharded model: memory, races, traces."""

from __future__ import annotations

from torch import nn

from streamshard.engine.engine import Engine
from streamshard.errors import ShardingError

__all__ = ["engine_inside"]


def engine_inside(model: nn.Module) -> Engine:
    """The engine of a sharded model, as `streamshard.build.engine_of` gives it to the layers above this one.

    Raises:
        ShardingError: `model` was not sharded by StreamShard.
    """
    engine = getattr(model.__dict__.get("_streamshard"), "engine", None)
    if not isinstance(engine, Engine):
        raise ShardingError(f"{type(model).__name__} is not sharded: call StreamShard(model) first")
    return engine
