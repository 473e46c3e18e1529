"""The changes of a model's modules: their classes, their `_parameters` dicts, and state-dict hooks.

`attach` makes these changes when everything is allocated. While a unit is bound, its modules hold unsharded parameters.
At other times they hold `OutsideParameters`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from streamshard.config import Precision
from streamshard.core.edge import OutsideParameters, Watched, ask_for, compute_in_fp32
from streamshard.core.engine import ROOT_UNIT, Engine
from streamshard.core.graph_hooks import register_gradient_hooks, register_tied_hook
from streamshard.core.module_state import Handle, refuse_in_pass
from streamshard.core.params import Param
from streamshard.core.tied import TiedHead
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.forms import DTensorForm, form_of
from streamshard.guards.loop import Members
from streamshard.guards.modules import HANDLE, change_class, watched_class
from streamshard.guards.sharded_tensor import ShardedTensor, piece_of
from streamshard.planning.discovery import FoundUnit, owners_of
from streamshard.planning.structure import InFp32, join_names, modules_inside, modules_of, params_of


def attach(base: type, root: nn.Module, found: Sequence[FoundUnit], engine: Engine, in_fp32: InFp32) -> None:
    """Prepare unsharded parameters to replace the sharded ones, and watch units and the modules around them.

    Args:
        base: becomes a base class of the class of `root`.
        root: the user's model.
        found: the units of `root`, in the order of ``engine.units``.
        engine: complete, with weights.
        in_fp32: parameters and modules that compute in fp32 whatever ``param_dtype`` is.
    """
    # For hooks of unsharded parameters, guards, and dicts in the bindings of units: the engine holds all of them.
    engine_of = weakref.ref(engine)
    register_gradient_hooks(engine, engine_of)
    owner = owners_of(found)
    shards = {param.sharded: param for param in engine.params}
    layers = {module: unit for unit, here in zip(engine.units[1:], found[1:], strict=True) for module in here.modules}
    places: dict[nn.Parameter, tuple[int, int]] = {}
    for unit in engine.units:
        for index, param in enumerate(unit.params):
            places[param.sharded] = unit.index, index
            if not param.form.inner:  # torchao's tensors have their parts in `__dict__`
                param.unsharded.__dict__ = param.sharded.__dict__  # an attribute that the user sets on one is on both
        layer = "" if unit is engine.root_unit else type(found[unit.index].modules[0]).__name__
        unit.guard.ask = ask_for(engine_of, unit.index, layer)
        # The root unit's weights are absent only while gradients have its slot.
        if unit is not engine.root_unit:
            unit.guard.set_present(False)
    for name, module in modules_of(root):
        if any(param is not None for param in module._parameters.values()):
            module.__dict__["_parameters"] = OutsideParameters(module._parameters, places, engine_of)
        _bind_views(engine.units[owner.get(module, ROOT_UNIT)], module, shards)
        if module._parameters or module._buffers:
            hook = functools.partial(_before_loading, engine, name, shards)
            module.register_load_state_dict_pre_hook(hook)
        if module._parameters:
            # A module of buffers alone may be saved inside a pass: buffers are full at any time.
            module.register_state_dict_pre_hook(functools.partial(_before_saving, engine))
    tied = _tied_heads(root, engine, engine_of)
    members = Members(root)  # behind the new `_parameters`, in which it looks for changes
    engine.members_of = weakref.ref(members)
    engine.progress.begin({param: shard.name for param, shard in shards.items()})
    for module in in_fp32.listed:
        if module not in layers and engine.precision.cast_inputs:
            compute_in_fp32(module)
    for module in modules_inside(root):
        # Inside a layer, whose own call puts the unit in place.
        if module in owner and module not in layers and module is not root:
            continue
        inside = list(modules_inside(module))
        # A call of any other module needs no weights.
        if module is root or module in layers or module._parameters or any(child in owner for child in inside):
            units = frozenset((ROOT_UNIT, *(layers[child].index for child in inside if child in layers)))
            dtype = _input_dtype(module, engine.precision, in_fp32)
            computing = inside if module in layers else [module]
            looks_up = any(isinstance(each, nn.Embedding) for each in computing)
            may_save = type(module) is not nn.Embedding  # a subclass may do more than look up
            handle = Handle(engine, layers.get(module), units, dtype, None, looks_up, may_save, tied.get(module))
            if module is root:
                output_dtype = engine.precision.output_dtype
                handle = handle._replace(output_dtype=output_dtype, is_root=True, members=members)
            module.__dict__[HANDLE] = handle
            change_class(module, watched_class(type(module), base if module is root else Watched))


def _tied_heads(root: nn.Module, engine: Engine, engine_of: Callable[[], Engine | None]) -> dict[nn.Module, TiedHead]:
    """By module, the head that computes with an embedding's weight. Fills ``engine.tied``."""
    unit = engine.root_unit
    if unit.grads.slot.weights is None:  # gradients do not take the place of weights
        return {}
    users: dict[Any, dict[nn.Module, str]] = {}
    for name, module in modules_of(root):
        for weight in {*module._parameters.values()}:
            users.setdefault(weight, {})[module] = name
    found: dict[nn.Module, TiedHead] = {}
    for place, param in enumerate(unit.params):
        heads = [user for user in users.get(param.sharded, ()) if not isinstance(user, nn.Embedding)]
        has_place = param.has_room and param.whole_class is nn.Parameter and not param.form.inner
        if not has_place or not heads or len(heads) == len(users[param.sharded]):
            continue
        full, room = param.unsharded, param.in_slot
        # Elsewhere in the slot lie other weights, which the rest of the backward may need.
        if (full.data_ptr(), full.dtype) == (room.data_ptr(), room.dtype) and full.requires_grad:
            head = TiedHead(unit, place, users[param.sharded][heads[0]])
            register_tied_hook(engine_of, len(engine.tied), head.alias)
            engine.tied.append(head)
            found.update(dict.fromkeys(heads, head))
    if found:
        unit.guard.ask = functools.partial(_read_behind_head, engine_of, unit.guard.ask)
    return found


def _read_behind_head(engine_of: Callable[[], Engine | None], ask: Callable[[str], object], name: str) -> None:
    if (engine := engine_of()) is None or engine.current is None or engine.root_unit.guard.is_gone:
        ask(name)  # raises
        return
    for head in engine.tied:
        if head.param.name == name:
            head.read()


def _input_dtype(module: nn.Module, precision: Precision, in_fp32: InFp32) -> torch.dtype | None:
    """The dtype for floating-point inputs of a watched module; None leaves inputs as they are."""
    if not precision.cast_inputs:
        return None
    if module in in_fp32.modules:
        return torch.float32
    # Modules that their own class keeps in fp32 get inputs uncast: their code casts, as torch's batch norm does.
    own = params_of(module).values()
    return None if in_fp32.params and own and in_fp32.params.issuperset(own) else precision.param_dtype


def _bind_views(unit: Unit, module: nn.Module, shards: Mapping[Any, Param]) -> None:
    """Let `module` hold unsharded parameters while `unit` is bound.

    RNNs keep their weights in a list for cuDNN too. By weak references they notice exchanged weights, and make the list
    anew: leave out those of sharded parameters, for which `unit` exchanges the list.
    """
    sharded = module._parameters
    own = [shards[param] for param in sharded.values() if param is not None]
    # Else bitsandbytes' layers repack their weights in place, in the slot, on some CPUs.
    module.__dict__.update(item for param in own for item in param.form.prepare().items())
    if own:
        computing = {name: None if param is None else shards[param].unsharded for name, param in sharded.items()}
        unit.add_binding(module, "_parameters", sharded, computing)
    if isinstance(module, nn.RNNBase):
        module.__dict__["flatten_parameters"] = lambda: None  # it would move weights out of the slot
        kept, known = module._flat_weights, module._flat_weight_refs
        weights = [shards[param].unsharded if param in shards else param for param in kept]
        unit.add_binding(module, "_flat_weights", kept, weights)
        refs = [None if param in shards else ref for param, ref in zip(kept, known, strict=True)]
        module.__dict__["_flat_weight_refs"] = refs


def _before_saving(engine: Engine, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Runs before ``state_dict()`` and raises inside a pass: other layers would overwrite the weights in the slots."""
    refuse_in_pass(engine, f"state_dict() of {prefix or type(module).__name__!r}")
    engine.refuse_empty("state_dict()")


def _before_loading(
    engine: Engine,
    path: str,
    shards: Mapping[nn.Parameter, Param],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *others: Any,
) -> None:
    """Runs before ``load_state_dict`` copies: cuts full tensors into this rank's pieces, which then have values.

    Args:
        engine: the model's.
        path: the module's name in the model.
        shards: by parameter.
        module, state_dict, prefix, metadata, *others: see ``nn.Module.register_load_state_dict_pre_hook``.
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
        if shard.form.part and piece_of(param) is not None:
            raise ShardingError(
                f"load_state_dict() of {shard.name!r}, a {type(value).__name__}, which is packed: leave packed weights "
                "out (strict=False) if the model has the same, else load a checkpoint, streamshard.load_checkpoint"
            )
        if value.shape in (param.shape, param.shape or (1,)):  # torch loads shape [1] into a scalar
            engine.fill([shard.name])
            if not isinstance(value, ShardedTensor) and isinstance(form := form_of(value), DTensorForm):
                # Collective, as all of load_state_dict. On a mesh of several axes there is no box.
                is_known = form.box and form.problem_with(value) is None
                value = form.whole(form.memory(value)) if is_known else cast(Any, value).full_tensor()
                state_dict[name] = value
            if piece_of(param) is not None and not isinstance(value, ShardedTensor):
                state_dict[name] = ShardedTensor.wrap(shard.piece.cut(value), shard.piece)
    for key, buffer in module._buffers.items():
        value = None if key in module._non_persistent_buffers_set else state_dict.get(prefix + key)
        if buffer is not None and isinstance(value, torch.Tensor) and value.shape == buffer.shape:
            engine.fill([join_names(path, key)])
            if isinstance(form := form_of(buffer), DTensorForm) and not isinstance(value, form.kind):
                state_dict[prefix + key] = form.kind.from_local(value, form.mesh, form.placements, run_check=False)
