"""The optimizer's state: this rank's part, and the full state of all ranks.

`local_state` turns this rank's part into JSON and pieces of tensors, for checkpoints. `full_optimizer_state_dict`
makes the full state in memory, in the format of ``torch.optim.Optimizer.state_dict()``: parameters by number, in the
order of the param groups. `load_optimizer_state_dict` loads this format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.block_state import extent_of, is_part, put_together, take_apart
from streamshard.checkpoint.disk_layout import TensorPiece
from streamshard.checkpoint.json_codec import CPU, decode, encode
from streamshard.checkpoint.manifest import PieceRecord, TensorRecord, join_records, name_of_replica, runs_in
from streamshard.checkpoint.run_parts import Sharded, class_name
from streamshard.comm.communicator import Communicator
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of_both
from streamshard.core.optimizer_hooks import take_over_state
from streamshard.core.optimizer_kinds import params_in, steps_whole
from streamshard.core.params import Param
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from streamshard.guards.sharded_tensor import piece_of
from streamshard.torch_private import is_traceable_wrapper_subclass

_MESSAGE_BYTES = 1 << 26
_HAS_STEPPED = "has stepped"
_REL_TOLERANCE = 1e-6  # two machines may round the cosine of a schedule differently


def owner_ranks(optimizer: Optimizer) -> Mapping[int, int]:
    """By the id of a parameter, the rank that steps the full parameter. Ranks step pieces of all other parameters."""
    whole = steps_whole(optimizer)
    return {} if whole is None else whole.owners()


def steps_here(owner: int | None, engine: Engine, param: Param) -> bool:
    """Whether this rank has state of a parameter: it is the `owner`, or without an owner its piece has elements."""
    # Of a parameter without elements all ranks have state.
    return owner == engine.ranks.rank if owner is not None else param.local.numel > 0 or not param.layout.numel


def settle(optimizer: Optimizer, ranks: Communicator) -> None:
    """Prepare an optimizer before its state is collected. Collective for a `WholeParameterOptimizer`."""
    if (whole := steps_whole(optimizer)) is not None:
        whole.settle(ranks)


def _moments_in(values: Mapping[str, Any], param: Param) -> dict[str, torch.Tensor]:
    """By key, state with the shape of this rank's piece, as plain tensors, [n] 1-D."""
    return {
        # 1-D also if the parameter has no dims: a single number would go into JSON.
        key: value.as_subclass(torch.Tensor).detach().reshape(-1)
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)
        if value.as_subclass(torch.Tensor).shape == param.piece.local_shape
    }


def of_replica(pieces: Iterable[TensorPiece], engine: Engine) -> list[TensorPiece]:
    """The pieces that this rank's replica saves, with their names in files.

    In local SGD each replica has its own weights and saves them. Otherwise only the first replica saves.
    """
    replicas, number = engine.reductions.replicas, engine.ranks.replica
    pieces = [piece for piece in pieces if not piece.is_copy]
    if not number:
        return pieces
    is_alone = replicas is not None and not replicas.averages_grads
    return [piece._replace(name=name_of_replica(piece.name, number)) for piece in pieces if is_alone]


class LocalState(NamedTuple):
    """One rank's part of an optimizer's state.

    Attributes:
        options: JSON of the optimizer's state dict with names of parameters, its class, and state of no parameter. The
            same on all ranks.
        state: by the parameter's name, JSON of the state of parameters and pieces that this rank steps.
        pieces: this rank's pieces of the tensors.
    """

    options: dict[str, Any]
    state: dict[str, Any]
    pieces: list[TensorPiece]


def local_state(
    name: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], sharded: Sharded, ranks: Communicator
) -> LocalState:
    """Collect this rank's part of an optimizer's state.

    Args:
        name: the optimizer's name. The names of its tensors begin with it.
        optimizer: the optimizer.
        names: names of its parameters.
        sharded: its sharded parameters.
        ranks: all ranks. The first rank's state of parameters that are not sharded counts.

    Raises:
        CheckpointError, ShardingError: names state that cannot be saved.
    """
    take_over_state(optimizer)  # it may have state from before sharding, and no step since
    options, tensors = encode(_without_state(optimizer, names), name)
    pieces = TensorPiece.wholes(tensors) if ranks.is_first else []
    state: dict[str, dict[str, Any]] = {}
    owners = owner_ranks(optimizer)
    for param in params_in(optimizer.param_groups):
        place, values = sharded.get(param), take_apart(optimizer.state.get(param, {}))
        if not (ranks.is_first if place is None else steps_here(owners.get(id(param)), *place)):
            continue
        cut = place[1] if place is not None and id(param) not in owners else None  # None: this rank has all of it
        moments = {} if cut is None else _moments_in(values, cut)
        path = f"{name}/{names[param]}"
        state[names[param]], tensors = encode({**values, **moments}, path)
        is_copy = place is not None and not place[1].piece.counts
        own = [piece._replace(is_copy=is_copy) for piece in TensorPiece.wholes(tensors)]
        if cut is not None:
            own = _own_pieces(tensors, cut, {f"{path}.{key}" for key in moments})
        pieces += own if place is None else of_replica(own, place[0])
    return LocalState(options, state, pieces)


def _own_pieces(tensors: Mapping[str, torch.Tensor], param: Param, moments: Collection[str]) -> list[TensorPiece]:
    """This rank's pieces of a parameter's state. The tensors named in `moments` have a number for each element."""
    own, others = [], []
    for name, data in tensors.items():
        extent = extent_of(name, param, data.shape, is_local=True)
        if name not in moments and not (is_part(name) and math.prod(extent.local_shape) == data.numel()):
            others.append(name)
        elif not param.local.start or extent.shape != extent.local_shape:  # the first rank saves a tensor that all have
            own.append(TensorPiece.of(name, extent, data.reshape(-1)))
    if others:
        raise ShardingError(
            f"{', '.join(sorted(others))}: tensors without one number for each element of the parameter, which ranks "
            "cannot put together. Save the weights without this optimizer, or use an optimizer of torch.optim"
        )
    return own


def _without_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer's state dict with names of parameters, and without their state."""
    rest = dict(optimizer.state_dict())
    groups = [
        {**saved, "params": [names[param] for param in own["params"]]}
        for own, saved in zip(optimizer.param_groups, rest.pop("param_groups"), strict=True)
    ]
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    del rest["state"]
    return {**rest, "class": class_name(optimizer), "param_groups": groups, "shared": shared}


_CHANGE_NO_NUMBER = ("foreach", "fused")  # options that choose a kernel


def refuse_other_options(name: str, options: Mapping[str, Any], ranks: Communicator) -> None:
    """Raise on all ranks alike if an optimizer has other options on another rank. Collective.

    Args:
        name: the optimizer's name.
        options: see `LocalState`.
        ranks: all ranks.

    Raises:
        RankMismatchError: names the option, the group, and the values of two ranks.
    """
    doing = "compare options of the optimizer"
    # Options of thousands of parameters are sent only if their digests differ.
    if ranks.are_equal(doing, json.dumps(options, sort_keys=True)):
        return
    told: list[dict[str, Any]] = []
    for groups in (theirs["param_groups"] for theirs in ranks.gather_objects(doing, options)):
        told.append({"the optimizer": {"number of groups": len(groups)}})
        for number, own in enumerate(groups):
            # The order of parameters changes no number either: files name them.
            compared = {key: each for key, each in own.items() if key not in _CHANGE_NO_NUMBER}
            told[-1][f"group {number}"] = {**compared, "params": sorted(own["params"])}
    join_states(name, told)


def join_states(name: str, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """JSON of what ranks say of an optimizer: by parameter or group, and by key.

    Args:
        name: the optimizer's name.
        states: by rank, see `LocalState`.

    Raises:
        RankMismatchError: ranks say something else, such as other numbers of steps. Names the key, the parameter, and
            the values of two ranks.
    """
    known: dict[str, dict[str, Any]] = {}
    first: dict[tuple[str, str], int] = {}  # the first rank that has said so
    for rank, state in enumerate(states):
        for where, own in state.items():
            # A rank without state has not stepped, and has no other key to differ in.
            values, found = known.setdefault(where, {}), {_HAS_STEPPED: bool(own), **own}
            if found == values:  # soon: thousands of ranks have pieces of one parameter
                continue
            for key, value in found.items():
                other, wanted = first.setdefault((where, key), rank), values.setdefault(key, value)
                if not _are_close(value, wanted):
                    raise RankMismatchError(
                        f"{name}: {key!r} of {where} is {_shown(wanted)} on rank {other} and {_shown(value)} on rank "
                        f"{rank}, so ranks step their pieces differently. Nothing is written. Use the same options and "
                        "take the same steps on all ranks; average a loss over ranks before a schedule uses it. Or "
                        "save without this optimizer"
                    )
    return {where: {key: own[key] for key in own if key != _HAS_STEPPED} for where, own in known.items()}


def _shown(value: Any) -> Any:
    return value.get("value", value) if isinstance(value, dict) else value


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_REL_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_close(one[key], other[key]) for key in one)
    return bool(one == other)


# ------------------------------------------------------------------------------------------------ in memory


def _engine_of_all(optimizer: Optimizer, model: nn.Module) -> Engine:
    """As `engine_of_both`. Raises a ConfigError too if `optimizer` has a piece of another model."""
    engine = engine_of_both(optimizer, model)
    ours = {param.sharded for param in engine.params}
    for piece in (piece_of(param) for param in params_in(optimizer.param_groups) if param not in ours):
        if piece is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} steps {piece.name!r} of another sharded model too: make one optimizer for "
                'each model, or call save_checkpoint(directory, {"a": a, "b": b}, optimizer) and load_checkpoint'
            )
    return engine


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, rank0_only: bool = True) -> dict[str, Any]:
    """The full state of `optimizer`, as for the unsharded model, in CPU memory. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: an optimizer of the model's parameters, or some of them: elementwise, or a `WholeParameterOptimizer`.
        rank0_only: other ranks get an empty dict.

    Returns:
        The format of ``Optimizer.state_dict()``, which plain torch and ZeroRedundancyOptimizer load:
        ``{"state": {number: {name: value}}, "param_groups": [..]}``.

    Raises:
        ConfigError, ShardingError, RankMismatchError: on every rank; names the state that cannot be combined.
    """
    engine = _engine_of_all(optimizer, model)
    engine.recover()
    ranks = engine.ranks
    settle(optimizer, ranks)
    # Numbers name the parameters that are not sharded.
    names = {param: str(number) for number, param in enumerate(params_in(optimizer.param_groups))}
    sharded = {shard.sharded: (engine, shard) for shard in engine.params if shard.sharded in names}
    names |= {param: shard.name for param, (_, shard) in sharded.items()}
    name, mine = type(optimizer).__name__, list[TensorPiece]()
    options: dict[str, Any] = {}

    def outline() -> tuple[dict[str, Any], dict[str, TensorRecord]]:
        own = local_state(name, optimizer, names, sharded, ranks)
        options.update(own.options)
        mine.extend(piece for piece in own.pieces if not ranks.replica and not piece.is_copy)
        return own.state, {piece.name: piece.record(ranks.total_rank) for piece in mine}

    told = ranks.gather_results("collect the optimizer's state", outline, ShardingError)
    refuse_other_options(name, options, ranks)
    joined = join_states(name, [state for state, _ in told])
    own = {piece.name: piece.data for piece in mine}
    records = join_records(records for _, records in told)
    wanted = records if ranks.is_first or not rank0_only else {}
    wholes = {name: torch.empty(record.shape, dtype=record.dtype, device="cpu") for name, record in wanted.items()}
    _fill(wholes, records, own, engine)
    if rank0_only and not ranks.is_first:  # only now: `_fill` is collective
        return {}
    state = {
        number: put_together(decode(values, lambda name, _: wholes[name], CPU), tuple(param.shape))
        for number, param in enumerate(params_in(optimizer.param_groups))
        if (values := joined[names[param]])
    }
    packed = optimizer.state_dict()
    others = {key: value for key, value in packed["state"].items() if isinstance(key, str)}  # of no parameter
    full: dict[str, Any] = {**packed, "state": {**state, **others}}
    return full if (whole := steps_whole(optimizer)) is None else whole.join_stacks(full)


def _fill(
    wholes: Mapping[str, torch.Tensor],
    records: Mapping[str, TensorRecord],
    own: Mapping[str, torch.Tensor],
    engine: Engine,
) -> None:
    """Let each rank send its `own` pieces of all tensors, and fill `wholes`, some of these or none. Collective."""
    ranks, device = engine.ranks, engine.streams.device
    for source, dtype, pieces in _messages(records):  # in one order on all ranks: they have the same records
        sizes = [piece.stop - piece.start for _, piece in pieces]
        if source == ranks.total_rank:
            parts = torch.cat([own[name].to(device) for name, _ in pieces])
        else:
            parts = torch.empty(sum(sizes), dtype=dtype, device=device)
        ranks.broadcast(parts, source)
        for (name, (_, start, _, box)), part in zip(pieces, parts.split(sizes), strict=True):
            done = 0
            for first, numel in runs_in(box, start, part.numel()) if name in wholes else ():
                wholes[name].view(-1)[first : first + numel] = part[done : done + numel]
                done += numel


def _messages(records: Mapping[str, TensorRecord]) -> Iterator[tuple[int, torch.dtype, list[tuple[str, PieceRecord]]]]:
    """All pieces as messages of `_MESSAGE_BYTES`, or of one larger piece: the sender, the dtype, and names and pieces.

    One message for each piece would be a million of them for 70B parameters on 4,096 ranks.
    """
    begun: dict[tuple[int, torch.dtype], tuple[int, list[tuple[str, PieceRecord]]]] = {}
    for name, record in records.items():
        for piece in record.pieces:
            key, n_bytes = (piece.file, record.dtype), (piece.stop - piece.start) * record.dtype.itemsize
            size, pieces = begun.setdefault(key, (0, []))
            if pieces and size + n_bytes > _MESSAGE_BYTES:
                yield (*key, pieces)
                size, pieces = 0, []
            pieces.append((name, piece))
            begun[key] = size + n_bytes, pieces
    for key, (_, pieces) in begun.items():
        yield (*key, pieces)


def load_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Load a full optimizer state, made on any number of ranks or without sharding. Call it on every rank.

    Args:
        model: a model made by `StreamShard`.
        optimizer: has the class of the optimizer that the state is from, and the same parameters in the same order.
        state_dict: from `full_optimizer_state_dict`, plain torch, or ZeroRedundancyOptimizer after
            ``consolidate_state_dict``. Rank 0's counts; other ranks may pass None.

    Raises:
        ConfigError, ShardingError: on every rank, before anything is changed; names the first parameter that is wrong.
    """
    engine = _engine_of_all(optimizer, model)
    engine.recover()
    ranks, params, device = engine.ranks, params_in(optimizer.param_groups), engine.streams.device
    known = {param.sharded: param for param in engine.params}
    given: Any = (state_dict if ranks.is_first else None) or {"state": {}, "param_groups": []}
    tensors: dict[Any, dict[str, torch.Tensor]] = {}  # the first rank's, by number

    def outline() -> tuple[dict[Any, Any], dict[str, Any]]:
        """By number, JSON of the state, and shapes and dtypes of its tensors; and all other entries."""
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping) or "param_groups" not in given:
            found = f"a {type(given).__name__} {sorted(map(str, given))!r:.200}"
            raise ShardingError(f"the optimizer state is {found}: wanted a dict with 'state' and 'param_groups'")
        whole, saved = steps_whole(optimizer), {}
        for key, values in (given if whole is None else whole.split_stacks(given))["state"].items():
            encoded, tensors[key] = encode(take_apart(values) if isinstance(key, int) else values, f"{key}")
            saved[key] = encoded, {name: (each.shape, each.dtype) for name, each in tensors[key].items()}
        return saved, {key: value for key, value in given.items() if key != "state"}

    saved, others = ranks.gather_results("load the optimizer's state", outline, ShardingError)[0]
    count = sum(len(group["params"]) for group in others["param_groups"])
    if count != len(params):
        raise ShardingError(f"the optimizer state is of {count} parameters, the optimizer has {len(params)}")
    state: dict[Any, Any] = {}
    owners = owner_ranks(optimizer)
    for key, (values, metas) in saved.items():
        got = {}
        # Each rank joins each broadcast, also of state that it does not keep.
        for name, (shape, dtype) in metas.items():
            got[name] = torch.empty(shape, dtype=dtype, device=device)
            if ranks.is_first:
                got[name].copy_(tensors[key][name])
            ranks.broadcast(got[name])
        param = known.get(params[key]) if isinstance(key, int) else None
        owner = None if param is None else owners.get(id(param.sharded))
        if owner not in (None, ranks.rank):
            continue
        cut = param if owner is None else None
        own = decode(values, partial(_piece_of, got, cut), device if cut is None else cut.sharded.device)
        # Only behind `decode`, whose errors all ranks raise alike.
        if cut is not None and not steps_here(None, engine, cut):
            continue
        if isinstance(key, int):
            own = put_together(own, tuple(params[key].shape) if cut is None else cut.piece.local_shape)
        state[key] = own
    optimizer.load_state_dict({**others, "state": state})


def _piece_of(full: Mapping[str, torch.Tensor], param: Param | None, name: str, where: torch.device) -> torch.Tensor:
    """The tensor `name` of `full`, or with `param` this rank's part of it."""
    whole = full[name]
    if param is None:
        return whole.to(where)
    extent = extent_of(name, param, whole.shape)
    if whole.shape != extent.shape:
        advice = "load state of an optimizer of the same parameters"
        shapes = f"has shape {tuple(whole.shape)}, {param.name!r} has {param.piece.shape}"
        raise ShardingError(f"optimizer state {name!r} {shapes}: {advice}")
    return extent.cut(whole).to(where)
