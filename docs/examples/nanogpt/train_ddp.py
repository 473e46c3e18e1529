"""Trains a GPT as nanoGPT's train.py does. Compare the scripts beside this one.

Start it by torchrun --nproc-per-node 2.
"""

from __future__ import annotations

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from _model import GPT, configure_optimizers, get_batch
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters, eval_interval, accumulation_steps = 20, 10, 2


def main(out: str) -> list[float]:
    has_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(1337)
    ctx = torch.autocast("cuda", torch.bfloat16) if has_gpu else contextlib.nullcontext()

    model = GPT().to(device)
    optimizer = configure_optimizers(model)
    iter_num = 0
    if os.path.exists(f"{out}/ckpt.pt"):
        checkpoint = torch.load(f"{out}/ckpt.pt", map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
    model = DDP(model, device_ids=[local_rank] if has_gpu else None)

    train, val = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
    losses = []
    while iter_num < max_iters:
        for micro_step in range(accumulation_steps):
            model.require_backward_grad_sync = micro_step == accumulation_steps - 1
            with ctx:
                _, loss = model(*get_batch(train, device))
            (loss / accumulation_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        iter_num += 1

        if iter_num % eval_interval == 0 and rank == 0:
            model.eval()
            with torch.no_grad(), ctx:
                _, loss = model.module(*get_batch(val, device))
            model.train()
            print(f"iter {iter_num}: train loss {losses[-1]:.4f}, val loss {loss.item():.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            os.makedirs(out, exist_ok=True)
            torch.save(state, f"{out}/ckpt.pt")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/nanogpt"])
    dist.destroy_process_group()
