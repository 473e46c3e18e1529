"""Gradients and weights that know that they are pieces: what is asked of them is answered for the whole, or refused.

``torch.nn.utils.clip_grad_norm_`` on sharded parameters would silently clip each rank by its own piece, and a penalty
``weight.norm()`` would train with that of the piece. A `ShardedTensor` answers every norm with a `PartialNorm`, which
stays local while norms are stacked and is summed over ranks, once, when somebody takes the norm of the norms or looks
at the value. What is computed from it element by element is a `ShardedTensor` too, sums and maxima are those of all
ranks, and whatever else would take the piece for the whole raises. All of it may be differentiated (see
`streamshard.unit.global_ops`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch

from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.first_step import refuse_stepping
from streamshard.unit.global_ops import global_extreme, global_mean, global_sum, part_of, replicate
from streamshard.unit.norms import PartialNorm, local_norm
from streamshard.unit.op_kinds import OpKind, kind_of
from streamshard.unit.pieces import Piece, StatePiece
from streamshard.unit.unreduced_grad import UnreducedGrad, flat

__all__ = ["ShardedTensor"]

_AsTensors = torch._C.DisableTorchFunctionSubclass


class Sharding(NamedTuple):
    """What a `ShardedTensor` has of the whole.

    Attributes:
        ranks: norms and sums are collectives of it.
        piece: of a parameter, or of its gradient; None of several, put one behind the other.
        is_weight: it is a parameter, or was computed from one.
        is_as_cut: of the shape and order of the piece; not transposed, say.
        cuts: of several put one behind the other, where each begins and ends; only there it is cut again.
    """

    ranks: Ranks
    piece: Piece | None
    is_weight: bool
    is_as_cut: bool = True
    cuts: frozenset[int] | None = None

    @property
    def has_rows(self) -> bool:
        """Its first dimension is the whole's, cut; along the others nothing is missing (``align_pieces_to``)."""
        return self.is_as_cut and self.piece is not None and self.piece.has_rows

    @staticmethod
    def of_grad(piece: Piece) -> Sharding:
        """A gradient's of the same elements as `piece`."""
        return Sharding(piece.ranks, piece, is_weight=False)

    @staticmethod
    def of_weight(piece: Piece) -> Sharding:
        """A parameter's."""
        return Sharding(piece.ranks, piece, is_weight=True)


class ShardedTensor(torch.Tensor):
    """This rank's piece of a gradient, a weight, or of what was computed from them: an element for each of the whole's.

    A gradient is fp32, of the shape of the sharded parameter, a view of the main grads.

    Attributes:
        sharding: what it is of the whole.
    """

    sharding: Sharding

    @classmethod
    def wrap(cls, piece: torch.Tensor, sharding: Sharding) -> ShardedTensor:
        """`piece`, the same object, is a ShardedTensor from now on.

        Another one would be a node of the graph, where that of ``p.expand_as(p)`` is expected.
        """
        if type(piece) is not torch.Tensor:
            piece = piece.as_subclass(torch.Tensor)
        piece.__class__ = ShardedTensor
        tensor = cast(ShardedTensor, piece)
        tensor.sharding = sharding
        return tensor

    @classmethod
    @skip  # compiled functions break here: what other ranks have is not in their graphs
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `streamshard.unit.op_kinds` for what is told apart."""
        if kind_of(func) is OpKind.QUESTION:  # first: torch asks each gradient for several things in each step
            with _AsTensors():
                return func(*args, **(kwargs or {}))
        if UnreducedGrad in types or PartialNorm in types:
            return NotImplemented  # they answer it: a list of both is no list of ours, and a norm is reduced first
        return untraced(_answer, func, args, kwargs or {})

    def data_ptr(self) -> int:
        """The address of its first element; safetensors writes to files what is there, and asks for nothing else."""
        if self.sharding.ranks.world_size > 1 and sys._getframe(1).f_globals.get("__name__") == "safetensors.torch":
            self.as_subclass(StatePiece).refuse()
        with _AsTensors():
            return super().data_ptr()

    def __deepcopy__(self, memo: object) -> ShardedTensor:
        """Optimizers keep clones of gradients, and people copy their state."""
        return ShardedTensor.wrap(self.as_subclass(torch.Tensor).detach().clone(), self.sharding)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One rank's is whole and saved as a tensor; a piece is not saved as if it were the whole."""
        if self.sharding.ranks.world_size == 1:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        self.as_subclass(StatePiece).refuse()


# -- what comes of a piece --------------------------------------------------------------------------------------------


def _answer(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """All behind this runs without __torch_function__."""
    kind, piece = kind_of(func), _first_of(args, kwargs)
    with _AsTensors():
        if piece.sharding.ranks.world_size == 1:
            return func(*args, **kwargs)
        if kind is not OpKind.ELEMENTWISE:
            answer: Callable[..., Any] = _ANSWERS.get(kind, _refuse_op)
            return answer(func, piece, args, kwargs)
        if not args or args[0] is not piece or any(_has_elements(value) for value in (*args[1:], *kwargs.values())):
            _check_same_elements(func, args)
            args, kwargs = _fit(func, piece, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            _explain(func, error, args, kwargs)
            raise
        return _known(func, result, args, kwargs)


def _has_elements(value: Any) -> bool:
    """Others than a number, of which nobody asks for a gradient."""
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or value.requires_grad)


def _check_same_elements(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Pieces of several parameters that are put together element by element have to be cut alike."""
    first: Piece | None = None
    for value in args:
        if not isinstance(value, ShardedTensor) or (piece := value.sharding.piece) is None:
            continue
        if first is None:
            first = piece
        elif (first.shape, first.start, first.stop) != (piece.shape, piece.start, piece.stop):
            raise ShardingError(
                f"{_name_of(func)}() of {first.name!r} and {piece.name!r}, or what was computed from them, outside of "
                f"a forward: of the first this rank has the elements {first.start} to {first.stop} of {first.shape}, "
                f"of the second {piece.start} to {piece.stop} of {piece.shape}. Compute with both in the model's "
                "forward, or inside `with model.summon_full_params():`"
            )


def _fit(
    func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """What is put together with pieces, element by element: of a tensor of the whole's shape, what belongs to them."""
    written = args[0] if args and _is_in_place(func) else kwargs.get("out")
    ranks, of = piece.sharding.ranks, piece.sharding.piece if piece.sharding.is_as_cut else None

    def fitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensor) or value is written:
            return value
        is_differentiated = torch.is_grad_enabled() and value.requires_grad
        if is_differentiated and not value.ndim:
            return replicate(value, ranks)
        if of is None or value.shape != of.shape:
            return value
        if is_differentiated:
            return part_of(value, of.start, of.stop, ranks).view(of.local_shape)
        return value if of.shape == of.local_shape else of.cut(value)

    return tuple(map(fitted, args)), {key: fitted(value) for key, value in kwargs.items()}


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name.endswith("_") and not name.endswith("__") or name.startswith("__i")


def _known(func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an elementwise operation gave. New tensors are pieces: people write ``(2 * p.grad).float().norm()``."""
    if isinstance(result, torch.Tensor):
        if isinstance(result, ShardedTensor) or args and result is args[0] or result is kwargs.get("out"):
            return result
        pieces = (value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedTensor))
        return _derived(func, result, max(pieces, key=torch.Tensor.numel))  # less in it: one number for each row
    if isinstance(result, list | tuple) and not func.__name__.endswith("_"):
        if not func.__name__.startswith("_foreach_"):
            piece = _first_of(args, kwargs)
            return type(result)(_derived(func, item, piece) for item in result)
        lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple) and len(arg) == len(result)]
        known = list(result)
        for values in reversed(lists):
            for position, value in enumerate(values):
                if isinstance(value, ShardedTensor):
                    known[position] = _derived(func, result[position], value)
        return type(result)(known)
    return result


def _derived(func: Callable[..., Any], result: torch.Tensor, source: ShardedTensor) -> torch.Tensor:
    """`result` has an element for each of `source`."""
    sharding = source.sharding
    if result.numel() != source.numel():
        if func.__name__ == "__get__":  # ``_base``: the main grads
            return result
        _refuse_op(func, source)
    is_as_cut = sharding.is_as_cut and result.shape == source.shape and result.stride() == source.stride()  # no .T
    cuts = sharding.cuts if result.ndim == 1 else None
    if is_as_cut is not sharding.is_as_cut or cuts is not sharding.cuts:
        sharding = sharding._replace(is_as_cut=is_as_cut, cuts=cuts)
    return ShardedTensor.wrap(result, sharding)


def _draw(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Random numbers: this rank's of those that the whole would get, where ranks' generators are in the same state.

    Each rank's own would be the same numbers for all pieces then.
    """
    of = piece.sharding.piece
    if of is None or not piece.is_contiguous():
        _refuse_op(func, piece)
    whole = torch.empty(of.shape, dtype=piece.dtype, device=piece.device)
    args = [whole if value is piece else value for value in args]
    drawn = func(*args, **{key: whole if value is piece else value for key, value in kwargs.items()})
    mine = of.cut(drawn).view(piece.shape)
    if not func.__name__.endswith("_"):
        return ShardedTensor.wrap(mine.requires_grad_(drawn.requires_grad), piece.sharding)
    with torch.no_grad() if getattr(func, "__module__", "") == "torch.nn.init" else contextlib.nullcontext():
        piece.copy_(mine)
    return piece


def _foreach_norms(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    refuse_stepping()
    order = _order_of(func, piece, args, kwargs)
    return [_norm_of(item, order) if isinstance(item, ShardedTensor) else local_norm(item, order) for item in args[0]]


def _norm(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    if _is_of_rows(piece, args, kwargs, 2):
        return _of_rows(func(*args, **kwargs), piece)
    refuse_stepping()
    return _norm_of(piece, _order_of(func, piece, args, kwargs))


def _norm_of(piece: ShardedTensor, order: float) -> torch.Tensor:
    local, ranks = piece.as_subclass(torch.Tensor), piece.sharding.ranks
    if torch.is_grad_enabled() and local.requires_grad and (math.isinf(order) or order == 0):
        # Which rank has the largest is not known from norms.
        if order:
            return global_extreme(local.abs(), largest=order > 0, ranks=ranks)
        return global_sum(local_norm(local, order), ranks)
    return PartialNorm.wrap(local_norm(local, order), order, ranks)


def _of_rows(result: torch.Tensor, piece: ShardedTensor) -> ShardedTensor:
    """One number for each row that this rank has."""
    return ShardedTensor.wrap(result, _in_vector(piece))


def _reduce(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """One number over all ranks. A collective, like the value of a norm."""
    name, ranks = func.__name__, piece.sharding.ranks
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        _check_same_elements(func, args)
        args, kwargs = _fit(func, piece, args, kwargs)
        if name in ("max", "min"):
            return _known(func, func(*args, **kwargs), args, kwargs)
        if args[0].numel() != args[1].numel():
            _refuse_op(func, piece)
    elif any(_is_given(value) for value in (*args[1:], *(kwargs[key] for key in kwargs if key in _ALONG))):
        if name not in ("max", "min") and _is_of_rows(piece, args, kwargs, 1):
            return _of_rows(func(*args, **kwargs), piece)
        _refuse_op(func, piece)  # along a dimension, of which a piece has none
    refuse_stepping()
    local = piece.as_subclass(torch.Tensor)
    if name in ("max", "min", "amax", "amin"):
        return global_extreme(local, largest="max" in name, ranks=ranks)
    if name in ("any", "all", "equal", "allclose"):
        holds = bool(func(*args, **kwargs))
        found = torch.tensor(holds is (name == "any"), dtype=torch.int32, device=piece.device)
        ranks.all_reduce(found, maximum=True)
        answer = found.bool() if name == "any" else ~found.bool()
        return answer if name in ("any", "all") else bool(answer)
    if name == "mean":
        return global_mean(local, kwargs.get("dtype") or piece.dtype, ranks)
    return global_sum(func(*args, **kwargs).as_subclass(torch.Tensor), ranks)


_ALONG = ("dim", "axis", "keepdim", "keepdims", "other", "tensor", "out")


def _is_given(value: object) -> bool:
    """Not the default of `dim` or `keepdim`; dimension 0 is none."""
    return value is not None and value is not False


def _is_of_rows(piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any], position: int) -> bool:
    """Whether a reduction, with `dim` as argument number `position`, is within each row: this rank has these whole."""
    if not piece.sharding.has_rows:
        return False
    dim = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("axis"))
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    is_within = len(dims) > 0 and all(type(each) is int and each % piece.ndim for each in dims)
    return is_within and kwargs.get("out") is None


def _join(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Flat pieces one behind the other, for projections and flat vectors: each rank's part of the whole vector."""
    refuse_stepping()
    parts = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(part, ShardedTensor) and part.ndim == 1 for part in parts):
        _refuse_op(func, piece)
    cuts = frozenset(itertools.accumulate((part.numel() for part in parts), initial=0))
    return ShardedTensor.wrap(func(*args, **kwargs), _in_vector(piece)._replace(cuts=cuts))


def _in_vector(piece: ShardedTensor) -> Sharding:
    return piece.sharding._replace(piece=None, is_as_cut=False, cuts=None)


def _part(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Elements by place: of several pieces in one vector, one of them; else what does not go by place, or one."""
    if args[0] is not piece:  # elements of something else, at places that come of a piece
        _refuse_op(func, piece)
    try:
        result = func(*args, **kwargs)
    except IndexError:  # the whole may have it
        _refuse_op(func, piece)
    cuts: list[int] = []
    if func.__name__ == "narrow":
        start = args[2] if len(args) > 2 else kwargs["start"]
        cuts = [start, start + result.numel()]
    elif func.__name__ != "__getitem__":
        cuts = list(itertools.accumulate(part.numel() for part in result))
    elif _is_one_element(args[1], piece) and not piece.sharding.is_weight:
        return result.as_subclass(torch.Tensor)
    elif not _is_everything_or_mask(args[1], piece):
        if not isinstance(args[1], slice) or args[1].step not in (None, 1):
            _refuse_op(func, piece)
        cuts = list(args[1].indices(piece.shape[0])[:2])
    whole = piece.sharding.cuts
    if cuts and (whole is None or not whole.issuperset(cuts)):
        _refuse_op(func, piece)
    sharding = _in_vector(piece)
    if isinstance(result, torch.Tensor):
        return ShardedTensor.wrap(result, sharding)
    return type(result)(ShardedTensor.wrap(part, sharding) for part in result)


def _assign(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``grad[mask] = 0``. Rows would be others on every rank; one element is this rank's, for experiments."""
    is_one = _is_one_element(args[1], args[0]) and not piece.sharding.is_weight
    if not _is_everything_or_mask(args[1], args[0]) and not is_one:
        _refuse_op(func, piece)
    return func(*args, **kwargs)


def _number(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of a parameter that is one number: there is one rank that has it."""
    if piece.numel() != 1:
        _refuse_op(func, piece)
    return func(*args, **kwargs)


def _is_everything_or_mask(index: Any, tensor: torch.Tensor) -> bool:
    if isinstance(index, torch.Tensor):
        return index.dtype is torch.bool and index.shape == tensor.shape
    return index is Ellipsis or index == slice(None)


def _is_one_element(index: Any, tensor: torch.Tensor) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return len(indices) == tensor.ndim and all(type(each) is int for each in indices)


def _check_finite(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The check saw this rank's pieces only; an overflow anywhere must skip the step everywhere."""
    result = func(*args, **kwargs)
    piece.sharding.ranks.all_reduce(args[1], maximum=True, with_replicas=True)
    return result


_WHAT_IS_RIGHT = (
    "What works element by element is right, and so are vector norms, sum, mean, max, min, any, all and dot of all "
    "elements (collectives), and torch.cat of flattened ones"
)


def _refuse_op(
    func: Callable[..., Any], piece: ShardedTensor, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> NoReturn:
    refuse_stepping()
    name, of = _name_of(func), piece.sharding.piece
    if piece.sharding.is_weight:
        it, kept = ("several parameters", "pieces") if of is None else (repr(of.name), f"piece of {of.shape}")
        raise ShardingError(
            f"{name}() takes {it} for a whole weight outside of a forward of its model, where StreamShard keeps only "
            f"this rank's {kept}, {tuple(piece.shape)}. {_WHAT_IS_RIGHT}. Else call the model, or the layer that is a "
            "unit (on all ranks), or compute inside `with model.summon_full_params():`; .as_subclass(torch.Tensor) is "
            "the piece alone"
        )
    it = "of a gradient" if of is None else f"of the gradient of {of.name!r}"
    raise ShardingError(
        f"{name}() {it}: this rank has one piece of it, {tuple(piece.shape)}, and would answer for that piece alone. "
        f"{_WHAT_IS_RIGHT}. Look at whole gradients inside model.summon_full_params(with_grads=True); "
        "grad.as_subclass(torch.Tensor) is the piece alone"
    )


def _explain(func: Callable[..., Any], error: RuntimeError, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise a better error if the reason may be that something is a piece."""
    if isinstance(error, torch.OutOfMemoryError):
        return
    piece = _first_of(args, kwargs)
    given = [value for value in flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor) and value.ndim]
    if all(value.shape == piece.shape for value in given):
        return
    if piece.sharding.is_weight:
        _refuse_op(func, piece)
    shapes = ", ".join(str(tuple(value.shape)) for value in given[:3])
    raise ShardingError(
        f"{_name_of(func)}() of a gradient, with shapes {shapes}: this rank has one piece of it, {tuple(piece.shape)}, "
        f"and what is put together with it must be such a piece too: {error}. Whole gradients are there inside "
        "model.summon_full_params(writeback=True, with_grads=True)"
    ) from error


def _name_of(func: Callable[..., Any]) -> str:
    return func.__name__.strip("_")


def _first_of(args: Any, kwargs: Mapping[str, Any]) -> ShardedTensor:
    if args and isinstance(args[0], ShardedTensor):
        return args[0]
    return next(value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedTensor))


_ANSWERS: Mapping[OpKind, Callable[..., Any]] = {
    OpKind.RANDOM: _draw,
    OpKind.NORM: _norm,
    OpKind.FOREACH_NORM: _foreach_norms,
    OpKind.NON_FINITE_CHECK: _check_finite,
    OpKind.REDUCTION: _reduce,
    OpKind.JOIN: _join,
    OpKind.PART: _part,
    OpKind.ASSIGNMENT: _assign,
    OpKind.NUMBER: _number,
}


def _order_of(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> float:
    """The order of a vector norm over all elements; other norms raise."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    along = [*args[2:], *(kwargs.get(key) for key in ("dim", "keepdim", "dtype", "out"))]
    is_of_matrix = func is torch.linalg.norm and piece.ndim > 1 and order not in (None, "fro")
    if order == "nuc" or is_of_matrix or any(_is_given(value) for value in along):
        _refuse_op(func, piece)
    return 2.0 if order is None or order == "fro" else float(order)
