"""Which optimizers step on pieces of parameters, and why others cannot.

Known to work element by element means the exact class: a subclass may do anything, and so may another class of the same
package. `elementwise` declares further ones. `WholeParameterOptimizer` runs any other.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from streamshard.comm.communicator import Communicator
from streamshard.errors import ShardingError
from streamshard.guards.sharded_parameter import ShardedParameter
from streamshard.guards.sharded_tensor import piece_of

# By the full names of their definitions.
_ELEMENTWISE = re.compile(
    r"torch\.optim\.\w+\.(SGD|Adam|AdamW|Adamax|NAdam|RAdam|RMSprop|Adagrad|Adadelta|Rprop|ASGD)"
    r"|schedulefree\.\w+\.(SGD|AdamW|RAdam)ScheduleFree|lion_pytorch\.lion_pytorch\.Lion|torchao\.optim\.adam\._AdamW"
    r"|bitsandbytes\.optim\.\w+\.(Paged)?(SGD|Adam|AdamW|Lion|RMSprop|Adagrad)(32bit)?"
)
# Moments in blocks of as many elements at most have a scale each: known on pieces that are cut between blocks.
_IN_BLOCKS = re.compile(
    r"bitsandbytes\.optim\.\w+\.(Paged)?(SGD|Adam|AdamW|Lion|RMSprop|Adagrad)8bit"
    r"|torchao\.optim\.adam\.AdamW?(8bit|4bit|Fp8)"
)
BLOCK_NUMEL = 4096  # the packages leave smaller tensors in fp32, and a multiple of all their blocks

_Class = TypeVar("_Class", bound=type[Optimizer])
_DECLARED = "_streamshard_elementwise"  # attribute of a class that `elementwise` was given, not of its subclasses


def elementwise(optimizer_class: _Class) -> _Class:
    """Declare that an optimizer works element by element, so that it may step on pieces of parameters.

    The update of each element may depend on that element's gradient, weight and state, and on numbers that are the same
    for all elements; not on a norm, a mean, a shape or a neighbour. Nothing checks this. Can be used as a decorator.

    A declared class that holds another optimizer and steps it (Lookahead, SAM) runs on sharded parameters instead:
    norms are those of full tensors, and operations that need elements of other ranks raise.

    Args:
        optimizer_class: exactly this class; subclasses have to be declared by themselves.

    Returns:
        The same class.
    """
    setattr(optimizer_class, _DECLARED, True)
    return optimizer_class


def is_elementwise_class(kind: type) -> bool:
    """Whether `kind` is known, or declared, to work element by element, perhaps in blocks of `BLOCK_NUMEL`."""
    return _DECLARED in vars(kind) or _ELEMENTWISE.fullmatch(full_name(kind)) is not None or works_in_blocks(kind)


def is_declared(kind: type) -> bool:
    """Whether `elementwise` was given `kind`."""
    return _DECLARED in vars(kind)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that `optimizer` holds and steps. Their state may be its own."""
    return [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]


def works_in_blocks(kind: type) -> bool:
    """Whether pieces of parameters have to be cut between blocks of `BLOCK_NUMEL` for `kind`."""
    return _DECLARED not in vars(kind) and _IN_BLOCKS.fullmatch(full_name(kind)) is not None


def full_name(kind: type) -> str:
    """The name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class StepsWhole(Protocol):
    """A `WholeParameterOptimizer`, as modules see it that do not import `streamshard.optim`."""

    def owners(self) -> Mapping[int, int]:
        """By the id of a parameter that is stepped in full, the rank that does so."""

    def in_place(self) -> list[Optimizer]:
        """The optimizers of all other parameters, whose pieces they step."""

    def settle(self, ranks: Communicator) -> None:
        """Prepare for the collection of state. Collective."""

    def split_stacks(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Full state with an entry for each parameter, where the optimizer saves one for several."""

    def join_stacks(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse of `split_stacks`."""


def steps_whole(optimizer: Optimizer) -> StepsWhole | None:
    """`optimizer`, if it is a `WholeParameterOptimizer`, or is around one."""
    # By an attribute: `streamshard.optim` lies above this module.
    return cast(StepsWhole, optimizer) if hasattr(optimizer, "owner_of") else None


def params_in(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """The parameters of an optimizer's groups, in order. A state dict numbers them in this order."""
    params: list[nn.Parameter] = []
    for group in groups:
        params += group["params"]
    return params


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise unless every element's update is known to depend on that element alone, or on its block."""
    kind, name = type(optimizer), full_name(type(optimizer))
    pieces = [*filter(None, map(piece_of, params_in(optimizer.param_groups)))]  # one rank has whole parameters
    if pieces and not is_elementwise_class(kind):
        raise ShardingError(
            f"{name} is not known to work element by element, and each rank has pieces of parameters. "
            f"{_how_to_step(optimizer, has_parts=any(piece.box for piece in pieces))}. An optimizer that shards its "
            "state, such as ZeroRedundancyOptimizer, is not needed: use its inner class"
        )
    asked = getattr(optimizer, "args", None) if name.startswith("bitsandbytes.") else None
    is_clipping = getattr(asked, "max_unorm", 0.0) > 0.0 or getattr(asked, "percentile_clipping", 100) < 100
    if is_clipping or not getattr(asked, "block_wise", True):
        raise ShardingError(
            f"{name} with max_unorm, percentile_clipping or block_wise=False takes norms of parameters or gradients in "
            "its kernels, of this rank's pieces alone: leave these options away, and use model.clip_grad_norm_"
        )
    if pieces and any(group.get("caution") for group in optimizer.param_groups):  # of timm, by any class
        raise ShardingError(
            f"{name} with caution=True takes a mean over each parameter: do not declare it elementwise, run it in a "
            "streamshard.optim.WholeParameterOptimizer, or leave caution away"
        )
    if works_in_blocks(kind):
        refuse_on_host(optimizer, params_in(optimizer.param_groups), "keeps state in blocks of elements")
        _refuse_other_blocks(optimizer, name, getattr(asked, "min_8bit_size", BLOCK_NUMEL))


def _how_to_step(optimizer: Optimizer, *, has_parts: bool) -> str:
    """What to do with an optimizer that is not known, for messages. `has_parts`: it steps parts of DTensors."""
    kind = type(optimizer)
    if inner_optimizers(optimizer):
        return (
            "It is around another optimizer: if its own code works element by element, or takes norms of parameters "
            f"and gradients, declare it: streamshard.optim.elementwise({kind.__name__})"
        )
    run = f"streamshard.optim.WholeParameterOptimizer(model.parameters(), {kind.__name__}, ..)"
    whole = f"To step whole parameters, each on one rank, write optimizer = {run}"
    other = "take another optimizer, such as torch.optim.AdamW"
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        whole = f"It steps with a closure, so no rank can step whole parameters by itself: {other}"
    elif has_parts:
        whole = f"No rank can step whole DTensors: {other}"
    declared = "If the update of each element depends on that element's gradient, weight and state alone, declare it: "
    declared += f"streamshard.optim.elementwise({kind.__name__})"
    is_subclass = any(map(is_elementwise_class, kind.__mro__[1:]))
    return f"{declared}. {whole}" if is_subclass else f"{whole}. {declared}"


def _refuse_other_blocks(optimizer: Optimizer, name: str, least_numel: int) -> None:
    """Raise unless blocks of pieces, and the kind of their state, are the full parameter's."""
    block_numel = getattr(optimizer, "block_size", 1)  # bitsandbytes takes incomplete blocks
    if BLOCK_NUMEL % block_numel:
        raise ShardingError(f"{name} with block_size={block_numel}: wanted a power of two, at most {BLOCK_NUMEL}")
    for piece in filter(None, map(piece_of, params_in(optimizer.param_groups))):
        # Of all ranks, not of this one alone: so all raise, or none.
        ranges = [piece.range_of(rank) for rank in range(piece.ranks.world_size)]
        if any(each.start % BLOCK_NUMEL for each in ranges):
            raise ShardingError(
                f"{name} keeps state in blocks of elements, and {piece.name!r} is cut between ranks within a block: "
                f"write StreamShard(model, align_pieces_to={BLOCK_NUMEL})"
            )
        numels = {piece.place.numel, *(each.numel for each in ranges)} - {0}
        if len({numel >= least_numel and numel % block_numel == 0 for numel in numels}) > 1:
            raise ShardingError(
                f"{name} keeps fp32 state of tensors with fewer than {least_numel} elements or an incomplete block. "
                f"Some of {piece.name!r} ({piece.place.numel} elements) and its pieces on ranks "
                f"({[each.numel for each in ranges]}) are such, and others are not: give this parameter to another "
                "optimizer, such as torch.optim.AdamW, or use another number of ranks"
            )


def refuse_on_host(optimizer: Optimizer, params: Sequence[nn.Parameter], why: str) -> None:
    """Raise if state in host memory would be stepped by `optimizer`, which cannot do so because of `why`."""
    for param in params:
        if isinstance(param, ShardedParameter) and param.piece.is_on_host:
            raise ShardingError(
                f"{full_name(type(optimizer))} {why}, and the state of {param.piece.name!r} lies in host memory, whose "
                "parts are stepped one after the other: take an elementwise optimizer such as torch.optim.AdamW, or "
                'leave offload="state" away'
            )
