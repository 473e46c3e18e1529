"""The way back from what `collect` has found into a run: what is read where, compared before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import local_pieces
from streamshard.checkpoint.json_codec import decode
from streamshard.checkpoint.load import put_back_buffers
from streamshard.checkpoint.manifest import Manifest, Read
from streamshard.checkpoint.optimizer_state import is_owned, moment_of, own_part, params_in
from streamshard.checkpoint.run_parts import RANDOM, Parts, class_name, name_there, param_names, set_random_state
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError
from streamshard.unit.shard import ParamShard

__all__ = ["Plan", "plan_restore"]


class Plan(NamedTuple):
    """What a rank does to take over a checkpoint, found without changing anything.

    Attributes:
        loads: of users' objects, which may refuse what they are given; by name.
        reads: what is read, and where to.
        finish: what follows once all of it is read.
        filled: by model, the parameters and buffers that are read.
        values: plain ones that were saved, by the user's key.
        left_out: what was not asked for, or does not fit; lines for people.
    """

    loads: dict[str, Callable[[], object]]
    reads: list[Read]
    finish: list[Callable[[], object]]
    filled: dict[str, set[str]]
    values: dict[str, Any]
    left_out: list[str]


def plan_restore(parts: Parts, manifest: Manifest, tensor_of: Callable[[str], torch.Tensor], *, strict: bool) -> Plan:
    """Compare what was saved with what is there.

    Args:
        parts: what is there.
        manifest: what was saved.
        tensor_of: a saved tensor in new CPU memory, by name; for small ones.
        strict: whatever does not fit is an error.

    Raises:
        CheckpointError: names all that is missing, not expected, or of another shape.
    """
    plan = Plan({}, [], [], {}, {}, [])
    wrong: list[str] = []
    saved_models, saved_optimizers = manifest.state["models"], manifest.state["optimizers"]
    for name, (model, engine) in parts.models.items():
        if name not in saved_models:
            wrong.append(f"it has no {name!r}, but {_listed(saved_models)}")
        else:
            wrong += _plan_model(name, model, engine, manifest, tensor_of, plan)
    for name, optimizer in parts.optimizers.items():
        if name not in saved_optimizers:
            wrong.append(f"it has no {name!r}" + (f", but {_listed(saved_optimizers)}" if saved_optimizers else ""))
        else:
            wrong += _plan_optimizer(name, optimizer, parts, manifest, tensor_of, plan)
    wrong += _plan_trees(parts, manifest, tensor_of, plan)
    if wrong and strict:
        raise CheckpointError("; ".join(wrong))
    plan.left_out[:0] = wrong
    return plan


def _plan_model(
    name: str,
    model: nn.Module,
    engine: Engine,
    manifest: Manifest,
    tensor_of: Callable[[str], torch.Tensor],
    plan: Plan,
) -> list[str]:
    saved = manifest.state["models"][name]
    main_names = {alias: param for param, own in saved["params"].items() for alias in own["aliases"]}
    pieces = local_pieces(model, engine.param_shards, buffers=True)
    shapes = {shard.name: shard.layout.shape for shard in engine.param_shards}
    found: list[tuple[str, str]] = []  # saved name and ours; one that was tied may be several here
    missing: list[str] = []
    mismatched: list[str] = []
    repeats: set[str] = set()
    for shard in engine.param_shards:
        own = (shard.name, *shard.aliases)
        there = next(
            (each for each in (*own, *(main_names.get(alias) for alias in own)) if each in saved["params"]), None
        )
        if there is None:
            missing.append(shard.name)
        else:
            found.append((there, shard.name))
            equal = next((group for group in saved.get("equal", ()) if there in group), ())
            repeats.update(set(equal) & set(own))
    for buffer in pieces.keys() - shapes.keys():
        shapes[buffer] = tuple(model.get_buffer(buffer).shape)
        if buffer in saved["buffers"]:
            found.append((buffer, buffer))
        else:
            missing.append(buffer)
    for there, here in found:
        tensor = name_there(f"{name}/{there}", engine, manifest)
        shape = manifest.tensors[tensor].shape
        if shape != shapes[here]:
            mismatched.append(f"{here} (is {list(shape)}, wanted {list(shapes[here])})")
            continue
        piece = pieces[here]
        plan.reads.append(Read(tensor, piece.start, piece.data))
        plan.filled.setdefault(name, set()).add(here)
    known = {there for there, _ in found} | repeats
    unexpected = [each for each in dict.fromkeys((*saved["params"], *saved["buffers"])) if each not in known]
    extra = decode(saved["extra_state"], tensor_of, engine.streams.device)
    modules = dict(model.named_modules())
    for module, state in extra.items():
        if module in modules and type(modules[module]).set_extra_state is not nn.Module.set_extra_state:
            plan.loads[f"{name}/{module}"] = partial(modules[module].set_extra_state, state)
        else:
            unexpected.append(f"{module}._extra_state")
    plan.finish.append(partial(put_back_buffers, model, pieces))
    kinds = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
    parts_ = [f"{kind} {_listed(each)}" for kind, each in kinds if each]
    if not parts_:
        return []
    return [f"{name} is {saved['class'] or 'a model'} and does not fit {type(model).__name__}: {', '.join(parts_)}"]


def _plan_optimizer(
    name: str,
    optimizer: Optimizer,
    parts: Parts,
    manifest: Manifest,
    tensor_of: Callable[[str], torch.Tensor],
    plan: Plan,
) -> list[str]:
    saved = manifest.state["optimizers"][name]
    device = parts.engine.streams.device
    if saved["class"] is None:  # of a system that does not say it; options tell most optimizers apart
        options = saved["groups"][0]["options"] if saved["groups"] else {}
        numbers = [key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)]
        if missing := [key for key in numbers if key not in options]:
            return [f"{name} has no options {_listed(missing)}: it is not of a {type(optimizer).__name__}"]
    elif saved["class"] != class_name(optimizer):
        return [f"{name} is {saved['class']}, wanted {class_name(optimizer)}"]
    wrong: list[str] = []
    names, owners = param_names(optimizer, parts)
    shards = {shard.param: (engine, shard) for engine, shard in owners}
    state: dict[Any, Any] = {}  # by the parameter's number; what belongs to none, by its key
    for number, param in enumerate(params_in(optimizer)):
        own: dict[str, Any] = {}
        if param in shards and is_owned(optimizer, param):
            engine = shards[param][0]
            if tree := own_part(optimizer, param, saved["state"].get(names[param], {})):
                state[number] = decode(tree, _reader(tensor_of, engine, manifest), engine.streams.device)
            continue
        if param in shards and _has_nothing(shards[param][1]):
            continue  # nothing to step, nothing to keep
        for key, value in saved["state"].get(names[param], {}).items():
            if not (isinstance(value, dict) and value.get("$") == "moment"):
                own[key] = decode(value, tensor_of, device)
                continue
            if param not in shards:
                wrong.append(f"{name}: {key!r} of {names[param]!r} is of a sharded parameter, which it is not here")
                continue
            engine, shard = shards[param]
            if value["tensor"] not in manifest.tensors:  # nobody has elements of it
                own[key] = torch.empty(shard.piece.shape, device=device)
                continue
            tensor = name_there(value["tensor"], engine, manifest)
            record = manifest.tensors[tensor]
            if record.shape != shard.layout.shape:
                wrong.append(
                    f"{name}: {key!r} of {shard.name!r} has shape {list(record.shape)}, wanted "
                    f"{list(shard.layout.shape)}"
                )
                own.clear()
                break
            moment = moment_of(shard, optimizer, key)
            dtype = record.torch_dtype
            if moment is None or moment.dtype != dtype or not moment.is_contiguous():
                moment = torch.empty(shard.piece.shape, dtype=dtype, device=device)
            own[key] = moment
            plan.reads.append(Read(tensor, shard.local.start, moment.detach().as_subclass(torch.Tensor).view(-1)))
        if own:
            state[number] = own
        if (value := saved["values"].get(names[param])) is not None:
            alone = decode(value, tensor_of, device)
            if alone.shape != param.shape:
                wrong.append(f"{name}: {names[param]} has shape {list(alone.shape)}, wanted {list(param.shape)}")
            else:
                plan.finish.append(partial(_fill, param, alone))
    groups, differences = _plan_groups(name, optimizer, names, saved["groups"], tensor_of, device)
    others, shared = (decode(saved[key], tensor_of, device) for key in ("others", "shared"))
    state = {**shared, **state}
    plan.finish.append(partial(optimizer.load_state_dict, {**others, "state": state, "param_groups": groups}))
    return wrong + differences


def _reader(
    tensor_of: Callable[[str], torch.Tensor], engine: Engine, manifest: Manifest
) -> Callable[[str], torch.Tensor]:
    """Reads what this rank's replica has saved of a tensor."""
    return lambda name: tensor_of(name_there(name, engine, manifest))


def _has_nothing(shard: ParamShard) -> bool:
    return bool(shard.layout.numel) and not shard.local.numel


def _fill(param: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        param.copy_(value)


def _plan_groups(
    name: str,
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Sequence[Mapping[str, Any]],
    tensor_of: Callable[[str], torch.Tensor],
    device: torch.device,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Param groups for ``load_state_dict``, with the options that were saved, and in what they differ."""
    differences = []
    mine = optimizer.state_dict()["param_groups"]
    groups = []
    if len(saved) != len(mine):
        differences.append(f"{name} has {len(saved)} param groups, wanted {len(mine)}; their options stay as they are")
    for place, (own, group) in enumerate(zip(mine, optimizer.param_groups, strict=True)):
        if len(saved) != len(mine):
            groups.append(own)
            continue
        here, there = [names[param] for param in group["params"]], saved[place]["params"]
        if missing := [each for each in here if each not in there]:
            differences.append(f"{name}: param group {place} has no {_listed(missing)}")
        if unexpected := [each for each in there if each not in here]:
            differences.append(f"{name}: param group {place} has {_listed(unexpected)}, which is not expected")
        options = decode(saved[place]["options"], tensor_of, device)
        kept = {key: value for key, value in own.items() if key in ("params", "param_names")}
        groups.append({**options, **kept})
    return groups, differences


def _plan_trees(parts: Parts, manifest: Manifest, tensor_of: Callable[[str], torch.Tensor], plan: Plan) -> list[str]:
    wrong: list[str] = []
    ranks, device = parts.engine.ranks, parts.engine.streams.device
    trees = manifest.state["trees"]
    wrong += [f"it has no {name!r}" for name in (*parts.objects, *parts.values) if name not in trees]
    for name, saved in trees.items():
        is_wanted = name in parts.objects or name.startswith("extra.")
        if name == RANDOM:
            if "all" in saved or ranks.number < len(saved["ranks"]):
                state = _tree_of(saved, ranks.number, tensor_of, device)
                plan.finish.append(partial(set_random_state, state, device))
        elif not is_wanted:
            plan.left_out.append(f"{name}: not asked for")
        elif "all" not in saved and len(saved["ranks"]) != ranks.total_size:
            wrong.append(
                f"{name!r} differs between the {len(saved['ranks'])} ranks that saved it, and {ranks.total_size} load "
                "it: nobody can say what each of them should have"
            )
        else:
            value = _tree_of(saved, ranks.number, tensor_of, device)
            if name in parts.objects:
                plan.loads[name] = partial(parts.objects[name].load_state_dict, value)
                value = parts.objects[name]
            if name.startswith("extra."):
                plan.values[name.removeprefix("extra.")] = value
    return wrong


def _tree_of(
    saved: Mapping[str, Any], rank: int, tensor_of: Callable[[str], torch.Tensor], device: torch.device
) -> Any:
    if "all" in saved:
        return decode(saved["all"], tensor_of, device)
    return decode(saved["ranks"][rank], lambda name: tensor_of(f"{name}@rank{rank}"), device)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
