"""Expert parallelism inside data parallelism: each rank has some of the experts, and tokens travel to them.

    torchrun --nproc-per-node 4 docs/examples/expert_parallel.py --ep 2
    torchrun --nproc-per-node 4 docs/examples/expert_parallel.py --ep 2 --tp 2    # with tensor parallelism

The model is a small mixture of experts made here; each token goes to two of eight experts. Ranks along "tp" have copies
of the experts, and the same tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from streamshard import StreamShard

VOCAB, WIDTH, EXPERTS, CHOSEN, LENGTH, SEQUENCES = 64, 32, 8, 2, 16, 8


class AllToAll(torch.autograd.Function):
    """Rows for each rank of a group. Backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.given = sent, received, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sent, received, group = ctx.given
        return AllToAll.apply(grad, received, sent, group), None, None, None


class Experts(nn.Module):
    """Without `mesh` every rank computes all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.mesh: DeviceMesh | None = None

    def place_on(self, mesh: DeviceMesh) -> None:
        """Give each rank of `mesh` its own experts: DTensors, cut along the first dim."""
        self.mesh = mesh
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        weights, chosen = scores.softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        rows, wanted = tokens[order // CHOSEN], chosen.flatten()[order]
        if self.mesh is None:
            made = self.compute(self.up, self.down, rows, wanted)
        else:
            made = self.dispatch(rows, wanted, self.mesh)
        return torch.zeros_like(tokens).index_add(0, order // CHOSEN, made * weights.flatten()[order, None])

    def dispatch(self, rows: torch.Tensor, wanted: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Send rows to the ranks that have their experts, compute there, and send the results back."""
        here, group = EXPERTS // mesh.size(), mesh.get_group()
        sent = torch.bincount(wanted // here, minlength=mesh.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sizes = sent.tolist(), received.tolist()
        arrived = AllToAll.apply(rows, *sizes, group)
        theirs = AllToAll.apply(wanted, *sizes, group) - mesh.get_local_rank() * here
        made = self.compute(self.up.to_local(), self.down.to_local(), arrived, theirs)
        return AllToAll.apply(made, *reversed(sizes), group)

    @staticmethod
    def compute(up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(rows[:, None], up[wanted]).relu(), down[wanted])[:, 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x + self.mix(self.norm(x))).flatten(0, 1)
        return x + self.experts(tokens, self.router(tokens)).view_as(x)


class MixtureLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model() -> MixtureLM:
    torch.manual_seed(0)
    return MixtureLM()


def whole_batch(step: int) -> torch.Tensor:
    """[sequences, positions + 1] counting up from a random token: easy to learn."""
    starts = torch.randint(VOCAB, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(LENGTH + 1)) % VOCAB


def main(steps: int, ep: int, tp: int = 1) -> tuple[Any, list[float]]:
    """Returns the model, and the gradient norm of each step."""
    if not dist.is_initialized():
        dist.init_process_group()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device_type, (ranks // ep // tp, ep, tp), mesh_dim_names=("beside", "ep", "tp"))
    model: Any = make_model()
    for layer in model.layers:
        layer.experts.place_on(mesh["ep"])
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {"mix": ColwiseParallel(output_layouts=Replicate())})
    data = mesh["beside", "ep"]._flatten("dp")  # ranks with batches of their own: "ep" lies inside
    model = StreamShard(model, mesh=data, precision="fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    norms = []
    for step in range(steps):
        tokens = whole_batch(step).chunk(data.size())[data.get_local_rank()].to(device_type)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm {norms[-1]:.3f}", flush=True)
    return model, norms


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="how many to take")
    parser.add_argument("--ep", type=int, default=2, help="over how many ranks the experts are spread")
    parser.add_argument("--tp", type=int, default=1, help="over how many ranks a matrix is cut")
    args = parser.parse_args()
    main(args.steps, args.ep, args.tp)
    dist.destroy_process_group()
