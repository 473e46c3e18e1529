"""A U-Net with batch norm removes noise from pictures, beside an average of its weights (EMA).

    torchrun --nproc-per-node 2 docs/examples/unet.py

Running statistics of batch norms are buffers: the first rank's are sent to all ranks, as under DDP. The average is
torch's: a second model, sharded too. Its buffers are copies of the trained model's.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import interpolate, max_pool2d, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from streamshard import StreamShard

WIDTH, SIZE, PICTURES, DECAY = 8, 16, 4, 0.9


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.first, self.last = block(1, WIDTH), nn.Conv2d(WIDTH, 1, 1)
        self.down = nn.ModuleList(block(n, 2 * n) for n in sizes)
        self.up = nn.ModuleList(block(3 * n, n) for n in reversed(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.first(x)]
        for layer in self.down:
            kept.append(layer(max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for layer in self.up:
            x = layer(torch.cat((interpolate(x, scale_factor=2.0), kept.pop()), dim=1))
        return self.last(x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[pictures, 1, size, size]: a bright square with noise, and without."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    clean = torch.zeros(PICTURES, 1, SIZE, SIZE)
    for picture, (row, column) in zip(clean, torch.randint(SIZE - 4, (PICTURES, 2), generator=generator), strict=True):
        picture[:, row : row + 4, column : column + 4] = 1.0
    return clean + 0.5 * torch.randn(clean.shape, generator=generator), clean


def train(model: Any, average: AveragedModel, steps: int, rank: int, device: str = "cpu") -> list[float]:
    """Returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        noisy, clean = (each.to(device) for each in batch(step, rank))
        loss = mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main(steps: int) -> tuple[Any, list[float]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    StreamShard(average.module.requires_grad_(False))
    model = StreamShard(model)
    return (model, average.module), train(model, average, steps, dist.get_rank(), device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    main(parser.parse_args().steps)
    dist.destroy_process_group()
