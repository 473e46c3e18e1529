"""torch's calls become engine events here; no state but what a handle names.

A watched module's class is replaced by a subclass of the same name whose ``__call__`` reports to the engine. Unlike
forward hooks this is exact about exceptions, sits outside of what ``module.compile()`` compiles, and outside of what a
checkpointing layer recomputes.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry
from torch.nn.parallel import DistributedDataParallel

from streamshard.engine.engine import Engine
from streamshard.engine.passes import Pass, Use
from streamshard.errors import ConfigError, ShardingError
from streamshard.plan.structure import modules_inside
from streamshard.unit.sharded_grad import know_grads
from streamshard.unit.unit import Member

__all__ = [
    "HANDLE",
    "Handle",
    "Uncopyable",
    "backward_of",
    "call_shell",
    "call_unit",
    "handle_of",
    "holding_back_weights",
    "register_forward_method",
    "registered_names",
    "tensors_in",
    "watch",
    "watched_class",
]

_T = TypeVar("_T")


# skip: torch.compile breaks its graph at this function, runs it as it is and goes on compiling in what it calls.
@skip
def _untraced(function: Callable[..., _T], *args: Any) -> _T:
    """Call `function`, never compiled: the engine's side effects are not a graph."""
    if get_eval_frame_callback() in (None, False):
        return function(*args)
    result: _T = torch._dynamo.disable(function)(*args)
    return result


HANDLE = "_streamshard"  # the one entry in a watched module's __dict__


class Handle(NamedTuple):
    """What a watched module knows: the one attribute StreamShard registers on it.

    Attributes:
        engine: reports go here.
        member: what this module is of a unit; None for a *shell*, a module that holds edge parameters or units.
        units: indices of the units inside, the module's own included.
        cast_dtype: floating-point inputs are cast to it; None leaves them.
        output_dtype: floating-point outputs of the root are cast to it; None leaves them.
        structure: what the model was made of, kept here for the engine; of the root.
    """

    engine: Engine
    member: Member | None
    units: frozenset[int]
    cast_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    structure: object = None


def handle_of(module: nn.Module) -> Handle | None:
    """The handle of a watched module, None of any other."""
    handle = module.__dict__.get(HANDLE)
    return handle if isinstance(handle, Handle) else None


def watch(module: nn.Module, handle: Handle, base: type | None = None) -> None:
    """Replace `module`'s class by a watched one that also derives from `base`, and register its handle."""
    watched = watched_class(type(module), base or _Watched, registered_names(module))
    module.__dict__[HANDLE] = handle
    object.__setattr__(module, "__class__", watched)  # the module's own __setattr__ may refuse, or record, changes


_ORIGINAL = "_streamshard_original"
_classes: dict[tuple[type, type, frozenset[str]], type] = {}


def watched_class(original: type, base: type, registered: frozenset[str] = frozenset()) -> type:
    """The subclass of `original` that reports calls; same name and module, for code that looks at them.

    What the user's class or model calls by a name that `base` has as well stays the user's: ``base.name(model)`` is
    ours. Neither the ``__init_subclass__`` of `original` nor what its metaclass does to new classes hears of the
    subclass, which is not one of the user's: such code wants arguments, or keeps registers by name.

    Args:
        original: the module's class.
        base: mixed in before it.
        registered: names of the module's parameters, buffers and children.
    """
    names = _names_taken(base)
    key = (original, base, registered & names)
    if key not in _classes:
        entries = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        entries[_ORIGINAL] = original
        for name in names:
            for owner in original.__mro__:
                if name in vars(owner):
                    entries[name] = vars(owner)[name]
                    break
        entries.update((name, _Registered(name)) for name in registered & names)
        kind = type(original)
        make = abc.ABCMeta.__new__ if issubclass(kind, abc.ABCMeta) else type.__new__
        _classes[key] = make(kind, original.__name__, (base, original), entries)
    return _classes[key]


def _names_taken(base: type) -> frozenset[str]:
    """The public names of `base` that hide another's; ``named_parameters`` goes on to it."""
    return frozenset(name for name in vars(base) if not name.startswith("_") and name != "named_parameters")


def registered_names(module: nn.Module) -> frozenset[str]:
    """Names of a module's own parameters, buffers and children."""
    return frozenset((*module._parameters, *module._buffers, *module._modules))


class _Registered:
    """Where a class of ours has a name that the user's module registered: lets nn.Module find what is registered."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self._name)


class Uncopyable(nn.Module):
    """A module that holds pieces: a copy of it would hold pieces that nobody gathers or reduces."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(module)(...)`` is what libraries do to make another module like it: an ordinary one."""
        if _ORIGINAL not in cls.__dict__:
            raise ShardingError(
                f"{cls.__name__} derives from StreamShard, or from the class of a sharded model: StreamShard is no "
                "base class. Derive from the model's own class, and shard the model: StreamShard(model)"
            )
        return cls.__dict__[_ORIGINAL](*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if _ORIGINAL not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be copied: shard a second model and load "
            "full_state_dict(rank0_only=False) into it. An average of the weights is kept with `for a, b in "
            "zip(average.parameters(), model.parameters()): a.data.lerp_(b.data, weight)`"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be pickled, its parameters are pieces: use "
            "export_safetensors or full_state_dict()"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module. Gradients that the user has put there know from then on that they are pieces."""
        for name in {"fully_shard", "replicate"}.intersection(_get_registry(self) or ()):
            # They register themselves before they look at parameters.
            self.__dict__.pop(REGISTRY_KEY)
            self.__dict__.pop(STATE_KEY, None)
            self._refuse_wrapper(name)
        for name, param in super().named_parameters(*args, **kwargs):
            know_grads((param,))
            yield name, param

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse_wrapper("DataParallel")

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """FullyShardedDataParallel sets this on all modules before it changes any."""
        return False

    @_is_fsdp_managed_module.setter
    def _is_fsdp_managed_module(self, value: bool) -> None:
        self._refuse_wrapper("FullyShardedDataParallel")

    def _refuse_wrapper(self, name: str) -> NoReturn:
        raise ShardingError(
            f"{name} of {type(self).__name__}, which is sharded by StreamShard already: its parameters are pieces, "
            "gathered and reduced by StreamShard itself. Use one or the other"
        )

    def share_memory(self) -> NoReturn:
        """Not of pieces."""
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be put into shared memory: each rank owns a "
            "part of its weights"
        )

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Not of weights that somebody trains."""
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard: to_empty() would leave it without its weights. Shard it "
            "after it is materialised"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What .to(), .half(), .cuda() do to every tensor: to buffers only, if parameters are that way already."""
        handle = handle_of(self)
        if handle is None:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # nn.Module leaves it unannotated
        device = handle.engine.streams.device
        probe = fn(torch.empty(0, device=device))
        # The CPU is one device, whether one says "cpu" or "cpu:0"; .to() copies from the one to the other.
        is_there = probe.device.type == device.type and (device.type == "cpu" or probe.device == device)
        if probe.dtype is not torch.float32 or not is_there:
            raise ShardingError(
                f"{type(self).__name__} is sharded by StreamShard and cannot be moved or cast: its main weights are "
                f"fp32 on {device}, asked for was {probe.dtype} on {probe.device}. Precision(param_dtype=...) sets "
                "what layers compute with"
            )
        params = [
            param for module in modules_inside(self) for param in module._parameters.values() if param is not None
        ]
        kept = {id(tensor): tensor for param in params for tensor in (param, param.grad)}
        return super()._apply(lambda tensor: tensor if id(tensor) in kept else fn(tensor), recurse)  # type: ignore[no-untyped-call]


class _Watched(Uncopyable):
    """Mixed in before the class of units and shells."""

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle: Handle = self.__dict__[HANDLE]
        call = call_shell if handle.member is None else call_unit
        return call(handle, super().__call__, args, kwargs)


# -- calls --------------------------------------------------------------------------------------------------------


@skip
def call_shell(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module around units, or one with edge parameters: the outermost one makes the pass."""
    engine = handle.engine
    if engine.depth:
        return call(*args, **kwargs)
    if DistributedDataParallel._active_ddp_module is not None:
        raise ShardingError(
            "a StreamShard model runs inside DistributedDataParallel, which takes its pieces for replicas and averages "
            "them: shard the part around it too, or leave DDP away"
        )
    if handle.cast_dtype is not None:
        args, kwargs = _untraced(_cast, (args, kwargs), handle.cast_dtype)
    if _has_pre_hooks(call) and get_eval_frame_callback() in (None, False):
        engine.open_forward(handle.units, at_first_read=True)
    else:
        _untraced(engine.open_forward, handle.units)
    error: BaseException | None = None
    try:
        output = call(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        pass_ = _untraced(engine.close_forward, error)
        error = None  # whose traceback has this frame, and with it the graph that the forward has left
    if pass_ is not None:
        _untraced(_watch_outputs, output, (), _BeginBackward(engine, pass_))
    return output if handle.output_dtype is None else _untraced(_cast, output, handle.output_dtype)


def _has_pre_hooks(call: Callable[..., Any]) -> bool:
    """Whether hooks run before forward: they see sharded parameters, and what they change is computed with."""
    module = getattr(call, "__self__", None)
    return isinstance(module, nn.Module) and bool(module._forward_pre_hooks) and module._compiled_call_impl is None


@skip
def call_unit(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer of a unit: weights in place before, released after, need announced by what it leaves in the graph."""
    engine, member = handle.engine, handle.member
    assert member is not None
    if not engine.depth:  # called by itself, outside the root's forward
        return call_shell(
            handle._replace(output_dtype=None), lambda *a, **k: call_unit(handle, call, a, k), args, kwargs
        )
    if handle.cast_dtype is not None:
        args, kwargs = _untraced(_cast, (args, kwargs), handle.cast_dtype)
    if engine.is_in_layer:
        args, kwargs = _untraced(_leave_weights, (args, kwargs), engine, "gives another layer")
    use = _untraced(engine.pre_forward, member)
    has_graph = torch.is_grad_enabled()
    try:
        if has_graph and member.unit.weight_slot.is_shared:
            with holding_back_weights(engine, use):
                output = call(*args, **kwargs)
        else:
            output = call(*args, **kwargs)
        if member.unit.weight_slot.is_shared:
            output = _untraced(_leave_weights, output, engine, "returns")
    finally:
        _untraced(engine.post_forward, member)
    if has_graph:
        _untraced(_watch_outputs, output, args, _Need(engine, use))
    return output


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
    call = call_shell if handle.member is None else call_unit

    @functools.wraps(getattr(method, "__func__", method))
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        return call(handle, bind(), args, kwargs)

    module.__dict__[name] = forward_method


# -- need ---------------------------------------------------------------------------------------------------------


class _Need:
    """Prehook of a graph node: backward is about to enter the unit's graph."""

    __slots__ = ("engine", "use")

    def __init__(self, engine: Engine, use: Use) -> None:
        self.engine = engine
        self.use = use

    def __call__(self, grads: Any) -> None:
        self.engine.need(self.use)


class _BeginBackward:
    """Prehook of a graph node: backward begins at the root's outputs. Keeps the pass alive as long as the graph."""

    __slots__ = ("engine", "pass_")

    def __init__(self, engine: Engine, pass_: Pass) -> None:
        self.engine = engine
        self.pass_ = pass_

    def __call__(self, grads: Any) -> None:
        self.engine.begin_backward(self.pass_)


def backward_of(engine: Engine, pass_: Pass) -> None:
    """A backward through `pass_` in which no parameter gets a gradient: its collectives, with zeros."""
    loss = torch.zeros((), requires_grad=True) * 1.0
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(_BeginBackward(engine, pass_))
    loss.backward()


def holding_back_weights(engine: Engine, use: Use) -> AbstractContextManager[None]:
    """Saved-tensor hooks for what computes with the weights of `use`'s unit. See [Note: need].

    Only the innermost pair of hooks is called by autograd, so everything that is not a weight is passed on to the pair
    that was active outside (checkpointing, ``save_on_cpu``). autograd does not check versions of packed tensors, so
    that is done here. A node's own output, packed as it is, would keep the node and be kept by it, a cycle that
    Python's collector does not see: so tensors are packed detached, and autograd puts the graph back when it unpacks.
    Closures: they are called for every saved tensor, and find local names faster than attributes.
    """
    lowest, highest = engine.slots_span
    slot = use.unit.weight_slot
    first_byte, last_byte = slot.first_byte, slot.last_byte
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    need = engine.need

    def pack(tensor: torch.Tensor) -> tuple[Any, Any]:
        """Called in forward with each tensor that is saved."""
        try:
            address = tensor.data_ptr()
            if first_byte <= address < last_byte:
                return tensor if tensor.is_leaf else tensor.detach(), use
            # Another layer's weight, that this one has read.
            if lowest <= address < highest and (other := engine.unit_at(address)) is not None:
                return tensor if tensor.is_leaf else tensor.detach(), engine.borrowing(other)
        except (RuntimeError, NotImplementedError):  # tensors without storage: sparse ones, tracers
            pass
        if outer is not None:
            return outer[0](tensor), None
        return tensor if tensor.is_leaf else tensor.detach(), tensor._version

    def unpack(packed: tuple[Any, Any]) -> Any:
        """Called in backward when a saved tensor is read."""
        saved, mark = packed
        if isinstance(mark, Use):
            need(mark)
            # A copy of what was borrowed: other weights that the same node reads may take the slot.
            return mark.unit.copy_out(saved) if mark.is_borrowed else saved
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


def _watch_outputs(output: Any, inputs: tuple[Any, ...], prehook: Callable[[Any], None]) -> None:
    """Call `prehook` before backward runs the node of any tensor in `output` that is not one of `inputs`."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is None or any(tensor is given for given in inputs):
            continue
        tensor.grad_fn.register_prehook(prehook)
        # An in-place edit of a view replaces the view's node; the node of what it is a view of stays.
        if tensor._base is not None and tensor._base.grad_fn is not None:
            tensor._base.grad_fn.register_prehook(prehook)


def _leave_weights(output: Any, engine: Engine, verb: str) -> Any:
    """What a layer passes on, without views of slots that hold another layer's weights soon.

    A weight itself is replaced by what stands for it while its unit is elsewhere.

    Args:
        output: what it returns, or the arguments that it gives to another layer.
        engine: whose slots.
        verb: which of the two, for messages.

    Raises:
        ShardingError: it is a part of a weight, or otherwise made of its memory.
    """
    if isinstance(output, torch.Tensor):
        try:
            unit = engine.unit_at(output.data_ptr())
        except (RuntimeError, NotImplementedError):  # tensors without storage: sparse ones, tracers
            return output
        if unit is None:
            return output
        for place, view in enumerate(unit.views):
            if output is view:
                return unit.away(place)
        raise ShardingError(
            f"a layer of {unit.name!r} {verb} a view of one of its weights, {tuple(output.shape)} {output.dtype}, "
            "which lies in a buffer that other layers use next: make it a clone() of it, or the parameter itself"
        )
    if isinstance(output, dict):
        items = {key: _leave_weights(item, engine, verb) for key, item in output.items()}
        changed = {key: item for key, item in items.items() if item is not output[key]}
        for key, item in changed.items():
            output[key] = item
        return output
    if isinstance(output, list | tuple):
        left = [_leave_weights(item, engine, verb) for item in output]
        if all(new is old for new, old in zip(left, output, strict=True)):
            return output
        return type(output)(*left) if hasattr(output, "_fields") else type(output)(left)
    return output


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in `value`: itself, or in mappings, lists, tuples, sets and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; containers are rebuilt only if they change."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if isinstance(value, dict):
        items = {key: _cast(item, dtype) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        if type(value) is dict:
            return items
        for key, item in items.items():  # an output class that is a dict: keep the object
            value[key] = item
        return value
    if isinstance(value, list | tuple):
        cast = [_cast(item, dtype) for item in value]
        if all(new is old for new, old in zip(cast, value, strict=True)):
            return value
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    return value
