"""Every change of a model's modules is listed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from streamshard import Precision, StreamShard, register_forward_method
from streamshard.planning.structure import modules_of
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import engine_inside


class _Recurrent(nn.Module):
    """A module whose own methods and lists of weights are exchanged too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def encode(self, x: Any) -> Any:
        """[time, batch, 16] -> the same."""
        for layer in self.layers:
            x = layer(x)[0]
        return self.norm(x)


def _state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By the module's name and what: each module's class and entries."""
    modules = list(modules_of(model))
    classes: dict[tuple[str, str], Any] = {(name, "class"): type(module) for name, module in modules}
    return classes | {(name, key): value for name, module in modules for key, value in vars(module).items()}


@on_ranks(2)
@pytest.mark.parametrize("kind", [Stack, TinyLM, _Recurrent])
def test_all_changes_of_modules_are_listed(context: RankContext, kind: type[nn.Module]) -> None:
    """Classes, entries and methods."""
    plain = kind()
    before = _state_of(plain)
    model = StreamShard(plain, precision=Precision(fp32_modules=["norm"] if kind is _Recurrent else []))
    if kind is _Recurrent:
        register_forward_method(model, "encode")
    edits = engine_inside(model).edits_of()
    assert edits is not None
    names = {id(module): name for name, module in modules_of(model)}
    changed = {place for place, value in _state_of(model).items() if value is not before.get(place)}
    assert {(names[number], what) for number, what in edits.edits} == changed
