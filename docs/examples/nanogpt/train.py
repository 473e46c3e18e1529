"""Trains a GPT as nanoGPT's train.py does. Compare the scripts beside this one.

Start it by torchrun --nproc-per-node 2.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from _model import GPT, configure_optimizers, get_batch

from streamshard import StreamShard, latest, load_checkpoint, save_checkpoint

max_iters, eval_interval, accumulation_steps = 20, 10, 2


def main(out: str) -> list[float]:
    has_gpu = torch.cuda.is_available()
    torch.manual_seed(1337)

    model = StreamShard(GPT(), precision="bf16" if has_gpu else "fp32")
    rank, device = dist.get_rank(), next(model.parameters()).device
    optimizer = configure_optimizers(model)
    iter_num = 0
    if latest(out):
        iter_num = load_checkpoint(out, model, optimizer)["iter_num"]

    train, val = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
    losses = []
    while iter_num < max_iters:
        for micro_step in range(accumulation_steps):
            model.set_requires_gradient_sync(micro_step == accumulation_steps - 1)
            _, loss = model(*get_batch(train, device))
            (loss / accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        iter_num += 1

        if iter_num % eval_interval == 0:
            model.eval()
            with torch.no_grad():
                _, loss = model(*get_batch(val, device))
            model.train()
            if rank == 0:
                print(f"iter {iter_num}: train loss {losses[-1]:.4f}, val loss {loss.item():.4f}")
            save_checkpoint(out, model, optimizer, {"iter_num": iter_num})
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/nanogpt"])
    dist.destroy_process_group()
