"""State as users' objects give it (nested containers, numbers, tensors) to JSON and tensors, and back. No code in it.

JSON has neither tuples nor numbers that are not finite, and keys of dicts are strings. What it cannot say is an object
with the key ``"$"``, which names the kind. What even that cannot say is refused by the path at which it was found:
reading it back would need the code of a class.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamshard.errors import CheckpointError
from streamshard.unit.sharded_tensor import is_piece

__all__ = ["check_tree", "decode", "dtype_named", "encode"]

_KIND = "$"
_DEEPEST = 64  # containers inside of each other; each takes up to four levels of JSON
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_TEXTS = {  # kinds whose value is a text
    "device": re.compile(r"[a-z_]+(:[0-9]{1,3})?"),
    "dtype": re.compile("|".join(_DTYPES)),
    "float": re.compile("inf|-inf|nan"),
}
_LARGEST_BYTES = 8  # of a number
_SEQUENCES = (list, tuple, torch.Size, set, frozenset)
_MAPPINGS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """What `value` is as JSON; its tensors are put into `tensors`, detached, not copied.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, sets, dicts, tensors, arrays of numpy, dtypes, devices, and
            what is nested of them.
        path: what it is called; of tensors, the beginning of their names.
        tensors: by name; gains those of `value`.

    Raises:
        CheckpointError: names the path of something else, or of what contains itself.
    """
    return _encode(value, path, tensors, {})


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], around: dict[int, str]) -> Any:
    """`around`: paths of the containers that `value` is in, by id."""
    if type(value) in _SEQUENCES or isinstance(value, defaultdict) or type(value) in _MAPPINGS.values():
        if id(value) in around:
            raise CheckpointError(f"{path} is {around[id(value)]} again: what contains itself cannot be saved")
        if len(around) >= _DEEPEST:
            raise CheckpointError(f"{path[:80]}... is nested in {_DEEPEST} containers: a checkpoint holds no more")
        around[id(value)] = path
        encoded = _encode_container(value, path, tensors, around)
        del around[id(value)]
        return encoded
    if value is None or isinstance(value, bool) or isinstance(value, str) and not isinstance(value, Enum):
        return value
    if isinstance(value, int) and type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if type(value) in (bytes, bytearray):
        data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {_KIND: "bytes", "tensor": _keep(data, path, tensors)}
    if isinstance(value, torch.dtype | torch.device):
        return {_KIND: type(value).__name__, "value": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and _is_known(value.dtype):
        return encode(value.item(), path, tensors)
    if numpy is not None and type(value) is numpy.ndarray and _is_known(value.dtype) and value.dtype.isnative:
        data = torch.from_numpy(numpy.array(value, order="C"))
        return {_KIND: "array", "tensor": _keep(data, path, tensors)}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, strings, lists, "
        "tuples, sets, dicts, bytes, tensors and arrays, and objects that have state_dict() and load_state_dict() "
        "where they are given by themselves, not inside of another; nothing whose code it would have to hold"
    )


def _is_known(dtype: Any) -> bool:
    """Whether torch and Python have numbers like those of a numpy array: not like ``longdouble``."""
    return dtype.kind in "biuf" and dtype.itemsize <= _LARGEST_BYTES


def dtype_named(name: object) -> torch.dtype:
    """The dtype with this name, such as ``"bfloat16"``.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(f"{name!r:.80} is not the name of a dtype")


def decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """What was given to `encode`.

    Args:
        saved: the JSON.
        tensor_of: a new tensor in CPU memory, by its name.
        device: for tensors that were not in CPU memory.

    Raises:
        CheckpointError: `encode` gives no such JSON.
    """
    try:
        return _decode(saved, tensor_of, device)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"a saved value is malformed: {type(error).__name__}: {error}") from error


def _decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    if isinstance(saved, list):
        return [_decode(each, tensor_of, device) for each in saved]
    if not isinstance(saved, dict):
        return saved
    kind = saved.get(_KIND)
    if kind is None:
        return {key: _decode(each, tensor_of, device) for key, each in saved.items()}
    if kind == "float":
        return float(saved["value"])
    if kind == "number":
        return _number(saved["value"], dtype_named(saved["dtype"])).to(_device(saved, device))
    if kind == "tensor":
        return tensor_of(saved["tensor"]).to(_device(saved, device))
    if kind == "bytes":
        return tensor_of(saved["tensor"]).numpy().tobytes()
    if kind == "array":
        return tensor_of(saved["tensor"]).numpy()
    if kind == "dtype":
        return dtype_named(saved["value"])
    if kind == "device":
        return _device_named(saved["value"])
    items = _decode(saved["items"], tensor_of, device)
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](dict(items))  # of a Counter the counts, not how many such items there are
    raise CheckpointError(f"a value of kind {kind!r}, which this version of streamshard does not know")


def check_tree(saved: Any, tensors: Container[str], suffix: str = "") -> None:
    """Raise a CheckpointError unless `decode` can read `saved`, which comes from a file that anybody may have made.

    Args:
        saved: the JSON.
        tensors: names of those that there are.
        suffix: of the names of tensors in `saved`.
    """
    level = [saved]
    for _ in range(4 * _DEEPEST + 4):
        level = [part for value in level for part in _check_node(value, tensors, suffix)]
        if not level:
            return
    raise CheckpointError("a value is nested too deeply")


def _check_node(value: Any, tensors: Container[str], suffix: str) -> list[Any]:
    """Check one value; returns those in it, as far as they have to be checked."""
    if isinstance(value, list):
        return [each for each in value if isinstance(each, list | dict)]
    if not isinstance(value, dict):
        return []
    kind, fields = value.get(_KIND), value.keys() - {_KIND, "device"}
    if kind is None:
        return [each for each in value.values() if isinstance(each, list | dict)]
    if kind in ("tensor", "bytes", "array"):
        is_sound = fields == {"tensor"} and isinstance(value["tensor"], str) and value["tensor"] + suffix in tensors
    elif kind in ("tuple", "set", "frozenset", *_MAPPINGS):
        is_sound = fields == {"items"} and isinstance(value["items"], list)
        if is_sound and kind in _MAPPINGS:
            is_sound = all(map(_is_pair, value["items"]))
    elif isinstance(kind, str) and kind in _TEXTS:
        is_sound = fields == {"value"} and isinstance(value["value"], str)
        is_sound = is_sound and _TEXTS[kind].fullmatch(value["value"]) is not None
    elif kind == "number":
        is_sound = fields == {"dtype", "value"} and isinstance(value["value"], str | int | float)
        if is_sound:
            _number(value["value"], dtype_named(value["dtype"]))
    else:
        raise CheckpointError(f"a value of kind {kind!r:.80}, which this version of streamshard does not know")
    if not is_sound or not isinstance(value.get("device", ""), str):
        raise CheckpointError(f"a value of kind {kind!r} is malformed: {sorted(value)!r:.80}")
    items: list[Any] = value.get("items", [])
    return items


def _is_pair(item: Any) -> bool:
    is_tuple = isinstance(item, dict) and item.get(_KIND) == "tuple"
    return is_tuple and isinstance(item.get("items"), list) and len(item["items"]) == 2


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of layout {value.layout}: a checkpoint holds plain tensors; give it "
            "what it is made of, or value.full_tensor(), value.to_dense() and the like"
        )
    if is_piece(value):
        raise CheckpointError(
            f"{path} is one rank's piece of a sharded tensor: a checkpoint holds pieces of models and of moments only, "
            "which it cuts anew for other ranks. Average weights in a second sharded model, average = "
            'StreamShard(Model().requires_grad_(False)), and save both: model={"model": model, "average": average} '
            "(docs/guide/optimizers.md, Averages of weights). Of a number give float(value)"
        )
    if value.is_meta:
        raise CheckpointError(f"{path} is on the meta device: it has no values yet")
    data = value.detach().as_subclass(torch.Tensor)
    where = {} if data.device.type == "cpu" else {"device": data.device.type}
    if not data.shape and not data.dtype.is_complex:
        number = data.item()
        is_finite = not isinstance(number, float) or math.isfinite(number)
        shown = number if is_finite else repr(number)
        return {_KIND: "number", "dtype": str(data.dtype).removeprefix("torch."), "value": shown, **where}
    return {_KIND: "tensor", "tensor": _keep(data, path, tensors), **where}


def _keep(data: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Under which name `data` is in `tensors` now: its path, which another may have (a key with a dot in it)."""
    while path in tensors:
        path += "'"
    tensors[path] = data
    return path


def _encode_container(value: Any, path: str, tensors: dict[str, torch.Tensor], around: dict[int, str]) -> Any:
    if isinstance(value, dict):
        return _encode_mapping(value, path, tensors, around)
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    items = [_encode(each, f"{path}[{place}]", tensors, around) for place, each in enumerate(ordered)]
    if type(value) is list:
        return items
    return {_KIND: "tuple" if isinstance(value, tuple) else type(value).__name__, "items": items}


def _encode_mapping(
    value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor], around: dict[int, str]
) -> Any:
    # A defaultdict's factory is code; what is missing in it is for the object that loads it to make.
    kind = "dict" if isinstance(value, defaultdict) else type(value).__name__
    if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(each, f"{path}.{key}", tensors, around) for key, each in value.items()}
    items = [
        [_encode(key, f"a key of {path}", tensors, around), _encode(each, f"{path}[{key!r}]", tensors, around)]
        for key, each in value.items()
    ]
    return {_KIND: kind, "items": [{_KIND: "tuple", "items": item} for item in items]}


def _number(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Of no dimensions, in CPU memory."""
    try:
        return torch.tensor(float(value) if isinstance(value, str) else value, dtype=dtype)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{value!r:.80} is not a number of dtype {dtype}") from error


def _device_named(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise CheckpointError(f"{name!r:.80} is not the name of a device") from error


def _device(saved: Mapping[str, Any], device: torch.device) -> torch.device:
    return device if "device" in saved else torch.device("cpu")
