"""Steps of the user's optimizers, and the state of each.

An optimizer that is known to work element by element steps on plain tensors, this rank's pieces. Any other optimizer
raises at its first step, on all ranks: `WholeParameterOptimizer` runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.asked_grads import refuse_step_without_backward
from streamshard.unit.elementwise import BLOCK_NUMEL, find_patch, is_elementwise_class, works_in_blocks
from streamshard.unit.pieces import Piece, mark_state, piece_of, unmark_state
from streamshard.unit.sharded_parameter import end_step, refuse_unreduced, show_plain
from streamshard.unit.sharded_tensor import ShardedTensor

__all__ = ["NUMBERS", "sees_steps", "take_over_state", "watch_optimizers"]

_HOST_NUMBERS = ("step", "mu_product")
NUMBERS = (*_HOST_NUMBERS, "eta", "mu")  # of a parameter that is one number itself, those that are no moments

_SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer", "DistributedFusedAdam", "DistributedFusedLAMB")

# The optimizers of pieces that have stepped, each with its hook that runs right before the step itself.
_seen: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """From the first sharded model on, look at each optimizer before it steps."""
    register_optimizer_step_pre_hook(_before_any_step)


@skip
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    untraced(_look_at, optimizer, _closure_of(args, kwargs))


def _closure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _look_at(optimizer: Optimizer, closure: Any) -> None:
    """From the first step on, the ``state_dict()`` of an optimizer of pieces holds `StatePiece`.

    Raises:
        ShardingError: the optimizer is not known to work element by element; a gradient or state is no piece.
    """
    if hasattr(optimizer, "owner_of"):  # WholeParameterOptimizer: the optimizers inside it are looked at
        return
    params = _params_of(optimizer)
    if optimizer not in _seen and all(piece_of(param) is None for param in params):
        return
    end_step(params)  # one that has failed
    if closure is None:
        refuse_unreduced(params, "an optimizer's step")
        refuse_step_without_backward(params)
    if optimizer in _seen:
        _seen[optimizer].remove()
    else:
        _refuse_unknown(optimizer)
        take_over_state(optimizer)
        optimizer.register_state_dict_post_hook(_mark_state)
        optimizer.register_load_state_dict_pre_hook(_cut_loaded_state)
    # Hooks of the user's, which may take norms of gradients, run outside of the two: the last hook before the step
    # itself, and what torch calls between the step itself and the hooks after it.
    _seen[optimizer] = optimizer.register_step_pre_hook(_before_step)
    optimizer._optimizer_step_code = functools.partial(_after_step, params)  # type: ignore[method-assign]


def _refuse_unknown(optimizer: Optimizer) -> None:
    """Raise unless every element's update is known to depend on that element alone, or on its block."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(each.__name__ in _SHARDING_OPTIMIZERS for each in kind.__mro__):
        raise ShardingError(
            f"{name} shares out whole parameters, and those of a StreamShard model are shared out already: use its "
            "inner optimizer, such as torch.optim.AdamW(model.parameters()), which holds 1/N of the state here"
        )
    run = f"streamshard.optim.WholeParameterOptimizer(model.parameters(), {kind.__name__}, ..)"
    if not is_elementwise_class(kind):
        raise ShardingError(
            f"{name} is not known to work element by element, and each rank has pieces of parameters. To step whole "
            f"parameters, each on one rank, write optimizer = {run}. If the update of each element depends on that "
            f"element's gradient, weight and state alone, declare it: streamshard.optim.elementwise({kind.__name__})"
        )
    if (patched := find_patch(optimizer)) is not None:
        raise ShardingError(
            f"{name} works element by element, but {patched!r} of this one was replaced, so that is not known of it: "
            f"use the optimizer as it is, declare a subclass with streamshard.optim.elementwise, or write {run}"
        )
    if _takes_norms(optimizer):
        raise ShardingError(
            f"{name} with max_unorm, percentile_clipping or block_wise=False takes norms of parameters or gradients in "
            "its kernels, of this rank's pieces alone: leave these options away, and use model.clip_grad_norm_"
        )
    if works_in_blocks(kind):
        _refuse_cut_blocks(name, optimizer)


def _refuse_cut_blocks(name: str, optimizer: Optimizer) -> None:
    for param in _params_of(optimizer):
        piece = piece_of(param)
        if piece is None:
            continue
        starts = [piece.range_of(rank).start for rank in range(piece.ranks.world_size)]
        if any(start % BLOCK_NUMEL for start in starts):
            raise ShardingError(
                f"{name} keeps state in blocks of elements, and {piece.name!r} is cut between ranks within a block: "
                f"write StreamShard(model, align_pieces_to={BLOCK_NUMEL})"
            )


@skip
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The step itself begins."""
    params = _params_of(optimizer)
    untraced(show_plain, params)
    closure = _closure_of(args, kwargs)
    if closure is None:
        return None

    def shown() -> Any:
        """The user's closure, which makes gradients inside the step, sees and makes them all."""
        end_step(params)
        loss = closure()
        refuse_unreduced(params, "an optimizer's step")
        show_plain(params)
        return loss

    return ((args[0], shown, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": shown})


@skip
def _after_step(params: list[torch.Tensor]) -> None:
    """The step itself is over."""
    untraced(end_step, params)


def sees_steps(optimizer: Optimizer) -> bool:
    """Whether hooks of torch run before each change that `optimizer` makes to its state.

    They do not before a step of a wrapper, but before that of what is inside; nor when a device graph is replayed.
    """
    if any(group.get("capturable") for group in optimizer.param_groups):
        return False
    if getattr(type(optimizer).step, "hooked", False):  # torch marks what it has wrapped so
        return True
    inner = getattr(optimizer, "optimizer", None)
    return isinstance(inner, Optimizer) and inner.state is optimizer.state and sees_steps(inner)


def take_over_state(optimizer: Optimizer) -> None:
    """Cut whole moments, from before the model was sharded or from an unsharded run, into this rank's pieces.

    They are where the parameters are, which may have moved when the model was sharded.

    Raises:
        ShardingError: state is neither whole nor this rank's piece.
    """
    if (in_place := getattr(optimizer, "in_place", None)) is not None:  # of a WholeParameterOptimizer
        for inner in in_place():
            take_over_state(inner)
        return
    moves = _is_of_torch(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            piece, values = piece_of(param), optimizer.state.get(param)
            if piece is not None and values:
                values.update(_cut(optimizer, piece, values))
                if moves:
                    values.update(_moved(values, group, param.device))


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _cut(optimizer: Optimizer, piece: Piece, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the `values` kept for a parameter that are to be replaced by pieces of them."""
    plain: dict[str, torch.Tensor] = {}
    changed: dict[str, torch.Tensor] = {}
    others = []
    for name, value in values.items():
        if isinstance(value, ShardedTensor):  # made by the constructor
            plain[name] = value.as_subclass(torch.Tensor)
            continue
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == piece.local_shape:
            continue
        if is_traceable_wrapper_subclass(value):
            others.append(name)
        elif tuple(value.shape) == piece.shape and (value.ndim or name not in NUMBERS):
            changed[name] = piece.cut(value)
        elif value.ndim and not _is_of_torch(optimizer):
            others.append(name)
        elif value.ndim:
            raise ShardingError(
                f"optimizer state {name!r} of {piece.name!r} has shape {tuple(value.shape)}: wanted {piece.shape}, the "
                f"whole, or {piece.local_shape}, this rank's piece. State of another number of ranks is collected by "
                "full_optimizer_state_dict there and loaded by load_optimizer_state_dict"
            )
    quantized = [name for name in others if tuple(values[name].shape) == piece.shape]
    if quantized or changed and others:
        raise ShardingError(
            f"optimizer state {(quantized or others)[0]!r} of {piece.name!r}, of the whole parameter, is quantized or "
            "kept for more than one element, and cannot be cut: begin with new moments"
        )
    return plain | changed


def _moved(values: Mapping[str, Any], group: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Those of the `values` that are on another device than `device`, there.

    Numbers that torch makes in the host's memory, to read them there, stay in it.
    """
    stay = () if group.get("fused") or group.get("capturable") else _HOST_NUMBERS
    return {
        name: value.to(device)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.device != device and name not in stay
    }


def _takes_norms(optimizer: Optimizer) -> bool:
    """Whether an optimizer of bitsandbytes was asked to, inside its kernels, of parameters or gradients."""
    asked = getattr(optimizer, "args", None)
    if not type(optimizer).__module__.startswith("bitsandbytes.") or asked is None:
        return False
    is_clipping = getattr(asked, "max_unorm", 0.0) > 0.0 or getattr(asked, "percentile_clipping", 100) < 100
    return is_clipping or not getattr(asked, "block_wise", True)


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether all tensors in its state have an element for each of the parameter's, or one."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _mark_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return mark_state(state_dict)


def _cut_loaded_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before ``load_state_dict`` changes anything: whole moments are cut, what does not fit raises."""
    plain = unmark_state(state_dict)
    numbers = [number for group in plain["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, _params_of(optimizer), strict=False):  # torch compares their numbers
        piece, values = piece_of(param), plain["state"].get(number)
        if piece is not None and values:
            values.update(_cut(optimizer, piece, values))
    return plain
