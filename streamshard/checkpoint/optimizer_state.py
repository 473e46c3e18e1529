"""The optimizer's state as the unsharded model's optimizer would have it: collected on one rank, loaded at any number.

The format is that of ``torch.optim.Optimizer.state_dict()``: parameters by number, in the order of the param groups.
Plain torch, ZeroRedundancyOptimizer (after ``consolidate_state_dict``) and this module read each other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from streamshard.checkpoint.json_codec import decode, encode
from streamshard.comm.objects import raise_if
from streamshard.comm.ranks import Ranks
from streamshard.engine.engine import Engine
from streamshard.engine.hooks import tensors_in
from streamshard.errors import CheckpointError, RankMismatchError, ShardingError
from streamshard.unit.optimizer_hooks import NUMBERS, take_over_state
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import ShardedTensor, is_piece

__all__ = [
    "Moment",
    "Outline",
    "Outlines",
    "OwnedState",
    "agree_on_outlines",
    "gather_state",
    "is_owned",
    "moment_of",
    "names_of_moments",
    "outline_state",
    "own_part",
    "owned_states",
    "params_in",
    "scatter_state",
    "settle",
]

Outline = dict[str, Any]  # what is kept for one parameter, by name; a `Moment` stands for a tensor of its size
Outlines = dict[int, Outline]  # a rank's part of an optimizer's state, by the parameter's number


class Moment(NamedTuple):
    """Stands for state with an element for each of the parameter's."""

    dtype: torch.dtype


class OwnedState(NamedTuple):
    """State of a parameter that one rank steps whole: on its owner, what plain torch would keep.

    Attributes:
        json: see `encode`.
        tensors: by name; on other ranks, tensors on the meta device.
    """

    json: Any
    tensors: dict[str, torch.Tensor]


def is_owned(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Whether ranks that own `param`, or slices of it, step them whole; else ranks step pieces of it."""
    ask = getattr(optimizer, "owner_of", None)
    return ask is not None and ask(param) is not None


def own_part(optimizer: Optimizer, param: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank keeps of the `values` for a parameter that is owned."""
    ask: Any = optimizer
    return dict(ask.own_part(param, values))


def settle(optimizer: Optimizer, ranks: Ranks) -> None:
    """Before all ranks' state is put together. Collective for an optimizer that steps whole parameters."""
    if (act := getattr(optimizer, "settle", None)) is not None:
        act(ranks)


def owned_states(optimizer: Optimizer, params: Mapping[nn.Parameter, str]) -> dict[str, OwnedState]:
    """What this rank keeps of the parameters that it owns, or owns slices of, by their names.

    Args:
        optimizer: keeps it.
        params: names of its parameters.

    Raises:
        CheckpointError: names state that cannot be saved.
    """
    found = {}
    for param, name in params.items():
        if is_owned(optimizer, param) and optimizer.state.get(param):
            tensors: dict[str, torch.Tensor] = {}
            json = encode(dict(optimizer.state[param]), name, tensors)
            found[name] = OwnedState(json, tensors)
    return found


def _told(state: OwnedState) -> OwnedState:
    return OwnedState(state.json, {name: tensor.to("meta") for name, tensor in state.tensors.items()})


class _Number(NamedTuple):
    """A tensor of one number, which is pickled a hundred times faster without its memory."""

    value: Any
    dtype: torch.dtype


def gather_state(engine: Engine, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
    """See `streamshard.full_optimizer_state_dict`."""
    engine.recover()
    settle(optimizer, engine.ranks)
    wanted = not rank0_only or engine.ranks.is_first
    numbers = {param: number for number, param in enumerate(params_in(optimizer))}
    packed: dict[str, Any] = {}
    owned: dict[str, OwnedState] = {}

    def outline() -> tuple[Outlines, dict[str, OwnedState]]:
        take_over_state(optimizer)
        packed.update(optimizer.state_dict())
        for key, value in packed.items():
            if key != "state" and any(map(is_piece, tensors_in(value))):
                raise ShardingError(
                    f"{type(optimizer).__name__}'s {key} hold one rank's piece of a sharded tensor: only its state of "
                    "each parameter can be put together. Keep the tensor elsewhere"
                )
        if not engine.ranks.replica:
            names = {shard.param: str(numbers[shard.param]) for shard in engine.param_shards if shard.param in numbers}
            owned.update(owned_states(optimizer, names))
        told = {name: _told(each) for name, each in owned.items()}
        return outline_state(engine.param_shards, optimizer, numbers), told

    said = engine.ranks.gather_results("collect the optimizer's state", outline)
    outlines = agree_on_outlines([theirs for theirs, _ in said], engine.param_shards, numbers)
    state: dict[Any, Any] = {number: dict(values) for number, values in outlines.items()}
    sharded = {numbers.get(shard.param) for shard in engine.param_shards}
    for number, values in packed["state"].items():
        if not isinstance(values, Mapping):  # of no parameter
            state[number] = _copied(values)
        elif number not in sharded:  # a parameter of something else
            state[number] = {name: _copied(value) for name, value in values.items()}
    for source, (_, theirs) in enumerate(said):
        for name, told in theirs.items():
            tensors = owned[name].tensors if source == engine.ranks.number else told.tensors
            collected = _collect_owned(engine.ranks, tensors, source, to_all=not rank0_only)
            if wanted:
                own = decode(told.json, collected.__getitem__, torch.device("cpu"))
                state.setdefault(int(name), {}).update(own)  # of slices, ranks have some each
    failure: Exception | None = None
    for unit in engine.units:
        shards = unit.params
        known = [outlines.get(numbers.get(shard.param, -1), {}) for shard in shards]
        moments = (name for values in known for name, value in values.items() if isinstance(value, Moment))
        for name in dict.fromkeys(moments):
            has = [isinstance(values.get(name), Moment) for values in known]
            own = (moment_of(shard, optimizer, name) for shard in shards)
            # A rank without elements may have nothing, and takes part.
            pieces = [
                None if not is_kept else shard.main if moment is None else moment.reshape(-1)
                for shard, moment, is_kept in zip(shards, own, has, strict=True)
            ]
            wholes = unit.gather_whole(pieces, torch.float32)
            try:
                for shard, whole, is_kept, values in zip(shards, wholes, has, known, strict=True):
                    if wanted and is_kept and whole is not None and failure is None:
                        state[numbers[shard.param]][name] = whole.to("cpu", values[name].dtype, copy=True)
            except Exception as error:  # such as too little memory on the one rank that wants it: others gather on
                failure = error
    engine.ranks.gather_results("collect the optimizer's state", lambda: raise_if(failure))
    return {**packed, "state": dict(sorted(state.items(), key=_by_number))} if wanted else {}


def _by_number(item: tuple[Any, Any]) -> tuple[bool, Any]:
    key, _ = item
    return isinstance(key, str), key


def _collect_owned(
    ranks: Ranks, tensors: Mapping[str, torch.Tensor], source: int, *, to_all: bool
) -> dict[str, torch.Tensor]:
    """Copies of what rank number `source` has, in CPU memory: on the first rank, or on all. Collective."""
    found = {}
    for name, tensor in tensors.items():
        is_wanted = to_all or ranks.is_first
        if ranks.number == source:
            found[name] = tensor.detach().to("cpu", copy=True).contiguous()
        elif is_wanted:
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if to_all:
            moved = found[name].to(ranks.streams.device)
            ranks.broadcast(moved, source)
            found[name].copy_(moved)
        elif source and (ranks.is_first or ranks.number == source):
            ranks.send_to_first(found[name], source)
    return found


def outline_state(shards: Sequence[ParamShard], optimizer: Optimizer, numbers: Mapping[nn.Parameter, int]) -> Outlines:
    """What this rank keeps for which parameter. All of it can be sent and saved.

    Args:
        shards: parameters, all that are sharded and some that the optimizer does not have.
        optimizer: keeps it.
        numbers: of the optimizer's parameters.

    Raises:
        ShardingError: names the state that cannot be put together.
    """
    outlines: Outlines = {}
    seen: dict[str, Outline] = {}
    for shard in shards:
        number = numbers.get(shard.param)
        # A rank without elements keeps nothing, but for what it has loaded or had before it was sharded.
        if number is None or shard.layout.numel and not shard.local.numel:
            continue
        if is_owned(optimizer, shard.param):
            continue
        outline = {
            name: _outline_value(value, f"{type(optimizer).__name__}'s state {name!r} of {shard.name!r}", shard)
            for name, value in optimizer.state.get(shard.param, {}).items()
        }
        # Parameters have mostly the same: pickled once.
        is_plain = all(isinstance(value, Moment | _Number) for value in outline.values())
        outlines[number] = seen.setdefault(repr(outline), outline) if is_plain else outline
    return outlines


def _outline_value(value: Any, path: str, shard: ParamShard) -> Any:
    """A `Moment`, a number, or what `encode` takes."""
    without = "Leave this optimizer out (save the weights alone), or use one of torch.optim"
    if not isinstance(value, torch.Tensor):
        if any(True for _ in tensors_in(value)):
            raise ShardingError(
                f"{path} is a {type(value).__name__} of tensors: only tensors that stand by themselves, with one "
                f"number for each element, can be put together. {without}"
            )
        try:
            encode(value, path, {})
        except CheckpointError as error:
            raise ShardingError(f"{error}. {without}") from error
        return value
    is_quantized = is_traceable_wrapper_subclass(value)
    if not is_quantized and _piece_of_state(value, shard) is not None:
        return Moment(value.dtype)
    if is_quantized or value.ndim:
        raise ShardingError(
            f"{path} is {'quantized' if is_quantized else 'of'} {tuple(value.shape)} for a piece of "
            f"{tuple(shard.piece.shape)}: only what has one number for each element can be put together. {without}"
        )
    return _Number(value.detach().as_subclass(torch.Tensor).item(), value.dtype)


def agree_on_outlines(
    by_rank: Sequence[Outlines], shards: Sequence[ParamShard], numbers: Mapping[nn.Parameter, int]
) -> dict[int, Outline]:
    """What is kept for which parameter, as ranks say that have elements of it.

    Args:
        by_rank: what each has said; all ranks give the same.
        shards, numbers: as for `outline_state`.

    Returns:
        By number, of what keeps anything.

    Raises:
        RankMismatchError: two of them keep different things.
    """
    agreed: Outlines = {}
    for rank, outlines in enumerate(by_rank):
        for number, outline in outlines.items():
            first = agreed.setdefault(number, outline)
            if list(first) != list(outline):
                name = next(shard.name for shard in shards if numbers.get(shard.param) == number)
                raise RankMismatchError(
                    f"the optimizer's state of {name!r} differs between ranks: {list(first)}, and {list(outline)} on "
                    f"rank {rank}"
                )
    return {
        number: {name: _as_it_was(value) for name, value in outline.items()}
        for number, outline in agreed.items()
        if outline
    }


def _as_it_was(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Number) else value


def scatter_state(engine: Engine, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """See `streamshard.load_optimizer_state_dict`."""
    engine.recover()
    ranks, params = engine.ranks, params_in(optimizer)
    shards = {shard.param: shard for shard in engine.param_shards}
    given: Mapping[str, Any] = (state_dict if ranks.is_first else None) or {"state": {}, "param_groups": []}
    wholes: dict[int, OwnedState] = {}

    def outline_given() -> tuple[dict[Any, Any], dict[str, Any]]:
        """Everything but tensors with elements, which follow one by one."""
        _check_format(given)
        outline: dict[Any, Any] = {}
        for number, values in given["state"].items():
            if not isinstance(values, Mapping):  # of no parameter
                outline[number] = values
            elif number < len(params) and is_owned(optimizer, params[number]):
                tensors: dict[str, torch.Tensor] = {}
                wholes[number] = OwnedState(encode(dict(values), str(number), tensors), tensors)
                outline[number] = _told(wholes[number])
            elif number < len(params):
                shard = shards.get(params[number])
                outline[number] = {name: _outline(name, value, shard) for name, value in values.items()}
        return outline, {key: value for key, value in given.items() if key != "state"}

    outline, others = ranks.gather_results("load the optimizer's state", outline_given)[0]
    groups = others["param_groups"]
    _check(outline, groups, params, shards)
    state: dict[Any, Any] = {}
    for number, values in outline.items():
        if isinstance(values, OwnedState):
            own = _send_owned(ranks, wholes[number] if ranks.is_first else values)
            if json := own_part(optimizer, params[number], values.json):
                state[number] = decode(json, own.__getitem__, engine.streams.device)
            continue
        if not isinstance(values, Mapping):
            state[number] = values
            continue
        shard = shards.get(params[number])
        state[number] = {}
        for name, value in values.items():
            if not isinstance(value, _Tensor):
                state[number][name] = value
                continue
            full = torch.empty(value.shape, dtype=value.dtype, device=engine.streams.device)
            if ranks.is_first:
                full.copy_(given["state"][number][name])
            ranks.broadcast(full)
            if shard is not None and value.shape == shard.layout.shape:
                full = full.view(-1)[shard.local.start : shard.local.stop].view(shard.piece.shape).clone()
            state[number][name] = full
    optimizer.load_state_dict({**others, "state": state})


def _send_owned(ranks: Ranks, state: OwnedState) -> dict[str, torch.Tensor]:
    """The first rank's tensors on all ranks, one after the other. Collective."""
    found = {}
    for name, tensor in state.tensors.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.streams.device)
        if ranks.is_first:
            full.copy_(tensor)
        ranks.broadcast(full)
        found[name] = full
    return found


def _copied(value: Any) -> Any:
    """Not shared with the optimizer, which goes on counting steps."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(torch.Tensor).to("cpu", copy=True), value)


class _Tensor:
    """Stands for a tensor that is still to be sent, or put together."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _outline(name: str, value: Any, shard: ParamShard | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_one_number = shard is not None and not shard.layout.shape
    return _Tensor(value) if value.ndim or is_one_number and name not in NUMBERS else value


def params_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the order of their numbers in a state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of_moments(shards: Sequence[ParamShard], optimizer: Optimizer) -> list[str]:
    """Names of state that has an element for each of the parameter's, in order of appearance."""
    names: dict[str, None] = {}
    for shard in shards:
        if is_owned(optimizer, shard.param):
            continue
        for name in optimizer.state.get(shard.param, {}):
            if moment_of(shard, optimizer, name) is not None:
                names[name] = None
    return list(names)


def moment_of(shard: ParamShard, optimizer: Optimizer, name: str) -> torch.Tensor | None:
    """State `name` of a parameter, in its sharded shape; None if it has none that has an element for each of its."""
    return _piece_of_state(optimizer.state.get(shard.param, {}).get(name), shard)


def _piece_of_state(value: object, shard: ParamShard) -> torch.Tensor | None:
    if isinstance(value, ShardedTensor):  # made by the optimizer's constructor
        value = value.as_subclass(torch.Tensor)
    return value if isinstance(value, torch.Tensor) and value.shape == shard.piece.shape else None


def _check_format(given: object) -> None:
    if isinstance(given, Mapping) and isinstance(given.get("state"), Mapping) and "param_groups" in given:
        return
    shown = f"a dict of {sorted(map(str, given))}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
    raise ShardingError(
        f"the optimizer state is {shown}: wanted what Optimizer.state_dict() gives, with 'state' and 'param_groups'"
    )


def _check(
    outline: Mapping[Any, Any],
    groups: list[dict[str, Any]],
    params: list[nn.Parameter],
    shards: Mapping[nn.Parameter, ParamShard],
) -> None:
    count = sum(len(group["params"]) for group in groups)
    if count != len(params):
        raise ShardingError(f"the optimizer state is of {count} parameters, the optimizer has {len(params)}")
    for number, values in outline.items():
        if isinstance(values, OwnedState) or not isinstance(values, Mapping):
            continue
        shard = shards.get(params[number])
        for name, value in values.items():
            if shard is not None and isinstance(value, _Tensor) and value.shape != shard.layout.shape:
                raise ShardingError(
                    f"optimizer state {name!r} of parameter number {number} has shape {value.shape}; "
                    f"{shard.name!r} has {shard.layout.shape}: was the optimizer built over the same parameters?"
                )
