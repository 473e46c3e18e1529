"""What the examples beside this file train: a small classifier of token sequences, on data made here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

VOCAB, LENGTH, CLASSES = 32, 12, 2


def make_data(samples: int = 70, seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """Sequences [LENGTH] int64, and whether small or large tokens are in the majority."""
    tokens = torch.randint(VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens, (tokens >= VOCAB // 2).float().mean(1).round().long())


def make_loaders(batch_size: int = 8) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """To train on, shuffled, and to evaluate on."""
    return (
        DataLoader(make_data(), batch_size=batch_size, shuffle=True),
        DataLoader(make_data(samples=37, seed=1), batch_size=batch_size),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    """From tokens [batch, LENGTH] int64 to logits [batch, CLASSES]."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
