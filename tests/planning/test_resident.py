"""What `resident` makes of the modules that it names: units, or parts of the root unit; what it cannot name raises."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.errors import UnitError
from streamshard.planning.discovery import find_units
from tests.models import DIM, Layer, Stack, TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import assert_trains_like_plain, engine_inside, stack_step


class Wide(Stack):
    """Layers, a gate beside them that is used first, and a norm that is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Layer()
        self.empty = nn.Identity()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.second(self.first(self.gate(x))))


LAYERS = [f"layers.{k}" for k in range(4)]


def _resident(resident: Any, **settings: Any) -> list[str]:
    """Units, those that are resident with a star."""
    return [unit.name + "*" * unit.is_resident for unit in find_units(Wide(), None, resident, **settings)[1:]]


@pytest.mark.parametrize(
    ("resident", "wanted"),
    [
        ((), ["layers.0", "layers.1", "layers.2", "layers.3", "gate.linear*"]),
        ("layers.1", ["layers.0", "layers.1*", "layers.2", "layers.3", "gate.linear*"]),
        (
            ["layers.1.linear", "layers.1", "head", "gate.linear"],
            ["layers.0", "layers.1*", "layers.2", "layers.3", "head*", "gate.linear*"],
        ),
        (Layer, [*(f"{name}*" for name in LAYERS), "gate*"]),
    ],
)
def test_modules_named_in_resident_are_resident(resident: Any, wanted: list[str]) -> None:
    assert _resident(resident) == wanted


class Towers(nn.Module):
    def __init__(self, **sizes: tuple[int, int]) -> None:
        super().__init__()
        for name, (count, width) in {**sizes, "main": (16, 1024)}.items():
            setattr(self, name, nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))))


@pytest.mark.parametrize(
    ("sizes", "units", "resident", "wanted"),
    [
        ({"image": (5, 1024)}, None, (), {"image"}),  # 5 of 21 layers
        ({"image": (6, 1024)}, None, (), set()),
        ({"image": (12, 1023)}, None, (), {"image"}),  # less than a million parameters per layer
        ({"image": (5, 1024)}, [nn.Linear], (), set()),
        ({"image": (6, 1024)}, [nn.Linear], ["image"], {"image"}),
    ],
)
def test_layers_of_small_towers_are_resident(sizes: Any, units: Any, resident: Any, wanted: set[str]) -> None:
    """Unless the user names the units. So are all layers of a module named in `resident`."""
    with torch.device("meta"):
        found = find_units(Towers(**sizes), units, resident)[1:]
    assert len(found) == 16 + sum(count for count, _ in sizes.values())
    assert {unit.name.partition(".")[0] for unit in found if unit.is_resident} == wanted


def test_parameters_of_a_resident_module_inside_a_layer_lie_in_the_root_unit() -> None:
    """Their layer is streamed, also together with others. Layers around a resident one are put together apart."""
    model = nn.Sequential(*(nn.Sequential(Layer(), nn.LayerNorm(DIM)) for _ in range(4)))
    for size in (0, 2000):
        root_unit, *found = find_units(model, [nn.Sequential], ["0.1", "2.1"], min_numel=size)
        assert {param.names[0] for param in root_unit.params} == {
            f"{k}.1.{name}" for k in (0, 2) for name in ("weight", "bias")
        }
        assert not any(unit.is_resident for unit in found)
    together = ["layers.0 .. layers.1", "layers.2*", "layers.3", "gate.linear*"]
    assert _resident(["layers.2", "gate.linear"], min_numel=2 * DIM * DIM) == together


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (["layers.7"], "resident names 'layers.7', which is neither a module inside the model nor the class"),
        (["empty"], "unit 'empty' has no parameters"),
        (["gate", "gate.linear"], "unit 'gate' overlaps unit 'gate.linear', which lies inside it"),
        ("", "the whole model"),
    ],
)
def test_an_impossible_resident_module_is_named(resident: Any, message: str) -> None:
    with pytest.raises(UnitError, match=re.escape(message)):
        find_units(Wide(), None, resident)


@on_ranks(2)
def test_it_trains_like_plain_pytorch(context: RankContext) -> None:
    """Layers, what is beside them, and pairs of layers around a resident one; units of any kind; with no parameters."""
    for settings in (
        {"units": ["head", "layers.1", "layers.2.linear"]},
        {"resident": ["layers.1", "head"]},
        {"resident": ["layers.2"], "min_unit_size": 8 * DIM * DIM},
        {"resident": ["first", "layers.1.linear"]},
    ):
        assert_trains_like_plain(context, Wide, stack_step, **settings)


@on_ranks(2)
def test_resident_modules_are_printed_and_counted(context: RankContext) -> None:
    """In its own slots, which do not size the others."""
    model = StreamShard(Wide(), precision=Precision(), resident=["layers.1"])
    assert "units: 4 x Layer, Linear and the root unit; resident: layers.1, gate.linear" in repr(model)
    several = StreamShard(Wide(), resident=["layers.1", "layers.3"])
    assert "; resident: layers.*, gate.linear" in repr(several)
    tied = StreamShard(TinyLM(TinyConfig(tied=True)))
    assert "; resident: embedding.weight (tied)" in repr(tied)
    assert [unit.is_streamed for unit in engine_inside(model).units] == [False, True, False, True, True, False]
