"""The first run on a GPU, in eight minutes: what the machine does, whether training is right, how fast it is, tests.

    python benchmarks/gpu.py --out DIR --within 470         # everything, the most valuable facts first
    python benchmarks/gpu.py --out DIR --only llama tests.one      # some of it again; DIR keeps the other results
    python benchmarks/gpu.py --out DIR --rehearse           # all of it, tiny, on a GPU that the CPU plays
    python -m benchmarks report DIR                         # one table and one picture

DIR gets ``results.json``, which is whole at every moment, ``output.log``, and of the step whose overlap is measured a
picture and torch's profile. Each job is a process of its own with a limit of its own. A job that fails, hangs or is
killed leaves its row with the reason, and the next job runs. The package is used where it lies. It needs torch 2.11 or
newer, transformers, accelerate and pytest, and no network. Without matplotlib there is no picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from _jobs import ROOT, Job, run_jobs

BENCHMARKS = ROOT / "benchmarks"
REHEARSED_LIMIT_S = 150.0  # on cores that others use as well
TEST_TIMEOUT_S = 40  # of a test's ranks and their collectives; the test itself has a little more
TESTS = (  # what needs a device to show; parity and speed have jobs of their own
    "steady or overflow or checkpoint or meta_device or out_of_memory or pinned or follows or trace_has or "
    "collectives_run or another_one or offload"
)
TEST_FILES = ("tests/test_gpu.py", "tests/training/test_offload_events.py", "tests/training/test_offload_device.py")
BUILD = """
import sys, torch
from tests.played_cuda import build
sys.exit("this torch has CUDA") if torch.version.cuda else build()
"""


def main() -> None:
    """Choose jobs, run them, say what was found."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _stop)
    end = time.monotonic() + arguments.within
    with tempfile.TemporaryDirectory(prefix="streamshard_gpu_") as scratch:
        jobs = _jobs(Path(scratch), arguments.out)
        if unknown := set(arguments.only or ()) - {job.name for job in jobs}:
            sys.exit(f"--only {' '.join(sorted(unknown))}: wanted some of {' '.join(job.name for job in jobs)}")
        if arguments.only:  # whoever names a job wants it, whatever became of another one
            jobs = [dataclasses.replace(job, instead_of=None) for job in jobs if job.name in arguments.only]
        if arguments.rehearse:
            jobs = _rehearsed(jobs)
        about = {
            "benchmark": "gpu",
            "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "is_rehearsal": arguments.rehearse,
        }
        is_well = run_jobs(jobs, arguments.out, about, end - time.monotonic())
    sys.exit(0 if is_well else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory; what it holds of others is kept")
    parser.add_argument("--within", type=float, default=470.0, metavar="S", help="seconds for all jobs together")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these jobs; results of others are kept")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a played GPU: whether everything runs at all")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    return arguments


def _stop(*_: object) -> NoReturn:
    sys.exit(143)


# -- jobs -------------------------------------------------------------------------------------------------------------


def _jobs(scratch: Path, out: Path) -> list[Job]:
    """All of them, the most valuable first. There is time for the limits up to ``host_memory``.

    Later jobs get the rest. A race that only a device shows is worth more than one more number of tokens.
    """
    small = ("small", "--pretend-ranks", "8", "--seconds", "30")
    drawn = "--profile", str(out / "overlap-profile.json.gz")
    if _is_installed("matplotlib"):
        drawn += "--picture", str(out / "overlap.png")
    two, gloo = ("2", "benchmarks/parity.py"), ("--backend", "gloo")
    return [
        _script("facts", scratch, 30, "facts.py", brief=_of_facts),
        _script("parity.one", scratch, 40, "parity.py", brief=_of_parity),
        _script("parity.two", scratch, 75, "_ranks.py", *two, brief=_of_parity),
        _script("parity.gloo", scratch, 45, "_ranks.py", *two, *gloo, brief=_of_parity, instead_of="parity.two"),
        _script("llama", scratch, 90, "one_device.py", "llama", "--seconds", "45", brief=_of_systems),
        _script("overlap", scratch, 45, "overlap.py", *drawn, brief=_of_overlap),
        _tests("tests.one", scratch, 70, ranks=1),
        _script("host_memory", scratch, 120, "host_memory.py", "--within", "115", brief=_of_host_memory),
        _script("small", scratch, 55, "one_device.py", *small, brief=_of_systems),
        _tests("tests.two", scratch, 80, ranks=2, needs="parity.two"),
        # Last: a compiler that compiles for the first time may hang.
        _script("compiled", scratch, 90, "one_device.py", *small, "--compile", brief=_of_systems),
    ]


def _script(
    name: str,
    scratch: Path,
    limit_s: float,
    script: str,
    *options: str,
    brief: Callable[[dict[str, Any]], str],
    instead_of: str | None = None,
) -> Job:
    """A benchmark."""
    found = scratch / f"{name}.json"
    return Job(
        name=name,
        command=[sys.executable, f"benchmarks/{script}", *options, "--output", str(found)],
        limit_s=limit_s,
        environment=_environment(),
        found=found,
        brief=brief,
        instead_of=instead_of,
    )


def _tests(name: str, scratch: Path, limit_s: float, *, ranks: int, needs: str | None = None) -> Job:
    """Tests for GPUs, on so many ranks. Warnings are shown: with other versions than CI's they are no errors."""
    found = scratch / f"{name}.jsonl"
    shown = ["-p", "no:cacheprovider", "-W", "default", "--tb=short", "-s", "--record", str(found)]
    chosen = ["-m", "gpu", "-k", TESTS, "--world-sizes", str(ranks)]
    if _is_installed("pytest_timeout"):
        chosen += "--timeout", str(TEST_TIMEOUT_S + 5)
    else:  # pyproject.toml has an option of its, which `--strict-config` there would refuse
        chosen += "-o", "addopts=-ra"
    return Job(
        name=name,
        command=[sys.executable, "-m", "pytest", "-p", "_record_tests", *shown, *chosen, *TEST_FILES],
        limit_s=limit_s,
        environment={
            **_environment(),
            "TEST_GROUP_TIMEOUT_S": str(TEST_TIMEOUT_S),
            "TEST_RUN_TIMEOUT_S": str(TEST_TIMEOUT_S),
            "TEST_WARNINGS": "default",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # who asks for a GPU before ranks are forked does not start CUDA
        },
        found=found,
        brief=_of_tests,
        needs=needs,
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _environment() -> dict[str, str]:
    """The package is found where it lies; a job that is stopped says where it was; nobody asks a network."""
    words = {"HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **{name: os.environ.get(name, word) for name, word in words.items()},
    }


def _rehearsed(jobs: list[Job]) -> list[Job]:
    """The same jobs, tiny, on a GPU that is compiled and played; without a compiler on the CPU."""
    environment = {**os.environ, **_environment()}
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, env=environment, capture_output=True, text=True)
    is_played = built.returncode == 0
    if not is_played:
        print(f"no played GPU, the CPU instead: {built.stderr.strip().splitlines()[-1:]}", flush=True)
    tiny = []
    for job in jobs:
        command, more = list(job.command), {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if job.found.suffix == ".jsonl":
            more["TEST_PLAYED_GPU"] = "cuda" if is_played else "1"
        else:
            command.append("--rehearse")
            if is_played:
                path = f"{job.environment['PYTHONPATH']}{os.pathsep}{ROOT / 'tests/played_cuda/everywhere'}"
                more |= {"PYTHONPATH": path, "PLAYED_CUDA_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
        tiny.append(
            dataclasses.replace(
                job, command=command, environment={**job.environment, **more}, limit_s=REHEARSED_LIMIT_S
            )
        )
    return tiny


# -- what a job has found, in a line -----------------------------------------------------------------------------------


def _of_facts(found: dict[str, Any]) -> str:
    where, rates, calls, host = (found[name] for name in ("environment", "copies_gb_s", "calls_us", "host"))
    told = [
        f"{where['device']}, torch {where['torch']}, NCCL {where.get('nccl')}",
        f"matmul {found['speed']['matmul_tflops']:.0f} TFLOP/s",
        f"to the device {rates['to_device_pinned']:.1f}, back {rates['to_host_pinned']:.1f}, both at once "
        f"{rates['both_pinned']:.1f} GB/s",
        f"a launch {calls['launch']:.1f} us",
        f"AdamW on {host['threads']} host threads {host['fused_adamw_ns_per_param']:.2f} ns a parameter",
    ]
    return "; ".join(told)


def _of_parity(found: dict[str, Any]) -> str:
    told = []
    for name, case in found["cases"].items():
        verdict = "right" if case["is_right"] else "WRONG"
        held = (
            f", {case['held_bytes'] / case['planned_bytes']:.3f} of the planned bytes" if "held_bytes" in case else ""
        )
        told.append(f"{name} {verdict}: loss off by {case['loss_off']:.1e}, update by {case['weights_off']:.1e}{held}")
    return "; ".join(told)


def _of_systems(found: dict[str, Any]) -> str:
    told = []
    for name, entry in found["systems"].items():
        if "step_ms" in entry:
            host, memory = entry["host_us_per_layer"]["median"], entry["memory"]
            step = f"{entry['step_ms']['median']:.1f} ms a step, host {host:.0f} us a layer"
            bytes_ = f"peak {memory['step_peak_bytes'] / 2**30:.1f} GiB"
            if memory["planned_bytes"]:
                bytes_ += f", {memory['planned_bytes'] / 2**30:.1f} planned without activations"
            told.append(", ".join(filter(None, [f"{name} {step}", bytes_, _counts(entry.get("steady_step", {}))])))
    return "; ".join([*told, *(f"{name} not run: {why}" for name, why in found["not_run"].items())])


def _counts(steady: dict[str, Any]) -> str:
    return ", ".join(f"{steady[what]} {what}" for what in ("synchronizations", "allocations") if what in steady)


def _of_host_memory(found: dict[str, Any]) -> str:
    told = [", ".join(f"{way} {rate:.1f}" for way, rate in found.get("link_gb_s", {}).items()) + " GB/s"]
    told += [f"{name} pinned in {each['pin']:.2f} s" for name, each in found.get("pin_s", {}).items()]
    told += [f"{name} {each['median']:.2f} ns a parameter" for name, each in found.get("step_ns_per_param", {}).items()]
    told += [f"{name} {_counts(each['steady_step'])} a step" for name, each in found["built"].items()]
    for cell, row in found["cells"].items():
        for name, entry in row.items():
            share = f"{entry['share_of_alone']:.2f} of alone, " if "share_of_alone" in entry else ""
            told.append(f"{cell}: {name} {share}{entry['step_ms']['median']:.0f} ms, {entry['tflops']:.0f} TFLOPS")
    return "; ".join([*told, *(f"{name} not run: {why}" for name, why in found["not_run"].items())])


def _of_overlap(found: dict[str, Any]) -> str:
    profile, traced = found["profile"], found["trace"]
    share = (
        f"{profile['hidden_share']:.0%} of {profile['collectives_ms']:.1f} ms hidden" if profile["collectives"] else ""
    )
    exposed_ms = 1e3 * (traced["exposed_all_gather_s"] + traced["exposed_reduction_s"])
    steps = f"{found['step_ms']['median']:.1f} ms a step, {found['free_step_ms']['median']:.1f} without communication"
    return "; ".join(filter(None, [steps, share, f"by the trace {exposed_ms:.1f} ms exposed"]))


def _of_tests(found: dict[str, Any]) -> str:
    failed = [test["test"] for test in found["tests"] if test["outcome"] == "failed"]
    counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return f"{counts}{': ' if failed else ''}{', '.join(failed)}"


if __name__ == "__main__":
    main()
