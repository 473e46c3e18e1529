"""Whole weights one after another: what modules have for parameters while their model is initialised.

[Note: room]
A `WholeWeight` has the shape and dtype of the unsharded parameter, and no memory. That comes when something is done to
it. All together take at most as many bytes as the weights of the largest unit do. The one that was opened first is
closed first, unless somebody still holds its memory (a view, ``weight.data``): he may write to it later. What is empty
is opened full of NaN; what is none when it is closed was written to, and this rank's piece is kept. What is opened
again was filled before, and is gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from streamshard.engine.containers import map_tensors, tensors_in
from streamshard.engine.engine import Engine
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.plan.structure import join_names, modules_inside, modules_of
from streamshard.unit.shard import ParamShard

__all__ = ["Room", "WholeWeight"]

_SAMPLED = 4  # elements of each parameter


class Room:
    """The memory of whole weights while an initialisation runs. See [Note: room].

    Args:
        engine: whose weights.
        names: of parameters that may be written to; of all others what is written is lost.
    """

    def __init__(self, engine: Engine, names: set[str]) -> None:
        self._engine = engine
        self._names = names
        self._unit_of = {shard.name: unit for unit in engine.units for shard in unit.params}
        self._shards = {shard.name: shard for shard in engine.param_shards}
        self._versions = {name: shard.param._version for name, shard in self._shards.items()}
        self._empty = set(engine.empty.params()) if engine.empty is not None else set()
        self._limit = max(sum(map(_nbytes, unit.params)) for unit in engine.units)
        self._weights: dict[nn.Parameter, WholeWeight] = {}
        self._open: dict[str, torch.Tensor] = {}  # in the order in which they were opened
        self._spare: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}  # of closed ones
        self._samples: list[torch.Tensor] = []  # of what was written

    @contextlib.contextmanager
    def in_modules(self, model: nn.Module) -> Iterator[None]:
        """Inside, modules have whole weights for parameters."""
        shards = self._shards.values()
        device = self._engine.streams.device
        self._weights = {shard.param: WholeWeight.make(shard, self, device) for shard in shards}
        before = {module: module._parameters for module in modules_inside(model) if module._parameters}
        try:
            for module, params in before.items():
                module.__dict__["_parameters"] = _WholeParameters(params, self._weights)
            yield
        finally:
            for module, params in before.items():
                module.__dict__["_parameters"] = params

    def kept_weights(self, root: nn.Module, copies: set[str]) -> Iterator[WholeWeight]:
        """What stands for parameters that have their values; and for tied ones under each of the names `copies`."""
        for weight in self._weights.values():
            if weight.shard.name not in self._names:
                yield weight
        for prefix, module in modules_of(root):
            params = module._parameters
            if isinstance(params, _WholeParameters):
                tied = (key for key, weight in params.items() if weight is not None and weight.shard.aliases)
                yield from [params.make_copy(key) for key in list(tied) if join_names(prefix, key) in copies]

    def open(self, shards: Sequence[ParamShard]) -> list[torch.Tensor]:
        """Whole weights, each [shape] in its own dtype on the device: what they are now, or NaN if they are empty."""
        names = {shard.name for shard in shards}
        for shard in shards:
            if shard.name not in self._open:
                self._open[shard.name] = (
                    self._new(shard, names) if shard.name in self._empty else self._gather(shard, names)
                )
        return [self._open[shard.name] for shard in shards]

    def finish(self) -> None:
        """Keep all that was written.

        Raises:
            ShardingError: a parameter itself was written to, which somebody keeps elsewhere; elements are NaN.
        """
        for name in list(self._open):
            self._close(name)
        shards = self._shards.items()
        stray = next((name for name, shard in shards if shard.param._version != self._versions[name]), None)
        if stray is not None:
            raise ShardingError(
                f"the initialisation has written to parameter {stray!r} by way of a list or an attribute outside "
                "of its module's parameters, where this rank has its piece only: take it from the module "
                "(module.weight, module.parameters())"
            )

    def check_equal(self) -> None:
        """Compare a few numbers of each parameter with those of other ranks. Collective.

        Raises:
            RankMismatchError: they have other ones, of a generator of their own.
        """
        ranks = self._engine.ranks
        if not ranks.any_rank(bool(self._samples)):
            return
        mine = torch.cat(self._samples) if self._samples else torch.zeros(0, device=self._engine.streams.device)
        is_equal = ranks.are_equal(str(mine.numel()))
        if is_equal:
            extremes = torch.stack([mine, -mine])
            ranks.all_reduce(extremes, maximum=True, with_replicas=True)
            # Processors of different kinds round differently.
            is_equal = torch.allclose(extremes[0], -extremes[1], rtol=1e-3, atol=1e-6)
        if not is_equal:
            raise RankMismatchError(
                "ranks have initialised the model with different numbers, of which each keeps its part: inside of "
                "init_weights take random numbers from torch's default generator, which has the same seed everywhere"
            )

    def _new(self, shard: ParamShard, kept: set[str]) -> torch.Tensor:
        """Memory of one that was closed, if there is such: what allocators get back they may break into pieces."""
        shape = torch.Size(shard.layout.shape)
        self._close_for(_nbytes(shard), kept)
        memory = self._spare.pop((shape, shard.dtype), None)
        if memory is None:
            self._drop_spare(_nbytes(shard))
            memory = torch.empty(shape, dtype=shard.dtype, device=self._engine.streams.device)
        return memory.fill_(torch.nan)

    def _gather(self, shard: ParamShard, kept: set[str]) -> torch.Tensor:
        unit = self._unit_of[shard.name]
        self._close_for(self._limit, kept)
        self._drop_spare(self._limit)
        (segment,) = (each for each in unit.segments if any(own.param is shard.param for own in each.params))
        wanted = {id(each.param) for each in segment.params}
        wholes = unit.gather_whole([each.main if id(each.param) in wanted else None for each in unit.params])
        (whole,) = (whole for each, whole in zip(unit.params, wholes, strict=True) if each.param is shard.param)
        assert whole is not None
        return whole.to(shard.dtype, copy=True)

    def _close_for(self, nbytes: int, kept: set[str]) -> None:
        """Close as much as it takes to open `nbytes`, as far as nobody holds it."""
        for name in list(self._open):
            if nbytes + _total(self._open) <= self._limit:
                return
            if name not in kept and not _is_held(memory := self._open[name]):
                self._close(name)
                self._spare[memory.shape, memory.dtype] = memory

    def _drop_spare(self, nbytes: int) -> None:
        """Give memory back that nothing lies in, as much as it takes to allocate `nbytes`."""
        while self._spare and nbytes + _total(self._open) + _total(self._spare) > self._limit:
            self._spare.popitem()

    def _close(self, name: str) -> None:
        flat = self._open.pop(name).view(-1)
        if name not in self._names:
            return
        if bool(flat.amin().isnan()):
            if bool(flat.isnan().all()):
                return  # nobody has written to it
            raise ShardingError(
                f"the initialisation has left elements of parameter {name!r} without a value, or given it NaN"
            )
        shard = self._shards[name]
        shard.main.copy_(flat[shard.local.start : shard.local.stop])
        self._versions[name] = shard.param._version
        self._empty.discard(name)
        self._samples.append(flat[:_SAMPLED].to(torch.float32, copy=True))


def _is_held(memory: torch.Tensor) -> bool:
    """Whether somebody else has the memory of a tensor as well, which has one owner, and who asks is another."""
    return torch._C._storage_Use_Count(memory.untyped_storage()._cdata) > 2


def _total(tensors: Mapping[Any, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _nbytes(shard: ParamShard) -> int:
    return shard.layout.numel * shard.dtype.itemsize


class WholeWeight(torch.Tensor):
    """Stands in a module for a parameter while its model is initialised: whole, with memory while something is done.

    Attributes:
        shard: this rank's part of it.
        room: has its memory.
    """

    shard: ParamShard
    room: Room

    @staticmethod
    def make(shard: ParamShard, room: Room, device: torch.device) -> WholeWeight:
        """The parameter of `shard`, shape and dtype as before sharding."""
        weight: WholeWeight = torch.Tensor._make_wrapper_subclass(
            WholeWeight, shard.layout.shape, dtype=shard.dtype, device=device, requires_grad=shard.param.requires_grad
        )
        weight.shard, weight.room = shard, room
        weight._is_param = True  # what isinstance(.., nn.Parameter) asks
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Questions are answered from outside, everything else is done to the memory."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_answered = name in _ANSWERED
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__set__" and attribute == "data":
                args[0].assign(args[1])
                return None
            if name == "__set__" and attribute == "requires_grad":
                args[0].shard.param.requires_grad_(args[1])
            is_answered = attribute not in _MEMORY_ATTRIBUTES
        if name == "requires_grad_":
            args[0].shard.param.requires_grad_(*args[1:], **kwargs)
        if is_answered:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        weights = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, WholeWeight)]
        memories = weights[0].room.open([weight.shard for weight in weights])
        of = dict(zip(weights, memories, strict=True))
        args, kwargs = map_tensors((args, kwargs), lambda tensor: of.get(tensor, tensor))  # type: ignore[call-overload]
        result = func(*args, **kwargs)
        return next((weight for weight, memory in of.items() if memory is result), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the function as well
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Reached by code that goes around ``__torch_function__``."""
        raise ShardingError(f"{func} of a parameter while its model is initialised: use torch's functions of tensors")

    def assign(self, value: torch.Tensor) -> None:
        """``weight.data = value``, or another parameter in its place: its values count.

        Raises:
            ShardingError: it has another shape.
        """
        if value.shape != self.shape:
            raise ShardingError(
                f"the initialisation puts a tensor of shape {tuple(value.shape)} in the place of parameter "
                f"{self.shard.name!r}, which was {tuple(self.shape)} when the model was sharded"
            )
        (memory,) = self.room.open([self.shard])
        memory.copy_(value.detach())


# Of what is not the memory; and what of attributes is.
_ANSWERED = frozenset(
    name
    for line in (
        "size dim numel nelement ndimension stride storage_offset element_size is_floating_point is_complex",
        "is_contiguous is_inference get_device requires_grad_ __len__ __repr__ has_names is_shared",
    )
    for name in line.split()
)
_MEMORY_ATTRIBUTES = ("data", "T", "mT", "H", "mH", "real", "imag")


class _WholeParameters(dict[str, Any]):
    """A module's parameters while its model is initialised.

    Args:
        params: the sharded ones.
        weights: what stands for them.
    """

    def __init__(self, params: Mapping[str, nn.Parameter | None], weights: Mapping[nn.Parameter, WholeWeight]) -> None:
        super().__init__({key: None if param is None else weights[param] for key, param in params.items()})

    def make_copy(self, key: str) -> WholeWeight:
        """Let what stands for parameter `key` be another object than elsewhere; which is returned."""
        weight = self[key]
        copy = WholeWeight.make(weight.shard, weight.room, weight.device)
        super().__setitem__(key, copy)
        return copy

    def __setitem__(self, key: str, value: Any) -> None:
        """``module.weight = nn.Parameter(..)``: what stands there takes over the values."""
        weight = self.get(key)
        if value is weight:
            return
        if weight is None or not isinstance(value, torch.Tensor):
            raise ShardingError(
                f"the initialisation registers {key!r}, which was {'no' if weight is None else 'a'} parameter when the "
                "model was sharded: change the model before it is"
            )
        weight.assign(value)
