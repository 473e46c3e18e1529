"""Values of the user's objects as JSON and tensors, and back.

JSON has no tuples, no infinite numbers, and only strings as keys. These values become an object with the key "$", which
names their kind. All other objects are refused: reading them would need the code of their classes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from streamshard.errors import CheckpointError
from streamshard.guards.global_ops import PartialNorm
from streamshard.guards.sharded_tensor import piece_of
from streamshard.torch_private import is_traceable_wrapper_subclass

_KIND = "$"
CPU = torch.device("cpu")
# A table: names in files must not lead to other attributes of torch.
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def encode(value: Any, path: str, *, keeps_pieces: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` as JSON, and its tensors by name, detached, not copied.

    Args:
        value: None, numbers, strings, tensors, dtypes, NumPy arrays of torch's dtypes; and lists, tuples, dicts and
            counters of such values. NumPy's numbers come back as Python's numbers.
        path: name of the value. The names of its tensors begin with it.
        keeps_pieces: pieces are among the tensors, as `ShardedTensor`. False: they raise.

    Raises:
        CheckpointError: names the path of a value of another kind.
    """
    tensors: dict[str, torch.Tensor] = {}
    encoded = _encode(value, path, tensors)
    for name in () if keeps_pieces else tensors:
        if piece_of(tensors[name]) is not None:
            raise CheckpointError(
                f"{name} is one rank's piece of a sharded tensor. Average weights in torch's AveragedModel, made "
                "before sharding, or in an object with state_dict() in extra="
            )
    return encoded, tensors


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # NumPy's double is a float too, whose repr Python's float() does not read.
        return float(value) if math.isfinite(value) else {_KIND: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if type(value) in (list, tuple, torch.Size):  # a named tuple would come back without its names
        items = [_encode(each, f"{path}[{place}]", tensors) for place, each in enumerate(value)]
        return items if type(value) is list else {_KIND: "tuple", "value": items}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": dtype_name(value)}
    found = _of_numpy(value)
    if isinstance(found, torch.Tensor):
        return {_KIND: "array", "value": _encode_tensor(found, path, tensors)}
    if found is not None:
        return _encode(found, path, tensors)
    kind = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}{kind}: a checkpoint holds numbers, strings, "
        "lists, tuples, dicts, tensors and arrays. Give an object with state_dict() and load_state_dict() by itself"
    )


def _of_numpy(value: Any) -> bool | int | float | torch.Tensor | None:
    """A NumPy number as a Python number, a NumPy array as a tensor; None if `value` is neither, or has no such form."""
    if isinstance(value, numpy.bool_ | numpy.integer | numpy.floating):
        number = value.item()  # long doubles stay NumPy's numbers, and durations become integers
        return number if isinstance(number, bool | int | float) and value.dtype.kind != "m" else None
    if type(value) is not numpy.ndarray:  # a masked array would lose its mask
        return None
    try:
        # torch warns of memory that is for reading only, and takes no negative strides.
        return torch.from_numpy(numpy.require(value, requirements=("C", "W")))
    except (TypeError, ValueError):  # strings, objects, long doubles, another byte order
        return None


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        advice = "a checkpoint holds plain tensors. Give value.full_tensor(), value.to_dense() or the tensors inside"
        raise CheckpointError(f"{path} is a {type(value).__name__} of layout {value.layout}: {advice}")
    if value.is_meta:
        raise CheckpointError(f"{path} is on the meta device: it has no values yet")
    while path in tensors:  # keys may contain dots
        path += "'"
    if (piece := piece_of(value)) is not None:
        tensors[path] = value.detach()
        return {_KIND: "piece", "tensor": path, "of": piece.name}
    if isinstance(value, PartialNorm):
        raise CheckpointError(f"{path} is a norm of this rank's pieces: give float(value)")
    data = value.detach().as_subclass(torch.Tensor)
    # Without the device's number, which differs between ranks: their JSON is compared.
    where = {} if data.device.type == "cpu" else {"device": data.device.type}
    # Counts of steps are such tensors: ranks compare them as JSON, which has no complex numbers.
    if not data.shape and not data.dtype.is_complex:
        number = _encode(data.item(), path, tensors)
        return {_KIND: "number", "dtype": dtype_name(data.dtype), "value": number, **where}
    tensors[path] = data
    return {_KIND: "tensor", "tensor": path, **where}


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of a dict or a counter. OrderedDicts and defaultdicts come back as dicts."""
    kind = "Counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(each, f"{path}.{key}", tensors) for key, each in value.items()}
    items = [
        [_encode(key, f"a key of {path}", tensors), _encode(each, f"{path}[{key!r}]", tensors)]
        for key, each in value.items()
    ]
    return {_KIND: kind, "value": items}


def with_pieces(saved: Any, own: Any) -> Any:
    """JSON `saved`, with a piece in the place of each full tensor where JSON `own` of the same object has a piece.

    One rank has saved averages of weights as full tensors, and each of several ranks takes its piece.
    """
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [*map(with_pieces, saved, own)]
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return saved
    if (saved.get(_KIND), own.get(_KIND)) == ("tensor", "piece"):
        return {**own, "tensor": saved["tensor"]}
    return {key: with_pieces(each, own.get(key)) for key, each in saved.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: object) -> torch.dtype:
    """The dtype with this name, such as ``"bfloat16"``.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    if isinstance(name, str) and name in _DTYPES:
        return _DTYPES[name]
    raise CheckpointError(f"{name!r:.80} is not the name of a dtype")


def decode(
    saved: Any,
    tensor_of: Callable[[str, torch.device], torch.Tensor],
    device: torch.device,
    piece_of: Callable[[str, str], torch.Tensor] | None = None,
) -> Any:
    """The reverse of `encode`. Runs and imports nothing, whoever has written `saved`.

    Args:
        saved: the JSON.
        tensor_of: returns a new tensor, given its name and device.
        device: of tensors that were not in CPU memory.
        piece_of: returns this rank's piece, given the name of the tensor and of the parameter that is cut alike.

    Raises:
        Exception: of many kinds; `encode` returns no such JSON.
    """
    if isinstance(saved, list):
        return [decode(each, tensor_of, device, piece_of) for each in saved]
    if not isinstance(saved, dict):
        return saved
    if _KIND not in saved:
        return {key: decode(each, tensor_of, device, piece_of) for key, each in saved.items()}
    where = device if "device" in saved else CPU
    if saved[_KIND] == "tensor":
        return tensor_of(saved["tensor"], where)
    if saved[_KIND] == "piece" and piece_of is not None:
        return piece_of(saved["tensor"], saved["of"])
    value = decode(saved["value"], tensor_of, device, piece_of)
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
