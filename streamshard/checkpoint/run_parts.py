"""The parts of a training run, their names in a checkpoint, and their content as named tensors and JSON.

Weights and moments are saved by the parameter's name and by ranges of elements. So a checkpoint does not depend on
units, slots or the number of ranks. Everything else is a tree (see `manifest.encode`): one tree if all ranks have the
same, else one per rank.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Piece, local_pieces, plan_disk, saved_names
from streamshard.checkpoint.export import model_dtype
from streamshard.checkpoint.manifest import encode
from streamshard.checkpoint.optimizer_state import LocalState, State, drifts_apart, name_here, params_in, settle
from streamshard.checkpoint.safetensors_file import bytes_of
from streamshard.comm.communicator import Communicator
from streamshard.comm.objects import gather_from_all_ranks
from streamshard.device import module_of
from streamshard.engine.engine import Engine
from streamshard.engine.module_state import engine_at_rest, handle_of, is_compiled
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from streamshard.integrations import huggingface
from streamshard.plan.structure import params_of
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import piece_of

__all__ = [
    "RANDOM",
    "Collected",
    "Parts",
    "class_name",
    "collect",
    "name_parts",
    "param_names",
    "random_state",
    "set_random_state",
]

RANDOM = "random"


class Parts(NamedTuple):
    """The parts of a run, by their names in a checkpoint.

    Attributes:
        models: sharded models, and their engines.
        optimizers: optimizers of any parameters.
        objects: objects with ``state_dict()``: schedulers, scalers, models that are not sharded.
        values: plain values.
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
    """Sort the arguments of ``save_checkpoint`` or ``load_checkpoint``. Each is one object, or a dict of several.

    Args:
        what: the action, for messages.
        model, optimizer, scheduler, scaler, extra: as given to these functions.
        accepts_empty: models may have no values yet.

    Raises:
        ConfigError: names an argument of a wrong type.
        ShardingError: a model is inside a forward or backward, or no model is sharded.
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

    Raises:
        ConfigError: a parameter is of no model that was given.
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
    inside = dict.fromkeys(params_in(optimizer))
    for param in inside:
        if param not in names:
            piece = piece_of(param)
            what = f"a parameter of shape {tuple(param.shape)}" if piece is None else repr(piece.name)
            raise ConfigError(
                f"{type(optimizer).__name__} steps {what}, which is of no model that was given: give all modules whose "
                'parameters it steps, model={"model": model, "head": head}; some may be plain modules'
            )
    return names, [(engine, shard) for engine, shard in owners if shard.param in inside]


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all of this rank's default random generators."""
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


class Collected(NamedTuple):
    """The content that a rank saves.

    Attributes:
        state: JSON, which the first rank writes.
        differing: this rank's trees, by name, that are not the same on all ranks; `state` lacks them.
        pieces: this rank's pieces of tensors: its own memory, not copies.
    """

    state: dict[str, Any]
    differing: dict[str, Any]
    pieces: list[Piece]


def collect(parts: Parts) -> Collected:
    """Collect everything to save. Collective.

    Raises:
        CheckpointError: on every rank; names a part that cannot be saved.
    """
    ranks = parts.engine.ranks
    pieces: list[Piece] = []
    models: dict[str, Any] = {}
    optimizers: dict[str, _OptimizerState] = {}
    trees: dict[str, _Tree] = {}
    for each in parts.optimizers.values():
        settle(each, ranks)

    def collect_here() -> tuple[dict[str, tuple[State, State]], dict[str, str]]:
        models.update({name: _collect_model(name, *model, pieces) for name, model in parts.models.items()})
        optimizers.update({name: _OptimizerState(name, each, parts) for name, each in parts.optimizers.items()})
        trees.update(_trees_of(parts))
        told = {name: (each.local.outlines, each.local.owned) for name, each in optimizers.items()}
        return told, {name: tree.digest() for name, tree in trees.items()}

    told = gather_from_all_ranks(ranks, "save", collect_here)
    saved_optimizers = {}
    for name, optimizer in optimizers.items():
        saved_optimizers[name] = optimizer.collect([theirs[name] for theirs, _ in told])
        pieces += optimizer.local.pieces
        if ranks.is_first:
            pieces += [Piece.whole(tensor_name, tensor) for tensor_name, tensor in optimizer.local.tensors.items()]
    same, differing = _collect_trees(trees, [digests for _, digests in told], ranks, pieces)
    return Collected({"models": models, "optimizers": saved_optimizers, "trees": same}, differing, pieces)


def _collect_model(name: str, model: nn.Module, engine: Engine, pieces: list[Piece]) -> dict[str, Any]:
    shards, is_first = engine.param_shards, engine.ranks.is_first
    held = local_pieces(model, shards, buffers=is_first)
    for shard in shards:
        piece = held.pop(shard.name)
        if (saved_name := name_here(f"{name}/{shard.name}", engine)) is not None:
            pieces.append(Piece(saved_name, shard.layout.shape, piece.start, piece.data))
    for buffer, piece in held.items():  # of the first rank
        pieces.append(Piece(f"{name}/{buffer}", tuple(model.get_buffer(buffer).shape), 0, piece.data))
    tensors: dict[str, torch.Tensor] = {}
    extra_state = encode(_extra_state(model), f"{name}/_extra_state", tensors)
    if is_first:
        pieces.extend(Piece.whole(tensor_name, tensor) for tensor_name, tensor in tensors.items())
    names, params = saved_names(model, shards), {shard.name for shard in shards}
    return {
        "class": class_name(model),
        "params": {
            shard.name: {"dtype": str(shard.dtype).removeprefix("torch."), "aliases": list(shard.aliases)}
            for shard in shards
        },
        "buffers": [name for name, source in names.items() if name == source and name not in params],
        "extra_state": extra_state,
        "drifts": drifts_apart(engine),
        "export": _export_plan(model, shards, with_files=is_first),
    }


class _OptimizerState:
    """One optimizer's state, param groups, and what else is in its state dict."""

    def __init__(self, name: str, optimizer: Optimizer, parts: Parts) -> None:
        names, owners = param_names(optimizer, parts)
        self.local = LocalState(name, optimizer, names, owners)
        tensors = self.local.tensors
        packed = dict(optimizer.state_dict())
        saved_groups = packed.pop("param_groups")
        del packed["state"]
        self._saved: dict[str, Any] = {"class": class_name(optimizer), "groups": []}
        for place, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            options = encode(options, f"{name}/param_groups[{place}]", tensors)
            params = [names[param] for param in group["params"]]
            self._saved["groups"].append({"params": params, "options": options})
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._saved["others"] = encode(packed, f"{name}/others", tensors)
        self._saved["shared"] = encode(shared, f"{name}/shared", tensors)

    def collect(self, told: list[tuple[State, State]]) -> dict[str, Any]:
        """The JSON, where every rank has told what it keeps of sharded parameters."""
        return {**self._saved, "state": self.local.join(told)}


class _Tree(NamedTuple):
    """What `encode` gives."""

    json: Any
    tensors: dict[str, torch.Tensor]

    def digest(self) -> str:
        """Says whether two ranks have the same."""
        digest = hashlib.sha256(json.dumps(self.json, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(bytes_of(tensor.cpu()))
        return digest.hexdigest()


def _trees_of(parts: Parts) -> dict[str, _Tree]:
    """What is no tensor of a model, by name."""
    values = {name: _state_of(name, each) for name, each in parts.objects.items()}
    values |= {**parts.values, RANDOM: random_state(parts.engine.streams.device)}
    found = {}
    for name, value in values.items():
        tensors: dict[str, torch.Tensor] = {}
        json_ = encode(value, name, tensors)
        found[name] = _Tree(json_, {key: tensor.contiguous() for key, tensor in tensors.items()})
    return found


def _state_of(name: str, value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception as error:
        raise CheckpointError(f"state_dict() of {name!r} raised {type(error).__name__}: {error}") from error


def _collect_trees(
    mine: Mapping[str, _Tree], digests: Sequence[Mapping[str, str]], ranks: Communicator, pieces: list[Piece]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of which all ranks have the same, which are saved once, and this rank's of the others."""
    if any(list(theirs) != list(digests[0]) for theirs in digests):
        raise CheckpointError(f"ranks save different things: {[sorted(theirs) for theirs in digests]}")
    same, differing = {}, {}
    for name, (tree, tensors) in mine.items():
        if any(theirs[name] != digests[0][name] for theirs in digests):
            differing[name] = tree
            pieces.extend(Piece.whole(f"{tensor}@rank{ranks.number}", data) for tensor, data in tensors.items())
        else:
            same[name] = {"all": tree}
            if ranks.is_first:
                pieces.extend(Piece.whole(tensor, data) for tensor, data in tensors.items())
    return same, differing


def _export_plan(model: nn.Module, shards: Sequence[ParamShard], *, with_files: bool) -> dict[str, Any]:
    """The plan of `export_safetensors`, saved so that a checkpoint can be exported without the model."""
    files: dict[str, str] = {}
    try:
        huggingface.check_exportable(model)
        tensors = plan_disk(model, shards, None)
        if with_files and huggingface.is_transformers_model(model):
            files = huggingface.config_files(model, model_dtype(model, shards, None))
    except CheckpointError as error:
        return {"error": str(error)}
    return {
        "files": files,
        "tensors": [
            [each.name, each.shape, str(each.dtype).removeprefix("torch."), [list(run) for run in each.runs]]
            for each in tensors
        ],
    }


def _extra_state(model: nn.Module) -> dict[str, Any]:
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
