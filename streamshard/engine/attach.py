"""What sharding changes in a model's modules: their classes, their `_parameters` dicts, and state-dict hooks.

`attach` makes these changes, as the last step of sharding. While a unit's layer runs, the layer's modules hold
unsharded parameters. At other times they hold `OutsideParameters`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from streamshard.config import Precision
from streamshard.engine.backward import take_gradients
from streamshard.engine.engine import ROOT_UNIT, Engine
from streamshard.engine.hooks import compute_in_fp32, watch
from streamshard.engine.module_state import Handle, refuse_in_pass
from streamshard.errors import ShardingError
from streamshard.planning.discovery import FoundUnit, owners_of
from streamshard.planning.structure import InFp32, Structure, join_names, modules_inside, modules_of, params_of
from streamshard.torch_private import skip, untraced
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_tensor import ShardedTensor, piece_of
from streamshard.unit.unit import StreamedUnit
from streamshard.unit.unsharded_parameter import UnshardedParameter, advice, let_be_absent


def attach(base: type, root: nn.Module, found: Sequence[FoundUnit], engine: Engine, in_fp32: InFp32) -> None:
    """Prepare unsharded parameters to replace the sharded ones, and watch units and the modules around them.

    Args:
        base: becomes a base class of the class of `root`.
        root: the user's model.
        found: the units of `root`, in the order of ``engine.units[1:]``.
        engine: complete, with weights.
        in_fp32: parameters and modules that compute in fp32 whatever ``param_dtype`` is.
    """
    take_gradients(engine)
    shards = {shard.param: shard for shard in engine.param_shards}
    owner = owners_of(found)
    layers: dict[nn.Module, StreamedUnit] = {}
    views: dict[nn.Parameter, UnshardedParameter] = {}
    places: dict[nn.Parameter, Place] = {}
    for streamed in engine.units:
        for param_index, (shard, view) in enumerate(zip(streamed.params, streamed.views, strict=True)):
            place = Place(streamed.index, param_index)
            places[shard.param], views[shard.param] = place, view
            view.__dict__ = shard.param.__dict__  # an attribute that the user sets on one (a tag) is on both
            if streamed is not engine.root_unit:
                layer = type(found[streamed.index - 1].modules[0]).__name__
                let_be_absent(view, functools.partial(ask, weakref.ref(engine), place, shard.name, layer))
    for module in modules_inside(root):
        if any(param is not None for param in module._parameters.values()):
            module.__dict__["_parameters"] = OutsideParameters(module._parameters, places, engine)
    for streamed, unit in zip(engine.units[1:], found, strict=True):
        layers.update(dict.fromkeys(unit.modules, streamed))
    for name, module in modules_of(root):
        _bind_views(engine.units[owner.get(module, ROOT_UNIT)], module, views)
        if module._parameters or module._buffers:
            module.register_load_state_dict_pre_hook(functools.partial(_before_loading, engine, name, shards))
        if module._parameters:
            module.register_state_dict_pre_hook(functools.partial(_before_saving, engine))
    structure = Structure(root)
    engine.casts.set_structure_check(functools.partial(_check, weakref.ref(structure)))
    for module in in_fp32.listed:
        if module not in layers and engine.precision.cast_inputs:
            compute_in_fp32(module)
    for module in list(modules_inside(root)):
        layer_of, cast_dtype = layers.get(module), _input_dtype(module, engine.precision, in_fp32)
        if module is root:
            units, output_dtype = frozenset(range(len(engine.units))), engine.precision.output_dtype
            watch(root, Handle(engine, None, units, cast_dtype, output_dtype, True, structure), base)
        elif layer_of is not None:
            watch(module, Handle(engine, layer_of, frozenset((ROOT_UNIT, layer_of.index)), cast_dtype, None))
        elif module not in owner and (module._parameters or any(child in owner for child in modules_inside(module))):
            inside = frozenset(layers[child].index for child in modules_inside(module) if child in layers)
            watch(module, Handle(engine, None, inside | {ROOT_UNIT}, cast_dtype, None))


def _input_dtype(module: nn.Module, precision: Precision, in_fp32: InFp32) -> torch.dtype | None:
    """The dtype for floating-point inputs of a watched module; None leaves inputs as they are."""
    if not precision.cast_inputs:
        return None
    if module in in_fp32.modules:
        return torch.float32
    # Modules that their own class keeps in fp32 get inputs uncast: their code casts, as torch's batch norm does.
    own = params_of(module).values()
    return None if in_fp32.params and own and in_fp32.params.issuperset(own) else precision.param_dtype


def _check(structure_of: Callable[[], Structure | None]) -> None:
    if (structure := structure_of()) is not None:
        structure.check()


def _bind_views(unit: StreamedUnit, module: nn.Module, views: Mapping[Any, nn.Parameter]) -> None:
    """Let `module` hold unsharded parameters while `unit` is bound.

    RNNs keep their weights in a list for cuDNN too, and weak references to them.
    """
    sharded = module._parameters
    if any(param is not None for param in sharded.values()):
        computing = {name: None if param is None else views[param] for name, param in sharded.items()}
        unit.add_binding(module, "_parameters", sharded, computing)
    if isinstance(module, nn.RNNBase):
        module.__dict__["flatten_parameters"] = lambda: None  # it would move weights out of the slot
        weights = [views.get(param, param) for param in module._flat_weights]
        refs = [None if weight is None else weakref.ref(weight) for weight in weights]
        unit.add_binding(module, "_flat_weights", module._flat_weights, weights)
        unit.add_binding(module, "_flat_weight_refs", module._flat_weight_refs, refs)


# -- parameters while their layers do not run ----------------------------------------------------------------------


class Place(NamedTuple):
    """Where a weight is: the index of its unit, and of the parameter in the unit."""

    unit: int
    param: int


def ask(engine_of: Callable[[], Engine | None], place: Place, name: str, layer: str) -> None:
    """Put the unit of an absent weight in place, because code computes with the weight. See [Note: absent weights].

    Args:
        engine_of: weak reference to the engine.
        place: of the weight.
        name: of the weight, fully qualified.
        layer: the name of the class of its layer.

    Raises:
        ShardingError: the unit is streamed, or no pass is under way.
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
            f"keep it in place, {advice(name)}, or all layers of its class, resident=[{layer!r}]; or call the layer "
            "itself (not its forward, nor a module in it)"
        )
    phase.read(unit)


class OutsideParameters(dict[str, Any]):
    """The ``_parameters`` dict of a module that is not bound: its sharded parameters.

    Inside a pass a look-up gives the unsharded parameter. That of a resident unit is all-gathered first, that of a
    streamed unit is absent ([Note: absent weights]). ``items()`` and ``values()`` all-gather nothing:
    ``next(module.parameters()).dtype`` needs no weights.

    Outside of a pass a look-up gives the sharded parameter, for optimizers, initialisations and logs. The sharded
    parameter itself refuses computations that need the full tensor (see `streamshard.unit.sharded_tensor`).

    Args:
        params: name to sharded parameter.
        places: where each parameter of the model is.
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
        """The unsharded parameter `key` inside a pass, the sharded one outside."""
        engine = self._engine_of()
        place = self._places.get(self.get(key))
        if place is not None and engine is not None and engine.current is not None:
            return _read(engine, place)
        return super().__getitem__(key)

    def items(self) -> Any:
        """Unsharded parameters inside a forward, for ``module.parameters()``; else, as in backward's hooks, sharded."""
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
    """The unsharded parameter at `place`, for a look-up inside a pass. A resident unit is all-gathered first."""
    phase = engine.current
    if phase is not None and not engine.units[place.unit].is_streamed:
        untraced(phase.read, engine.units[place.unit])
    return _view(engine, place)


def _before_saving(engine: Engine, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Runs before ``state_dict()`` and raises inside a pass: other layers would overwrite the weights in the slots."""
    refuse_in_pass(engine, f"state_dict() of {prefix or type(module).__name__!r}")
    engine.refuse_empty("state_dict()")


def _before_loading(
    engine: Engine,
    path: str,
    shards: Mapping[nn.Parameter, ParamShard],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Runs before ``load_state_dict`` copies: cuts full tensors into this rank's pieces, and notes what has values now.

    Args:
        engine: the model's.
        path: the module's name in the model.
        shards: by parameter.
        module, state_dict, prefix, metadata, strict, missing, unexpected, errors: see
            ``nn.Module.register_load_state_dict_pre_hook``.
    """
    refuse_in_pass(engine, f"load_state_dict() of {prefix or type(module).__name__!r}")
    for key, param in module._parameters.items():
        name = prefix + key
        value, shard = state_dict.get(name), None if param is None else shards.get(param)
        if param is None or shard is None or not isinstance(value, torch.Tensor):
            continue
        if metadata.get("assign_to_params_buffers", False):
            raise ShardingError(
                f"load_state_dict(assign=True) would replace the sharded parameter {shard.name!r}: leave assign away, "
                "full tensors are cut into pieces and copied"
            )
        if param.shape == value.shape:
            engine.fill([shard.name])
            if piece_of(param) is not None and not isinstance(value, ShardedTensor):
                state_dict[name] = ShardedTensor.wrap(shard.what.cut(value), shard.what)
            continue
        errors.append(
            f"StreamShard: {shard.name!r} has shape {shard.what.shape}, in the state dict it has {tuple(value.shape)}. "
            "Wanted are full tensors, from full_state_dict() or an unsharded model"
        )
        state_dict[name] = param.detach()  # copies the parameter to itself, so torch reports no other shape
    for key, buffer in module._buffers.items():
        value = None if key in module._non_persistent_buffers_set else state_dict.get(prefix + key)
        if buffer is not None and isinstance(value, torch.Tensor) and value.shape == buffer.shape:
            engine.fill([join_names(path, key)])
