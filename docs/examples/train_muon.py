"""Muon for matrices and AdamW for the rest, in one optimizer: train, save, and go on with another number of ranks.

    torchrun --nproc-per-node 2 docs/examples/train_muon.py --steps 20
    torchrun --nproc-per-node 3 docs/examples/train_muon.py --steps 20 --resume

The model is a tiny transformer that learns the bytes of this file. A step has the same batch on any number of ranks
that divides `BATCH`, so the loss goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.optim import WholeParameterOptimizer

VOCAB, WIDTH, HEADS, LAYERS = 128, 64, 4, 4
BATCH, LENGTH = 24, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_optimizer(model: nn.Module) -> WholeParameterOptimizer:
    """Matrices of the blocks are whole on one rank while Muon steps them; AdamW steps this rank's pieces."""
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("blocks.") and p.ndim == 2)]
    groups = [{"params": matrices}, {"params": others, "optimizer_class": torch.optim.AdamW, "lr": 3e-3}]
    return WholeParameterOptimizer(groups, torch.optim.Muon, lr=0.01, cost=lambda p: p.numel() * min(p.shape))


def batch(step: int, device: torch.device) -> torch.Tensor:
    """This rank's share [sequences, LENGTH + 1] of a step's random windows."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return text[starts + torch.arange(LENGTH + 1)][dist.get_rank() :: dist.get_world_size()].to(device)


def main(steps: int, resumes: bool, directory: Path) -> None:
    torch.manual_seed(0)
    model = StreamShard(Transformer(), precision="fp32")  # bf16 is the default
    optimizer = make_optimizer(model)
    if dist.get_rank() == 0:
        print(optimizer)
    done = load_checkpoint(directory, model, optimizer)["step"] if resumes else 0
    for step in range(done + 1, done + steps + 1):
        tokens = batch(step, model.embedding.weight.device)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
    path = save_checkpoint(directory, model, optimizer, {"step": done + steps}, step=done + steps, keep=2).path
    if dist.get_rank() == 0:
        print(f"saved {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take now")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--directory", type=Path, default=Path("runs/train_muon"), help="of the checkpoints")
    args = parser.parse_args()
    main(args.steps, args.resume, args.directory)
