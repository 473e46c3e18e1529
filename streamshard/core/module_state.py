"""From a module of a sharded model to its engine, and checks that no step is under way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.core.engine import Engine
from streamshard.core.tied import TiedHead
from streamshard.core.unit import Unit
from streamshard.errors import ConfigError, ShardingError
from streamshard.guards.loop import Members
from streamshard.guards.modules import HANDLE, ShardedModule


class Handle(NamedTuple):
    """The attribute that StreamShard sets on a watched module.

    Attributes:
        engine: the model's.
        unit: the unit whose layer the module is. None for a wrapper module: it has units inside or root parameters.
        units: indices of the units inside the module, its own included.
        cast_dtype: floating-point inputs are cast to it; None leaves them as they are.
        output_dtype: floating-point outputs are cast to it; None leaves them as they are.
        looks_up: the module, or a module in its layer, is an embedding.
        may_save_weights: backward may need weights of the unit. Not those of a plain ``nn.Embedding``.
        tied: its weight is an embedding's too; None: it is not.
        is_root: the module is the whole model.
        members: the model's modules; of the root. The engine refers to them weakly: it must not hold the model.
    """

    engine: Engine
    unit: Unit | None
    units: frozenset[int]
    cast_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    looks_up: bool = False
    may_save_weights: bool = True
    tied: TiedHead | None = None
    is_root: bool = False
    members: Members | None = None


def handle_of(module: nn.Module) -> Handle | None:
    """The handle of `module`; None if it has none."""
    # Not by getattr, which wrappers such as PEFT's pass on to the model inside.
    handle = module.__dict__.get(HANDLE)
    return handle if isinstance(handle, Handle) else None


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model.

    Raises:
        ShardingError: `model` was not sharded by StreamShard.
    """
    handle = handle_of(model) if isinstance(model, nn.Module) else None
    if handle is None:
        advice = "call StreamShard(model) first"
        compiled = getattr(model, "_orig_mod", None)  # torch.compile puts a module around the model
        if isinstance(compiled, nn.Module) and handle_of(compiled) is not None:
            advice = "give the sharded model inside, its _orig_mod, or compile in place, by model.compile()"
        raise ShardingError(f"{type(model).__name__} is not sharded: {advice}")
    return handle.engine


def engine_of_both(optimizer: object, model: nn.Module) -> Engine:
    """The engine of `model`. Checks that `optimizer` has at least one parameter of `model`.

    Raises:
        ConfigError: `optimizer` is not an optimizer, or has none of the model's parameters.
        ShardingError: `model` is not sharded.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}: wanted a torch.optim.Optimizer")
    engine = engine_of(model)
    ours = {param.sharded for param in engine.params}
    if not any(param in ours for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(f"{type(optimizer).__name__} has no parameter of this model: make it of model.parameters()")
    return engine


def not_a_layer(model: nn.Module) -> nn.Module:
    """Return `model`, for a function that takes whole models only.

    Raises:
        ShardingError: `model` is a module inside a sharded model.
    """
    # Of a model that is not sharded, the caller's `engine_at_rest` says so.
    if isinstance(model, ShardedModule) and ((handle := handle_of(model)) is None or not handle.is_root):
        raise ShardingError(f"{type(model).__name__} is inside a sharded model: give the whole model")
    return model


def refuse_in_pass(engine: Engine, what: str) -> None:
    """Raise if a pass is under way; `what` is about to be done.

    Raises:
        ShardingError: a forward or backward is under way.
    """
    engine.recover()  # a failed backward stays the engine's phase until someone asks
    if engine.phase is not None:
        raise ShardingError(
            f"{what} inside a forward or backward, or in a thread beside one, while layers hold all-gathered weights, "
            "in slots that other layers use next: call it between steps"
        )


def engine_at_rest(model: nn.Module, what: str, *, accepts_empty: bool = False) -> Engine:
    """The engine of a sharded model, for a function that needs all weights or gradients between steps.

    Args:
        model: made by `StreamShard`.
        what: the function, for messages.
        accepts_empty: the function may run while weights have no values.

    Raises:
        ShardingError: `model` was not sharded, a forward or backward is under way, or parameters are full or empty.
    """
    engine = engine_of(model)
    refuse_in_pass(engine, what)
    if engine.is_summoned:
        raise ShardingError(
            f"{what} inside summon_full_params, where parameters are full on every rank: call it outside, or use "
            "torch's own functions (state_dict(), torch.nn.utils.clip_grad_norm_)"
        )
    if not accepts_empty:
        engine.refuse_empty(what)
    return engine
