"""`StreamShard(model)` shards in place: libraries that look at the model still see the one they know."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from streamshard import StreamShard
from tests.models import TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, lm_step


@on_ranks(1, 2)
def test_the_model_is_the_same_object_of_a_class_of_the_same_name(context: RankContext) -> None:
    """It is an instance of StreamShard and of its own class; its parts, and other models of its class, are not."""
    model = TinyLM()
    bound, unbound = inspect.signature(model.forward), inspect.signature(type(model).forward)
    assert StreamShard(model, precision=FP32) is model
    assert isinstance(model, StreamShard) and isinstance(model, TinyLM)
    assert not any(isinstance(other, StreamShard) for other in (TinyLM(), nn.Linear(2, 2), model.blocks[0]))
    for attribute in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), attribute) == getattr(TinyLM, attribute)
    assert inspect.signature(model.forward) == bound  # Trainers drop columns that forward does not name
    assert inspect.signature(type(model).forward) == unbound
    for called in (model, type(model)):
        assert "weight_slots" not in inspect.signature(called).parameters
    assert "units: 4 x Block" in repr(model)


@on_ranks(1, 2)
@pytest.mark.parametrize("tied", [False, True])
def test_names_attributes_and_parameters_stay(context: RankContext, tied: bool) -> None:
    """Also after a step: state-dict keys, the order of parameters, and the objects that an optimizer refers to."""
    model, plain = TinyLM(TinyConfig(tied=tied)), TinyLM(TinyConfig(tied=tied))
    model.remark = ["mine"]  # type: ignore[assignment]
    config, remark, blocks, before = model.config, model.remark, list(model.blocks), dict(model.named_parameters())
    StreamShard(model, precision=FP32)
    assert model.config is config and model.remark is remark
    assert all(a is b for a, b in zip(model.blocks, blocks, strict=True))
    assert (model.head.weight is model.embedding.weight) is tied
    for _ in range(2):
        assert list(model.state_dict()) == list(plain.state_dict())
        for kind in ("parameters", "buffers", "modules"):
            names = [[name for name, _ in getattr(each, f"named_{kind}")()] for each in (model, plain)]
            assert names[0] == names[1]
        for name, param in model.named_parameters():
            assert param is before[name]
            assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
        lm_step(model, Call(0, context.rank, context.world_size, 1.0))
