"""What a training run is made of, the names under which its parts are saved, and all of it as named tensors and JSON.

Weights and moments are keyed by the parameter's name and cut by element, so that neither units nor slots nor the number
of ranks occur in what is saved. Everything else is a tree (see `json_codec.py`): one where all ranks have the same,
otherwise one of each rank.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import local_pieces, plan_disk, saved_names
from streamshard.checkpoint.export import model_dtype
from streamshard.checkpoint.json_codec import encode
from streamshard.checkpoint.manifest import Manifest
from streamshard.checkpoint.optimizer_state import (
    Moment,
    Outlines,
    agree_on_outlines,
    is_owned,
    moment_of,
    outline_state,
    owned_states,
    params_in,
    settle,
)
from streamshard.checkpoint.safetensors_file import bytes_of
from streamshard.comm.objects import gather_from_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.device import module_of
from streamshard.engine.engine import Engine
from streamshard.engine.handle import engine_at_rest, handle_of, is_compiled
from streamshard.errors import CheckpointError, ConfigError, ShardingError
from streamshard.integrations import huggingface
from streamshard.plan.structure import params_of
from streamshard.unit.optimizer_hooks import sees_steps, take_over_state
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import piece_of

__all__ = [
    "Collected",
    "Parts",
    "Piece",
    "RANDOM",
    "class_name",
    "collect",
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


class Piece(NamedTuple):
    """Elements [start, start + data.numel()) of the flattened tensor `name`.

    Attributes:
        name: of the tensor; on all ranks that have some of it the same.
        shape: of the whole.
        start: first element.
        data: [n] 1-D contiguous, any device.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.data.numel()


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
            if param not in names and (other := piece_of(param)) is not None:
                raise ConfigError(
                    f"an optimizer that was given has {other.name!r}, which is a parameter of a sharded model that was "
                    'not: give all of its models, model={"a": .., "b": ..}'
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


class _Told(NamedTuple):
    """What ranks tell each other of what they save.

    Attributes:
        outlines: of each optimizer's state.
        owned: by optimizer, the JSON of the state of each parameter that this rank steps whole.
        digests: of each tree.
    """

    outlines: dict[str, Outlines]
    owned: dict[str, dict[str, Any]]
    digests: dict[str, str]


class Collected(NamedTuple):
    """What a rank saves.

    Attributes:
        state: the JSON, which is the first rank's to write.
        differing: trees that are not the same on all ranks, which `state` does not have yet; by name, this rank's.
        pieces: this rank's, of tensors, which are its own memory, not copied.
        moments: names of those that only steps change, steps which torch's hooks see.
    """

    state: dict[str, Any]
    differing: dict[str, Any]
    pieces: list[Piece]
    moments: set[str]


def collect(parts: Parts) -> Collected:
    """Everything that is to be saved. Collective: ranks meet once.

    Raises:
        CheckpointError: on every rank; names what cannot be saved.
    """
    ranks = parts.engine.ranks
    pieces: list[Piece] = []
    moments: set[str] = set()
    models: dict[str, Any] = {}
    optimizers: dict[str, _OptimizerState] = {}
    trees: dict[str, _Tree] = {}
    for each in parts.optimizers.values():
        settle(each, ranks)

    def collect_here() -> _Told:
        models.update({name: _collect_model(name, *model, pieces) for name, model in parts.models.items()})
        optimizers.update({name: _OptimizerState(name, each, parts) for name, each in parts.optimizers.items()})
        trees.update(_trees_of(parts))
        outlines = {name: each.outlines for name, each in optimizers.items()}
        owned = {name: each.owned for name, each in optimizers.items()}
        return _Told(outlines, owned, {name: tree.digest() for name, tree in trees.items()})

    told = gather_from_all_ranks(ranks, "save", collect_here)
    saved_optimizers = {
        name: each.collect(
            [theirs.outlines[name] for theirs in told], [theirs.owned[name] for theirs in told], pieces, moments
        )
        for name, each in optimizers.items()
    }
    same, differing = _collect_trees(trees, [theirs.digests for theirs in told], ranks, pieces)
    return Collected({"models": models, "optimizers": saved_optimizers, "trees": same}, differing, pieces, moments)


def _collect_model(name: str, model: nn.Module, engine: Engine, pieces: list[Piece]) -> dict[str, Any]:
    shards = engine.param_shards
    held = local_pieces(model, shards, buffers=engine.ranks.is_first)
    drifts = drifts_apart(engine)
    for shard in shards:
        piece = held.pop(shard.name)
        if drifts or not engine.ranks.replica:
            pieces.append(Piece(name_here(f"{name}/{shard.name}", engine), shard.layout.shape, piece.start, piece.data))
    for buffer, piece in held.items():  # of the first rank
        pieces.append(Piece(f"{name}/{buffer}", tuple(model.get_buffer(buffer).shape), 0, piece.data))
    tensors: dict[str, torch.Tensor] = {}
    extra_state = encode(_extra_state(model), f"{name}/_extra_state", tensors)
    if engine.ranks.is_first:
        pieces.extend(_whole(tensor_name, tensor) for tensor_name, tensor in tensors.items())
    names, params = saved_names(model, shards), {shard.name for shard in shards}
    return {
        "class": class_name(model),
        "params": {
            shard.name: {"dtype": str(shard.dtype).removeprefix("torch."), "aliases": list(shard.aliases)}
            for shard in shards
        },
        "buffers": [name for name, source in names.items() if name == source and name not in params],
        "extra_state": extra_state,
        "drifts": drifts,
        "export": _export_plan(model, shards, with_files=engine.ranks.is_first),
    }


class _OptimizerState:
    """One optimizer's. What can fail on one rank and not on others is done when it is made.

    Attributes:
        outlines: what this rank keeps of sharded parameters.
        owned: the JSON of what it keeps of parameters that it steps whole, by the parameter's name.
    """

    def __init__(self, name: str, optimizer: Optimizer, parts: Parts) -> None:
        take_over_state(optimizer)
        self._name, self._optimizer, self._ranks = name, optimizer, parts.engine.ranks
        self._names, self._owners = param_names(optimizer, parts)
        self._numbers = {param: number for number, param in enumerate(params_in(optimizer))}
        self._tensors: dict[str, torch.Tensor] = {}
        sharded = {shard.param for _, shard in self._owners}
        # Of models that were given, these are saved with them. Of nothing that was given, nobody else would.
        alone = {each: param for param, each in self._names.items() if is_alone(each)}
        self._values = {
            param_name: encode(param.detach(), f"{name}/{param_name}/value", self._tensors)
            for param_name, param in alone.items()
        }
        self._unsharded = {
            param: encode(dict(optimizer.state.get(param, {})), f"{name}/{self._names[param]}", self._tensors)
            for param in self._numbers
            if param not in sharded
        }
        packed = dict(optimizer.state_dict())
        saved_groups = packed.pop("param_groups")
        del packed["state"]
        self._groups = []
        for place, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            options = encode(options, f"{name}/param_groups[{place}]", self._tensors)
            named = {"param_names": saved["param_names"]} if "param_names" in saved else {}  # by the user
            self._groups.append(
                {"params": [self._names[param] for param in group["params"]], **named, "options": options}
            )
        self._others = encode(packed, f"{name}/others", self._tensors)
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._shared = encode(shared, f"{name}/shared", self._tensors)
        self._pieces = [
            piece
            for engine, shard in self._owners
            for piece in _moments(f"{name}/{self._names[shard.param]}", optimizer, engine, shard)
        ]
        self.outlines = outline_state([shard for _, shard in self._owners], optimizer, self._numbers)
        self.owned: dict[str, Any] = {}
        for engine, shard in self._owners:
            path = f"{name}/{self._names[shard.param]}"
            for state in owned_states(optimizer, {shard.param: path}).values():
                if not engine.ranks.replica:  # the others, if they drift, have tensors of the same names
                    self.owned[self._names[shard.param]] = state.json
                if drifts_apart(engine) or not engine.ranks.replica:
                    self._pieces += [_whole(name_here(each, engine), tensor) for each, tensor in state.tensors.items()]

    def collect(
        self, by_rank: list[Outlines], owned: list[dict[str, Any]], pieces: list[Piece], moments: set[str]
    ) -> dict[str, Any]:
        """The JSON, where every rank has said its outlines and what it owns.

        `pieces` gain those of this rank, and `moments` their names.
        """
        sharded = {shard.param for _, shard in self._owners}
        agreed = agree_on_outlines(by_rank, [shard for _, shard in self._owners], self._numbers)
        state: dict[str, Any] = {}
        for param, number in self._numbers.items():
            param_name = self._names[param]
            if param not in sharded:
                state[param_name] = self._unsharded[param]
                continue
            prefix = f"{self._name}/{param_name}"
            own = state[param_name] = {}
            for key, value in agreed.get(number, {}).items():
                tensor = f"{prefix}/{key}"
                is_moment = isinstance(value, Moment)
                own[key] = {"$": "moment", "tensor": tensor} if is_moment else encode(value, tensor, self._tensors)
        for theirs in owned:
            for param_name, own in theirs.items():  # of slices, ranks have some each
                state[param_name] = {**state[param_name], **own}
        pieces.extend(self._pieces)
        if sees_steps(self._optimizer):
            moments.update(piece.name for piece in self._pieces)
        if self._ranks.is_first:
            pieces.extend(_whole(tensor_name, tensor) for tensor_name, tensor in self._tensors.items())
        return {
            "class": class_name(self._optimizer),
            "groups": self._groups,
            "state": state,
            "values": self._values,
            "others": self._others,
            "shared": self._shared,
        }


def _moments(prefix: str, optimizer: Optimizer, engine: Engine, shard: ParamShard) -> Iterator[Piece]:
    """What this rank writes of a parameter's moments."""
    if (
        not is_owned(optimizer, shard.param)
        and shard.local.numel
        and (drifts_apart(engine) or not engine.ranks.replica)
    ):
        for key in optimizer.state.get(shard.param, {}):
            moment = moment_of(shard, optimizer, key)
            if moment is not None:
                data = moment.detach().as_subclass(torch.Tensor).reshape(-1)
                yield Piece(name_here(f"{prefix}/{key}", engine), shard.layout.shape, shard.local.start, data)


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
    mine: Mapping[str, _Tree], digests: Sequence[Mapping[str, str]], ranks: Ranks, pieces: list[Piece]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of which all ranks have the same, which are saved once, and this rank's of the others."""
    if any(list(theirs) != list(digests[0]) for theirs in digests):
        raise CheckpointError(f"ranks save different things: {[sorted(theirs) for theirs in digests]}")
    same, differing = {}, {}
    for name, (tree, tensors) in mine.items():
        if any(theirs[name] != digests[0][name] for theirs in digests):
            differing[name] = tree
            pieces.extend(_whole(f"{tensor}@rank{ranks.number}", data) for tensor, data in tensors.items())
        else:
            same[name] = {"all": tree}
            if ranks.is_first:
                pieces.extend(_whole(tensor, data) for tensor, data in tensors.items())
    return same, differing


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), 0, tensor.contiguous().view(-1))


def _export_plan(model: nn.Module, shards: Sequence[ParamShard], *, with_files: bool) -> dict[str, Any]:
    """What `export_safetensors` would write, for those who have the checkpoint and not the model."""
    files: dict[str, str] = {}
    custom_code = None
    try:
        huggingface.check_exportable(model)
        tensors = plan_disk(model, shards, None)
        if huggingface.is_transformers_model(model):
            custom_code = huggingface.custom_code_of(model)
            if with_files:
                files = huggingface.config_files(model, model_dtype(model, shards, None))
    except CheckpointError as error:
        return {"error": str(error)}
    return {
        "files": files,
        "custom_code": custom_code,
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
