"""The last step of sharding a model: its modules hear of the engine, and know which weights they compute with."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamshard.config import Precision
from streamshard.engine.backward import take_gradients
from streamshard.engine.engine import ROOT_UNIT, Engine
from streamshard.engine.handle import Handle
from streamshard.engine.hooks import compute_in_fp32, watch
from streamshard.engine.outside import BeforeSaving, LoadWhole, OutsideParameters, Place, ask, before_saving_all
from streamshard.plan.discovery import FoundUnit, owners_of
from streamshard.plan.fp32 import InFp32
from streamshard.plan.structure import Structure, modules_inside, modules_of, params_of
from streamshard.unit.absent_weight import let_be_absent
from streamshard.unit.unit import StreamedUnit

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
                let_be_absent(views[shard.param], shard.param, shard.name, be_asked)
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
    root.register_state_dict_pre_hook(before_saving_all)
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
