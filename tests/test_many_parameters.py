"""Thousands of small parameters in a layer, or thousands of layers: the host's work grows in proportion to them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamshard
from streamshard import (
    StreamShard,
    export_safetensors,
    full_optimizer_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    load_safetensors,
    plan,
    save_checkpoint,
)
from streamshard.optim import WholeParameterOptimizer
from tests.ranks import RankContext, on_ranks
from tests.test_meta_device import on_meta

FEW = 14
# Loops in comm/ ask until other ranks have come. torch's load_state_dict looks at all names for each layer.
NOT_COUNTED = (str(Path(streamshard.__file__).parent / "comm"), nn.modules.module.__file__)


class _Layer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(count)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.stack(list(self.scales)).sum(0)


def _parameters(count: int) -> nn.Module:
    return nn.Sequential(*[_Layer(count) for _ in range(2)])


def _layers(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])


class _Calls(dict[str, Counter[str]]):
    """By action, counts calls of each function, of Python and C, by where it is, or its caller."""

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        counts = self[name] = Counter[str]()

        def count(frame: Any, event: str, argument: Any) -> None:
            code = frame.f_code
            if event in ("call", "c_call") and not code.co_filename.startswith(NOT_COUNTED):
                called = getattr(argument, "__name__", "") if event == "c_call" else ""
                counts[f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {called}"] += 1

        sys.setprofile(count)
        try:
            return action()
        finally:
            sys.setprofile(None)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _everything(build: Callable[[int], nn.Module], count: int, directory: Path) -> dict[str, Counter[str]]:
    calls = _Calls()
    model: Any = calls("shard", lambda: StreamShard(build(count)))
    optimizers = [torch.optim.AdamW(model.parameters()), WholeParameterOptimizer(model.parameters(), torch.optim.AdamW)]
    for number, optimizer in enumerate(optimizers):
        kind, path = type(optimizer).__name__, directory / f"{count}-{number}"
        _step(model, optimizer)
        calls(f"{kind}: step", lambda: _step(model, optimizer))  # noqa: B023  # called at once
        calls(f"{kind}: save", lambda: save_checkpoint(path, model, optimizer))  # noqa: B023
        calls(f"{kind}: load", lambda: load_checkpoint(path, model, optimizer))  # noqa: B023
        state = calls(f"{kind}: collect", lambda: full_optimizer_state_dict(model, optimizer))  # noqa: B023
        calls(f"{kind}: scatter", lambda: load_optimizer_state_dict(model, optimizer, state))  # noqa: B023
    calls("collect", lambda: model.load_state_dict(model.full_state_dict(rank0_only=False)))
    calls("export", lambda: export_safetensors(model, directory / f"{count}-files"))
    fresh: Any = calls("shard on meta", lambda: StreamShard(on_meta(lambda: build(count))))
    calls("fill", lambda: load_safetensors(fresh, directory / f"{count}-files"))
    calls("print", lambda: repr(fresh))
    calls("plan", lambda: plan(lambda: build(count), 8))
    return calls


@on_ranks()
@pytest.mark.parametrize(("world_size", "build"), [(1, _layers), (2, _layers), (2, _parameters)])
def test_twice_the_parameters_take_less_than_three_times_the_calls(
    context: RankContext, tmp_path: Path, build: Callable[[int], nn.Module]
) -> None:
    """Of any function, so that a loop inside a loop shows before it takes time."""
    few, many = (_everything(build, count, tmp_path) for count in (FEW, 2 * FEW))
    for action, counts in many.items():
        grown = {each: (few[action][each], counts[each]) for each in counts}
        too_many = {each: two for each, two in grown.items() if two[1] > max(3 * two[0], 4 * FEW)}
        assert not too_many, f"{action}: {too_many}"
