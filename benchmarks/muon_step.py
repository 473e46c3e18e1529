"""A step of Muon under `WholeParameterOptimizer` and as people write it for FSDP2, step by step in turn.

    python benchmarks/muon_step.py --preset 8x512-256        # starts two ranks on the CPU, one per GPU with GPUs
    python benchmarks/muon_step.py --ranks 4 --rounds 0      # counts only: bytes and flops of each rank
    python benchmarks/muon_step.py --plan                    # what a step sends and computes with 8, 64, 512 ranks

`torch.optim.Muon`'s arithmetic trains the matrices of layers, AdamW the rest. The peers, both with FSDP2 and momentum
in shards: "fsdp2" gathers each matrix with ``DTensor.full_tensor()`` on every rank, "all-gather" gathers all of them at
once; then every rank runs Newton-Schulz on every matrix and keeps its rows. "alone" is what a rank has to compute if
matrices are divided and nothing is sent. Before anything is measured, all systems have to have the same weights.

Every round trains each system for one step, in an order drawn anew, with a barrier before it and one before the
optimizer's step. Times are the slowest rank's. What counts is the ratio within a round.

`WholeParameterOptimizer` sends three fp32 elements for each element that is not the owner's own (gradient and weight
there, weight back): asserted here, of what is given to the process group.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # before there is a process group: see step_time.py
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
from _measure import QUIET_CORES, RESULTS, Clock, Noise, environment, launch, own_device, save, seeded_order, summary
from _models import PRESETS, Transformer, next_token_loss
from _muon import SYSTEMS, Counts, MuonSystem, count_step, element_traffic, newton_schulz_flops

from streamshard.optim.rounds import assign_owners
from streamshard.planning.layout import ParamLayout, plan_flat_param

OWN, PEERS = "streamshard", ("fsdp2", "all-gather")
TARGET = 0.6  # of the better peer's step, with two ranks
PREPARATION_STEPS = 3
TOLERANCE = 0.1  # of the change that a parameter has seen: bf16 weights, and Newton-Schulz, round to 2^-9
WHAT = ("update", "training step")
LLAMA_3_8B = {"layers": 32, "width": 4096, "keys": 1024, "between": 14336}


class Step(NamedTuple):
    """One step on this rank: milliseconds of forward, backward and the optimizer's step, CPU milliseconds of that."""

    forward_ms: float
    backward_ms: float
    update_ms: float
    update_cpu_ms: float

    @property
    def whole_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.update_ms


def main() -> None:
    """Start ranks if nobody did, measure, and let rank 0 report."""
    arguments = _parse()
    if arguments.plan:
        for ranks in (8, 64, 512):
            print(_describe_plan(_plan_llama(ranks)))
        return
    if "LOCAL_RANK" not in os.environ:
        launch(arguments.ranks or torch.cuda.device_count() or 2)
    device = own_device()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        _compare(arguments, device)
    finally:
        dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="8x512-256", help="layers x width - tokens per rank")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=20, help="measured steps of each system; 0: count only")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each system before measuring")
    parser.add_argument("--round-size", default="16MiB", help="of WholeParameterOptimizer")
    parser.add_argument("--ranks", type=int, help="ranks to start without torchrun; default: the GPUs, else 2")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait in all for other processes")
    parser.add_argument("--plan", action="store_true", help="print what Llama 3 8B takes on many ranks, and end")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/muon_step-<device>-<preset>.json")
    return parser.parse_args()


# -- one step ----------------------------------------------------------------------------------------------------------


def _tokens(arguments: argparse.Namespace, index: int, device: torch.device) -> torch.Tensor:
    """This rank's of one round: the same for every system."""
    preset = PRESETS[arguments.preset]
    generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
    return torch.randint(preset.vocabulary, (preset.rows, preset.sequence), generator=generator).to(device)


def _build(name: str, arguments: argparse.Namespace, device: torch.device) -> MuonSystem:
    torch.manual_seed(0)
    model = Transformer(PRESETS[arguments.preset]).to(device)
    settings = {"round_size": arguments.round_size} if name == OWN else {}
    return SYSTEMS[name](model, list(model.blocks), **settings)


def _step(system: MuonSystem, tokens: torch.Tensor) -> Step:
    """Train one step. Every rank starts it, and the optimizer's part of it, together."""
    passes = Clock(tokens.device)
    dist.barrier()
    passes.lap()
    if system.trains:
        loss = next_token_loss(system.model(tokens), tokens)
        passes.lap()
        loss.backward()
    else:
        passes.lap()
    passes.lap()
    laps_ms = passes.laps_ms()
    dist.barrier()
    update, cpu_s = Clock(tokens.device), time.process_time()
    update.lap()
    system.step()
    update.lap()
    laps_ms += update.laps_ms()
    cpu_ms = (time.process_time() - cpu_s) * 1e3
    if system.trains:
        system.zero_grad()
    return Step(*laps_ms, cpu_ms)


def _count(system: MuonSystem, tokens: torch.Tensor) -> list[Counts]:
    """Of one step, by rank."""
    if system.trains:
        next_token_loss(system.model(tokens), tokens).backward()
    own = count_step(system)
    if system.trains:
        system.zero_grad()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(own))
    return [Counts(*each) for each in everywhere]


# -- before measuring --------------------------------------------------------------------------------------------------


def _assert_same_weights(systems: dict[str, MuonSystem], before: dict[str, torch.Tensor]) -> float:
    """All systems have trained the same; returns the largest difference, as a share of a parameter's change."""
    trained = {name: system.full_weights() for name, system in systems.items() if system.trains}
    first, *others = trained
    largest = 0.0
    for other in others:
        for name, wanted in trained[first].items():
            difference = float((trained[other][name] - wanted).norm() / (wanted - before[name]).norm())
            if not difference <= TOLERANCE:
                raise AssertionError(f"{name}: {other} and {first} differ by {difference:.1%} of the change")
            largest = max(largest, difference)
    return largest


def _assert_formula(system: MuonSystem, counts: list[Counts]) -> dict[str, int]:
    """What ranks have sent is the formula's, to the byte."""
    moved = element_traffic(system)
    sent, messages = sum(each.sent_bytes for each in counts), sum(each.messages for each in counts)
    if sent != 4 * 3 * moved:
        raise AssertionError(f"ranks sent {sent} bytes: wanted 3 x 4 x {moved}")
    return {"moved_elements": moved, "messages": messages, "bytes": sent}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure all systems in turn; rank 0 prints and saves."""
    systems = {name: _build(name, arguments, device) for name in arguments.systems}
    before = {name: weight.clone() for name, weight in systems[OWN].full_weights().items()}
    for index in range(PREPARATION_STEPS):
        for system in systems.values():
            _step(system, _tokens(arguments, index, device))
    difference = _assert_same_weights(systems, before)
    counts = {name: _count(system, _tokens(arguments, 0, device)) for name, system in systems.items()}
    formula = _assert_formula(systems[OWN], counts[OWN])

    steps: dict[str, list[Step]] = {name: [] for name in systems}
    noise = Noise()
    patience_s = arguments.patience if dist.get_rank() == 0 else 0.0  # the others wait at the step's barrier
    for index in range(-arguments.warmup if arguments.rounds else 0, arguments.rounds):
        if index >= 0:
            patience_s = noise.begin_round(patience_s)
        gc.collect()
        gc.disable()  # a collection would hit whichever system is running
        for name in seeded_order(list(systems), index + arguments.warmup):
            step = _step(systems[name], _tokens(arguments, index + arguments.warmup, device))
            if index >= 0:
                steps[name].append(step)
        gc.enable()
        if index >= 0:
            noise.end_round()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (steps, noise.own_cpu_s()))
    if dist.get_rank() == 0:
        result = {
            **_head(arguments, device),
            "largest_difference_of_weights": difference,
            "traffic": {"formula": formula, **{name: _count_entry(own) for name, own in counts.items()}},
        }
        if arguments.rounds:
            result["noise"], quiet = _noise_entry(noise.foreign_cores([cpu_s for _, cpu_s in everywhere]))
            result["systems"] = _summarize([own for own, _ in everywhere], quiet)
        result["llama_3_8b"] = [_plan_llama(ranks) for ranks in (2, 8, 64, 512)]
        _print(result)
        suffix = f"{device.type}-{arguments.preset}" + ("" if arguments.rounds else f"-{dist.get_world_size()}ranks")
        save(result, arguments.output or RESULTS / f"muon_step-{suffix}.json")


def _head(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    preset = PRESETS[arguments.preset]
    return {
        "benchmark": "muon_step",
        "environment": environment(device),
        "config": {
            "preset": arguments.preset,
            **dataclasses.asdict(preset),
            "ranks": dist.get_world_size(),
            "backend": dist.get_backend(),
            "param_dtype": "bfloat16",
            "reduce_dtype": "float32",
            "optimizer": "Muon for matrices of layers, AdamW for the rest",
            "round_size": arguments.round_size,
            "warmup_steps": arguments.warmup + PREPARATION_STEPS,
            "rounds": arguments.rounds,
        },
    }


def _count_entry(counts: list[Counts]) -> dict[str, Any]:
    return {field: [getattr(each, field) for each in counts] for field in Counts._fields}


def _noise_entry(foreign_cores: list[float]) -> tuple[dict[str, Any], list[int]]:
    quiet = [index for index, load in enumerate(foreign_cores) if load <= QUIET_CORES]
    return {
        "foreign_cores": summary(foreign_cores),
        "quiet_rounds": len(quiet),
        "quiet_means_foreign_cores_at_most": QUIET_CORES,
        "rounds_foreign_cores": [round(load, 3) for load in foreign_cores],
    }, quiet


def _summarize(everywhere: list[dict[str, list[Step]]], quiet: list[int]) -> dict[str, Any]:
    """Per system: the slowest rank's times, and their ratios to the peers' within rounds."""
    names = list(everywhere[0])
    rounds = {name: list(zip(*(own[name] for own in everywhere), strict=True)) for name in names}
    times = {
        "update": {name: [max(step.update_ms for step in ranks) for ranks in rounds[name]] for name in names},
        "update_cpu": {name: [sum(step.update_cpu_ms for step in ranks) for ranks in rounds[name]] for name in names},
        "training_step": {name: [max(step.whole_ms for step in ranks) for ranks in rounds[name]] for name in names},
    }
    systems: dict[str, Any] = {name: {} for name in names}
    for what, of_systems in times.items():
        for name, values in of_systems.items():
            if what == "training_step" and name == "alone":
                continue
            entry = systems[name][what] = {"ms": summary(values)}
            for peer in PEERS:
                if peer in names:
                    ratios = [own / its for own, its in zip(values, of_systems[peer], strict=True)]
                    entry[f"ratio_to_{peer}"] = summary(ratios)
                    if quiet:
                        entry[f"ratio_to_{peer}_quiet_rounds"] = summary([ratios[index] for index in quiet])
            entry["rounds_ms"] = [round(value, 3) for value in values]
    return systems


# -- many ranks --------------------------------------------------------------------------------------------------------


def _plan_llama(ranks: int) -> dict[str, Any]:
    """What a step of Muon takes for the matrices of Llama 3 8B's layers, by the formula and the plan of owners."""
    width, keys, between = LLAMA_3_8B["width"], LLAMA_3_8B["keys"], LLAMA_3_8B["between"]
    named = {"query": (width, width), "key": (keys, width), "value": (keys, width), "out": (width, width)}
    named |= {"gate": (between, width), "up": (between, width), "down": (width, between)}
    sizes = [ParamLayout(name, shape) for name, shape in (*named.items(), ("norm_1", (width,)), ("norm_2", (width,)))]
    layout = plan_flat_param(sizes, ranks, align_pieces_to=1)
    matrices = [place for place in layout.params if len(place.shape) == 2] * LLAMA_3_8B["layers"]
    flops = [float(newton_schulz_flops(place.shape)) for place in matrices]
    loads = [0.0] * ranks
    owners = assign_owners(flops, loads)
    total = sum(place.numel for place in matrices)
    sent, received = [0] * ranks, [0] * ranks
    for place, owner in zip(matrices, owners, strict=True):
        for rank in range(ranks):
            numel = layout.local_range(place, rank).numel
            if rank != owner:
                sent[rank] += 2 * numel
                received[owner] += 2 * numel
                sent[owner] += numel
                received[rank] += numel
    return {
        "ranks": ranks,
        "matrices": len(matrices),
        "elements": total,
        "bytes_per_rank": 4 * sum(sent) // ranks,
        "bytes_sent_by_busiest": 4 * max(sent),
        "bytes_received_by_busiest": 4 * max(received),
        "bytes_received_by_each_of_all_gather": 4 * total * (ranks - 1) // ranks,
        "flops_of_busiest": int(max(loads)),
        "flops_of_mean": int(sum(loads) / ranks),
        "flops_of_each_of_peers": int(sum(loads)),
    }


def _describe_plan(plan: dict[str, Any]) -> str:
    return (
        f"Llama 3 8B, {plan['ranks']} ranks: each sends {plan['bytes_per_rank'] / 1e9:.2f} GB (the busiest "
        f"{plan['bytes_sent_by_busiest'] / 1e9:.2f}, and receives {plan['bytes_received_by_busiest'] / 1e9:.2f}); with "
        f"an all-gather each receives {plan['bytes_received_by_each_of_all_gather'] / 1e9:.2f} GB. Newton-Schulz: "
        f"busiest {plan['flops_of_busiest'] / 1e12:.1f} Tflop, mean {plan['flops_of_mean'] / 1e12:.1f}, peers "
        f"{plan['flops_of_each_of_peers'] / 1e12:.0f} on each rank"
    )


# -- printing ----------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any]) -> None:
    config = result["config"]
    print(f"\n{config['preset']}, {config['ranks']} ranks ({config['backend']}), {config['rounds']} rounds")
    print(f"weights differ by {result['largest_difference_of_weights']:.2e} of their change at most")
    formula = result["traffic"]["formula"]
    print(f"streamshard sent {formula['bytes']:,} bytes, the formula's: 12 x {formula['moved_elements']:,} and numbers")
    print(f"{'':12} {'MB sent by rank':>32} {'messages':>9}  Gflop by rank")
    for name in SYSTEMS:
        if name in result["traffic"]:
            entry = result["traffic"][name]
            sent = " ".join(f"{value / 1e6:.2f}" for value in entry["sent_bytes"])
            flops = " ".join(f"{value / 1e9:.1f}" for value in entry["matmul_flops"])
            print(f"{name:12} {sent:>32} {sum(entry['messages']):>9}  {flops}")
    if "systems" in result:
        _print_times(result)
    for plan in result["llama_3_8b"]:
        print(_describe_plan(plan))


def _print_times(result: dict[str, Any]) -> None:
    noise = result["noise"]
    print(f"other processes: {noise['foreign_cores']['median']:.2f} cores; quiet rounds: {noise['quiet_rounds']}")
    for what in ("update", "update_cpu", "training_step"):
        print(f"{what:14} {'ms':>8} {'iqr':>7}", *(f"{f'/ {peer}':>28}{'quiet':>7}" for peer in PEERS))
        for name, entry in result["systems"].items():
            if what not in entry:
                continue
            print(f"{name:14} {entry[what]['ms']['median']:8.1f} {entry[what]['ms']['iqr']:7.1f}", end="")
            for peer in PEERS:
                ratio = entry[what].get(f"ratio_to_{peer}")
                if ratio is not None:
                    calm = entry[what].get(f"ratio_to_{peer}_quiet_rounds", {}).get("median", float("nan"))
                    between = f"{ratio['median']:.3f} ({ratio['median_low']:.3f} to {ratio['median_high']:.3f})"
                    print(f" {between:>28}{calm:7.3f}", end="")
            print()
    systems = result["systems"]
    better = min((peer for peer in PEERS if peer in systems), key=lambda peer: systems[peer]["update"]["ms"]["median"])
    if result["config"]["ranks"] == 2 and OWN in systems:
        ratio = systems[OWN]["update"][f"ratio_to_{better}"]["median"]
        print(f"target {TARGET} of {better}'s update {'met' if ratio <= TARGET else 'missed'}: {ratio:.3f}")


if __name__ == "__main__":
    main()
