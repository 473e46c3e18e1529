"""Every change of a model's modules is listed, and can be undone."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from streamshard import Precision, StreamShard, register_forward_method
from streamshard.guards.modules import MISSING
from streamshard.planning.structure import modules_of
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import engine_inside

_STATE = ("_parameters", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks")


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


def _state_of(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """By name, each module's class and entries, hooks by their number."""
    return {
        name: (
            type(module),
            {key: len(value) if key in _STATE[1:] else value for key, value in vars(module).items()},
        )
        for name, module in modules_of(model)
    }


@on_ranks(2)
@pytest.mark.parametrize("kind", [Stack, TinyLM, _Recurrent])
def test_all_changes_of_modules_are_listed_and_can_be_undone(context: RankContext, kind: type[nn.Module]) -> None:
    """Classes, entries, methods and hooks. Parameters stay pieces."""
    plain = kind()
    before = _state_of(plain)
    model = StreamShard(plain, precision=Precision(fp32_modules=["norm"] if kind is _Recurrent else []))
    if kind is _Recurrent:
        register_forward_method(model, "encode")
    edits = engine_inside(model).edits_of()
    assert edits is not None
    changed = {(name, key) for name, (_, entries) in _state_of(model).items() for key in entries}
    changed -= {(name, key) for name, (_, entries) in before.items() for key in entries}
    names = {module: name for name, module in modules_of(model)}
    assert {(names[edit.module_of()], edit.what) for edit in edits.edits if edit.before is MISSING} == changed
    edits.undo()
    after = _state_of(plain)
    assert after.keys() == before.keys()
    for name, (kind_before, entries) in before.items():
        assert after[name][0] is kind_before, name
        assert after[name][1].keys() == entries.keys(), name
        assert all(after[name][1][key] is entries[key] or after[name][1][key] == entries[key] for key in _STATE), name
    assert edits.edits == []
