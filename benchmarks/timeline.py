"""Draw one training step: what computed, what was communicated, and what waited for what.

    python benchmarks/timeline.py                      # two ranks on this machine; writes docs/images/timeline.png
    torchrun --nproc-per-node 2 benchmarks/timeline.py --picture step.png --json step.json

Drawn is the fastest of several steps: what else the machine was doing is not of interest. Needs matplotlib. The JSON
file is for https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from _models import Preset, Transformer, next_token_loss

from streamshard import Precision, StreamShard
from streamshard.inspect.trace import trace_step

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "timeline.png"


def main() -> None:
    """Start ranks if nobody did, train, trace some steps, and let rank 0 draw the fastest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="per rank")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those that are traced")
    parser.add_argument("--steps", type=int, default=9, help="trace so many; the fastest is drawn")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--json", type=Path, help="write the trace itself as well")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        ranks = str(torch.cuda.device_count() or 2)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Through sockets, so that CPU ranks communicate beside computing as GPUs do; shared memory is read when needed.
        os.environ.setdefault("STREAMSHARD_SHARED_MEMORY", "0")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        os.execv(sys.executable, [*launcher, *sys.argv])
    try:
        _draw(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _draw(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    preset = Preset(layers=arguments.layers, width=arguments.width, vocabulary=1024, sequence=arguments.tokens, rows=1)
    torch.manual_seed(0)
    model = StreamShard(
        Transformer(preset).to(device), precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(preset.vocabulary, (1, preset.sequence), device=device)

    def step() -> None:
        next_token_loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(arguments.warmup):
        step()
    traces = []
    for _ in range(arguments.steps):
        dist.barrier()
        with trace_step(model) as recorded:
            step()
        traces.append(recorded)
    trace = min(traces, key=lambda recorded: max(span.stop_us for span in recorded.spans))
    if dist.get_rank() == 0:
        title = (
            f"One step on rank 0 of {dist.get_world_size()} ({device.type}): {preset.layers} layers x {preset.width}, "
            f"{preset.sequence} tokens, bf16; the fastest of {arguments.steps}"
        )
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        trace.save_picture(arguments.picture, title=title)
        print(f"wrote {arguments.picture}")
        if arguments.json is not None:
            trace.save_json(arguments.json)
            print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
