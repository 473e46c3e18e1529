"""accelerate on rank processes of tests: as if each had been launched anew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.ranks import RankContext

__all__ = ["BOTH", "launched", "loader", "make_model", "stock", "reset"]

SAMPLES = 48


def reset() -> None:
    """Forget what accelerate keeps of the Accelerators of this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def launched(context: RankContext, **environment: str) -> Iterator[None]:
    """Inside, the environment is that of torchrun on CPUs, and accelerate has not been used yet."""
    before = dict(os.environ)
    rank, count = str(context.rank), str(context.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true")
    os.environ.update(environment)
    reset()
    try:
        set_seed(3)
        yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


def stock(**kwargs: Any) -> Accelerator:
    """accelerate's own, which trains with DistributedDataParallel."""
    return Accelerator(cpu=True, **kwargs)


BOTH: tuple[Callable[..., Any], ...] = (stock, StreamShardAccelerator)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout: float, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_model(seed: int = 5, dropout: float = 0.0) -> Net:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Net(dropout)


def loader(batch_size: int = 4, samples: int = SAMPLES, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of x [batch_size, 5] and y [batch_size, 1], the same data on every rank."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(11))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch_size, shuffle=shuffle)
