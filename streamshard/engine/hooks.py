"""torch's calls become engine events here; no state but what a handle names.

The watched class of a module has a ``__call__`` that reports to the engine. Unlike forward hooks this is exact about
exceptions, sits outside of what ``module.compile()`` compiles, and outside of what a checkpointing layer recomputes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamshard.compiling import is_compiling, skip, untraced
from streamshard.engine.containers import map_tensors, tensors_in
from streamshard.engine.engine import Engine
from streamshard.engine.handle import HANDLE, Handle, Uncopyable, handle_of, registered_names, watched_class
from streamshard.engine.passes import Pass, Use
from streamshard.errors import ConfigError, ShardingError
from streamshard.unit.absent_weight import advice, name_of
from streamshard.unit.unit import StreamedUnit

__all__ = [
    "backward_of",
    "call_shell",
    "call_unit",
    "compute_in_fp32",
    "holding_back_weights",
    "register_forward_method",
    "watch",
]


class _Watched(Uncopyable):
    """Mixed in before the class of units and shells."""

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle: Handle = self.__dict__[HANDLE]
        call = call_shell if handle.unit is None else call_unit
        return call(handle, super().__call__, args, kwargs)


def watch(module: nn.Module, handle: Handle, base: type | None = None) -> None:
    """Replace `module`'s class by a watched one that also derives from `base`, and register its handle."""
    watched = watched_class(type(module), base or _Watched, registered_names(module))
    module.__dict__[HANDLE] = handle
    object.__setattr__(module, "__class__", watched)  # the module's own __setattr__ may refuse, or record, changes


# -- calls --------------------------------------------------------------------------------------------------------


@skip
def call_shell(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module around units, or one with root parameters: the outermost one makes the pass."""
    engine = handle.engine
    if engine.depth:
        return call(*args, **kwargs)
    if DistributedDataParallel._active_ddp_module is not None:
        raise ShardingError(
            "a StreamShard model runs inside DistributedDataParallel, which takes its pieces for replicas and averages "
            "them: shard the part around it too, or leave DDP away"
        )
    if handle.cast_dtype is not None:
        args, kwargs = untraced(_cast, (args, kwargs), handle.cast_dtype)
    if _has_pre_hooks(call) and not is_compiling():
        engine.open_forward(handle.units, is_whole=handle.is_root, at_first_read=True)
    else:
        untraced(functools.partial(engine.open_forward, handle.units, is_whole=handle.is_root))
    error: BaseException | None = None
    try:
        output = call(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        pass_ = untraced(engine.close_forward, error)
        error = None  # whose traceback has this frame, and with it the graph that the forward has left
    if pass_ is not None:
        untraced(_watch_outputs, output, (), _BeginBackward(engine, pass_).watch)
    return output if handle.output_dtype is None else untraced(_cast, output, handle.output_dtype)


def _has_pre_hooks(call: Callable[..., Any]) -> bool:
    """Whether hooks run before forward: they see sharded parameters, and what they change is computed with."""
    module = getattr(call, "__self__", None)
    return isinstance(module, nn.Module) and bool(module._forward_pre_hooks) and module._compiled_call_impl is None


@skip
def call_unit(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer of a unit: weights in place before, released after, need announced by what it leaves in the graph."""
    engine, unit = handle.engine, handle.unit
    assert unit is not None
    if not engine.depth:  # called by itself, outside the root's forward
        return call_shell(
            handle._replace(output_dtype=None), lambda *a, **k: call_unit(handle, call, a, k), args, kwargs
        )
    if handle.cast_dtype is not None:
        args, kwargs = untraced(_cast, (args, kwargs), handle.cast_dtype)
    use = untraced(engine.pre_forward, unit)
    has_graph = torch.is_grad_enabled()
    try:
        if unit.weight_slot.is_shared:
            with holding_back_weights(engine, use) if has_graph else contextlib.nullcontext():
                output = call(*args, **kwargs)
        else:
            output = call(*args, **kwargs)
    finally:
        untraced(engine.post_forward, unit)
    if has_graph:
        untraced(_watch_outputs, output, args, _Need(engine, use).watch)
    return output


def compute_in_fp32(module: nn.Module) -> None:
    """Let `module`, a part of a layer or of what is outside of layers, be given fp32, and give on what it was given.

    Nothing around it notices. Around units it is not needed: whoever takes what they give casts it.
    """
    method = module.forward
    # Not the bound method, which would keep the module that keeps it.
    bind = (lambda: method) if not inspect.ismethod(method) else weakref.WeakMethod(method)

    @functools.wraps(getattr(method, "__func__", method))
    def forward(*args: Any, **kwargs: Any) -> Any:
        call: Any = bind()
        given = next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        args, kwargs = _cast((args, kwargs), torch.float32)
        output = call(*args, **kwargs)
        return output if given is None else _cast(output, given)

    module.__dict__["forward"] = forward


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let calls of ``module.name(...)`` be passes, as calls of the module are: with whole weights, and gradients.

    For methods beside ``forward`` that compute with the module's own weights: ``encode``, ``get_image_features``.
    Methods that only call layers need nothing, nor does anything that runs inside a forward.

    Args:
        module: a model made by `StreamShard`, a layer of it that is a unit, or a module around them.
        name: of the method.

    Raises:
        ShardingError: `module` is not sharded, or is a part of a layer.
        ConfigError: it has no such method.
    """
    handle = handle_of(module)
    if handle is None:
        raise ShardingError(
            f"{type(module).__name__} is not sharded: wanted a model made by StreamShard, a layer that it streams, "
            "or a module around them"
        )
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(f"{type(module).__name__} has no method {name!r}")
    # Not the bound method, which would keep the module that keeps it.
    bind = (lambda: method) if not inspect.ismethod(method) else weakref.WeakMethod(method)
    call = call_shell if handle.unit is None else call_unit

    @functools.wraps(getattr(method, "__func__", method))
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        return call(handle, bind(), args, kwargs)

    module.__dict__[name] = forward_method


# -- need ---------------------------------------------------------------------------------------------------------


class _BeginBackward:
    """Prehook of a graph node: backward begins at the root's outputs. Keeps the pass alive as long as the graph."""

    __slots__ = ("engine", "pass_")

    def __init__(self, engine: Engine, pass_: Pass) -> None:
        self.engine = engine
        self.pass_ = pass_

    @skip
    def __call__(self, grads: Any) -> None:
        untraced(self.engine.begin_backward, self.pass_)

    def watch(self, node: Any) -> None:
        """Be called before `node` runs."""
        node.register_prehook(self)


def backward_of(engine: Engine, pass_: Pass) -> None:
    """A backward through `pass_` in which no parameter gets a gradient: its collectives, with zeros."""
    loss = torch.zeros((), requires_grad=True) * 1.0
    _BeginBackward(engine, pass_).watch(loss.grad_fn)
    loss.backward()


class _Need:
    """Prehook of a graph node: backward is about to enter the unit's graph."""

    __slots__ = ("engine", "use")

    def __init__(self, engine: Engine, use: Use) -> None:
        self.engine = engine
        self.use = use

    @skip
    def __call__(self, grads: Any) -> None:
        untraced(self.engine.need, self.use)

    def watch(self, node: Any) -> None:
        """Be called before `node` runs."""
        node.register_prehook(self)


def holding_back_weights(engine: Engine, use: Use) -> AbstractContextManager[None]:
    """Saved-tensor hooks for what computes with the weights of `use`'s unit. See [Note: need].

    For units in slots that are shared. Only the innermost pair of hooks is called by autograd, so everything that is
    not a weight is passed on to the pair that was active outside (checkpointing, ``save_on_cpu``). autograd does not
    check versions of packed tensors, so that is done here. A node's own output, packed as it is, would keep the node
    and be kept by it, a cycle that Python's collector does not see: so tensors are packed detached, and autograd puts
    the graph back when it unpacks. Closures: they are called for every saved tensor, and find local names faster than
    attributes.
    """
    (lowest, highest), spans = engine.turn_bytes, engine.turn_spans
    slot = use.unit.weight_slot
    first_byte, last_byte = slot.first_byte, slot.last_byte
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    need, own = engine.need, use.unit.view_ids

    def pack(tensor: torch.Tensor) -> tuple[Any, Any]:
        """Called in forward with each tensor that is saved."""
        try:
            address = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):  # tensors without storage: sparse ones, tracers
            address = 0
        if first_byte <= address < last_byte:
            if id(tensor) in own:
                return tensor, use
            if (base := tensor._base) is not None and id(base) not in own and name_of(base) is not None:
                _refuse_stale(tensor, use.unit)
            return _without_memory(tensor, use.unit, address), use
        if lowest <= address < highest and any(first <= address < last for first, last in spans):  # its caller's, say
            _refuse_stale(tensor, use.unit)
        if outer is not None:
            return outer[0](tensor), None
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    @skip
    def unpack(packed: tuple[Any, Any]) -> Any:
        """Called in backward when a saved tensor is read."""
        saved, mark = packed
        if isinstance(mark, Use):
            untraced(need, mark)
            if type(saved) is tuple:
                weights, size, stride, offset = saved
                saved = weights.as_strided(size, stride, offset)
            return saved
        if mark is None and outer is not None:
            return outer[1](saved)
        if saved._version != mark:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(saved.shape)} {saved.dtype}, saved in the forward of {use.unit.name!r}, is at version "
                f"{saved._version}; expected version {mark} instead"
            )
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _without_memory(tensor: torch.Tensor, unit: StreamedUnit, address: int) -> Any:
    """What `tensor`, at `address` in the slot of `unit`, is made of again. A graph then keeps no view of the slot."""
    weights = unit.weights_of.get(tensor.dtype)
    if weights is None:  # bytes of a weight, say
        return tensor.detach()
    offset = (address - unit.weight_slot.first_byte) // weights.itemsize
    return weights, tensor.size(), tensor.stride(), offset


def _refuse_stale(tensor: torch.Tensor, unit: StreamedUnit) -> NoReturn:
    """A layer of `unit` computes with `tensor`, which is, or was, a weight of another unit."""
    name = name_of(tensor if tensor._base is None else tensor._base)
    what, where = ("a weight", "") if name is None else (repr(name), f", {advice(name)}")
    raise ShardingError(
        f"a layer of {unit.name!r} computes with {what} of another layer, in a buffer that layers take turns in: give "
        f"it a clone(), or keep that weight in place{where}"
    )


def _watch_outputs(output: Any, inputs: tuple[Any, ...], watch: Callable[[Any], None]) -> None:
    """Call `watch` with the node of any tensor in `output` that is not one of `inputs`."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is None or any(tensor is given for given in inputs):
            continue
        watch(tensor.grad_fn)
        # An in-place edit of a view replaces the view's node; the node of what it is a view of stays.
        if tensor._base is not None and tensor._base.grad_fn is not None:
            watch(tensor._base.grad_fn)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.dtype is not dtype and t.is_floating_point() else t)
