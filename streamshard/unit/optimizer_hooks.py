"""Steps of the user's optimizers, and the state of each.

An optimizer that is known to work element by element steps on plain tensors, this rank's pieces. Known means the exact
class: a subclass may do anything, and so may another class of the same package. `elementwise` declares further ones.
Any other optimizer raises at its first step, on all ranks: `WholeParameterOptimizer` runs it.

[Note: plain steps]
torch has fast kernels for plain tensors only, and optimizers take norms and shapes of the pieces that they step. So
each sharded parameter has a plain Parameter beside it, on the same memory and version counter. The step itself runs on
a shallow copy of the optimizer whose groups and state have these in the place of the sharded parameters. The user's
optimizer, parameters and gradients are not touched, so a step that fails leaves nothing behind.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.comm.communicator import Communicator
from streamshard.errors import ConfigError, ShardingError
from streamshard.torch_private import AsTensors, skip, untraced
from streamshard.unit.sharded_parameter import data_of, grad_of, refuse_unreduced
from streamshard.unit.sharded_tensor import CALL_BACKWARD, Piece, ShardedTensor, piece_of

__all__ = [
    "BLOCK_NUMEL",
    "NUMBERS",
    "PiecesOfState",
    "elementwise",
    "graph_is_made",
    "graph_is_reached",
    "is_elementwise_class",
    "take_over_state",
    "watch_optimizers",
]

NUMBERS = ("step", "mu_product", "eta", "mu")  # of a parameter that is one number itself, state that is no moment

# -- optimizers that work element by element --------------------------------------------------------------------------


def _in(module: str, *names: str) -> set[str]:
    return {f"{module}.{name}" for name in names}


# By the full names of their definitions.
_KNOWN = {
    *(f"torch.optim.{name.lower()}.{name}" for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")),
    *(f"torch.optim.{name.lower()}.{name}" for name in ("Adagrad", "Adadelta", "Rprop", "ASGD")),
    "schedulefree.sgd_schedulefree.SGDScheduleFree",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "schedulefree.radam_schedulefree.RAdamScheduleFree",
    "lion_pytorch.lion_pytorch.Lion",
    *_in("bitsandbytes.optim.sgd", "SGD", "SGD32bit"),
    *_in("bitsandbytes.optim.adam", "Adam", "Adam32bit", "PagedAdam", "PagedAdam32bit"),
    *_in("bitsandbytes.optim.adamw", "AdamW", "AdamW32bit", "PagedAdamW", "PagedAdamW32bit"),
    *_in("bitsandbytes.optim.lion", "Lion", "Lion32bit", "PagedLion", "PagedLion32bit"),
    *_in("bitsandbytes.optim.rmsprop", "RMSprop", "RMSprop32bit"),
    *_in("bitsandbytes.optim.adagrad", "Adagrad", "Adagrad32bit"),
}
# Moments in blocks of as many elements at most have a scale each: known on pieces that are cut between blocks.
_IN_BLOCKS = {
    *_in("bitsandbytes.optim.sgd", "SGD8bit"),
    *_in("bitsandbytes.optim.adam", "Adam8bit", "PagedAdam8bit"),
    *_in("bitsandbytes.optim.adamw", "AdamW8bit", "PagedAdamW8bit"),
    *_in("bitsandbytes.optim.lion", "Lion8bit", "PagedLion8bit"),
    *_in("bitsandbytes.optim.rmsprop", "RMSprop8bit"),
    *_in("bitsandbytes.optim.adagrad", "Adagrad8bit"),
    *_in("torchao.optim.adam", "Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"),
}
BLOCK_NUMEL = 4096  # the packages leave smaller tensors in fp32, and a multiple of all their blocks

_Class = TypeVar("_Class", bound=type[Optimizer])
_declared: set[type] = set()


def elementwise(optimizer_class: _Class) -> _Class:
    """Declare that an optimizer works element by element, so that it may step on pieces of parameters.

    The update of each element may depend on that element's gradient, weight and state, and on numbers that are the same
    for all elements; not on a norm, a mean, a shape or a neighbour. Nothing checks this. Can be used as a decorator.

    Args:
        optimizer_class: exactly this class; subclasses have to be declared by themselves.

    Returns:
        The same class.

    Raises:
        ConfigError: it is no optimizer's class.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigError(f"elementwise({optimizer_class!r}): wanted a subclass of torch.optim.Optimizer")
    _declared.add(optimizer_class)
    return optimizer_class


def is_elementwise_class(kind: type) -> bool:
    """Whether `kind` is known, or declared, to work element by element, perhaps in blocks of `BLOCK_NUMEL`."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return kind in _declared or name in _KNOWN or name in _IN_BLOCKS


def works_in_blocks(kind: type) -> bool:
    """Whether pieces of parameters have to be cut between blocks of `BLOCK_NUMEL` for `kind`."""
    return kind not in _declared and f"{kind.__module__}.{kind.__qualname__}" in _IN_BLOCKS


# -- hooks ------------------------------------------------------------------------------------------------------------

# The optimizers of pieces that have stepped, each with its hook that runs right before the step itself.
_seen: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
# Models that have run forward with gradients, and not backward since.
_unreached: WeakSet[Communicator] = WeakSet()


@functools.cache
def watch_optimizers() -> None:
    """From the first sharded model on, look at each optimizer before it steps."""
    register_optimizer_step_pre_hook(_before_any_step)


def graph_is_made(ranks: Communicator) -> None:
    """A forward of the model that `ranks` train has made a graph."""
    _unreached.add(ranks)


def graph_is_reached(ranks: Communicator) -> None:
    """A backward has come to a graph of that model."""
    _unreached.discard(ranks)


@skip
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    untraced(_look_at, optimizer, _closure_of(args, kwargs))


def _closure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _look_at(optimizer: Optimizer, closure: Any) -> None:
    """Check `optimizer`, and let its step run on plain tensors.

    Raises:
        ShardingError: the optimizer is not known to work element by element; a gradient or state is no piece.
    """
    if hasattr(optimizer, "owner_of"):  # WholeParameterOptimizer: the optimizers inside it are looked at
        return
    params = _params_of(optimizer)
    if optimizer not in _seen and all(piece_of(param) is None for param in params):
        return
    if closure is None:
        refuse_unreduced(params, "an optimizer's step")
        _refuse_step_without_backward(params)
    if optimizer in _seen:
        _seen[optimizer].remove()
    else:
        _refuse_unknown(optimizer)
        take_over_state(optimizer)
        _share_overrides(optimizer)
        optimizer.register_state_dict_post_hook(lambda _, state_dict: PiecesOfState(state_dict))
        optimizer.register_load_state_dict_pre_hook(_cut_loaded_state)
        optimizer.register_step_post_hook(_after_step)
    # The last hook before the step itself: hooks of the user's may replace gradients.
    _seen[optimizer] = optimizer.register_step_pre_hook(_before_step)


def _refuse_step_without_backward(params: Iterable[torch.Tensor]) -> None:
    """Raise if no parameter has a gradient, and the last forward with gradients was followed by no backward."""
    pieces = []
    for param in params:
        if param.grad is not None:
            return
        if param.requires_grad and (piece := piece_of(param)) is not None:
            pieces.append(piece)
    if pieces and pieces[0].ranks in _unreached:
        raise ShardingError(
            f"an optimizer steps, and neither {pieces[0].name!r} nor any other of its parameters has a gradient, "
            "although the model has run forward: no backward has come to it. backward(inputs=...) does not find "
            f"sharded parameters, because layers compute with all-gathered copies: {CALL_BACKWARD}"
        )


def _refuse_unknown(optimizer: Optimizer) -> None:
    """Raise unless every element's update is known to depend on that element alone, or on its block."""
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    run = f"streamshard.optim.WholeParameterOptimizer(model.parameters(), {kind.__name__}, ..)"
    if not is_elementwise_class(kind):
        raise ShardingError(
            f"{name} is not known to work element by element, and each rank has pieces of parameters. To step whole "
            f"parameters, each on one rank, write optimizer = {run}. If the update of each element depends on that "
            f"element's gradient, weight and state alone, declare it: streamshard.optim.elementwise({kind.__name__}). "
            "An optimizer that shards its state, such as ZeroRedundancyOptimizer, is not needed: use its inner class"
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


def _share_overrides(optimizer: Optimizer) -> None:
    """bitsandbytes keeps options of single parameters by their ids: let the plain ones have them as well."""
    if (manager := getattr(optimizer, "mng", None)) is not None and hasattr(optimizer, "check_overrides"):
        optimizer.check_overrides()
        for param in _params_of(optimizer):
            if id(param) in manager.pid2config:
                manager.pid2config[id(_plain_of(param))] = manager.pid2config[id(param)]


# -- plain steps ------------------------------------------------------------------------------------------------------

_plain: MutableMapping[torch.Tensor, nn.Parameter] = WeakIdKeyDictionary()  # by sharded parameters


def _plain_of(param: torch.Tensor) -> torch.Tensor:
    """The plain Parameter on the memory of `param`; `param` itself if that is plain."""
    if piece_of(param) is None:
        return param
    with AsTensors():
        plain = _plain.get(param)
        if plain is None:
            plain = _plain[param] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
            plain.__dict__ = param.__dict__  # what people set on a parameter is on either
        elif plain.data_ptr() != param.data_ptr():
            plain.data = data_of(param)
        if plain.requires_grad is not param.requires_grad:
            plain.requires_grad_(param.requires_grad)
        return plain


def _give_grad(plain: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Let `plain` have `grad` as a plain tensor: the same one as long as its memory is the same, for torch.compile."""
    alias = None if grad is None else grad.as_subclass(torch.Tensor)
    if alias is None or plain.grad is None or plain.grad.data_ptr() != alias.data_ptr():
        plain.grad = alias


@skip
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The step itself begins: on a plain copy of the optimizer."""
    params = _params_of(optimizer)
    if all(piece_of(param) is None for param in params):  # the copy itself, where a step calls that of its base class
        return None
    copied = untraced(_copy_of, optimizer, params)
    closure = _closure_of(args, kwargs)
    if closure is None:
        return (copied, *args[1:]), kwargs

    def called() -> Any:
        """The user's closure, which makes gradients inside the step."""
        loss = closure()
        refuse_unreduced(params, "an optimizer's step")
        untraced(_fill, optimizer, copied)
        return loss

    return ((copied, called, *args[2:]), kwargs) if len(args) > 1 else ((copied,), {**kwargs, "closure": called})


# Of copies that step: the options and attributes that they were given.
_given: WeakKeyDictionary[Optimizer, tuple[list[dict[str, Any]], dict[str, Any]]] = WeakKeyDictionary()


def _copy_of(optimizer: Optimizer, params: list[torch.Tensor]) -> Optimizer:
    """A copy of `optimizer` over the plain parameters, with the same tensors and dicts as state."""
    copied: Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [{"params": list(map(_plain_of, group["params"]))} for group in optimizer.param_groups]
    state = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    state.update({_plain_of(param): optimizer.state[param] for param in params if param in optimizer.state})
    copied.state = defaultdict(dict, state)
    _fill(optimizer, copied)
    return copied


def _fill(optimizer: Optimizer, copied: Optimizer) -> None:
    """Give `copied` the options and gradients of `optimizer`.

    Kernels over lists of tensors (apex, DeepSpeed, Transformer Engine) skip what stands before an empty tensor, or
    write beside it, and most pieces are empty where there are many ranks. So a piece without elements has no gradient
    here. The parameter has an empty one: ranks must take the same number of norms. See decision 14.
    """
    for group, own in zip(optimizer.param_groups, copied.param_groups, strict=True):
        own.update(_options(group))
        for param, plain in zip(group["params"], own["params"], strict=True):
            if param is not plain:
                _give_grad(plain, grad_of(param) if plain.numel() else None)
    _given[copied] = [_options(own) for own in copied.param_groups], dict(copied.__dict__)


@skip
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The step itself is over."""
    if args[0] is not optimizer:
        untraced(_take_back, optimizer, args[0])


def _take_back(optimizer: Optimizer, copied: Optimizer) -> None:
    """Give `optimizer` the state, and what the step has changed. Hooks that run before may have changed more."""
    options, attributes = _given.pop(copied)
    params = [param for param in _params_of(optimizer) if grad_of(param) is not None]
    torch.autograd.graph.increment_version(params)  # on all ranks, whatever they have of a parameter
    for group, own, given in zip(optimizer.param_groups, copied.param_groups, options, strict=True):
        group.update(_changed(_options(own), given))
        for param, plain in zip(group["params"], own["params"], strict=True):
            if plain in copied.state:
                optimizer.state[param] = copied.state[plain]
    optimizer.state.update({key: value for key, value in copied.state.items() if not isinstance(key, torch.Tensor)})
    optimizer.__dict__.update(_changed(copied.__dict__, attributes))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in now.items() if key not in before or before[key] is not value}


# -- state ------------------------------------------------------------------------------------------------------------


class PiecesOfState(dict[str, Any]):
    """This rank's part of an optimizer's ``state_dict()``: fine to copy and to load again, an error to save."""

    def __copy__(self) -> PiecesOfState:
        return PiecesOfState(self)

    def __deepcopy__(self, memo: Any) -> PiecesOfState:
        return PiecesOfState(copy.deepcopy(dict(self), memo))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            "an optimizer's state_dict() holds one rank's pieces and is not saved as if it were full. Call on all "
            "ranks instead, to save a run, streamshard.save_checkpoint(directory, model, optimizer); for an "
            "optimizer's full state, streamshard.full_optimizer_state_dict(model, optimizer)"
        )


def take_over_state(optimizer: Optimizer) -> None:
    """Cut full moments, from before the model was sharded, into this rank's pieces.

    Raises:
        ShardingError: state is neither full nor this rank's piece.
    """
    if (in_place := getattr(optimizer, "in_place", None)) is not None:  # of a WholeParameterOptimizer
        for inner in in_place():
            take_over_state(inner)
        return
    for param in _params_of(optimizer):
        piece, values = piece_of(param), optimizer.state.get(param)
        if piece is not None and values:
            _cut(optimizer, piece, values, param.device)


def _cut_loaded_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before ``load_state_dict`` changes anything: full moments are cut, what does not fit raises."""
    state = {number: dict(values) for number, values in state_dict["state"].items()}
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, _params_of(optimizer), strict=False):  # torch compares their numbers
        piece = piece_of(param)
        if piece is not None and number in state:
            _cut(optimizer, piece, state[number], param.device)
    return {**state_dict, "state": state}


def _cut(optimizer: Optimizer, piece: Piece, values: dict[str, Any], device: torch.device) -> None:
    """Replace those of the `values` kept for a parameter that are full by pieces of them."""
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


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _takes_norms(optimizer: Optimizer) -> bool:
    """Whether an optimizer of bitsandbytes was asked to, inside its kernels, of parameters or gradients."""
    asked = getattr(optimizer, "args", None)
    if not type(optimizer).__module__.startswith("bitsandbytes.") or asked is None:
        return False
    is_clipping = getattr(asked, "max_unorm", 0.0) > 0.0 or getattr(asked, "percentile_clipping", 100) < 100
    return is_clipping or not getattr(asked, "block_wise", True)
