"""Layers compute in fp8 by torchao: what StreamShard does beside it, all-gathers and reductions, changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from streamshard import Precision, ShardingError, StreamShard
from tests.models import TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, built, let_dynamo_look, lm_step
from tests.training.test_precision import Mixed, assert_same_main_weights, train_beside
from tests.training.test_programs import Selective

float8: Any = pytest.importorskip("torchao.float8", reason="needs torchao: pip install streamshard[test]")


def _config(recipe: str, **options: Any) -> Any:
    """The recipe, emulated: fp8 numbers, multiplied in fp32."""
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    names = [each.name for each in dataclasses.fields(config)]
    return float8.Float8LinearConfig(**{**{name: getattr(config, name) for name in names}, "emulate": True, **options})


def _in_fp8(kind: type[TinyLM], recipe: str, **options: Any) -> Any:
    model = built(lambda: kind(TinyConfig(depth=2)))
    float8.convert_to_float8_training(
        model, config=_config(recipe, **options), module_filter_fn=lambda module, name: name != "head"
    )
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 8
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    ("recipe", "kind", "is_compiled"), [("tensorwise", Selective, False), ("rowwise", TinyLM, True)]
)
def test_fp8_layers_train_as_in_one_process(
    context: RankContext, recipe: str, kind: type[TinyLM], is_compiled: bool
) -> None:
    """bf16 weights are gathered, torchao scales full ones: losses, gradients and fp32 main weights are equal."""
    mixed = Mixed(_in_fp8(kind, recipe), Precision())
    model = StreamShard(_in_fp8(kind, recipe))
    if is_compiled:
        let_dynamo_look()
        for each in (model, mixed.compute):
            each.blocks[0].compile(backend="aot_eager")
    train_beside(context, mixed, model, EXACT)
    assert_same_main_weights(model, mixed, EXACT)


@on_ranks(2)
def test_the_extension_of_fsdp2_is_refused_by_name(context: RankContext) -> None:
    """Its weights are tensors that FSDP2 asks to cast before an all-gather."""
    with pytest.raises(ShardingError, match="'blocks.0.attention.qkv.weight' is a .*enable_fsdp_float8_all_gather"):
        StreamShard(_in_fp8(TinyLM, "tensorwise", enable_fsdp_float8_all_gather=True))


@on_ranks(2)
def test_layers_that_are_converted_after_sharding_are_refused(context: RankContext) -> None:
    """They are other modules, which no unit knows."""
    model = StreamShard(built(TinyLM))
    float8.convert_to_float8_training(model, config=_config("tensorwise"))
    with pytest.raises(ShardingError, match="weight' "):
        lm_step(model, context.call(0))
