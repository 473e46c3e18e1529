"""Trace one training step: how much of its communication runs beside computing.

    torchrun --nproc-per-node 2 benchmarks/timeline.py --json step.json     # open it in https://ui.perfetto.dev

Of several steps the fastest counts. Ranks that share a GPU talk through sockets, and so slowly that layers have to be
small and sequences long for gathers to be over in time: --width 512 --sequence 8192 --rows 16.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import environment, launch, own_device, write_json
from _models import Preset, Transformer, next_token_loss
from _trace import Trace, trace_step

from streamshard import Precision, StreamShard
from streamshard.comm.streams import StreamName


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
    parser.add_argument("--json", type=Path, help="write the trace itself as well")
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
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
        with trace_step(model) as recorded:
            step()
        traces.append(recorded)
    trace = min(traces, key=_length_us)
    if dist.get_rank() == 0:
        result = {
            "benchmark": "timeline",
            "environment": environment(device),
            "config": {**sizes, "rows": preset.rows, "ranks": dist.get_world_size(), "steps": arguments.steps},
            **_overlap(trace),
        }
        print(", ".join(f"{name} {value:.3f}" for name, value in _overlap(trace).items()))
        if arguments.output is not None:
            write_json(result, arguments.output)
        if arguments.json is not None:
            trace.save_json(arguments.json)
            print(f"wrote {arguments.json}")


def _length_us(trace: Trace) -> float:
    return max(span.stop_us for span in trace.spans)


def _overlap(trace: Trace) -> dict[str, float]:
    """Milliseconds of the step, of computing, of communicating, and of communicating beside computing."""
    compute = [span for span in trace.spans if span.stream is StreamName.COMPUTE]
    waits = _union((span.start_us, span.stop_us) for span in compute if span.activity == "wait")
    busy = _union((span.start_us, span.stop_us) for span in compute if span.activity != "wait")
    idle = _common(busy, waits)  # waits lie in what waits
    found = {"step_ms": _length_us(trace) / 1e3, "compute_ms": (_total(busy) - _total(idle)) / 1e3}
    for name, activity in (("gather", "all_gather"), ("reduce", "reduce_scatter")):
        spans = _union((span.start_us, span.stop_us) for span in trace.spans if span.activity == activity)
        found[f"{name}_ms"] = _total(spans) / 1e3
        beside = _total(_common(spans, busy)) - _total(_common(spans, idle))
        found[f"{name}_beside_compute_ms"] = beside / 1e3
    return found


_Interval = tuple[float, float]


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The same points, in intervals that do not touch, in order."""
    united: list[_Interval] = []
    for start, stop in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(stop, united[-1][1]))
        else:
            united.append((start, stop))
    return united


def _common(first: list[_Interval], second: list[_Interval]) -> list[_Interval]:
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in first for b in second)
    return [(start, stop) for start, stop in pairs if start < stop]


def _total(intervals: list[_Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


if __name__ == "__main__":
    main()
