"""Attributes of a model's modules that hold tensors, which forwards that take turns must not see of each other.

A forward may put a mask or an auxiliary loss into an attribute, for code behind a later layer. Modules around layers
are watched. Numbers stay common: a counter counts all forwards.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from streamshard.core.module_state import handle_of

_KINDS = (torch.Tensor, list, dict, tuple, type(None))
_OWN = frozenset(vars(nn.Module()))  # attributes of any module, such as ``_parameters``

Values = dict[tuple[int, str], Any]  # by the number of a mapping, and the key in it


class Attributes:
    """See the module.

    Args:
        model: sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mappings: list[MutableMapping[str, Any]] = []
        self._add(model)
        self._before = self._values()

    def _add(self, module: nn.Module) -> None:
        """Watch `module` and the modules in it, except layers, whose own forwards do not pause."""
        handle = handle_of(module)
        if handle is None or handle.unit is None:
            self._mappings += module.__dict__, module._buffers
            for child in module.children():
                self._add(child)

    def _values(self) -> Values:
        return {
            (number, key): value
            for number, mapping in enumerate(self._mappings)
            for key, value in mapping.items()
            if isinstance(value, _KINDS) and key not in _OWN
        }

    def enter(self, own: Values) -> None:
        """Set the attributes that a forward has set before, `own`. Others that existed get their first values."""
        changed = {place: self._before[place] for place in self.leave() if place in self._before}
        for (number, key), value in {**changed, **own}.items():
            self._mappings[number][key] = value

    def leave(self) -> Values:
        """The attributes that the forward has set so far."""
        return {place: value for place, value in self._values().items() if self._before.get(place, self) is not value}
