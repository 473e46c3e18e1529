"""Models from the meta device: room is made for what they have, and nobody computes with it before it has values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import RankMismatchError, ShardingError, StreamShard, export_safetensors, init_weights
from tests.compare import assert_same, full_weights
from tests.counts import engine_inside
from tests.models import DIM, NormStack, Stack, TinyConfig, TinyLM, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, lm_step, stack_step


def on_meta(make: Callable[[], nn.Module]) -> Any:
    """What `make` makes, without values."""
    with torch.device("meta"):
        return make()


def assert_empty(model: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=match):
        model(vector_batch(0, 0))


@on_ranks(1, 2)
def test_sharding_a_meta_model_keeps_its_parameter_objects(context: RankContext) -> None:
    model = on_meta(lambda: TinyLM(TinyConfig(tied=True)))
    before = dict(model.named_parameters())
    for param in before.values():
        param.tag = 3
    calls: list[nn.Parameter] = []
    model.positions.register_post_accumulate_grad_hook(calls.append)
    model.norm.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model = StreamShard(model, precision=FP32)
    assert model.head.weight is model.embedding.weight
    for name, param in model.named_parameters():
        assert param is before[name]
        assert param.tag == 3
        assert param.device == context.device
        assert param.requires_grad is not name.startswith("norm")
        assert param.isnan().all()
    torch.manual_seed(0)
    plain = TinyLM(TinyConfig(tied=True))
    model.load_state_dict(plain.state_dict())
    init_weights(model, lambda module: model.scale.fill_(1.5))
    lm_step(model, context.call(0))
    assert calls == [model.positions]
    (model.positions**2).sum().backward()  # a penalty on what it is, which autograd adds by itself
    assert calls == [model.positions] * 2
    optimizer.step()
    assert not torch.equal(full_weights(model)["positions"], plain.positions)


@on_ranks(1, 2)
def test_using_an_empty_model_raises_and_names_an_empty_tensor(context: RankContext, tmp_path: Path) -> None:
    model: Any = StreamShard(on_meta(Stack), precision=FP32)
    empty = r"parameter 'layers.0.linear.weight', and 9 more, is empty.*load_safetensors.*init_weights"
    assert_empty(model, "a forward, but " + empty)
    with pytest.raises(ShardingError, match=empty):
        model.layers[1](vector_batch(0, 0))
    refused: dict[str, Callable[[], object]] = {
        "full_state_dict": model.full_state_dict,
        "export_safetensors": lambda: export_safetensors(model, tmp_path),
        r"state_dict\(\)": model.state_dict,
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    for what, call in refused.items():
        with pytest.raises(ShardingError, match=f"{what}, but {empty}"):
            call()
    print(model.memory_report())


class _Scaled(NormStack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))


@on_ranks(1, 2)
def test_state_dicts_of_the_model_and_of_its_parts_fill_a_meta_model(context: RankContext) -> None:
    """The first that has none is named; then it trains. A value of another shape fills nothing, buffers count too.

    A scalar takes shape 1, which old files have, as in plain torch.
    """
    torch.manual_seed(0)
    plain = _Scaled()
    model: Any = StreamShard(on_meta(_Scaled), precision=FP32)
    assert model.norms[0].running_mean.isnan().all()
    state = {**plain.state_dict(), "scale": torch.tensor([0.5])}
    model.load_state_dict({name: state[name] for name in list(state)[:5]}, strict=False)
    assert_empty(model, r"parameter 'layers.2.linear.weight', and 15 more, is empty")
    with pytest.raises(RuntimeError, match=r"shape torch.Size\(\[3\]\) from .* torch.Size\(\[16, 16\]\)"):
        model.load_state_dict({"layers.2.linear.weight": torch.ones(3)}, strict=False)
    assert_empty(model, r"parameter 'layers.2.linear.weight', and 15 more, is empty")
    norm = {name: value for name, value in plain.norms[0].state_dict().items() if name != "running_var"}
    model.norms[0].load_state_dict(norm, strict=False)
    model.load_state_dict({name: value for name, value in state.items() if "norms.0" not in name}, strict=False)
    assert_empty(model, r"buffer 'norms.0.running_var' is empty: .*init_weights\(model, function\)")
    model.norms[0].load_state_dict({"running_var": torch.ones(DIM)}, strict=False)
    assert not engine_inside(model).empty
    assert_same(full_weights(model), plain.state_dict(), "weights")
    stack_step(model, context.call(0))


@on_ranks(1, 2)
def test_one_layer_on_meta_is_empty_and_the_others_are_taken_over(context: RankContext) -> None:
    torch.manual_seed(0)
    model: Any = Stack()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.layers[2].to("meta")
    model = StreamShard(model, precision=FP32)
    assert_empty(model, r"'layers.2.linear.weight', and 1 more, is empty")
    init_weights(model, lambda module: [param.zero_() for param in module.parameters()])
    for name, value in full_weights(model).items():
        assert torch.equal(value, before[name] * (not name.startswith("layers.2"))), name


@on_ranks(2)
@pytest.mark.parametrize("make", [TinyLM, NormStack])
def test_rank_0_has_values_for_ranks_that_have_none(context: RankContext, make: Callable[[], Any]) -> None:
    """One model in the memory of a machine. Buffers too: those of rank 0 count."""
    torch.manual_seed(0)
    plain = make()
    for buffer in plain.buffers():
        buffer.copy_(torch.ones_like(buffer) + 1)
    model = StreamShard(copy.deepcopy(plain) if context.rank == 0 else on_meta(make), precision=FP32)
    assert not engine_inside(model).empty
    assert_same(full_weights(model), plain.state_dict(), "weights")
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), "buffers")


@on_ranks(2)
def test_a_tensor_on_meta_on_rank_0_but_not_on_other_ranks_is_refused(context: RankContext) -> None:
    model = on_meta(Stack) if context.rank == 0 else Stack()
    with pytest.raises(RankMismatchError, match="'head.bias' is on the meta device on rank 0 .*rank 0's weights count"):
        StreamShard(model)
    assert not isinstance(model, StreamShard)
    StreamShard(on_meta(Stack) if context.rank == 1 else Stack())


@on_ranks(1, 2)
def test_weights_that_init_empty_weights_has_untied_are_tied(context: RankContext) -> None:
    from accelerate import init_empty_weights

    with init_empty_weights():
        model: Any = TinyLM(TinyConfig(tied=True))
    assert model.head.weight is not model.embedding.weight
    model = StreamShard(model, precision=FP32)
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(0)
    plain = TinyLM(TinyConfig(tied=True))
    model.load_state_dict(plain.state_dict())
    tokens = token_batch(0, context.rank)
    torch.testing.assert_close(model(tokens), plain(tokens))
