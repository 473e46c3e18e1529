"""Gradients and weights that know that they are pieces: what is asked of them is answered for the whole, or refused.

``torch.nn.utils.clip_grad_norm_`` on sharded parameters would silently clip each rank by its own piece, and a penalty
``weight.norm()`` would train with that of the piece. A `ShardedTensor` is, to whoever asks, as large as the whole. It
answers every norm with a `PartialNorm`, which stays local while norms are stacked and is summed over ranks, once, when
somebody takes the norm of the norms or looks at the value. What is computed from it element by element, views of it,
rows and slices are `ShardedTensor` too, sums and maxima are those of all ranks, and whatever else would take the piece
for the whole raises. All of it may be differentiated (see `streamshard.unit.global_ops`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.global_ops import global_extreme, global_mean, global_norm, global_sum, part_of, replicate
from streamshard.unit.norms import PartialNorm, local_norm, look_at_norms
from streamshard.unit.op_kinds import OpKind, is_attribute, kind_of
from streamshard.unit.pieces import StatePiece, holds_pieces, piece_of
from streamshard.unit.sharding import Sharding
from streamshard.unit.unreduced_grad import UnreducedGrad, flat

__all__ = ["ShardedTensor", "is_piece"]

_AsTensors = torch._C.DisableTorchFunctionSubclass


class ShardedTensor(torch.Tensor):
    """This rank's piece of a gradient, a weight, or of what was computed from them.

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
        kind = kind_of(func)
        if kind is OpKind.QUESTION:  # first: torch asks each gradient for several things in each step
            with _AsTensors():
                return func(*args, **(kwargs or {}))
        if UnreducedGrad in types or PartialNorm in types:
            return NotImplemented  # they answer it: a list of both is no list of ours, and a norm is reduced first
        return untraced(_answer, kind, func, args, kwargs or {})

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


def is_piece(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds one rank's part of something, and other ranks hold the rest."""
    if isinstance(tensor, ShardedTensor):
        return tensor.sharding.ranks.world_size > 1
    return isinstance(tensor, PartialNorm | StatePiece) or piece_of(tensor) is not None or holds_pieces(tensor)


# -- what comes of a piece --------------------------------------------------------------------------------------------


def _answer(kind: OpKind, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """All behind this runs without __torch_function__."""
    piece = _first_of(args, kwargs)
    with _AsTensors():
        if piece.sharding.ranks.world_size == 1:
            return func(*args, **kwargs)
        if any(type(value) is PartialNorm for value in (*args, *kwargs.values())):  # as a number, ``alpha`` for one
            args, kwargs = look_at_norms(args), look_at_norms(kwargs)
        answer: Callable[..., Any] = _ANSWERS.get(kind, _refuse_op)
        return answer(func, piece, args, kwargs)


def _elementwise(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    others = (*args[1:], *kwargs.values())
    is_alone = args and (args[0] is piece or type(args[0]) is list) and not any(map(_has_elements, others))
    if not is_alone and func.__name__ in ("to", "type_as"):  # of another's dtype and device alone
        result = func(args[0], *map(_as_plain, args[1:]), **{key: _as_plain(value) for key, value in kwargs.items()})
        return _known(func, result, args, {}) if args[0] is piece else result
    if not is_alone:
        args, kwargs = _fit(func, args, kwargs)
    return _known(func, func(*args, **kwargs), args, kwargs)


def _has_elements(value: Any) -> bool:
    """Others than a number, of which nobody asks for a gradient."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 or value.requires_grad
    return isinstance(value, list | tuple) and any(map(_has_elements, value))


def _as_plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, ShardedTensor) else value


def _fit(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """What is put together element by element: of what every rank has whole, what belongs to its piece.

    Raises:
        ShardingError: this rank has other elements of one piece than of another, or a shape goes with neither.
    """
    if not func.__name__.startswith("_foreach_"):
        written = args[0] if args and _is_in_place(func) else kwargs.get("out")
        fitted = _Fit(func, (*args, *kwargs.values()), written)
        return tuple(map(fitted, args)), {key: fitted(value) for key, value in kwargs.items()}
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    in_place = args[0] if _is_in_place(func) else None
    fits = [_Fit(func, values, values[0] if in_place else None) for values in zip(*lists, strict=False)]

    def each(value: Any) -> Any:
        if value is in_place or not (isinstance(value, list | tuple) and len(value) == len(fits)):
            return value
        return [fitted(item) for fitted, item in zip(fits, value, strict=True)]

    return tuple(map(each, args)), {key: each(value) for key, value in kwargs.items()}


class _Fit:
    """Makes what is put together by `func` with the largest piece of `values` fit it; `written` is changed in place."""

    def __init__(self, func: Callable[..., Any], values: Sequence[Any], written: Any) -> None:
        self._func = func
        self._written = written
        pieces = [value for value in values if isinstance(value, ShardedTensor)]
        self._target: ShardedTensor | None = None
        if isinstance(written, ShardedTensor):
            self._target = written
        elif pieces:
            self._target = max(pieces, key=_extent)
            if isinstance(written, torch.Tensor) and written.shape != self._target.shape:
                _refuse_op(func, self._target)

    def __call__(self, value: Any) -> Any:
        target = self._target
        if target is None or not isinstance(value, torch.Tensor) or value is target or value is self._written:
            return value
        if isinstance(value, ShardedTensor):
            self._check_same(value)
            is_other_form = value.shape != target.shape and value.numel() == target.numel()
            return value.view(target.shape) if is_other_form else value
        ranks, sharding = target.sharding.ranks, target.sharding
        is_differentiated = torch.is_grad_enabled() and value.requires_grad
        if is_differentiated and not value.ndim:
            return replicate(value, ranks)
        is_whole = sharding.whole is not None and value.shape == sharding.whole.shape
        if not is_differentiated and (value.numel() == 1 or value.shape == target.shape):
            if value.numel() > 1 and not is_whole and sharding.is_ambiguous(value.shape):
                _refuse_op(self._func, target)
            return value
        if not sharding.takes(value.shape) or target.shape != sharding.local_shape:
            if value.shape == target.shape:
                return value
            _refuse_op(self._func, target)
        if is_differentiated:
            whole = value.expand(sharding.whole.shape)  # type: ignore[union-attr]  # it takes the shape
            return part_of(whole, sharding.runs, ranks).view(target.shape)
        return sharding.cut(value)

    def _check_same(self, value: ShardedTensor) -> None:
        target = self._target
        assert target is not None
        mine, other = target.sharding, value.sharding
        if mine is other or mine.is_like(other):
            return
        (first, its), (second, others) = (_elements_of(each) for each in (mine, other))
        if its == others:  # in another order
            _refuse_op(self._func, target)
        raise ShardingError(
            f"{_name_of(self._func)}() of {first} and {second}, or what was computed from them, outside of a forward: "
            f"of the first this rank has the elements {its}, of the second {others}. Compute with both in the model's "
            "forward, or inside `with model.summon_full_params():`"
        )


def _extent(piece: ShardedTensor) -> int:
    """Of the whole: of one number for each row it is less, also where this rank has none."""
    return piece.numel() if piece.sharding.whole is None else piece.sharding.whole.numel()


def _elements_of(sharding: Sharding) -> tuple[str, str]:
    runs = ", ".join(f"{start} to {stop}" for start, stop in sharding.runs[:3])
    return repr(sharding.name) if sharding.name else "several parameters", f"{runs} of {_shape_of(sharding)}"


def _shape_of(sharding: Sharding) -> object:
    return "those selected" if sharding.whole is None else tuple(sharding.whole.shape)


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name.endswith("_") and not name.endswith("__") or name.startswith("__i")


def _known(func: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an elementwise operation gave. New tensors are pieces: people write ``(2 * p.grad).float().norm()``."""
    if isinstance(result, torch.Tensor):
        if isinstance(result, ShardedTensor) or args and result is args[0] or result is kwargs.get("out"):
            return result
        pieces = (value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedTensor))
        return _derived(func, result, max(pieces, key=_extent))
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
    if result.shape == source.shape:
        return ShardedTensor.wrap(result, source.sharding)
    if func.__name__ == "__get__":  # ``_base``: the main grads
        return result
    _refuse_op(func, source)


def _form(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A question about size: of the whole."""
    if is_attribute(func, "nbytes"):
        return _whole_of(piece).numel() * piece.itemsize
    return func(*map(_whole_of, args), **{key: _whole_of(value) for key, value in kwargs.items()})


def _whole_of(value: Any) -> Any:
    """On the meta device."""
    if not isinstance(value, ShardedTensor):
        return value
    if value.sharding.whole is None:
        refuse_selected(value)
    return value.sharding.whole


def _view(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The same elements in another form, of the whole's."""
    if args[0] is not piece:  # what every rank has, in the form of a piece
        whole = piece.sharding.whole
        is_whole = whole is not None and (args[0].numel() == whole.numel() or func.__name__ == "expand_as")
        return func(*map(_whole_of if is_whole else _as_plain, args), **kwargs)
    if any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
        return _elementwise(func, piece, args, kwargs)
    sharding = piece.sharding
    if func.__name__.endswith("_") and func.__name__ != "__get__" or sharding.whole is None:
        _refuse_op(func, piece)
    whole = func(*map(_whole_of, args), **kwargs)
    if whole.numel() != sharding.whole.numel():
        _refuse_op(func, piece)
    if sharding.is_in_order and whole.is_contiguous():
        if whole.shape == sharding.whole.shape:
            return ShardedTensor.wrap(piece.view(piece.shape), sharding)
        viewed = sharding.viewed(whole)
        return ShardedTensor.wrap(piece.reshape(viewed.local_shape), viewed)
    if func.__name__ not in _EXCHANGES and not is_attribute(func, *_EXCHANGES):
        _refuse_op(func, piece)
    return ShardedTensor.wrap(func(*args, **kwargs), sharding.viewed(whole))


_EXCHANGES = (
    "permute",
    "transpose",
    "t",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "adjoint",
    "T",
    "mT",
    "H",
    "mH",
)


def _gradients(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad``: what is asked for pieces are pieces, the zeros that torch makes of nothing too."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    grads = func(*args, **kwargs)
    for given, grad in zip((inputs,) if isinstance(inputs, torch.Tensor) else inputs, grads, strict=True):
        if isinstance(given, ShardedTensor) and type(grad) is torch.Tensor:
            ShardedTensor.wrap(grad, given.sharding._replace(is_weight=False))
    return grads


def _hook(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``register_hook`` of what was computed: the gradient that it is given is a piece too."""
    hook = args[1] if len(args) > 1 else kwargs["hook"]

    def of_piece(grad: torch.Tensor) -> Any:
        with torch._C._EnableTorchFunction():
            changed = hook(ShardedTensor.wrap(grad.view_as(grad), piece_sharding))
        return changed.as_subclass(torch.Tensor) if isinstance(changed, ShardedTensor) else changed

    piece_sharding = piece.sharding._replace(is_weight=False)
    return func(piece, hook if isinstance(piece, torch.nn.Parameter) else of_piece)


def _draw(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Random numbers: this rank's of those that the whole would get, where ranks' generators are in the same state.

    Each rank's own would be the same numbers for all pieces then.
    """
    sharding = piece.sharding
    if not sharding.is_in_order or not piece.is_contiguous():
        _refuse_op(func, piece)
    whole = torch.empty(sharding.whole.shape, dtype=piece.dtype, device=piece.device)  # type: ignore[union-attr]
    args = [whole if value is piece else value for value in args]
    drawn = func(*args, **{key: whole if value is piece else value for key, value in kwargs.items()})
    mine = sharding.cut(drawn).view(piece.shape)
    if not func.__name__.endswith("_"):
        return ShardedTensor.wrap(mine.requires_grad_(drawn.requires_grad), sharding)
    with torch.no_grad() if getattr(func, "__module__", "") == "torch.nn.init" else contextlib.nullcontext():
        piece.copy_(mine)
    return piece


def _foreach_norms(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    order = _order_of(func, piece, args, kwargs)
    return [_norm_of(item, order) if isinstance(item, ShardedTensor) else local_norm(item, order) for item in args[0]]


def _norm(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    return _norm_of(piece, _order_of(func, piece, args, kwargs))


def _norm_of(piece: ShardedTensor, order: float) -> torch.Tensor:
    local, ranks = piece.as_subclass(torch.Tensor), piece.sharding.ranks
    if not (torch.is_grad_enabled() and local.requires_grad):
        return PartialNorm.wrap(local_norm(local, order), order, ranks)
    if order == 0:
        return global_sum(local_norm(local, order), ranks)
    if math.isinf(order):  # which rank has the largest is not known from norms
        return global_extreme(local.abs(), largest=order > 0, ranks=ranks)
    return global_norm(local_norm(local, order), order, ranks)


def _reduce(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """One number over all ranks. A collective, like the value of a norm."""
    name, ranks = func.__name__, piece.sharding.ranks
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        args, kwargs = _fit(func, args, kwargs)
        if name in ("max", "min"):
            return _known(func, func(*args, **kwargs), args, kwargs)
        if args[0].numel() != args[1].numel():
            _refuse_op(func, piece)
    elif any(_is_given(value) for value in (*args[1:], *(kwargs[key] for key in kwargs if key in _ALONG))):
        _refuse_op(func, piece, instead=_ALONG_A_DIMENSION)
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


def _join(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Flat pieces one behind the other, for projections and flat vectors: each rank's part of the whole vector."""
    parts = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(part, ShardedTensor) and part.ndim == 1 and part.sharding.is_in_order for part in parts):
        _refuse_op(func, piece)
    return ShardedTensor.wrap(func(*args, **kwargs), Sharding.joined([part.sharding for part in parts]))


def _part(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Elements by place: rows, a slice of a vector, one of them; what this rank has of them, which may be none."""
    if args[0] is not piece:  # elements of something else, at places that come of a piece
        _refuse_op(func, piece)
    if func.__name__ == "__getitem__" and _is_mask(args[1]):
        chosen = piece.as_subclass(torch.Tensor)[_fitted_mask(func, piece, args[1])]
        return ShardedTensor.wrap(chosen, piece.sharding.selected())
    wholes = func(_whole_of(piece), *args[1:], **kwargs)
    if isinstance(wholes, torch.Tensor):
        return _part_of(func, piece, wholes)
    return type(wholes)(_part_of(func, piece, whole) for whole in wholes)


def _part_of(func: Callable[..., Any], piece: ShardedTensor, whole: torch.Tensor) -> ShardedTensor:
    # Neither inference mode nor no_grad keep a tensor's base.
    is_view = whole.untyped_storage()._cdata == _whole_of(piece).untyped_storage()._cdata
    part = piece.sharding.part(whole) if is_view else None
    if part is None:
        _refuse_op(func, piece)
    start, stop, sharding = part
    return ShardedTensor.wrap(piece.reshape(-1)[start:stop].view(sharding.local_shape), sharding)


def _assign(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``grad[mask] = 0``, ``weight.data[3] = 1``: where this rank has what is written over."""
    target, index, value = args
    if target is not piece:
        _refuse_op(func, piece)
    if not isinstance(value, ShardedTensor) and not _is_range(piece, index):
        return _assign_anywhere(func, piece, index, value)
    if _is_mask(index):
        if isinstance(value, ShardedTensor) or isinstance(value, torch.Tensor) and value.numel() != 1:
            _refuse_op(func, piece)
        return func(piece, _fitted_mask(func, piece, index), value)
    part = _part(torch.Tensor.__getitem__, piece, (piece, index), {})
    if not isinstance(value, torch.Tensor):
        part.fill_(value)
        return None
    if value.ndim > part.ndim:
        _refuse_op(func, piece)
    _, fitted = _fit(torch.Tensor.copy_, (part, value), {})[0]
    part.copy_(fitted)
    return None


def _is_range(piece: ShardedTensor, index: Any) -> bool:
    """Whether the elements of `index` lie one behind the other, or it is a mask of the whole."""
    if isinstance(index, ShardedTensor) or piece.sharding.whole is None:
        return True
    if _is_mask(index) and index.shape in (piece.shape, piece.sharding.whole.shape):
        return True
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, torch.Tensor | list) for each in indices):
        return False
    return piece.sharding.part(piece.sharding.whole[index]) is not None


def _assign_anywhere(func: Callable[..., Any], piece: ShardedTensor, index: Any, value: Any) -> None:
    """Rows by numbers or by a mask of rows, columns: written into the whole, of which this rank takes its part."""
    sharding = piece.sharding
    if not sharding.is_in_order or piece.shape != sharding.local_shape:
        _refuse_op(func, piece)
    shape = sharding.whole.shape  # type: ignore[union-attr]  # in order
    index = tuple(map(_as_plain, index)) if isinstance(index, tuple) else index
    is_written, values = (torch.zeros(shape, dtype=dtype, device=piece.device) for dtype in (torch.bool, piece.dtype))
    is_written[index] = True
    values[index] = value
    mine = sharding.cut(is_written)
    piece.as_subclass(torch.Tensor)[mine] = sharding.cut(values)[mine]


def _number(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of what is one number: one rank has it. Collective."""
    whole = piece.sharding.whole
    if func.__name__ == "__format__" and (whole is None or whole.ndim):
        return func(*args, **kwargs)
    if whole is None or whole.numel() != 1:
        _refuse_op(func, piece)
    total = global_sum(piece.as_subclass(torch.Tensor).detach().sum(dtype=torch.float64), piece.sharding.ranks)
    return func(total.to(piece.dtype), *args[1:], **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def _fitted_mask(func: Callable[..., Any], piece: ShardedTensor, mask: torch.Tensor) -> torch.Tensor:
    """Of one element for each of the whole's; masks of rows choose rows."""
    sharding = piece.sharding
    if isinstance(mask, ShardedTensor):
        fitted: torch.Tensor = _as_plain(_fit(func, (piece, mask), {})[0][1])
        return fitted
    if sharding.is_in_order and mask.shape == sharding.whole.shape:  # type: ignore[union-attr]  # in order
        return sharding.cut(mask).view(piece.shape)
    if mask.shape != piece.shape:
        _refuse_op(func, piece)
    return mask


def _check_finite(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The check saw this rank's pieces only; an overflow anywhere must skip the step everywhere."""
    result = func(*args, **kwargs)
    piece.sharding.ranks.all_reduce(args[1], maximum=True, with_replicas=True)
    return result


_WHAT_IS_RIGHT = (
    "What works element by element is right, and so are rows and slices, vector norms, sum, mean, max, min, any, all, "
    "allclose and dot of all elements (collectives), and torch.cat of flattened ones"
)
_ALONG_A_DIMENSION = "Along a dimension it needs whole rows or columns, and this rank may have parts of them"
_VARIANCE = "(p - p.mean()).square().sum() / (p.numel() - 1) is the variance of all elements, on all ranks"
_INSTEAD = dict.fromkeys(("std", "var", "std_mean", "var_mean"), _VARIANCE)


def _refuse_op(
    func: Callable[..., Any],
    piece: ShardedTensor,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    instead: str = _WHAT_IS_RIGHT,
) -> NoReturn:
    name, of, local = _name_of(func), piece.sharding, tuple(piece.shape)
    instead = _INSTEAD.get(name, instead)
    if of.is_weight:
        it, kept = (repr(of.name), f"piece of {_shape_of(of)}") if of.name else ("several parameters", "pieces")
        raise ShardingError(
            f"{name}() takes {it} for a whole weight outside of a forward of its model, where StreamShard keeps only "
            f"this rank's {kept}, {local}. {instead}. Else call the model, or the layer that is a unit (on all "
            "ranks), or compute inside `with model.summon_full_params():`; torch.zeros_like(p) is a piece to write to, "
            ".as_subclass(torch.Tensor) the piece alone"
        )
    it = f"of the gradient of {of.name!r}" if of.name else "of a gradient"
    raise ShardingError(
        f"{name}() {it}: this rank has one piece of it, {local}, and would answer for that piece alone. "
        f"{instead}. Look at whole gradients inside model.summon_full_params(with_grads=True); "
        "torch.zeros_like(p) is a piece to write to, grad.as_subclass(torch.Tensor) the piece alone"
    )


def refuse_selected(piece: ShardedTensor) -> NoReturn:
    """Raise: how many elements all ranks have of what a mask selected is known to none."""
    what = f"{'' if piece.sharding.is_weight else 'the gradient of '}{piece.sharding.name!r}"
    raise ShardingError(
        f"the size of what a mask selects of {what} is asked for: each rank has selected of its own piece. The sum of "
        "the mask is the number of elements on all ranks"
    )


def _name_of(func: Callable[..., Any]) -> str:
    return func.__name__.strip("_")


def _first_of(args: Any, kwargs: Mapping[str, Any]) -> ShardedTensor:
    if args and isinstance(args[0], ShardedTensor):
        return args[0]
    return next(value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedTensor))


_ANSWERS: Mapping[OpKind, Callable[..., Any]] = {
    OpKind.ELEMENTWISE: _elementwise,
    OpKind.FORM: _form,
    OpKind.VIEW: _view,
    OpKind.GRADIENT: _gradients,
    OpKind.HOOK: _hook,
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
    along = [*args[2:4], kwargs.get("dim"), kwargs.get("keepdim")]
    others = [*args[4:], kwargs.get("dtype"), kwargs.get("out")]
    is_of_matrix = func is torch.linalg.norm and piece.ndim > 1 and order not in (None, "fro")
    if any(map(_is_given, along)):
        _refuse_op(func, piece, instead=_ALONG_A_DIMENSION)
    if order == "nuc" or is_of_matrix or any(map(_is_given, others)):
        _refuse_op(func, piece)
    return 2.0 if order is None or order == "fro" else float(order)
