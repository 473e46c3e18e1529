"""Run every benchmark that this machine can run, one after the other; render what they have found.

    python -m benchmarks --list                       # which, how long at most, and why some are left out
    python -m benchmarks --out runs/benchmarks        # one JSON file for each, results.json, output.log
    python -m benchmarks --quick --only step_time     # tiny: whether they run at all, not how fast
    python -m benchmarks report runs/benchmarks       # report.md and a PNG for each result

Each benchmark is a process of its own and is ended after its limit; peers are measured in the same run as StreamShard.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks._jobs import ROOT, Job, run_jobs
from benchmarks._report import brief, render


class Benchmark(NamedTuple):
    """One call of a script.

    Attributes:
        name: "script.what"; the file of its result is named so.
        arguments: of the script.
        limit_s: it is ended after so many seconds.
        quick: more arguments, which make it tiny.
        option: which names the result's file.
        needs: packages beside those that StreamShard needs, or "GPU".
    """

    name: str
    arguments: str
    limit_s: float
    quick: str
    option: str = "--output"
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Why this machine cannot run it."""
        absent = [need for need in self.needs if not _is_here(need)]
        return f"needs {', '.join(absent)}" if absent else None

    def job(self, out: Path, *, quick: bool) -> Job:
        """What runs it."""
        script = self.name.partition(".")[0]
        arguments = shlex.split(f"{self.arguments} {self.quick if quick else ''}")
        target = out / (script if script == "gpu" else f"{self.name}.json")
        return Job(
            name=self.name,
            command=[sys.executable, f"benchmarks/{script}.py", *arguments, self.option, str(target)],
            limit_s=self.limit_s,
            environment={"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            found=target / "results.json" if script == "gpu" else target,
            brief=brief,
        )


def _is_here(need: str) -> bool:
    if need != "GPU":
        return find_spec(need) is not None
    import torch

    return torch.cuda.is_available()


_DIAL = "--systems ddp ddp+zero fsdp2 fsdp2-keep streamshard zero2 zero1"
_TINY = "--preset tiny --rounds 5 --warmup 1"

BENCHMARKS = (
    Benchmark("step_time.8x512-256", "--preset 8x512-256", 900, _TINY),
    Benchmark("step_time.8x512-1024", "--preset 8x512-1024", 1200, _TINY),
    Benchmark("step_time.24x256-256", "--preset 24x256-256", 900, _TINY),
    Benchmark("step_time.dial", f"{_DIAL} --rounds 20", 900, _TINY),
    Benchmark("step_time.accumulated", f"{_DIAL} fsdp2-zero2 --micro-batches 4 --rounds 16", 1500, _TINY),
    Benchmark("step_time.units", "--preset 8x512-256-32k --systems fsdp2 streamshard one-edge", 900, _TINY),
    Benchmark("step_time.coalesced", "--preset 24x64-64 --systems fsdp2 streamshard coalesced", 300, _TINY),
    Benchmark("trainer_step.fp32", "", 900, _TINY, needs=("transformers",)),
    Benchmark("trainer_step.bf16", "--bf16", 900, _TINY, needs=("transformers",)),
    Benchmark("muon_step.8x512-256", "--rounds 8", 900, "--preset 3x64-32 --rounds 3"),
    Benchmark("checkpoints", "", 900, "--layers 2 --width 64 --rounds 4"),
    Benchmark("host_overhead", "--rounds 40", 600, "--parameters 1 --rounds 3 --warmup 1"),
    Benchmark(
        "scale", "", 1800, "--ranks 8 16 --rounds 2 --layers 3 --shrink 64 --only mixture", needs=("transformers",)
    ),
    Benchmark("same_bits", "", 1500, "--only frozen --ranks 2"),
    Benchmark("timeline", "", 120, "--layers 3 --width 64 --sequence 32 --steps 2"),
    Benchmark("bytes_per_parameter", "", 900, ""),
    Benchmark("memory_by_ranks", "", 900, "--layers 2 --measured-ranks 2 --ranks 2 4", needs=("transformers",)),
    Benchmark("qlora_memory", "", 3000, "--layers 2 --width 256", needs=("transformers", "bitsandbytes", "peft")),
    Benchmark("optimizers", "", 1800, "--only torch.optim.adamw --ranks 2", "--out"),
    Benchmark("transformers_classes", "", 3600, "--only LlamaForCausalLM", "--out", ("transformers",)),
    Benchmark("host_memory", "--within 240", 260, "--rehearse", needs=("GPU", "transformers")),
    Benchmark("gpu", "--within 470", 500, "--only facts", "--out", ("GPU",)),
)


def main() -> None:
    """Run, list or render."""
    arguments = _parse()
    if arguments.command == "report":
        print(f"wrote {render(arguments.directory)}")
        return
    wanted = [each for each in BENCHMARKS if arguments.only is None or _is_named(each.name, arguments.only)]
    left_out = {each.name: why for each in wanted if (why := each.missing()) is not None}
    for name, why in left_out.items():
        print(f"{name:22} left out: {why}")
    out = arguments.out.resolve()
    jobs = [each.job(out, quick=arguments.quick) for each in wanted if each.name not in left_out]
    if arguments.list:
        for job in jobs:
            print(f"{job.name:22} {job.limit_s:5.0f} s at most: {shlex.join(['python', *job.command[1:-2]])}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a job is ended with this process
    about = {"benchmark": "all", "is_rehearsal": arguments.quick, "left_out": left_out}
    print(f"afterwards, or meanwhile: python -m benchmarks report {arguments.out}", flush=True)
    sys.exit(0 if run_jobs(jobs, out, about, sum(job.limit_s for job in jobs)) else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="what it holds of others is kept")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks, or scripts with all their benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny: whether they run at all")
    parser.add_argument("--list", action="store_true", help="print what would be run, and end")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="render a directory's results").add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only or () if not any(_is_named(b.name, [name]) for b in BENCHMARKS)]:
        parser.error(f"--only {' '.join(unknown)}: wanted some of {' '.join(each.name for each in BENCHMARKS)}")
    return arguments


def _is_named(benchmark: str, names: list[str]) -> bool:
    return benchmark in names or benchmark.partition(".")[0] in names


if __name__ == "__main__":
    main()
