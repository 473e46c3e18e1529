"""A GAN: two models with two optimizers, which train in turns.

    torchrun --nproc-per-node 2 docs/examples/gan.py

The generator's step sends gradients through the discriminator, whose own gradients of that pass are dropped.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from streamshard import StreamShard

NOISE, WIDTH, SAMPLES = 8, 32, 64


class Perceptron(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def make_models() -> tuple[nn.Module, nn.Module]:
    """The generator and the discriminator."""
    torch.manual_seed(0)
    return Perceptron(NOISE, 2), Perceptron(2, 1)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and points on a circle."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    angles = 6.2832 * torch.rand(SAMPLES, generator=generator)
    return torch.randn(SAMPLES, NOISE, generator=generator), torch.stack((angles.sin(), angles.cos()), dim=1)


def is_real(logits: torch.Tensor, answer: float) -> torch.Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


def train(generator: Any, discriminator: Any, steps: int, rank: int, device: str = "cpu") -> list[float]:
    """Returns both losses of each step."""
    options = [torch.optim.Adam(each.parameters(), lr=2e-3, betas=(0.5, 0.999)) for each in (generator, discriminator)]
    losses = []
    for step in range(steps):
        noise, real = (each.to(device) for each in batch(step, rank))
        fake = generator(noise)
        against = is_real(discriminator(real), 1.0) + is_real(discriminator(fake.detach()), 0.0)
        options[1].zero_grad()
        against.backward()
        options[1].step()
        loss = is_real(discriminator(fake), 1.0)
        options[0].zero_grad()
        loss.backward()
        options[0].step()
        losses += [against.item(), loss.item()]
        if rank == 0:
            print(f"step {step}: discriminator {against.item():.4f}, generator {loss.item():.4f}", flush=True)
    return losses


def main(steps: int) -> tuple[Any, list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, discriminator = map(StreamShard, make_models())
    return (generator, discriminator), train(generator, discriminator, steps, dist.get_rank(), device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    main(parser.parse_args().steps)
    dist.destroy_process_group()
