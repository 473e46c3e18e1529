"""Bad gradients: all ranks skip the same steps by the norm of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from streamshard import Precision, StreamShard
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    SETTINGS,
    Call,
    Tolerance,
    adamw,
    assert_same,
    each_setting,
    full_weights,
    stack_step,
)

NAN, INF = math.nan, math.inf


@on_ranks()
@each_setting
def test_steps_above_the_threshold_are_skipped_as_plain_pytorch_would(context: RankContext, settings: str) -> None:
    """Twelve steps, some with gradients that are too large, inf or nan on one rank."""
    skip_above, max_norm, norm_type = 50.0, 0.5, 2.0
    torch.manual_seed(7)
    plain = Stack()
    torch.manual_seed(7)
    model: Any = StreamShard(Stack(), precision=FP32, **SETTINGS[settings])
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    size, skipped = context.world_size, []
    for number, factor in enumerate([1.0, 1.0, 1e4, 1.0, INF, NAN, 1.0, -INF, 1e6, 1.0, 1.0, NAN]):
        factors = [factor if rank == number % size else 1.0 for rank in range(size)]
        for rank in range(size):
            stack_step(plain, Call(number, rank, size, factors[rank] / size))
        stack_step(model, Call(number, context.rank, size, factors[context.rank]))
        wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], norm_type)
        found = model.clip_grad_norm_(max_norm, norm_type)
        if not found <= skip_above:
            optimizer.zero_grad()
        assert math.isfinite(wanted) == math.isfinite(found)
        if math.isfinite(wanted):
            assert_same({"norm": found}, {"norm": wanted}, f"norm of step {number}")
        if math.isfinite(wanted) and wanted <= skip_above:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        else:
            skipped.append(number)
            plain_optimizer.zero_grad()
        plain_optimizer.step()
        optimizer.step()
        if number not in skipped:
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
    assert skipped == [2, 4, 5, 7, 8, 11]
    assert_same(full_weights(model), full_weights(plain), "weights", Tolerance(1e-4, 1e-6))


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_nothing_to_the_loss_scaler(context: RankContext, fused: bool) -> None:
    """Too large but finite: the scale goes on as after any step. Not finite: it backs off."""
    model: Any = StreamShard(Stack(), precision=Precision(param_dtype=torch.float16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for weight, scale in ((1e3, 16.0), (INF, 8.0)):
        before = full_weights(model)
        loss = model(vector_batch(0, context.rank)).float().square().mean() * weight
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        if not model.clip_grad_norm_(1.0) <= 10.0:
            optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert_same(full_weights(model), before, "weights after a skipped step", EXACT)
        assert not optimizer.state
