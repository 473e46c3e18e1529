"""Everything of a training run as named tensors and JSON.

Weights and moments are keyed by the parameter's name and cut by element, so that neither units nor slots nor the number
of ranks occur in what is saved. Everything else is a tree (see `tree.py`), one where all ranks have the same, otherwise
one of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.disk_layout import local_pieces, plan_disk, saved_names
from streamshard.checkpoint.export import model_dtype
from streamshard.checkpoint.optimizer_state import agree_on_state, is_moment, moment_of, params_in
from streamshard.checkpoint.parts import RANDOM, Parts, class_name, drifts_apart, name_here, param_names, random_state
from streamshard.checkpoint.piece_file import Piece, bytes_of
from streamshard.checkpoint.tree import encode
from streamshard.checkpoint.writer import run_on_all_ranks
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError
from streamshard.unit.optimizer_hooks import take_over_state
from streamshard.unit.shard import ParamShard

__all__ = ["collect"]


def collect(parts: Parts) -> tuple[dict[str, Any], list[Piece]]:
    """Everything that is to be saved. Collective.

    Returns:
        The JSON, which is the first rank's to write, and this rank's pieces of tensors, which are its own memory, not
        copied.

    Raises:
        CheckpointError: on every rank; names what cannot be saved.
    """
    group = parts.engine.ranks
    pieces: list[Piece] = []
    models = run_on_all_ranks(
        group, "save", lambda: {name: _collect_model(name, *model, pieces) for name, model in parts.models.items()}
    )
    optimizers = {name: _collect_optimizer(name, each, parts, pieces) for name, each in parts.optimizers.items()}
    trees = _collect_trees(parts, pieces)
    return {"models": models, "optimizers": optimizers, "trees": trees}, pieces


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


def _collect_optimizer(name: str, optimizer: Optimizer, parts: Parts, pieces: list[Piece]) -> dict[str, Any]:
    ranks = parts.engine.ranks
    take_over_state(optimizer)
    names, owners = param_names(optimizer, parts)
    numbers = {param: number for number, param in enumerate(params_in(optimizer))}
    outlines = agree_on_state([shard for _, shard in owners], ranks, optimizer, numbers)
    sharded = {shard.param: (engine, shard) for engine, shard in owners}
    tensors: dict[str, torch.Tensor] = {}

    def collect_here() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for param, number in numbers.items():
            prefix = f"{name}/{names[param]}"
            if param not in sharded:
                state[names[param]] = encode(dict(optimizer.state.get(param, {})), prefix, tensors)
                continue
            own = state[names[param]] = {}
            for key, value in outlines.get(number, {}).items():
                tensor = f"{prefix}/{key}"
                own[key] = {"$": "moment", "tensor": tensor} if is_moment(value) else encode(value, tensor, tensors)
            pieces.extend(_moments(prefix, optimizer, *sharded[param]))
        packed = optimizer.state_dict()
        saved_groups = packed.pop("param_groups")
        del packed["state"]
        groups = []
        for place, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            options = encode(options, f"{name}/param_groups[{place}]", tensors)
            groups.append({"params": [names[param] for param in group["params"]], "options": options})
        others = encode(packed, f"{name}/others", tensors)
        if ranks.is_first:
            pieces.extend(_whole(tensor_name, tensor) for tensor_name, tensor in tensors.items())
        return {"class": class_name(optimizer), "groups": groups, "state": state, "others": others}

    return run_on_all_ranks(ranks, f"save {name}", collect_here)


def _moments(prefix: str, optimizer: Optimizer, engine: Engine, shard: ParamShard) -> Iterator[Piece]:
    """What this rank writes of a parameter's moments."""
    if shard.local.numel and (drifts_apart(engine) or not engine.ranks.replica):
        for key in optimizer.state.get(shard.param, {}):
            moment = moment_of(shard, optimizer, key)
            if moment is not None:
                data = moment.detach().as_subclass(torch.Tensor).reshape(-1)
                yield Piece(name_here(f"{prefix}/{key}", engine), shard.layout.shape, shard.local.start, data)


def _collect_trees(parts: Parts, pieces: list[Piece]) -> dict[str, Any]:
    """What is no tensor of a model: once where all ranks have the same, else what each of them has."""
    ranks = parts.engine.ranks

    def encode_all() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
        values = {name: each.state_dict() for name, each in parts.objects.items()}
        values |= {**parts.values, RANDOM: random_state(parts.engine.streams.device)}
        found = {}
        for name, value in values.items():
            tensors: dict[str, torch.Tensor] = {}
            found[name] = encode(value, name, tensors), tensors
        return found

    mine = run_on_all_ranks(ranks, "save", encode_all)
    digests = ranks.gather_objects({name: _digest(*tree) for name, tree in mine.items()})
    if any(list(theirs) != list(digests[0]) for theirs in digests):
        raise CheckpointError(f"ranks save different things: {[sorted(theirs) for theirs in digests]}")
    differing = [name for name in mine if any(theirs[name] != digests[0][name] for theirs in digests)]
    by_rank = ranks.gather_objects({name: mine[name][0] for name in differing}) if differing else []
    saved: dict[str, Any] = {}
    for name, (tree, tensors) in mine.items():
        if name in differing:
            saved[name] = {"ranks": [theirs[name] for theirs in by_rank]}
            pieces.extend(_whole(f"{tensor}@rank{ranks.number}", data) for tensor, data in tensors.items())
        else:
            saved[name] = {"all": tree}
            if ranks.is_first:
                pieces.extend(_whole(tensor, data) for tensor, data in tensors.items())
    return saved


def _digest(tree: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()


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
