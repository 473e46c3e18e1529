"""Tensors of which each rank has one piece, and the closed list of operations on them.

A piece answers questions about shape for the full tensor. Elementwise operations give pieces again. Sums, norms and
extremes are the full tensor's: collectives, which all ranks must call. Every other operation raises and names
the parameter. So nothing takes a piece for the full tensor, and `torch.nn.utils.clip_grad_norm_`, penalties in a loss,
averages of weights and log lines are right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch

from streamshard.errors import ShardingError
from streamshard.guards.global_ops import PartialNorm, full_norms, no_backward
from streamshard.guards.piece import Piece
from streamshard.guards.torch_functions import ELEMENTWISE, NORMS, SHAPE, is_init, is_metadata, name_of, names, order_of
from streamshard.nested import map_tensors, tensors_in
from streamshard.norms import global_extreme, global_norm, global_sum, local_norms
from streamshard.torch_private import AsTensors, skip, untraced

_Answer = Callable[[Callable[..., Any], "ShardedTensor", tuple[Any, ...], Mapping[str, Any]], Any]


@dataclasses.dataclass(eq=False)
class Life:
    """Whether the memory of a unit's gradients still holds them. Shared by all tensors on that memory.

    Attributes:
        why_over: why no operation may use the values; empty if operations may.
    """

    why_over: str = ""


WHY_EARLIER = (
    "was kept from an earlier backward, and a later one writes to its memory: keep p.grad.clone() where a gradient is "
    "needed after zero_grad()"
)


class ShardedTensor(torch.Tensor):
    """This rank's piece of a gradient, of a weight, or of a tensor computed from them.

    Attributes:
        piece: describes the piece.
        life: of the memory of a gradient; None: the memory is the tensor's own.
    """

    piece: Piece
    life: Life | None = None

    @classmethod
    def wrap(cls, local: torch.Tensor, piece: Piece, life: Life | None = None) -> ShardedTensor:
        """Make `local`, the same object, a ShardedTensor.

        The object stays, because code such as ``p.expand_as(p).grad_fn`` expects this tensor's node of the graph.
        """
        if type(local) is not torch.Tensor:
            local = local.as_subclass(torch.Tensor)
        local.__class__ = ShardedTensor
        tensor: ShardedTensor = local  # type: ignore[assignment]  # a call of cast() for each gradient takes time
        tensor.piece = piece
        if life is not None:
            tensor.life = life
        return tensor

    @property
    def why_unusable(self) -> str:
        """Why no operation may use the values; empty if operations may."""
        return "" if self.life is None else self.life.why_over

    def refuse_unusable(self, what: str) -> None:
        """Raise if the memory holds other values by now; `what` needs the tensor's."""
        if why := self.why_unusable:
            raise ShardingError(f"{what}: {self.piece.what} {why}")

    @classmethod
    @skip  # compiled functions break here: the elements of other ranks are not in their graphs
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Metadata first: torch asks each gradient for several things in each step."""
        answer = _answer_to(func)
        if answer is None:
            with AsTensors():
                return func(*args, **(kwargs or {}))
        if PartialNorm in types:
            return NotImplemented  # a norm is reduced first
        return untraced(_run, answer, func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]  # torch allows contents
        """The values on this rank, and the description of the piece."""
        if self.why_unusable:
            return f"({self.piece.what} {self.why_unusable})"
        self.piece.settle()
        with AsTensors():
            values = repr(self.as_subclass(torch.Tensor))
        return values if self.piece.is_whole else f"{values}\n({self.piece.what}, {self.piece})"

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        """A piece of the same elements. People copy averages of weights and optimizer state."""
        self.refuse_unusable("copy.deepcopy")
        self.piece.settle()
        with AsTensors():
            copied = self.as_subclass(torch.Tensor).detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = ShardedTensor.wrap(copied, self.piece)
        return cast(ShardedTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """One rank's tensor is full, and is saved as a tensor. A piece raises."""
        self.refuse_unusable("torch.save")
        self.piece.settle()
        if self.piece.is_whole:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        _refuse_saving(torch.save, self, (), {})


def piece_of(tensor: torch.Tensor) -> Piece | None:
    """The description of `tensor` if other ranks hold the rest of it; None if `tensor` is full."""
    if isinstance(tensor, ShardedTensor) and not tensor.piece.is_whole:
        return tensor.piece
    return None


def _run(answer: _Answer, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Answer a call. Inside, nothing calls __torch_function__ again."""
    tensors = [value for value in tensors_in((args, kwargs)) if isinstance(value, ShardedTensor)]
    for tensor in tensors:
        # Shapes come from the piece, and are right whatever the memory holds by now.
        if tensor.why_unusable and answer is not _shape:
            tensor.refuse_unusable(name_of(func))
    on_host = [tensor for tensor in tensors if tensor.piece.is_on_host and tensor.piece.host is not None]
    if not on_host:
        return _compute(answer, func, tensors[0], args, kwargs)
    first = on_host[0]  # others may lie on the device, or belong to other models
    for tensor in on_host:
        tensor.piece.settle()
    args = (*args[:1], *map_tensors(args[1:], _number_on_host))
    kwargs = kwargs if "out" in kwargs else map_tensors(kwargs, _number_on_host)
    return no_backward(_compute(answer, func, first, args, kwargs), first.piece.what)


def _compute(answer: _Answer, func: Callable[..., Any], first: ShardedTensor, args: Any, kwargs: Any) -> Any:
    piece = first.piece
    with AsTensors():
        # On one rank torch computes. But norms have the bits of many ranks, and a scaler's check asks replicas.
        if not piece.is_whole or answer in (_norm, _foreach_norm, _check_finite, _detach_in_place):
            return answer(func, first, full_norms(args), full_norms(kwargs))  # ``alpha`` may be a norm
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result is first:
            return result
        is_same = result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        # A view of a gradient ends with it, and one of host memory needs `settle`: both stay guarded.
        is_on_grad = first.life is not None and result.shape == first.shape
        return ShardedTensor.wrap(result, piece, first.life) if is_same and (piece.is_on_host or is_on_grad) else result


def _number_on_host(value: torch.Tensor) -> torch.Tensor:
    """Kernels of the CPU take no number of another device, as those of a device take the CPU's."""
    return value if value.ndim or isinstance(value, ShardedTensor | PartialNorm) else value.cpu()


# -- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Operate on this rank's elements, with numbers and pieces. New tensors are pieces, cut as the first one is."""
    if not func.__name__.startswith("_foreach_"):
        args = _cut_alike(args)
        values = (*args, *kwargs.values())
        piece = _common(func, values)
        return _wrapped(func(*args, **kwargs), piece, values)
    lists = [value for value in args if isinstance(value, list | tuple)]
    # Row by row: the lists hold many parameters, each cut at places of its own.
    rows = [_cut_alike(row) for row in zip(*lists, strict=True)]
    others = [value for value in args if not isinstance(value, list | tuple)]
    pieces = [_common(func, (*row, *others, *kwargs.values())) for row in rows]
    columns = zip(*rows, strict=True)
    args = tuple(next(columns, value) if isinstance(value, list | tuple) else value for value in args)
    results = func(*args, **kwargs)
    if not isinstance(results, list | tuple):
        return results
    return type(results)(_wrapped(*each) for each in zip(results, pieces, rows, strict=True))


def _cut_alike(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values`, in which all pieces are cut as the first one is. Collective if some are cut at other places.

    A module and its running average are equal, but lie beside other parameters in their units. So their pieces differ.
    """
    pieces = [value.piece for value in values if isinstance(value, ShardedTensor)]
    if all(piece.is_like(pieces[0]) for piece in pieces[1:]):
        return values
    return tuple(_recut(value, pieces[0]) if isinstance(value, ShardedTensor) else value for value in values)


def _recut(tensor: ShardedTensor, piece: Piece) -> torch.Tensor:
    has_graph = tensor.requires_grad and torch.is_grad_enabled()
    if tensor.piece.is_like(piece) or has_graph or not piece.can_recut(tensor.piece):
        return tensor  # refused by `_common`, if it is cut at other places
    return ShardedTensor.wrap(piece.recut(tensor.as_subclass(torch.Tensor), tensor.piece), piece)


def _wrapped(result: Any, piece: Piece | None, values: tuple[Any, ...]) -> Any:
    """`result`, as `piece` if it is a new tensor. A view of a gradient among `values` has the gradient's life."""
    tensors = tensors_in(values)
    is_new = isinstance(result, torch.Tensor) and not any(result is tensor for tensor in tensors)
    if piece is None or not is_new or isinstance(result, ShardedTensor):
        return result
    grads = (tensor for tensor in tensors if isinstance(tensor, ShardedTensor) and tensor.life is not None)
    storage = result.untyped_storage().data_ptr()  # 0 of no elements: the clone of an empty gradient is no view of it
    life = next((grad.life for grad in grads if grad.untyped_storage().data_ptr() == storage != 0), None)
    return ShardedTensor.wrap(result, piece, life)


def _common(func: Callable[..., Any], values: tuple[Any, ...]) -> Piece | None:
    """The `Piece` that all ShardedTensors in `values` share; None if there are none.

    Raises:
        ShardingError: two pieces have other elements on some rank, or a tensor is neither a piece nor a number.
    """
    tensors = tensors_in(values)
    first = next((tensor for tensor in tensors if isinstance(tensor, ShardedTensor)), None)
    if first is None:
        return None
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor):
            if not tensor.piece.is_like(first.piece):
                refuse(func, first, _why_not_alike(tensor, first))
        elif tensor.ndim == 0:
            if tensor.requires_grad and torch.is_grad_enabled():
                refuse(func, first, "The other number needs a gradient, which no rank has in full: detach() it")
        elif not first.piece.takes(tensor):
            average = "make an average of weights after sharding, or shard the averaged model too. "
            made = average * (tensor.shape == first.piece.shape) + _MADE
            refuse(func, first, f"The other tensor, {tuple(tensor.shape)}, is no piece of the same elements: {made}")
    return first.piece


def _why_not_alike(tensor: ShardedTensor, first: ShardedTensor) -> str:
    if not first.piece.can_recut(tensor.piece):
        return f"{tensor.piece.what} has another shape, {tensor.piece.shape}, or lies on other ranks"
    return f"{tensor.piece.what} is cut at other places, and no graph can go through the exchange: detach() it"


def _random(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """This rank's elements of the random numbers that the full tensor would get. Takes memory for the full tensor."""
    given = {key: value for key, value in kwargs.items() if value is not tensor}
    full = torch.empty(tensor.piece.full.shape, dtype=tensor.dtype, device=tensor.device)
    # Drawn whole: ranks with one seed would give different elements the same numbers.
    values = tensor.piece.cut(func(full, *args[1:], **given))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_init(func)):
        return tensor.copy_(values)


# -- numbers of all elements ------------------------------------------------------------------------------------------


def _shape(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def full(value: Any) -> Any:
        return value.piece.full.to(value.dtype) if isinstance(value, ShardedTensor) else value

    return func(*map(full, args), **{key: full(value) for key, value in kwargs.items()})


def _number(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The value of a parameter that is one number: one rank has it. Collective."""
    if tensor.piece.full.numel() != 1:
        if func.__name__ == "__format__":
            return format(repr(tensor), *args[1:])
        refuse(func, tensor)
    # The sum of no elements is 0, so the one rank with the number decides.
    own = tensor.piece.counted(tensor.as_subclass(torch.Tensor).detach().sum())
    return func(global_sum(own, tensor.piece.ranks), *args[1:], **kwargs)


def _foreach_norm(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    norm, rest = torch.linalg.vector_norm, args[1:]
    return [
        _norm(norm, each, (each, *rest), kwargs) if isinstance(each, ShardedTensor) else norm(each, *rest, **kwargs)
        for each in args[0]
    ]


def _norm(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    order, ranks = order_of(func, args, kwargs), tensor.piece.ranks
    local = _on_device(tensor)
    has_graph = local.requires_grad and torch.is_grad_enabled()
    if tensor.piece.is_whole and (order is None or has_graph):
        return func(*map_tensors(args, _on_device), **map_tensors(kwargs, _on_device)).to(tensor.device)
    if order is None or has_graph and math.isinf(order):
        refuse(func, tensor)
    dtype = kwargs.get("dtype") or tensor.dtype
    if not has_graph:
        (norm,) = local_norms([local.detach()], order)
        return PartialNorm.wrap(tensor.piece.counted(norm), order, ranks, dtype, tensor.device)
    norm = torch.linalg.vector_norm(local.double(), order)
    return global_norm(norm, order, ranks, tensor.piece.counted, dtype).to(tensor.device)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements where the model trains: clipping by them has the same bits as without ``offload``."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return tensor.as_subclass(torch.Tensor).to(tensor.piece.ranks.streams.device)


def _are_equal(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether two pieces are equal, or close, on all ranks. Collective."""
    args = _cut_alike(args)
    _common(func, (*args, *kwargs.values()))
    holds = torch.tensor(float(func(*args, **kwargs)), device=tensor.device)  # of no elements it does
    return bool(global_extreme(holds, largest=False, ranks=tensor.piece.ranks))


def _reduce(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Reduce all elements of the full tensor to one number, equal on all ranks. Collective."""
    name, ranks, local = func.__name__, tensor.piece.ranks, tensor.as_subclass(torch.Tensor)
    is_logical, largest = name in ("any", "all"), name in ("any", "max", "amax")
    others = (*args[1:], *(value for key, value in kwargs.items() if key not in ("input", "dtype")))
    if any(value is not None and value is not False for value in others):
        refuse(func, tensor)
    if name in ("sum", "mean"):
        dtype = kwargs.get("dtype") or local.dtype
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else kwargs.get("dtype")
        total = global_sum(tensor.piece.counted(local.sum(dtype=wide)), ranks)
        total = total if name == "sum" else total / tensor.piece.full.numel()
        return total if wide is None else total.to(dtype)  # rounded once, and a mean in fp16 does not overflow
    if local.requires_grad and torch.is_grad_enabled() and not is_logical:
        refuse(func, tensor)
    values = (local != 0 if is_logical else local.detach()).to(torch.promote_types(local.dtype, torch.float32))
    if not values.numel():
        # A rank without elements takes part in the collective, and must not decide it.
        values = values.new_full((1,), -math.inf if largest else math.inf)
    found = global_extreme(values.amax() if largest else values.amin(), largest=largest, ranks=ranks)
    return found > 0 if is_logical else found.to(local.dtype)


def _check_finite(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A loss scaler's check saw this rank's pieces only. An overflow on any rank must skip the step on all.

    The scaler has copied its scale to where gradients are, without waiting: torch's kernels on a device need no wait.
    """
    if tensor.piece.host is not None:
        tensor.piece.host.wait_for_others()
    result = func(*args, **kwargs)
    tensor.piece.ranks.all_reduce(args[1], maximum=True, with_replicas=True)  # `found_inf`
    return result


CALL_BACKWARD = (
    "call loss.backward() without inputs= and read .grad afterwards; set requires_grad_(False) before the forward on "
    "parameters that are to get no gradient"
)

# -- refusals ---------------------------------------------------------------------------------------------------------

_RIGHT = (
    "Elementwise operations with numbers and pieces work, and norms, sum, mean, any, all of all elements; max and min "
    "of a tensor without gradient. Operations along a dimension need full rows or columns"
)
_MADE = "p.detach().clone(), torch.zeros_like(p) and torch.zeros_like(p).normal_() are pieces"
_WHOLE = "in step() of an optimizer that streamshard.optim.WholeParameterOptimizer runs, weights and gradients are full"
_NO_GRAPH = f"Layers use all-gathered copies, so no graph has a sharded parameter: {CALL_BACKWARD}"
_COMPUTE = (
    "If a loss needs it, compute in a method of the model, and call streamshard.register_forward_method(model, "
    "'method') once. Else compute inside `with model.summon_full_params():`, where tensors are full"
)
_WHY = {
    "backward": _NO_GRAPH,
    "grad": f"{_NO_GRAPH}. For the gradient of a weight by itself (an adaptive loss weight) let the layer compute with "
    "copy = weight.clone(), and return the copy too: torch.autograd.grad(loss, copy, retain_graph=True)",
    "register_hook": "Its gradient is made by a reduction, not in a graph. Call register_post_accumulate_grad_hook, "
    "which gets the parameter, whose .grad is this rank's piece. After backward() param.grad.norm() is the norm of the "
    "full gradient",
    "randn_like": "torch.zeros_like(p).normal_() is this rank's piece of the same random numbers",
    "rand_like": "torch.zeros_like(p).uniform_() is this rank's piece of the same random numbers",
    "chunk": "Leave fully_shard out. Tensor and expert parallelism come first: parallelize the model before "
    "StreamShard(model)",
}


def refuse(func: Callable[..., Any], tensor: ShardedTensor, why: str = "") -> NoReturn:
    """Raise because `func` needs elements of other ranks."""
    name, piece = name_of(func).strip("_"), tensor.piece
    if not why and name in _WHY:
        why = _WHY[name]
    elif piece.is_weight:
        why = f"{why or f'{_RIGHT}: {_WHOLE}'}. {_COMPUTE}"
    raise ShardingError(
        f"{name}() of {piece.what} outside of its model's forward: this rank has only {piece}. "
        f"{why or f'{_RIGHT}: {_WHOLE}'}"
    )


def _detach_in_place(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Any) -> Any:
    """A gradient has no graph. torch refuses, because it is a view of main grads."""
    return func(*args, **kwargs) if tensor.requires_grad else tensor


def _refuse_saving(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    raise ShardingError(
        f"{tensor.piece.what} is one rank's piece of {tensor.piece.shape} and is not saved as if it were full. Call on "
        "all ranks instead, to save a run, streamshard.save_checkpoint(directory, model, optimizer); for full weights, "
        "model.full_state_dict() or streamshard.export_safetensors(model, directory)"
        + (f". {_COMPUTE}" if name_of(func) == "data_ptr" else "")  # kernels ask for it too
    )


def _refuse_op(func: Callable[..., Any], tensor: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> NoReturn:
    refuse(func, tensor)


# -- the closed list --------------------------------------------------------------------------------------------------

_ANSWERS: Mapping[str, _Answer] = {
    **dict.fromkeys(SHAPE, _shape),
    **dict.fromkeys(names("all amax amin any max mean min sum"), _reduce),
    **dict.fromkeys(names("allclose equal"), _are_equal),
    **dict.fromkeys(names("normal_ uniform_"), _random),
    **dict.fromkeys(names("__bool__ __float__ __format__ __index__ __int__ item"), _number),
    "detach_": _detach_in_place,
    "data_ptr": _refuse_saving,  # safetensors asks for the address alone, and writes the memory to a file
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _check_finite,
}
_BY_FUNCTION: Mapping[Callable[..., Any], _Answer] = {  # whose names stand for others too
    **dict.fromkeys(NORMS, _norm),
    torch.autograd.grad: _refuse_op,
}


def _look_up(func: Callable[..., Any]) -> _Answer | None:
    """The answer to `func`; None for a question about metadata, which the local tensor answers."""
    if is_metadata(func):
        return None
    name = name_of(func)
    is_elementwise = name.removeprefix("_foreach_").strip("_") in ELEMENTWISE
    other = _elementwise if is_elementwise else _random if is_init(func) else _refuse_op
    return _BY_FUNCTION.get(func) or _ANSWERS.get(name, other)


# Once per function: optimizers and clipping ask each gradient in each step.
_answer_to = functools.cache(functools.partial(untraced, _look_up))
