"""The figures of each step that a tracker gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from streamshard import StreamShard, step_statistics
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import engine_inside


@on_ranks(1, 2)
def test_each_step_has_its_norm_scale_times_and_skipped_steps(context: RankContext) -> None:
    """With a loss scaler: the second and the third step overflow. Nothing is observed after the context."""
    model: Any = StreamShard(Stack(), precision="fp16")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found, norms = [], []
    with step_statistics(model, scaler) as read:
        for overflows in (False, True, True, False):
            loss = model(vector_batch(0, context.rank)).float().square().mean()
            scaler.scale(loss * (torch.inf if overflows else 1.0)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            norms.append(float(model.clip_grad_norm_(1.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(read(grad_norm=norms[-1]))
    assert engine_inside(model).streams.observers == ()
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert [each["skipped_steps"] for each in found] == [0, 1, 2, 2]
    assert [each["loss_scale"] for each in found] == [1024.0, 512.0, 256.0, 256.0]
    assert [each["grad_norm"] for each in found] == pytest.approx(norms, nan_ok=True)
    for each in found:
        parts = [each[name] for name in ("compute_s", "exposed_all_gather_s", "exposed_reduction_s")]
        assert each["compute_s"] > 0.0 and min(parts) >= 0.0 and sum(parts) <= each["step_s"] * 1.0001
        assert (each["exposed_all_gather_s"] > 0.0) == (context.world_size > 1)
        json.dumps(each)
    with step_statistics(model) as read:  # without a scaler and a norm
        model(vector_batch(0, context.rank)).float().square().mean().backward()
        last = read()
    assert last["step"] == 1 and not {"grad_norm", "loss_scale", "skipped_steps"} & last.keys()
