"""Tensors that know they are a piece: norms are norms over all ranks, and a piece is not saved as if it were whole.

``torch.nn.utils.clip_grad_norm_`` on sharded parameters would silently clip each rank by its own piece. `ShardedGrad`
answers every norm with a `PartialNorm`, which stays local while norms are stacked and is summed over ranks, once, when
somebody takes the norm of the norms or looks at the value. Other operations see a plain tensor. `StatePiece` is what
``state_dict()`` holds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.errors import ShardingError
from streamshard.transport import Transport

__all__ = [
    "HeldGrad",
    "PartialNorm",
    "ShardedGrad",
    "StatePiece",
    "reduce_norms",
    "remember_piece",
    "unwatch_optimizer",
    "watch_optimizer",
]

_VECTOR_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)


class ShardedGrad(torch.Tensor):
    """This rank's piece of a parameter's gradient: shape of the sharded parameter, fp32, a view of the main grads."""

    transport: Transport

    @classmethod
    def wrap(cls, piece: torch.Tensor, transport: Transport) -> ShardedGrad:
        """`piece` as a ShardedGrad on the same memory; its norms are collectives of `transport`."""
        grad = piece.as_subclass(cls)
        grad.transport = transport
        return grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Norms become `PartialNorm`, overflow checks global; everything else is an ordinary operation."""
        if HeldGrad in types:
            return NotImplemented  # whatever it is, such gradients answer it: a list of both is no list of ours
        kwargs = kwargs or {}
        if _first_step and (func in _VECTOR_NORMS or func is torch._foreach_norm):
            _refuse_stepping()
        if func in _VECTOR_NORMS and isinstance(args[0], cls):
            order = _order_of(args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return PartialNorm.wrap(_local_norm(args[0], order), order, args[0].transport)
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._foreach_norm:
                order = _order_of(args, kwargs)
                result: Any = [_local_norm(grad, order) for grad in args[0]]
            else:
                result = func(*args, **kwargs)
        if func is torch._foreach_norm:
            return [
                PartialNorm.wrap(norm, order, grad.transport) if isinstance(grad, cls) else norm
                for norm, grad in zip(result, args[0], strict=True)
            ]
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            # The check saw this rank's pieces only; an overflow anywhere must skip the step everywhere.
            for grad in args[0]:
                if isinstance(grad, cls):
                    _refuse_uneven(grad.transport, "a loss scaler")
                    grad.transport.all_reduce(args[1], maximum=True, everyone=True)
                    break
        is_new = isinstance(result, torch.Tensor) and not isinstance(result, cls) and result is not args[0]
        if is_new and result.is_floating_point():
            return cls._derived(func, result, next((grad for grad in args if isinstance(grad, cls)), None))
        return result

    def __deepcopy__(self, memo: object) -> ShardedGrad:
        """Optimizers keep clones of gradients, and people copy their state."""
        return ShardedGrad.wrap(self.as_subclass(torch.Tensor).clone(), self.transport)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One rank's gradient is whole and saved as a tensor; a piece is not saved as if it were the whole."""
        if self.transport.world_size == 1:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        return self.as_subclass(StatePiece).__reduce_ex__(protocol)

    @classmethod
    def _derived(cls, func: Callable[..., Any], result: torch.Tensor, grad: ShardedGrad | None) -> torch.Tensor:
        """What came of `grad`. An element for each of its is a piece: people write ``p.grad.float().norm()``."""
        if grad is None or func in (torch.cat, torch.stack):
            return result
        if result.numel() == grad.numel() and result.ndim:
            return cls.wrap(result, grad.transport)
        if _first_step and grad.numel() > 1:
            _refuse_stepping()
        return result


class HeldGrad(torch.Tensor):
    """Stands for a gradient that waits in a grad slot for its reduction: ``grad_slots="all"`` inside ``no_sync()``.

    Clearing it or setting it to zero forgets the gradient. Its values are nobody's yet: looking at them raises.

    Attributes:
        on_zero: what ``zero_()`` does.
    """

    on_zero: Callable[[], None]
    param_name: str

    @classmethod
    def wrap(cls, piece: torch.Tensor, name: str) -> HeldGrad:
        """A stand-in of the shape of `piece`, for messages that of parameter `name`."""
        with torch._C.DisableTorchFunctionSubclass():
            held = piece.detach().as_subclass(cls)
        held.param_name = name
        return held

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What ``zero_grad`` does, and questions about shape, dtype and device; anything else raises."""
        name = getattr(func, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            for held in args[0] if name == "_foreach_zero_" else args[:1]:
                if isinstance(held, cls):
                    held.on_zero()
                else:
                    held.zero_()
            return args[0]
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        next(arg for arg in _flat(args) if isinstance(arg, cls)).refuse(name or str(func))

    def refuse(self, what: str) -> NoReturn:
        """Raise: `what` cannot be done with it."""
        raise ShardingError(
            f"{what}: the gradient of {self.param_name!r} was accumulated inside no_sync() and has not been reduced "
            "over ranks: run the last backward outside of it before using gradients"
        )


# What Optimizer.zero_grad and printing ask.
_QUESTIONS = ("__get__", "requires_grad_", "detach_", "dim", "size", "numel", "data_ptr", "is_floating_point")


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


class PartialNorm(torch.Tensor):
    """The norm of one or more pieces on this rank. Looking at its value makes it the norm over all ranks: a collective.

    Shape [] for one piece, [k] for k stacked ones.
    """

    transport: Transport
    order: float

    @classmethod
    def wrap(cls, norm: torch.Tensor, order: float, transport: Transport) -> PartialNorm:
        """`norm`, of order `order` over this rank's elements, still to be reduced over ranks."""
        partial = norm.as_subclass(cls)
        partial.transport = transport
        partial.order = order
        return partial

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Stacks and moves stay partial; the norm of norms is reduced once; anything else sees the reduced value."""
        kwargs = kwargs or {}
        if func in (torch.stack, torch.Tensor.to, torch.Tensor.detach):
            parts = list(args[0]) if func is torch.stack else [args[0]]
            if all(isinstance(part, cls) and part.order == parts[0].order for part in parts):
                with torch._C.DisableTorchFunctionSubclass():
                    return cls.wrap(func(*args, **kwargs), parts[0].order, parts[0].transport)
        if func in _VECTOR_NORMS and isinstance(args[0], cls) and _order_of(args, kwargs) == args[0].order:
            with torch._C.DisableTorchFunctionSubclass():
                _refuse_uneven(args[0].transport, "the norm of gradients")
                local = torch.linalg.vector_norm(args[0], args[0].order)
                return reduce_norms(local, args[0].order, args[0].transport)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_reduced(args), **{key: _reduced_one(value) for key, value in kwargs.items()})


class StatePiece(torch.Tensor):
    """This rank's piece of a weight in a state dict: fine to copy, compare and load again, an error to save.

    ``torch.save(model.state_dict())`` or ``save_pretrained`` would leave a file that holds 1/N of the model.
    """

    def __deepcopy__(self, memo: object) -> StatePiece:
        """Copies of a state dict are made to go back to it later."""
        return self.detach().clone().as_subclass(StatePiece)

    def _refuse(self, *args: object) -> NoReturn:
        raise ShardingError(
            f"this state dict holds one rank's pieces (here {tuple(self.shape)}): to save it whole use "
            "model.full_state_dict() or streamshard.export_safetensors(model, directory), for an optimizer's "
            "streamshard.full_optimizer_state_dict(model, optimizer), called on all ranks"
        )

    __reduce_ex__ = numpy = __array__ = untyped_storage = _refuse  # type: ignore[assignment]  # on purpose


def reduce_norms(local: torch.Tensor, order: float, transport: Transport) -> torch.Tensor:
    """The norm over all ranks from each rank's own.

    Args:
        local: norms of order `order` over this rank's elements, any shape.
        order: any real number; ``inf`` is the maximum, ``0`` counts nonzeros.
        transport: its shard group is summed over. One collective.

    Returns:
        Norms of the same shape, equal on all ranks.
    """
    if math.isinf(order):
        total = local.clone() if order > 0 else -local
        transport.all_reduce(total, maximum=True)
        return total if order > 0 else -total
    total = local.clone() if order == 0 else local.pow(order)
    transport.all_reduce(total)
    return total if order == 0 else total.pow(1.0 / order)


def _refuse_uneven(transport: Transport, what: str) -> None:
    if transport.is_uneven:
        raise ShardingError(
            f"{what} is taken over all ranks, and one that has run out of inputs (Join) cannot know that it is asked "
            "for: use model.clip_grad_norm_, which it repeats; train in bf16 rather than with a loss scaler"
        )


def _local_norm(piece: torch.Tensor, order: float) -> torch.Tensor:
    """The norm of this rank's piece; of an empty one what does not count in a sum or a maximum."""
    if piece.numel():
        norm: torch.Tensor = torch.linalg.vector_norm(piece, order)
        return norm
    return piece.new_full((), math.inf if order == -math.inf else 0.0)


def watch_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps: the first step of an optimizer of pieces is looked at.

    From then on its ``state_dict()`` holds `StatePiece`: saved on one rank it would look like the whole.

    Raises:
        ShardingError: the update of one element is known to depend on others.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer in _watched or not any(param in _pieces for param in params):
        return
    name = type(optimizer).__name__
    if name in _WHOLE_MATRIX_OPTIMIZERS:
        _refuse_optimizer(name)
    _first_step.append(optimizer)
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_mark_state)
    optimizer.register_load_state_dict_pre_hook(_unmark_state)


def unwatch_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook after optimizer steps: nothing unusual was seen in the first one."""
    _first_step.clear()


def remember_piece(param: nn.Parameter, transport: Transport) -> None:
    """`param` is one of several pieces from now on."""
    if transport.world_size > 1:
        _pieces[param] = None


def _refuse_stepping() -> None:
    """Raise if this is called from inside the first step of an optimizer; no hook tells of a step that has failed."""
    optimizer, frame = _first_step.pop(), inspect.currentframe()
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            _refuse_optimizer(type(optimizer).__name__)
        frame = frame.f_back


def _refuse_optimizer(name: str) -> NoReturn:
    raise ShardingError(
        f"{name} looks at whole parameters, each rank holds pieces of them: use an element-wise optimizer (AdamW, SGD, "
        "..) with StreamShard"
    )


_pieces: MutableMapping[nn.Parameter, None] = WeakIdKeyDictionary()
_watched: WeakSet[Optimizer] = WeakSet()
_first_step: list[Optimizer] = []  # the optimizer that steps for the first time


def _mark_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_state(state_dict, lambda tensor: tensor.as_subclass(StatePiece) if tensor.ndim else tensor)


def _unmark_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _with_state(state_dict, lambda tensor: tensor.as_subclass(torch.Tensor))


def _with_state(state_dict: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    state = {
        number: {key: change(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


_WHOLE_MATRIX_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "Shampoo", "SOAP", "Lamb", "LAMB", "LARS")


def _order_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
    return 2.0 if order is None or order == "fro" else float(order)


def _reduced_one(value: Any) -> Any:
    if isinstance(value, PartialNorm):
        _refuse_uneven(value.transport, "the norm of a gradient")
        plain = value.as_subclass(torch.Tensor)
        return reduce_norms(plain, value.order, value.transport)
    if isinstance(value, list | tuple):
        return type(value)(_reduced(value))
    return value


def _reduced(values: Iterable[Any]) -> list[Any]:
    return [_reduced_one(value) for value in values]
