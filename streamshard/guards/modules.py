"""The classes of a sharded model's modules, and the methods that a module of pieces refuses.

Each layer of a unit, and each module that has units inside or parameters of the root unit, gets a subclass of its class
with the same name, which reports calls (`streamshard.core.edge`) and refuses methods that would take pieces for full
parameters. Beside the class only entries of a module's ``__dict__`` and hooks change.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn

from streamshard.errors import ShardingError

HANDLE = "_streamshard"  # the entry in a watched module's __dict__, see `streamshard.core.module_state`


# -- classes ----------------------------------------------------------------------------------------------------------

_ORIGINAL = "_streamshard_original"


def change_class(module: nn.Module, kind: type) -> None:
    """Change the class of `module`. The module's own ``__setattr__`` may refuse, or record, changes."""
    object.__setattr__(module, "__class__", kind)


def original_class(kind: type) -> type:
    """The user's or the library's class of which `watched_class` has made `kind`; any other class itself."""
    return cast(type, kind.__dict__.get(_ORIGINAL, kind))


def _make_watched_class(original: type, base: type) -> type:
    """The subclass of `original` that reports calls. It has the name and the module of `original`.

    If both classes have a method of one name, ``model.name`` is the user's and ``base.name(model)`` is StreamShard's.
    Neither the ``__init_subclass__`` of `original` nor its metaclass runs for the subclass: such code wants arguments,
    or keeps registers by name.

    Args:
        original: the module's class.
        base: comes before `original` in the bases, or at least before nn.Module in the order of its methods.
    """
    entries = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    entries[_ORIGINAL] = original
    users = [name for name in vars(base) if not name.startswith("_") and hasattr(original, name)]
    entries.update((name, inspect.getattr_static(original, name)) for name in users)
    if isinstance(own := inspect.getattr_static(original, "device", None), property):
        entries["device"] = _computing_device(own)
    kind = type(original)
    make = abc.ABCMeta.__new__ if issubclass(kind, abc.ABCMeta) else type.__new__
    made = make(kind, original.__name__, (base, original), entries)
    try:
        change_class(object.__new__(original), made)
    except TypeError:  # instances of `class Module(ABC, nn.Module)`, sentence-transformers', have ABC's layout
        entries["__init__"] = base.__init__  # type: ignore[misc]  # StreamShard's: Python calls it
        made = make(kind, original.__name__, (original, base), entries)
    return made


def _computing_device(own: property) -> property:
    """The property `device` of a user's or a library's model, which asks a parameter: `own`, but for ``offload``.

    Callers place the model's inputs by it, as transformers' ``generate`` does. So it is where the model computes.
    """

    ask: Any = own.fget

    def device(self: nn.Module) -> Any:
        # A layer that is traced has its parameters.
        handle = None if torch.compiler.is_compiling() else self.__dict__.get(HANDLE)
        return ask(self) if handle is None or handle.engine.host is None else handle.engine.host.device

    return property(device)


watched_class: Callable[[type, type], type] = functools.cache(_make_watched_class)


class _InstanceProperty(property):
    """A property that is falsy when read on the class."""

    def __bool__(self) -> bool:
        return False


class ShardedModule(nn.Module):
    """Refuses methods that do not work while parameters are pieces."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(module)(...)`` makes an ordinary module of the user's class: libraries copy modules in this way."""
        return cls.__dict__[_ORIGINAL](*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if _ORIGINAL not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be copied: shard a second model and load "
            "full_state_dict(rank0_only=False) into it. An average of the weights (EMA) is made before sharding: "
            "average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), then "
            "StreamShard(average.module.requires_grad_(False)) and StreamShard(model)"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"{type(self).__name__} is sharded by StreamShard and cannot be pickled, its parameters are pieces: use "
            "export_safetensors or full_state_dict()"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse_wrapper("DataParallel")

    _is_fsdp_managed_module = _InstanceProperty(lambda _: False, lambda self, _: self._refuse_wrapper("FSDP"))
    """FullyShardedDataParallel (FSDP1) sets it on all modules before it changes any.

    torch.compile reads it too (2.15 on the class, by `inspect.getattr_static`), and would look for FSDP's attributes.
    """

    def _refuse_wrapper(self, name: str) -> NoReturn:
        raise ShardingError(f"{name} around {type(self).__name__}, which StreamShard has sharded: use one or the other")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Called by .to(), .to_empty(). Changes buffers only, if parameters have that dtype and device already."""
        handle = self.__dict__.get(HANDLE)
        if handle is None:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # nn.Module leaves it unannotated
        device = handle.engine.streams.device
        probe = fn(torch.empty(0, dtype=torch.float32, device=device))  # whatever the default dtype
        # The CPU is one device, whether one says "cpu" or "cpu:0"; .to() copies from the one to the other.
        is_there = probe.device.type == device.type and (device.type == "cpu" or probe.device == device)
        if probe.dtype is not torch.float32 or not is_there:
            raise ShardingError(
                f"{type(self).__name__} is sharded by StreamShard and cannot be moved or cast to {probe.dtype} on "
                f"{probe.device}: its main weights are fp32 on {device}. Precision(param_dtype=...) sets what layers "
                "compute with"
            )
        kept = {id(tensor): tensor for param in self.parameters() for tensor in (param, param.grad)}
        return super()._apply(lambda tensor: tensor if id(tensor) in kept else fn(tensor), recurse)  # type: ignore[no-untyped-call]
