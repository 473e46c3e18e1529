"""Where torch calls a pass: calls of modules, tensors that autograd saves, and weights read outside of their layer.

Most functions here report one such event to the pass under way. `streamshard.core.forward` and
`streamshard.core.backward` decide what follows. Events of a backward are in `streamshard.core.graph_hooks`, hooks of
loading and saving in `streamshard.core.attach`, hooks of optimizers in `streamshard.core.optimizer_hooks`.

The watched class of a module has a ``__call__`` that reports to the engine. Unlike a forward hook, ``__call__`` sees
every exception, and is neither compiled by ``module.compile()`` nor recomputed by a checkpointing layer.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from streamshard.core.engine import ROOT_UNIT, Engine, Use
from streamshard.core.forward import Forward, begin_forward
from streamshard.core.graph_hooks import need_weights, watch_lookups, watch_nodes
from streamshard.core.module_state import Handle, handle_of
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.modules import HANDLE, ShardedModule
from streamshard.guards.weights import advice, refuse_absent, refuse_read
from streamshard.nested import Copies, cast, cast_inputs, cast_output, moved, refuse_lost_writes, tensors_in, waited
from streamshard.planning.structure import modules_inside
from streamshard.torch_private import active_ddp, keep, kept, saved_tensors_hooks, sequence_number, skip, untraced


class Watched(ShardedModule):
    """Comes before the class of a layer or wrapper module, and reports its calls."""

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, reported to the engine."""
        handle: Handle = self.__dict__[HANDLE]
        call = call_unit if handle.unit is not None else call_pass
        return call(handle, self, super().__call__, args, kwargs)


# -- calls --------------------------------------------------------------------------------------------------------


@skip
def call_pass(
    handle: Handle, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module around units, or with parameters of the root unit. The outermost call is the forward pass."""
    engine, phase, micro_batch = handle.engine, handle.engine.phase, handle.engine.micro_batch
    # With `accumulate` the pass has begun before the call of the model.
    if phase is not None and phase.is_current and (micro_batch is None or micro_batch.is_inside):
        if handle.tied is None:
            output = call(*args, **kwargs)
        else:
            keys = untraced(handle.tied.put, module)
            try:
                output = call(*args, **kwargs)
            finally:
                untraced(handle.tied.take_away, module, keys)
        if handle.looks_up:
            untraced(watch_lookups, output, engine, engine.root_unit)
        return output
    if active_ddp() is not None:
        raise ShardingError(
            "a StreamShard model runs inside DistributedDataParallel, which takes its pieces for replicas and averages "
            "them: shard the part around it too, or leave DDP away"
        )
    if engine.host is not None:
        # Loops place inputs where parameters are, which is in host memory here.
        args, kwargs = untraced(moved, (args, kwargs), engine.host.device)
    if handle.cast_dtype is not None:
        args, kwargs = untraced(cast, (args, kwargs), handle.cast_dtype)
    if micro_batch is not None:  # the pass is that of all micro-batches
        with micro_batch.calling():
            output = call(*args, **kwargs)
        return output if handle.output_dtype is None else untraced(cast_output, output, handle.output_dtype)
    forward: Forward = untraced(
        functools.partial(begin_forward, engine, handle.units, (args, kwargs), is_whole_model=handle.is_root)
    )
    error: BaseException | None = None
    try:
        output = call(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        # After an error too: other ranks wait for this one in the rest of the pass's collectives.
        graph = untraced(forward.finish, error)
        error = None  # its traceback refers to this frame, which would keep the forward's graph alive
    if graph is not None:
        untraced(watch_nodes, output, 0, 0, set(), engine, graph)
        if handle.is_root and engine.is_loss_unseen:
            untraced(_warn_of_rounded_loss, output, engine)
    return output if handle.output_dtype is None else untraced(cast_output, output, handle.output_dtype)


@skip
def call_unit(
    handle: Handle, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer of a unit. The unit's weights are in place before; its outputs' nodes will report in backward."""
    engine, unit, micro_batch = handle.engine, handle.unit, handle.engine.micro_batch
    assert unit is not None
    if micro_batch is not None:
        untraced(micro_batch.pause, unit, (args, kwargs))  # first: torch's state and the pass change meanwhile
    phase = engine.phase  # another one after the pause
    if phase is None or not phase.is_current:  # called by itself, outside of the model's forward
        return call_pass(handle, module, lambda *a, **k: call_unit(handle, module, call, a, k), args, kwargs)
    # A compiled layer would lose the gradient of a DTensor's output that still waits for its collective.
    if engine.ranks.n_parts > 1:
        args, kwargs = untraced(waited, (args, kwargs))
    copies: Copies = []
    if handle.cast_dtype is not None:
        args, kwargs, copies = untraced(cast_inputs, args, kwargs, handle.cast_dtype)
    use: Use = untraced(phase.pre_forward, unit)
    if micro_batch is not None:
        unit.bind_leaves(micro_batch.leaves_of(unit))
        if unit is micro_batch.unit:
            args, kwargs = untraced(micro_batch.cut_inputs, args, kwargs)
    first, outer = sequence_number(), saved_tensors_hooks(False)
    # Sequence numbers are per thread. A recomputation may run in another thread than the forward.
    given = set() if phase.is_forward else {tensor.grad_fn for tensor in untraced(tensors_in, (args, kwargs))}
    try:
        may_save = handle.may_save_weights and unit.index in engine.plan.weightless
        # In a slot of the unit's own, version counters guard the weights that autograd saves.
        if unit.weight_slot.is_shared and (outer is not None or may_save):
            need = functools.partial(need_weights, engine)
            # Without hooks of others `keep` does what autograd does: it checks versions.
            with holding_back_weights(use, need, *(outer or (keep, kept))):
                output = call(*args, **kwargs)
        elif engine.ends is not None and not unit.is_streamed:
            with noting_weights(unit, engine.ends.saved, *(outer or (keep, kept))):
                output = call(*args, **kwargs)
        else:
            output = call(*args, **kwargs)
        if handle.looks_up:
            untraced(watch_lookups, output, engine, unit)
        if unit.is_streamed:
            output = untraced(unit.weight_slot.without_weights, output)
    finally:
        untraced(phase.post_forward, unit)
    if copies:
        untraced(refuse_lost_writes, copies, output, unit.name)
    latest = untraced(watch_nodes, output, 0, first, given, engine, use)
    if max(first, latest + 1) < sequence_number():  # backward comes first to a node that is not an output's
        # The layer may have changed an input in place, or put a tensor into an object or an attribute of its own.
        untraced(watch_nodes, [output, args, kwargs], 3, first, given, engine, use)
        attributes = untraced(_attributes_in, module)
        untraced(watch_nodes, attributes, 0, first, given, engine, use)
    return output if micro_batch is None or unit is not micro_batch.unit else untraced(micro_batch.cut_output, output)


def _attributes_in(layer: nn.Module) -> list[Any]:
    """Attributes of the modules in `layer`: an auxiliary loss may be one."""
    others = ("_parameters", "_buffers", "_modules")
    return [value for module in modules_inside(layer) for key, value in vars(module).items() if key not in others]


def compute_in_fp32(module: nn.Module) -> None:
    """Let `module`, which is no unit, compute in fp32: cast its inputs to fp32, and its outputs to the inputs' dtype.

    Code around the module sees no difference. Units need no such cast: the module that takes their outputs casts.
    """

    def forward(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        args, kwargs = cast((args, kwargs), torch.float32)
        output = method(*args, **kwargs)
        return output if given is None else cast(output, given)

    _wrap_method(module, "forward", forward)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let calls of ``module.name(...)`` be passes, as calls of the module are: with full weights, and gradients.

    For methods beside ``forward`` that compute with the module's own weights: ``encode``, ``get_image_features``.
    Methods that only call layers, or run only inside a forward, need no registration.

    Args:
        module: a model made by `StreamShard`, a layer of it that is a unit, or a module around them.
        name: the method's name.

    Raises:
        ShardingError: `module` is not sharded, or is a part of a layer.
        AttributeError: `module` has no such method.
    """
    handle = handle_of(module)
    if handle is None:
        raise ShardingError(
            f"{type(module).__name__} is not sharded: wanted a model made by StreamShard, a layer that it streams, "
            "or a module around them"
        )
    call = call_pass if handle.unit is None else call_unit
    ref: Any = weakref.ref(module)  # see `_wrap_method`
    _wrap_method(module, name, lambda method, *args, **kwargs: call(handle, ref(), method, args, kwargs))


def _wrap_method(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> None:
    """Let ``module.name(...)`` call ``wrapper(method, ...)``; `method` is the old ``module.name``."""
    method: Any = getattr(module, name)
    # Not the bound method, which would keep the module that keeps it.
    bind = weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method

    # Of the function: `__wrapped__` would keep the module, too.
    @functools.wraps(getattr(method, "__func__", method))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(bind(), *args, **kwargs)

    module.__dict__[name] = wrapped


def _warn_of_rounded_loss(output: Any, engine: Engine) -> None:
    """Warn if the first pass with gradients returns a loss in half precision, computed from such logits."""
    engine.is_loss_unseen = False
    for tensor in tensors_in(output):
        if tensor.dim() == 0 and tensor.dtype in (torch.bfloat16, torch.float16) and tensor.requires_grad:
            engine.warn_once(
                f"the model's forward computes its loss in {tensor.dtype}, which has 3 digits at most. For a loss in "
                "fp32 let forward compute it from logits.float(), or return the logits and compute it outside"
            )


# -- what autograd saves of a layer's weights -------------------------------------------------------------------------


@skip
def holding_back_weights(
    use: Use,
    need: Callable[[Use], None],
    pack_other: Callable[[torch.Tensor], Any],
    unpack_other: Callable[[Any], torch.Tensor],
) -> AbstractContextManager[None]:
    """Saved-tensor hooks around a layer, inside the hooks of other code (checkpoints, ``save_on_cpu``).

    Autograd does not check the versions of tensors that hooks have packed. So the other hooks get no weights of the
    layer. Backward puts the weights in place when it unpacks one. If backward has none, saving one raises.

    Args:
        use: the call of the layer.
        need: puts its weights in place.
        pack_other, unpack_other: the hooks around the layer.
    """
    slot = use.unit.weight_slot

    def pack(tensor: torch.Tensor) -> tuple[Any, Any]:
        """Called in forward with each tensor that is saved."""
        refuse_absent(tensor, use.unit.name)
        if not slot.holds(tensor):
            return pack_other(tensor), None
        if use.unit.index in use.graph.plan.weightless:
            name = use.unit.params[0].name
            raise ShardingError(
                f"backward needs the weight {name!r}, unlike in the first steps, when other layers have its buffer: "
                f"keep it in place, {advice(name)}"
            )
        return tensor.detach(), use

    @skip
    def unpack(packed: tuple[Any, Any]) -> Any:
        """Called in backward when a saved tensor is read."""
        saved, is_weight = packed
        if not is_weight:
            return unpack_other(saved)
        untraced(need, use)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@skip
def noting_weights(
    unit: Unit, saved: set[int], pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> AbstractContextManager[None]:
    """Saved-tensor hooks around a layer of `unit`: add the unit to `saved` if backward will need its weights.

    Args:
        unit: resident.
        saved: indices of units.
        pack, unpack: the hooks around the layer, which are called too.
    """

    def note(tensor: torch.Tensor) -> Any:
        if unit.weight_slot.holds(tensor):
            saved.add(unit.index)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(note, unpack)


# -- weights that are read outside of their layer ---------------------------------------------------------------------


def ask_for(engine_of: Callable[[], Engine | None], index: int, layer: str) -> Callable[[str], None]:
    """A function that puts unit `index` in place, because code computes with one of its absent weights.

    See [Note: absent weights]. `layer` is the name of the class of the unit's layer.
    """

    def ask(name: str) -> None:
        engine = engine_of()
        # The root unit is absent only when gradients have its slot, perhaps in a hook at the end of a backward.
        if engine is None or (phase := engine.current) is None or index == ROOT_UNIT:
            raise ShardingError(
                f"{name!r} was read inside a forward and is used after it, where every rank has its piece only: "
                "compute with it inside, keep a clone(), or read it inside summon_full_params()"
            )
        unit = engine.units[index]
        if unit.is_streamed and index not in engine.plan.ends:
            call = "or call the layer itself (not its forward, nor a module in it)"
            around = "or the module around it that is called there"
            refuse_read(name, f", {around}, or all layers of its class, resident=[{layer!r}]; {call}")
        phase.read(unit, name)

    return ask


@skip  # torch.compile breaks its graph where weights are read
def read_weight(engine: Engine, unit: int, index: int) -> nn.Parameter:
    """An unsharded parameter, for a look-up inside a pass. A resident unit is all-gathered first."""
    phase, owner = engine.current, engine.units[unit]
    if phase is not None and (not owner.is_streamed or unit in engine.plan.ends):
        untraced(phase.read, owner)
    if engine.micro_batch is not None:
        # Autograd would add gradients of several micro-batches in half precision, if they had one leaf.
        leaf: nn.Parameter = engine.micro_batch.leaves_of(owner)[index]
        return leaf
    unsharded: nn.Parameter = owner.params[index].unsharded
    return unsharded


class OutsideParameters(dict[str, Any]):
    """The ``_parameters`` dict of a module that is not bound: its sharded parameters.

    Inside a pass a look-up gives the unsharded parameter. A resident unit is all-gathered first, a streamed unit's
    parameter is absent ([Note: absent weights]). ``items()`` and ``values()`` all-gather nothing:
    ``next(module.parameters()).dtype`` needs no weights.

    Outside of a pass a look-up gives the sharded parameter, for optimizers, initialisations and logs. The sharded
    parameter itself refuses computations that need the full tensor (see `streamshard.guards.sharded_tensor`).

    Args:
        params: name to sharded parameter.
        places: by sharded parameter, the indices of its unit and of the parameter in the unit.
        engine_of: returns the model's engine; weak, because the engine holds bindings of this dict.
    """

    __slots__ = ("_engine_of", "_places")

    def __init__(
        self,
        params: Mapping[str, nn.Parameter | None],
        places: Mapping[nn.Parameter, tuple[int, int]],
        engine_of: Callable[[], Engine | None],
    ) -> None:
        super().__init__(params)
        self._engine_of = engine_of
        self._places: dict[Any, tuple[int, int]] = {
            param: places[param] for param in params.values() if param is not None
        }

    def __getitem__(self, key: str) -> Any:
        """The unsharded parameter `key` inside a pass, the sharded one outside."""
        # `nn.Module.__getattr__` comes here for each weight that code reads.
        engine = self._engine_of()
        place = self._places.get(self.get(key))  # `dict.get` does not come back here
        if place is not None and engine is not None and engine.current is not None:
            return read_weight(engine, *place)
        return super().__getitem__(key)

    def items(self) -> Any:
        """Unsharded parameters inside a forward, for ``module.parameters()``; else, as in backward's hooks, sharded."""
        engine, items = self._engine_of(), super().items()
        if engine is None or engine.phase is None or not engine.phase.is_forward:
            return items
        views = {param: engine.units[unit].params[index].unsharded for param, (unit, index) in self._places.items()}
        return [(key, views.get(value, value)) for key, value in items]

    def values(self) -> Any:
        """As `items`."""
        return [value for _, value in self.items()]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"a module with the parameters {', '.join(self)} is part of a model sharded by StreamShard, and cannot be "
            "copied or pickled: they are pieces. Use full_state_dict()"
        )
