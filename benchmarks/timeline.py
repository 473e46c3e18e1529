"""Trace one training step: how much of its communication is exposed.

    torchrun --nproc-per-node 2 benchmarks/timeline.py --picture step.png

Of several steps the fastest counts. Ranks that share a GPU talk through sockets, and so slowly that layers have to be
small and sequences long for gathers to be over in time: --width 512 --sequence 8192 --rows 16.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import environment, launch, own_device, write_json
from _models import Preset, Transformer, next_token_loss
from _picture import draw

from streamshard import Precision, StreamShard, trace


def main() -> None:
    """Start ranks if nobody did, train, trace some steps, and let rank 0 report the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="per rank")
    parser.add_argument("--ranks", type=int, help="ranks to start without torchrun; default: the GPUs, else 2")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are traced")
    parser.add_argument("--steps", type=int, default=9, help="trace so many; the fastest counts")
    parser.add_argument("--picture", type=Path, help="draw it")
    parser.add_argument("--output", type=Path, help="write the summary as JSON")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        # Through sockets, so that CPU ranks communicate beside computing as GPUs do; shared memory is read when needed.
        os.environ.setdefault("STREAMSHARD_SHARED_MEMORY", "0")
        launch(arguments.ranks or torch.cuda.device_count() or 2)
    try:
        _measure(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(arguments: argparse.Namespace) -> None:
    device = own_device()
    sizes = {"layers": arguments.layers, "width": arguments.width, "sequence": arguments.sequence}
    preset = Preset(**sizes, vocabulary=1024, rows=arguments.rows)
    torch.manual_seed(0)
    model = StreamShard(
        Transformer(preset).to(device), precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(preset.vocabulary, (preset.rows, preset.sequence), device=device)

    def step() -> None:
        next_token_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(arguments.warmup):
        step()
    traces = []
    for _ in range(arguments.steps):
        dist.barrier()
        with trace(model) as found:
            step()
        traces.append(found)
    fastest = min(traces, key=lambda each: each.total_us)
    if dist.get_rank() == 0:
        result = {
            "benchmark": "timeline",
            "environment": environment(device),
            "config": {**sizes, "rows": preset.rows, "ranks": dist.get_world_size(), "steps": arguments.steps},
            **fastest.summary(),
        }
        print(fastest)
        if arguments.output is not None:
            write_json(result, arguments.output)
        if arguments.picture is not None:
            draw(fastest, arguments.picture)


if __name__ == "__main__":
    main()
