"""The ``_parameters`` dict of modules while their layers do not run. It tells `streamshard.core.edge` of look-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from streamshard.core.edge import read_weight
from streamshard.core.engine import Engine
from streamshard.errors import ShardingError


class OutsideParameters(dict[str, Any]):
    """The ``_parameters`` dict of a module that is not bound: its sharded parameters.

    Inside a pass a look-up gives the unsharded parameter. A resident unit is all-gathered first, a streamed unit's
    parameter is absent ([Note: absent weights]). ``items()`` and ``values()`` all-gather nothing:
    ``next(module.parameters()).dtype`` needs no weights.

    Outside of a pass a look-up gives the sharded parameter, for optimizers, initialisations and logs. The sharded
    parameter itself refuses computations that need the full tensor (see `streamshard.guards.sharded_tensor`).

    Args:
        params: name to sharded parameter.
        places: by sharded parameter, the indices of its unit and of the parameter in the unit.
        engine_of: returns the model's engine; weak, because the engine holds bindings of this dict.
    """

    __slots__ = ("_engine_of", "_places")

    def __init__(
        self,
        params: Mapping[str, nn.Parameter | None],
        places: Mapping[nn.Parameter, tuple[int, int]],
        engine_of: Callable[[], Engine | None],
    ) -> None:
        super().__init__(params)
        self._engine_of = engine_of
        self._places: dict[Any, tuple[int, int]] = {
            param: places[param] for param in params.values() if param is not None
        }

    def __getitem__(self, key: str) -> Any:
        """The unsharded parameter `key` inside a pass, the sharded one outside."""
        engine = self._engine_of()
        place = self._places.get(self.get(key))
        if place is not None and engine is not None and engine.current is not None:
            return read_weight(engine, *place)
        return super().__getitem__(key)

    def items(self) -> Any:
        """Unsharded parameters inside a forward, for ``module.parameters()``; else, as in backward's hooks, sharded."""
        engine, items = self._engine_of(), super().items()
        if engine is None or engine.phase is None or not engine.phase.is_forward:
            return items
        views = {param: engine.units[unit].params[index].unsharded for param, (unit, index) in self._places.items()}
        return [(key, views.get(value, value)) for key, value in items]

    def values(self) -> Any:
        """As `items`."""
        return [value for _, value in self.items()]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardingError(
            f"a module with the parameters {', '.join(self)} is part of a model sharded by StreamShard, and cannot be "
            "copied or pickled: they are pieces. Use full_state_dict()"
        )
