"""Distillation: a small model learns from a large frozen one. Both are sharded.

    torchrun --nproc-per-node 2 docs/examples/distillation.py

Freeze the teacher before StreamShard: then it keeps its dtype, and has neither gradients nor reductions.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from streamshard import StreamShard

VOCAB, LENGTH, SEQUENCES, TEMPERATURE = 64, 16, 4, 2.0


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        kind = {"nhead": 4, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, **kind) for _ in range(layers))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask.to(x.dtype))
        return self.head(x)


def make_models() -> tuple[nn.Module, nn.Module]:
    """The student and the teacher."""
    torch.manual_seed(0)
    return GPT(32, 2), GPT(64, 4).requires_grad_(False).eval()


def batch(step: int, rank: int) -> torch.Tensor:
    """[sequences, positions + 1] counting up from a random token."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return (torch.randint(VOCAB, (SEQUENCES, 1), generator=generator) + torch.arange(LENGTH + 1)) % VOCAB


def train(student: Any, teacher: Any, steps: int, rank: int, device: str = "cpu") -> list[float]:
    """Returns the loss of each step."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens = batch(step, rank).to(device)
        with torch.no_grad():
            wanted = log_softmax(teacher(tokens[:, :-1]) / TEMPERATURE, dim=-1)
        logits = student(tokens[:, :-1])
        near = kl_div(log_softmax(logits / TEMPERATURE, dim=-1), wanted, reduction="batchmean", log_target=True)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.1 * TEMPERATURE**2 * near
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main(steps: int) -> tuple[Any, list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student, teacher = map(StreamShard, make_models())
    return (student,), train(student, teacher, steps, dist.get_rank(), device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    main(parser.parse_args().steps)
    dist.destroy_process_group()
