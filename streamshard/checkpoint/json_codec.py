"""Encode nested state of users' objects (containers, numbers, tensors) as JSON and named tensors, and decode it.

JSON has no tuples, no infinite numbers, and only strings as keys of dicts. Such a value becomes an object with the key
``"$"``, which names its kind. Any other object is refused: to read it back, a checkpoint would need its class's code.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamshard.errors import CheckpointError
from streamshard.unit.sharded_tensor import is_piece

__all__ = ["decode", "dtype_named", "encode"]

_KIND = "$"
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LARGEST_BYTES = 8  # of a number


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON. Its tensors are put into `tensors`, detached, not copied.

    Args:
        value: None, numbers, strings, lists, tuples, dicts, counters, tensors, NumPy arrays, dtypes, and nested ones.
        path: its name. Names of its tensors begin with it.
        tensors: by name; gains those of `value`.

    Raises:
        CheckpointError: names the path of any other value, or of one that contains itself.
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply, or contains itself: it cannot be saved") from error


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(each, f"{path}[{place}]", tensors) for place, each in enumerate(value)]
        return items if type(value) is list else {_KIND: "tuple", "items": items}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and _is_known(value.dtype):
        return _encode(value.item(), path, tensors)
    if numpy is not None and type(value) is numpy.ndarray and _is_known(value.dtype) and value.dtype.isnative:
        return {_KIND: "array", "tensor": _keep(torch.from_numpy(numpy.array(value, order="C")), path, tensors)}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds numbers, strings, lists, "
        "tuples, dicts, tensors and arrays. Give an object with state_dict() and load_state_dict() by itself, "
        "extra={name: object}, and any other object as the values that it is made of"
    )


def _is_known(dtype: Any) -> bool:
    """Whether torch and Python have numbers like those of a NumPy array: not like ``longdouble``."""
    return dtype.kind in "biuf" and dtype.itemsize <= _LARGEST_BYTES


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of layout {value.layout}: a checkpoint holds plain tensors. Give "
            "value.full_tensor(), value.to_dense() and the like, or the tensors that it is made of"
        )
    if is_piece(value):
        raise CheckpointError(
            f"{path} is one rank's piece of a sharded tensor: a checkpoint holds pieces of models and of moments only. "
            "Average weights in a second sharded model, average = StreamShard(Model().requires_grad_(False)), and "
            'save both: model={"model": model, "average": average} (docs/guide/optimizers.md, Averages of weights). '
            "Of a number give float(value)"
        )
    if value.is_meta:
        raise CheckpointError(f"{path} is on the meta device: it has no values yet")
    data = value.detach().as_subclass(torch.Tensor)
    where = {} if data.device.type == "cpu" else {"device": data.device.type}
    if not data.shape and not data.dtype.is_complex:
        number = _encode(data.item(), path, tensors)
        return {_KIND: "number", "dtype": str(data.dtype).removeprefix("torch."), "value": number, **where}
    return {_KIND: "tensor", "tensor": _keep(data, path, tensors), **where}


def _keep(data: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Put `data` into `tensors`. Returns its name: the path, made unique (a key may have a dot in it)."""
    while path in tensors:
        path += "'"
    tensors[path] = data
    return path


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """An OrderedDict or a defaultdict comes back as a dict."""
    kind = "Counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(each, f"{path}.{key}", tensors) for key, each in value.items()}
    items = [
        [_encode(key, f"a key of {path}", tensors), _encode(each, f"{path}[{key!r}]", tensors)]
        for key, each in value.items()
    ]
    return {_KIND: kind, "items": items}


def dtype_named(name: object) -> torch.dtype:
    """The dtype with this name, such as ``"bfloat16"``.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(f"{name!r:.80} is not the name of a dtype")


def decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """The value that was given to `encode`. `saved` may come from anybody: nothing in it is run or imported.

    Args:
        saved: the JSON.
        tensor_of: gives a new tensor in CPU memory, by its name.
        device: for tensors that were not in CPU memory.

    Raises:
        CheckpointError: `encode` gives no such JSON.
    """
    try:
        return _decode(saved, tensor_of, device)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"a saved value is malformed: {type(error).__name__}: {error}") from error


def _decode(saved: Any, tensor_of: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    if isinstance(saved, list):
        return [_decode(each, tensor_of, device) for each in saved]
    if not isinstance(saved, dict):
        return saved
    kind = saved.get(_KIND)
    if kind is None:
        return {key: _decode(each, tensor_of, device) for key, each in saved.items()}
    where = device if "device" in saved else torch.device("cpu")
    if kind == "float":
        return float(saved["value"])
    if kind == "number":
        return torch.tensor(_decode(saved["value"], tensor_of, device), dtype=dtype_named(saved["dtype"])).to(where)
    if kind == "tensor":
        return tensor_of(saved["tensor"]).to(where)
    if kind == "array":
        return tensor_of(saved["tensor"]).numpy()
    if kind == "dtype":
        return dtype_named(saved["value"])
    items = _decode(saved["items"], tensor_of, device)
    if kind == "tuple":
        return tuple(items)
    if kind in ("dict", "Counter"):
        return (Counter if kind == "Counter" else dict)(dict(items))
    raise CheckpointError(f"a value of kind {kind!r:.80}, which this version of streamshard does not know")
