"""Finds out where every element of a rearranged tensor comes from, by running the rearrangement on shapes alone.

transformers splits, joins and reorders some weights when it saves them (stacked experts become one tensor each), and
the other way round when it loads them. Nobody here has a whole tensor to do that to, only a byte range per rank. So the
very same code is run on meta tensors, which have shapes, strides and storages but no data, while `Rearrangement` writes
down which storages were copied into which. What comes out is a list of runs: "elements [a, b) of this tensor are
elements [c, d) of that one".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard.errors import CheckpointError

__all__ = ["Rearrangement", "Run"]

_MANY_RUNS = 1 << 16
_SHORT_RUN_NUMEL = 16


class Run(NamedTuple):
    """``destination[start : start + numel] == source[source_start : source_start + numel]``, both flattened."""

    source: str
    source_start: int
    start: int
    numel: int


class _Joined(NamedTuple):
    """A storage that was filled by joining `parts` along one dim: row by row, `row_numels[i]` elements of part i."""

    parts: tuple[torch.Tensor, ...]
    row_numels: tuple[int, ...]


class Rearrangement(TorchDispatchMode):
    """While active, follows meta tensors through views, copies and joins. Arithmetic is not followed.

    Args:
        sources: contiguous meta tensors by name, each with a storage of its own.
        doing: what is being done, for messages.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], doing: str = "saving") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self._origins: dict[int, str | _Joined] = {_storage(tensor): name for name, tensor in sources.items()}
        self._doing = doing
        self._alive = list(sources.values())  # a freed storage's number would be given to another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self._record(result, [args[0]], 0)
        elif func is torch.ops.aten.cat.default:
            self._record(result, args[0], _dim(args, kwargs))
        elif func is torch.ops.aten.stack.default:
            dim = _dim(args, kwargs)
            self._record(result, [part.unsqueeze(dim) for part in args[0]], dim)
        return result

    def runs(self, name: str, tensor: torch.Tensor) -> tuple[Run, ...]:
        """The runs that make up `tensor`, in its own (row-major) order, joined where they touch.

        Args:
            name: of the tensor, for the messages.
            tensor: a result of what ran while this mode was active.

        Raises:
            CheckpointError: its values are computed from the sources rather than moved, or are moved one by one.
        """
        found: list[Run] = []
        position = 0
        for source, source_start, numel in self._of_view(name, tensor, 0, tensor.numel()):
            last = found[-1] if found else None
            if last is not None and last.source == source and last.source_start + last.numel == source_start:
                found[-1] = last._replace(numel=last.numel + numel)
            else:
                found.append(Run(source, source_start, position, numel))
            position += numel
            if len(found) > _MANY_RUNS and position < len(found) * _SHORT_RUN_NUMEL:
                raise CheckpointError(
                    f"{self._doing} {name!r} would move its elements one by one, which ranks cannot do in place"
                )
        return tuple(found)

    def _record(self, result: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
        parts = [part for part in parts if part.numel()]
        if not result.is_contiguous() or any(part.dtype is not result.dtype for part in parts):
            return  # then nothing is known of this storage, and asking for it says so
        row_numels = tuple(_row_numel(part, dim) for part in parts)
        self._origins[_storage(result)] = _Joined(tuple(parts), row_numels)
        self._alive.append(result)

    def _of_view(self, name: str, view: torch.Tensor, start: int, numel: int) -> Iterator[tuple[str, int, int]]:
        """Elements [start, start + numel) of `view` in row-major order, as (source, source start, numel)."""
        block = _contiguous_numel(view)
        end = start + numel
        while start < end:
            within = start % block
            length = min(block - within, end - start)
            offset = int(view.storage_offset()) + _storage_position(view, start - within) + within
            yield from self._of_storage(name, _storage(view), offset, length)
            start += length

    def _of_storage(self, name: str, storage: int, offset: int, numel: int) -> Iterator[tuple[str, int, int]]:
        origin = self._origins.get(storage)
        if origin is None:
            raise CheckpointError(
                f"{self._doing} {name!r} computes new values from the weights, which ranks cannot do in place"
            )
        if isinstance(origin, str):
            yield origin, offset, numel
            return
        ends = list(accumulate(origin.row_numels))
        while numel:
            row, within = divmod(offset, ends[-1])
            number = bisect_right(ends, within)
            length = min(ends[number] - within, numel)
            in_part = within - (ends[number] - origin.row_numels[number])
            yield from self._of_view(name, origin.parts[number], row * origin.row_numels[number] + in_part, length)
            offset, numel = offset + length, numel - length


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # meta storages all have data pointer 0; this tells them apart


def _dim(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> int:
    return int(args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0))


def _row_numel(part: torch.Tensor, dim: int) -> int:
    """Elements of `part` that lie together when it is joined along `dim`: its size from that dim on."""
    if part.dim() == 0:
        return 1
    numel = 1
    for size in part.shape[dim % part.dim() :]:
        numel *= size
    return numel


def _contiguous_numel(view: torch.Tensor) -> int:
    """How many elements in row-major order are neighbours in storage, counted from any multiple of that number."""
    numel = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if size == 1:
            continue
        if stride != numel:
            break
        numel *= size
    return numel


def _storage_position(view: torch.Tensor, index: int) -> int:
    """Where the element with row-major number `index` lies, relative to the view's first."""
    position = 0
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        index, along = divmod(index, size)
        position += along * stride
    return position
