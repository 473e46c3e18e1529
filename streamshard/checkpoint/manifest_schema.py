"""Which JSON is a manifest: every key and value, checked once, so that code that reads a manifest can trust it.

A stranger may have made the file, and its checksum with it. Nothing here reads another file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from streamshard.checkpoint.tree import check_tree, dtype_named
from streamshard.errors import CheckpointError

__all__ = ["LARGEST", "check_manifest"]

LARGEST = (1 << 63) - 1
"""Of the numbers in a manifest."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")  # in the checkpoint's directory, and not hidden there
_CRC32 = re.compile(r"[0-9a-f]{8}")
_MOST_DIMS = 64  # as many as torch has

_Json = Mapping[str, Any]


def check_manifest(content: Any) -> None:
    """Raise a CheckpointError that names the place of the first value that no `Manifest` would have."""
    _object("it", content)
    for name, least in (("number", 0), ("world_size", 1), ("replicas", 1)):
        _integer(name, _get(content, name), least)
    _integer("generation", content.get("generation", 0))
    versions = _object("versions", _get(content, "versions"))
    for name in ("streamshard", "torch", "saved_at"):
        _text(f"versions.{name}", _get(versions, name))
    sizes = _check_files(_get(content, "files"))
    tensors = _object("tensors", _get(content, "tensors"))
    for name, record in tensors.items():
        _check_tensor(name, record, sizes)
    state = _object("state", _get(content, "state"))
    for name, model in _object("models", _get(state, "models")).items():
        _check_model(name, model, tensors)
    for name, optimizer in _object("optimizers", _get(state, "optimizers")).items():
        _check_optimizer(name, optimizer, tensors)
    for name, tree in _object("trees", _get(state, "trees")).items():
        if "all" in _object(name, tree):
            _check_tree(name, tree["all"], tensors)
            continue
        for rank, each in enumerate(_list(name, _get(tree, "ranks"), least=1)):
            _check_tree(name, each, tensors, f"@rank{rank}")


def _check_files(files: Any) -> list[int]:
    """Returns their sizes."""
    sizes: dict[str, int] = {}
    for record in _list("files", files):
        name = _file_name("files", _get(_object("files", record), "name"))
        if name in sizes:
            raise CheckpointError(f"there are two files {name!r}")
        sizes[name] = _integer(f"the size of {name!r}", _get(record, "size_bytes"))
        _want(_CRC32.fullmatch(_text(name, _get(record, "crc32"))), f"the CRC-32 of {name!r}", record["crc32"])
        _want(len(record) == 3, f"the record of {name!r}", list(record))
    return list(sizes.values())


def _check_tensor(name: str, record: Any, sizes_bytes: list[int]) -> None:
    what = f"tensor {name!r:.200}"
    numel = _check_shape(what, _get(_object(what, record), "shape"))
    itemsize = dtype_named(_get(record, "dtype")).itemsize
    end = 0
    for piece in _list(what, _get(record, "pieces")):
        _want(isinstance(piece, list) and len(piece) == 3, f"a piece of {what}", piece)
        file, start, stop = (_integer(f"a piece of {what}", each) for each in piece)
        _want(file < len(sizes_bytes), f"the file of a piece of {what}", file)
        if start != end or stop < start:
            raise CheckpointError(f"the pieces of {what} do not follow one another at element {end}")
        _want((stop - start) * itemsize <= sizes_bytes[file], f"the size of a piece of {what}", stop - start)
        end = stop
    if end != numel:
        raise CheckpointError(f"the pieces of {what} end at element {end} of {numel}")


def _check_shape(what: str, shape: Any) -> int:
    """Returns the number of elements."""
    _want(len(_list(what, shape)) <= _MOST_DIMS, f"the shape of {what}", shape)
    for size in shape:
        _integer(f"the shape of {what}", size)
    _want(math.prod(max(size, 1) for size in shape) <= LARGEST, f"the shape of {what}", shape)
    return math.prod(shape)


def _check_model(name: str, model: Any, tensors: _Json) -> None:
    _class_name(name, _get(_object(name, model), "class"))
    params = _object(f"{name}: params", _get(model, "params"))
    for param, own in params.items():
        dtype_named(_get(_object(f"{name}: {param!r}", own), "dtype"))
        _texts(f"{name}: aliases", _get(own, "aliases"))
    buffers = _texts(f"{name}: buffers", _get(model, "buffers"))
    for group in _list(f"{name}: equal", model.get("equal", [])):
        _texts(f"{name}: equal", group)
    for each in (*params, *buffers):
        _want(f"{name}/{each}" in tensors, f"{name} without a tensor for", each)
    _check_dict(name, _get(model, "extra_state"), tensors)
    export = _object(f"{name}: export", _get(model, "export"))
    if "error" in export:
        _text(f"{name}: export", export["error"])
        return
    for file, text in _object(f"{name}: export", _get(export, "files")).items():
        _text(_file_name(f"{name}: export", file), text)
    if _get(export, "custom_code") is not None:
        _text(f"{name}: export", export["custom_code"])
    for tensor in _list(f"{name}: export", _get(export, "tensors")):
        _check_exported(name, tensor, tensors)


def _check_exported(model: str, tensor: Any, tensors: _Json) -> None:
    what = f"{model}: a tensor of its export"
    _want(isinstance(tensor, list) and len(tensor) == 4, what, tensor)
    numel = _check_shape(_text(what, tensor[0]), tensor[1])
    dtype_named(tensor[2])
    end = 0
    for run in _list(what, tensor[3]):
        _want(isinstance(run, list) and len(run) == 4, what, run)
        source = f"{model}/{_text(what, run[0])}"
        source_start, start, count = (_integer(what, each) for each in run[1:])
        _want(source in tensors and start == end, what, run)
        _want(source_start + count <= math.prod(tensors[source]["shape"]), what, run)
        end += count
    _want(end == numel, f"{what}: {tensor[0]!r:.200}: its end", end)


def _check_optimizer(name: str, optimizer: Any, tensors: _Json) -> None:
    _class_name(name, _get(_object(name, optimizer), "class"))
    for group in _list(f"{name}: groups", _get(optimizer, "groups")):
        _texts(f"{name}: params", _get(_object(f"{name}: groups", group), "params"))
        if group.get("param_names") is not None:
            _texts(f"{name}: param_names", group["param_names"])
        _check_dict(f"{name}: options", _get(group, "options"), tensors)
    for param, own in _object(f"{name}: state", _get(optimizer, "state")).items():
        for key, value in _object(f"{name}: {param!r}", own).items():
            if isinstance(value, dict) and value.get("$") == "moment":
                _text(f"{name}: {key!r}", _get(value, "tensor"))  # which nobody has where nobody has elements
            else:
                _check_tree(name, value, tensors)
    for value in _object(f"{name}: values", _get(optimizer, "values")).values():
        _check_tree(name, value, tensors)
    for key in ("others", "shared"):
        _check_dict(f"{name}: {key}", _get(optimizer, key), tensors)


def _check_dict(name: str, saved: Any, tensors: _Json) -> None:
    """A tree that is a dict when it is decoded."""
    _want(_object(name, saved).get("$") in (None, "dict"), name, saved)
    _check_tree(name, saved, tensors)


def _check_tree(name: str, saved: Any, tensors: _Json, suffix: str = "") -> None:
    try:
        check_tree(saved, tensors, suffix)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r:.80}: {error}") from error


def _get(value: _Json, key: str) -> Any:
    if key not in value:
        raise CheckpointError(f"it has no {key!r}")
    return value[key]


def _want(is_sound: object, what: str, value: object) -> None:
    if not is_sound:
        raise CheckpointError(f"{what} cannot be {value!r:.80}")


def _object(what: str, value: Any) -> dict[str, Any]:
    _want(isinstance(value, dict), what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _list(what: str, value: Any, least: int = 0) -> list[Any]:
    _want(isinstance(value, list) and len(value) >= least, what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _text(what: str, value: Any) -> str:
    _want(isinstance(value, str), what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _texts(what: str, value: Any) -> list[str]:
    return [_text(what, each) for each in _list(what, value)]


def _class_name(what: str, value: Any) -> None:
    if value is not None:
        _text(f"{what}: class", value)


def _integer(what: str, value: Any, least: int = 0) -> int:
    _want(type(value) is int and least <= value <= LARGEST, what, value)
    return value  # type: ignore[no-any-return]  # it has been checked


def _file_name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise CheckpointError(f"{what} cannot have the name {value!r:.80}: wanted the name of a file in the directory")
    return value
