"""Parameters and gradients of which this rank has one piece, and the closed list of operations on them.

A piece answers questions about shape for the full tensor. Elementwise operations give pieces again. Sums, norms and
extremes of all elements are those of the full tensor: collectives, which all ranks must call. Every other operation
raises and names the parameter. So nothing takes a piece for the full tensor, and `torch.nn.utils.clip_grad_norm_`,
penalties in a loss, averages of weights and log lines are right.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch.autograd import Function

from streamshard.compiling import skip, untraced
from streamshard.errors import ShardingError
from streamshard.unit.asked_grads import refuse_grad
from streamshard.unit.global_ops import global_extreme, global_norm, global_sum
from streamshard.unit.norms import NORMS, PartialNorm, full_norms, order_of
from streamshard.unit.pieces import StatePiece, holds_pieces, piece_of
from streamshard.unit.questions import SHAPE, is_metadata, name_of, names
from streamshard.unit.sharding import Sharding
from streamshard.unit.unreduced_grad import UnreducedGrad, flat

__all__ = ["ShardedTensor", "is_piece"]

_AsTensors = torch._C.DisableTorchFunctionSubclass
_Answer = Callable[[Callable[..., Any], "ShardedTensor", tuple[Any, ...], Mapping[str, Any]], Any]


class ShardedTensor(torch.Tensor):
    """This rank's piece of a gradient, a weight, or of what was computed from them.

    A gradient is fp32, of the shape of the sharded parameter, a view of the main grads.

    Attributes:
        sharding: what it is a piece of.
    """

    sharding: Sharding

    @classmethod
    def wrap(cls, piece: torch.Tensor, sharding: Sharding) -> ShardedTensor:
        """`piece`, the same object, is a ShardedTensor from now on.

        Another object would be another node of the graph, where that of ``p.expand_as(p)`` is expected.
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
        """Metadata first: torch asks each gradient for several things in each step."""
        if func not in _answers:
            untraced(_look_up, func)
        answer = _answers[func]
        if answer is None:
            with _AsTensors():
                return func(*args, **(kwargs or {}))
        if UnreducedGrad in types or PartialNorm in types:
            return NotImplemented  # they answer: an unreduced gradient raises, a norm is reduced first
        return untraced(_run, answer, func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]  # torch allows contents
        """Its values here, and what they are a piece of."""
        with _AsTensors():
            values = repr(self.as_subclass(torch.Tensor))
        if self.sharding.ranks.world_size == 1:
            return values
        return f"{values}\n({self.sharding.what}, {self.sharding})"

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        """A piece of the same: optimizers keep clones of weights and gradients, and people copy their state."""
        with _AsTensors():
            copied = self.as_subclass(torch.Tensor).detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = ShardedTensor.wrap(copied, self.sharding)
        return cast(ShardedTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One rank's is full and saved as a tensor; a piece is not saved as if it were the full tensor."""
        if self.sharding.ranks.world_size == 1:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        self.as_subclass(StatePiece).refuse()


def is_piece(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds one rank's part of something, and other ranks hold the rest."""
    if isinstance(tensor, ShardedTensor):
        return tensor.sharding.ranks.world_size > 1
    return isinstance(tensor, PartialNorm | StatePiece) or piece_of(tensor) is not None or holds_pieces(tensor)


def _run(answer: _Answer, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """All behind this runs without __torch_function__."""
    piece = next(value for value in flat((*args, *kwargs.values())) if isinstance(value, ShardedTensor))
    with _AsTensors():
        if piece.sharding.ranks.world_size == 1:
            return func(*args, **kwargs)
        return answer(func, piece, full_norms(args), full_norms(kwargs))  # a norm may be a number, such as ``alpha``


# -- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Of numbers, and of tensors that have an element for each of this rank's. New tensors are pieces."""
    values = (*args, *kwargs.values())
    if not func.__name__.startswith("_foreach_"):
        sharding = _common(func, values)
        return _wrapped(func(*args, **kwargs), sharding, values)
    lists = [value for value in values if isinstance(value, list | tuple)]
    others = [value for value in values if not isinstance(value, list | tuple)]
    rows = [(*row, *others) for row in zip(*lists, strict=True)]
    shardings = [_common(func, row) for row in rows]
    results = func(*args, **kwargs)
    if not isinstance(results, list | tuple):
        return results
    return type(results)(_wrapped(*each) for each in zip(results, shardings, rows, strict=True))


def _wrapped(result: Any, sharding: Sharding | None, values: Iterable[Any]) -> Any:
    is_new = isinstance(result, torch.Tensor) and not any(result is value for value in flat(values))
    if sharding is None or not is_new or isinstance(result, ShardedTensor):
        return result
    return ShardedTensor.wrap(result, sharding)


def _common(func: Callable[..., Any], values: Iterable[Any]) -> Sharding | None:
    """What all pieces in `values` are pieces of; None if there are none.

    Raises:
        ShardingError: two pieces have other elements on some rank, or a tensor is no piece and no number.
    """
    tensors = [value for value in flat(values) if isinstance(value, torch.Tensor)]
    pieces = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    for tensor in tensors if pieces else ():
        if isinstance(tensor, ShardedTensor):
            if not tensor.sharding.is_like(pieces[0].sharding):
                _refuse(func, pieces[0], f"{tensor.sharding.what} is cut at other places ({tensor.sharding})")
        elif tensor.ndim == 0:
            if tensor.requires_grad and torch.is_grad_enabled():
                _refuse(func, pieces[0], "The other number needs a gradient, which no rank has in full: detach() it")
        elif not pieces[0].sharding.takes(tensor):
            shape = tuple(tensor.shape)
            made = "p.detach().clone() and torch.zeros_like(p) are pieces"
            _refuse(func, pieces[0], f"The other tensor, {shape}, is no piece of the same elements: {made}")
    return pieces[0].sharding if pieces else None


def _draw(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Random numbers: those of the full tensor, of which this rank keeps its own.

    If each rank drew for its piece, ranks with one seed would get the same numbers for different elements.
    """
    sharding = piece.sharding
    full = torch.empty(sharding.whole.shape, dtype=piece.dtype, device=piece.device)
    args = [full if value is piece else value for value in args]
    drawn = func(*args, **{key: full if value is piece else value for key, value in kwargs.items()})
    mine = drawn.detach().view(-1)[sharding.piece.start : sharding.piece.stop].view(piece.shape)
    if not func.__name__.endswith("_"):
        return ShardedTensor.wrap(mine.clone().requires_grad_(drawn.requires_grad), sharding)
    with torch.no_grad() if getattr(func, "__module__", "") == "torch.nn.init" else contextlib.nullcontext():
        piece.copy_(mine)
    return piece


def _flatten(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    if kwargs or args[1:] not in ((), (-1,), ((-1,),), ([-1],)) or (len(args) == 1) != (func.__name__ in _FLATTENS):
        _refuse(func, piece)
    return ShardedTensor.wrap(piece.view(-1), piece.sharding._replace(is_flat=True))


# -- questions --------------------------------------------------------------------------------------------------------


def _shape(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def full(value: Any) -> Any:
        return value.sharding.whole.to(value.dtype) if isinstance(value, ShardedTensor) else value

    return func(*map(full, args), **{key: full(value) for key, value in kwargs.items()})


def _number(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The value of a parameter that is one number: one rank has it. Collective."""
    if piece.sharding.piece.place.numel != 1:
        if func.__name__ == "__format__":
            return format(repr(piece), *args[1:])
        _refuse(func, piece)
    return func(_total(piece.as_subclass(torch.Tensor).detach(), piece), *args[1:], **kwargs)


def _total(local: torch.Tensor, piece: ShardedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return global_sum(local.sum(dtype=dtype), piece.sharding.ranks)


def _norm(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = order_of(args, kwargs)
    is_of_matrix = func is torch.linalg.norm and not piece.sharding.is_flat and len(piece.sharding.piece.shape) > 1
    if given is None or given == "nuc" or is_of_matrix and (len(args) > 1 or kwargs.get("ord") not in (None, "fro")):
        _refuse(func, piece, _ALONG if given is None else _RIGHT)
    return _norm_of(func, piece, float(given))


def _foreach_norm(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    order = order_of(args, kwargs)
    if order is None:
        _refuse(func, piece)
    norm = torch.linalg.vector_norm
    return [_norm_of(func, each, order) if isinstance(each, ShardedTensor) else norm(each, order) for each in args[0]]


def _norm_of(func: Callable[..., Any], piece: ShardedTensor, order: float) -> torch.Tensor:
    if order < 0:
        _refuse(func, piece)
    local, ranks = piece.as_subclass(torch.Tensor), piece.sharding.ranks
    norm = torch.linalg.vector_norm(local, order) if local.numel() else local.sum()
    if not norm.requires_grad:
        return PartialNorm.wrap(norm, order, ranks)
    found = global_norm(norm, order, ranks)
    return _without_gradient(found, func, piece) if order in (0, math.inf) else found


def _reduce(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """One number of all elements. Collective."""
    name, ranks, local = func.__name__, piece.sharding.ranks, piece.as_subclass(torch.Tensor)
    if name in _OF_TWO:
        _common(func, (*args, *kwargs.values()))
        if name == "dot":
            return _total(torch.mul(*args, **kwargs), piece)
        holds = func(*args, **kwargs)  # of no elements it does
        return bool(global_extreme(torch.tensor(float(holds), device=piece.device), largest=False, ranks=ranks))
    dtype = kwargs.get("dtype")
    others = (*args[1:], *(value for key, value in kwargs.items() if key not in ("input", "dtype")))
    if any(value is not None and value is not False for value in others):
        _refuse(func, piece, _ALONG)
    if name in ("sum", "nansum"):
        return _total(local.nan_to_num(0.0) if name == "nansum" else local, piece, dtype)
    if name == "mean":
        return _total(local, piece, dtype) / piece.sharding.piece.place.numel
    if name == "count_nonzero":
        return _total(local != 0, piece)
    values = local.detach().to(torch.promote_types(local.dtype, torch.float32))
    if name in ("any", "all"):
        values = (local != 0).float()
    largest = name in ("max", "amax", "any")
    worst = -math.inf if largest else math.inf
    own = (values.amax() if largest else values.amin()) if values.numel() else values.new_full((), worst)
    found = global_extreme(own, largest=largest, ranks=ranks)
    if name in ("any", "all"):
        return found > 0 if name == "any" else found != 0
    return _without_gradient(found.to(local.dtype), func, piece)


class _NoGradient(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, local: torch.Tensor, refuse: Callable[[], NoReturn]) -> torch.Tensor:
        ctx.refuse = refuse
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.refuse()


def _without_gradient(value: torch.Tensor, func: Callable[..., Any], piece: ShardedTensor) -> torch.Tensor:
    """`value`; a backward through it raises."""
    refuse = functools.partial(_refuse, func, piece, "Only sums, means and norms of order 1 and above have gradients")
    result: torch.Tensor = _NoGradient.apply(value, piece.as_subclass(torch.Tensor), refuse)  # type: ignore[no-untyped-call]
    return result


# -- gradients --------------------------------------------------------------------------------------------------------


def _check_finite(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A loss scaler's check saw this rank's pieces only; an overflow anywhere must skip the step everywhere."""
    result = func(*args, **kwargs)
    piece.sharding.ranks.all_reduce(args[1], maximum=True, with_replicas=True)
    return result


def _hook(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """``register_hook``: a hook on a parameter is the engine's to refuse."""
    if not isinstance(piece, torch.nn.Parameter):
        _refuse(func, piece)
    return func(*args, **kwargs)


def _gradients(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    """``torch.autograd.grad``, with respect to a parameter or to what was computed from one."""
    refuse_grad(args[1] if len(args) > 1 else kwargs["inputs"])
    _refuse(func, piece)


# -- refusals ---------------------------------------------------------------------------------------------------------

_RIGHT = "Elementwise operations with numbers and pieces work, and norms, sum, mean, max, min, any, all of all elements"
_ALONG = "Along a dimension it needs full rows or columns, and this rank may have parts of them"
_VARIANCE = "With d = p.detach(), (d - d.mean()).square().sum() / (d.numel() - 1) is the variance of all elements"


def _refuse(func: Callable[..., Any], piece: ShardedTensor, why: str = _RIGHT) -> NoReturn:
    name, sharding = name_of(func).strip("_"), piece.sharding
    why = _VARIANCE if name in ("std", "var", "std_mean", "var_mean") else why
    with_grads = "" if sharding.is_weight else "with_grads=True"
    raise ShardingError(
        f"{name}() of {sharding.what} outside of its model's forward: this rank has only {sharding}. {why}. Call the "
        f"model instead, or compute inside `with model.summon_full_params({with_grads}):`, where tensors are full"
    )


def _refuse_saving(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    piece.as_subclass(StatePiece).refuse()


def _refuse_op(func: Callable[..., Any], piece: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    _refuse(func, piece)


# -- the closed list --------------------------------------------------------------------------------------------------

# Functions, methods, attributes and, without the prefix ``_foreach_``, functions of lists. Underscores are stripped, so
# a name stands for the in-place operation and the operator too.
_ELEMENTWISE = names(
    """
    abs absolute add addcdiv addcmul alias and bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil
    clamp clamp_max clamp_min clip clone constant contiguous copy cos cpu cuda data detach div divide double
    empty_like eq erf erfinv exp expand_as expm1 fill float floor floor_divide floordiv full_like ge grad
    greater greater_equal gt half iadd iand idiv imul int invert ior ipow isclose isfinite isinf isnan isub
    itruediv ixor le lerp less less_equal log log1p log2 logical_and logical_not logical_or logical_xor long lt
    masked_fill maximum minimum mul multiply nan_to_num ne neg negative not_equal ones ones_like or pos positive
    pow radd rdiv real reciprocal relu remainder requires_grad rfloordiv rmul round rpow rsqrt rsub rtruediv sgn
    sigmoid sign sin sqrt square sub subtract tanh to true_divide truediv trunc type view_as where xor zero
    zeros zeros_like
    """
)
_RANDOM = names("kaiming_normal_ kaiming_uniform_ normal_ rand_like randn_like uniform_")
_FLATTENS = ("flatten", "ravel")
_OF_TWO = ("allclose", "dot", "equal")
_ANSWERS: Mapping[str, _Answer] = {
    **dict.fromkeys(SHAPE, _shape),
    **dict.fromkeys(_RANDOM, _draw),
    **dict.fromkeys((*_FLATTENS, "reshape", "view"), _flatten),
    **dict.fromkeys(names("all amax amin any count_nonzero max mean min nansum sum"), _reduce),
    **dict.fromkeys(_OF_TWO, _reduce),
    **dict.fromkeys(names("__bool__ __float__ __format__ __index__ __int__ item"), _number),
    "data_ptr": _refuse_saving,  # safetensors writes to files what is there, and asks for nothing else
    "_foreach_norm": _foreach_norm,
    "register_hook": _hook,
    "_amp_foreach_non_finite_check_and_unscale_": _check_finite,
}


# What answers each function; None for a question about metadata, which the local tensor answers.
_answers: dict[Callable[..., Any], _Answer | None] = {torch.autograd.backward: None, torch.autograd.grad: _gradients}
_answers.update(dict.fromkeys(NORMS, _norm))


def _look_up(func: Callable[..., Any]) -> None:
    name = name_of(func)
    is_elementwise = name.removeprefix("_foreach_").strip("_") in _ELEMENTWISE
    by_name = _ANSWERS.get(name, _elementwise if is_elementwise else _refuse_op)
    _answers[func] = None if is_metadata(func) else by_name
