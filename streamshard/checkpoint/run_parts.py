"""The parts of a training run, and their names in a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import saved_names
from streamshard.checkpoint.safetensors_file import digest_of
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest
from streamshard.core.optimizer_kinds import inner_optimizers, params_in
from streamshard.core.params import Param
from streamshard.device import module_of
from streamshard.errors import ConfigError, ShardingError
from streamshard.guards.modules import original_class
from streamshard.guards.sharded_tensor import piece_of
from streamshard.planning.structure import params_of

RANDOM = "random"

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]

Sharded = Mapping[nn.Parameter, tuple[Engine, Param]]
"""The sharded parameters of an optimizer: by Parameter, the engine and this rank's part."""


class RunParts(NamedTuple):
    """The parts of a run, by their names in a checkpoint.

    Attributes:
        models: sharded models, and their engines.
        optimizers: optimizers of any parameters.
        trees: plain values and objects with ``state_dict()``: `extra`, extra state of modules, random numbers.
    """

    models: dict[str, tuple[nn.Module, Engine]]
    optimizers: dict[str, Optimizer]
    trees: dict[str, Any]

    @classmethod
    def of(
        cls, what: str, model: object, optimizer: object, extra: Mapping[str, Any] | None, *, accepts_empty: bool
    ) -> RunParts:
        """Name the arguments of ``save_checkpoint`` or ``load_checkpoint``.

        Args:
            what: the function, for messages.
            model, optimizer, extra: its arguments.
            accepts_empty: models may have no values yet.

        Raises:
            ConfigError: names an argument of a wrong type.
            ShardingError: a model is inside a forward or backward, or not sharded; or there is none.
        """
        if not isinstance(extra or {}, Mapping):
            raise ConfigError(f"extra={extra!r}: wanted a dict of values and of objects with state_dict()")
        parts = cls({}, _named("optimizer", optimizer, Optimizer), {})
        for name, each in _named("model", model, nn.Module).items():
            parts.models[name] = each, engine_at_rest(each, what, accepts_empty=accepts_empty)
            for inner, module in each.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:  # torch's own raises
                    own = SimpleNamespace(state_dict=module.get_extra_state, load_state_dict=module.set_extra_state)
                    parts.trees[f"extra_state.{name}/{inner}"] = own
        for name, each in parts.optimizers.items():
            apart = (inner for inner in inner_optimizers(each) if inner.state is not each.state)
            if left := [inner for inner in apart if inner not in parts.optimizers.values()]:
                what = f"{name} is around a {type(left[0]).__name__}, whose state is apart: give both"
                raise ConfigError(f'{what}, optimizer={{"outer": optimizer, "inner": its inner optimizer}}')
        if not parts.models:
            raise ShardingError(f"{what}: no model made by StreamShard was given")
        parts.trees.update({f"extra.{key}": each for key, each in (extra or {}).items()})
        parts.trees[RANDOM] = RandomState(parts.engine.streams.device)
        return parts

    @property
    def engine(self) -> Engine:
        """The first model's engine. Its ranks save the run."""
        return next(iter(self.models.values()))[1]

    def names_of(self, optimizer: Optimizer) -> tuple[dict[nn.Parameter, str], Sharded]:
        """Names of parameters: ``model/layers.0.weight``, or ``extra.head/weight`` for a module in `extra`.

        Returns:
            The names of all parameters of the run, and its sharded parameters.

        Raises:
            ConfigError: a parameter of `optimizer` is of no model that was given.
        """
        names: dict[nn.Parameter, str] = {}
        sharded: dict[nn.Parameter, tuple[Engine, Param]] = {}
        for key, (_, engine) in self.models.items():
            for shard in engine.params:
                names[shard.sharded], sharded[shard.sharded] = f"{key}/{shard.name}", (engine, shard)
        for key, each in self.trees.items():
            if isinstance(each, nn.Module):
                names.update((param, f"{key}/{name}") for name, param in params_of(each).items())
        for param in params_in(optimizer.param_groups):
            if param not in names:
                piece = piece_of(param)
                what = f"a parameter of shape {tuple(param.shape)}" if piece is None else repr(piece.name)
                raise ConfigError(
                    f"{type(optimizer).__name__} steps {what} of no given model: pass sharded models as "
                    'model={"a": a, "b": b}, and other modules as extra={"head": head}'
                )
        return names, sharded


def _named(kind: str, given: object, wanted: type) -> dict[str, Any]:
    """By name: one object, or the objects of a dict."""
    found = {f"{kind}.{key}": each for key, each in given.items()} if isinstance(given, Mapping) else {kind: given}
    for name, each in found.items():
        if each is not None and not isinstance(each, wanted):
            raise ConfigError(f"{name} is a {type(each).__name__}: wanted a {wanted.__name__}, or a dict of them")
    # With optimizer=None there is none to save or load.
    return {name: each for name, each in found.items() if each is not None}


def has_state(value: object) -> bool:
    """Whether `value` is saved by its ``state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def class_name(value: object) -> str:
    """The full name of a value's class; for a `WholeParameterOptimizer` also the names of its groups' classes."""
    if (described := getattr(value, "described_class", None)) is not None:
        return str(described)
    # A sharded model's class is a subclass of the user's.
    kind = original_class(type(value))
    return f"{kind.__module__}.{kind.__qualname__}"


def facts_of(model: nn.Module, engine: Engine) -> dict[str, Any]:
    """The facts about a model in a manifest, as JSON.

    Returns:
        "class"; "names": see `saved_names`; "quantization": a digest of the scales and settings that belong to packed
        weights, None without packed weights. The bytes of packed weights mean nothing with other scales.
    """
    packed = [param for param in engine.params if param.form.is_packed]
    scales = {f"{each.name} {name}": scale for each in packed for name, scale in each.form.beside(each.sharded).items()}
    settings = [f"{each.name} {each.form.facts(each.sharded)}" for each in packed]
    quantization = digest_of(settings, scales) if packed else None
    return {"class": class_name(model), "names": saved_names(model, engine), "quantization": quantization}


class RandomState(NamedTuple):
    """The default random generators of Python, NumPy, the CPU and `device`."""

    device: torch.device

    def state_dict(self) -> dict[str, Any]:
        """The generators' state."""
        version, numbers, gauss = random.getstate()
        # A tensor: in the manifest these 625 numbers of 4,096 ranks would be 30 MB.
        python = [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss]
        state = {"python": python, "torch": torch.get_rng_state(), "numpy": numpy.random.get_state()}
        if self.device.type != "cpu":
            state[self.device.type] = module_of(self.device).get_rng_state(self.device)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the generators into this state."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        torch.set_rng_state(state["torch"])
        if self.device.type in state:  # a run on another type of device has saved none
            module_of(self.device).set_rng_state(state[self.device.type], self.device)
        numpy.random.set_state(state["numpy"])
