"""What one rank of many does, by how many there are: time to build, bytes held, host time per layer.

    python benchmarks/world_size.py

One process on torch's "fake" process group. Its all-gather copies a chunk for each rank, so gathers and reductions are
left out altogether: what is left is what a rank does by itself. StreamShard uses the transport that GPUs use. Every
round builds and runs a model at each number of ranks, in an order drawn anew; ratios are to the smallest number, of the
same round.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _measure import RESULTS, Noise, environment, save, seeded_order, summary
from host_overhead import Layers, RanksAsOnGpus

from streamshard import Precision, StreamShard
from streamshard.comm import nccl


def main() -> None:
    """Measure every number of ranks; print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 4096])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--parameters", type=int, default=8, help="parameters per layer")
    parser.add_argument("--width", type=int, default=1 << 12, help="elements of each parameter")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of each model; the fastest counts")
    parser.add_argument("--output", type=Path, default=RESULTS / "world_size-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with (
        mock.patch.object(nccl, "_all_gather_single", _do_nothing),
        mock.patch.object(nccl, "_reduce_scatter_single", _do_nothing),
    ):
        _run(arguments)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _run(arguments: argparse.Namespace) -> None:
    found: dict[int, list[dict[str, float]]] = {size: [] for size in arguments.ranks}
    noise = Noise()
    for index in range(-1, arguments.rounds):
        if index >= 0:
            noise.begin_round(0.0)
        for size in map(int, seeded_order([str(size) for size in arguments.ranks], 1 + index)):
            measured = _measure(size, arguments)
            if index >= 0:
                found[size].append(measured)
        if index >= 0:
            noise.end_round()
    cases = [_case(size, found[size], found[arguments.ranks[0]]) for size in arguments.ranks]
    config = {"backend": "fake", **{name: getattr(arguments, name) for name in ("layers", "parameters", "width")}}
    config |= {"rounds": arguments.rounds, "steps": arguments.steps}
    result = {
        "benchmark": "world_size",
        "environment": environment(torch.device("cpu")),
        "config": config,
        "foreign_cores": summary(noise.foreign_cores([noise.own_cpu_s()])),
        "cases": cases,
    }
    _print(result)
    save(result, arguments.output)


def _measure(size: int, arguments: argparse.Namespace) -> dict[str, float]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    gc.collect()
    gc.disable()
    try:
        model = Layers(arguments.layers, arguments.parameters, arguments.width)
        with mock.patch("streamshard.build.Communicator", RanksAsOnGpus):
            start = time.perf_counter()
            sharded: Any = StreamShard(model, precision=Precision(param_dtype=torch.bfloat16))
            build_ms = (time.perf_counter() - start) * 1e3
        hidden = torch.ones(1, arguments.width, dtype=torch.bfloat16)
        steps = []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            sharded(hidden).float().sum().backward()
            steps.append((time.perf_counter() - start) * 1e3)
        report = sharded.memory_report()
        slots = sum(report.held_bytes[name] for name in ("weight slots", "grad slots"))
        return {
            "build_ms": build_ms,
            "host_us_per_layer": min(steps) * 1e3 / arguments.layers,
            "shard_mib": (report.total_bytes - slots) / 2**20,
            "slots_mib": slots / 2**20,
        }
    finally:
        gc.enable()
        dist.destroy_process_group()


def _case(size: int, rounds: list[dict[str, float]], smallest: list[dict[str, float]]) -> dict[str, Any]:
    case: dict[str, Any] = {"ranks": size}
    for name in rounds[0]:
        case[name] = summary([each[name] for each in rounds])
        pairs = zip(rounds, smallest, strict=True)
        case[f"{name}_ratio"] = summary([each[name] / first[name] for each, first in pairs])
    return case


def _print(result: dict[str, Any]) -> None:
    names = ("build_ms", "host_us_per_layer", "shard_mib", "slots_mib")
    print(f"{'ranks':>6}" + "".join(f" {name:>18} {'ratio':>6} {'iqr':>6}" for name in names))
    for case in result["cases"]:
        print(f"{case['ranks']:6}", end="")
        for name in names:
            ratio = case[f"{name}_ratio"]
            print(f" {case[name]['median']:18.3f} {ratio['median']:6.3f} {ratio['iqr']:6.3f}", end="")
        print()


if __name__ == "__main__":
    main()
