"""Every change of a model's modules is listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from streamshard import Precision, StreamShard, register_forward_method
from streamshard.errors import ShardingError
from streamshard.guards.modules import HANDLE
from streamshard.planning.structure import modules_of
from tests.models import Stack, TinyLM
from tests.ranks import RankContext, on_ranks

_HOOKS = ("_load_state_dict_pre_hooks", "_state_dict_pre_hooks")


class _Recurrent(nn.Module):
    """A module whose own methods and lists of weights are exchanged too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)[0]
        return self.norm(x)


def _state_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """By name and key, each module's class and entries, and the number of its hooks."""
    state: dict[tuple[str, str], Any] = {}
    for name, module in modules_of(model):
        state[name, "class"] = type(module)
        state.update({(name, key): value for key, value in vars(module).items()})
        state[name, "hook"] = sum(len(state.pop((name, hooks))) for hooks in _HOOKS)
    return state


@on_ranks(2)
@pytest.mark.parametrize("kind", [Stack, TinyLM, _Recurrent])
def test_modules_change_in_a_few_places(context: RankContext, kind: type[nn.Module]) -> None:
    """Classes, hooks, the dict of parameters, and methods that compute; of RNNs lists of weights too."""
    plain = kind()
    before = _state_of(plain)
    model = StreamShard(plain, precision=Precision(fp32_modules=["norm"] if kind is _Recurrent else []))
    if kind is _Recurrent:
        register_forward_method(model, "encode")
    after, missing = _state_of(model), object()
    changed = {place for place, value in after.items() if before.get(place, missing) is not value}
    wanted = {"class", "hook", "_parameters", HANDLE}
    if kind is _Recurrent:
        wanted |= {"encode", "forward", "flatten_parameters", "_flat_weight_refs"}
    assert {key for _, key in changed} == wanted
    assert before.keys() <= after.keys()


@on_ranks(1)
def test_a_model_moves_to_its_device_whatever_the_default_dtype(context: RankContext) -> None:
    """It is cast by no move."""
    model = StreamShard(Stack())
    torch.set_default_dtype(torch.bfloat16)
    model.to("cpu")
    with pytest.raises(ShardingError, match=r"cannot be moved or cast to torch.bfloat16"):
        model.to(torch.bfloat16)
