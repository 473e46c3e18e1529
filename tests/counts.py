"""Counts of calls, operators and collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of as engine_inside


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[bool]]:
    """For each call of `owner`'s function `name`: whether it returns something. No argument is kept."""
    function = getattr(owner, name)
    calls: list[bool] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(result is not None)
        return result

    with mock.patch.object(owner, name, call):
        yield calls


class _Collectives(Observer):
    """Records collectives and their units; None: flags, or an average of other things than main grads."""

    def __init__(self, engine: Engine) -> None:
        self.units: dict[Collective, list[int | None]] = {collective: [] for collective in Collective}
        self._n_units = len(engine.units)

    def on_collective(self, stream: StreamName, collective: Collective, tag: int | None, *_: object) -> None:
        self.units[collective].append(tag if tag is not None and tag < self._n_units else None)


@contextlib.contextmanager
def heard_collectives(engine: Engine) -> Iterator[dict[Collective, list[int | None]]]:
    """What `engine` issues inside, in order: for which unit, None for flags."""
    collectives = _Collectives(engine)
    with engine.streams.observed_by(collectives):
        yield collectives.units


class Operators(TorchDispatchMode):
    """Counts operators by name, such as ``aten.add.Tensor``: on a device each is a launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _OfTorch(Operators):
    """Counts torch's own collectives, by name without overload (``_allgather_base_``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_collectives(model: nn.Module) -> Iterator[Counter[str]]:
    """Count collectives inside, by name: torch's and those of the sharded `model`'s engine. They are there at the end.

    Those of the engine are operations of torch too where no memory is shared: they count twice.
    """
    counts = Counter[str]()
    with heard_collectives(engine_inside(model)) as heard, _OfTorch() as of_torch:
        yield counts
    counts.update({collective.value: len(units) for collective, units in heard.items() if units})
    counts.update(of_torch.counts)
