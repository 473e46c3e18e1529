"""Values of the user's objects as JSON and tensors, and back.

JSON has no tuples, no infinite numbers, and only strings as keys of dicts. Such a value becomes an object with the key
"$", which names its kind. Any other object is refused: to read it back, a checkpoint would need its class's code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from streamshard.errors import CheckpointError
from streamshard.guards.sharded_tensor import is_piece
from streamshard.torch_private import is_traceable_wrapper_subclass

_KIND = "$"
CPU = torch.device("cpu")
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def encode(value: Any, path: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` as JSON, and its tensors by name, detached, not copied.

    Args:
        value: None, numbers, strings, lists, tuples, dicts, counters, tensors, dtypes, NumPy arrays of torch's dtypes,
            and nested ones. NumPy's numbers come back as Python's.
        path: its name. Names of its tensors begin with it.

    Raises:
        CheckpointError: names the path of any other value.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, path, tensors), tensors


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
        return items if type(value) is list else {_KIND: "tuple", "value": items}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": name_of(value)}
    found = _of_numpy(value)
    if isinstance(found, torch.Tensor):
        return {_KIND: "array", "value": _encode_tensor(found, path, tensors)}
    if found is not None:
        return _encode(found, path, tensors)
    kind = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}{kind}: a checkpoint holds numbers, strings, "
        "lists, tuples, dicts, tensors and arrays of torch's dtypes. Give an object with state_dict() and "
        "load_state_dict() by itself, extra={name: object}, and any other object as the values that it is made of"
    )


def _of_numpy(value: Any) -> bool | int | float | torch.Tensor | None:
    """The number or tensor with the values of a NumPy number or array; None if there is none."""
    if isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        number = value.item()  # of long doubles and durations: another number of NumPy's, or no number
        return number if isinstance(number, bool | int | float) and value.dtype.kind != "m" else None
    if type(value) is not numpy.ndarray:
        return None
    try:
        return torch.from_numpy(numpy.require(value, requirements=("C", "W")))
    except (TypeError, ValueError):  # strings, objects, long doubles; another byte order
        return None


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of layout {value.layout}: a checkpoint holds plain tensors. Give "
            "value.full_tensor(), value.to_dense() and the like, or the tensors that it is made of"
        )
    if is_piece(value):
        raise CheckpointError(
            f"{path} is one rank's piece of a sharded tensor: a checkpoint holds pieces of models and of moments only. "
            "Average weights in a second sharded model, by streamshard.optim.update_parameters, and save both: "
            'model={"model": model, "average": average} . Of a number give float(value)'
        )
    if value.is_meta:
        raise CheckpointError(f"{path} is on the meta device: it has no values yet")
    data = value.detach().as_subclass(torch.Tensor)
    where = {} if data.device.type == "cpu" else {"device": data.device.type}
    if not data.shape and not data.dtype.is_complex:
        number = _encode(data.item(), path, tensors)
        return {_KIND: "number", "dtype": name_of(data.dtype), "value": number, **where}
    while path in tensors:  # a key may have a dot in it
        path += "'"
    tensors[path] = data
    return {_KIND: "tensor", "tensor": path, **where}


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """An OrderedDict or a defaultdict comes back as a dict."""
    kind = "Counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(each, f"{path}.{key}", tensors) for key, each in value.items()}
    items = [
        [_encode(key, f"a key of {path}", tensors), _encode(each, f"{path}[{key!r}]", tensors)]
        for key, each in value.items()
    ]
    return {_KIND: kind, "value": items}


def name_of(dtype: torch.dtype) -> str:
    """Such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: object) -> torch.dtype:
    """The dtype with this name, such as ``"bfloat16"``.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(f"{name!r:.80} is not the name of a dtype")


def decode(saved: Any, tensor_of: Callable[[str, torch.device], torch.Tensor], device: torch.device) -> Any:
    """The value that was given to `encode`. `saved` may come from anybody: nothing in it is run or imported.

    Args:
        saved: the JSON.
        tensor_of: gives a new tensor on a device, by its name.
        device: for tensors that were not in CPU memory.

    Raises:
        Exception: of any kind; `encode` gives no such JSON.
    """
    if isinstance(saved, list):
        return [decode(each, tensor_of, device) for each in saved]
    if not isinstance(saved, dict):
        return saved
    if _KIND not in saved:
        return {key: decode(each, tensor_of, device) for key, each in saved.items()}
    where = device if "device" in saved else CPU
    if saved[_KIND] == "tensor":
        return tensor_of(saved["tensor"], where)
    value = decode(saved["value"], tensor_of, device)
    if saved[_KIND] == "number":
        return torch.tensor(value, dtype=dtype_named(saved["dtype"]), device=where)
    return _MADE_OF[saved[_KIND]](value)


_MADE_OF: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "dtype": dtype_named,
    "tuple": tuple,
    "array": lambda tensor: tensor.numpy(),
    "dict": dict,
    "Counter": lambda items: Counter(dict(items)),
}
