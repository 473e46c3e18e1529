"""Keep the latest checkpoints, to continue from, and the best one, to export.

    torchrun --nproc-per-node 2 docs/examples/best_and_latest.py --out runs/best

Start the same line again to continue. All ranks compare the same mean of their losses, so they decide alike.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from streamshard import StreamShard, export_safetensors, latest, load_checkpoint, save_checkpoint

WIDTH, ROWS, EVERY = 16, 32, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and each row rolled by one place."""
    rows = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step)) - 0.5
    return rows, rows.roll(1, dims=1)


@torch.no_grad()
def evaluate(model: Any, rank: int, device: str) -> float:
    """The mean loss over all ranks' held-out rows."""
    rows, wanted = (each.to(device) for each in batch(999, rank))
    model.eval()
    loss = mse_loss(model(rows), wanted)
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main(steps: int, out: Path, learning_rate: float = 3e-3) -> tuple[Any, list[float]]:
    """Returns the model, and the loss of each evaluation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = StreamShard(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    done, best, losses = 0, math.inf, []
    if latest(out / "latest"):
        saved = load_checkpoint(out / "latest", model, optimizer)
        done, best, losses = saved["step"], saved["best"], saved["losses"]
    for step in range(done, steps):
        rows, wanted = (each.to(device) for each in batch(step, dist.get_rank()))
        mse_loss(model(rows), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            losses.append(evaluate(model, dist.get_rank(), device))
            if losses[-1] < best:
                best = losses[-1]
                save_checkpoint(out / "best", model, extra={"step": step + 1}, step=step + 1, keep=1)
            extra = {"step": step + 1, "best": best, "losses": losses}
            save_checkpoint(out / "latest", model, optimizer, extra, step=step + 1, keep=2, wait=False)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {losses[-1]:.4f}, best {best:.4f}", flush=True)
    load_checkpoint(out / "best", model)
    export_safetensors(model, out / "export")
    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="how many to take")
    parser.add_argument("--out", type=Path, default=Path("runs/best"), help="the directory of the run")
    args = parser.parse_args()
    main(args.steps, args.out)
    dist.destroy_process_group()
