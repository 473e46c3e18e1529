"""`load_checkpoint`: continue a training run from disk, on any number of ranks.

verify all bytes -> compare the checkpoint with the run, changing nothing -> load objects -> read tensors
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.block_state import extent_of, put_together
from streamshard.checkpoint.directory import open_intact
from streamshard.checkpoint.disk_layout import TensorPiece, fill_buffers, local_pieces, saved_names
from streamshard.checkpoint.json_codec import CPU, decode, encode, with_pieces
from streamshard.checkpoint.manifest import CheckpointFiles, name_of_replica
from streamshard.checkpoint.optimizer_state import owner_ranks, steps_here
from streamshard.checkpoint.run_parts import RANDOM, Models, Optimizers, RunParts, class_name, facts_of, has_state
from streamshard.checkpoint.safetensors_file import Copy, copy_ranges
from streamshard.checkpoint.saving import finish_running
from streamshard.checkpoint.storage import Location, parse_location, storage_of
from streamshard.comm.ranks import run_on_all_ranks
from streamshard.config import did_you_mean
from streamshard.core.engine import Engine
from streamshard.core.optimizer_kinds import params_in
from streamshard.core.params import Param
from streamshard.errors import CheckpointError, log, printable
from streamshard.guards.sharded_tensor import ShardedTensor
from streamshard.initialise import compute_buffers


class Loaded(dict[str, Any]):
    """The values that were saved as ``extra``, by key.

    Attributes:
        path: the checkpoint's path or URL.
        passed_over: by path, why a checkpoint was not loaded that is newer, or unreadable and maybe newer.
        by_rank: by key, the values of all ranks that saved, in their order, tensors in host memory. It has the keys
            whose values differed between these ranks, if their number is not this run's.
    """

    def __init__(self, path: Location, passed_over: Mapping[Location, str]) -> None:
        self.path = path
        self.passed_over = dict(passed_over)
        self.by_rank: dict[str, list[Any]] = {}

    def __missing__(self, key: str) -> NoReturn:
        if key in self.by_rank:
            raise KeyError(f"{key!r} differs between the ranks that saved it: see by_rank")
        there = f"the checkpoint's keys are {list(self)}" if self else "the checkpoint was saved without extra"
        raise KeyError(f"{key!r}: {there}{did_you_mean(key, self)}")


@torch.no_grad()
def load_checkpoint(
    directory: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Loaded:
    """Continue from a checkpoint of `save_checkpoint`, on any number of ranks, with any units, slots and meshes.

    On the same number of ranks training continues bit for bit. Ranks verify all files before anything changes. Then
    each rank reads only its own parts. A value that differed between ranks goes back to its rank, or into
    `Loaded.by_rank` on another number of ranks. There modules' extra state that differed is rank 0's.

    Args:
        directory: a directory of checkpoints, whose newest intact one is loaded, or the path of one checkpoint, on a
            file system or at a URL of object storage (``s3://``, ``gs://``; see `save_checkpoint`). If
            newer ones are damaged, rank 0 logs a warning, and `Loaded.passed_over` names them.
        model: as given to `save_checkpoint`.
        optimizer: as given to `save_checkpoint`. None: load no optimizer.
        extra: objects, by the keys under which they were saved; their ``load_state_dict`` is called. Do not pass plain
            values: they are returned.

    Returns:
        The values that were saved as `extra`, by key.

    Raises:
        CheckpointError: on every rank, before any weight changes. Names all parameters that do not fit, an object that
            differed between another number of ranks, or the damaged file of each checkpoint that was tried.
        ConfigError: an argument that cannot work.
        ShardingError: a model is not sharded, or the call is inside a forward or backward.
    """
    root = parse_location("directory", directory, "load_checkpoint(directory, model, optimizer)")
    parts = RunParts.of("load_checkpoint", model, optimizer, extra, accepts_empty=True)
    ranks = parts.engine.ranks
    run_on_all_ranks(ranks, "load", lambda: storage_of(root), at=root)  # raises if a package is missing
    run_on_all_ranks(ranks, "load", finish_running, at=root)  # its checkpoint may be the newest
    files, passed_over = open_intact(root, ranks)
    path = files.root
    with contextlib.ExitStack() as loading:
        # A late step that has failed matters no more only if weights and state are both loaded.
        for _, engine in parts.models.values() if parts.optimizers else ():
            if engine.host is not None:
                loading.enter_context(engine.host.loading())
        plan = run_on_all_ranks(ranks, "load", lambda: LoadPlan(parts, files, passed_over), at=path)
        # Before weights change: users' methods may raise.
        run_on_all_ranks(ranks, "load", lambda: [act() for act in plan.loads], at=path)
        # From here on only the storage itself can fail.
        doing, half = "finish loading", f"{path}, and a part of it is loaded now: load again before going on"
        run_on_all_ranks(ranks, doing, lambda: copy_ranges(plan.copies), at=half)
        run_on_all_ranks(ranks, doing, lambda: [act() for act in plan.steps], at=half)
    for each, engine in parts.models.values():
        engine.expire_weights()
        engine.fill(set(saved_names(each, engine).values()))
        compute_buffers(engine, each)  # of a model from meta: buffers that are not persistent are in no file
    log.info("loaded %s", printable(str(path)))
    return plan.loaded


# ------------------------------------------------------------------------------------------------ comparing


class LoadPlan:
    """The steps in which a rank loads a checkpoint. Making a plan changes nothing.

    Args:
        parts: the run.
        files: the checkpoint.
        passed_over: see `Loaded`.

    Attributes:
        loads: calls of ``load_state_dict`` of the user's objects, which may raise.
        copies: of tensors in files; made after `loads`.
        steps: run after `copies`, in order, because they need these.
        loaded: for the user, with the saved plain values.

    Raises:
        CheckpointError: names all tensors that are missing, not expected, or of another shape.
    """

    def __init__(self, parts: RunParts, files: CheckpointFiles, passed_over: Mapping[Location, str]) -> None:
        self.loads: list[Callable[[], object]] = []
        self.copies: list[Copy] = []
        self.steps: list[Callable[[], object]] = []
        self.loaded = Loaded(files.root, passed_over)
        self._parts, self._files, self._tensors = parts, files, files.manifest.tensors
        self._device = parts.engine.streams.device
        self._wrong: list[str] = []
        state = files.manifest.state
        for kind, mine in (("models", parts.models), ("optimizers", parts.optimizers)):
            for name in mine:
                if name not in state[kind]:
                    self._wrong.append(f"it has no {name!r}, but {_listed(state[kind]) or 'none'}")
                elif kind == "models":
                    self._plan_model(name, *parts.models[name], state[kind][name])
                else:
                    self._plan_optimizer(name, parts.optimizers[name], state[kind][name])
        self._plan_trees(state["trees"])
        if self._wrong:
            raise CheckpointError("; ".join(self._wrong))

    def _decode(self, saved: Any, engine: Engine | None = None) -> Any:
        """The value of JSON `saved`, with full tensors: of this rank's replica, if `engine` is given."""
        return decode(saved, lambda name, on: self._files.read_whole(self._of_replica(engine, name), on), self._device)

    def _plan_piece(self, what: str, piece: TensorPiece) -> None:
        """Plan to fill `piece` with its elements of the saved tensor of its name."""
        if (found := self._tensors[piece.name].shape) != piece.shape:
            self._wrong.append(f"{what} has shape {list(found)}, wanted {list(piece.shape)}")
        else:
            self.copies.extend(self._files.find(piece.name, piece.start, piece.data, piece.box))

    def _of_replica(self, engine: Engine | None, tensor: str) -> str:
        """The name in files of a tensor: the replica's, if this rank's replica has saved its own tensor."""
        own = tensor if engine is None else name_of_replica(tensor, engine.ranks.replica)
        return own if own in self._tensors else tensor

    def _plan_model(self, name: str, model: nn.Module, engine: Engine, saved: Mapping[str, Any]) -> None:
        own, pieces = facts_of(model, engine), local_pieces(model, engine, buffers=True)
        if saved.get("quantization") not in (None, own["quantization"]):
            self._wrong.append(f"{name}: its packed weights were quantized with other scales, so their bytes differ")
        found: dict[str, str] = {}
        for each, source in own["names"].items():  # one of several tied names is enough
            if each in saved["names"]:
                found.setdefault(source, saved["names"][each])
        unexpected = sorted({*saved["names"].values()} - {*found.values()})
        wrong = {"missing": sorted(pieces.keys() - found.keys()), "unexpected": unexpected}
        for here, there in found.items():
            tensor = self._of_replica(engine, f"{name}/{there}")
            self._plan_piece(f"{name}: {here!r}", pieces[here]._replace(name=tensor))
        self.steps.append(partial(fill_buffers, model, pieces))
        if told := ", ".join(f"{kind} {_listed(names)}" for kind, names in wrong.items() if names):
            self._wrong.append(
                f"{name} is {saved['class'] or 'a model'} and does not fit {type(model).__name__}: {told}"
            )

    def _plan_optimizer(self, name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        names, sharded = self._parts.names_of(optimizer)
        rest = {key: self._decode(saved[key]) for key in saved if key not in ("class", "state")}
        here = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        there = [group.pop("params") for group in rest["param_groups"]]
        if problem := _other_class(optimizer, saved["class"], rest["param_groups"]) or _other_groups(here, there):
            self._wrong.append(f"{name} {problem}")
            return
        state: dict[Any, Any] = rest.pop("shared")
        owners = owner_ranks(optimizer)
        for number, param in enumerate(params_in(optimizer.param_groups)):
            values, place = saved["state"].get(names[param], {}), sharded.get(param)
            if place is not None and not steps_here(owners.get(id(param)), *place):
                continue
            if place is None or id(param) in owners:
                own, shape = self._decode(values, None if place is None else place[0]), tuple(param.shape)
            else:
                own = decode(values, partial(self._plan_moment, name, *place), self._device)
                shape = place[1].piece.local_shape
            if own and not self._wrong:  # a tensor that does not fit has no values to put together
                state[number] = put_together(own, shape)
        groups = zip(rest["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
        # torch wants numbers, the checkpoint has names.
        rest["param_groups"] = [{**options, "params": own["params"]} for options, own in groups]
        self.steps.append(partial(optimizer.load_state_dict, {**rest, "state": state}))

    def _plan_moment(self, name: str, engine: Engine, shard: Param, saved: str, where: object) -> torch.Tensor:
        """A tensor for this rank's piece of the saved tensor `saved`, to be filled later."""
        tensor = self._of_replica(engine, saved)
        found = self._tensors[tensor]
        extent = extent_of(saved, shard, found.shape)
        shape = extent.local_shape if found.shape == extent.shape else (0,)  # else `_plan_piece` notes the mismatch
        piece = torch.empty(shape, dtype=found.dtype, device=shard.sharded.device)
        self._plan_piece(f"{name}: {saved!r}", TensorPiece.of(tensor, extent, piece))
        return piece

    def _load_piece(self, what: str, tensor: str, of: str) -> torch.Tensor:
        """This rank's piece of a saved tensor in an object of the user's. It is cut as the parameter `of`."""
        found = self._tensors[tensor]
        params = ((engine, param) for _, engine in self._parts.models.values() for param in engine.params)
        for engine, param in params:
            if param.name == of and (piece := param.piece).shape == found.shape:  # several models may have this name
                local = torch.empty(piece.local_shape, dtype=found.dtype, device=param.sharded.device)
                tensor = self._of_replica(engine, tensor)
                copy_ranges(self._files.find(tensor, piece.start, local.view(-1), piece.box))
                return ShardedTensor.wrap(local, piece)
        self._wrong.append(f"{what}: {tensor!r} is cut as parameter {of!r} of shape {list(found.shape)}")
        return torch.empty(0)

    def _plan_trees(self, trees: Mapping[str, Any]) -> None:
        mine, ranks = self._parts.trees, self._parts.engine.ranks
        # A checkpoint converted from DCP has neither extra state nor random numbers.
        self._wrong += [f"it has no {name!r}" for name in mine if name not in trees and name.startswith("extra.")]
        for name in sorted(trees, key=lambda name: name == RANDOM):  # other objects may draw random numbers
            saved, key = trees[name], name.removeprefix("extra.")
            if name not in mine and key == name:
                continue  # not asked for
            told = f"{name!r} differs between the {len(saved)} ranks that saved it"
            if len(saved) in (1, ranks.total_size):
                self._plan_tree(name, saved[ranks.total_rank if len(saved) > 1 else 0])
            elif key != name and has_state(mine.get(name)):
                self._wrong.append(f"{told}: leave it out of extra=. The result's by_rank[{key!r}] has its values")
            elif key != name:
                self.loaded.by_rank[key] = [decode(tree, self._files.read_whole, CPU) for tree in saved]
            elif name != RANDOM:  # other ranks' random numbers are of no use to this one
                if ranks.is_first:
                    log.warning("%s: now all ranks have the first rank's", told)
                self._plan_tree(name, saved[0])

    def _plan_tree(self, name: str, saved: Any) -> None:
        mine: Any = self._parts.trees.get(name)
        params = (param for _, engine in self._parts.models.values() for param in engine.params)
        cut = {param.piece.shape for param in params if not param.piece.is_ordinary}
        # Not of every object: a data loader's state_dict() may start its workers.
        inside = (found for each, found in self._tensors.items() if each.startswith((f"{name}.", f"{name}[")))
        if has_state(mine) and any(found.shape in cut for found in inside):
            saved = with_pieces(saved, encode(mine.state_dict(), name, keeps_pieces=True)[0])
        value = decode(saved, self._files.read_whole, self._device, partial(self._load_piece, name))
        if has_state(mine):
            self.loads.append(partial(mine.load_state_dict, value))
            value = mine
        if name.startswith("extra."):
            self.loaded[name.removeprefix("extra.")] = value


def _other_class(optimizer: Optimizer, saved: str | None, groups: list[dict[str, Any]]) -> str:
    """How the saved optimizer's class differs from the class of `optimizer`; "" if they are the same."""
    if saved is not None:
        return "" if saved == class_name(optimizer) else f"is {saved}, wanted {class_name(optimizer)}"
    # DCP does not store the class. Most optimizers have options of their own.
    numbers = [key for key, value in optimizer.defaults.items() if not isinstance(value, bool | None)]
    missing = [key for key in numbers if groups and key not in groups[0]]
    return f"has no options {_listed(missing)}: it is not of a {type(optimizer).__name__}" if missing else ""


def _other_groups(here: list[list[str]], there: list[list[str]]) -> str:
    """How the names in saved param groups, `there`, differ from the run's names, `here`; "" if they are the same."""
    if len(here) != len(there):
        return f"has {len(there)} param groups, wanted {len(here)}"
    for place, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if differing := sorted({*mine} ^ {*theirs}):
            return f"has another param group {place}: only one of checkpoint and run has {_listed(differing)}"
    return ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
