"""Tensors inside of what users' functions take and return. Containers stay the objects they are if nothing changes."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "tensors_in"]


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
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with ``change(tensor)`` for every tensor in it: itself, or in dicts, lists, tuples and dataclasses.

    What holds another tensor afterwards is a new object, but for dicts of a class of their own, such as transformers'
    outputs, which nobody else knows how to make: they are changed in place.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, change)) is not old}
        if not changed:
            return value
        if type(value) is dict:
            return value | changed
        for key, item in changed.items():
            value[key] = item
        return value
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        changed = {name: new for name, old in fields.items() if (new := map_tensors(old, change)) is not old}
        if not changed:
            return value
        value = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(value, name, item)  # it may be frozen
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
