"""The optimizer's state: this rank's part, and the full state of all ranks.

`LocalState` turns this rank's part into JSON and pieces of tensors, which checkpoints write. `gather_state` assembles
the full state in memory, in the format of ``torch.optim.Optimizer.state_dict()``: parameters by number, in the order of
the param groups. `scatter_state` loads this format, which plain torch writes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.manifest import decode, encode
from streamshard.comm.communicator import Communicator
from streamshard.engine.engine import Engine
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.torch_private import is_traceable_wrapper_subclass
from streamshard.unit.optimizer_hooks import NUMBERS, take_over_state
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import ShardedTensor

__all__ = [
    "LocalState",
    "State",
    "drifts_apart",
    "gather_state",
    "is_moment",
    "is_owned",
    "moment_of",
    "name_here",
    "names_of_moments",
    "own_part",
    "params_in",
    "scatter_state",
    "settle",
]

State = dict[str, dict[str, Any]]  # JSON of what is kept for each parameter, by its name

_WITHOUT = "Leave this optimizer out (save the weights alone), or use one of torch.optim"
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


def names_of_moments(shards: Sequence[ParamShard], optimizer: Optimizer) -> list[str]:
    """Names of state tensors with the parameter's shape (moments), in order of appearance."""
    stepped = (shard for shard in shards if not is_owned(optimizer, shard.param))
    names = ((shard, name) for shard in stepped for name in optimizer.state.get(shard.param, {}))
    return list(dict.fromkeys(name for shard, name in names if moment_of(shard, optimizer, name) is not None))


def moment_of(shard: ParamShard, optimizer: Optimizer, name: str) -> torch.Tensor | None:
    """State `name` of a parameter, as this rank's piece; None if it does not have the parameter's shape."""
    value = optimizer.state.get(shard.param, {}).get(name)
    if isinstance(value, ShardedTensor):  # made by the optimizer's constructor
        value = value.as_subclass(torch.Tensor)
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        return None
    return value if value.shape == shard.piece.shape else None


def is_moment(saved: Any) -> bool:
    """Whether JSON of a parameter's state stands for a tensor of the parameter's shape."""
    return isinstance(saved, dict) and saved.get("$") == "moment"


def drifts_apart(engine: Engine) -> bool:
    """Whether replicas have different weights, because each trains on its own (local SGD)."""
    replicas = engine.reductions.replicas
    return replicas is not None and not replicas.averages_grads


def name_here(tensor: str, engine: Engine) -> str | None:
    """The name under which this rank's replica saves a tensor; None if another replica saves it."""
    if not engine.ranks.replica:
        return tensor
    return f"{tensor}@replica{engine.ranks.replica}" if drifts_apart(engine) else None


class LocalState:
    """This rank's part of one optimizer's state. Errors that concern one rank alone are raised by the constructor.

    Args:
        name: the optimizer's name; names of tensors begin with it.
        optimizer: the optimizer.
        names: names of its parameters.
        owners: its sharded parameters, and their engines.

    Attributes:
        pieces: this rank's pieces of tensors.
        tensors: tensors that are the same on all ranks, by name.
        outlines: JSON for parameters of which this rank steps a piece. A piece without elements has no entry.
        owned: JSON for parameters that this rank steps whole, or slices of them.

    Raises:
        CheckpointError, ShardingError: names state that cannot be put together.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        names: Mapping[nn.Parameter, str],
        owners: Sequence[tuple[Engine, ParamShard]],
    ) -> None:
        take_over_state(optimizer)
        self.pieces: list[Piece] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.outlines: State = {}
        self.owned: State = {}
        self._name, self._optimizer = name, optimizer
        self._names = [names[param] for param in params_in(optimizer)]
        sharded = {shard.param: (engine, shard) for engine, shard in owners}
        self._others = {
            names[param]: encode(dict(optimizer.state.get(param, {})), f"{name}/{names[param]}", self.tensors)
            for param in params_in(optimizer)
            if param not in sharded
        }
        seen: State = {}  # parameters have mostly the same: pickled once
        for param, (engine, shard) in sharded.items():
            path = f"{name}/{names[param]}"
            if is_owned(optimizer, param):
                self._add_owned(names[param], path, engine, optimizer.state.get(param, {}))
            elif shard.local.numel or not shard.layout.numel:
                outline = self._outline(path, engine, shard)
                self.outlines[names[param]] = seen.setdefault(repr(outline), outline)

    def _add_owned(self, name: str, path: str, engine: Engine, values: Mapping[str, Any]) -> None:
        if values:
            tensors: dict[str, torch.Tensor] = {}
            json = encode(dict(values), path, tensors)
            if not engine.ranks.replica:
                self.owned[name] = json
            for each, tensor in tensors.items():
                if (saved_name := name_here(each, engine)) is not None:
                    self.pieces.append(Piece.whole(saved_name, tensor))

    def _outline(self, path: str, engine: Engine, shard: ParamShard) -> dict[str, Any]:
        outline = {}
        for key, value in self._optimizer.state.get(shard.param, {}).items():
            moment = moment_of(shard, self._optimizer, key)
            if moment is None:
                outline[key] = self._small(value, f"{type(self._optimizer).__name__}'s state {key!r} of {shard.name!r}")
                continue
            outline[key] = {"$": "moment"}
            if (saved_name := name_here(f"{path}/{key}", engine)) is not None:
                data = moment.detach().as_subclass(torch.Tensor).reshape(-1)
                self.pieces.append(Piece(saved_name, shard.layout.shape, shard.local.start, data))
        return outline

    def _small(self, value: Any, path: str) -> Any:
        """JSON of state that does not have the parameter's shape, such as a step count."""
        tensors: dict[str, torch.Tensor] = {}
        json = encode(value, path, tensors)
        if tensors:
            raise ShardingError(
                f"{path} holds tensors that do not have one number for each element of the parameter: ranks cannot put "
                f"them together. {_WITHOUT}"
            )
        return json

    def join(self, told: Sequence[tuple[State, State]]) -> State:
        """The JSON of all parameters' state.

        Args:
            told: every rank's `outlines` and `owned`.

        Raises:
            RankMismatchError: two ranks have different state for a parameter.
        """
        agreed: State = {}
        for rank, (outlines, _) in enumerate(told):
            for name, outline in outlines.items():
                first = agreed.setdefault(name, outline)
                if list(first) != list(outline):
                    raise RankMismatchError(
                        f"the optimizer's state of {name!r} differs between ranks: {list(first)}, and {list(outline)} "
                        f"on rank {rank}"
                    )
        state = {name: dict(agreed.get(name) or self._others.get(name) or {}) for name in self._names}
        for name, values in state.items():
            for key, value in values.items():
                if is_moment(value):
                    values[key] = {"$": "moment", "tensor": f"{self._name}/{name}/{key}"}
        for _, owned in told:
            for name, own in owned.items():  # of slices, ranks have some each
                state[name].update(own)
        return state


# ------------------------------------------------------------------------------------------------ in memory


def gather_state(engine: Engine, optimizer: Optimizer, rank0_only: bool) -> dict[str, Any]:
    """See `streamshard.full_optimizer_state_dict`."""
    engine.recover()
    ranks = engine.ranks
    settle(optimizer, ranks)
    names = {param: str(number) for number, param in enumerate(params_in(optimizer))}
    owners = [(engine, shard) for shard in engine.param_shards if shard.param in names]
    local: list[LocalState] = []

    def outline() -> tuple[tuple[State, State], list[tuple[str, tuple[int, ...], torch.dtype, int, int]]]:
        local.append(LocalState(type(optimizer).__name__, optimizer, names, owners))
        pieces = local[0].pieces = [] if ranks.replica else local[0].pieces
        rows = [(piece.name, piece.shape, piece.data.dtype, piece.start, piece.stop) for piece in pieces]
        return (local[0].outlines, local[0].owned), rows

    doing = "collect the optimizer's state"
    told = ranks.gather_results(doing, outline)
    wholes: dict[str, torch.Tensor] = {}
    wanted = not rank0_only or ranks.is_first

    def allocate() -> None:
        if wanted:
            for _, rows in told:
                wholes.update((name, torch.empty(shape, dtype=dtype)) for name, shape, dtype, _, _ in rows)

    ranks.gather_results(doing, allocate)  # too little memory on one rank is an error on all
    _gather_pieces(ranks, local[0].pieces, [rows for _, rows in told], wholes, to_all=not rank0_only)
    if not wanted:
        return {}
    wholes.update((name, tensor.to("cpu", copy=True)) for name, tensor in local[0].tensors.items())
    joined = local[0].join([theirs for theirs, _ in told])
    state = {int(name): decode(_plain(own), wholes.__getitem__, _CPU) for name, own in joined.items() if own}
    packed = optimizer.state_dict()
    others = {key: value for key, value in packed["state"].items() if isinstance(key, str)}  # of no parameter
    return {**packed, "state": {**state, **others}}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON that `decode` reads: a moment is a tensor in memory."""
    return {key: {**value, "$": "tensor"} if is_moment(value) else value for key, value in values.items()}


def _gather_pieces(
    ranks: Communicator,
    pieces: Sequence[Piece],
    rows: Sequence[Sequence[tuple[str, tuple[int, ...], torch.dtype, int, int]]],
    wholes: Mapping[str, torch.Tensor],
    *,
    to_all: bool,
) -> None:
    """Fill the full tensors `wholes`, in CPU memory, from all ranks' pieces. Collective.

    Args:
        ranks: all ranks.
        pieces: this rank's pieces.
        rows: by rank, for each of its pieces: name, shape, dtype, first element, and one past the last.
        wholes: full tensors by name; empty on a rank that gets none.
        to_all: fill them on every rank; False: on the first rank only.
    """
    own = {piece.name: piece.data for piece in pieces}
    for source, theirs in enumerate(rows):
        for name, _, dtype, start, stop in theirs:
            if start == stop or not (to_all or ranks.is_first or ranks.number == source):
                continue
            is_mine = ranks.number == source
            part = own[name].detach().to("cpu").contiguous() if is_mine else torch.empty(stop - start, dtype=dtype)
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
    given: Mapping[str, Any] = (state_dict if ranks.is_first else None) or {"state": {}, "param_groups": []}
    tensors: dict[str, torch.Tensor] = {}  # the first rank's

    def outline() -> tuple[dict[Any, Any], dict[str, tuple[torch.Size, torch.dtype]], dict[str, Any]]:
        """JSON by number, shapes and dtypes of tensors, and what is no state of a parameter."""
        _check_format(given)
        saved = {key: encode(values, f"{key}", tensors) for key, values in given["state"].items()}
        others = {key: value for key, value in given.items() if key != "state"}
        return saved, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, others

    saved, metas, others = ranks.gather_results("load the optimizer's state", outline)[0]
    count = sum(len(group["params"]) for group in others["param_groups"])
    if count != len(params):
        raise ShardingError(f"the optimizer state is of {count} parameters, the optimizer has {len(params)}")
    pieces = {
        number: shards[param]
        for number, param in enumerate(params)
        if param in shards and not is_owned(optimizer, param)
    }
    for number, shard in pieces.items():
        _check_shapes(number, shard, saved.get(number, {}), metas)
    state: dict[Any, Any] = {}
    for key, values in saved.items():
        if isinstance(key, int) and key >= len(params):
            continue
        got = {}
        for name in _tensors_of(values):
            shape, dtype = metas[name]
            full = torch.empty(shape, dtype=dtype, device=device)
            if ranks.is_first:
                full.copy_(tensors[name])
            ranks.broadcast(full)
            got[name] = full
        if key in pieces:
            own = decode(values, got.__getitem__, device)
            state[key] = {name: _cut(name, value, pieces[key]) for name, value in own.items()}
        elif isinstance(key, int) and is_owned(optimizer, params[key]):
            if values := own_part(optimizer, params[key], values):
                state[key] = decode(values, got.__getitem__, device)
        else:
            state[key] = decode(values, got.__getitem__, device)
    optimizer.load_state_dict({**others, "state": state})


def _tensors_of(saved: Any) -> Iterator[str]:
    """Names of the tensors in JSON, in its order, which is the same on all ranks."""
    if isinstance(saved, dict) and saved.get("$") in ("tensor", "array"):
        yield saved["tensor"]
    elif isinstance(saved, dict | list):
        for each in saved.values() if isinstance(saved, dict) else saved:
            yield from _tensors_of(each)


def _cut(name: str, value: Any, shard: ParamShard) -> Any:
    """This rank's part of state of a sharded parameter."""
    is_number = not isinstance(value, torch.Tensor) or value.shape != shard.layout.shape
    if is_number or not shard.layout.shape and name in NUMBERS:
        return value
    return value.reshape(-1)[shard.local.start : shard.local.stop].view(shard.piece.shape).clone()


def _check_format(given: object) -> None:
    if isinstance(given, Mapping) and isinstance(given.get("state"), Mapping) and "param_groups" in given:
        return
    shown = f"a dict of {sorted(map(str, given))}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
    raise ShardingError(
        f"the optimizer state is {shown}: wanted what Optimizer.state_dict() gives, with 'state' and 'param_groups'"
    )


def _check_shapes(
    number: int, shard: ParamShard, saved: Mapping[str, Any], metas: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    for name in _tensors_of(saved):
        shape = tuple(metas[name][0])
        if shape != shard.layout.shape:
            raise ShardingError(
                f"optimizer state {name!r} of parameter number {number} has shape {shape}; {shard.name!r} has "
                f"{shard.layout.shape}: was the optimizer built over the same parameters?"
            )
