"""What a training run is made of, as its user has given it, and the names under which its parts are saved."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.manifest import Manifest
from streamshard.checkpoint.optimizer_state import params_in
from streamshard.device import module_of
from streamshard.engine.engine import Engine
from streamshard.engine.grad_inputs import sharded_name
from streamshard.engine.handle import engine_at_rest, handle_of, is_compiled
from streamshard.errors import ConfigError, ShardingError
from streamshard.plan.structure import params_of
from streamshard.unit.shard import ParamShard

__all__ = [
    "RANDOM",
    "Parts",
    "class_name",
    "drifts_apart",
    "is_alone",
    "name_here",
    "name_parts",
    "name_there",
    "param_names",
    "random_state",
    "set_random_state",
]

RANDOM = "random"

_ALONE = "param_groups"


class Parts(NamedTuple):
    """What a user has given, by the names under which it is saved.

    Attributes:
        models: sharded ones, and their engines.
        optimizers: of parameters of these, or of others.
        objects: with ``state_dict()``: schedulers, scalers, models that are not sharded.
        values: plain ones.
    """

    models: dict[str, tuple[nn.Module, Engine]]
    optimizers: dict[str, Optimizer]
    objects: dict[str, Any]
    values: dict[str, Any]

    @property
    def engine(self) -> Engine:
        """The first model's: its ranks are all that save."""
        return next(iter(self.models.values()))[1]


def name_parts(
    what: str,
    model: object,
    optimizer: object,
    scheduler: object,
    scaler: object,
    extra: Mapping[str, Any] | None,
    *,
    accepts_empty: bool,
) -> Parts:
    """Sort what was given to ``save_checkpoint`` or ``load_checkpoint``. Each is one object, or a dict of several.

    Args:
        what: is done with it, for messages.
        model, optimizer, scheduler, scaler, extra: see there.
        accepts_empty: models may have no values yet.

    Raises:
        ConfigError: names what is none of what it should be.
        ShardingError: a model's forward or backward is under way, or none is sharded.
    """
    parts = Parts({}, {}, {}, {})
    for name, each in _named("model", model):
        if not isinstance(each, nn.Module):
            raise ConfigError(f"{name} is a {type(each).__name__}: wanted an nn.Module, or a dict of them")
        if handle_of(each) is None and not is_compiled(each):
            parts.objects[name] = each
        else:
            parts.models[name] = each, engine_at_rest(each, what, accepts_empty=accepts_empty)
    if not parts.models:
        raise ShardingError(f"{what}: no model made by StreamShard among what was given")
    worlds = {engine.ranks.total_size for _, engine in parts.models.values()}
    if len(worlds) > 1:
        raise ConfigError(f"{what}: models on different numbers of ranks, {sorted(worlds)}: save each by itself")
    for name, each in _named("optimizer", optimizer):
        if not isinstance(each, Optimizer):
            raise ConfigError(f"{name} is a {type(each).__name__}: wanted a torch.optim.Optimizer, or a dict of them")
        parts.optimizers[name] = each
    for name, each in [*_named("scheduler", scheduler), *_named("scaler", scaler)]:
        if not _has_state(each):
            raise ConfigError(
                f"{name} is a {type(each).__name__}: wanted an object with state_dict(), or a dict of them"
            )
        parts.objects[name] = each
    if not isinstance(extra if extra is not None else {}, Mapping):
        raise ConfigError(f"extra={extra!r}: wanted a dict of values and of objects with state_dict()")
    for key, each in (extra or {}).items():
        if not isinstance(key, str):
            raise ConfigError(f"extra has the key {key!r}: wanted strings")
        (parts.objects if _has_state(each) else parts.values)[f"extra.{key}"] = each
    return parts


def _named(kind: str, given: object) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [(f"{kind}.{key}", each) for key, each in given.items()]
    return [(kind, given)]


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def class_name(value: object) -> str:
    """The full name of a value's class; of an optimizer of whole parameters, the classes that it runs too."""
    if (described := getattr(value, "described_class", None)) is not None:
        return str(described)
    kind = type(value)
    kind = getattr(kind, "_streamshard_original", kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def param_names(optimizer: Optimizer, parts: Parts) -> tuple[dict[nn.Parameter, str], list[tuple[Engine, ParamShard]]]:
    """Names of an optimizer's parameters, and the shards among them.

    A parameter of nothing that was given is called by its place in the optimizer.

    Raises:
        ConfigError: it is a sharded model's, which has to be given too.
    """
    several = len(parts.models) > 1
    names: dict[nn.Parameter, str] = {}
    owners: list[tuple[Engine, ParamShard]] = []
    for key, (_, engine) in parts.models.items():
        for shard in engine.param_shards:
            names[shard.param] = f"{key}/{shard.name}" if several else shard.name
            owners.append((engine, shard))
    for key, each in parts.objects.items():
        if isinstance(each, nn.Module):
            names.update((param, f"{key}/{name}") for name, param in params_of(each).items())
    inside = set(params_in(optimizer))
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if param not in names and (other := sharded_name(param)) is not None:
                raise ConfigError(
                    f"an optimizer that was given has {other!r}, which is a parameter of a sharded model that was not: "
                    'give all of its models, model={"a": .., "b": ..}'
                )
            names.setdefault(param, f"{_ALONE}[{number}][{place}]")
    return names, [(engine, shard) for engine, shard in owners if shard.param in inside]


def is_alone(param_name: str) -> bool:
    """Whether it is what `param_names` calls a parameter of nothing that was given."""
    return param_name.startswith(f"{_ALONE}[")


def name_here(tensor: str, engine: Engine) -> str:
    """The name of what this rank's replica has of a tensor, where it may differ from what others have."""
    return f"{tensor}@replica{engine.ranks.replica}" if engine.ranks.replica and drifts_apart(engine) else tensor


def drifts_apart(engine: Engine) -> bool:
    """Whether replicas train on their own, so that each has other weights (local SGD)."""
    replicas = engine.reductions.replicas
    return replicas is not None and not replicas.averages_grads


def name_there(tensor: str, engine: Engine, manifest: Manifest) -> str:
    own = f"{tensor}@replica{engine.ranks.replica}"
    return own if own in manifest.tensors else tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Of every generator that a rank has by default."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = module_of(device).get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if device.type in state and device.type != "cpu":
        module_of(device).set_rng_state(state[device.type], device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
