"""Gradients that know that they are pieces: what is asked of them is answered for the whole, or refused.

``torch.nn.utils.clip_grad_norm_`` on sharded parameters would silently clip each rank by its own piece. `ShardedGrad`
answers every norm with a `PartialNorm`, which stays local while norms are stacked and is summed over ranks, once, when
somebody takes the norm of the norms or looks at the value. What is computed from it element by element is a
`ShardedGrad` too, sums and maxima are those of all ranks, and whatever else would take the piece for the whole raises.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from streamshard.comm.ranks import Ranks
from streamshard.errors import ShardingError
from streamshard.unit.first_step import refuse_stepping
from streamshard.unit.grad_ops import OpKind, kind_of
from streamshard.unit.norms import PartialNorm, local_norm, maximum
from streamshard.unit.pieces import StatePiece, piece_of
from streamshard.unit.unreduced_grad import UnreducedGrad, flat

__all__ = ["ShardedGrad", "know_grads"]

_AsTensors = torch._C.DisableTorchFunctionSubclass


def know_grads(params: Iterable[torch.Tensor]) -> None:
    """Gradients of pieces that the user has put there as plain tensors know that they are pieces from now on."""
    for param in params:
        if type(param.grad) is torch.Tensor and (piece := piece_of(param)) is not None:
            param.grad = ShardedGrad.wrap(param.grad, piece.ranks, piece.has_rows)


class ShardedGrad(torch.Tensor):
    """This rank's piece of a parameter's gradient: shape of the sharded parameter, fp32, a view of the main grads.

    Attributes:
        ranks: norms and sums are collectives of it.
        cuts: of several gradients put one behind the other, where each begins and ends; only there it is cut again.
        has_rows: its first dimension is the whole's, cut; along the others nothing is missing (``align_pieces_to``).
    """

    ranks: Ranks
    cuts: frozenset[int] | None = None
    has_rows: bool = False

    @classmethod
    def wrap(cls, piece: torch.Tensor, ranks: Ranks, has_rows: bool = False) -> ShardedGrad:
        """`piece` as a ShardedGrad on the same memory; its norms are collectives of `ranks`."""
        grad = piece.as_subclass(cls)
        grad.ranks = ranks
        grad.has_rows = has_rows
        return grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `streamshard.unit.grad_ops` for what is told apart."""
        kind = kind_of(func)
        if kind is OpKind.QUESTION:  # first: torch asks each gradient for several things in each step
            with _AsTensors():
                return func(*args, **(kwargs or {}))
        if UnreducedGrad in types:
            return NotImplemented  # whatever it is, such gradients answer it: a list of both is no list of ours
        kwargs = kwargs or {}
        if kind is OpKind.ELEMENTWISE:
            with _AsTensors():
                try:
                    result: Any = func(*args, **kwargs)
                except RuntimeError as error:
                    _explain(func, error, args, kwargs)
                    raise
                return _known(func, result, args, kwargs)
        grad = _first_of(args, kwargs)
        if grad.ranks.world_size == 1:
            with _AsTensors():
                return func(*args, **kwargs)
        answer: Callable[..., Any] = _ANSWERS.get(kind, _refuse_op)
        with _AsTensors():
            return answer(func, grad, args, kwargs)

    def __deepcopy__(self, memo: object) -> ShardedGrad:
        """Optimizers keep clones of gradients, and people copy their state."""
        return ShardedGrad.wrap(self.as_subclass(torch.Tensor).clone(), self.ranks, self.has_rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One rank's gradient is whole and saved as a tensor; a piece is not saved as if it were the whole."""
        if self.ranks.world_size == 1:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        return self.as_subclass(StatePiece).__reduce_ex__(protocol)


# -- what comes of a piece --------------------------------------------------------------------------------------------
# All of these run without __torch_function__.


def _known(func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an elementwise operation gave. New tensors are pieces: people write ``(2 * p.grad).float().norm()``."""
    if isinstance(result, torch.Tensor):
        if isinstance(result, ShardedGrad) or args and result is args[0] or result is kwargs.get("out"):
            return result
        grads = (value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedGrad))
        return _derived(func, result, max(grads, key=torch.Tensor.numel))  # less in it: one number for each row
    if isinstance(result, list | tuple) and not func.__name__.endswith("_"):
        if not func.__name__.startswith("_foreach_"):
            grad = _first_of(args, kwargs)
            return type(result)(_derived(func, item, grad) for item in result)
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) and len(arg) == len(result)]
        known = list(result)
        for values in reversed(lists):
            for position, value in enumerate(values):
                if isinstance(value, ShardedGrad):
                    known[position] = _derived(func, result[position], value)
        return type(result)(known)
    return result


def _derived(func: Callable[..., Any], result: torch.Tensor, grad: ShardedGrad) -> torch.Tensor:
    """`result` has an element for each of `grad`."""
    if grad.ranks.world_size == 1:
        return result
    if result.numel() != grad.numel():
        if func.__name__ == "__get__":  # ``_base``: the main grads
            return result
        _refuse_op(func, grad)
    has_rows = grad.has_rows and result.shape == grad.shape and result.stride() == grad.stride()  # no .T
    derived = ShardedGrad.wrap(result, grad.ranks, has_rows)
    if grad.cuts is not None and result.ndim == 1:
        derived.cuts = grad.cuts
    return derived


def _foreach_norms(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    refuse_stepping()
    order = _order_of(func, grad, args, kwargs)
    return [_norm_of(item, order) if isinstance(item, ShardedGrad) else local_norm(item, order) for item in args[0]]


def _norm(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    if _is_of_rows(grad, args, kwargs, 2):
        return ShardedGrad.wrap(func(*args, **kwargs), grad.ranks)
    refuse_stepping()
    return _norm_of(grad, _order_of(func, grad, args, kwargs))


def _norm_of(grad: ShardedGrad, order: float) -> PartialNorm:
    return PartialNorm.wrap(local_norm(grad.as_subclass(torch.Tensor), order), order, grad.ranks)


def _reduce(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """One number over all ranks. A collective, like the value of a norm."""
    name, ranks = func.__name__, grad.ranks
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        if name in ("max", "min"):
            return _known(func, func(*args, **kwargs), args, kwargs)
        if args[0].numel() != args[1].numel():
            _refuse_op(func, grad)
    elif any(_is_given(value) for value in (*args[1:], *(kwargs[key] for key in kwargs if key in _ALONG))):
        if name not in ("max", "min") and _is_of_rows(grad, args, kwargs, 1):
            return ShardedGrad.wrap(func(*args, **kwargs), ranks)
        _refuse_op(func, grad)  # along a dimension, of which a piece has none
    refuse_stepping()
    if name in ("max", "min", "amax", "amin"):
        return _extreme(grad.as_subclass(torch.Tensor), "max" in name, ranks)
    if name in ("any", "all", "equal", "allclose"):
        holds = bool(func(*args, **kwargs))
        found = torch.tensor(holds is (name == "any"), dtype=torch.int32, device=grad.device)
        ranks.all_reduce(found, maximum=True)
        answer = found.bool() if name == "any" else ~found.bool()
        return answer if name in ("any", "all") else bool(answer)
    if name == "mean":
        dtype = kwargs.get("dtype") or grad.dtype
        both = torch.stack([grad.sum(dtype=torch.float64), grad.new_tensor(grad.numel(), dtype=torch.float64)])
        ranks.all_reduce(both)
        return (both[0] / both[1]).to(dtype)
    total = func(*args, **kwargs).as_subclass(torch.Tensor)
    ranks.all_reduce(total)
    return total


_ALONG = ("dim", "axis", "keepdim", "keepdims", "other", "tensor", "out")


def _is_given(value: object) -> bool:
    """Not the default of `dim` or `keepdim`; dimension 0 is none."""
    return value is not None and value is not False


def _is_of_rows(grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any], position: int) -> bool:
    """Whether a reduction, with `dim` as argument number `position`, is within each row: this rank has these whole."""
    dim = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("axis"))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    is_within = grad.has_rows and len(dims) > 0 and all(type(each) is int and each % grad.ndim for each in dims)
    return is_within and kwargs.get("out") is None


def _extreme(piece: torch.Tensor, largest: bool, ranks: Ranks) -> torch.Tensor:
    signed = piece if largest else -piece
    local = signed.amax() if piece.numel() else piece.new_full((), -math.inf)
    found = maximum(local, ranks)
    return found if largest else -found


def _join(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Flat gradients one behind the other, for projections and flat vectors: each rank's part of the whole vector."""
    refuse_stepping()
    parts = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(part, ShardedGrad) and part.ndim == 1 for part in parts):
        _refuse_op(func, grad)
    whole = ShardedGrad.wrap(func(*args, **kwargs), grad.ranks)
    whole.cuts = frozenset(itertools.accumulate((part.numel() for part in parts), initial=0))
    return whole


def _part(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Elements by place: of several gradients in one vector, one of them; else what does not go by place, or one."""
    if args[0] is not grad:  # elements of something else, at places that come of a gradient
        _refuse_op(func, grad)
    result = func(*args, **kwargs)
    cuts: list[int] = []
    if func.__name__ == "narrow":
        start = args[2] if len(args) > 2 else kwargs["start"]
        cuts = [start, start + result.numel()]
    elif func.__name__ != "__getitem__":
        cuts = list(itertools.accumulate(part.numel() for part in result))
    elif _is_one_element(args[1], grad):
        return result.as_subclass(torch.Tensor)
    elif not _is_everything_or_mask(args[1], grad):
        if not isinstance(args[1], slice) or args[1].step not in (None, 1):
            _refuse_op(func, grad)
        cuts = list(args[1].indices(grad.shape[0])[:2])
    if cuts and (grad.cuts is None or not grad.cuts.issuperset(cuts)):
        _refuse_op(func, grad)
    if isinstance(result, torch.Tensor):
        return ShardedGrad.wrap(result, grad.ranks)
    return type(result)(ShardedGrad.wrap(part, grad.ranks) for part in result)


def _assign(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``grad[mask] = 0``. Rows would be others on every rank; one element is this rank's, for experiments."""
    if not _is_everything_or_mask(args[1], args[0]) and not _is_one_element(args[1], args[0]):
        _refuse_op(func, grad)
    return func(*args, **kwargs)


def _number(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of a parameter that is one number: there is one rank that has it."""
    if grad.numel() != 1:
        _refuse_op(func, grad)
    return func(*args, **kwargs)


def _is_everything_or_mask(index: Any, tensor: torch.Tensor) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype is torch.bool and index.shape == tensor.shape
    return index is Ellipsis or index == slice(None)


def _is_one_element(index: Any, tensor: torch.Tensor) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return len(indices) == tensor.ndim and all(type(each) is int for each in indices)


def _check_finite(func: Callable[..., Any], grad: ShardedGrad, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The check saw this rank's pieces only; an overflow anywhere must skip the step everywhere."""
    result = func(*args, **kwargs)
    grad.ranks.all_reduce(args[1], maximum=True, with_replicas=True)
    return result


def _refuse_op(
    func: Callable[..., Any], grad: ShardedGrad, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> NoReturn:
    refuse_stepping()
    raise ShardingError(
        f"{func.__name__} of a gradient: this rank has one piece of it, {tuple(grad.shape)}, and would answer for that "
        "piece alone. What works element by element is right, and so are vector norms, sum, mean, max, min, any, all "
        "and dot of all elements (collectives), and torch.cat of flattened gradients. Look at whole gradients inside "
        "model.summon_full_params(with_grads=True); grad.as_subclass(torch.Tensor) is the piece alone"
    )


def _explain(func: Callable[..., Any], error: RuntimeError, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise a better error if the reason may be that a gradient is a piece."""
    if isinstance(error, torch.OutOfMemoryError):
        return
    grad = _first_of(args, kwargs)
    given = [value for value in flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor) and value.ndim]
    if grad.ranks.world_size > 1 and any(value.shape != grad.shape for value in given):
        shapes = ", ".join(str(tuple(value.shape)) for value in given[:3])
        raise ShardingError(
            f"{func.__name__} of a gradient, with shapes {shapes}: this rank has one piece of it, "
            f"{tuple(grad.shape)}, and what is put together with it must be such a piece too: {error}. Whole gradients "
            "are there inside model.summon_full_params(writeback=True, with_grads=True)"
        ) from error


def _first_of(args: Iterable[Any], kwargs: Mapping[str, Any]) -> ShardedGrad:
    return next(value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedGrad))


_ANSWERS: Mapping[OpKind, Callable[..., Any]] = {
    OpKind.NORM: _norm,
    OpKind.FOREACH_NORM: _foreach_norms,
    OpKind.NON_FINITE_CHECK: _check_finite,
    OpKind.REDUCTION: _reduce,
    OpKind.JOIN: _join,
    OpKind.PART: _part,
    OpKind.ASSIGNMENT: _assign,
    OpKind.NUMBER: _number,
}


def _order_of(func: Callable[..., Any], grad: ShardedGrad, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The order of a vector norm over all elements; other norms raise."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    along = [*args[2:], *(kwargs.get(key) for key in ("dim", "keepdim", "dtype", "out"))]
    is_of_matrix = func is torch.linalg.norm and grad.ndim > 1 and order not in (None, "fro")
    if order == "nuc" or is_of_matrix or any(_is_given(value) for value in along):
        _refuse_op(func, grad)
    return 2.0 if order is None or order == "fro" else float(order)
