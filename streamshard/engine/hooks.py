"""Turns calls of modules and graph nodes into engine events. Owns no state.

The watched class of a module has a ``__call__`` that reports to the engine. Unlike a forward hook, ``__call__`` sees
every exception, and is neither compiled by ``module.compile()`` nor recomputed by a checkpointing layer.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamshard.engine.backward import pre_backward, watch_node
from streamshard.engine.engine import Engine, Graph, Use
from streamshard.engine.forward import Forward, begin_forward
from streamshard.engine.module_state import HANDLE, Handle, ShardedModule, change_class, handle_of, watched_class
from streamshard.errors import ShardingError
from streamshard.nested import cast, map_tensors, tensors_in
from streamshard.planning.structure import modules_inside
from streamshard.torch_private import saved_tensors_hooks, sequence_number, skip, untraced
from streamshard.unit.unsharded_parameter import refuse_absent


class _Watched(ShardedModule):
    """Comes before the class of a layer or wrapper module, and reports its calls."""

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle: Handle = self.__dict__[HANDLE]
        call = call_shell if handle.unit is None else call_unit
        return call(handle, super().__call__, args, kwargs)


def watch(module: nn.Module, handle: Handle, base: type | None = None) -> None:
    """Replace `module`'s class by a watched one that also derives from `base`, and set its handle."""
    watched = watched_class(type(module), base or _Watched)
    module.__dict__[HANDLE] = handle
    change_class(module, watched)


# -- calls --------------------------------------------------------------------------------------------------------


@skip
def call_shell(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a wrapper module, which has units inside or root parameters. The outermost call is the forward pass."""
    engine = handle.engine
    if engine.current is not None:
        return call(*args, **kwargs)
    if DistributedDataParallel._active_ddp_module is not None:
        raise ShardingError(
            "a StreamShard model runs inside DistributedDataParallel, which takes its pieces for replicas and averages "
            "them: shard the part around it too, or leave DDP away"
        )
    if handle.cast_dtype is not None:
        args, kwargs = untraced(cast, (args, kwargs), handle.cast_dtype)
    forward: Forward = untraced(functools.partial(begin_forward, engine, handle.units, is_whole_model=handle.is_root))
    error: BaseException | None = None
    try:
        output = call(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        graph = untraced(forward.finish, error)
        error = None  # its traceback refers to this frame, which would keep the forward's graph alive
    if graph is not None:
        untraced(_watch_nodes, output, 0, 0, set(), engine, graph)
        if handle.is_root:
            untraced(_warn_of_rounded_loss, output, engine)
    return output if handle.output_dtype is None else untraced(_cast_output, output, handle.output_dtype)


@skip
def call_unit(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer of a unit. The unit's weights are in place before; its outputs' nodes will report in backward."""
    engine, unit, phase = handle.engine, handle.unit, handle.engine.current
    assert unit is not None
    if phase is None:  # called by itself, outside of the model's forward
        return call_shell(
            handle._replace(output_dtype=None), lambda *a, **k: call_unit(handle, call, a, k), args, kwargs
        )
    copies: _Copies = []
    if handle.cast_dtype is not None:
        args, kwargs, copies = untraced(_cast_inputs, args, kwargs, handle.cast_dtype)
    use: Use = untraced(phase.pre_forward, unit)
    first, outer = sequence_number(), saved_tensors_hooks(False)
    # Each thread numbers its nodes itself, and backward may recompute in another thread than that of the forward.
    given = set() if phase.is_forward else {tensor.grad_fn for tensor in untraced(tensors_in, (args, kwargs))}
    try:
        if outer is not None and unit.weight_slot.is_shared:
            with holding_back_weights(engine, use, *outer):
                output = call(*args, **kwargs)
        else:
            output = call(*args, **kwargs)
    finally:
        untraced(phase.post_forward, unit)
    if copies:
        untraced(_refuse_lost_writes, copies, output, unit.name)
    latest = untraced(_watch_nodes, output, 0, first, given, engine, use)
    if max(first, latest + 1) < sequence_number():  # backward comes first to a node that is not an output's
        untraced(_watch_nodes, [output, args, kwargs], 3, first, given, engine, use)
        attributes = untraced(_attributes_in, getattr(call, "__self__", None))
        untraced(_watch_nodes, attributes, 0, first, given, engine, use)
    return output


def _attributes_in(layer: Any) -> list[Any]:
    """Attributes of the modules in `layer`: an auxiliary loss may be one."""
    modules = modules_inside(layer) if isinstance(layer, nn.Module) else ()
    return [
        value
        for module in modules
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]


_Copies = list[tuple[Any, list[torch.Tensor]]]  # containers, each with the tensors in it


def _cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], _Copies]:
    """Cast the arguments of a layer. Also returns the lists, dicts and dataclasses that are copies."""
    given = args, kwargs
    args, kwargs = result = cast(given, dtype)
    if result is given:
        return args, kwargs, []
    pairs = zip((*given[0], *given[1].values()), (*args, *kwargs.values()), strict=True)
    changed = [new for old, new in pairs if new is not old and not isinstance(new, torch.Tensor | tuple)]
    return args, kwargs, [(new, tensors_in(new)) for new in changed]


def _refuse_lost_writes(copies: _Copies, output: Any, name: str) -> None:
    """Raise if a layer has put tensors into the copy of an argument, and does not return the copy."""
    returned = [output, *(output if isinstance(output, list | tuple) else ())]
    for each, before in copies:
        after = tensors_in(each)
        if [id(t) for t in after] != [id(t) for t in before] and not any(each is value for value in returned):
            raise ShardingError(
                f"{name!r} puts tensors into its argument, a {type(each).__name__} with tensors of another dtype than "
                "the layer computes in. The layer gets a copy with cast tensors, so its caller would not see them: "
                "let the layer return them, or leave arguments uncast, Precision(cast_inputs=False)"
            )


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
    call = call_shell if handle.unit is None else call_unit
    _wrap_method(module, name, lambda method, *args, **kwargs: call(handle, method, args, kwargs))


def _wrap_method(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> None:
    """Let ``module.name(...)`` call ``wrapper(method, ...)``, where `method` is what ``module.name`` was."""
    method: Any = getattr(module, name)
    # Not the bound method, which would keep the module that keeps it.
    bind = weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method

    @functools.wraps(getattr(method, "__func__", method))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(bind(), *args, **kwargs)

    module.__dict__[name] = wrapped


# -- backward ------------------------------------------------------------------------------------------------------


@skip
def holding_back_weights(
    engine: Engine, use: Use, pack_other: Callable[[torch.Tensor], Any], unpack_other: Callable[[Any], torch.Tensor]
) -> AbstractContextManager[None]:
    """Saved-tensor hooks around a layer that computes with the weights of `use`'s unit, inside the hooks of others.

    Autograd does not check the versions of tensors that hooks have packed. So where others have hooks around a layer
    (checkpoints, ``save_on_cpu``), they get no weights, and backward puts the weights in place when it unpacks one.

    Args:
        engine: of the model.
        use: the call of the layer.
        pack_other, unpack_other: the hooks around the layer.
    """
    slot = use.unit.weight_slot

    def pack(tensor: torch.Tensor) -> tuple[Any, Any]:
        """Called in forward with each tensor that is saved."""
        refuse_absent(tensor)
        return (tensor.detach(), use) if slot.holds(tensor) else (pack_other(tensor), None)

    @skip
    def unpack(packed: tuple[Any, Any]) -> Any:
        """Called in backward when a saved tensor is read."""
        saved, is_weight = packed
        if not is_weight:
            return unpack_other(saved)
        untraced(pre_backward, engine, use)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _watch_nodes(
    values: Any, depth: int, first: int, given: Collection[Any], engine: Engine, origin: Graph | Use
) -> int:
    """Watch the nodes of the tensors in `values` that a call has made, see `watch_node`.

    Args:
        values: outputs of the call, which may be inputs of it.
        depth: see `tensors_in`.
        first: sequence number of the first node of the call.
        given: nodes of the call's inputs.
        engine, origin: see `watch_node`.

    Returns:
        The sequence number of the latest one; -1: there are none.
    """
    latest = -1
    for tensor in tensors_in(values, depth=depth):
        # An in-place edit of a view replaces the view's node; the node of what it is a view of stays.
        for each in (tensor, tensor._base):
            node = None if each is None else each.grad_fn
            if node is not None and (number := node._sequence_nr()) >= first and node not in given:
                watch_node(node, engine, origin)
                if number > latest:
                    latest = number
    return latest


def _warn_of_rounded_loss(output: Any, engine: Engine) -> None:
    """Warn once if the model returns a loss in half precision: its forward has computed the loss from such logits."""
    for tensor in tensors_in(output):
        if tensor.dim() == 0 and tensor.dtype in (torch.bfloat16, torch.float16) and tensor.requires_grad:
            engine.warn_once(
                f"the model's forward computes its loss in {tensor.dtype}, which has 3 digits at most. For a loss in "
                "fp32 let forward compute it from logits.float(), or return the logits and compute it outside"
            )


def _cast_output(output: Any, dtype: torch.dtype) -> Any:
    """Cast the model's output as ``Precision.output_dtype`` says."""
    loss, cache = _named(output, "loss"), _named(output, "past_key_values")
    known = {id(tensor): tensor for tensor in tensors_in(cache)}  # a tensor in several places stays one tensor

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
            return tensor
        if id(tensor) not in known:
            is_wanted = loss is None or tensor is loss or tensor.dim() == 0
            known[id(tensor)] = tensor.to(dtype) if is_wanted else tensor
        return known[id(tensor)]

    return map_tensors(output, change)


def _named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
