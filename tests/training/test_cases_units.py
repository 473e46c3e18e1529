"""Which layers become units: found in transformers models and plain ones, or named by the user."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamshard import StreamShard
from tests import families
from tests.models import Block, Layer, TinyLM, image_batch, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, assert_trains_like_plain, counted_collectives, lm_step, stack_step

DEPTH = 4


def _traffic_of_forward(model: nn.Module, *inputs: Any, **named: Any) -> int:
    """Collectives that one forward without gradients issues, the buffers of a training step being sent before."""
    with torch.no_grad():
        model(*inputs, **named)
        with counted_collectives(model) as counts:
            model(*inputs, **named)
    return sum(counts.values())


# ---------------------------------------------------------------------------------------------- transformers


def _text_inputs(step: int, rank: int) -> dict[str, Tensor]:
    tokens = token_batch(step, rank)
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _image_inputs(step: int, rank: int) -> dict[str, Tensor]:
    return {"pixel_values": image_batch(step, rank), "labels": torch.tensor([rank % 3, step % 3])}


# Models of `DEPTH` layers, and their inputs.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Tensor]]]] = {
    "llama": (functools.partial(families.llama, num_hidden_layers=DEPTH), _text_inputs),
    "gpt2": (functools.partial(families.gpt2, n_layer=DEPTH), _text_inputs),
    "bert": (functools.partial(families.bert, num_hidden_layers=DEPTH), _text_inputs),
    "t5": (families.t5, _text_inputs),
    "mixtral": (functools.partial(families.mixtral, num_hidden_layers=DEPTH), _text_inputs),
    "vit": (functools.partial(families.vit, num_hidden_layers=DEPTH, num_labels=3), _image_inputs),
}


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_models_train_like_plain_pytorch(context: RankContext, family: str) -> None:
    """`StreamShard(model)` is all it takes, for decoders, encoders, both, experts and images."""
    build, inputs = FAMILIES[family]

    def step(model: nn.Module, call: Call) -> Tensor:
        return call.backward(model(**inputs(call.step, call.rank)).loss)

    assert_trains_like_plain(context, build, step, steps=3, checked=(0, 2))


@on_ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_repeated_layer_of_a_transformers_model_is_a_unit(context: RankContext, family: str) -> None:
    """Fewer units given by hand cost exactly one gather less each: the detected ones are the layers and embeddings."""
    build, inputs = FAMILIES[family]
    batch = inputs(0, context.rank)
    detected = StreamShard(build().eval(), precision=FP32)  # embeddings named in _no_split_modules are no layers
    layers = [name for name, module in build().named_modules() if type(module).__name__ in LAYER_CLASSES]
    assert len(layers) == DEPTH
    large = EMBEDDINGS.get(family, [])
    all_by_name = StreamShard(build().eval(), units=layers + large, precision=FP32)
    one_fewer = StreamShard(build().eval(), units=layers[1:] + large, precision=FP32)
    two_fewer = StreamShard(build().eval(), units=layers[2:] + large, precision=FP32)
    traffic = [_traffic_of_forward(model, **batch) for model in (detected, all_by_name, one_fewer, two_fewer)]
    assert traffic[0] == traffic[1]
    assert traffic[1] - traffic[2] == traffic[2] - traffic[3] > 0


EMBEDDINGS = {  # that are not tied, and larger than half a layer of such small models
    "bert": ["bert.embeddings.position_embeddings"],
    "gpt2": ["transformer.wpe"],
    "llama": ["model.embed_tokens", "lm_head"],
    "mixtral": ["model.embed_tokens", "lm_head"],
    "vit": ["vit.embeddings.patch_embeddings.projection"],
}
LAYER_CLASSES = {"LlamaDecoderLayer", "GPT2Block", "BertLayer", "T5Block", "MixtralDecoderLayer", "ViTLayer"}


@on_ranks(2)
def test_an_encoder_decoder_is_trained_with_frozen_encoder(context: RankContext) -> None:
    """Half of the units have nothing to reduce."""

    def build() -> nn.Module:
        model: Any = families.t5()
        for p in model.encoder.block.parameters():
            p.requires_grad_(False)
        return model  # type: ignore[no-any-return]

    def step(model: nn.Module, call: Call) -> Tensor:
        return call.backward(model(**_text_inputs(call.step, call.rank)).loss)

    assert_trains_like_plain(context, build, step, steps=3, checked=(0, 2))


# ---------------------------------------------------------------------------------------------- plain models


class ListModel(nn.Module):
    """Two lists: one holds the layers, the other one is small."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.ModuleList(nn.LayerNorm(16, bias=False) for _ in range(2))
        self.long = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> the same"""
        for module in (*self.short, *self.long):
            x = module(x)
        return x


def _sequential() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), *(Layer() for _ in range(4)), nn.Linear(16, 1))


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("build", [ListModel, _sequential], ids=["module_list", "sequential"])
def test_containers_of_repeated_layers_train_like_plain_pytorch(
    context: RankContext, build: Callable[[], nn.Module]
) -> None:
    """Also when the root itself is the Sequential, and when there are several lists."""
    assert_trains_like_plain(context, build, stack_step)


@on_ranks(2)
@pytest.mark.parametrize("build", [ListModel, _sequential], ids=["module_list", "sequential"])
def test_the_repeated_children_of_the_largest_container_are_the_units(
    context: RankContext, build: Callable[[], nn.Module]
) -> None:
    """The same traffic as with the layers named by hand."""
    x = vector_batch(0, context.rank)
    detected = StreamShard(build(), precision=FP32)
    named = StreamShard(build(), units=Layer, precision=FP32)
    fewer = StreamShard(build(), units=lambda name, _: name in ("long.1", "long.2", "1", "2"), precision=FP32)
    assert _traffic_of_forward(detected, x) == _traffic_of_forward(named, x) > _traffic_of_forward(fewer, x)


class NoLayers(nn.Module):
    """Nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, 16] -> [rows, 1]"""
        out: Tensor = self.second(torch.tanh(self.first(x)) * self.gain)
        return out


@on_ranks(1, 2, 3)
def test_a_model_without_repeated_layers_is_one_unit_and_warns(context: RankContext) -> None:
    """It trains right, and the user hears why it saves less memory than it could."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert_trains_like_plain(context, NoLayers, stack_step)
    assert len(heard) == 1
    assert "NoLayers" in str(heard[0].message)
    assert "units" in str(heard[0].message)


@on_ranks(2)
def test_a_bare_linear_layer_can_be_sharded(context: RankContext) -> None:
    """The smallest model there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_trains_like_plain(context, lambda: nn.Linear(16, 1), stack_step)


# ---------------------------------------------------------------------------------------------- given units


UNITS_OF: dict[str, Callable[[Any], Any]] = {
    "class": lambda model: Block,
    "class in a list": lambda model: [Block],
    "class in a set": lambda model: {Block},
    "class by name": lambda model: "Block",
    "modules": lambda model: list(model.blocks),
    "module list": lambda model: model.blocks,
    "names": lambda model: [f"blocks.{index}" for index in range(DEPTH)],
    "mixed": lambda model: ["blocks.3", model.blocks[0], model.blocks[1], "blocks.2"],
    "predicate": lambda model: lambda module: isinstance(module, Block),
    "predicate of name and module": lambda model: lambda name, module: name.count(".") == 1 and name[:7] == "blocks.",
}


@on_ranks(2)
@pytest.mark.parametrize("form", UNITS_OF)
def test_units_can_be_given_in_every_form(context: RankContext, form: str) -> None:
    """Each form selects the four blocks: the numbers of plain PyTorch, and the traffic of detection."""
    given = assert_trains_like_plain(context, TinyLM, lm_step, units_of=UNITS_OF[form])
    tokens = token_batch(0, context.rank)
    assert _traffic_of_forward(given, tokens) == _traffic_of_forward(StreamShard(TinyLM(), precision=FP32), tokens)


@on_ranks(2)
def test_modules_that_are_not_layers_can_be_units(context: RankContext) -> None:
    """The head, one block, and an inner part of another block."""
    units = ["head", "blocks.1", "blocks.2.attention"]
    assert_trains_like_plain(context, TinyLM, lm_step, units=units)


@on_ranks(2)
def test_a_single_unit_can_be_given(context: RankContext) -> None:
    """One block streams, the rest is the root unit."""
    assert_trains_like_plain(context, TinyLM, lm_step, units="blocks.2")


@on_ranks(2)
def test_every_submodule_with_parameters_can_be_a_unit(context: RankContext) -> None:
    """Units as small as a norm; nothing but the positions is left at the edge."""

    def leaves(model: nn.Module) -> list[nn.Module]:
        return [m for m in model.modules() if not list(m.children()) and list(m.parameters())]

    assert_trains_like_plain(context, TinyLM, lm_step, units_of=leaves)


@on_ranks(2)
def test_a_unit_inside_a_container_inside_a_unit_free_module_is_found_by_name(context: RankContext) -> None:
    """Names reach any depth."""
    build = _nested
    names = [f"body.stages.{stage}.{layer}" for stage in range(2) for layer in range(2)]
    given = assert_trains_like_plain(context, build, stack_step, units=names)
    x = vector_batch(0, context.rank)
    by_class = StreamShard(build(), units=[Layer], precision=FP32)
    assert _traffic_of_forward(given, x) == _traffic_of_forward(by_class, x)


def _nested() -> nn.Module:
    stages = nn.ModuleList(nn.Sequential(Layer(), Layer()) for _ in range(2))
    return nn.Sequential(OrderedDict(body=_Stages(stages), head=nn.Linear(16, 1)))


class _Stages(nn.Module):
    def __init__(self, stages: nn.ModuleList) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x
