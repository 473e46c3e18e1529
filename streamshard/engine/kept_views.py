"""Views of weights that a layer keeps beyond its forward: refused by name. See [Note: kept views].

[Note: kept views]
What a layer makes of a weight's memory (``weight.t()``, ``weight.detach()``, ``weight[:3]``) and leaves on a module, in
a list or with a hook is another layer's weights once the slot goes to that layer. torch counts who has a storage, so
finding out that nobody new does takes 0.1 us; what autograd saves is held back without it (`holding_back_weights`).
Where there are more, Python's collector is asked who they are. Only what a module or a global can reach counts: what a
graph node keeps for its own backward (bitsandbytes' functions keep transposed weights) finds the right weights there,
since a unit is always gathered to the same slot.

What Python holds decides only whether this rank raises, never what it communicates.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from streamshard.errors import ShardingError
from streamshard.unit.buffers import WeightSlot
from streamshard.unit.unit import StreamedUnit

__all__ = ["count_references", "refuse_kept_views"]

_MOST_STEPS = 8  # from a view to the module that reaches it
_DEAD_ENDS = (types.FrameType, types.TracebackType, FunctionCtx, torch.Tensor, type)


def count_references(unit: StreamedUnit) -> None:
    """A layer of `unit` is about to compute: it leaves as many references to its slot as there are."""
    slot = unit.weight_slot
    slot.usual_references = min(slot.usual_references, slot.references)


def refuse_kept_views(unit: StreamedUnit, units: Sequence[StreamedUnit]) -> None:
    """A layer of `unit`, in a slot that others use next, has computed.

    Args:
        unit: whose.
        units: all, whose compute views may be kept.

    Raises:
        ShardingError: somebody keeps a view of its weights; names where.
    """
    slot = unit.weight_slot
    usual = slot.usual_references + slot.harmless_references
    if slot.references <= usual:
        return
    gc.unfreeze()  # the collector does not look through what was frozen
    keeper = _find_keeper(_views_in(slot, units))
    if keeper is not None:
        gc.collect()  # a model that nobody has any more
        keeper = _find_keeper(_views_in(slot, units))
    if keeper is not None:
        where, view = keeper
        raise ShardingError(
            f"a layer of {unit.name!r} keeps a view of one of its weights beyond its forward: {where}, "
            f"{tuple(view.shape)} {view.dtype}. It lies in a buffer that other layers use next: keep the parameter "
            "itself and take the view where it is used, or keep a clone()"
        )
    slot.harmless_references += max(slot.references - usual, 0)


def _views_in(slot: WeightSlot, units: Sequence[StreamedUnit]) -> list[torch.Tensor]:
    """All tensors that Python has in `slot`, but for the compute views."""
    own = frozenset[int]().union(*(unit.view_ids for unit in units))
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and id(each) not in own]
    return [tensor for tensor in tensors if slot.holds(tensor)]


def _find_keeper(views: list[torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """Where one of `views` can be reached from, and which; None if only graphs and running functions have them."""
    reached_from: dict[int, tuple[Any, torch.Tensor]] = {id(view): (None, view) for view in views}
    level: list[Any] = views
    for _ in range(_MOST_STEPS):
        holders: list[Any] = []
        for holder in gc.get_referrers(*level) if level else ():
            if holder is level or holder is reached_from or id(holder) in reached_from or _is_dead_end(holder):
                continue
            referents = set(map(id, gc.get_referents(holder)))
            held = next(each for each in level if id(each) in referents)
            view = reached_from[id(held)][1]
            if isinstance(holder, nn.Module):
                return f"{type(holder).__name__}.{_attribute(holder, held, reached_from)}", view
            if type(holder) is dict and "__builtins__" in holder:
                return f"a global variable of {holder.get('__name__')}", view
            reached_from[id(holder)] = held, view
            holders.append(holder)
        level = holders
    return None


def _is_dead_end(holder: Any) -> bool:
    """Whether what it holds is not kept by it, or is our own."""
    if isinstance(holder, nn.Module):
        return False
    return isinstance(holder, _DEAD_ENDS) or type(holder).__module__.partition(".")[0] == "streamshard"


def _attribute(module: nn.Module, held: Any, reached_from: dict[int, tuple[Any, torch.Tensor]]) -> str:
    """The attribute of `module` by which it holds `held`, which may be its ``__dict__``."""
    if held is module.__dict__:
        held = reached_from[id(held)][0]
    return next((name for name, value in module.__dict__.items() if value is held), "__dict__")
