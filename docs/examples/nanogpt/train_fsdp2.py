"""Trains a GPT as nanoGPT's train.py does. Compare the scripts beside this one.

Start it by torchrun --nproc-per-node 2.
"""

from __future__ import annotations

import glob
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _model import GPT, configure_optimizers, get_batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

max_iters, eval_interval, accumulation_steps = 20, 10, 2


def main(out: str) -> list[float]:
    has_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if has_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(1337)

    model = GPT().to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16 if has_gpu else None, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = configure_optimizers(model)
    iter_num = 0
    if saved := sorted(glob.glob(f"{out}/*/.metadata")):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "iter_num": iter_num}
        dcp.load(state, checkpoint_id=os.path.dirname(saved[-1]))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        iter_num = state["iter_num"]

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
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "iter_num": iter_num}
            dcp.save(state, checkpoint_id=f"{out}/{iter_num:06}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/nanogpt"])
    dist.destroy_process_group()
