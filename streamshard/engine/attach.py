"""What stands in the modules of a sharded model: watched classes, two sets of parameters, and state-dict hooks.

`attach` puts it there, as the last step of sharding. While a unit's layer runs, its modules hold unsharded parameters;
otherwise they hold `OutsideParameters`.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from streamshard.config import Precision
from streamshard.engine.backward import take_gradients
from streamshard.engine.engine import ROOT_UNIT, Engine
from streamshard.engine.handle import Handle
from streamshard.engine.hooks import compute_in_fp32, watch
from streamshard.errors import ShardingError
from streamshard.plan.discovery import FoundUnit, owners_of
from streamshard.plan.structure import InFp32, Structure, join_names, modules_inside, modules_of, params_of
from streamshard.torch_private import skip, untraced
from streamshard.unit.sharded_tensor import ShardedTensor, piece_of
from streamshard.unit.unit import StreamedUnit
from streamshard.unit.unsharded_parameter import advice, let_be_absent

__all__ = ["attach"]


def attach(base: type, root: nn.Module, found: Sequence[FoundUnit], engine: Engine, in_fp32: InFp32) -> None:
    """Register compute views beside the sharded parameters, and watch units and the modules around them.

    Args:
        base: what the class of `root` derives from as well.
        root: the user's model.
        found: its units, in the order of the engine's, which begin with the root unit.
        engine: complete, with weights.
        in_fp32: what computes in fp32 whatever the model does.
    """
    take_gradients(engine)
    views = {shard.param: view for unit in engine.units for shard, view in zip(unit.params, unit.views, strict=True)}
    for param, view in views.items():
        view.__dict__ = param.__dict__  # what people set on a parameter (a multiplier, a tag) is on either
    owner = owners_of(found)
    layers: dict[nn.Module, StreamedUnit] = {}
    places: dict[nn.Parameter, Place] = {}
    for streamed in engine.units:
        for param_index, shard in enumerate(streamed.params):
            place = places[shard.param] = Place(streamed.index, param_index)
            if streamed is not engine.root_unit:
                be_asked = functools.partial(ask, weakref.ref(engine), place, shard.name)
                let_be_absent(views[shard.param], be_asked)
    for module in modules_inside(root):
        if any(param is not None for param in module._parameters.values()):
            module.__dict__["_parameters"] = OutsideParameters(module._parameters, places, engine)
    for streamed, unit in zip(engine.units[1:], found, strict=True):
        layers.update(dict.fromkeys(unit.modules, streamed))
    for name, module in modules_of(root):
        _bind_views(engine.units[owner.get(module, ROOT_UNIT)], module, views, engine)
        if module._parameters or module._buffers:
            module.register_load_state_dict_pre_hook(LoadWhole(engine, name))
        if module._parameters:
            module.register_state_dict_pre_hook(BeforeSaving(engine))
    structure = Structure(root)
    engine.set_structure_check(_weakly(structure))
    takes = _input_dtypes(root, engine.precision, in_fp32)
    for module in in_fp32.listed:
        if module not in layers and engine.precision.cast_inputs:
            compute_in_fp32(module)
    for module in list(modules_inside(root)):
        layer_of, cast_dtype = layers.get(module), takes(module)
        if module is root:
            units = frozenset(range(len(engine.units)))
            handle = Handle(
                engine, None, units, cast_dtype, engine.precision.output_dtype, is_root=True, structure=structure
            )
            watch(root, handle, base)
        elif layer_of is not None:
            watch(module, Handle(engine, layer_of, frozenset((ROOT_UNIT, layer_of.index)), cast_dtype, None))
        elif module not in owner and (module._parameters or any(child in owner for child in modules_inside(module))):
            inside = frozenset(layers[child].index for child in modules_inside(module) if child in layers)
            watch(module, Handle(engine, None, inside | {ROOT_UNIT}, cast_dtype, None))


def _input_dtypes(root: nn.Module, precision: Precision, in_fp32: InFp32) -> Callable[[nn.Module], torch.dtype | None]:
    """What floating-point inputs of a watched module are cast to; None leaves them."""
    listed, alone = in_fp32.modules, in_fp32.params

    def dtype(module: nn.Module) -> torch.dtype | None:
        if not precision.cast_inputs:
            return None
        if module in listed:
            return torch.float32
        # What a class keeps in fp32 takes what it is given: its own code casts, and so does torch's batch norm.
        own = params_of(module).values()
        return None if alone and own and alone.issuperset(own) else precision.param_dtype

    return dtype


def _weakly(structure: Structure) -> Callable[[], None]:
    check_of = weakref.WeakMethod(structure.check)

    def check() -> None:
        if (alive := check_of()) is not None:
            alive()

    return check


def _bind_views(
    unit: StreamedUnit, module: nn.Module, views: Mapping[nn.Parameter, nn.Parameter], engine: Engine
) -> None:
    """Let `module` hold compute views while `unit` is bound: in its register, and in lists and dicts of its own.

    RNNs keep their weights in a list for cuDNN, with weak references to notice other ones, people keep lists for
    convenience. Of `views` those that are in place whenever the unit is bound count, its own and the root unit's.
    """
    if isinstance(module, nn.RNNBase):  # would move what lies in a slot to memory of its own, in one piece as there
        module.__dict__["flatten_parameters"] = _do_nothing
    sharded = module._parameters
    if any(param is not None for param in sharded.values()):
        computing = {name: None if param is None else views[param] for name, param in sharded.items()}
        unit.add_binding(module, "_parameters", sharded, computing)
    in_place = {shard.param: views[shard.param] for each in (unit, engine.root_unit) for shard in each.params}
    for key, value in module.__dict__.items():
        if key not in ("_parameters", "_buffers", "_modules") and (bound := _with_views(value, in_place)) is not value:
            unit.add_binding(module, key, value, bound)


def _with_views(value: Any, views: Mapping[nn.Parameter, nn.Parameter], depth: int = 3) -> Any:
    """`value`, or if it is a container with parameters of `views`, `depth` deep at most, a copy with their views.

    Likewise for weak references to parameters.
    """
    if isinstance(value, nn.Parameter):
        return views.get(value, value)
    if isinstance(value, weakref.ref):
        target = value()
        return weakref.ref(views[target]) if isinstance(target, nn.Parameter) and target in views else value
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        items = [_with_views(item, views, depth - 1) for item in value]
        return type(value)(items) if any(map(operator.is_not, items, value)) else value
    if type(value) is dict:
        entries = {key: _with_views(item, views, depth - 1) for key, item in value.items()}
        return entries if any(entries[key] is not value[key] for key in value) else value
    return value


def _do_nothing() -> None:
    pass


# -- parameters while their layers do not run ----------------------------------------------------------------------


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
        return super().__getitem__(key)

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
                    state_dict[name] = ShardedTensor.wrap(what.cut(value), what)
                continue
            if tuple(value.shape) == what.local_shape and piece_of(param) is not None:
                self._engine.fill([shard.name])
                piece = value.as_subclass(torch.Tensor).detach()
                state_dict[name] = ShardedTensor.wrap(piece, what)
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
