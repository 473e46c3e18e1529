"""What is seen of the user's optimizers: hooks of torch around the steps of all, and around the state of each.

An optimizer that is known to work element by element steps on plain tensors, this rank's pieces (see
`streamshard.unit.step_grads`), for which it has fast kernels. Any other sees what its user sees: parameters, gradients
and state that know what they are pieces of, of which norms, sums and noise are those of the whole, and which refuse
what would not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.pieces import Piece, mark_state, piece_of, unmark_state
from streamshard.unit.sharded_tensor import ShardedTensor
from streamshard.unit.sharding import Sharding
from streamshard.unit.step_grads import count_as_written, end_step, show_plain
from streamshard.unit.unreduced_grad import UnreducedGrad

__all__ = ["NUMBERS", "before_step", "is_elementwise", "sees_steps", "take_over_state"]

_HOST_NUMBERS = ("step", "mu_product")
NUMBERS = (*_HOST_NUMBERS, "eta", "mu")  # of a parameter that is one number itself, those that are no moments

# Element by element, or block by block, in kernels of their own or compiled ones, but for those below.
_ELEMENTWISE_PACKAGES = (
    *("torch.optim", "apex", "bitsandbytes", "deepspeed", "lion_pytorch", "schedulefree", "torchao"),
    "transformer_engine",
)
_WHOLE_MATRIX_OPTIMIZERS = frozenset(
    (
        *("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "LARS"),
        *("FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"),
        *("FusedLamb", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
        *("LAMB8bit", "LAMB32bit", "LARS8bit", "LARS32bit", "PytorchLARS"),
    )
)
_SHARDING_OPTIMIZERS = frozenset(("ZeroRedundancyOptimizer", "DistributedFusedAdam", "DistributedFusedLAMB"))


class _Hooks(NamedTuple):
    """The hooks of one optimizer: right before and right after its step, inside of all that the user has registered."""

    before: RemovableHandle
    after: RemovableHandle

    def be_innermost(self, optimizer: Optimizer) -> None:
        """Hooks that the user has registered meanwhile, which may take norms of gradients, see all of them."""
        before: Any = optimizer._optimizer_step_pre_hooks  # ordered dicts, which torch declares as plain ones
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(self.before.id)
        after.move_to_end(self.after.id, last=False)


_watched: WeakKeyDictionary[Optimizer, _Hooks] = WeakKeyDictionary()


@skip
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps.

    From the first one on the ``state_dict()`` of an optimizer of pieces holds `StatePiece`: saved on one rank it would
    look like the whole.

    Raises:
        ShardingError: the update of one element is known to depend on others; a gradient or state is no piece.
    """
    untraced(_look_at, optimizer, _closure_of(args, kwargs))


def _closure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _look_at(optimizer: Optimizer, closure: Any) -> None:
    if hasattr(optimizer, "owner_of"):  # WholeParameterOptimizer: the optimizers inside it are looked at
        return
    params = _params_of(optimizer)
    is_new = optimizer not in _watched
    if is_new and all(piece_of(param) is None for param in params):
        return
    end_step(params)  # one that has failed
    if closure is None:
        _check_grads(params)
    if is_new or not is_elementwise(optimizer):
        take_over_state(optimizer)
    if not is_new:
        _watched[optimizer].be_innermost(optimizer)
        return
    name, names = type(optimizer).__name__, {kind.__name__ for kind in type(optimizer).__mro__}
    if names & _WHOLE_MATRIX_OPTIMIZERS and _is_of(optimizer, _ELEMENTWISE_PACKAGES) or _takes_norms(optimizer):
        raise ShardingError(
            f"{name} looks at whole parameters, each rank holds pieces of them: use an elementwise optimizer (AdamW, "
            "SGD, ..) with StreamShard"
        )
    if names & _SHARDING_OPTIMIZERS:
        raise ShardingError(
            f"{name} shares out whole parameters, and those of a StreamShard model are shared out already: use its "
            "inner optimizer, torch.optim.AdamW(model.parameters()) for example, which holds 1/N of the state here"
        )
    hooks = _Hooks(optimizer.register_step_pre_hook(_before_step), optimizer.register_step_post_hook(_after_step))
    hooks.be_innermost(optimizer)
    _watched[optimizer] = hooks
    optimizer.register_state_dict_post_hook(_mark_state)
    optimizer.register_load_state_dict_pre_hook(_cut_loaded_state)


@skip
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The step itself begins."""
    params = _params_of(optimizer)
    begin = show_plain if is_elementwise(optimizer) else count_as_written
    untraced(begin, params)
    closure = _closure_of(args, kwargs)
    if closure is None:
        return None

    def shown() -> Any:
        """The user's closure, which makes gradients inside the step, sees and makes them all."""
        end_step(params)
        try:
            return closure()
        finally:
            begin(params)

    return ((args[0], shown, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": shown})


@skip
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The step itself is over."""
    untraced(end_step, _params_of(optimizer))


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

    They are where the parameters are, which may have moved when the model was sharded. Of an optimizer that is not
    known to work element by element they know what they are.

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


def _check_grads(params: list[torch.Tensor]) -> None:
    """Those that wait are no gradients yet, on any rank, whatever it has of them."""
    for param in params:
        if isinstance(grad := param.grad, UnreducedGrad):
            grad.refuse("an optimizer's step")


def _cut(optimizer: Optimizer, piece: Piece, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the `values` kept for a parameter that are to be replaced by pieces of them."""
    changed: dict[str, torch.Tensor] = {}
    others = []
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor):
            continue
        if value.shape == piece.local_shape:
            if type(value) is torch.Tensor and not is_elementwise(optimizer):
                ShardedTensor.wrap(value, Sharding.of_piece(piece, is_weight=False))
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
    return changed


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
    if not _is_of(optimizer, ("bitsandbytes",)) or asked is None:
        return False
    is_clipping = getattr(asked, "max_unorm", 0.0) > 0.0 or getattr(asked, "percentile_clipping", 100) < 100
    return is_clipping or not getattr(asked, "block_wise", True)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the class that it is of, or the one whose ``step`` that has, is known to be."""
    kind = type(optimizer)
    return _is_in_elementwise_package(kind.__module__) or _is_in_elementwise_package(
        getattr(kind.step, "__module__", "")
    )


@cache  # it is asked several times in each step
def _is_in_elementwise_package(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in _ELEMENTWISE_PACKAGES)


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether all tensors in its state have an element for each of the parameter's, or one."""
    return _is_of(optimizer, ("torch.optim",))


def _is_of(optimizer: Optimizer, packages: tuple[str, ...]) -> bool:
    """Whether a class that it is of, beside torch's base class, is defined in one of `packages`."""
    kinds = [kind.__module__ + "." for kind in type(optimizer).__mro__ if kind is not Optimizer]
    return any(kind.startswith(package + ".") for kind in kinds for package in packages)


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
