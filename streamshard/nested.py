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

_LISTS, _DICTS = (list, tuple), (dict, UserDict)
_PLAIN = (type(None), str, int, float)  # most arguments of layers that are no tensors


def tensors_in(value: Any, *, depth: int = 0) -> list[torch.Tensor]:
    """All tensors in `value`: itself, or in containers.

    Args:
        value: any object.
        depth: look into the attributes of other objects too (spconv, PyTorch Geometric), as many inside each other.
    """
    found: list[torch.Tensor] = []
    _collect(value, depth, found)
    return found


def _collect(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, _LISTS):
        for item in value:
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
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, _LISTS):
        items = [map_tensors(item, change) for item in value]
        return value if all(map(operator.is_, items, value)) else _with_items(value, items)
    if isinstance(value, _DICTS):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, change)) is not old}
        return _with_keys(value, changed) if changed else value
    if _is_dataclass(value):
        old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, item in old.items() if (new := map_tensors(item, change)) is not item}
        return _with_fields(value, changed) if changed else value
    return value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`."""
    return map_tensors(value, lambda t: t.to(dtype) if t.dtype is not dtype and t.is_floating_point() else t)


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
