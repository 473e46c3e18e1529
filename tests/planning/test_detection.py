"""Which layers are found, in any model, and what settings make of them; a word where much lies outside."""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import Precision, StreamShard
from streamshard.conventions import conventions
from streamshard.errors import ConfigError, RankMismatchError, UnitError
from streamshard.planning.discovery import embedding_params, find_units
from streamshard.planning.structure import params_of, tie_on_meta
from tests.counts import counted_collectives, engine_inside
from tests.models import DIM, Block, Layer, Stack, TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, assert_trains_like_plain, stack_step
from tests.scenarios import BF16, RoutedStack


def _units(model: nn.Module, *named: str) -> list[str]:
    return [unit.name for unit in find_units(model, named or None)[1:]]


class Parts(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def _layers(count: int, width: int = 16) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


# ---------------------------------------------------------------------------------------------- transformers


# Sizes that a class has by default make nothing slow: nothing has memory. Layers by class, with a star if they are
# resident, and what may be outside.
MODELS: dict[str, tuple[dict[str, int], float]] = {
    "Qwen3ForCausalLM": ({"Qwen3DecoderLayer": 32}, 0.01),
    "MarianMTModel": ({"MarianEncoderLayer": 12, "MarianDecoderLayer": 12}, 0.01),
    "LlavaForConditionalGeneration": ({"CLIPEncoderLayer*": 24, "LlamaDecoderLayer": 32}, 0.01),
    "ConvNextV2Model": ({"ConvNextV2Layer": 18}, 0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_large_list_of_a_transformers_model_is_found(name: str) -> None:
    """Both halves of an encoder and decoder, all towers, whole layers; and not a table of small embeddings.

    Layers of towers with less than a quarter of the weights are resident.
    """
    layers, outside = MODELS[name]
    kind: Any = getattr(importlib.import_module("transformers"), name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers'
        model = kind(kind.config_class())
        conventions().tie_weights(model)
    tie_on_meta(model)
    root_unit, *units = find_units(model, None)
    found = [type(unit.modules[0]).__name__ + "*" * unit.is_resident for unit in units]
    assert Counter(name for name in found if re.search(r"Layer\*?$", name)) == layers
    embeddings = embedding_params(model)
    root = {each.param for each in root_unit.params} - embeddings
    weights = set(params_of(model).values()) - embeddings
    assert sum(param.numel() for param in root) < outside * sum(param.numel() for param in weights)


# ---------------------------------------------------------------------------------------------- plain models


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.layers = _layers(3, width)

    def forward(self) -> None:
        """Not called."""


class Experts(Stage):
    """A layer: the list is not nearly all there is in it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.attention = nn.Linear(width, width)


def _in(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{number}" for number in range(count)]


LARGE = TinyConfig(vocabulary=160)  # rows of the embedding: 2560 elements, of which a block has 2224
BLOCKS = _in("blocks", 4)


def _never_called() -> nn.Module:
    model: Any = TinyLM(LARGE)
    model.head = nn.ParameterDict({"w": torch.randn(160, 16)})
    return model


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "lists in a list": (
        lambda: Parts(layers=nn.ModuleList(nn.ModuleList([Layer(), nn.Linear(16, 16)]) for _ in range(3))),
        [f"layers.{layer}.{part}" for layer in range(3) for part in range(2)],
    ),
    "a dict of towers": (
        lambda: Parts(towers=nn.ModuleDict({key: nn.Sequential(*_layers(3)) for key in "ab"})),
        _in("towers.a", 3) + _in("towers.b", 3),
    ),
    "stages with lists": (
        lambda: Parts(stages=nn.ModuleList(Stage(width) for width in (16, 32))),
        _in("stages.0.layers", 3) + _in("stages.1.layers", 3),
    ),
    "layers with lists": (lambda: Parts(stages=nn.ModuleList(Experts(16) for _ in range(2))), _in("stages", 2)),
    "lists of a twentieth": (
        lambda: Parts(first=_layers(8), second=nn.ModuleList(nn.Linear(16, 4) for _ in range(2)), third=_layers(2, 4)),
        _in("first", 8) + _in("second", 2),
    ),
    "layers of a million": (
        lambda: Parts(first=_layers(32, 4096), second=_layers(2, 1024), third=_layers(2, 1023)),
        _in("first", 32) + _in("second", 2),
    ),
    "large embedding and head": (lambda: TinyLM(LARGE), ["embedding", *BLOCKS, "head"]),
    "small embedding and head": (TinyLM, BLOCKS),
    "tied embedding and head": (lambda: TinyLM(replace(LARGE, tied=True)), BLOCKS),
    "a head that is never called": (_never_called, ["embedding", *BLOCKS]),
    "beside a large embedding": (
        lambda: Parts(embedding=nn.Embedding(9999, 16), encoder=_layers(2), decoder=_layers(3)),
        ["embedding", *_in("encoder", 2), *_in("decoder", 3)],
    ),
}


def test_layers_and_large_modules_beside_them_are_found() -> None:
    """Lists of a twentieth of the weights, or a million parameters a layer; embeddings are not weights.

    Modules beside the layers are those whose parameters nothing else holds. They begin with slots of their own.
    """
    for what, (build, names) in FOUND.items():
        with torch.device("meta"):
            units = find_units(build(), None)[1:]
        assert [unit.name for unit in units] == names, what
        ends = [unit.name for unit in units if unit.is_resident and unit.may_join]
        assert ends == [name for name in names if name in ("embedding", "head")], what


def test_units_can_be_given_in_every_form() -> None:
    """By class, module or name; by that of a class, as for FSDP's transformer_layer_cls_to_wrap. No other is a unit."""
    model: Any = TinyLM(LARGE)
    for given in (Block, [Block], "Block", [*model.blocks], BLOCKS):
        assert [unit.name for unit in find_units(model, given)[1:]] == BLOCKS, given
    assert _units(model, "head", "Block") == [*BLOCKS, "head"]
    assert _units(Parts(Linear=nn.LayerNorm(4), other=nn.Linear(4, 4)), "Linear") == ["Linear"]  # a module's name first


# -- what `resident` makes of modules: units, or parts of the root unit -----------------------------------------------


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
        towers = {name: _layers(*size) for name, size in {**sizes, "main": (16, 1024)}.items()}
        found = find_units(Parts(**towers), units, resident)[1:]
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
    assert _resident(["gate", "gate.linear"]) == _resident(["gate"])  # as two modules of one class may lie
    together = ["layers.0 .. layers.1", "layers.2*", "layers.3", "gate.linear*"]
    assert _resident(["layers.2", "gate.linear"], min_numel=2 * DIM * DIM) == together


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        (["layers.7"], "resident names 'layers.7', which is neither a module inside the model nor the class"),
        (["empty"], "unit 'empty' has no parameters"),
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


# -- small layers put together into one unit --------------------------------------------------------------------------

LAYER_BYTES = 4 * (16 * 16 + 16)  # of a `Layer` in fp32
PAIRS = 2 * LAYER_BYTES


def _units_of(size: int | str, precision: Precision = FP32) -> list[str]:
    model = StreamShard(Stack((16,) * 8), precision=precision, min_unit_size=size)
    return [unit.name for unit in engine_inside(model).units[1:]]


@on_ranks(2)
def test_the_size_is_in_bytes_of_param_dtype(context: RankContext) -> None:
    """A number or text, the same on all ranks. A unit is called by its first layer and its last."""
    pairs = ["layers.0 .. layers.1", "layers.2 .. layers.3", "layers.4 .. layers.5", "layers.6"]
    assert _units_of(0) == _units_of(LAYER_BYTES) == _units_of("1KiB") == [f"layers.{k}" for k in range(7)]
    assert _units_of(LAYER_BYTES + 1) == _units_of(PAIRS) == _units_of("2KB") == _units_of(LAYER_BYTES, BF16) == pairs
    assert _units_of("1GiB") == ["layers.0 .. layers.6"]
    for size in (-1, "small", 1.5, True, None):
        with pytest.raises(ConfigError, match=f"min_unit_size={size!r}: wanted 0 or more bytes, or text"):
            _units_of(size)  # type: ignore[arg-type]
    with pytest.raises(RankMismatchError, match="different settings: rank 0 has min_unit_size="):
        _units_of(context.rank)


@on_ranks(2)
def test_tiny_layers_do_not_pay_a_collective_each(context: RankContext) -> None:
    """A unit is gathered twice, but for the two that stay at the turn, and reduced once, in whatever order it runs."""
    for order in ([1, 0, 3, 2, 5, 4, 7, 6], [0, 1, 0, 1, 2, 3, 4, 4, 6]):
        model: Any = StreamShard(RoutedStack(8), precision=FP32, min_unit_size=PAIRS)
        for number in range(3):
            model.route = order if number == 2 else range(8)
            with counted_collectives(model) as counts:
                stack_step(model, context.call(number))
        assert counts["all_gather"] == 2 * 4 - 2 + 1 + 1, order  # the root unit, the flags
        assert counts["reduce_scatter"] == 4 + 1, order
