"""Bytes per parameter at every setting of the dial, formula and count side by side, for 1 to 4 ranks on the CPU.

    python benchmarks/bytes_per_parameter.py            # prints a table: docs/guide/dial.md has its formulas
    python benchmarks/bytes_per_parameter.py --output FILE

Counted are the live tensors of the engine and of AdamW after two steps, less flags (N + 1 bytes a parameter tensor).
The model has 64 layers and sizes that need no padding; the slots of settings with fewer than all are given beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from _measure import environment, save
from torch import nn

from streamshard import Precision, StreamShard

WIDTH, DEPTH = 48, 64
BF16, FP16 = torch.bfloat16, torch.float16
ALL = {"weight_slots": "all", "grad_slots": "all"}


class Setting(NamedTuple):
    """A row: its name, how to get it, and ``constant + sharded / N`` bytes per parameter."""

    name: str
    precision: Precision
    slots: dict[str, Any]
    constant: int
    sharded: int


SETTINGS = (
    Setting("ZeRO-1, fp16, fp16 grads", Precision(param_dtype=FP16, grad_dtype=FP16), ALL, 4, 16),
    Setting("ZeRO-1, bf16, fp32 grads", Precision(), ALL, 6, 12),
    Setting("ZeRO-1, fp32", Precision(param_dtype=torch.float32), ALL, 8, 8),
    Setting("ZeRO-2, bf16", Precision(grad_dtype=BF16), {"weight_slots": "all"}, 2, 16),
    Setting("ZeRO-3, bf16", Precision(grad_dtype=BF16), {"weight_slots": 2}, 0, 18),
)


def main() -> None:
    """Count on every number of ranks, then print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write what was counted as JSON")
    output = parser.parse_args().output
    counts: dict[int, list[float]] = {}
    for world_size in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as directory:
            multiprocessing.spawn(_count, (world_size, directory), nprocs=world_size)  # type: ignore[no-untyped-call]
            counts[world_size] = torch.load(os.path.join(directory, "counts.pt"))
    print("| setting | formula | N = 1 | N = 2 | N = 3 | N = 4 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row, setting in enumerate(SETTINGS):
        formula = f"{setting.constant} + {setting.sharded}/N" if setting.constant else f"{setting.sharded}/N"
        cells = []
        for world_size, counted in counts.items():
            wanted = setting.constant + setting.sharded / world_size
            cells.append(f"{wanted:.2f} / {counted[row]:.2f}")
        print(f"| {setting.name} | {formula} | {' | '.join(cells)} |")
    if output is not None:
        bytes_counted = {
            setting.name: {f"N = {size}": counted[row] for size, counted in counts.items()}
            for row, setting in enumerate(SETTINGS)
        }
        where = environment(torch.device("cpu"))
        save({"benchmark": "bytes_per_parameter", "environment": where, "bytes_per_parameter": bytes_counted}, output)


def _count(rank: int, world_size: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    counted = []
    for setting in SETTINGS:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        model = StreamShard(layers, precision=setting.precision, **setting.slots)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, WIDTH)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = model.memory_report()
        held = report.total_bytes - report.held_bytes["flags"]
        for kind in ("weight", "grad"):
            if setting.slots[f"{kind}_slots"] != "all":
                held -= report.held_bytes[f"{kind} slots"]
        held += sum(moment.nbytes for state in optimizer.state.values() for moment in state.values() if moment.ndim)
        counted.append(held / report.numel)
    if rank == 0:
        torch.save(counted, os.path.join(directory, "counts.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
