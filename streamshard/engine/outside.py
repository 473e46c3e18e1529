"""What a sharded model's modules do while they do not compute: their parameters are pieces, their state dicts parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from streamshard.compiling import skip, untraced
from streamshard.engine.engine import Engine
from streamshard.engine.handle import engine_of
from streamshard.errors import ShardingError
from streamshard.plan.structure import join_names
from streamshard.unit.absent_weight import advice
from streamshard.unit.pieces import piece_of, refuse_accelerate
from streamshard.unit.sharded_parameter import be_sharded
from streamshard.unit.sharded_tensor import ShardedTensor
from streamshard.unit.sharding import Sharding

__all__ = ["BeforeSaving", "LoadWhole", "OutsideParameters", "Place", "ask", "before_saving_all"]


class Place(NamedTuple):
    """Where a weight is: the number of its unit, and of the parameter in it."""

    unit: int
    param: int


def ask(engine_of: Callable[[], Engine | None], place: Place, name: str) -> None:
    """Somebody computes with a weight that is absent: it is in place afterwards. See [Note: absent weights].

    Raises:
        ShardingError: its unit takes turns; or no pass is under way.
    """
    engine = engine_of()
    if engine is None or (phase := engine.current) is None:
        raise ShardingError(
            f"{name!r} was read inside a forward and is used after it, where every rank has its piece only: compute "
            "with it inside, keep a clone(), or read it inside summon_full_params()"
        )
    unit = engine.units[place.unit]
    if unit.is_streamed:
        raise ShardingError(
            f"the weight {name!r} is computed with while its layer does not run, when other layers have its buffer: "
            f"keep it in place, {advice(name)}, or call the layer itself (not its forward, nor a module in it)"
        )
    phase.read(unit)


class OutsideParameters(dict[str, Any]):
    """A module's sharded parameters: what stands in it while it is not bound, where a plain dict of views would.

    Inside a pass look-ups answer with compute views: resident units arrive, others are absent ([Note: absent weights]).
    Lists of parameters wait for nobody: who asks for the dtype of the first needs no weights.

    Outside, reading a piece is what optimizers, initialisations and logs do. Who computes with one as a layer would
    hears so when he does it (see `streamshard.unit.sharded_parameter`).

    Args:
        params: name to sharded parameter.
        places: of all parameters.
        engine: the model's.
    """

    __slots__ = ("_engine_of", "_places")

    def __init__(
        self, params: Mapping[str, nn.Parameter | None], places: Mapping[nn.Parameter, Place], engine: Engine
    ) -> None:
        super().__init__(params)
        self._engine_of = weakref.ref(engine)
        self._places: dict[Any, Place] = {param: places[param] for param in params.values() if param is not None}

    def __getitem__(self, key: str) -> Any:
        """The parameter `key`, as it is for the time being."""
        engine = self._engine_of()
        place = self._places.get(self.get(key))
        if place is not None and engine is not None and engine.current is not None:
            return _read(engine, place)
        param = super().__getitem__(key)
        if param is not None and engine is not None and not (engine.is_computing or engine.is_whole):
            be_sharded(param)  # if a step has failed
        return param

    def __setitem__(self, key: str, value: Any) -> None:
        """What was looked up may be put back (``torch.func.functional_call`` does): as the sharded parameter again."""
        engine = self._engine_of()
        for param, place in self._places.items():
            if engine is not None and value is _view(engine, place):
                value = param
        super().__setitem__(key, value)

    def items(self) -> Any:
        """As `__getitem__`, for ``module.parameters()`` inside a forward; a backward's hooks see what is sharded."""
        engine, items = self._engine_of(), super().items()
        if engine is None or engine.phase is None or not engine.phase.is_forward:
            return items
        views = {param: _view(engine, place) for param, place in self._places.items()}
        return [(key, views.get(value, value)) for key, value in items]

    def values(self) -> Any:
        """As `items`."""
        return [value for _, value in self.items()]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"a module with the parameters {', '.join(self)} is part of a model sharded by StreamShard, and cannot be "
            "copied or pickled: they are pieces. Use full_state_dict()"
        )


def _view(engine: Engine, place: Place) -> nn.Parameter:
    return engine.units[place.unit].views[place.param]


@skip  # torch.compile breaks its graph where weights are read
def _read(engine: Engine, place: Place) -> nn.Parameter:
    """What code that looks a weight up inside a pass gets."""
    phase = engine.current
    if phase is not None and not engine.units[place.unit].is_streamed:
        untraced(phase.read, engine.units[place.unit])
    return _view(engine, place)


class BeforeSaving:
    """Before ``state_dict()``: no module computes, whose weights would be another layer's a moment later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._engine.recover()
        if self._engine.is_computing:
            raise ShardingError(
                f"state_dict() of {prefix or type(module).__name__!r} inside a forward or backward, or in a thread "
                "beside one: layers hold gathered weights, in memory that takes turns. Call it between steps"
            )
        self._engine.refuse_empty("state_dict()")
        for param in module._parameters.values():
            if param is not None:
                be_sharded(param)  # if a step has failed


def before_saving_all(root: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Before ``state_dict()`` of the whole model, also on one rank: there weights share memory, and safetensors that
    accelerate writes leave out what does."""
    if not engine_of(root).is_whole:
        refuse_accelerate()


class LoadWhole:
    """Before ``load_state_dict`` copies: cut whole tensors into this rank's pieces, and note what has values now.

    Args:
        engine: of the model.
        name: of the module in the model.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self._name = name
        self._shards = {shard.param: shard for unit in engine.units for shard in unit.params}
        self._engine = engine

    def __call__(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self._engine.recover()
        if self._engine.is_computing:
            raise ShardingError(
                f"load_state_dict() of {prefix or type(module).__name__!r} inside a forward or backward, or in a "
                "thread beside one: it would load into gathered weights. Call it between steps"
            )
        for key, param in module._parameters.items():
            name = prefix + key
            value, shard = state_dict.get(name), None if param is None else self._shards.get(param)
            if param is None or shard is None or not isinstance(value, torch.Tensor):
                continue
            if metadata.get("assign_to_params_buffers", False):
                raise ShardingError(
                    f"load_state_dict(assign=True) would replace the sharded parameter {shard.name!r}: leave assign "
                    "away, whole tensors are cut into pieces and copied"
                )
            what = shard.what(self._engine.ranks)
            if param.shape == value.shape:
                self._engine.fill([shard.name])
                if piece_of(param) is not None and not isinstance(value, ShardedTensor):
                    state_dict[name] = ShardedTensor.wrap(what.cut(value), Sharding.of_piece(what, is_weight=True))
                continue
            if tuple(value.shape) == what.local_shape and piece_of(param) is not None:
                self._engine.fill([shard.name])
                piece = value.as_subclass(torch.Tensor).detach()
                state_dict[name] = ShardedTensor.wrap(piece, Sharding.of_piece(what, is_weight=True))
                continue
            errors.append(
                f"StreamShard: {shard.name!r} has shape {what.shape}, in the state dict it has {tuple(value.shape)}. "
                "Wanted are whole tensors, from full_state_dict() or an unsharded model, or this rank's own pieces, "
                f"{tuple(shard.piece.shape)}, from state_dict() on as many ranks"
            )
            state_dict[name] = param.detach()  # nothing is copied, and torch has nothing to say about shapes
        for key, buffer in module._buffers.items():
            value = None if key in module._non_persistent_buffers_set else state_dict.get(prefix + key)
            if buffer is not None and isinstance(value, torch.Tensor) and value.shape == buffer.shape:
                self._engine.fill([join_names(self._name, key)])
