"""Whether ranks that share a GPU can talk to each other, and how fast: NCCL promises nothing there.

    python benchmarks/shared_gpu.py                    # two ranks; without a GPU over gloo

Each rank says that it is another host (see `_measure.own_device`), so that NCCL lets them be on one GPU, and sends
through sockets. What a transport issues is done once and checked, then timed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import RESULTS, environment, launch, own_device, summary, write_json

TIMEOUT = datetime.timedelta(seconds=40)


def main() -> None:
    """Start ranks if nobody did, and let rank 0 tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mebibytes", type=int, default=16, help="of the buffer that all ranks have together")
    parser.add_argument("--output", type=Path, default=RESULTS / "shared_gpu.json")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        launch(arguments.ranks)
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        found = _talk(device, arguments.mebibytes << 20)
        if dist.get_rank() == 0:
            config = {"ranks": dist.get_world_size(), "backend": dist.get_backend(), "mebibytes": arguments.mebibytes}
            result = {"benchmark": "shared_gpu", "environment": environment(device), "config": config, **found}
            write_json(result, arguments.output)
            print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    finally:
        dist.destroy_process_group()


def _talk(device: torch.device, whole_bytes: int) -> dict[str, float]:
    """Milliseconds of a gather, a sum and an exchange.

    Raises:
        RuntimeError: one of them gave something else than it should.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = whole_bytes // 4 // size
    own = torch.full((numel,), float(rank), device=device)
    whole, out = torch.empty(numel * size, device=device), torch.empty(numel, device=device)
    ranks = torch.arange(size, dtype=torch.float32, device=device).repeat_interleave(numel)
    collectives = {
        "gather_ms": (lambda: dist.all_gather_into_tensor(whole, own), whole, ranks),
        "reduce_ms": (lambda: dist.reduce_scatter_tensor(out, ranks), out, torch.full_like(out, float(rank * size))),
        "exchange_ms": (lambda: dist.all_to_all_single(whole, own.repeat(size)), whole, ranks),
    }
    found = {}
    for name, (run, result, wanted) in collectives.items():
        times_ms = []
        for _ in range(6):
            result.zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times_ms.append((time.perf_counter() - start) * 1e3)
            if not torch.equal(result, wanted):
                raise RuntimeError(f"{name.removesuffix('_ms')}: {result[:: numel // 2].tolist()} on rank {rank}")
        found[name] = summary(times_ms[1:])["median"]
    return found


if __name__ == "__main__":
    sys.exit(main())
