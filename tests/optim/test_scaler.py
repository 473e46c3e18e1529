"""torch's loss scaler with a sharded model: an overflow on any rank skips the step on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from streamshard import Precision
from tests.models import Stack, vector_batch
from tests.optim.test_optimizers import WAYS
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, assert_same, full_weights, piece_of, sharded_model

FP16 = Precision(param_dtype=torch.float16)
SLOTS: dict[str, dict[str, Any]] = {"ZeRO-3": {}, "ZeRO-1": {"weight_slots": "all", "grad_slots": "all"}}


class Tiny(nn.Module):
    """Units of one element each: with two ranks or more, all pieces of the last rank are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :1]
        for layer in self.layers:
            x = x + layer(x)
        return x


def _backward(model: Any, scaler: GradScaler, rank: int, number: int = 0) -> None:
    loss = model(vector_batch(number, rank)).float().square().mean()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _copied(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": value.detach().clone()
        for number, values in enumerate(optimizer.state.values())
        for name, value in values.items()
    }


# -- skipping -----------------------------------------------------------------------------------------------------


# Unscaled by itself, or by the step; main grads in slots; pieces of which some are empty.
_OVERFLOWING: list[tuple[type[nn.Module], str, bool, str]] = [
    (Stack, "ZeRO-3", False, "foreach"),
    (Stack, "ZeRO-3", True, "plain"),
    (Stack, "ZeRO-1", False, "fused"),
    (Tiny, "ZeRO-3", False, "fused"),
]


@on_ranks(2)
@pytest.mark.parametrize(("build", "slots", "clips", "way"), _OVERFLOWING)
def test_an_overflow_in_one_piece_skips_the_step_on_all_ranks(
    context: RankContext, way: str, slots: str, build: type[nn.Module], clips: bool
) -> None:
    """Weights and optimizer state stay what they were; the step before and the step after do not skip."""
    model = sharded_model(build, precision=FP16, **SLOTS[slots])
    if build is Tiny and context.rank > 0:
        assert not any(piece_of(p).numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **WAYS[way])
    scaler = GradScaler("cpu", init_scale=8.0)
    last_owner = 0 if build is Tiny else context.world_size - 1
    for number, scale in enumerate((8.0, 4.0, 4.0)):
        weights, state = full_weights(model), _copied(optimizer)
        _backward(model, scaler, context.rank, number)
        if number == 1 and context.rank == last_owner:
            piece_of(next(p for p in model.parameters() if piece_of(p).numel()).grad)[...] = math.inf
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        after, state_after = full_weights(model), _copied(optimizer)
        if number == 1:
            assert_same(after, weights, "weights after a skipped step", EXACT)
            assert_same(state_after, state, "optimizer state after a skipped step", EXACT)
        else:
            assert all(value.isfinite().all() for value in after.values())
            assert any(not after[name].equal(weights[name]) for name in after), "nothing was trained"
