"""Tensor parallelism inside data parallelism: matrices are cut over `--tp` ranks, and each part over the others.

    torchrun --nproc-per-node 4 docs/examples/tensor_parallel.py --tp 2

The model is a small GPT made here, with torch's own plan for tensor and sequence parallelism. Put yours in its place.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from streamshard import StreamShard

VOCAB, WIDTH, HEADS, LENGTH, SEQUENCES = 64, 32, 4, 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        return self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, tp: DeviceMesh) -> None:
    """Columns, then rows; between them, activations are cut along the sequence."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers:
        columns = dict.fromkeys(("attention.q", "attention.k", "attention.v"), ColwiseParallel())
        columns["up"] = ColwiseParallel(input_layouts=Shard(1))
        rows = dict.fromkeys(("attention.out", "down"), RowwiseParallel(output_layouts=Shard(1)))
        norms = dict.fromkeys(("norm1", "norm2"), SequenceParallel())
        parallelize_module(layer, tp, {**columns, **rows, **norms, "attention": whole})
    rows_of_words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, tp, {"embedding": rows_of_words, "norm": SequenceParallel(), "head": head})


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def whole_batch(step: int) -> torch.Tensor:
    """[sequences, positions + 1] counting up from a random token: easy to learn."""
    starts = torch.randint(VOCAB, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(LENGTH + 1)) % VOCAB


def main(steps: int, tp: int, replicas: int = 1) -> tuple[Any, list[float]]:
    """Returns the model, and the gradient norm of each step."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = replicas, dist.get_world_size() // tp // replicas, tp
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicas", "dp", "tp"))
    model: Any = make_model()
    parallelize(model, mesh["tp"])
    model = StreamShard(model, mesh=mesh["replicas", "dp"], precision="fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding: its parameters are no DTensors
    places, place = mesh["replicas"].size() * mesh["dp"].size(), dist.get_rank() // tp
    norms = []
    for step in range(steps):
        tokens = whole_batch(step).chunk(places)[place].to(device_type)  # the same on all ranks along "tp"
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm {norms[-1]:.3f}", flush=True)
    return model, norms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    parser.add_argument("--tp", type=int, default=2, help="how many ranks have parts of a matrix")
    parser.add_argument("--replicas", type=int, default=1, help="how many copies of the model there are")
    args = parser.parse_args()
    main(args.steps, args.tp, args.replicas)
    dist.destroy_process_group()
