"""The parts of a training run, their names in a checkpoint, and their content as named tensors and JSON.

Weights and moments are saved by the parameter's name and by ranges of elements. So a checkpoint does not depend on
units, slots or the number of ranks. Everything else is a tree (see `json_codec.encode`): one tree if all ranks have the
same, else one per rank.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Piece, local_pieces, saved_names
from streamshard.checkpoint.json_codec import encode
from streamshard.checkpoint.manifest import name_of_rank
from streamshard.checkpoint.optimizer_state import (
    OptimizerPart,
    Sharded,
    join_parts,
    local_state,
    of_replica,
    settle,
)
from streamshard.checkpoint.safetensors_file import bytes_of
from streamshard.comm.objects import gather_from_all_ranks
from streamshard.device import module_of
from streamshard.engine.engine import Engine
from streamshard.engine.module_state import engine_at_rest
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from streamshard.planning.structure import params_of
from streamshard.unit.optimizer_hooks import params_in
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import piece_of

RANDOM = "random"

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


class Parts(NamedTuple):
    """The parts of a run, by their names in a checkpoint.

    Attributes:
        models: sharded models, and their engines.
        optimizers: optimizers of any parameters.
        trees: plain values and objects with ``state_dict()``: `extra`, modules' extra state, random numbers.
    """

    models: dict[str, tuple[nn.Module, Engine]]
    optimizers: dict[str, Optimizer]
    trees: dict[str, Any]

    @property
    def engine(self) -> Engine:
        """The first model's: its ranks are all that save."""
        return next(iter(self.models.values()))[1]


def name_parts(
    what: str, model: object, optimizer: object, extra: Mapping[str, Any] | None, *, accepts_empty: bool
) -> Parts:
    """Sort the arguments of ``save_checkpoint`` or ``load_checkpoint``.

    Args:
        what: the action, for messages.
        model, optimizer, extra: as given to these functions.
        accepts_empty: models may have no values yet.

    Raises:
        ConfigError: names an argument of a wrong type.
        ShardingError: a model is inside a forward or backward, or not sharded; or there is none.
    """
    if not isinstance(extra or {}, Mapping):
        raise ConfigError(f"extra={extra!r}: wanted a dict of values and of objects with state_dict()")
    parts = Parts({}, _named("optimizer", optimizer, Optimizer), {})
    for name, each in _named("model", model, nn.Module).items():
        parts.models[name] = each, engine_at_rest(each, what, accepts_empty=accepts_empty)
        parts.trees.update(
            (f"extra_state.{name}/{inner}", _extra_state_of(module))
            for inner, module in each.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        )
    if not parts.models:
        raise ShardingError(f"{what}: no model made by StreamShard was given")
    parts.trees.update({f"extra.{key}": each for key, each in (extra or {}).items()})
    parts.trees[RANDOM] = RandomState(parts.engine.streams.device)
    return parts


def _named(kind: str, given: object, wanted: type) -> dict[str, Any]:
    """One object, or several in a dict, by name."""
    found = {f"{kind}.{key}": each for key, each in given.items()} if isinstance(given, Mapping) else {kind: given}
    for name, each in found.items():
        if each is not None and not isinstance(each, wanted):
            raise ConfigError(f"{name} is a {type(each).__name__}: wanted a {wanted.__name__}, or a dict of them")
    return {name: each for name, each in found.items() if each is not None}


def has_state(value: object) -> bool:
    """Whether `value` is saved by its ``state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def class_name(value: object) -> str:
    """The full name of a value's class; of an optimizer of whole parameters, the classes that it runs too."""
    if (described := getattr(value, "described_class", None)) is not None:
        return str(described)
    kind = getattr(type(value), "_streamshard_original", type(value))
    return f"{kind.__module__}.{kind.__qualname__}"


def param_names(optimizer: Optimizer, parts: Parts) -> tuple[dict[nn.Parameter, str], Sharded]:
    """Names of the parameters of all models and of modules in `extra`, which begin with their name; and sharded ones.

    Raises:
        ConfigError: a parameter of the optimizer is of no model that was given.
    """
    names: dict[nn.Parameter, str] = {}
    sharded: dict[nn.Parameter, tuple[Engine, ParamShard]] = {}
    for key, (_, engine) in parts.models.items():
        for shard in engine.param_shards:
            names[shard.param], sharded[shard.param] = f"{key}/{shard.name}", (engine, shard)
    for key, each in parts.trees.items():
        if isinstance(each, nn.Module):
            names.update((param, f"{key}/{name}") for name, param in params_of(each).items())
    for param in params_in(optimizer.param_groups):
        if param not in names:
            piece = piece_of(param)
            what = f"a parameter of shape {tuple(param.shape)}" if piece is None else repr(piece.name)
            raise ConfigError(
                f"{type(optimizer).__name__} steps {what}, which is of no model that was given: give all modules whose "
                'parameters it steps, sharded ones in model={"a": a, "b": b}, others in extra={"head": head}'
            )
    return names, sharded


def _extra_state_of(module: nn.Module) -> SimpleNamespace:
    """What a module has beside parameters and buffers, as an object with ``state_dict()``."""
    return SimpleNamespace(state_dict=module.get_extra_state, load_state_dict=module.set_extra_state)


class RandomState:
    """All of this rank's default random generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """The generators' state."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if self._device.type != "cpu":
            state[self._device.type] = module_of(self._device).get_rng_state(self._device)
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *others = numpy.random.get_state()
            state["numpy"] = name, keys.tolist(), *others
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the generators into this state."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if self._device.type in state and self._device.type != "cpu":
            module_of(self._device).set_rng_state(state[self._device.type], self._device)
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(state["numpy"])


def collect(parts: Parts) -> tuple[dict[str, Any], list[Piece]]:
    """Collect everything to save. Collective.

    Returns:
        JSON, the same on all ranks, and this rank's pieces of tensors: its own memory, not copies.

    Raises:
        CheckpointError: on every rank; names a part that cannot be saved.
        RankMismatchError: on every rank; names an option of an optimizer that differs between ranks.
    """
    ranks = parts.engine.ranks
    saved: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}, "trees": {}}
    pieces: list[Piece] = []
    trees: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    for optimizer in parts.optimizers.values():
        settle(optimizer, ranks)

    def collect_here() -> tuple[dict[str, OptimizerPart], dict[str, str]]:
        optimizer_parts = {}
        for name, (model, engine) in parts.models.items():
            saved["models"][name] = {"class": class_name(model), "names": saved_names(model, engine.param_shards)}
            own = local_pieces(model, engine.param_shards, buffers=engine.ranks.is_first).values()
            pieces.extend(of_replica((piece._replace(name=f"{name}/{piece.name}") for piece in own), engine))
        for name, optimizer in parts.optimizers.items():
            names, sharded = param_names(optimizer, parts)
            optimizer_parts[name], moments = local_state(name, optimizer, names, sharded, ranks)
            pieces.extend(moments)
            tensors: dict[str, torch.Tensor] = {}
            saved["optimizers"][name] = encode(_without_state(optimizer, names), name, tensors)
            pieces.extend(Piece.whole(*each) for each in tensors.items() if ranks.is_first)
        for name, value in parts.trees.items():
            tensors = {}
            trees[name] = encode(value.state_dict() if has_state(value) else value, name, tensors), tensors
        return optimizer_parts, {name: _digest(*tree) for name, tree in trees.items()}

    told = gather_from_all_ranks(ranks, "save", collect_here)
    digests = [each for _, each in told]
    if any(each.keys() != digests[0].keys() for each in digests):
        raise CheckpointError(f"ranks save different things: {[sorted(each) for each in digests]}")
    for name, json_of in saved["optimizers"].items():
        json_of["state"] = join_parts(name, [optimizer_parts[name] for optimizer_parts, _ in told])
    differing = {name for name in trees if len({each[name] for each in digests}) > 1}
    their_trees = gather_from_all_ranks(ranks, "save", lambda: {name: trees[name][0] for name in differing})
    for name, (tree, tensors) in trees.items():
        if name in differing:
            saved["trees"][name] = [theirs[name] for theirs in their_trees]
            pieces.extend(Piece.whole(name_of_rank(each, ranks.number), tensor) for each, tensor in tensors.items())
        else:
            saved["trees"][name] = [tree]
            pieces.extend(Piece.whole(*each) for each in tensors.items() if ranks.is_first)
    return saved, pieces


def _without_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer's state dict without the state of parameters, and with their names."""
    rest = dict(optimizer.state_dict())
    groups = [
        {**saved, "params": [names[param] for param in own["params"]]}
        for own, saved in zip(optimizer.param_groups, rest.pop("param_groups"), strict=True)
    ]
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    del rest["state"]
    return {**rest, "class": class_name(optimizer), "param_groups": groups, "shared": shared}


def _digest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Says whether two ranks have the same."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()
