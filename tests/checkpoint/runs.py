"""Training runs that are saved and go on: models whose every part matters for what comes next."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from streamshard import StreamShard
from tests.models import VOCABULARY, TinyConfig, TinyLM, next_token_loss, token_batch
from tests.reference import FP32


class Counted(TinyLM):
    """A language model with a buffer that counts, one that is not saved, extra state, dropout and a tied head."""

    counts: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(TinyConfig(tied=True, dropout=0.2))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.calls: dict[str, Any] = {"seen": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.calls)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training:
            self.counts += 1
            self.calls["seen"] += 1
        return super().forward(tokens, mask) * (1.0 + self.counts[0] / 100.0)


class Run(NamedTuple):
    """What is saved together."""

    model: Any
    optimizer: torch.optim.Optimizer
    extra: dict[str, Any]


def start(seed: int, model: nn.Module | None = None, **settings: Any) -> Run:
    """A run from the beginning; another `seed` differs in every number."""
    torch.manual_seed(seed)
    sharded: Any = StreamShard(Counted() if model is None else model, **{"precision": FP32, **settings})
    decayed = [param for param in sharded.parameters() if param.ndim > 1]
    others = [param for param in sharded.parameters() if param.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=50)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return Run(sharded, optimizer, {"scheduler": scheduler, "scaler": scaler})


def steps(run: Run, first: int, last: int, *, spread: int | None = None) -> list[float]:
    """Train on batches [first, last) and give their losses, which depend on all there is in `run`.

    Args:
        run: changes.
        first, last: numbers of batches.
        spread: batches are the same for all numbers of ranks that divide this, and random numbers do not matter.
    """
    losses, scaler = [], run.extra["scaler"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run.model.train()
    for module in run.model.modules():
        if spread is not None and isinstance(module, nn.Dropout):
            module.p = 0.0
    for number in range(first, last):
        if spread is None:
            tokens = torch.randint(0, VOCABULARY, (2, 6))
            tokens[0, 0] = random.randrange(VOCABULARY)
            tokens[1, 0] = int(numpy.random.randint(VOCABULARY))
        else:
            rows = spread // world_size
            tokens = token_batch(number, 0, rows=spread)[rank * rows : (rank + 1) * rows]
        loss = next_token_loss(run.model(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        run.model.clip_grad_norm_(1.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.extra["scheduler"].step()
        mean = loss.detach()
        if spread is not None:
            dist.all_reduce(mean)
            mean /= world_size
        losses.append(mean.item())
    return losses


def weights_of(run: Run) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers, on every rank."""
    state = run.model.full_state_dict(rank0_only=False)
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
