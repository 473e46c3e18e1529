"""The optimizer's state: this rank's part, and the full state of all ranks.

`local_state` turns this rank's part into JSON and pieces of tensors, which checkpoints write. `gather_state` assembles
the full state in memory, in the format of ``torch.optim.Optimizer.state_dict()``: parameters by number, in the order of
the param groups. `scatter_state` loads this format, which plain torch writes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Piece, Range, check_coverage
from streamshard.checkpoint.manifest import decode, encode
from streamshard.comm.communicator import Communicator
from streamshard.engine.engine import Engine
from streamshard.errors import ShardingError
from streamshard.torch_private import is_traceable_wrapper_subclass
from streamshard.unit.optimizer_hooks import NUMBERS, take_over_state
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import ShardedTensor

State = dict[str, dict[str, Any]]
"""JSON of what an optimizer keeps for each parameter, by the parameter's name."""

Sharded = Mapping[nn.Parameter, tuple[Engine, ParamShard]]
"""Sharded parameters: their engines and shards."""

_CPU = torch.device("cpu")


def is_owned(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Whether ranks that own `param`, or slices of it, step them whole; else ranks step pieces of it."""
    ask = getattr(optimizer, "owner_of", None)
    return ask is not None and ask(param) is not None


def own_part(optimizer: Optimizer, param: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the state `values` of an owned parameter."""
    ask: Any = optimizer
    return dict(ask.own_part(param, values))


def settle(optimizer: Optimizer, ranks: Communicator) -> None:
    """Prepare for gathering the state. Collective for an optimizer that steps whole parameters."""
    if (act := getattr(optimizer, "settle", None)) is not None:
        act(ranks)


def params_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters, in the order of their numbers in a state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _moment_of(shard: ParamShard, value: Any) -> torch.Tensor | None:
    """State of a parameter, as this rank's piece, [n]; None if it does not have the parameter's shape."""
    if isinstance(value, ShardedTensor):  # made by the optimizer's constructor
        value = value.as_subclass(torch.Tensor)
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return None
    return value.detach().as_subclass(torch.Tensor).reshape(-1) if value.shape == shard.piece.shape else None


def is_moment(saved: Any) -> bool:
    """Whether JSON of a parameter's state stands for a tensor of the parameter's shape."""
    return isinstance(saved, dict) and saved.get("$") == "moment"


def name_here(tensor: str, engine: Engine) -> str | None:
    """The name under which this rank's replica saves a tensor; None if another replica saves it.

    In local SGD each replica trains on its own, so each saves its weights.
    """
    replicas = engine.reductions.replicas
    if not engine.ranks.replica:
        return tensor
    return f"{tensor}@replica{engine.ranks.replica}" if replicas and not replicas.averages_grads else None


class LocalState(NamedTuple):
    """This rank's part of one optimizer's state.

    Attributes:
        state: JSON. A parameter of which this rank has no part has no entry.
        pieces: this rank's pieces of tensors.
        tensors: tensors that are the same on all ranks, by name.
    """

    state: State
    pieces: list[Piece]
    tensors: dict[str, torch.Tensor]


def local_state(name: str, optimizer: Optimizer, names: Mapping[nn.Parameter, str], sharded: Sharded) -> LocalState:
    """Collect this rank's part of an optimizer's state.

    Args:
        name: the optimizer's name; names of tensors begin with it.
        optimizer: the optimizer.
        names: names of its parameters.
        sharded: the sharded ones among its parameters.

    Raises:
        CheckpointError, ShardingError: names state that cannot be put together.
    """
    take_over_state(optimizer)
    found = LocalState({}, [], {})
    for param in params_in(optimizer):
        values, path = dict(optimizer.state.get(param, {})), f"{name}/{names[param]}"
        if param not in sharded:
            found.state[names[param]] = encode(values, path, found.tensors)
            continue
        engine, shard = sharded[param]
        if is_owned(optimizer, param):
            tensors: dict[str, torch.Tensor] = {}
            found.state[names[param]] = encode(values, path, tensors)
            pieces = [Piece.whole(each, tensor) for each, tensor in tensors.items()]
        elif shard.local.numel or not shard.layout.numel:
            where = f"{type(optimizer).__name__}'s state {{!r}} of {shard.name!r}"
            moments = {key: moment for key, each in values.items() if (moment := _moment_of(shard, each)) is not None}
            found.state[names[param]] = {
                key: {"$": "moment", "tensor": f"{path}/{key}"} if key in moments else _small(each, where.format(key))
                for key, each in values.items()
            }
            shape, start = shard.layout.shape, shard.local.start
            pieces = [Piece(f"{path}/{key}", shape, start, data) for key, data in moments.items()]
        else:
            continue
        here = ((piece, name_here(piece.name, engine)) for piece in pieces)
        found.pieces.extend(piece._replace(name=saved_name) for piece, saved_name in here if saved_name is not None)
    return found


def _small(value: Any, path: str) -> Any:
    """JSON of state that does not have the parameter's shape, such as a step count."""
    tensors: dict[str, torch.Tensor] = {}
    json = encode(value, path, tensors)
    if tensors:
        raise ShardingError(
            f"{path} holds tensors that do not have one number for each element of the parameter: ranks cannot put "
            "them together. Leave this optimizer out (save the weights alone), or use one of torch.optim"
        )
    return json


def join_states(states: Sequence[State]) -> State:
    """The state of all parameters, from every rank's. Of a parameter in slices, ranks have some entries each."""
    joined: State = {}
    for state in reversed(states):  # the first rank's entries win
        for name, values in state.items():
            joined.setdefault(name, {}).update(values)
    return joined


# ------------------------------------------------------------------------------------------------ in memory


def gather_state(engine: Engine, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
    """See `streamshard.full_optimizer_state_dict`."""
    engine.recover()
    ranks = engine.ranks
    settle(optimizer, ranks)
    names = {param: str(number) for number, param in enumerate(params_in(optimizer))}
    sharded = {shard.param: (engine, shard) for shard in engine.param_shards if shard.param in names}
    mine: list[LocalState] = []

    def outline() -> tuple[State, list[Range]]:
        local = local_state(type(optimizer).__name__, optimizer, names, sharded)
        mine.append(local._replace(pieces=[] if ranks.replica else local.pieces))
        return local.state, [piece.range for piece in mine[0].pieces]

    told = ranks.gather_results("collect the optimizer's state", outline)
    check_coverage([pieces for _, pieces in told])
    wholes: dict[str, torch.Tensor] = {}
    if not rank0_only or ranks.is_first:
        for _, pieces in told:
            wholes |= {each.name: torch.empty(each.shape, dtype=each.dtype) for each in pieces}
    _gather_pieces(ranks, mine[0].pieces, [pieces for _, pieces in told], wholes, to_all=not rank0_only)
    if rank0_only and not ranks.is_first:
        return {}
    wholes |= {name: tensor.to("cpu", copy=True) for name, tensor in mine[0].tensors.items()}
    joined = join_states([state for state, _ in told])
    state = {int(name): decode(_plain(own), wholes.__getitem__, _CPU) for name, own in joined.items() if own}
    packed = optimizer.state_dict()
    others = {key: value for key, value in packed["state"].items() if isinstance(key, str)}  # of no parameter
    return {**packed, "state": {**dict(sorted(state.items())), **others}}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON that `decode` reads: a moment is a tensor in memory."""
    return {key: {**value, "$": "tensor"} if is_moment(value) else value for key, value in values.items()}


def _gather_pieces(
    ranks: Communicator,
    pieces: Sequence[Piece],
    told: Sequence[Sequence[Range]],
    wholes: Mapping[str, torch.Tensor],
    *,
    to_all: bool,
) -> None:
    """Fill the full tensors `wholes`, in CPU memory, from all ranks' pieces. Collective.

    Args:
        ranks: all ranks.
        pieces: this rank's pieces.
        told: the ranges of every rank's pieces.
        wholes: full tensors by name; empty on a rank that gets none.
        to_all: fill them on every rank; False: on the first rank only.
    """
    own = {piece.name: piece.data for piece in pieces}
    for source, theirs in enumerate(told):
        is_mine = ranks.number == source
        for name, _, dtype, start, stop in theirs:
            if start == stop or not (to_all or ranks.is_first or is_mine):
                continue
            part = own[name].to("cpu").contiguous() if is_mine else torch.empty(stop - start, dtype=dtype)
            if to_all:
                moved = part.to(ranks.streams.device)
                ranks.broadcast(moved, source)
                part = moved.cpu()
            elif source:
                ranks.send_to_first(part, source)
            if name in wholes:
                wholes[name].view(-1)[start:stop] = part


def scatter_state(engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """See `streamshard.load_optimizer_state_dict`."""
    engine.recover()
    ranks, params, device = engine.ranks, params_in(optimizer), engine.streams.device
    shards = {shard.param: shard for shard in engine.param_shards}
    given: Any = (state_dict if ranks.is_first else None) or {"state": {}, "param_groups": []}
    tensors: dict[str, torch.Tensor] = {}  # the first rank's

    def outline() -> tuple[dict[Any, Any], dict[str, tuple[torch.Size, torch.dtype]], dict[str, Any]]:
        """JSON by number, shapes and dtypes of tensors, and what is no state of a parameter."""
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping) or "param_groups" not in given:
            raise ShardingError(
                f"the optimizer state is a {type(given).__name__} {sorted(map(str, given))!r:.200}: wanted what "
                "Optimizer.state_dict() gives, a dict with 'state' and 'param_groups'"
            )
        saved = {key: encode(values, f"{key}", tensors) for key, values in given["state"].items()}
        others = {key: value for key, value in given.items() if key != "state"}
        return saved, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, others

    saved, metas, others = ranks.gather_results("load the optimizer's state", outline)[0]
    count = sum(len(group["params"]) for group in others["param_groups"])
    if count != len(params):
        raise ShardingError(f"the optimizer state is of {count} parameters, the optimizer has {len(params)}")
    state: dict[Any, Any] = {}
    for key, values in saved.items():
        if isinstance(key, int) and key >= len(params):
            continue
        got = {}
        for name in _tensors_of(values):
            shape, dtype = metas[name]
            got[name] = torch.empty(shape, dtype=dtype, device=device)
            if ranks.is_first:
                got[name].copy_(tensors[name])
            ranks.broadcast(got[name])
        param = params[key] if isinstance(key, int) else None
        if param is not None and is_owned(optimizer, param):
            values = own_part(optimizer, param, values)
        own = decode(values, got.__getitem__, device)
        if param in shards and not is_owned(optimizer, param):
            own = {name: _cut(name, value, shards[param]) for name, value in own.items()}
        if own or not isinstance(key, int):
            state[key] = own
    optimizer.load_state_dict({**others, "state": state})


def _tensors_of(saved: Any) -> Iterator[str]:
    """Names of the tensors in JSON, in its order, which is the same on all ranks."""
    if isinstance(saved, dict) and saved.get("$") == "tensor":
        yield saved["tensor"]
    elif isinstance(saved, dict | list):
        for each in saved.values() if isinstance(saved, dict) else saved:
            yield from _tensors_of(each)


def _cut(name: str, value: Any, shard: ParamShard) -> Any:
    """This rank's part of state of a sharded parameter."""
    if not isinstance(value, torch.Tensor) or not value.shape and (shard.layout.shape or name in NUMBERS):
        return value
    if value.shape != shard.layout.shape:
        raise ShardingError(
            f"optimizer state {name!r} has shape {tuple(value.shape)}; {shard.name!r} has {shard.layout.shape}: was "
            "the optimizer built over the same parameters?"
        )
    return value.reshape(-1)[shard.local.start : shard.local.stop].view(shard.piece.shape).clone()
