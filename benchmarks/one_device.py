"""Systems on one device, step by step in turn in one process: a Llama that fills a GPU, or layers too small for it.

    python benchmarks/one_device.py llama                  # 1.1B parameters, 2048 tokens a row, as many rows as fit
    python benchmarks/one_device.py small                  # 48 layers x 512, 512 tokens: the host is what is slow
    python benchmarks/one_device.py small --compile        # with compiled layers
    python benchmarks/one_device.py small --pretend-ranks 8

One rank, so nothing is communicated; with --pretend-ranks it is one of several on torch's "fake" group, whose
collectives do nothing: what is left is what a rank's host and device do beside them. Plain PyTorch ("local") is what a
user writes by hand: a bf16 model, fp32 main weights, the same fused AdamW. Where memory does not allow all systems at
once, they are built and measured one after the other, twice, and the result says so.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Before there is a process group: see step_time.py.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.optim
from _comparison import CASES, REHEARSED, Comparison, free_memory
from _measure import RESULTS, environment, write_json
from facts import speed


def main() -> None:
    """Measure one case, save what is known so far again and again, print."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    result = {
        "benchmark": f"one_device {arguments.case}",
        "environment": environment(device),
        "machine": speed(device, is_brief=arguments.rehearse),
    }
    write_json(result, arguments.output)
    case = (REHEARSED if arguments.rehearse else CASES)[arguments.case]
    with _group(device, arguments.pretend_ranks):
        try:
            if arguments.apart:
                raise torch.OutOfMemoryError("--apart")
            Comparison(case, arguments, device, result).together()
        except torch.OutOfMemoryError as error:
            result["not_together"] = str(error).splitlines()[0]
        if "not_together" in result:  # outside of the handler, which holds what was built
            free_memory(device)
            Comparison(case, arguments, device, result).apart()
    _print(result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--compile", action="store_true", help="the layers, each by itself")
    parser.add_argument("--pretend-ranks", type=int, default=1, metavar="N", help="be one of N on a fake group")
    parser.add_argument(
        "--apart", action="store_true", help="build systems one after the other, as if memory were short"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no round after this time")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--rehearse", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "one_device.json")
    return parser.parse_args()


@contextlib.contextmanager
def _group(device: torch.device, pretended: int) -> Iterator[None]:
    """A process group of this process alone, or one that pretends to be larger."""
    patched: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if pretended > 1:
        from host_overhead import RanksAsOnGpus
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=pretended, store=FakeStore())
        patched = mock.patch("streamshard.build.Communicator", RanksAsOnGpus)
    else:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        with patched:
            yield
    finally:
        dist.destroy_process_group()


# -- the table ---------------------------------------------------------------------------------------------------------


def _print(result: dict[str, Any]) -> None:
    config = result["config"]
    print(f"\n{config['model']}: {config['parameters'] / 1e6:.1f}M parameters, {config['tokens']} tokens, ", end="")
    print(f"{config['ranks']} rank(s) ({config['backend']}), {result['environment']['device']}", end="")
    print(", compiled layers" if config["compiled_layers"] else "", end="")
    print(", one system after the other" if config["one_after_the_other"] else "")
    print(f"{'':12} {'step ms':>8} {'iqr':>6} {'/ local':>8} {'/ fsdp2':>8} {'tokens/s':>9} {'of mm':>6}", end="")
    print(f" {'host us/l':>9} {'/ fsdp2':>8} {'built MB':>9} {'plan MB':>9} {'held MB':>9} {'peak MB':>9}", end="")
    print(f" {'syncs':>6} {'allocs':>7}")
    for name, entry in result["systems"].items():
        if "step_ms" not in entry:
            continue
        ratios = [entry.get(key, {}).get("median", float("nan")) for key in ("ratio_to_local", "ratio_to_fsdp2")]
        host = entry.get("host_ratio_to_fsdp2", {}).get("median", float("nan"))
        memory, steady = entry["memory"], entry.get("steady_step", {})
        print(f"{name:12} {entry['step_ms']['median']:8.2f} {entry['step_ms']['iqr']:6.2f}", end="")
        print(f" {ratios[0]:8.4f} {ratios[1]:8.4f} {entry['tokens_per_s']:9.0f}", end="")
        print(f" {entry['utilization_of_matmul']:6.3f} {entry['host_us_per_layer']['median']:9.1f} {host:8.3f}", end="")
        kinds = ("building_peak_bytes", "planned_bytes", "held_bytes", "step_peak_bytes")
        sizes = (float("nan") if memory[kind] is None else memory[kind] / 1e6 for kind in kinds)
        print("".join(f" {size:9.1f}" for size in sizes), end="")
        print(f" {steady.get('synchronizations', '?'):>6} {steady.get('allocations', '?'):>7}")
    for name, reason in result["not_run"].items():
        print(f"{name:12} not run: {reason}")
    for target in result["targets"]:
        verdict = {True: "met", False: "NOT met", None: "not known"}[target["met"]]
        found = "-" if target["found"] is None else f"{target['found']:.4g}"
        print(f"target {verdict}: {target['target']} {found}, at most {target['at_most']}")


if __name__ == "__main__":
    main()
