"""Steps of the user's optimizers, and their state: cut when it comes, late steps carried out when it is read.

An optimizer that is known to work element by element steps on plain tensors, this rank's pieces
(`streamshard.core.optimizer_kinds`). Any other optimizer raises at its first step, on all ranks.

[Note: plain steps]
torch has fast kernels for plain tensors only, and optimizers take norms and shapes of the pieces that they step. So a
step runs on a stand-in: an optimizer of the same class with the same options, state and attributes, whose parameters
are plain tensors in the memory of the pieces. Afterwards the optimizer takes the stand-in's state and attributes.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from streamshard.core.late_step import NUMBERS, host_of, late_steps
from streamshard.core.optimizer_kinds import (
    full_name,
    inner_optimizers,
    is_declared,
    is_elementwise_class,
    params_in,
    refuse_on_host,
    refuse_optimizer,
    steps_whole,
)
from streamshard.errors import ShardingError
from streamshard.forms import successor
from streamshard.guards.loop import check_step, note_step
from streamshard.guards.piece import Piece
from streamshard.guards.sharded_parameter import ShardedParameter, data_of, own_attributes, refuse_unreduced
from streamshard.guards.sharded_tensor import ShardedTensor, piece_of
from streamshard.torch_private import AsTensors, get_grad, untraced

_params_of = operator.itemgetter("params")
_HOOK: Any = "streamshard"  # the key of this module's hooks among an optimizer's hooks; torch's keys are numbers
_PLAIN = "_streamshard_plain"  # attribute of a stand-in: its parameters, by the sharded parameter
_LATE = "_streamshard_late"  # attribute of a stand-in: the late steps of models in host memory


@functools.cache  # torch's hook is global, and would look twice
def watch_optimizers() -> None:
    """From the first sharded model on, look at each optimizer before it steps."""
    # The hook of all optimizers: one may be older than the model, or inside another one.
    register_optimizer_step_pre_hook(functools.partial(untraced, _look_at))
    register_optimizer_step_post_hook(functools.partial(untraced, note_step))


def _look_at(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check `optimizer`, and let its step run on plain tensors.

    Raises:
        ShardingError: the optimizer is not known to work element by element; a gradient or state is no piece.
    """
    params: list[Any] = list(itertools.chain.from_iterable(map(_params_of, optimizer.param_groups)))
    check_step(params, makes_grads=any(map(callable, (*args[1:], *kwargs.values()))))  # by a closure
    hooks: Any = optimizer._optimizer_step_pre_hooks
    if _HOOK not in hooks:
        if steps_whole(optimizer):  # the optimizers inside it are looked at
            refuse_on_host(optimizer, params, "steps whole parameters")
            return
        if ShardedParameter not in map(type, params):  # isinstance() asks the metaclass of nn.Parameter, in Python
            _lend_full_grads(optimizer, params)
            return
        if not is_elementwise_class(type(optimizer)) and not any(map(piece_of, params)):
            settle_state(optimizer)  # it steps whole parameters in host memory, at once
            return
        if is_declared(type(optimizer)) and inner_optimizers(optimizer):
            return  # sharded parameters answer its own operations or refuse them, and the other one is looked at
        _adopt(optimizer)  # torch calls the new hook in this step too: it comes to the optimizer's own hooks next
    hooks.move_to_end(_HOOK)  # the last hook before the step itself: hooks of the user's may replace gradients


def follow_model(optimizer: Optimizer) -> None:
    """Give `optimizer`, which was made before its model was sharded, the model's parameters in the place of DTensors.

    Raises:
        ShardingError: the optimizer has stepped DTensors.
    """
    for group in optimizer.param_groups:
        now = [successor(param) for param in group["params"]]
        for param, other in zip(group["params"], now, strict=True):
            if other is not param and optimizer.state.get(param):
                what = f"{full_name(type(optimizer))} has stepped DTensors before StreamShard(model)"
                raise ShardingError(f"{what}: make the optimizer of model.parameters() afterwards")
        group["params"] = now


def _adopt(optimizer: Optimizer) -> None:
    """An optimizer is about to step pieces for the first time."""
    refuse_optimizer(optimizer)
    take_over_state(optimizer)
    optimizer.register_state_dict_pre_hook(settle_state)
    if any(map(piece_of, params_in(optimizer.param_groups))):
        optimizer.register_state_dict_post_hook(lambda _, state_dict: PiecesOfState(state_dict))
    optimizer.register_load_state_dict_pre_hook(cut_loaded_state)
    after: Any = optimizer._optimizer_step_post_hooks
    after[_HOOK] = functools.partial(untraced, _after_step, is_declared(type(optimizer)))
    after.move_to_end(_HOOK, last=False)  # so the user's hooks see the changes
    optimizer._optimizer_step_pre_hooks[_HOOK] = functools.partial(untraced, _before_step)


def _lend_full_grads(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """On a single rank, make full gradients plain tensors until the step is over: compiled steps take no others."""
    lent = []
    with AsTensors():
        for param in params:
            grad = param.grad
            if isinstance(grad, ShardedTensor) and not grad.why_unusable:  # else the step raises
                param.grad = plain = grad.detach()
                lent.append((param, plain, grad))
    if lent:
        optimizer._optimizer_step_post_hooks[_HOOK] = functools.partial(untraced, _return_full_grads, lent)


def _return_full_grads(lent: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]], *_: Any) -> None:
    while lent:
        param, plain, grad = lent.pop()
        if param.grad is plain:  # else the step has cleared it, or its closure has made another one
            param.grad = grad


# -- plain steps ------------------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The step itself begins: let it run on a stand-in. See [Note: plain steps]."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    closure = closure if callable(closure) else None
    plain: dict[ShardedParameter, nn.Parameter] = {}
    groups, on_host = [], []
    for group in optimizer.param_groups:
        params = []
        for param in group["params"]:
            if not isinstance(param, ShardedParameter):
                params.append(param)
            elif param.piece.is_on_host and host_of(param) is not None:  # its model may be gone
                on_host.append(param)
            else:
                plain[param] = param.plain
                params.append(param.plain)
        groups.append({**group, "params": params})
    if not plain and not on_host:  # a step that calls super().step(): the optimizer is the stand-in already
        return None
    if on_host and closure is not None:
        with torch.enable_grad():
            loss = closure()  # a late step needs the gradients now
        args, kwargs, closure = (optimizer, lambda: loss), {}, None
    late = late_steps(optimizer, on_host) if on_host else []
    kept: Any = optimizer.state  # keys may be names
    keys: Any = map(plain.get, kept, kept)
    state = defaultdict(dict, zip(keys, kept.values(), strict=True))
    stand_in: Any = object.__new__(type(optimizer))  # its constructor would want arguments
    stand_in.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": state, _PLAIN: plain, _LATE: late}
    _lend_grads(plain, are_made=closure is None)
    if closure is None:
        return (stand_in, *args[1:]), kwargs

    def called() -> Any:
        """The user's closure, which makes gradients inside the step."""
        loss = closure()
        untraced(_lend_grads, plain)
        return loss

    return ((stand_in, called, *args[2:]), kwargs) if len(args) > 1 else ((stand_in,), {**kwargs, "closure": called})


def _lend_grads(plain: Mapping[ShardedParameter, nn.Parameter], *, are_made: bool = True) -> None:
    """Give plain parameters their gradients, and the attributes that the user has set (``p.lr_scale = 2``).

    Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip the tensors before an empty tensor, or
    write beside it. With many ranks most pieces are empty. So a piece without elements has no gradient in a step.
    Outside of a step it has an empty gradient: ranks must take the same number of norms. See decision 14.

    Args:
        plain: by sharded parameter.
        are_made: no closure is about to make the gradients, so all have to be reduced.

    Raises:
        ShardingError: a gradient is not reduced.
    """
    if are_made:
        refuse_unreduced(plain, "an optimizer's step")
    with AsTensors():
        for param, each in plain.items():
            grad = get_grad(param)
            # Detached is no view: compilers look at `_base`.
            each.grad = None if grad is None or not grad.numel() else grad.detach()
            if each.requires_grad is not param.requires_grad:
                each.requires_grad = param.requires_grad
            if len(param.__dict__) > 3:  # beside `piece`, `plain` and `whole_class`
                each.__dict__.update(own_attributes(param))


def _after_step(is_unknown: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The step itself is over: take options, state and attributes from the stand-in."""
    if args[0] is optimizer:  # a step that calls super().step(): the optimizer is the stand-in already
        return
    stepped = dict(args[0].__dict__)
    plain: dict[ShardedParameter, nn.Parameter] = stepped.pop(_PLAIN)
    for host, step in stepped.pop(_LATE):
        for unit, params in step.changed.items():
            unit.count_step(params)
        step.changed.clear()
        host.add_step(step)
        if step.makes_state:  # who reads `optimizer.state` finds every entry
            host.settle()
    for group, theirs in zip(optimizer.param_groups, stepped.pop("param_groups"), strict=True):
        group.update({**theirs, "params": group["params"]})
    sharded = dict(zip(plain.values(), plain, strict=True))
    optimizer.state.clear()
    state = stepped.pop("state")
    optimizer.state.update(zip(map(sharded.get, state, state), state.values(), strict=True))
    optimizer.__dict__.update(stepped)
    if is_unknown:  # classes of the list do none of this
        _refuse_kept_grads(optimizer, plain)
        for param, each in plain.items():
            if each.data_ptr() != (own := data_of(param).as_subclass(torch.Tensor)).data_ptr():  # ``p.data = ...``
                own.copy_(each.data)
                each.data = own
    changed: list[torch.Tensor] = []
    with AsTensors():
        for param, each in plain.items():
            each.grad = None
            if get_grad(param) is not None:
                changed.append(param)
    # On all ranks, also those without elements of a parameter: a backward of an earlier forward raises everywhere.
    torch.autograd.graph.increment_version(changed)


def _refuse_kept_grads(optimizer: Optimizer, plain: Mapping[ShardedParameter, nn.Parameter]) -> None:
    """Raise if a gradient itself, not a copy of it, has become state: the next backward writes to its memory."""
    for param, each in plain.items():
        for key, value in optimizer.state.get(param, {}).items():
            kept = value.untyped_storage() if isinstance(value, torch.Tensor) and each.grad is not None else None
            if kept is not None and kept.data_ptr() == each.grad.untyped_storage().data_ptr():  # type: ignore[union-attr]
                raise ShardingError(
                    f"{full_name(type(optimizer))} keeps the gradient of {param.piece.name!r} in its state, as {key!r},"
                    " and the next backward writes to its memory: let the optimizer keep grad.clone()"
                )


# -- state -----------------------------------------------------------------------------------------------------------


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
        # Of other packages a tensor of another shape may be scales of blocks, and a full one may be no moment.
        is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        if is_full and is_of_torch:
            values[name] = piece.cut(value).to(device)
        elif is_full or value.ndim and is_of_torch:
            raise ShardingError(
                f"optimizer state {name!r} of {piece.name!r} has shape {tuple(value.shape)}: wanted {piece.local_shape}"
                ", this rank's piece. Make the optimizer after StreamShard(model), and load full state, or state of "
                "another number of ranks, with load_optimizer_state_dict(model, optimizer, state)"
            )
