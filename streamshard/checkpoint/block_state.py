"""State in blocks: the codes and scales of 8-bit, 4-bit and fp8 optimizers.

[Note: state in blocks]
torchao's moment is a tensor made of parts: codes, a scale for each block of elements, and a table with a value for each
code. bitsandbytes keeps the same parts as separate tensors. Each number of a part belongs to 1, 2 (4-bit codes) or more
elements of the parameter, always a power of two, and pieces begin at multiples of `BLOCK_NUMEL`. So the parts of all
ranks, one after another, are the parts of the full moment, and any number of ranks can cut them again. The table is the
same on all ranks.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

from streamshard.core.optimizer_kinds import BLOCK_NUMEL
from streamshard.core.params import Param
from streamshard.errors import ShardingError
from streamshard.guards.piece import Piece

_CLASSES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
# bitsandbytes numbers the scales and tables of its two moments. Its codes are one for each element, so no part.
_PART = re.compile(rf"(?:.*\.)?(?:(?:{'|'.join(_CLASSES)})\.\w+|absmax[12]|qmap[12])")
_ATTRIBUTES = "attributes"
_NO_BLOCKS = "take an optimizer with a number for each element, such as torch.optim.AdamW"


def is_part(name: str) -> bool:
    """Whether `name` is the name of a part in files. See [Note: state in blocks]."""
    return _PART.fullmatch(name) is not None


def _class_of(name: str) -> Any:
    """torchao's class of this name, if it is in `_CLASSES` and torchao was imported. A checkpoint may have any name."""
    return getattr(sys.modules.get("torchao.optim.adam"), name, None) if name in _CLASSES else None


def take_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter, with a dict of parts in the place of each tensor of torchao."""
    apart = dict(values)
    for key, value in values.items():
        if type(value) is _class_of(name := type(value).__name__):
            parts, attributes = value.__tensor_flatten__()
            # None replaces the shape, which differs between ranks.
            attributes = [None if isinstance(each, tuple) else each for each in attributes]
            # By the class's name `is_part` knows them.
            apart[key] = {name: {part: getattr(value, part) for part in parts}, _ATTRIBUTES: attributes}
    return apart


def put_together(values: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The reverse of `take_apart`, for tensors of `shape`."""
    whole = dict(values)
    for key, value in values.items():
        name = next(iter(value), None) if isinstance(value, dict) else None
        if name in _CLASSES:
            attributes = [torch.Size(shape) if each is None else each for each in value[_ATTRIBUTES]]
            whole[key] = _class_of(name).__tensor_unflatten__(value[name], attributes)
    return whole


def extent_of(name: str, param: Param, shape: tuple[int, ...], *, is_local: bool = False) -> Piece:
    """This rank's piece of a tensor of state, which has a number for each element or for each block.

    Args:
        name: of the tensor.
        param: the parameter.
        shape: of the tensor for all elements of the parameter, or with `is_local` for this rank's.

    Raises:
        ShardingError: on all ranks alike; a block is cut between ranks.
    """
    piece = param.piece
    start, stop, last = piece.start, piece.stop, math.prod(piece.shape)
    numel = stop - start if is_local else last
    if is_part(name) and name.rpartition(".")[2].startswith("qmap"):
        return piece._replace(shape=shape, start=0, stop=math.prod(shape), local_shape=shape, box=())
    # Up to a power of two: an incomplete last block makes the quotient smaller.
    block = 1 << (-(-numel // math.prod(shape)) - 1).bit_length() if is_part(name) else 1
    if block == 1:
        return piece
    if piece.box:
        raise ShardingError(f"{name!r} has blocks of {block} elements, and {param.name!r} is a DTensor: {_NO_BLOCKS}")
    if any(piece.range_of(rank).start % block for rank in range(piece.ranks.world_size)):
        advice = f"write StreamShard(model, align_pieces_to={BLOCK_NUMEL})"
        raise ShardingError(f"{name!r} has blocks of {block} elements, and {param.name!r} is cut inside one: {advice}")
    # Rounded up for an incomplete last block.
    start, stop, last = (-(-each // block) for each in (start, stop, last))
    return piece._replace(shape=(last,), start=start, stop=stop, local_shape=(stop - start,))
