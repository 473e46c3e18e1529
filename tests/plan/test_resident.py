"""What `resident` makes of the modules that it names: units, or parts of the root unit; what it cannot name raises."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.errors import RankMismatchError, UnitError
from streamshard.inspect import engine_inside
from streamshard.plan.discovery import find_groups
from tests.models import DIM, Layer, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, stack_step


class Wide(Stack):
    """Layers, a gate beside them that is used first, and a norm that is tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Layer()
        self.empty = nn.Identity()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, DIM] -> [rows, 1]"""
        return super().forward(self.second(self.first(self.gate(x))))


LAYERS = [f"layers.{k}" for k in range(4)]


def _resident(resident: Any, **settings: Any) -> list[str]:
    """Units, those that are resident with a star."""
    return [unit.name + "*" * unit.is_resident for unit in find_groups(Wide(), None, resident, **settings)[0]]


@pytest.mark.parametrize(
    ("resident", "wanted"),
    [
        ((), ["layers.0", "layers.1", "layers.2", "layers.3", "gate.linear*"]),
        ("layers.1", ["layers.0", "layers.1*", "layers.2", "layers.3", "gate.linear*"]),
        (
            ["layers.1.linear", "layers.1", "head"],
            ["layers.0", "layers.1*", "layers.2", "layers.3", "head*", "gate.linear*"],
        ),
        (["gate.linear", "layers.3"], ["layers.0", "layers.1", "layers.2", "layers.3*", "gate.linear*"]),
        (Layer, [*(f"{name}*" for name in LAYERS), "gate*"]),
    ],
)
def test_what_is_named_is_resident(resident: Any, wanted: list[str]) -> None:
    """Beside what is large anyway."""
    assert _resident(resident) == wanted


def test_modules_may_be_given() -> None:
    """Also beside units that are."""
    model = Wide()
    found, groups = find_groups(model, [Layer], [model.head, model.layers[2]])
    assert [unit.name for unit in found if unit.is_resident] == ["layers.2", "head"]
    assert [param.names[0] for param in groups[5]] == ["head.weight", "head.bias"]


def test_parameters_of_a_module_inside_a_layer_lie_in_the_edge_unit() -> None:
    """Their layer takes turns with the rest, also together with others."""
    model = nn.Sequential(*(nn.Sequential(Layer(), nn.LayerNorm(DIM)) for _ in range(4)))
    for size in (0, 2000):
        found, groups = find_groups(model, [nn.Sequential], ["0.1", "2.1"], min_unit_bytes=size)
        assert {param.names[0] for param in groups[0]} == {
            f"{k}.1.{name}" for k in (0, 2) for name in ("weight", "bias")
        }
        assert not any(unit.is_resident for unit in found)


def test_layers_around_a_resident_one_are_put_together_among_themselves() -> None:
    """Those before it, and those behind."""
    assert _resident("layers.2", min_unit_bytes=2 * DIM * DIM) == [
        "layers.0 .. layers.1", "layers.2*", "layers.3"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (["layers.7"], "resident names 'layers.7', but no module inside the model, nor the class of one"),
        ([nn.Conv2d], "resident names the class Conv2d, but the model has no module of that class"),
        ([nn.Linear(2, 2)], "resident holds a Linear that is not part of the model"),
        ([3], "resident holds 3: wanted module classes, modules, or names of either"),
        (3, "resident=3: wanted module classes, modules, names of either"),
        (["empty"], "resident names 'empty', which has no parameters"),
        (["layers"], "resident names 'layers', in which the layer 'layers.0' lies"),
        ("", "resident names the whole model"),
        (["first"], "resident names 'first', whose parameters other modules share"),
        (["layers.1.linear"], "resident names all modules of layer 'layers.1' that have parameters: name the layer"),
    ],
)
def test_what_cannot_be_resident_is_named(resident: Any, message: str) -> None:
    """Before anything is sharded."""
    with pytest.raises(UnitError, match=re.escape(message)):
        find_groups(Wide(), None, resident)
    with pytest.raises(UnitError, match=re.escape(message)):
        StreamShard(Wide(), resident=resident)


def test_one_of_two_that_lie_in_each_other_is_enough() -> None:
    """Where both are beside the layers."""
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "layers": nn.ModuleList(Layer() for _ in range(4))})
    with pytest.raises(UnitError, match=r"resident names 'a', and 'a\.0', which lies in it"):
        find_groups(model, [Layer], ["a", "a.0"])


@on_ranks(1, 2)
def test_it_trains_like_plain_pytorch(context: RankContext) -> None:
    """Layers, what is beside them, and pairs of layers around a resident one."""
    for settings in ({"resident": ["layers.1", "head"]}, {"resident": Layer}, {"resident": ["layers.2"]}):
        pairs = {"min_unit_size": 8 * DIM * DIM} if settings["resident"] == ["layers.2"] else {}
        assert_trains_like_plain(context, Wide, stack_step, **settings, **pairs)


@on_ranks(2)
def test_what_is_resident_is_printed_and_counted(context: RankContext) -> None:
    """In its own slots, which do not size the others."""
    model = StreamShard(Wide(), precision=Precision(), resident=["layers.1"])
    assert "units: 4 x Layer, Linear and the root unit; resident: layers.1, gate.linear" in repr(model)
    assert [unit.is_streamed for unit in engine_inside(model).units] == [False, True, False, True, True, False]
    model(vector_batch(0, context.rank)).sum().backward()
    report = model.memory_report()
    assert report.held_bytes == report.formula_bytes


@on_ranks(2)
def test_ranks_that_disagree_about_it_raise(context: RankContext) -> None:
    """By name."""
    with pytest.raises(RankMismatchError, match=r"resident layers\.1"):
        StreamShard(Wide(), precision=FP32, resident=["layers.1"] if context.rank else [])
