"""A model's tensors on disk, and the ranges of parameters and buffers of which each consists.

The plan is the same on every rank.

[Note: rearrangements]
transformers splits, joins and reorders some weights when it saves them (stacked experts become one tensor each), and
does the reverse when it loads them. A rank has only a range of such a tensor. So transformers' own code runs on meta
tensors, which have shapes, strides and storages but no data, and `Rearrangement` records which storages were copied
into which. The result is a list of runs: "elements [a, b) of this tensor are elements [c, d) of that one".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.manifest import PieceRecord, TensorRecord
from streamshard.conventions import conventions
from streamshard.core.engine import Engine
from streamshard.errors import CheckpointError
from streamshard.torch_private import TorchDispatchMode

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
    """While active, follows meta tensors through views, copies and joins. See [Note: rearrangements].

    Arithmetic is not followed.

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
        aten = torch.ops.aten
        if func is aten.clone.default:
            self._record(result, [args[0]], 0)
        elif func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else 0
            parts = args[0] if func is aten.cat.default else [part.unsqueeze(dim) for part in args[0]]
            self._record(result, parts, dim)
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
            return  # not recorded: `runs` raises for this storage
        row_numels = tuple(math.prod(part.shape[dim:]) for part in parts)
        self._origins[_storage(result)] = _Joined(tuple(parts), row_numels)
        self._alive.append(result)

    def _of_view(self, name: str, view: torch.Tensor, start: int, numel: int) -> Iterator[tuple[str, int, int]]:
        """Elements [start, start + numel) of `view` in row-major order, as (source, source start, numel)."""
        for offset, length in _contiguous_runs(view, start, numel):
            yield from self._of_storage(name, _storage(view), offset, length)

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


def _contiguous_runs(view: torch.Tensor, start: int, numel: int) -> Iterator[tuple[int, int]]:
    """Elements [start, start + numel) of `view` in row-major order, as runs of its storage: (first element, number)."""
    dims = [(size, stride) for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1]
    block, end = 1, start + numel  # so many elements in row-major order are neighbours in storage
    while dims and dims[-1][1] == block:
        block *= dims.pop()[0]
    while start < end:
        row, within = divmod(start, block)
        position = int(view.storage_offset()) + within
        for size, stride in reversed(dims):
            row, along = divmod(row, size)
            position += along * stride
        length = min(block - within, end - start)
        yield position, length
        start += length


class TensorPiece(NamedTuple):
    """What a rank holds of the tensor `name`: elements [start, start + data.numel()) of the flattened tensor.

    Attributes:
        name: of the tensor; on all ranks that have some of it the same.
        shape: of the whole.
        start: first element.
        data: [n] 1-D contiguous, any device.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorPiece:
        """A piece that is all of `tensor`."""
        return cls(name, tuple(tensor.shape), 0, tensor.contiguous().view(-1))

    @classmethod
    def wholes(cls, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        """Whole tensors, by name."""
        return [cls.whole(name, tensor) for name, tensor in tensors.items()]

    def record(self, rank: int) -> TensorRecord:
        """What other ranks hear of the piece, which `rank` has."""
        stop = self.start + self.data.numel()
        pieces = (PieceRecord(rank, self.start, stop),) if self.start < stop else ()
        return TensorRecord(self.shape, self.data.dtype, pieces)


def saved_names(model: nn.Module, engine: Engine) -> dict[str, str]:
    """Every name of the model's state dict, in its order, and the parameter or buffer behind it.

    Tied names lead to the same parameter, which is called by its shard's name; a buffer is called by its own.

    Raises:
        CheckpointError: a parameter has no shard.
    """
    source_of = {name: shard.name for shard in engine.param_shards for name in (shard.name, *shard.aliases)}
    names: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for key, param in module._parameters.items():
            if param is not None:
                if dot + key not in source_of:
                    raise CheckpointError(f"parameter {dot + key!r} was added after the model was sharded")
                names[dot + key] = source_of[dot + key]
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                names[dot + key] = dot + key
    return names


def plan_disk(
    model: nn.Module, engine: Engine, dtype: torch.dtype | None
) -> tuple[Mapping[str, torch.Tensor], dict[str, tuple[Run, ...]]]:
    """The tensors of `model` on disk as `save_pretrained` stores them, on the meta device, in the order of the files.

    Also, of each, the ranges of the model's parameters and buffers that its elements are, in order.

    Args:
        model: the sharded model.
        engine: its engine.
        dtype: of floating-point tensors; None is what each parameter had before sharding and each buffer has now.

    Raises:
        CheckpointError: a tensor on disk would not consist of ranges of parameters.
    """
    names = saved_names(model, engine)
    dropped = conventions().left_out(model, [group for group in by_source(names).values() if len(group) > 1])
    names = {name: source for name, source in names.items() if name not in dropped}
    tensors = whole_tensors(model, engine, names, dtype)
    with Rearrangement(tensors) as followed:
        stored = conventions().rearrange_for_saving(model, tensors)
    runs_of = {
        name: tuple(run._replace(source=names[run.source]) for run in followed.runs(name, tensor))
        for name, tensor in stored.items()
    }
    return stored, runs_of


def local_pieces(model: nn.Module, engine: Engine, *, buffers: bool) -> dict[str, TensorPiece]:
    """What this rank holds, by parameter name; with `buffers`, persistent buffers too, whole.

    Buffers that are not contiguous are copied.

    Raises:
        CheckpointError: a buffer has no values.
    """
    shards = engine.param_shards
    pieces = {each.name: TensorPiece(each.name, each.layout.shape, each.local.start, each.main) for each in shards}
    for name, source in saved_names(model, engine).items() if buffers else ():
        if source not in pieces:
            buffer = model.get_buffer(name)
            if buffer.is_meta:
                raise CheckpointError(f"buffer {name!r} is on the meta device: it has no values")
            pieces[source] = TensorPiece.whole(source, buffer.detach())
    return pieces


def put_back_buffers(model: nn.Module, pieces: Mapping[str, TensorPiece]) -> None:
    """Copy loaded values into buffers that are not contiguous, from the contiguous copies that were read."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in pieces and not buffer.is_contiguous():
            buffer.copy_(pieces[name].data.view(buffer.shape))


def overlaps(runs: Iterable[Run], pieces: Mapping[str, TensorPiece]) -> Iterator[tuple[int, torch.Tensor]]:
    """What `pieces` hold of a tensor that consists of `runs`: each first element, and the data from there on."""
    for run in (run for run in runs if run.source in pieces):
        piece = pieces[run.source]
        first = max(run.source_start, piece.start)
        last = min(run.source_start + run.numel, piece.start + piece.data.numel())
        if first < last:
            yield first + run.start - run.source_start, piece.data[first - piece.start : last - piece.start]


def whole_tensors(
    model: nn.Module, engine: Engine, names: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Meta tensors in state dict order, of full shapes; floating-point ones in `dtype`, if given."""
    found = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers(remove_duplicate=False)}
    found.update((shard.name, (shard.layout.shape, shard.dtype)) for shard in engine.param_shards)
    tensors = {}
    for name, source in names.items():
        shape, own = found[source]
        converted = dtype if dtype is not None and own.is_floating_point else own
        tensors[name] = torch.empty(shape, dtype=converted, device="meta")
    return tensors


def by_source(names: Mapping[str, str]) -> dict[str, list[str]]:
    """All names of each parameter and buffer. Tied parameters have several."""
    found: dict[str, list[str]] = {}
    for name, source in names.items():
        found.setdefault(source, []).append(name)
    return found
