"""Which tensors a model has on disk, and which elements of which parameter they are made of.

Export and load both read this, so they cannot disagree. The same on every rank: nothing here depends on the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.checkpoint.rearrange import Rearrangement, Run
from streamshard.errors import CheckpointError
from streamshard.unit.shard import ParamShard

__all__ = [
    "DiskTensor",
    "LocalPiece",
    "Made",
    "Overlap",
    "local_pieces",
    "overlaps",
    "plan_disk",
    "plan_loading",
    "saved_names",
]


class DiskTensor(NamedTuple):
    """One tensor as it lies in the files.

    Attributes:
        name: in the file.
        shape: in the file.
        dtype: in the file.
        runs: what its elements are, in order: ranges of the model's parameters and buffers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: tuple[Run, ...]


class Made(NamedTuple):
    """What becomes of the tensors in files when a model loads them.

    Attributes:
        wanted: by parameter or buffer, its names in the model, with its shape and dtype. Tied ones have several.
        tensors: by name in the model, what is made for it: shape, dtype, and ranges of tensors in files, in order.
        failed: by name in the model, why nothing can be made for it of what the files have.
        used: names in the files of what is needed for all of this.
    """

    wanted: dict[str, list[DiskTensor]]
    tensors: dict[str, DiskTensor]
    failed: dict[str, str]
    used: set[str]


class LocalPiece(NamedTuple):
    """What this rank holds of one parameter or buffer: elements [start, start + data.numel()), 1-D."""

    start: int
    data: torch.Tensor


class Overlap(NamedTuple):
    """What a rank holds of one disk tensor: its elements [start, stop), and this rank's memory of them."""

    start: int
    stop: int
    data: torch.Tensor


def saved_names(model: nn.Module, shards: Sequence[ParamShard]) -> dict[str, str]:
    """Every name of the model's state dict, in its order, and the parameter or buffer behind it.

    Tied names lead to the same parameter, which is called by its shard's name; a buffer is called by its own.

    Raises:
        CheckpointError: a parameter has no shard.
    """
    source_of = {name: shard.name for shard in shards for name in (shard.name, *shard.aliases)}
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
    model: nn.Module,
    shards: Sequence[ParamShard],
    dtype: torch.dtype | None,
) -> list[DiskTensor]:
    """The tensors of `model` on disk as `save_pretrained` stores them, in the order in which files are filled.

    Args:
        model: the sharded model.
        shards: its parameters, all of them.
        dtype: of floating-point tensors; None is what each parameter had before sharding and each buffer has now.

    Raises:
        CheckpointError: a tensor on disk would not consist of ranges of parameters.
    """
    names = saved_names(model, shards)
    dropped = _dropped(model, names, {shard.name for shard in shards})
    names = {name: source for name, source in names.items() if name not in dropped}
    tensors = _whole_tensors(model, shards, names, dtype)
    with Rearrangement(tensors) as followed:
        stored = dict(tensors)
        if huggingface.is_transformers_model(model):
            stored = huggingface.rearrange_for_saving(model, tensors)
    return [
        DiskTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tuple(run._replace(source=names[run.source]) for run in followed.runs(name, tensor)),
        )
        for name, tensor in stored.items()
    ]


def plan_loading(model: nn.Module, shards: Sequence[ParamShard], stored: Mapping[str, torch.Tensor]) -> Made:
    """What `model` makes of tensors in files.

    One of transformers' what ``from_pretrained`` makes, any other those that have its names.

    Args:
        model: the sharded model.
        shards: its parameters, all of them.
        stored: contiguous meta tensors, by the names in the files.
    """
    names = saved_names(model, shards)
    whole = _whole_tensors(model, shards, names, None)
    wanted: dict[str, list[DiskTensor]] = {}
    for name, source in names.items():
        wanted.setdefault(source, []).append(DiskTensor(name, tuple(whole[name].shape), whole[name].dtype, ()))
    tensors: dict[str, DiskTensor] = {}
    with Rearrangement(stored, "loading") as followed:
        if huggingface.is_transformers_model(model):
            made, failed, used = huggingface.rearrange_for_loading(model, stored, whole)
        else:
            made = {name: tensor for name, tensor in stored.items() if name in whole}
            failed, used = {}, set(made)
    for name, tensor in made.items():
        try:
            tensors[name] = DiskTensor(name, tuple(tensor.shape), tensor.dtype, followed.runs(name, tensor))
        except CheckpointError as error:
            failed[name] = str(error)
    return Made(wanted, tensors, failed, used)


def local_pieces(model: nn.Module, shards: Sequence[ParamShard], *, buffers: bool) -> dict[str, LocalPiece]:
    """What this rank holds, by parameter name; with `buffers`, persistent buffers too, whole.

    Buffers that are not contiguous are copied.

    Raises:
        CheckpointError: a parameter's data are not this rank's piece of it.
    """
    pieces = {shard.name: LocalPiece(shard.local.start, shard.main) for shard in shards}
    for shard in shards:
        found = pieces[shard.name].data.numel()
        if found != shard.local.numel:
            raise CheckpointError(
                f"parameter {shard.name!r} has {found} elements on this rank, wanted its piece of {shard.local.numel}: "
                "leave summon_full_params first"
            )
    if buffers:
        for name, source in saved_names(model, shards).items():
            if source not in pieces:
                buffer = model.get_buffer(name)
                if buffer.is_meta:
                    raise CheckpointError(f"buffer {name!r} is on the meta device: it has no values")
                pieces[source] = LocalPiece(0, buffer.detach().reshape(-1))
    return pieces


def overlaps(tensor: DiskTensor, pieces: Mapping[str, LocalPiece]) -> Iterator[Overlap]:
    """The ranges of `tensor` of which `pieces` hold the elements."""
    for run in tensor.runs:
        piece = pieces.get(run.source)
        if piece is None:
            continue
        first = max(run.source_start, piece.start)
        last = min(run.source_start + run.numel, piece.start + piece.data.numel())
        if first < last:
            shift = run.start - run.source_start
            yield Overlap(first + shift, last + shift, piece.data[first - piece.start : last - piece.start])


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _whole_tensors(
    model: nn.Module, shards: Sequence[ParamShard], names: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Meta tensors in state dict order, of whole shapes."""
    kinds = _kinds(model, shards, dtype)
    return {
        name: torch.empty(kinds[source].shape, dtype=kinds[source].dtype, device="meta")
        for name, source in names.items()
    }


def _kinds(model: nn.Module, shards: Sequence[ParamShard], dtype: torch.dtype | None) -> dict[str, _Kind]:
    kinds = {name: _Kind(tuple(buffer.shape), buffer.dtype) for name, buffer in _buffers(model)}
    kinds.update((shard.name, _Kind(shard.layout.shape, shard.dtype)) for shard in shards)
    if dtype is None:
        return kinds
    return {name: kind._replace(dtype=dtype) if kind.dtype.is_floating_point else kind for name, kind in kinds.items()}


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_buffers(remove_duplicate=False)


def _dropped(model: nn.Module, names: Mapping[str, str], params: set[str]) -> set[str]:
    """Names that are not saved: further ones of tied parameters, and those the model's class leaves out."""
    groups: dict[str, list[str]] = {}
    for name, source in names.items():
        if source in params:
            groups.setdefault(source, []).append(name)
    tied = [group for group in groups.values() if len(group) > 1]
    if not huggingface.is_transformers_model(model):
        return {name for group in tied for name in group[1:]}
    return huggingface.drop_tied_names(model, tied) | huggingface.ignored_on_save(model)
