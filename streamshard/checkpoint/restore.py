"""`load_checkpoint`: continue a training run from disk, on any number of ranks.

verify all bytes -> compare the checkpoint with the run, changing nothing -> load objects -> read tensors
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.background import finish_running
from streamshard.checkpoint.directory import find_checkpoint, open_checkpoint, whole_checkpoints
from streamshard.checkpoint.disk_layout import local_pieces
from streamshard.checkpoint.load import put_back_buffers
from streamshard.checkpoint.manifest import CheckpointFiles, Read, decode
from streamshard.checkpoint.optimizer_state import is_moment, is_owned, own_part, params_in
from streamshard.checkpoint.run_parts import (
    RANDOM,
    Parts,
    class_name,
    name_parts,
    param_names,
    set_random_state,
)
from streamshard.checkpoint.save import Models, Optimizers
from streamshard.comm.communicator import Communicator
from streamshard.comm.objects import gather_from_all_ranks, run_on_all_ranks
from streamshard.config import parse_path
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError, log
from streamshard.initialise import compute_buffers
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
    """Continue from a checkpoint of `save_checkpoint`: on any number of ranks, with any units, slots and meshes.

    On the same number of ranks training continues bit for bit. Every file is verified before anything changes. Each
    rank reads only the parts that it owns.

    Args:
        directory: a checkpoint, or a directory of checkpoints: the latest whole one is used.
        model: as given to `save_checkpoint`. The same holds for `optimizer`, `scheduler` and `scaler`; those that you
            leave out stay as they are.
        extra: objects saved under the same keys; their ``load_state_dict`` is called. Plain values need not be passed.

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
    path = files.root

    plan = run_on_all_ranks(ranks, f"load {path}", lambda: Plan(parts, files))
    run_on_all_ranks(ranks, f"load {path}", lambda: _load_objects(plan))
    # From here on only the storage itself can fail.
    half = f"finish loading {path}, and half of it is loaded now: load again before going on"
    run_on_all_ranks(ranks, half, lambda: _read(plan, files))
    for name, (each, engine) in parts.models.items():
        engine.fill(plan.filled.get(name, ()))
        compute_buffers(engine, each)
    log.info("loaded %s in %.1f s", path, time.perf_counter() - began)
    return Loaded(plan.values, path)


def _open(root: Path, ranks: Communicator) -> CheckpointFiles:
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


def _newest_intact(path: Path, ranks: Communicator) -> Path | None:
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


class Plan:
    """The steps in which a rank loads a checkpoint. Making a plan changes nothing.

    Args:
        parts: the run.
        files: the checkpoint.

    Attributes:
        loads: calls of ``load_state_dict`` of users' objects, which may raise; by name.
        reads: tensors to read, and their targets.
        finish: functions to call when all tensors are read.
        filled: by model, the parameters and buffers that are read.
        values: saved plain values, by the user's key.

    Raises:
        CheckpointError: names all tensors that are missing, not expected, or of another shape.
    """

    def __init__(self, parts: Parts, files: CheckpointFiles) -> None:
        self.loads: dict[str, Callable[[], object]] = {}
        self.reads: list[Read] = []
        self.finish: list[Callable[[], object]] = []
        self.filled: dict[str, set[str]] = {}
        self.values: dict[str, Any] = {}
        self._parts, self._manifest, self._read_whole = parts, files.manifest, files.read_whole
        self._device = parts.engine.streams.device
        self._wrong: list[str] = []
        state = self._manifest.state
        for kind, mine in (("models", parts.models), ("optimizers", parts.optimizers)):
            for name in mine:
                if name not in state[kind]:
                    self._wrong.append(f"it has no {name!r}, but {_listed(state[kind]) or 'none'}")
                elif kind == "models":
                    self._plan_model(name, *parts.models[name])
                else:
                    self._plan_optimizer(name, parts.optimizers[name])
        self._plan_trees()
        if self._wrong:
            raise CheckpointError("; ".join(self._wrong))
        for read in self.reads:
            files.map_for(read)

    def _decode(self, saved: Any) -> Any:
        return decode(saved, self._read_whole, self._device)

    def _plan_model(self, name: str, model: nn.Module, engine: Engine) -> None:
        saved = self._manifest.state["models"][name]
        pieces = local_pieces(model, engine.param_shards, buffers=True)
        shapes = {shard.name: shard.layout.shape for shard in engine.param_shards}
        shapes |= {name: tuple(model.get_buffer(name).shape) for name in pieces.keys() - shapes.keys()}
        found, unexpected = _match_names(engine.param_shards, pieces, saved)
        wrong = {"missing": sorted(pieces.keys() - found.keys()), "unexpected": unexpected, "mismatched": []}
        for here, there in found.items():
            tensor = self._name_there(f"{name}/{there}", engine)
            shape = self._manifest.tensors[tensor].shape
            if shape != shapes[here]:
                wrong["mismatched"].append(f"{here} (is {list(shape)}, wanted {list(shapes[here])})")
            self.reads.append(Read(tensor, pieces[here].start, pieces[here].data))
        self.filled[name] = set(found)
        modules = dict(model.named_modules())
        for module, state in self._decode(saved["extra_state"]).items():
            if module in modules and type(modules[module]).set_extra_state is not nn.Module.set_extra_state:
                self.loads[f"{name}/{module}"] = partial(modules[module].set_extra_state, state)
            else:
                unexpected.append(f"{module}._extra_state")
        self.finish.append(partial(put_back_buffers, model, pieces))
        if told := ", ".join(f"{kind} {_listed(names)}" for kind, names in wrong.items() if names):
            kind = saved["class"] or "a model"
            self._wrong.append(f"{name} is {kind} and does not fit {type(model).__name__}: {told}")

    def _plan_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved = self._manifest.state["optimizers"][name]
        if problem := _other_class(name, optimizer, saved):
            self._wrong.append(problem)
            return
        names, owners = param_names(optimizer, self._parts)
        sharded = {shard.param: (engine, shard) for engine, shard in owners}
        state: dict[Any, Any] = {}
        for number, param in enumerate(params_in(optimizer)):
            values = saved["state"].get(names[param], {})
            if param not in sharded:
                if any(map(is_moment, values.values())):
                    self._wrong.append(f"{name}: {names[param]!r} was sharded when it was saved, and is not here")
                    continue
                state[number] = self._decode(values)
            elif is_owned(optimizer, param):
                engine = sharded[param][0]
                own = own_part(optimizer, param, values)
                state[number] = decode(own, lambda each: self._read_whole(self._name_there(each, engine)), self._device)  # noqa: B023
            else:
                state[number] = self._plan_moments(name, *sharded[param], values)
        state = {**self._decode(saved["shared"]), **{number: own for number, own in state.items() if own}}
        groups = self._plan_groups(name, optimizer, names, saved["groups"])
        loaded = {**self._decode(saved["others"]), "state": state, "param_groups": groups}
        self.finish.append(partial(optimizer.load_state_dict, loaded))

    def _plan_moments(self, name: str, engine: Engine, shard: ParamShard, values: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's optimizer state of a parameter of which it steps a piece."""
        own: dict[str, Any] = {}
        if shard.layout.numel and not shard.local.numel:
            return own  # nothing to step
        for key, value in values.items():
            if not is_moment(value):
                own[key] = self._decode(value)
                continue
            tensor = self._name_there(value["tensor"], engine)
            record = self._manifest.tensors[tensor]
            if record.shape != shard.layout.shape:
                shapes = f"{list(record.shape)}, wanted {list(shard.layout.shape)}"
                self._wrong.append(f"{name}: {key!r} of {shard.name!r} has shape {shapes}")
                return {}
            own[key] = torch.empty(shard.piece.shape, dtype=record.torch_dtype, device=self._device)
            self.reads.append(Read(tensor, shard.local.start, own[key].view(-1)))
        return own

    def _name_there(self, tensor: str, engine: Engine) -> str:
        """The name under which this rank's replica, or the first one, has saved a tensor."""
        own = f"{tensor}@replica{engine.ranks.replica}"
        return own if own in self._manifest.tensors else tensor

    def _plan_groups(
        self, name: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Param groups for ``load_state_dict``, with the options that were saved."""
        mine = optimizer.state_dict()["param_groups"]
        if len(saved) != len(mine):
            self._wrong.append(f"{name} has {len(saved)} param groups, wanted {len(mine)}")
            return []
        groups = []
        for place, (own, group) in enumerate(zip(mine, optimizer.param_groups, strict=True)):
            here, there = [names[param] for param in group["params"]], saved[place]["params"]
            if missing := [each for each in here if each not in there]:
                self._wrong.append(f"{name}: param group {place} has no {_listed(missing)}")
            if unexpected := [each for each in there if each not in here]:
                self._wrong.append(f"{name}: param group {place} has {_listed(unexpected)}, which is not expected")
            kept = {key: own[key] for key in ("params", "param_names") if key in own}
            groups.append({**self._decode(saved[place]["options"]), **kept})
        return groups

    def _plan_trees(self) -> None:
        parts, ranks, trees = self._parts, self._parts.engine.ranks, self._manifest.state["trees"]
        self._wrong += [f"it has no {name!r}" for name in (*parts.objects, *parts.values) if name not in trees]
        for name, saved in trees.items():
            if name == RANDOM:
                if "all" in saved or ranks.number < len(saved["ranks"]):
                    self.finish.append(partial(set_random_state, self._tree_of(saved), self._device))
            elif name not in parts.objects and not name.startswith("extra."):
                continue  # not asked for
            elif "all" not in saved and len(saved["ranks"]) != ranks.total_size:
                self._wrong.append(
                    f"{name!r} differs between the {len(saved['ranks'])} ranks that saved it: load it on as many, not "
                    f"on {ranks.total_size}"
                )
            else:
                value = self._tree_of(saved)
                if name in parts.objects:
                    self.loads[name] = partial(parts.objects[name].load_state_dict, value)
                    value = parts.objects[name]
                if name.startswith("extra."):
                    self.values[name.removeprefix("extra.")] = value

    def _tree_of(self, saved: Mapping[str, Any]) -> Any:
        """This rank's tree, or that of all ranks."""
        if "all" in saved:
            return self._decode(saved["all"])
        rank = self._parts.engine.ranks.number
        return decode(saved["ranks"][rank], lambda name: self._read_whole(f"{name}@rank{rank}"), self._device)


def _match_names(
    shards: Sequence[ParamShard], names: Iterable[str], saved: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """By parameter or buffer, its name in the checkpoint; and the names that only the checkpoint has.

    A tied parameter may have been saved under another of its names. One that was tied may be several here.
    """
    main_names = {alias: param for param, own in saved["params"].items() for alias in own["aliases"]}
    found: dict[str, str] = {}
    for shard in shards:
        own = (shard.name, *shard.aliases)
        names_there = (*own, *(main_names.get(alias) for alias in own))
        there = next((each for each in names_there if each in saved["params"]), None)
        if there is not None:
            found[shard.name] = there
    params = {shard.name for shard in shards}
    found |= {name: main_names.get(name, name) for name in names if name not in params and name in saved["buffers"]}
    known = {*found.values(), *main_names}
    return found, [each for each in dict.fromkeys((*saved["params"], *saved["buffers"])) if each not in known]


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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
