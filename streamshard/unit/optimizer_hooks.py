"""What is seen of the user's optimizers: hooks of torch around the steps of all, and around the state of each.

Before a step gradients and state are what the optimizer takes them for, this rank's pieces. The first step is watched
(see `streamshard.unit.first_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch.optim import Optimizer

from streamshard.errors import ShardingError
from streamshard.unit.first_step import FirstStep, first_step, refuse_optimizer
from streamshard.unit.pieces import Piece, StatePiece, piece_of
from streamshard.unit.sharded_grad import ShardedGrad, know_grads

__all__ = ["NUMBERS", "after_step", "before_step", "take_over_state"]

NUMBERS = ("step", "eta", "mu", "mu_product")  # of a parameter that is one number itself, those that are no moments

_WHOLE_MATRIX_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "LARS")

_watched: WeakSet[Optimizer] = WeakSet()


@skip
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps.

    A compiled step, which could not be watched, is given plain gradients: what looks into them would be traced.

    From the first one on the ``state_dict()`` of an optimizer of pieces holds `StatePiece`: saved on one rank it would
    look like the whole.

    Raises:
        ShardingError: the update of one element is known to depend on others; a gradient or state is no piece.
    """
    is_compiled = get_eval_frame_callback() not in (None, False)
    look = torch._dynamo.disable(_look_at) if is_compiled else _look_at
    look(optimizer, args, kwargs, is_compiled)


def _look_at(optimizer: Optimizer, args: Any, kwargs: Any, is_compiled: bool) -> None:
    params = _params_of(optimizer)
    is_new = optimizer not in _watched
    if is_new and all(piece_of(param) is None for param in params):
        return
    _check_grads(params)
    if is_compiled:
        for param in params:
            if isinstance(param.grad, ShardedGrad):
                param.grad = param.grad.as_subclass(torch.Tensor)
    if not is_new:
        return
    name = type(optimizer).__name__
    if name in _WHOLE_MATRIX_OPTIMIZERS:
        refuse_optimizer(name)
    if name == "ZeroRedundancyOptimizer":
        raise ShardingError(
            f"{name} shares out whole parameters, and those of a StreamShard model are shared out already: use its "
            "inner optimizer, torch.optim.AdamW(model.parameters()) for example, which holds 1/N of the state here"
        )
    take_over_state(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not is_compiled:
        first_step.append(FirstStep(optimizer, getattr(getattr(closure, "func", closure), "__code__", None)))
    elif not _is_of_torch(optimizer):
        raise ShardingError(
            f"the first step of {name} is compiled, so that nobody can see whether it looks at whole parameters, of "
            "which each rank holds pieces: step once as it is, then compile"
        )
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_mark_state)
    optimizer.register_load_state_dict_pre_hook(_cut_loaded_state)


@skip
def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook after optimizer steps: nothing unusual was seen in the first one."""
    first_step.clear()
    if get_eval_frame_callback() not in (None, False):
        torch._dynamo.disable(know_grads)(_params_of(optimizer))


def take_over_state(optimizer: Optimizer) -> None:
    """Cut whole moments, from before the model was sharded or from an unsharded run, into this rank's pieces.

    Raises:
        ShardingError: state is neither whole nor this rank's piece.
    """
    for param in _params_of(optimizer):
        piece, values = piece_of(param), optimizer.state.get(param)
        if piece is not None and values:
            values.update(_cut(optimizer, piece, param, values))


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _check_grads(params: list[torch.Tensor]) -> None:
    """Plain tensors as gradients become known as pieces; were they changed in place, nobody knows by what norm."""
    for param in params:
        grad = param.grad
        if type(grad) is not torch.Tensor or grad.is_inference():  # which have no versions
            continue
        if grad._version and (piece := piece_of(param)) is not None:
            raise ShardingError(
                f"the gradient of {piece.name!r} is a tensor of your own, changed in place since (clipped? unscaled?) "
                "where nobody could know that it is one rank's piece: a norm taken of it was this rank's alone. Make "
                "it from p.grad, element by element, or hand model.parameters() to what changes it, rather than a list "
                "made before"
            )
    know_grads(params)


def _cut(optimizer: Optimizer, piece: Piece, param: torch.Tensor, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the `values` kept for `param` that are to be replaced by pieces of them."""
    changed = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or value.shape == param.shape:
            continue
        if tuple(value.shape) == piece.shape and (value.ndim or name not in NUMBERS):
            changed[name] = piece.cut(value)
        elif value.ndim and _is_of_torch(optimizer):
            raise ShardingError(
                f"optimizer state {name!r} of {piece.name!r} has shape {tuple(value.shape)}: wanted {piece.shape}, the "
                f"whole, or {tuple(param.shape)}, this rank's piece. State of another number of ranks is collected by "
                "full_optimizer_state_dict there and loaded by load_optimizer_state_dict"
            )
    return changed


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether all tensors in its state have an element for each of the parameter's, or one."""
    return any(kind.__module__.startswith("torch.optim.") for kind in type(optimizer).__mro__ if kind is not Optimizer)


def _mark_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_state(state_dict, lambda tensor: tensor.as_subclass(StatePiece) if tensor.ndim else tensor)


def _cut_loaded_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before ``load_state_dict`` changes anything: whole moments are cut, what does not fit raises."""
    plain = _with_state(state_dict, lambda tensor: tensor.as_subclass(torch.Tensor))
    numbers = [number for group in plain["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, _params_of(optimizer), strict=False):  # torch compares their numbers
        piece, values = piece_of(param), plain["state"].get(number)
        if piece is not None and values:
            values.update(_cut(optimizer, piece, param, values))
    return plain


def _with_state(state_dict: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    state = {
        number: {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
