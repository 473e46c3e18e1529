"""Whole parameters for a while: what is done inside `summon_full_params` is right, or refused by what it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import StreamShard, export_safetensors, load_safetensors
from streamshard.errors import ShardingError
from tests.models import DIM, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, adamw, assert_same, full_grads, lm_step, stack_step


@on_ranks(1, 2)
def test_summoned_inside_itself_parameters_stay_whole(context: RankContext) -> None:
    """What is inside writes back when it ends, and takes nothing away from what is around it."""
    model = StreamShard(Stack(), precision=FP32)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    before, grads = model.full_state_dict(rank0_only=False), full_grads(model)
    with model.summon_full_params(writeback=True), torch.no_grad():
        model.head.weight.add_(1.0)
        with model.summon_full_params(writeback=True, with_grads=True):
            assert_same({n: p.grad for n, p in model.named_parameters()}, grads, "gradients")
            model.head.weight.grad = None
            model.head.weight.add_(1.0)
        assert model.head.weight.grad is None
        assert model.head.weight.shape == (1, DIM)
        model.head.weight.add_(1.0)
    before["head.weight"] += 3.0
    grads["head.weight"] = None
    assert_same(model.full_state_dict(rank0_only=False), before, "weights")
    assert_same(full_grads(model), grads, "gradients afterwards")


@on_ranks(2)
def test_a_state_dict_inside_is_whole_and_can_be_saved_and_loaded(context: RankContext, tmp_path: Path) -> None:
    """It is the model's, not pieces that refuse to be saved."""
    model = StreamShard(TinyLM(TinyConfig(tied=True)), precision=FP32)
    whole = model.full_state_dict(rank0_only=False)
    path = tmp_path / f"{context.rank}.pt"
    with model.summon_full_params():
        torch.save(model.state_dict(), path)
    assert_same(torch.load(path), whole, "saved")
    with model.summon_full_params(writeback=True):
        model.load_state_dict({name: value + 1 for name, value in whole.items()})
    assert_same(model.full_state_dict(rank0_only=False), {n: v + 1 for n, v in whole.items()}, "loaded")


@on_ranks(1, 2)
def test_what_works_with_pieces_is_refused_inside(context: RankContext, tmp_path: Path) -> None:
    """Passes, steps, and what collects or counts pieces; afterwards everything works as before."""
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = adamw(model)
    x = vector_batch(0, context.rank)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    refused: dict[str, Callable[[], object]] = {
        "a forward inside": lambda: model(x),
        "a forward": lambda: model.layers[0](x),
        "AdamW.step": optimizer.step,
        "check_weights": model.check_weights,
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "export_safetensors": lambda: export_safetensors(model, tmp_path),
        "load_safetensors": lambda: load_safetensors(model, tmp_path),
    }
    with model.summon_full_params(with_grads=True):
        for what, call in refused.items():
            with pytest.raises(ShardingError, match=rf"{what}.*summon_full_params"):
                call()
    with model.no_sync():
        model(x)
        with model.summon_full_params(), pytest.raises(ShardingError, match="a forward inside"):
            model(x)
    optimizer.step()
    stack_step(model, Call(1, context.rank, context.world_size, 1.0))


@on_ranks(1, 2)
def test_edits_inside_no_sync_are_what_the_next_forward_uses(context: RankContext) -> None:
    """Weights do not change between its passes, but where they are written back they do."""
    model = StreamShard(Stack(), precision=FP32)
    x = vector_batch(0, context.rank)
    with model.no_sync():
        model(x)
        with model.summon_full_params(writeback=True), torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.fill_(2.0)
        assert model(x).eq(2.0).all()


@on_ranks(2)
def test_gradients_and_tensors_that_would_be_lost_raise_at_the_end(context: RankContext) -> None:
    """With every piece back in its place and nothing written."""
    model = StreamShard(Stack(), precision=FP32)
    whole = model.full_state_dict(rank0_only=False)

    def penalty() -> None:
        model.head.weight.square().sum().backward()

    def reshape() -> None:
        model.head.weight.data = torch.zeros(2, DIM)

    def replace() -> None:
        model.head.weight = nn.Parameter(torch.zeros(1, DIM))

    head = model.head.weight
    for change, message in (
        (penalty, r"head\.weight.*gradient inside summon_full_params"),
        (reshape, r"head\.weight.*\(2, 16\), wanted \(1, 16\)"),
        (replace, r"head\.weight.*replaced"),
    ):
        with pytest.raises(ShardingError, match=message), model.summon_full_params(writeback=True):
            model.layers[0].linear.weight.data.zero_()
            change()
        model.head._parameters["weight"] = head
        assert_same(model.full_state_dict(rank0_only=False), whole, "weights")
    with pytest.raises(KeyError), model.summon_full_params(writeback=True):
        model.head.weight.data.zero_()
        raise KeyError("mine")
    assert_same(model.full_state_dict(rank0_only=False), whole, "weights after an exception")
    with model.summon_full_params(writeback=True, with_grads=True):
        penalty()
    assert torch.equal(full_grads(model)["head.weight"], 2 * whole["head.weight"])  # type: ignore[arg-type]


@on_ranks(2)
def test_a_pass_in_another_thread_is_refused_while_parameters_are_whole(context: RankContext) -> None:
    """Threads see the same parameters."""
    model = StreamShard(TinyLM(), precision=FP32)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            lm_step(model, Call(0, context.rank, 2, 1.0))
        except ShardingError as error:
            errors.append(error)

    with model.summon_full_params():
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert "a forward inside summon_full_params" in str(errors[0])
    step()
    assert len(errors) == 1
