"""`load_checkpoint`: a training run back from disk, on any number of ranks.

verify all bytes -> compare what was saved with what is there, changing nothing -> load objects -> read tensors
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.background import finish_running
from streamshard.checkpoint.directory import find_checkpoint, open_checkpoint, whole_checkpoints
from streamshard.checkpoint.disk_layout import local_pieces
from streamshard.checkpoint.json_codec import decode
from streamshard.checkpoint.load import put_back_buffers
from streamshard.checkpoint.manifest import CheckpointFiles, Manifest, Read
from streamshard.checkpoint.optimizer_state import is_moment, is_owned, moment_of, own_part, params_in
from streamshard.checkpoint.run_parts import (
    RANDOM,
    Parts,
    class_name,
    name_parts,
    param_names,
    set_random_state,
)
from streamshard.checkpoint.save import Models, Optimizers
from streamshard.comm.objects import gather_from_all_ranks, run_on_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.config import parse_path
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError
from streamshard.initialise import compute_buffers
from streamshard.log import log
from streamshard.unit.shard import ParamShard

__all__ = ["Loaded", "load_checkpoint"]


class Loaded(dict[str, Any]):
    """The values of ``extra`` that were saved, by key.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        super().__init__(values)
        self.path = path


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> Loaded:
    """Go on where `save_checkpoint` was called: on any number of ranks, with any units, slots and meshes.

    On as many ranks as have saved, training continues as it would have, to the bit. Every file is verified before
    anything changes; each rank reads what it owns.

    Args:
        directory: a checkpoint, or a directory of them, of which the latest that is whole is taken.
        model: as given when it was saved; so are `optimizer`, `scheduler` and `scaler`. Those that are left out stay as
            they are.
        extra: objects that were saved under the same keys, whose ``load_state_dict`` is called. Values need not be
            given.

    Returns:
        What was saved as `extra`, by key.

    Raises:
        CheckpointError: on every rank, before any weight changes; names the file that is damaged or missing and the
            newest intact checkpoint, or all parameters that do not fit.
        ConfigError: an argument that cannot work.
        ShardingError: no model is sharded, or it is called inside a forward or backward.
    """
    began = time.perf_counter()
    root = parse_path("directory", directory)
    parts = name_parts("load_checkpoint", model, optimizer, scheduler, scaler, extra, accepts_empty=True)
    ranks = parts.engine.ranks
    files = _open(root, ranks)
    path, manifest = files.root, files.manifest

    def compare() -> Plan:
        plan = plan_restore(parts, manifest, files.read_whole)
        for read in plan.reads:
            files.map_for(read)
        return plan

    plan = run_on_all_ranks(ranks, f"load {path}", compare)
    run_on_all_ranks(ranks, f"load {path}", lambda: _load_objects(plan))
    # From here on only the storage itself can fail.
    half = f"finish loading {path}, and half of it is loaded now: load again before going on"
    run_on_all_ranks(ranks, half, lambda: _read(plan, files))
    for name, (each, engine) in parts.models.items():
        engine.fill(plan.filled.get(name, ()))
        compute_buffers(engine, each)
    log.info("loaded %s in %.1f s", path, time.perf_counter() - began)
    return Loaded(plan.values, path)


def _open(root: Path, ranks: Ranks) -> CheckpointFiles:
    """The checkpoint that all ranks load, verified. Collective."""

    def find() -> Path:
        finish_running()
        return find_checkpoint(root) if ranks.is_first else Path()

    path = gather_from_all_ranks(ranks, f"load {root}", find)[0]
    try:
        files = run_on_all_ranks(ranks, f"load {path}", lambda: open_checkpoint(path))
        if not ranks.are_equal(repr((files.manifest.files, files.manifest.versions))):
            raise CheckpointError(f"ranks see different checkpoints at {path}: it has to be on shared storage")
        files.verify_together(ranks)
        return files
    except CheckpointError as error:  # the same on all ranks
        intact = _newest_intact(path, ranks)
        advice = "" if intact is None else f". The newest intact checkpoint beside it is {intact}"
        raise CheckpointError(f"{error}{advice}") from error


def _newest_intact(path: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint beside `path` whose files are what their checksums say. Collective."""

    def find() -> list[Path]:
        return [each for each in whole_checkpoints(path.parent) if each != path] if ranks.is_first else []

    for other in gather_from_all_ranks(ranks, f"find checkpoints beside {path}", find)[0]:
        with contextlib.suppress(CheckpointError):
            run_on_all_ranks(ranks, f"open {other}", lambda: open_checkpoint(other)).verify_together(ranks)  # noqa: B023
            return other
    return None


def _load_objects(plan: Plan) -> None:
    for name, load in plan.loads.items():
        try:
            load()
        except Exception as error:
            raise CheckpointError(f"{name} does not take its state: {type(error).__name__}: {error}") from error


def _read(plan: Plan, files: CheckpointFiles) -> None:
    with torch.no_grad():
        for each in plan.reads:
            files.read_tensor(each)
    for finish in plan.finish:
        finish()


# ------------------------------------------------------------------------------------------------ comparing


class Plan(NamedTuple):
    """What a rank does to take over a checkpoint, found without changing anything.

    Attributes:
        loads: of users' objects, which may refuse what they are given; by name.
        reads: what is read, and where to.
        finish: what follows once all of it is read.
        filled: by model, the parameters and buffers that are read.
        values: plain ones that were saved, by the user's key.
        wrong: what does not fit.
    """

    loads: dict[str, Callable[[], object]]
    reads: list[Read]
    finish: list[Callable[[], object]]
    filled: dict[str, set[str]]
    values: dict[str, Any]
    wrong: list[str]


def plan_restore(parts: Parts, manifest: Manifest, tensor_of: Callable[[str], torch.Tensor]) -> Plan:
    """Compare what was saved with what is there.

    Args:
        parts: what is there.
        manifest: what was saved.
        tensor_of: a saved tensor in new CPU memory, by name; for small ones.

    Raises:
        CheckpointError: names all that is missing, not expected, or of another shape.
    """
    plan = Plan({}, [], [], {}, {}, [])
    saved_models, saved_optimizers = manifest.state["models"], manifest.state["optimizers"]
    for name, (model, engine) in parts.models.items():
        if name not in saved_models:
            plan.wrong.append(f"it has no {name!r}, but {_listed(saved_models)}")
        else:
            _plan_model(name, model, engine, manifest, tensor_of, plan)
    for name, optimizer in parts.optimizers.items():
        if name not in saved_optimizers:
            plan.wrong.append(f"it has no {name!r}, but {_listed(saved_optimizers) or 'no optimizer'}")
        else:
            _plan_optimizer(name, optimizer, parts, manifest, tensor_of, plan)
    _plan_trees(parts, manifest, tensor_of, plan)
    if plan.wrong:
        raise CheckpointError("; ".join(plan.wrong))
    return plan


def _plan_model(
    name: str,
    model: nn.Module,
    engine: Engine,
    manifest: Manifest,
    tensor_of: Callable[[str], torch.Tensor],
    plan: Plan,
) -> None:
    saved = manifest.state["models"][name]
    pieces = local_pieces(model, engine.param_shards, buffers=True)
    shapes = {shard.name: shard.layout.shape for shard in engine.param_shards}
    shapes |= {name: tuple(model.get_buffer(name).shape) for name in pieces.keys() - shapes.keys()}
    found, unexpected = _match_names(engine.param_shards, pieces, saved)
    wrong = {"missing": sorted(pieces.keys() - found.keys()), "unexpected": unexpected, "mismatched": []}
    for here, there in found.items():
        tensor = _name_there(f"{name}/{there}", engine, manifest)
        shape = manifest.tensors[tensor].shape
        if shape != shapes[here]:
            wrong["mismatched"].append(f"{here} (is {list(shape)}, wanted {list(shapes[here])})")
        plan.reads.append(Read(tensor, pieces[here].start, pieces[here].data))
    plan.filled[name] = set(found)
    modules = dict(model.named_modules())
    for module, state in decode(saved["extra_state"], tensor_of, engine.streams.device).items():
        if module in modules and type(modules[module]).set_extra_state is not nn.Module.set_extra_state:
            plan.loads[f"{name}/{module}"] = partial(modules[module].set_extra_state, state)
        else:
            wrong["unexpected"].append(f"{module}._extra_state")
    plan.finish.append(partial(put_back_buffers, model, pieces))
    told = ", ".join(f"{kind} {_listed(names)}" for kind, names in wrong.items() if names)
    if told:
        plan.wrong.append(f"{name} is {saved['class'] or 'a model'} and does not fit {type(model).__name__}: {told}")


def _match_names(
    shards: Sequence[ParamShard], names: Iterable[str], saved: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """By parameter or buffer, its name in the checkpoint; and the names that only the checkpoint has.

    A tied parameter may have been saved under another of its names. One that was tied may be several here.
    """
    main_names = {alias: param for param, own in saved["params"].items() for alias in own["aliases"]}
    found: dict[str, str] = {}
    known: set[str] = set()
    for shard in shards:
        own = (shard.name, *shard.aliases)
        names_there = (*own, *(main_names.get(alias) for alias in own))
        there = next((each for each in names_there if each in saved["params"]), None)
        if there is not None:
            found[shard.name] = there
            for group in saved.get("equal", ()):  # FSDP2's checkpoints have every name of a tied parameter
                if there in group:
                    known.update(set(own).intersection(group))
    params = {shard.name for shard in shards}
    found |= {name: name for name in names if name not in params and name in saved["buffers"]}
    known |= set(found.values())
    return found, [each for each in dict.fromkeys((*saved["params"], *saved["buffers"])) if each not in known]


def _plan_optimizer(
    name: str,
    optimizer: Optimizer,
    parts: Parts,
    manifest: Manifest,
    tensor_of: Callable[[str], torch.Tensor],
    plan: Plan,
) -> None:
    saved = manifest.state["optimizers"][name]
    device = parts.engine.streams.device
    if problem := _other_class(name, optimizer, saved):
        plan.wrong.append(problem)
        return
    names, owners = param_names(optimizer, parts)
    sharded = {shard.param: (engine, shard) for engine, shard in owners}
    state: dict[Any, Any] = decode(saved["shared"], tensor_of, device)  # by the parameter's number, or of none
    for number, param in enumerate(params_in(optimizer)):
        values = saved["state"].get(names[param], {})
        if param not in sharded:
            if any(map(is_moment, values.values())):
                plan.wrong.append(f"{name}: {names[param]!r} was sharded when it was saved, and is not here")
            else:
                state[number] = decode(values, tensor_of, device)
        elif is_owned(optimizer, param):
            engine = sharded[param][0]
            own = own_part(optimizer, param, values)
            state[number] = decode(own, lambda each: tensor_of(_name_there(each, engine, manifest)), device)  # noqa: B023
        elif sharded[param][1].local.numel or not sharded[param][1].layout.numel:  # else nothing to step or keep
            state[number] = _plan_moments(name, optimizer, *sharded[param], values, manifest, tensor_of, plan)
        if number in state and not state[number]:
            del state[number]
    groups = _plan_groups(name, optimizer, names, saved["groups"], tensor_of, device, plan)
    others = decode(saved["others"], tensor_of, device)
    plan.finish.append(partial(optimizer.load_state_dict, {**others, "state": state, "param_groups": groups}))


def _other_class(name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> str:
    """Why the state is not of this optimizer's class; "" if it is."""
    if saved["class"] is None:  # of DCP, which does not say it; options tell most optimizers apart
        options = saved["groups"][0]["options"] if saved["groups"] else {}
        numbers = [key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)]
        missing = [key for key in numbers if key not in options]
        kind = type(optimizer).__name__
        return f"{name} has no options {_listed(missing)}: it is not of a {kind}" if missing else ""
    same = saved["class"] == class_name(optimizer)
    return "" if same else f"{name} is {saved['class']}, wanted {class_name(optimizer)}"


def _plan_moments(
    name: str,
    optimizer: Optimizer,
    engine: Engine,
    shard: ParamShard,
    values: Mapping[str, Any],
    manifest: Manifest,
    tensor_of: Callable[[str], torch.Tensor],
    plan: Plan,
) -> dict[str, Any]:
    """What this rank keeps of a parameter of which it steps a piece. Moments are read in place where it has them."""
    own: dict[str, Any] = {}
    device = engine.streams.device
    for key, value in values.items():
        if not is_moment(value):
            own[key] = decode(value, tensor_of, device)
            continue
        tensor = _name_there(value["tensor"], engine, manifest)
        record = manifest.tensors[tensor]
        if record.shape != shard.layout.shape:
            shapes = f"{list(record.shape)}, wanted {list(shard.layout.shape)}"
            plan.wrong.append(f"{name}: {key!r} of {shard.name!r} has shape {shapes}")
            return {}
        moment = moment_of(shard, optimizer, key)
        if moment is None or moment.dtype != record.torch_dtype or not moment.is_contiguous():
            moment = torch.empty(shard.piece.shape, dtype=record.torch_dtype, device=device)
        own[key] = moment
        plan.reads.append(Read(tensor, shard.local.start, moment.detach().as_subclass(torch.Tensor).view(-1)))
    return own


def _name_there(tensor: str, engine: Engine, manifest: Manifest) -> str:
    """The name under which this rank's replica, or the first one, has saved a tensor."""
    own = f"{tensor}@replica{engine.ranks.replica}"
    return own if own in manifest.tensors else tensor


def _plan_groups(
    name: str,
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Sequence[Mapping[str, Any]],
    tensor_of: Callable[[str], torch.Tensor],
    device: torch.device,
    plan: Plan,
) -> list[dict[str, Any]]:
    """Param groups for ``load_state_dict``, with the options that were saved."""
    mine = optimizer.state_dict()["param_groups"]
    if len(saved) != len(mine):
        plan.wrong.append(f"{name} has {len(saved)} param groups, wanted {len(mine)}")
        return []
    groups = []
    for place, (own, group) in enumerate(zip(mine, optimizer.param_groups, strict=True)):
        here, there = [names[param] for param in group["params"]], saved[place]["params"]
        if missing := [each for each in here if each not in there]:
            plan.wrong.append(f"{name}: param group {place} has no {_listed(missing)}")
        if unexpected := [each for each in there if each not in here]:
            plan.wrong.append(f"{name}: param group {place} has {_listed(unexpected)}, which is not expected")
        options = decode(saved[place]["options"], tensor_of, device)
        groups.append({**options, **{key: own[key] for key in ("params", "param_names") if key in own}})
    return groups


def _plan_trees(parts: Parts, manifest: Manifest, tensor_of: Callable[[str], torch.Tensor], plan: Plan) -> None:
    ranks, device = parts.engine.ranks, parts.engine.streams.device
    trees = manifest.state["trees"]
    plan.wrong.extend(f"it has no {name!r}" for name in (*parts.objects, *parts.values) if name not in trees)
    for name, saved in trees.items():
        if name == RANDOM:
            if "all" in saved or ranks.number < len(saved["ranks"]):
                state = _tree_of(saved, ranks.number, tensor_of, device)
                plan.finish.append(partial(set_random_state, state, device))
        elif name not in parts.objects and not name.startswith("extra."):
            continue  # not asked for
        elif "all" not in saved and len(saved["ranks"]) != ranks.total_size:
            plan.wrong.append(
                f"{name!r} differs between the {len(saved['ranks'])} ranks that saved it: load it on as many, not on "
                f"{ranks.total_size}"
            )
        else:
            value = _tree_of(saved, ranks.number, tensor_of, device)
            if name in parts.objects:
                plan.loads[name] = partial(parts.objects[name].load_state_dict, value)
                value = parts.objects[name]
            if name.startswith("extra."):
                plan.values[name.removeprefix("extra.")] = value


def _tree_of(
    saved: Mapping[str, Any], rank: int, tensor_of: Callable[[str], torch.Tensor], device: torch.device
) -> Any:
    if "all" in saved:
        return decode(saved["all"], tensor_of, device)
    return decode(saved["ranks"][rank], lambda name: tensor_of(f"{name}@rank{rank}"), device)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
