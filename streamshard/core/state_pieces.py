"""The state of optimizers that step on pieces: cut when it comes, late steps carried out when it is read."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from streamshard.core.late_step import NUMBERS, host_of
from streamshard.core.optimizer_kinds import params_in, steps_whole
from streamshard.errors import ShardingError
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_tensor import ShardedTensor, piece_of


class PiecesOfState(dict[str, Any]):
    """This rank's part of an optimizer's ``state_dict()``: fine to copy and to load again, an error to save."""

    def __deepcopy__(self, memo: Any) -> PiecesOfState:
        return PiecesOfState(copy.deepcopy(dict(self), memo))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            "an optimizer's state_dict() holds one rank's pieces and is not saved as if it were full. Call on all "
            "ranks instead, to save a run, streamshard.save_checkpoint(directory, model, optimizer); for an "
            "optimizer's full state, streamshard.full_optimizer_state_dict(model, optimizer)"
        )


def settle_state(optimizer: Optimizer) -> None:
    """The optimizer's state is about to be read or written: late steps are carried out."""
    for host in {host_of(param) for param in params_in(optimizer.param_groups)}:
        if host is not None:
            host.settle()


def take_over_state(optimizer: Optimizer) -> None:
    """Cut full moments, from before the model was sharded, into this rank's pieces, and move state to the parameters.

    Step counts stay where the optimizer's class reads them: on the CPU, unless it is fused or capturable.

    Raises:
        ShardingError: state is neither full nor this rank's piece.
    """
    if (whole := steps_whole(optimizer)) is not None:
        for inner in whole.in_place():
            take_over_state(inner)
        return
    settle_state(optimizer)
    for group in optimizer.param_groups:
        stay = () if group.get("fused") or group.get("capturable") else NUMBERS
        for param in group["params"]:
            piece, values = piece_of(param), optimizer.state.get(param)
            if piece is not None and values:
                _cut(optimizer, piece, values, param.device)
                moving = [key for key, value in values.items() if isinstance(value, torch.Tensor) and key not in stay]
                values.update({key: values[key].to(param.device) for key in moving})


def cut_loaded_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before ``load_state_dict`` changes anything: cut full moments, and raise for other shapes."""
    settle_state(optimizer)
    state = {number: dict(values) for number, values in state_dict["state"].items()}
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, params_in(optimizer.param_groups), strict=False):  # torch compares their numbers
        piece = piece_of(param)
        if piece is not None and number in state:
            _cut(optimizer, piece, state[number], param.device)
    return {**state_dict, "state": state}


def _cut(optimizer: Optimizer, piece: Piece, values: dict[str, Any], device: torch.device) -> None:
    """Replace full tensors in `values`, the state of one parameter, by this rank's pieces."""
    for name, value in values.items():
        if isinstance(value, ShardedTensor):  # made by the constructor
            values[name] = value.as_subclass(torch.Tensor)
            continue
        if not isinstance(value, torch.Tensor) or value.shape == piece.local_shape:
            continue
        is_full = tuple(value.shape) == piece.shape and (value.ndim > 0 or name not in NUMBERS)
        is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        if is_full and is_of_torch:
            values[name] = piece.cut(value).to(device)
        elif is_full or value.ndim and is_of_torch:
            raise ShardingError(
                f"optimizer state {name!r} of {piece.name!r} has shape {tuple(value.shape)}: wanted {piece.local_shape}"
                ", this rank's piece. Make the optimizer after StreamShard(model), and load full state, or state of "
                "another number of ranks, with load_optimizer_state_dict(model, optimizer, state)"
            )
