"""Inside `summon_full_params`: reads and changes of full parameters are right, and everything else raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import StreamShard, export_safetensors, load_safetensors
from streamshard.errors import ShardingError
from tests.models import DIM, Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import FP32, Call, adamw, assert_same, stack_step


@on_ranks(1, 2)
def test_passes_steps_and_collecting_raise_inside_summon_full_params(context: RankContext, tmp_path: Path) -> None:
    """Passes (in other threads too), steps, and calls that collect pieces raise. Afterwards everything works."""
    model: Any = StreamShard(Stack(), precision=FP32)
    optimizer = adamw(model)
    x = vector_batch(0, context.rank)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))

    def in_a_thread() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(model, x).result()

    refused: dict[str, Callable[[], object]] = {
        "a forward inside": in_a_thread,
        "a forward": lambda: model.layers[0](x),
        "AdamW.step": optimizer.step,
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
        "export_safetensors": lambda: export_safetensors(model, tmp_path),
        "load_safetensors": lambda: load_safetensors(model, tmp_path),
        "full_state_dict": model.full_state_dict,
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    with model.summon_full_params():
        for what, call in refused.items():
            with pytest.raises(ShardingError, match=rf"{what}.*summon_full_params"):
                call()
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


@on_ranks(1, 2)
def test_changes_that_would_be_lost_raise_at_the_end(context: RankContext) -> None:
    """After the error every piece is back in its place, unchanged."""
    model = StreamShard(Stack(), precision=FP32)
    stack_step(model, Call(0, context.rank, context.world_size, 1.0))
    full = model.full_state_dict(rank0_only=False)

    def penalty() -> None:
        model.head.weight.square().sum().backward()

    def reshape() -> None:
        model.head.weight.data = torch.zeros(2, DIM)

    def replace() -> None:
        model.head.weight = nn.Parameter(torch.zeros(1, DIM))

    head = model.head.weight
    for change, message in (
        (penalty, r"parameter 'head\.weight' got a gradient inside summon_full_params"),
        (reshape, r"head\.weight.*\(2, 16\), wanted \(1, 16\)"),
        (replace, r"head\.weight.*replaced"),
    ):
        with (
            pytest.raises(ShardingError, match=message),
            model.summon_full_params(writeback=True),
        ):
            model.layers[0].linear.weight.data.zero_()
            change()
        model.head._parameters["weight"] = head
        assert_same(model.full_state_dict(rank0_only=False), full, "weights")
    with pytest.raises(KeyError), model.summon_full_params(writeback=True):
        model.head.weight.data.zero_()
        raise KeyError("mine")
    assert_same(model.full_state_dict(rank0_only=False), full, "weights after an exception")
