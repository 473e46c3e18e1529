"""Host time per layer of StreamShard and FSDP2: many tiny parameters, no communication, no compute to hide behind.

    python benchmarks/host_overhead.py

One process on the "fake" process group, whose collectives return at once with nothing done, so what is left is Python
and dispatch. StreamShard uses the transport that GPUs use: through shared memory it would really copy all ranks' bytes.
Every round runs each system once, in an order drawn anew. Plain PyTorch is measured as well: its time is spent in the
layers' own operators, and what a system takes beyond it is that system's overhead.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from _measure import RESULTS, Clock, Noise, environment, save, seeded_order, summary
from _systems import System, build

from streamshard.comm.communicator import Communicator
from streamshard.comm.nccl import NcclTransport

PHASES = ("forward", "backward")
NAMES = ("plain", "fsdp2", "streamshard")
PEER = "fsdp2"
TARGET = 0.5


class Layer(nn.Module):
    """`parameters` vectors, each multiplied into the hidden state: one operator per parameter and nothing else."""

    def __init__(self, parameters: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(parameters))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            hidden = hidden * scale
        return hidden


class Layers(nn.Module):
    """A chain of equal layers."""

    def __init__(self, layers: int, parameters: int, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(width))  # gives the root unit something, as an embedding would
        self.layers = nn.ModuleList(Layer(parameters, width) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.first
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class RanksAsOnGpus(Communicator):
    """NCCL's transport, on the CPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.transport = NcclTransport(self)

    def share_memory(self, nbytes: int, units: int) -> None:
        """Ranks on GPUs do not."""


def main() -> None:
    """Measure every parameter count; print and save."""
    arguments = _parse()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=arguments.world_size, store=FakeStore())
    try:
        with mock.patch("streamshard.build.Communicator", RanksAsOnGpus):
            cases = [_measure(count, arguments, device) for count in arguments.parameters]
    finally:
        dist.destroy_process_group()
    config = {
        "layers": arguments.layers,
        "width": arguments.width,
        "world_size": arguments.world_size,
        "backend": "fake",
        "param_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
        "warmup_rounds": arguments.warmup,
        "rounds": arguments.rounds,
        "target": TARGET,
    }
    result = {"benchmark": "host_overhead", "environment": environment(device), "config": config, "cases": cases}
    _print(result)
    if arguments.output or all("streamshard" in case["systems"] for case in cases):
        save(result, arguments.output or RESULTS / f"host_overhead-{device.type}.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", nargs="+", type=int, default=[1, 8, 32], help="parameters per layer")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=64, help="elements of each parameter")
    parser.add_argument("--world-size", type=int, default=8, help="ranks that the fake group pretends to have")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait per case for other processes")
    parser.add_argument("--cpu", action="store_true", help="tensors on the CPU even where there is a GPU")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/host_overhead-<device>.json")
    return parser.parse_args()


def _system(name: str, parameters: int, arguments: argparse.Namespace, device: torch.device) -> System:
    model = Layers(arguments.layers, parameters, arguments.width).to(device)
    if name == "plain":
        model = model.bfloat16()

        def clear() -> None:
            model.zero_grad()

        return System(model, clear)
    return build(name, model, list(model.layers), "default")


def _pass(system: System, hidden: torch.Tensor) -> list[float]:
    """Milliseconds on the host of one forward and one backward. The optimizer runs outside the clock."""
    clock = Clock(torch.device("cpu"))  # the host's time, also where the work is on a GPU
    clock.lap()
    output = system.forward(hidden).float().sum()
    clock.lap()
    output.backward()
    clock.lap()
    system.update()
    if hidden.device.type == "cuda":
        torch.cuda.synchronize(hidden.device)
    return clock.laps_ms()


def _measure(parameters: int, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All systems at one parameter count, round by round in turn."""
    systems: dict[str, System] = {}
    failures: dict[str, str] = {}
    hidden = torch.ones(1, arguments.width, dtype=torch.bfloat16, device=device)
    for name in NAMES:
        try:
            systems[name] = _system(name, parameters, arguments, device)
            _pass(systems[name], hidden)
        except Exception as error:  # what cannot run here is a result: it says why
            systems.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}"
    laps: dict[str, list[list[float]]] = {name: [] for name in systems}
    noise = Noise()
    patience_s = arguments.patience
    for index in range(-arguments.warmup, arguments.rounds):
        if index >= 0:
            patience_s = noise.begin_round(patience_s)
        gc.collect()
        gc.disable()  # a collection would hit whichever system is running
        for name in seeded_order(list(systems), arguments.warmup + index):
            laps[name].append(_pass(systems[name], hidden))
        gc.enable()
        if index >= 0:
            noise.end_round()
    per_layer_us = {
        name: [[lap * 1e3 / arguments.layers for lap in round_laps] for round_laps in rounds[arguments.warmup :]]
        for name, rounds in laps.items()
    }
    return {
        "parameters_per_layer": parameters,
        "foreign_cores": summary(noise.foreign_cores([noise.own_cpu_s()])),
        "systems": {name: _entry(name, per_layer_us) for name in systems},
        "not_run": failures,
    }


def _entry(name: str, per_layer_us: dict[str, list[list[float]]]) -> dict[str, Any]:
    """One system's host time per layer, and its ratio to the peer: whole, and less what plain PyTorch takes."""
    totals = {other: [sum(laps) for laps in rounds] for other, rounds in per_layer_us.items()}
    entry: dict[str, Any] = {"host_us_per_layer": summary(totals[name])}
    for index, phase in enumerate(PHASES):
        entry[f"{phase}_us_per_layer"] = summary([laps[index] for laps in per_layer_us[name]])
    if PEER in totals:
        pairs = list(zip(totals[name], totals[PEER], totals["plain"], strict=True))
        entry[f"ratio_to_{PEER}"] = summary([own / peer for own, peer, _ in pairs])
        entry[f"overhead_ratio_to_{PEER}"] = summary([(own - plain) / (peer - plain) for own, peer, plain in pairs])
    return entry


def _print(result: dict[str, Any]) -> None:
    config = result["config"]
    print(f"\nhost microseconds per layer, {config['layers']} layers, {config['rounds']} rounds, ", end="")
    print(f"fake group of {config['world_size']} ranks; target {TARGET} of {PEER}")
    print(f"{'parameters':>10} {'system':12} {'forward':>8} {'backward':>8} {'sum':>8} {'iqr':>6}", end="")
    print(f" {f'/ {PEER}':>8} {'iqr':>6} {'less plain':>10} {'iqr':>6}")
    for case in result["cases"]:
        for name, entry in case["systems"].items():
            print(f"{case['parameters_per_layer']:10} {name:12} {entry['forward_us_per_layer']['median']:8.1f}", end="")
            print(f" {entry['backward_us_per_layer']['median']:8.1f}", end="")
            print(f" {entry['host_us_per_layer']['median']:8.1f} {entry['host_us_per_layer']['iqr']:6.1f}", end="")
            if f"ratio_to_{PEER}" in entry:
                whole, over = entry[f"ratio_to_{PEER}"], entry[f"overhead_ratio_to_{PEER}"]
                print(f" {whole['median']:8.3f} {whole['iqr']:6.3f} {over['median']:10.3f} {over['iqr']:6.3f}", end="")
            print()
        for name, reason in case["not_run"].items():
            print(f"{case['parameters_per_layer']:10} {name:12} not run: {reason}")


if __name__ == "__main__":
    main()
