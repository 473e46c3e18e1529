"""Tensors in nested values, such as the arguments and outputs of modules. No function here writes into its argument.

A container is a mapping, a list, a tuple or an object of a dataclass, or of a subclass of these. A module is none.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamshard.errors import ShardingError
from streamshard.torch_private import AsyncCollectiveTensor

_DICTS = (dict, UserDict)
_PLAIN = frozenset((type(None), str, int, float, bool))  # types of most arguments, besides tensors


def tensors_in(value: Any, *, depth: int = 0) -> list[torch.Tensor]:
    """All tensors in `value`: `value` itself, or those in containers.

    Args:
        value: any object.
        depth: look into the attributes of other objects too (spconv, PyTorch Geometric), up to this many levels.

    Raises:
        ShardingError: a container contains itself.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if (items := _items_of(value)) is None:
        if not depth or isinstance(value, nn.Module | type):
            return []
        items, depth = getattr(value, "__dict__", {}).items(), depth - 1
    found: list[torch.Tensor] = []
    try:
        for _, item in items:
            found += tensors_in(item, depth=depth)
    except RecursionError as error:
        raise ShardingError(_CONTAINS_ITSELF) from error
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with ``change(tensor)`` in the place of every tensor that `tensors_in` finds.

    A container with a changed item becomes a new object of its class, with the same other items and attributes.
    Everything else stays the same object, and so do mappings that are neither `dict` nor `UserDict`.

    Raises:
        ShardingError: a container contains itself.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    items = () if isinstance(value, Mapping) and not isinstance(value, _DICTS) else _items_of(value) or ()
    changed: dict[Any, Any] = {}
    try:
        for key, old in items:
            if (new := map_tensors(old, change)) is not old:
                changed[key] = new
    except RecursionError as error:
        raise ShardingError(_CONTAINS_ITSELF) from error
    return _copy_with(value, changed) if changed else value


_CONTAINS_ITSELF = (
    "an argument or output of the model or a layer is a list, dict or dataclass that contains itself, such as a tree "
    "whose nodes know their parents: give the tensors alone, or keep the reference in a weakref.ref"
)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The items of a container, by position, key or field; None if `value` is no container."""
    if type(value) in _PLAIN:
        return ()
    if isinstance(value, list | tuple):
        return () if _PLAIN.issuperset(map(type, value)) else enumerate(value)  # long lists of numbers
    if isinstance(value, Mapping):  # first: outputs of transformers are dataclasses too
        return value.items()
    if not hasattr(type(value), "__dataclass_fields__") or isinstance(value, nn.Module):
        return None
    return ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def _copy_with(value: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of a container with other items. Does not call the constructor, which may have any parameters."""
    if isinstance(value, tuple):
        items = list(value)
        for position, item in changed.items():
            items[position] = item
        if hasattr(value, "n_sequence_fields"):  # torch.return_types
            return type(value)(items)
        new: Any = tuple.__new__(type(value), items)
        if attributes := getattr(value, "__dict__", None):
            vars(new).update(attributes)
        return new
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # its keys are its attributes
        new.__dict__ = new
    for key, item in changed.items():
        if isinstance(value, (list, *_DICTS)):
            new[key] = item
        else:
            object.__setattr__(new, key, item)  # a frozen dataclass refuses setattr
    return new


_CHUNK = 1 << 20  # elements, which take 8 bytes each on the way
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as int64


def sum_of_bits(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """[] int64: the sum of its elements' bits, read as integers, each times an odd number that depends on its place.

    Modulo 2^64, so it depends neither on how ranks cut a tensor, nor on an order. Equal for equal tensors. `start` is
    the place of the first element.
    """
    bits = tensor.detach().reshape(-1).view(_BITS.get(tensor.dtype.itemsize, torch.int64))
    total = bits.new_zeros((), dtype=torch.int64)
    for chunk in bits.split(_CHUNK):
        places = torch.arange(start, start + len(chunk), device=bits.device)
        # Not in place: `chunk` is a view of the tensor.
        total += (chunk * places.mul_(_GOLDEN).bitwise_or_(1)).sum()  # odd factors lose no bit
        start += len(chunk)
    return total


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """By tensor, the `sum_of_bits`."""
    sums = [*map(sum_of_bits, tensors)]
    return [] if not sums else torch.stack(sums).tolist()  # one copy to the host, not one for each


def moved(value: Any, device: torch.device) -> Any:
    """`value` on `device` if all of its tensors are in host memory, where a parameter with ``offload`` says that it is.

    A tensor that a model wants in host memory, such as lengths of sequences, stays there beside others on the device.
    The host does not wait for the copies, which come after all work of the pass before.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors_in(value)):
        return value
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def waited(value: Any) -> Any:
    """`value` without tensors that wait for a collective, as outputs of DTensors do.

    A compiled layer loses the gradient of such an argument.
    """
    return map_tensors(value, lambda tensor: tensor.clone() if isinstance(tensor, AsyncCollectiveTensor) else tensor)


def cast(value: Any, dtype: torch.dtype, kept: Sequence[torch.Tensor] = ()) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`, except those in `kept`.

    A tensor in several places stays one tensor.
    """
    known = dict(zip(map(id, kept), kept, strict=True))

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        if (new := known.get(id(tensor))) is None:
            new = known[id(tensor)] = tensor.to(dtype)
        return new

    return map_tensors(value, change)


# -- arguments and outputs ----------------------------------------------------------------------------------------

Copies = list[tuple[Any, list[torch.Tensor]]]  # containers, each with the tensors in it


def cast_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], Copies]:
    """Cast the arguments of a layer. Also returns the copies of lists, dicts and dataclasses."""
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
            what = f"{name!r} puts tensors into its argument, a {type(each).__name__}, of which it got a cast copy"
            raise ShardingError(f"{what}: let the layer return them, or set Precision(cast_inputs=False)")


def cast_output(output: Any, dtype: torch.dtype) -> Any:
    """Cast the model's output to ``Precision.output_dtype``. For the exceptions see there."""
    # Not output.get, which warns of old names (transformers).
    named = dict(output).get if isinstance(output, Mapping) else functools.partial(getattr, output)
    loss = named("loss", None)
    kept = tensors_in([named("cache", None), named("past_key_values", None)])
    for tensor in tensors_in(output):
        if tensor.dtype is torch.float64 or (loss is not None and tensor is not loss and tensor.dim() > 0):
            kept.append(tensor)
    return cast(output, dtype, kept)
