"""Tensors in nested values, such as the arguments and outputs of modules. No function here writes into its argument.

A container is a mapping, a list, a tuple or an object of a dataclass, or of a subclass of these. Modules are none.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
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
        items = list(map(functools.partial(_map, change=change), value))
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


# -- arguments and outputs ----------------------------------------------------------------------------------------

Copies = list[tuple[Any, list[torch.Tensor]]]  # containers, each with the tensors in it


def cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], Copies]:
    """Cast the arguments of a layer. Also returns the lists, dicts and dataclasses that are copies."""
    given = args, kwargs
    args, kwargs = result = cast(given, dtype)
    if result is given:
        return args, kwargs, []
    pairs = zip((*given[0], *given[1].values()), (*args, *kwargs.values()), strict=True)
    changed = [new for old, new in pairs if new is not old and not isinstance(new, torch.Tensor | tuple)]
    return args, kwargs, [(new, tensors_in(new)) for new in changed]


def refuse_lost_writes(copies: Copies, output: Any, name: str) -> None:
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


def cast_output(output: Any, dtype: torch.dtype) -> Any:
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
