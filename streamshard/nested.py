"""Tensors in nested values, such as the arguments and outputs of modules. No function here writes into its argument.

A container is a mapping, a list, a tuple or an object of a dataclass, or of a subclass of these. Modules are none.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from streamshard.errors import ShardingError

_LISTS, _DICTS = (list, tuple), (dict, UserDict)
_PLAIN = (type(None), str, int, float)  # most arguments of layers that are no tensors
_PLAIN_TYPES = frozenset((*_PLAIN, bool))


def tensors_in(value: Any, *, depth: int = 0) -> list[torch.Tensor]:
    """All tensors in `value`: itself, or in containers.

    Args:
        value: any object.
        depth: look into the attributes of other objects too (spconv, PyTorch Geometric), as many inside each other.

    Raises:
        ShardingError: a container contains itself.
    """
    found: list[torch.Tensor] = []
    try:
        _collect(value, depth, found)
    except RecursionError as error:
        raise _refused() from error
    return found


def _collect(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, _LISTS):
        for item in () if _PLAIN_TYPES.issuperset(map(type, value)) else value:
            _collect(item, depth, found)
    elif isinstance(value, Mapping):  # an output of transformers is a dataclass too
        for item in value.values():
            _collect(item, depth, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), depth, found)
    elif depth and not isinstance(value, nn.Module | type):
        for item in getattr(value, "__dict__", {}).values():
            _collect(item, depth - 1, found)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with ``change(tensor)`` in the place of every tensor that `tensors_in` finds.

    A container in which something changes becomes a new object of its class, with the other items and attributes as
    they are. Everything else stays the same object, and so do mappings that are neither `dict` nor `UserDict`.

    Raises:
        ShardingError: a container contains itself.
    """
    try:
        return _map(value, change)
    except RecursionError as error:
        raise _refused() from error


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _LISTS):
        if _PLAIN_TYPES.issuperset(map(type, value)):  # long lists of numbers
            return value
        items = [_map(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else _with_items(value, items)
    if isinstance(value, _DICTS):
        changed = {key: new for key, old in value.items() if (new := _map(old, change)) is not old}
        return _with_keys(value, changed) if changed else value
    if _is_dataclass(value):
        old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, item in old.items() if (new := _map(item, change)) is not item}
        return _with_fields(value, changed) if changed else value
    return value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`. A tensor in several places stays one tensor."""
    known: dict[int, torch.Tensor] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        if (new := known.get(id(tensor))) is None:
            new = known[id(tensor)] = tensor.to(dtype)
        return new

    return map_tensors(value, change)


def _refused() -> ShardingError:
    return ShardingError(
        "an argument or output of the model or a layer is a list, dict or dataclass that contains itself, such as a "
        "tree whose nodes know their parents: StreamShard looks for all tensors in it. Give the tensors alone, or keep "
        "the reference in a weakref.ref"
    )


def _is_dataclass(value: Any) -> bool:
    return hasattr(type(value), "__dataclass_fields__") and not isinstance(value, nn.Module)


# Constructors of subclasses may take anything, so a new object is a copy whose items are replaced.


def _with_items(value: Any, items: list[Any]) -> Any:
    if type(value) is list:
        return items
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    if hasattr(value, "n_sequence_fields"):  # torch.return_types
        return type(value)(items)
    new = tuple.__new__(type(value), items)
    if attributes := getattr(value, "__dict__", None):
        vars(new).update(attributes)
    return new


def _with_keys(value: Any, changed: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return value | changed
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # its keys are its attributes
        new.__dict__ = new
    for key, item in changed.items():
        new[key] = item
    return new


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    new = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # a frozen dataclass refuses setattr
    return new
