"""Step time of StreamShard, FSDP2, FSDP1, DDP and local training, step by step in turn, in one process group.

    python benchmarks/step_time.py --preset 8x512-256          # starts two ranks on CPU, one per GPU with GPUs
    torchrun --nproc-per-node 2 benchmarks/step_time.py ...    # the same, started by you

Every round trains each system for one step on the same tokens, in an order drawn anew for each round, with a barrier
before every step. A step's time is the slowest rank's. What counts is the ratio to FSDP2 within a round: whatever slows
the machine for a while slows both.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import gc
import io
import os
import pstats
import resource
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Before there is a process group: what these import makes the default group the default of arguments, for ever. gloo's
# threads then outlive destroy_process_group() and now and then abort the interpreter at its end.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
from _measure import (
    QUIET_CORES,
    RESULTS,
    Clock,
    Noise,
    environment,
    launch,
    measured_memory,
    own_device,
    save,
    seeded_order,
    summary,
)
from _models import PRESETS, Preset, Transformer, next_token_loss
from _systems import OPTIMIZERS, SYSTEMS, System, build

PHASES = ("forward", "backward", "update")
PEER = "fsdp2"
DEFAULT_SYSTEMS = ["local", "ddp", "fsdp1", "fsdp2", "streamshard"]
if find_spec("deepspeed") is not None:
    DEFAULT_SYSTEMS.insert(-1, "deepspeed")
PREPARATION_STEPS = 3


class Step(NamedTuple):
    """One step on this rank: milliseconds per phase, CPU milliseconds of all threads together, loss."""

    laps_ms: list[float]
    cpu_ms: float
    loss: float


def main() -> None:
    """Start ranks if nobody did, measure, and let rank 0 report."""
    arguments = _parse()
    if "LOCAL_RANK" not in os.environ:
        launch(arguments.ranks or torch.cuda.device_count() or 2)
    device = own_device()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if arguments.profile:
            _profile(arguments, device)
        else:
            _compare(arguments, device)
    finally:
        dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="8x512-256", help="layers x width - tokens per rank")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    parser.add_argument("--micro-batches", type=int, default=1, help="per step; all but the last under no_sync")
    parser.add_argument("--rounds", type=int, default=40, help="measured steps of each system")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each system before measuring")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="default", help="which AdamW implementation")
    parser.add_argument("--ranks", type=int, help="ranks to start without torchrun; default: the GPUs, else 2")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait in all for other processes")
    parser.add_argument("--profile", choices=("cprofile", "torch"), help="profile the first of --systems instead")
    parser.add_argument("--output", type=Path, help="result file; default: benchmarks/results/step_time-<preset>.json")
    return parser.parse_args()


def _tokens(preset: Preset, round_index: int, device: torch.device, micro_batches: int = 1) -> list[torch.Tensor]:
    """This rank's tokens of one round, by micro-batch [rows, sequence] int64: the same for every system."""
    generator = torch.Generator().manual_seed(round_index * dist.get_world_size() + dist.get_rank())
    shape = (preset.rows, preset.sequence)
    return [torch.randint(preset.vocabulary, shape, generator=generator).to(device) for _ in range(micro_batches)]


def _build(name: str, preset: Preset, device: torch.device, optimizer: str) -> System:
    torch.manual_seed(0)
    model = Transformer(preset).to(device)
    model.computes_in_fp32 = preset.fp32
    return build(name, model, list(model.blocks), optimizer)


def _step(system: System, batches: list[torch.Tensor]) -> Step:
    """Train one step. Every rank starts it together."""
    device = batches[0].device
    clock = Clock(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    cpu_s = time.process_time()
    clock.lap()
    total = torch.zeros((), device=device)
    first: list[torch.Tensor] = batches[:-1]
    last: torch.Tensor | None = batches[-1]

    def micro_batch(tokens: torch.Tensor) -> None:
        loss = next_token_loss(system.forward(tokens), tokens) / len(batches)
        clock.lap()
        loss.backward()
        clock.lap()
        total.add_(loss.detach())

    if system.accumulate is not None:
        losses = system.accumulate(batches, lambda model, tokens: next_token_loss(model(tokens), tokens) / len(batches))
        clock.lap()
        clock.lap()  # forward and backward of all micro-batches take turns: both count as forward
        total.add_(torch.stack(losses).sum())
        first, last = [], None
    if first:
        with system.no_sync():  # one context around them, as the documentation of DDP and of StreamShard has it
            for tokens in first:
                micro_batch(tokens)
    if last is not None:
        micro_batch(last)
    system.update()
    clock.lap()
    *laps_ms, update_ms = clock.laps_ms()
    phases = [sum(laps_ms[0::2]), sum(laps_ms[1::2]), update_ms]
    return Step(phases, (time.process_time() - cpu_s) * 1e3, total.item())


def _compare(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure all systems in turn; rank 0 prints and saves."""
    preset = PRESETS[arguments.preset]
    systems: dict[str, System] = {}
    memory: dict[str, dict[str, int]] = {}
    failures: dict[str, str] = {}
    for name in arguments.systems:
        try:
            systems[name], memory[name] = _prepare(name, arguments, device)
        except Exception as error:  # a peer that cannot run here is a result: it says why
            failures[name] = f"{type(error).__name__}: {error}"
    _agree_on(sorted(systems))
    for index in range(arguments.warmup):
        for name in seeded_order(list(systems), index):
            _step(systems[name], _tokens(preset, index, device, arguments.micro_batches))

    steps: dict[str, list[Step]] = {name: [] for name in systems}
    noise = Noise()
    patience_s = arguments.patience if dist.get_rank() == 0 else 0.0  # the others wait at the step's barrier
    for index in range(arguments.warmup, arguments.warmup + arguments.rounds):
        patience_s = noise.begin_round(patience_s)
        gc.collect()
        gc.disable()  # a collection would hit whichever system is running
        tokens = _tokens(preset, index, device, arguments.micro_batches)
        for name in seeded_order(list(systems), index):
            steps[name].append(_step(systems[name], tokens))
        gc.enable()
        noise.end_round()
    measured, foreign_cores = _gather(steps, noise)
    if dist.get_rank() == 0:
        result = _result(arguments, device, measured, foreign_cores, memory, failures)
        _print(result)
        if arguments.output or "streamshard" in systems:
            suffix = f"-x{arguments.micro_batches}" if arguments.micro_batches > 1 else ""
            suffix += "-dial" if "zero1" in systems else ""
            save(result, arguments.output or RESULTS / f"step_time-{device.type}-{arguments.preset}{suffix}.json")


def _prepare(name: str, arguments: argparse.Namespace, device: torch.device) -> tuple[System, dict[str, int]]:
    """Build a system, train steps so that all its state exists, and measure the memory of one more."""
    preset, micro_batches = PRESETS[arguments.preset], arguments.micro_batches
    with measured_memory(device) as state:
        system = _build(name, preset, device, arguments.optimizer)
        for index in range(PREPARATION_STEPS - 1):
            _step(system, _tokens(preset, index, device, micro_batches))
    with measured_memory(device) as step:
        _step(system, _tokens(preset, PREPARATION_STEPS - 1, device, micro_batches))
    return system, {"held_bytes": state.held_bytes, "step_peak_bytes": state.held_bytes + step.peak_bytes}


def _agree_on(names: list[str]) -> None:
    """Stop where a system runs on some ranks only: the others would wait for it."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, names)
    if any(other != names for other in everywhere):
        raise RuntimeError(f"systems differ between ranks: {everywhere}")


def _gather(steps: dict[str, list[Step]], noise: Noise) -> tuple[dict[str, Any], list[float]]:
    """Per system and round: the slowest rank's milliseconds, all ranks' CPU, the mean loss. And the noise."""
    everywhere: list[tuple[dict[str, list[Step]], list[float]]] = [({}, [])] * dist.get_world_size()
    dist.all_gather_object(everywhere, (steps, noise.own_cpu_s()))
    systems = {}
    for name in steps:
        rounds = list(zip(*(ranks_steps[name] for ranks_steps, _ in everywhere), strict=True))
        slowest = [max(ranks, key=lambda step: sum(step.laps_ms)) for ranks in rounds]
        systems[name] = {
            "step_ms": [sum(step.laps_ms) for step in slowest],
            "phases_ms": {phase: [step.laps_ms[i] for step in slowest] for i, phase in enumerate(PHASES)},
            "cpu_ms": [sum(step.cpu_ms for step in ranks) for ranks in rounds],
            "loss": [sum(step.loss for step in ranks) / len(ranks) for ranks in rounds],
        }
    return systems, noise.foreign_cores([cpu_s for _, cpu_s in everywhere])


def _result(
    arguments: argparse.Namespace,
    device: torch.device,
    measured: dict[str, Any],
    foreign_cores: list[float],
    memory: dict[str, dict[str, int]],
    failures: dict[str, str],
) -> dict[str, Any]:
    """Everything a reader needs to judge the result, raw step times included."""
    preset = PRESETS[arguments.preset]
    dtype = "float32" if preset.fp32 else "bfloat16"
    quiet = [index for index, load in enumerate(foreign_cores) if load <= QUIET_CORES]
    systems: dict[str, Any] = {}
    for name, values in measured.items():
        entry: dict[str, Any] = {"step_ms": summary(values["step_ms"]), "all_ranks_cpu_ms": summary(values["cpu_ms"])}
        if PEER in measured:
            ratios = [own / peer for own, peer in zip(values["step_ms"], measured[PEER]["step_ms"], strict=True)]
            entry[f"ratio_to_{PEER}"] = summary(ratios)
            cpu = [own / peer for own, peer in zip(values["cpu_ms"], measured[PEER]["cpu_ms"], strict=True)]
            entry[f"cpu_ratio_to_{PEER}"] = summary(cpu)
            if quiet:
                entry[f"ratio_to_{PEER}_quiet_rounds"] = summary([ratios[index] for index in quiet])
        entry["phases_ms"] = {phase: summary(laps)["median"] for phase, laps in values["phases_ms"].items()}
        entry["memory"] = memory[name]
        entry["last_loss"] = values["loss"][-1]
        entry["rounds_ms"] = [round(value, 3) for value in values["step_ms"]]
        systems[name] = entry
    return {
        "benchmark": "step_time",
        "environment": environment(device),
        "config": {
            "preset": arguments.preset,
            **dataclasses.asdict(preset),
            "tokens_per_rank": preset.tokens,
            "parameters": sum(parameter.numel() for parameter in _skeleton(preset).parameters()),
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "ranks_share_a_gpu": device.type == "cuda" and "NCCL_HOSTID" in os.environ,
            "param_dtype": dtype,
            "reduce_dtype": dtype,
            "optimizer": f"AdamW ({arguments.optimizer}), fp32 main weights",
            "warmup_steps": arguments.warmup + PREPARATION_STEPS,
            "rounds": arguments.rounds,
            "micro_batches": arguments.micro_batches,
        },
        "noise": {
            "foreign_cores": summary(foreign_cores),
            "quiet_rounds": len(quiet),
            "quiet_means_foreign_cores_at_most": QUIET_CORES,
            "rounds_foreign_cores": [round(load, 3) for load in foreign_cores],
        },
        "process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "systems": systems,
        "not_run": failures,
    }


def _skeleton(preset: Preset) -> Transformer:
    with torch.device("meta"):
        return Transformer(preset)


def _print(result: dict[str, Any]) -> None:
    config = result["config"]
    size = f"{config['parameters'] / 1e6:.1f}M parameters, {config['tokens_per_rank']} tokens per rank"
    ranks = f"{config['ranks']} ranks ({config['backend']}, {result['environment']['device']})"
    print(f"\n{config['preset']}: {size}, {ranks}, {config['rounds']} rounds")
    noise = result["noise"]
    print(f"other processes: {noise['foreign_cores']['median']:.2f} cores; quiet rounds: {noise['quiet_rounds']}")
    print(
        f"{'':12} {'step ms':>8} {'iqr':>6} {f'/ {PEER}':>8} {'iqr':>6} {'95% of median':>15} {'quiet':>6} {'cpu':>6}",
        end="",
    )
    print("".join(f" {phase:>9}" for phase in PHASES), f"{'held MB':>8} {'peak MB':>8} {'loss':>7}")
    for name, entry in sorted(result["systems"].items(), key=lambda item: item[1]["step_ms"]["median"]):
        ratio = entry.get(f"ratio_to_{PEER}")
        print(f"{name:12} {entry['step_ms']['median']:8.1f} {entry['step_ms']['iqr']:6.1f}", end="")
        if ratio is None:
            print(f" {'':45}", end="")
        else:
            between = f"{ratio['median_low']:.3f}-{ratio['median_high']:.3f}"
            quiet = entry.get(f"ratio_to_{PEER}_quiet_rounds", {}).get("median", float("nan"))
            print(f" {ratio['median']:8.3f} {ratio['iqr']:6.3f} {between:>15} {quiet:6.3f}", end="")
            print(f" {entry[f'cpu_ratio_to_{PEER}']['median']:6.3f}", end="")
        print("".join(f" {entry['phases_ms'][phase]:9.1f}" for phase in PHASES), end="")
        memory = entry["memory"]
        print(f" {memory['held_bytes'] / 1e6:8.1f} {memory['step_peak_bytes'] / 1e6:8.1f} {entry['last_loss']:7.4f}")
    for name, reason in result["not_run"].items():
        print(f"{name:12} not run: {reason}")
    streamshard = result["systems"].get("streamshard", {}).get(f"ratio_to_{PEER}")
    if streamshard is not None and config["target"] is not None:
        verdict = "met" if streamshard["median"] <= config["target"] else "missed"
        print(f"target {config['target']} {verdict}: {streamshard['median']:.3f}")


def _profile(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train one system alone and print where rank 0's time goes; for "torch", also write a Chrome trace."""
    preset = PRESETS[arguments.preset]
    name = arguments.systems[0] if len(arguments.systems) == 1 else "streamshard"
    system = _build(name, preset, device, arguments.optimizer)
    for index in range(arguments.warmup):
        _step(system, _tokens(preset, index, device))
    rounds = range(arguments.warmup, arguments.warmup + arguments.rounds)
    tokens = [_tokens(preset, index, device) for index in rounds]
    if arguments.profile == "cprofile":
        python_profiler = cProfile.Profile()
        python_profiler.enable()
        for batch in tokens:
            _step(system, batch)
        python_profiler.disable()
        text = io.StringIO()
        pstats.Stats(python_profiler, stream=text).sort_stats("tottime").print_stats(40)
        report = text.getvalue()
    else:
        with torch.profiler.profile() as profiler:
            for batch in tokens:
                _step(system, batch)
        sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        report = profiler.key_averages().table(sort_by=sort, row_limit=40, max_name_column_width=60)
        if dist.get_rank() == 0 and arguments.output:
            profiler.export_chrome_trace(str(arguments.output))
    if dist.get_rank() == 0:
        print(f"{name}, {arguments.preset}, {arguments.rounds} steps")
        print(report)


if __name__ == "__main__":
    main()
