"""A model's tensors in files, and the ranges of parameters and buffers that make up each tensor.

All ranks make the same plan.

[Note: rearrangements]
transformers splits, joins and reorders some weights when it saves them, and does the reverse when it loads them:
stacked experts become one tensor per expert. A rank has only a range of such a weight. So transformers' own code runs
on meta tensors, which have shapes, strides and storages but no data. `Rearrangement` records which storages were copied
into which. The result is a list of runs, such as "elements [0, 8) of tensor a are elements [16, 24) of parameter b".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from streamshard.checkpoint.manifest import PieceRecord, TensorRecord, contiguous_runs, place_in, runs_in
from streamshard.checkpoint.safetensors_file import StoredTensor
from streamshard.checkpoint.storage import Location
from streamshard.conventions import conventions
from streamshard.core.engine import Engine
from streamshard.errors import CheckpointError
from streamshard.forms import Box, form_of
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_tensor import piece_of
from streamshard.planning.structure import join_names
from streamshard.torch_private import TorchDispatchMode

_MANY_RUNS = 1 << 16  # more of them may not be short: each is a read or write by itself
_SHORT_RUN_NUMEL = 16
_NAMES_SHOWN = 8


class Run(NamedTuple):
    """``tensor[start : start + numel] == source[source_start : source_start + numel]``, both flattened."""

    source: str
    source_start: int
    start: int
    numel: int


class _Joined(NamedTuple):
    """A storage filled by joining `parts` along one dim. Each row has `row_numels[i]` elements of ``parts[i]``."""

    parts: tuple[torch.Tensor, ...]
    row_numels: tuple[int, ...]


class Rearrangement(TorchDispatchMode):
    """While active, records views, copies and joins of meta tensors. See [Note: rearrangements].

    Args:
        sources: contiguous meta tensors by name, each with a storage of its own.
        doing: the action, for messages: "saving" or "loading".
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], doing: str = "saving") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self._origins: dict[int, str | _Joined] = {_storage(tensor): name for name, tensor in sources.items()}
        self._doing = doing
        self._alive = list(sources.values())  # another storage could get the number of a freed one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func is aten.clone.default:  # contiguous() ends here, and a reshape() that copies
            self._record(result, [args[0]], 0)
        elif func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else 0  # torch leaves out arguments that have their default
            parts = args[0] if func is aten.cat.default else [part.unsqueeze(dim) for part in args[0]]
            self._record(result, parts, dim)
        return result

    def runs(self, name: str, tensor: torch.Tensor) -> tuple[Run, ...]:
        """The runs that make up `tensor`, in row-major order, as long as possible.

        Args:
            name: of the tensor, for messages.
            tensor: made while this mode was active.

        Raises:
            CheckpointError: the values of `tensor` are not copied from the sources but computed, or copied one by one.
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
                raise CheckpointError(f"{self._doing} {name!r} would move its elements one by one: that takes too long")
        return tuple(found)

    def _record(self, result: torch.Tensor, parts: Sequence[torch.Tensor], dim: int) -> None:
        parts = [part for part in parts if part.numel()]  # cat passes over tensors of shape [0], whatever `dim`
        # Tensors of several dtypes are converted, not moved.
        if not result.is_contiguous() or any(part.dtype is not result.dtype for part in parts):
            return  # `runs` raises for a storage without record
        row_numels = tuple(math.prod(part.shape[dim:]) for part in parts)
        self._origins[_storage(result)] = _Joined(tuple(parts), row_numels)
        self._alive.append(result)

    def _of_view(self, name: str, view: torch.Tensor, start: int, numel: int) -> Iterator[tuple[str, int, int]]:
        """Elements [start, start + numel) of `view` in row-major order, as (source, source start, numel)."""
        for offset, length in contiguous_runs(view, start, numel):
            yield from self._of_storage(name, _storage(view), offset, length)

    def _of_storage(self, name: str, storage: int, offset: int, numel: int) -> Iterator[tuple[str, int, int]]:
        origin = self._origins.get(storage)
        if origin is None:
            raise CheckpointError(f"{self._doing} {name!r} computes new values: ranks can only move weights")
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
    return int(tensor.untyped_storage()._cdata)  # the data pointer of all meta storages is 0


class TensorPiece(NamedTuple):
    """A rank's part of a tensor: elements [start, start + data.numel()) of the flattened tensor, or of its `box`.

    Attributes:
        name: of the tensor, the same on all ranks.
        shape: of the full tensor.
        start: first element.
        data: [n] 1-D contiguous, any device.
        box: see `PieceRecord`.
        is_copy: a rank with another part of the DTensors has the same piece, and saves it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor
    box: Box = ()
    is_copy: bool = False

    @classmethod
    def of(cls, name: str, piece: Piece, data: torch.Tensor) -> TensorPiece:
        """The elements that `piece` describes, which are `data`."""
        return cls(name, piece.shape, piece.start, data.view(-1), piece.box, not piece.counts)

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> TensorPiece:
        """A piece that has all elements of `tensor`."""
        return cls(name, tuple(tensor.shape), 0, tensor.contiguous().view(-1))

    @classmethod
    def wholes(cls, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        """A piece for each tensor, with all of its elements. Tensors that are pieces are left out."""
        return [cls.whole(name, tensor) for name, tensor in tensors.items() if piece_of(tensor) is None]

    @classmethod
    def sharded(cls, tensors: Mapping[str, torch.Tensor]) -> list[TensorPiece]:
        """A piece for each tensor that is one: averages of weights in an object of the user's."""
        found = ((name, piece_of(tensor), tensor.as_subclass(torch.Tensor)) for name, tensor in tensors.items())
        return [cls.of(name, piece, data.contiguous()) for name, piece, data in found if piece is not None]

    def record(self, rank: int) -> TensorRecord:
        """Describes the piece of `rank` to other ranks."""
        stop = self.start + self.data.numel()
        pieces = (PieceRecord(rank, self.start, stop, self.box),) if self.start < stop else ()
        return TensorRecord(self.shape, self.data.dtype, pieces)


class Difference(NamedTuple):
    """Names that differ between the files and the model, in the model's order or in alphabetical order.

    Attributes:
        missing: names that the model has and the files do not.
        unexpected: names that the files have and the model does not.
        mismatched: names whose shape or kind differs, each with the difference.
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def error(self, root: Location, model: nn.Module) -> CheckpointError:
        """The error to raise. Its message shows some names, its attributes have all names."""
        what = "; ".join(
            f"{kind} {', '.join(names[:_NAMES_SHOWN])}{' and more' if len(names) > _NAMES_SHOWN else ''}"
            for kind, names in self._asdict().items()
            if names
        )
        told = f"{root} does not fit {type(model).__name__}: {what}. The error's attributes have all names"
        return CheckpointError(told, **self._asdict())


def saved_names(model: nn.Module, engine: Engine) -> dict[str, str]:
    """By each name of the model's state dict, in its order, the name of the parameter or buffer.

    Tied names lead to one parameter, whose name is the name of its `Param`.

    Raises:
        CheckpointError: a parameter has no shard.
    """
    source_of = {name: param.name for param in engine.params for name in (param.name, *param.aliases)}
    names: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):  # a tied module has all of its names
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = join_names(prefix, key)
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            if key in module._parameters and name not in source_of:
                raise CheckpointError(f"parameter {name!r} was added after the model was sharded")
            names[name] = source_of.get(name, name)
    return names


def plan_export(
    model: nn.Module, engine: Engine, dtype: torch.dtype | None
) -> tuple[Mapping[str, torch.Tensor], dict[str, tuple[Run, ...]]]:
    """Plan an export of `model`.

    Args:
        model: the sharded model.
        engine: its engine.
        dtype: of floating-point tensors; None: each parameter's dtype before sharding, and each buffer's own.

    Returns:
        Meta tensors as `save_pretrained` stores them, by name, in the order of the files; and by name, the ranges of
        parameters and buffers that make up each tensor.

    Raises:
        CheckpointError: a tensor would not consist of ranges of parameters.
    """
    names = saved_names(model, engine)
    dropped = conventions().left_out(model, [group for group in _by_source(names).values() if len(group) > 1])
    names = {name: source for name, source in names.items() if name not in dropped}
    tensors = _whole_tensors(model, engine, names, dtype)
    with Rearrangement(tensors) as followed:
        stored = conventions().rearrange_for_saving(model, tensors)
    runs_of = {
        name: tuple(run._replace(source=names[run.source]) for run in followed.runs(name, tensor))
        for name, tensor in stored.items()
    }
    return stored, runs_of


def plan_load(
    model: nn.Module, engine: Engine, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, list[Run]], Difference]:
    """Match the tensors in files with the model's parameters and buffers.

    Args:
        model: the sharded model.
        engine: its engine.
        stored: the tensors in the files, by name.

    Returns:
        By tensor in the files, the runs that load from it: each `Run.source` is a parameter or buffer. And the names
        that do not fit.
    """
    names = saved_names(model, engine)
    wanted = _whole_tensors(model, engine, names, None)
    metas = {name: torch.empty(there.shape, dtype=there.dtype, device="meta") for name, there in stored.items()}
    with Rearrangement(metas, "loading") as followed:
        made, failed, taken, optional = conventions().rearrange_for_loading(model, metas, wanted)
    difference = Difference([], [], [])
    runs: dict[str, list[Run]] = {}
    for source, own in _by_source(names).items():
        found = next((name for name in own if name in made), None)  # one of several tied names is enough
        bad = next((name for name in own if name in failed), None)
        try:
            if found is not None:
                _check_kind(made[found], wanted[found])
                for run in followed.runs(found, made[found]):
                    runs.setdefault(run.source, []).append(Run(source, run.start, run.source_start, run.numel))
            elif bad is not None:
                difference.mismatched.append(f"{bad} ({failed[bad]})")
            elif not optional.intersection(own):
                difference.missing.append(own[0])
        except CheckpointError as error:
            difference.mismatched.append(f"{found} ({error})")
    difference.unexpected.extend(sorted(set(stored) - taken))
    return runs, difference


def _check_kind(there: torch.Tensor, wanted: torch.Tensor) -> None:
    if there.shape != wanted.shape:
        raise CheckpointError(f"is {list(there.shape)}, wanted {list(wanted.shape)}")
    if there.dtype.is_floating_point != wanted.dtype.is_floating_point:  # copies convert within a kind
        raise CheckpointError(f"is {there.dtype}, wanted {wanted.dtype}")


def local_pieces(model: nn.Module, engine: Engine, *, buffers: bool) -> dict[str, TensorPiece]:
    """This rank's pieces of parameters, by name: its own memory. With `buffers` also all persistent buffers.

    A buffer that is not contiguous is copied: see `fill_buffers`.

    Raises:
        CheckpointError: a buffer has no values.
    """
    pieces = {each.name: TensorPiece.of(each.name, each.piece, each.main) for each in engine.params}
    for name, source in saved_names(model, engine).items() if buffers else ():
        if source not in pieces:
            buffer = model.get_buffer(name)
            if buffer.is_meta:
                raise CheckpointError(f"buffer {name!r} is on the meta device: it has no values")
            pieces[source] = TensorPiece.whole(source, form_of(buffer).memory(buffer.detach()))
    return pieces


def fill_buffers(model: nn.Module, pieces: Mapping[str, TensorPiece]) -> None:
    """Copy loaded values from `pieces` into buffers that are not contiguous."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        memory = form_of(buffer).memory(buffer)
        if name in pieces and not memory.is_contiguous():
            memory.copy_(pieces[name].data.view(memory.shape))


def overlaps(runs: Iterable[Run], pieces: Mapping[str, TensorPiece]) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of a tensor made of `runs` that `pieces` have: for each, its first element in the tensor, and data."""
    for run in (run for run in runs if run.source in pieces):  # in an export other ranks have no buffers
        piece = pieces[run.source]
        # Not from the piece's first run on: a part of stacked experts has a run for each row of each expert.
        edges = (place_in(piece.box, each) - piece.start for each in (run.source_start, run.source_start + run.numel))
        place, stop = (min(max(each, 0), piece.data.numel()) for each in edges)
        for first, numel in runs_in(piece.box, piece.start + place, stop - place) if place < stop else ():
            yield run.start + first - run.source_start, piece.data[place : place + numel]
            place += numel


def _whole_tensors(
    model: nn.Module, engine: Engine, names: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Full meta tensors for `names`, in their order; floating-point tensors are in `dtype`, unless it is None."""
    found = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers(remove_duplicate=False)}
    found.update((param.name, (param.piece.shape, param.dtype)) for param in engine.params)
    tensors = {}
    for name, source in names.items():
        shape, own = found[source]
        converted = dtype if dtype is not None and own.is_floating_point else own
        tensors[name] = torch.empty(shape, dtype=converted, device="meta")
    return tensors


def _by_source(names: Mapping[str, str]) -> dict[str, list[str]]:
    """All names of each parameter and buffer. Tied parameters have several."""
    found: dict[str, list[str]] = {}
    for name, source in names.items():
        found.setdefault(source, []).append(name)
    return found
