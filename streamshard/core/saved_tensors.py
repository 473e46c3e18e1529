"""Saved-tensor hooks around a layer: what autograd keeps of the layer's weights for backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from streamshard.core.engine import Use
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.weights import advice, refuse_absent
from streamshard.torch_private import skip, untraced


@skip
def holding_back_weights(
    use: Use,
    need: Callable[[Use], None],
    pack_other: Callable[[torch.Tensor], Any],
    unpack_other: Callable[[Any], torch.Tensor],
) -> AbstractContextManager[None]:
    """Saved-tensor hooks around a layer, inside the hooks of other code (checkpoints, ``save_on_cpu``).

    Autograd does not check the versions of tensors that hooks have packed. So the other hooks get no weights of the
    layer. Backward puts the weights in place when it unpacks one. If backward has none, saving one raises.

    Args:
        use: the call of the layer.
        need: puts its weights in place.
        pack_other, unpack_other: the hooks around the layer.
    """
    slot = use.unit.weight_slot

    def pack(tensor: torch.Tensor) -> tuple[Any, Any]:
        """Called in forward with each tensor that is saved."""
        refuse_absent(tensor, use.unit.name)
        if not slot.holds(tensor):
            return pack_other(tensor), None
        if use.unit.index in use.graph.plan.weightless:
            name = use.unit.params[0].name
            raise ShardingError(
                f"backward needs the weight {name!r}, unlike in the first steps, when other layers have its buffer: "
                f"keep it in place, {advice(name)}"
            )
        return tensor.detach(), use

    @skip
    def unpack(packed: tuple[Any, Any]) -> Any:
        """Called in backward when a saved tensor is read."""
        saved, is_weight = packed
        if not is_weight:
            return unpack_other(saved)
        untraced(need, use)
        return saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@skip
def noting_weights(
    unit: Unit, saved: set[int], pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> AbstractContextManager[None]:
    """Saved-tensor hooks around a layer of `unit`: add the unit to `saved` if backward will need its weights.

    Args:
        unit: resident.
        saved: indices of units.
        pack, unpack: the hooks around the layer, which are called too.
    """

    def note(tensor: torch.Tensor) -> Any:
        if unit.weight_slot.holds(tensor):
            saved.add(unit.index)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(note, unpack)
