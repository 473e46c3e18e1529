"""The optimizer's state: this rank's part, and the full state of all ranks.

`local_state` turns this rank's part into JSON and pieces of tensors, which checkpoints write. `gather_state` assembles
the full state in memory, in the format of ``torch.optim.Optimizer.state_dict()``: parameters by number, in the order of
the param groups. `scatter_state` loads this format, which plain torch writes too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.json_codec import decode, encode, reference
from streamshard.checkpoint.manifest import TensorRecord, join_records, name_of_replica
from streamshard.comm.communicator import Communicator
from streamshard.core.engine import Engine
from streamshard.core.optimizer_hooks import NUMBERS, params_in, take_over_state
from streamshard.core.params import Param
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.torch_private import is_traceable_wrapper_subclass

State = dict[str, dict[str, Any]]
"""JSON of what an optimizer keeps for each parameter, by the parameter's name."""

Sharded = Mapping[nn.Parameter, tuple[Engine, Param]]
"""Sharded parameters: their engines and shards."""

_CPU = torch.device("cpu")
_REL_TOLERANCE = 1e-6  # machines may compute a schedule's cosine with other last bits


def owners_of(optimizer: Optimizer) -> Mapping[int, int]:
    """By the id of a parameter, the rank of the shard group that steps all of it; without a rank, ranks step pieces."""
    ask = getattr(optimizer, "owners", None)
    return {} if ask is None else ask()


def steps_here(owner: int | None, engine: Engine, shard: Param) -> bool:
    """Whether this rank steps the parameter of `owner`, or its piece of it, and so keeps state."""
    return owner == engine.ranks.rank if owner is not None else shard.local.numel > 0 or not shard.layout.numel


def settle(optimizer: Optimizer, ranks: Communicator) -> None:
    """Prepare for gathering the state. Collective for an optimizer that steps whole parameters."""
    if (act := getattr(optimizer, "settle", None)) is not None:
        act(ranks)


def _moments_in(values: Mapping[str, Any], path: str, shard: Param) -> dict[str, Piece]:
    """This rank's pieces of what has the parameter's shape, by key."""
    moments = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
            data = value.as_subclass(torch.Tensor).detach()
            if data.shape == shard.piece.shape:
                moments[key] = Piece(f"{path}/{key}", shard.layout.shape, shard.local.start, data.reshape(-1))
    return moments


def of_replica(pieces: Iterable[Piece], engine: Engine) -> list[Piece]:
    """Those of `pieces` that this rank's replica saves, under the names that they have in files.

    In local SGD each replica trains on its own, so each saves its weights. Else the first one saves.
    """
    replicas, number = engine.reductions.replicas, engine.ranks.replica
    if not number:
        return list(pieces)
    is_alone = replicas is not None and not replicas.averages_grads
    return [piece._replace(name=name_of_replica(piece.name, number)) for piece in pieces if is_alone]


def local_state(
    name: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], sharded: Sharded, ranks: Communicator
) -> tuple[State, list[Piece]]:
    """Collect this rank's part of an optimizer's state.

    Args:
        name: the optimizer's name; names of tensors begin with it.
        optimizer: the optimizer.
        names: names of its parameters.
        sharded: the sharded ones among its parameters.
        ranks: all that collect. State of parameters that are not sharded is the first rank's.

    Returns:
        JSON, without parameters of which this rank has no part, and this rank's pieces of tensors.

    Raises:
        CheckpointError, ShardingError: names state that cannot be put together.
    """
    take_over_state(optimizer)
    state: State = {}
    pieces: list[Piece] = []
    owners = owners_of(optimizer)
    for param in params_in(optimizer.param_groups):
        values: Mapping[str, Any] = optimizer.state.get(param, {})
        path, tensors, moments = f"{name}/{names[param]}", dict[str, torch.Tensor](), dict[str, Piece]()
        if param in sharded:
            engine, shard = sharded[param]
            values = values if steps_here(owners.get(id(param)), engine, shard) else {}
            if id(param) not in owners:
                moments = _moments_in(values, path, shard)
        saved = encode({key: each for key, each in values.items() if key not in moments}, path, tensors)
        state[names[param]] = saved | {key: reference(each.name) for key, each in moments.items()}
        found = [*moments.values(), *(Piece.whole(*each) for each in tensors.items())]
        if param not in sharded:
            pieces.extend(found if ranks.is_first else ())
            continue
        if tensors and id(param) not in owners:
            raise ShardingError(
                f"{', '.join(tensors)}: tensors without one number for each element of the parameter. Ranks cannot put "
                "them together. Leave this optimizer out (save the weights alone), or use one of torch.optim"
            )
        pieces.extend(of_replica(found, engine))
    return state, pieces


def join_states(states: Sequence[State]) -> State:
    """Merge the ranks' states. For a sliced parameter each rank has some of the entries."""
    joined: State = {}
    for state in reversed(states):  # the first rank's entries win
        for name, values in state.items():
            joined.setdefault(name, {}).update(values)
    return joined


def options_in(optimizer: Optimizer, names: Mapping[nn.Parameter, str], sharded: Sharded) -> list[dict[str, Any]]:
    """By group, what can be compared between ranks: options that are numbers, strings, or sequences of them.

    And whether this rank has stepped its piece of each parameter: a rank may have left out the first step.
    """
    owners, options = owners_of(optimizer), []
    for group in optimizer.param_groups:
        own = {key: plain for key, value in group.items() if key != "params" and (plain := _plain(value)) is not None}
        for param in group["params"]:
            if param in sharded and steps_here(owners.get(id(param)), *sharded[param]):
                own[f"has stepped {names[param]}"] = bool(optimizer.state.get(param))
        options.append(own)
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None


def refuse_differences(
    name: str, options: Sequence[Sequence[Mapping[str, Any]]], states: Sequence[Mapping[str, Mapping[str, Any]]]
) -> None:
    """Raise if ranks step with other options, or have stepped another number of times. The same on all ranks.

    Args:
        name: the optimizer's.
        options: by rank and group, see `options_in`.
        states: by rank, its part of the state, see `local_state`. Of each parameter some ranks have entries.

    Raises:
        RankMismatchError: names the option or the state, the group or the parameter, and the values of two ranks.
    """
    first: dict[tuple[str, str], tuple[int, Any]] = {}
    for rank, (groups, state) in enumerate(zip(options, states, strict=True)):
        found: dict[tuple[str, str], Any] = {("the optimizer", "number of groups"): len(groups)}
        found |= {(f"group {number}", key): each for number, own in enumerate(groups) for key, each in own.items()}
        found |= {(param, key): each for param, own in state.items() for key, each in own.items()}
        for (where, key), value in found.items():
            known, wanted = first.setdefault((where, key), (rank, value))
            if not _are_close(value, wanted):
                raise RankMismatchError(
                    f"{name}: {key!r} of {where} is {_shown(wanted)} on rank {known} and {_shown(value)} on rank {rank}"
                    ", so ranks step their pieces of a parameter differently. Give all ranks the same options, such as "
                    "a learning rate by a loss that is averaged over ranks, and let all ranks take each step or none. "
                    "Nothing is written. To go on with these weights, set options to the same values and save again, "
                    "or save without this optimizer. Or load the last checkpoint"
                )


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


def gather_state(engine: Engine, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
    """See `streamshard.full_optimizer_state_dict`."""
    engine.recover()
    ranks, device = engine.ranks, engine.streams.device
    settle(optimizer, ranks)
    names = {param: str(number) for number, param in enumerate(params_in(optimizer.param_groups))}
    sharded = {shard.param: (engine, shard) for shard in engine.param_shards if shard.param in names}
    names |= {param: shard.name for param, (_, shard) in sharded.items()}
    mine: list[Piece] = []

    def outline() -> tuple[State, dict[str, TensorRecord], list[dict[str, Any]]]:
        state, pieces = local_state(type(optimizer).__name__, optimizer, names, sharded, ranks)
        mine.extend(pieces if not ranks.replica else ())
        records = {piece.name: piece.record(ranks.total_rank) for piece in mine}
        return state, records, options_in(optimizer, names, sharded)

    told = ranks.gather_results("collect the optimizer's state", outline, ShardingError)
    refuse_differences(type(optimizer).__name__, [each for *_, each in told], [state for state, *_ in told])
    own = {piece.name: piece.data for piece in mine}
    wholes: dict[str, torch.Tensor] = {}
    for name, record in join_records(records for _, records, _ in told).items():
        if ranks.is_first or not rank0_only:
            wholes[name] = torch.empty(record.shape, dtype=record.dtype)
        for source, start, stop, _ in record.pieces:
            is_mine = source == ranks.total_rank
            part = own[name].to(device) if is_mine else torch.empty(stop - start, dtype=record.dtype, device=device)
            ranks.broadcast(part, source)
            if name in wholes:
                wholes[name].view(-1)[start:stop] = part
    if rank0_only and not ranks.is_first:
        return {}
    joined = join_states([state for state, *_ in told])
    state = {
        number: decode(values, lambda name, _: wholes[name], _CPU)
        for number, param in enumerate(params_in(optimizer.param_groups))
        if (values := joined[names[param]])
    }
    packed = optimizer.state_dict()
    others = {key: value for key, value in packed["state"].items() if isinstance(key, str)}  # of no parameter
    full: dict[str, Any] = {**packed, "state": {**state, **others}}
    return full if (join := getattr(optimizer, "join_stacks", None)) is None else join(full)


def scatter_state(engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """See `streamshard.load_optimizer_state_dict`."""
    engine.recover()
    ranks, params, device = engine.ranks, params_in(optimizer.param_groups), engine.streams.device
    shards = {shard.param: shard for shard in engine.param_shards}
    given: Any = (state_dict if ranks.is_first else None) or {"state": {}, "param_groups": []}
    tensors: dict[Any, dict[str, torch.Tensor]] = {}  # the first rank's, by number

    def outline() -> tuple[dict[Any, Any], dict[str, Any]]:
        """By number, JSON with shapes and dtypes of its tensors; and what is no state of a parameter."""
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping) or "param_groups" not in given:
            raise ShardingError(
                f"the optimizer state is a {type(given).__name__} {sorted(map(str, given))!r:.200}: wanted what "
                "Optimizer.state_dict() gives, a dict with 'state' and 'param_groups'"
            )
        split, saved = getattr(optimizer, "split_stacks", None), {}
        for key, values in (given if split is None else split(given))["state"].items():
            own = tensors.setdefault(key, {})
            saved[key] = encode(values, f"{key}", own), {name: (each.shape, each.dtype) for name, each in own.items()}
        return saved, {key: value for key, value in given.items() if key != "state"}

    saved, others = ranks.gather_results("load the optimizer's state", outline, ShardingError)[0]
    count = sum(len(group["params"]) for group in others["param_groups"])
    if count != len(params):
        raise ShardingError(f"the optimizer state is of {count} parameters, the optimizer has {len(params)}")
    state: dict[Any, Any] = {}
    owners = owners_of(optimizer)
    for key, (values, metas) in saved.items():
        got = {}
        for name, (shape, dtype) in metas.items():
            got[name] = torch.empty(shape, dtype=dtype, device=device)
            if ranks.is_first:
                got[name].copy_(tensors[key][name])
            ranks.broadcast(got[name])
        shard = shards.get(params[key]) if isinstance(key, int) else None
        owner = None if shard is None else owners.get(id(shard.param))
        if owner not in (None, ranks.rank):
            continue
        own = decode(values, lambda name, where: got[name].to(where), device)  # noqa: B023  # called at once
        if shard is not None and owner is None:
            own = {name: _cut(name, value, shard) for name, value in own.items()}
        state[key] = own
    optimizer.load_state_dict({**others, "state": state})


def _cut(name: str, value: Any, shard: Param) -> Any:
    """This rank's part of state of a sharded parameter."""
    if not isinstance(value, torch.Tensor) or not value.shape and (shard.layout.shape or name in NUMBERS):
        return value
    if value.shape != shard.layout.shape:
        raise ShardingError(
            f"optimizer state {name!r} has shape {tuple(value.shape)}; {shard.name!r} has {shard.layout.shape}: was "
            "the optimizer built over the same parameters?"
        )
    return value.reshape(-1)[shard.local.start : shard.local.stop].view(shard.piece.shape).clone()
