"""What a sharded parameter is a piece of; and what keeps pieces from being saved as if they were whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.serialization import register_package
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamshard.comm.ranks import Ranks
from streamshard.errors import ShardingError
from streamshard.plan.layout import LocalRange, ParamLayout, SegmentLayout

__all__ = [
    "Piece",
    "StatePiece",
    "forget_piece",
    "holds_pieces",
    "mark_state",
    "piece_of",
    "refuse_pickle",
    "refuse_saving",
    "remember_piece",
    "unmark_state",
]


class Piece(NamedTuple):
    """What a sharded parameter is a piece of.

    Attributes:
        name: of the parameter.
        shape: of the whole.
        start, stop: which elements of the flattened whole this rank has.
        local_shape: of this rank's.
        ranks: of the shard group.
        segment, place: the layout that says what the other ranks have.
        ledger_of: the model's `Ledger` (see `streamshard.unit.buffers`), None once the model is gone.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    local_shape: tuple[int, ...]
    ranks: Ranks
    segment: SegmentLayout
    place: ParamLayout
    ledger_of: Callable[[], Any]

    def range_of(self, rank: int) -> LocalRange:
        """Which elements of the flattened whole `rank` of the shard group has."""
        return self.segment.local_range(self.place, rank)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of `whole`, in new memory: [local_shape]."""
        return whole.detach().reshape(-1)[self.start : self.stop].clone().view(self.local_shape)


# By ids of parameters, asked for in each of their steps. Their attributes are those of compute views as well.
_pieces: dict[int, Piece] = {}
_params: dict[int, weakref.ref[nn.Parameter]] = {}  # of those that have had one


def remember_piece(param: nn.Parameter, piece: Piece) -> None:
    """`param` holds `piece` from now on."""
    if piece.ranks.world_size > 1:
        _pieces[id(param)] = piece
        if id(param) not in _params:
            _params[id(param)] = weakref.ref(param, functools.partial(_let_go, id(param)))


def _let_go(number: int, param: weakref.ref[nn.Parameter]) -> None:
    _pieces.pop(number, None)
    del _params[number]


def forget_piece(param: nn.Parameter) -> None:
    """`param` is whole, for a while."""
    _pieces.pop(id(param), None)


def piece_of(param: torch.Tensor) -> Piece | None:
    """What `param` is a piece of; None if it is none."""
    return _pieces.get(id(param))


def refuse_pickle(piece: Piece) -> NoReturn:
    """Raise: nothing that holds `piece` alone is a checkpoint."""
    raise ShardingError(
        f"parameter {piece.name!r} is one rank's piece of {piece.shape} and is not saved as if it were whole. Call on "
        "all ranks instead, to save a run, streamshard.save_checkpoint(directory, model, optimizer), for whole weights "
        "model.full_state_dict() or streamshard.export_safetensors(model, directory)"
    )


_mains: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by the address of their storage


def refuse_saving(main: torch.Tensor) -> None:
    """Whatever looks at the memory of `main`, one rank's main weights, is not saved by torch while `main` lives."""
    _mains[main.untyped_storage().data_ptr()] = main


def holds_pieces(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is in the memory of one rank's main weights, of which other ranks have other parts."""
    return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in _mains


def _refuse_storage(storage: Any) -> None:
    """Asked by torch's pickler, for the location of every storage that it is about to write."""
    if storage.device.type != "meta" and storage.data_ptr() in _mains:
        raise ShardingError(
            "these are main weights of a StreamShard model, of which each rank has pieces (param.data, "
            "param.detach() and views of them): to save them whole use model.full_state_dict() or "
            "streamshard.export_safetensors(model, directory), called on all ranks; to save what this rank has, clone "
            "it first"
        )


register_package(0, _refuse_storage, lambda storage, location: None)  # before those of torch, from 10 on


class StatePiece(torch.Tensor):
    """This rank's piece of an optimizer's state: fine to copy, compare and load again, an error to save.

    ``torch.save(optimizer.state_dict())`` would leave a file that holds 1/N of the state.
    """

    def __deepcopy__(self, memo: object) -> StatePiece:
        """Copies of a state dict are made to go back to it later."""
        return self.detach().clone().as_subclass(StatePiece)

    def refuse(self, *args: object) -> NoReturn:
        """Raise: it is not saved as if it were whole."""
        raise ShardingError(
            f"what is to be saved holds one rank's pieces (here {tuple(self.shape)}). Call on all ranks instead, to "
            "save a run, streamshard.save_checkpoint(directory, model, optimizer), for whole weights "
            "model.full_state_dict() or streamshard.export_safetensors(model, directory), for an optimizer's whole "
            "state streamshard.full_optimizer_state_dict(model, optimizer)"
        )

    __reduce_ex__ = numpy = __array__ = untyped_storage = refuse  # type: ignore[assignment]  # on purpose


def mark_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` whose tensors are `StatePiece`."""
    return _with_state(state_dict, lambda tensor: tensor.as_subclass(StatePiece) if tensor.ndim else tensor)


def unmark_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same with plain tensors."""
    return _with_state(state_dict, lambda tensor: tensor.as_subclass(torch.Tensor))


def _with_state(state_dict: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    state = {
        number: {key: _changed(value, change) for key, value in values.items()} if isinstance(values, dict) else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` made to it, or to the tensors that it is made of: codes and scales of quantized moments."""
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        inner = {name: _changed(getattr(value, name), change) for name in names}
        return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(each, change) for each in value)
    return change(value) if isinstance(value, torch.Tensor) else value
