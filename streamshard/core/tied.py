"""A tied weight: its gradient as a head takes the weight's place while the backward goes on. See [Note: tied weights].

[Note: tied weights]
A head and an embedding share a weight, and a backward comes to the head first and to the embedding last. The gradient
of the head, as large as the weight, would wait beside the weight for that of the embedding. But behind the head the
backward needs no weight any more: a look-up's backward reads indices only. So the gradient is copied into the weight's
slot at once, and look-ups are added there when the unit is reduced.

The head's module computes with an *alias*, a leaf in the same memory. Autograd makes the alias's gradient when all its
uses in this backward are over, those of other passes included. (`model.accumulate` has leaves of its own, so no alias.)

Any other use may need the weight later: an embedding that scales by its weight, a soft prompt, a view that a hook has
kept. Then a tensor or a graph refers to the weight's memory besides the engine, and the gradient waits as that of any
other weight. Only code that runs again in backward, such as a checkpointed embedding, refers to a module. So the first
backward is watched: does anything read the weight behind the head? Code that begins to do so in a later step raises.
"""

from __future__ import annotations

import enum
import sys
from typing import Any

from torch import nn

from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.weights import leaf_of
from streamshard.torch_private import AsTensors, storage_uses, tensor_uses

_OWN_USES = 2  # of a parameter, as torch counts: its Python object, and the node that takes its gradient


class _Found(enum.Enum):
    """What backwards have shown."""

    NOTHING = enum.auto()
    FREE_BEHIND_HEAD = enum.auto()
    """Nothing reads the weight behind the head."""
    NEEDED = enum.auto()
    """Something does."""


class TiedHead:
    """The head's use of one tied weight.

    Args:
        unit: the root unit.
        place: of the parameter in the unit. It is in place, and trains.
        module: name of the head.

    Attributes:
        param: the parameter.
        alias: [full shape] compute dtype, the leaf that the head computes with.
    """

    def __init__(self, unit: Unit, place: int, module: str) -> None:
        self._module = module
        self.unit, self.param = unit, unit.params[place]
        self.alias: Any = leaf_of(self.param.unsharded, unit.guard.kinds[place])
        self._found = _Found.NOTHING
        self._least_uses = sys.maxsize  # of the slot's memory: the engine's own
        self._is_behind = False  # the backward has made the alias's gradient

    # -- forward --------------------------------------------------------------------------------------------------

    def put(self, module: nn.Module) -> list[str]:
        """Let `module`, which is about to compute, hold the alias.

        Returns:
            The names under which it does; for `take_away`.
        """
        params: Any = module._parameters
        keys = [key for key, param in dict.items(params) if param is self.param.unsharded]
        if keys:
            with AsTensors():
                self.alias.requires_grad_(self.param.unsharded.requires_grad)
        for key in keys:
            params[key] = self.alias
        return keys

    def take_away(self, module: nn.Module, keys: list[str]) -> None:
        """Let `module` hold the weight again."""
        for key in keys:
            module._parameters[key] = self.param.unsharded

    # -- backward -------------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """A forward or backward begins: the weight is in place. At first nobody has seen it yet."""
        self._least_uses = min(self._least_uses, storage_uses(self.unit.weight_slot.buffer))
        if self._is_behind:
            self._is_behind = False
            self._set_class(is_present=True)

    def pass_by(self) -> bool:
        """Backward has made the alias's gradient. Reads of the weight are noticed from here on.

        Returns:
            Whether the gradient may take the weight's place.
        """
        self._is_behind = True
        # Only this time: another holder may come and go.
        if self._found is _Found.FREE_BEHIND_HEAD and self._is_kept():
            return False
        self._set_class(is_present=False)
        return self._found is _Found.FREE_BEHIND_HEAD

    def _is_kept(self) -> bool:
        """Whether a graph, or a tensor that is not the engine's, refers to the weight's memory."""
        with AsTensors():
            uses = tensor_uses(self.param.unsharded)
        return uses > _OWN_USES or storage_uses(self.unit.weight_slot.buffer) > self._least_uses

    def end(self) -> None:
        """The backward has ended well. If gradients have the unit's slot, the alias is absent too until `put_back`."""
        if self._found is _Found.NOTHING and self._is_behind:
            self._found = _Found.FREE_BEHIND_HEAD
        self._is_behind = self.unit.guard.is_gone
        self._set_class(is_present=not self._is_behind)

    def read(self) -> None:
        """Code reads the weight behind the head.

        Raises:
            ShardingError: the weight has gone.
        """
        if self._found is _Found.FREE_BEHIND_HEAD:
            raise ShardingError(
                f"code that is recomputed in backward reads {self.param.name!r} behind the head, unlike in the first "
                "step, and the gradient has taken its place: keep the head in a slot of its own, StreamShard(model, "
                f"resident=[{self._module!r}])"
            )
        self._found = _Found.NEEDED
        self._set_class(is_present=True)

    def _set_class(self, *, is_present: bool) -> None:
        self.alias.__class__ = self.unit.guard.set_class(self.param.unsharded.place, is_present=is_present)
