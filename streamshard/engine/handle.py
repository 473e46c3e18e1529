"""What a module of a sharded model knows, and is: its handle, and the class that takes the place of its own.

A watched module's class is replaced by a subclass of the same name, which reports calls (`streamshard.engine.hooks`)
and refuses what would take pieces for parameters.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import TracingContext
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry

from streamshard.engine.engine import Engine
from streamshard.errors import ShardingError
from streamshard.plan.structure import modules_inside
from streamshard.unit.sharded_parameter import end_step
from streamshard.unit.unit import StreamedUnit

__all__ = [
    "HANDLE",
    "Handle",
    "Uncopyable",
    "engine_at_rest",
    "engine_of",
    "handle_of",
    "is_compiled",
    "not_a_layer",
    "registered_names",
    "watched_class",
]

HANDLE = "_streamshard"  # the one entry in a watched module's __dict__


class Handle(NamedTuple):
    """What a watched module knows: the one attribute StreamShard registers on it.

    Attributes:
        engine: reports go here.
        unit: of which this module is a layer; None for a *shell*, a module that holds root parameters or units.
        units: indices of the units inside, the module's own included.
        cast_dtype: floating-point inputs are cast to it; None leaves them.
        output_dtype: floating-point outputs of the root are cast to it; None leaves them.
        is_root: the whole model's.
        structure: what the model was made of, kept here for the engine; of the root.
    """

    engine: Engine
    unit: StreamedUnit | None
    units: frozenset[int]
    cast_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    is_root: bool = False
    structure: object = None


def handle_of(module: nn.Module) -> Handle | None:
    """The handle of a watched module, None of any other."""
    handle = module.__dict__.get(HANDLE)
    return handle if isinstance(handle, Handle) else None


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model.

    Raises:
        ShardingError: `model` was not sharded by StreamShard.
    """
    handle = handle_of(model) if isinstance(model, nn.Module) else None
    if handle is None and is_compiled(model):
        raise ShardingError(
            "torch.compile() has put an OptimizedModule around the sharded model: give the model itself, its _orig_mod,"
            " or compile in place, by model.compile()"
        )
    if handle is None:
        raise ShardingError(f"{type(model).__name__} is not sharded: call StreamShard(model) first")
    return handle.engine


def not_a_layer(model: nn.Module) -> nn.Module:
    """`model`, of which all is meant.

    Raises:
        ShardingError: it is a part of a sharded one.
    """
    handle = handle_of(model) if isinstance(model, nn.Module) else None
    if handle is not None and not handle.is_root:
        raise ShardingError(f"{type(model).__name__} is a layer of a sharded model: give the whole model")
    return model


def is_compiled(model: object) -> bool:
    """Whether it is what ``torch.compile`` has made of a sharded model."""
    inner = getattr(model, "_orig_mod", None)
    return isinstance(inner, nn.Module) and handle_of(inner) is not None


def engine_at_rest(model: nn.Module, what: str, *, accepts_empty: bool = False) -> Engine:
    """The engine of a sharded model between steps, as what looks at all of its weights or gradients needs it.

    Args:
        model: made by `StreamShard`.
        what: is about to be done, for messages.
        accepts_empty: it may be done while weights have no values yet.

    Raises:
        ShardingError: `model` was not sharded, a forward or backward is under way, parameters are whole, or empty.
    """
    engine = engine_of(model)
    engine.recover()
    if engine.is_computing:
        raise ShardingError(
            f"{what} inside a forward or backward of {type(model).__name__}, or in a thread beside one: layers hold "
            "gathered weights, and ranks are exchanging others. Call it between steps"
        )
    if engine.is_whole:
        raise ShardingError(
            f"{what} inside summon_full_params, where parameters are whole on every rank, not the pieces that it works "
            "with: call it outside, or use what is there (state_dict(), torch.nn.utils.clip_grad_norm_, ..)"
        )
    if not accepts_empty:
        engine.refuse_empty(what)
    return engine


# -- classes ----------------------------------------------------------------------------------------------------------

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
        kind, bases = type(original), (base, original)
        if not _is_laid_out_like_modules(original):
            # Python takes the memory layout of the first base, and assigns no __class__ of another layout.
            kind, bases = _ordering(kind), (original, base)
        make = abc.ABCMeta.__new__ if issubclass(kind, abc.ABCMeta) else type.__new__
        _classes[key] = make(kind, original.__name__, bases, entries)
    return _classes[key]


def _is_laid_out_like_modules(kind: type) -> bool:
    """Whether instances of `kind` get their ``__dict__`` from nn.Module.

    In ``class Module(abc.ABC, nn.Module)`` they do not: the class itself adds one to `abc.ABC`, which has none.
    """
    base: type | None = kind
    while base is not None and base is not nn.Module:
        base = base.__base__
    return base is nn.Module


def _ordering(kind: type) -> type:
    """A metaclass like `kind`, whose watched classes look up names in their second base before their first."""

    def mro(cls: type) -> list[type]:
        order = type.mro(cls)
        if _ORIGINAL not in cls.__dict__:  # a class that someone derives from a watched one
            return order
        original, base = cls.__bases__
        return [cls, *(each for each in base.__mro__ if not issubclass(original, each)), *original.__mro__]

    return type.__new__(type, kind.__name__, (kind,), {"mro": mro, "__module__": kind.__module__})


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


class _AskedOfModels(property):
    """A property that is False to who looks at the class alone."""

    def __bool__(self) -> bool:
        return False


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
            "full_state_dict(rank0_only=False) into it. An average of the weights (EMA) can be such a second model: "
            "`for a, b in zip(average.parameters(), model.parameters()): a.data.lerp_(b.data, weight)`"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be pickled, its parameters are pieces: use "
            "export_safetensors or full_state_dict()"
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module. After an exception in backward this puts the sharded parameters back first."""
        if (handle := handle_of(self)) is not None:
            handle.engine.recover()
        for name in {"fully_shard", "replicate"}.intersection(_get_registry(self) or ()):
            # They register themselves before they look at parameters.
            self.__dict__.pop(REGISTRY_KEY)
            self.__dict__.pop(STATE_KEY, None)
            self._refuse_wrapper(name)
        for name, param in super().named_parameters(*args, **kwargs):
            end_step((param,))
            yield name, param

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse_wrapper("DataParallel")

    def _generates_together(self) -> bool:
        handle = handle_of(self)
        if handle is None or not hasattr(self, "generate") or TracingContext.try_get() is not None:
            return False
        return dist.is_initialized() and handle.engine.ranks.total_size == dist.get_world_size() > 1

    def _refuse_fsdp(self, value: bool) -> None:
        self._refuse_wrapper("FullyShardedDataParallel")

    _is_fsdp_managed_module = _AskedOfModels(_generates_together, _refuse_fsdp)
    """Whether ``generate`` has to go on until all ranks have finished: what transformers asks of who has it.

    It counts those of the default group. torch.compile asks as well (2.15 the class, `inspect.getattr_static`), and
    would look for what FSDP has in a module. FullyShardedDataParallel sets this on all modules before it changes any.
    """

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
