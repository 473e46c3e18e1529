"""What a checkpoint holds, in words: lines for people, from its manifest alone. And what an export does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from streamshard.checkpoint.load import StoredDirectory
from streamshard.checkpoint.manifest import Manifest, TensorRecord

__all__ = [
    "describe",
    "describe_weights",
    "saved_at",
    "shown_bytes",
    "stored_lines",
    "tensor_lines",
    "total_bytes",
]

_SHOWN_CHARACTERS = 72


def describe(manifest: Manifest) -> list[str]:
    """Name and content of each part, in two columns."""
    versions = manifest.versions
    replicas = f" in {manifest.replicas} replicas" if manifest.replicas > 1 else ""
    rows = [
        ("number", str(manifest.number)),
        ("saved", saved_at(manifest)),
        ("by", f"streamshard {versions['streamshard']}, torch {versions['torch']}"),
        ("ranks", f"{manifest.world_size}{replicas}"),
        ("size", f"{shown_bytes(total_bytes(manifest))} in {_counted(len(manifest.files), 'file')}"),
        *((name, _model_line(manifest, name)) for name in manifest.state["models"]),
        *((name, _optimizer_line(manifest, name)) for name in manifest.state["optimizers"]),
        *((name, _tree_line(manifest, name)) for name in manifest.state["trees"]),
    ]
    return _in_columns(rows)


def tensor_lines(manifest: Manifest) -> list[str]:
    """Name, dtype and shape of every tensor."""
    return _in_columns((name, record.dtype, str(list(record.shape))) for name, record in manifest.tensors.items())


def describe_weights(stored: StoredDirectory) -> list[str]:
    """What a Hugging Face directory holds, in two columns."""
    numel = sum(math.prod(each.shape) for each in stored.stored.values())
    by_dtype: dict[str, int] = {}
    for each in sorted(stored.stored.values(), key=lambda tensor: tensor.n_bytes, reverse=True):
        name = _dtype_name(each.dtype)
        by_dtype[name] = by_dtype.get(name, 0) + each.n_bytes
    files = {each.file for each in stored.stored.values()}
    return _in_columns(
        [
            ("weights", f"{numel:,} numbers in {_counted(len(stored.stored), 'tensor')} ({_shown_kinds(by_dtype)})"),
            ("size", f"{shown_bytes(sum(stored.sizes_bytes))} in {_counted(len(files), 'file')}"),
        ]
    )


def stored_lines(stored: StoredDirectory) -> list[str]:
    """Name, dtype and shape of every tensor of a Hugging Face directory."""
    tensors = sorted(stored.stored.items())
    return _in_columns((name, _dtype_name(each.dtype), str(list(each.shape))) for name, each in tensors)


def saved_at(manifest: Manifest) -> str:
    """When, to the second, in UTC."""
    return manifest.versions["saved_at"][: len("2000-01-01T00:00:00")].replace("T", " ") + " UTC"


def total_bytes(manifest: Manifest) -> int:
    """Of all files but the manifest."""
    return sum(record.size_bytes for record in manifest.files)


def shown_bytes(count: int) -> str:
    """In the largest unit of which there is one at least."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _model_line(manifest: Manifest, name: str) -> str:
    saved = manifest.state["models"][name]
    params = [manifest.tensors[f"{name}/{param}"] for param in saved["params"]]
    buffers = [manifest.tensors[f"{name}/{buffer}"] for buffer in saved["buffers"] if buffer not in saved["params"]]
    line = (
        f"{saved['class'] or 'of unknown class'}, {manifest.numel_of_params(name):,} numbers in "
        f"{_counted(len(params), 'parameter')} ({_kinds(params)})"
    )
    if buffers:
        line += f", {_counted(len(buffers), 'buffer')} ({_kinds(buffers)})"
    if "error" in saved["export"]:
        line += "; cannot be exported from here"
    return line


def _optimizer_line(manifest: Manifest, name: str) -> str:
    saved = manifest.state["optimizers"][name]
    keys = list(dict.fromkeys(key for own in saved["state"].values() for key in own))
    tensors = [record for tensor, record in manifest.tensors.items() if tensor.startswith(f"{name}/")]
    groups = _counted(len(saved["groups"]), "group")
    state = f"{', '.join(keys)} of {_counted(len(saved['state']), 'parameter')}" if keys else "no state yet"
    return f"{saved['class'] or 'of unknown class'}, {groups}, {state}" + (f" ({_kinds(tensors)})" if tensors else "")


def _tree_line(manifest: Manifest, name: str) -> str:
    saved = manifest.state["trees"][name]
    if "all" in saved:
        return _cut(_short(manifest, saved["all"]))
    return _cut(f"differs between {len(saved['ranks'])} ranks; {_short(manifest, saved['ranks'][0], '@rank0')}")


def _short(manifest: Manifest, value: Any, suffix: str = "") -> str:
    """A value that `tree.encode` has made, legibly."""
    if isinstance(value, list):
        return "[" + ", ".join(_parts(manifest, value, suffix)) + "]"
    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    kind = value.get("$")
    if kind is None:
        named = zip(value, _parts(manifest, value.values(), suffix), strict=False)
        return "{" + ", ".join(f"{key}: {each}" for key, each in named) + "}"
    if "tensor" in value:
        record = manifest.tensors[value["tensor"] + suffix]
        return f"{kind} {list(record.shape)} {record.dtype}" if kind != "bytes" else f"{record.numel} bytes"
    if "value" in value:
        return str(value["value"])
    return f"{kind}({', '.join(_parts(manifest, value['items'], suffix))})"


def _parts(manifest: Manifest, values: Iterable[Any], suffix: str) -> Iterator[str]:
    """Each of `values`, until there is more of them than is shown."""
    shown = 0
    for value in values:
        if shown > _SHOWN_CHARACTERS:
            return
        part = _short(manifest, value, suffix)
        shown += len(part)
        yield part


def _kinds(tensors: Iterable[TensorRecord]) -> str:
    by_dtype: dict[str, int] = {}
    for record in tensors:
        by_dtype[record.dtype] = by_dtype.get(record.dtype, 0) + record.size_bytes
    return _shown_kinds(by_dtype)


def _shown_kinds(by_dtype: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype}, {shown_bytes(size)}" for dtype, size in by_dtype.items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _in_columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
