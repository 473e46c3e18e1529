"""The whole run on a GPU: tests, a Llama, small layers, a picture, the README's job. One command, no questions.

    python3 benchmarks/gpu.py --out DIR                             # everything
    python3 benchmarks/gpu.py --out DIR --stages tests.one llama    # some of it
    python3 benchmarks/gpu.py --plan                                # for a machine that is there for half an hour
    python3 benchmarks/gpu.py --out DIR --rehearse                  # all of it, tiny, on the CPU

DIR gets ``results.json``, rewritten whenever something is known, so that a run that is stopped keeps what it has;
``output.log``, all that was printed; and pictures. Each job is a process of its own with a limit of its own. The
package is used where it lies; beside it torch, transformers, accelerate, matplotlib, pytest, pytest-timeout and
hypothesis have to be there, and for the job tqdm and psutil.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from _jobs import ROOT, Job, run_jobs

BENCHMARKS = Path(__file__).parent
PYTHON = sys.executable
TIMEOUT_S = (
    "300"  # of a test, of its ranks and of their collectives: contexts that share a GPU take turns by milliseconds
)
GRAPHS = "captured"  # a Triton that compiles for the first time may hang, and would take what follows with it
NOT_WHEN_SLOWED = (
    "not collectives_run_while"  # which asks for overlap: there is none where collectives are slow on purpose
)

INTEGRATIONS = "tests/integrations"

CALLS = (  # what belongs together, in the order of its worth: the last call may find less time than it could use
    ("machine", "shared", "tests.one", "llama", "profile.8"),
    ("tests.two", "tests.adversary", "small.many", "small.compiled"),
    (
        *("tests.integrations", "tests.four", "tests.sanitizer", "job.train"),
        *("registered", "small.alone", "small.operators", "profile.32", "job.suite", "tests.graphs"),
    ),
)
CALL_S = 530


def main() -> None:
    """Choose jobs, run them, say what was found."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="streamshard_gpu_") as scratch:
        jobs = _jobs(Path(scratch), arguments.out, rehearses=arguments.rehearse)
        if arguments.plan:
            _print_plan(jobs)
            return
        known = {name for job in jobs for name in (job.name, job.stage)}
        if unknown := set(arguments.stages or ()) - known:
            sys.exit(f"--stages {' '.join(sorted(unknown))}: wanted some of {' '.join(sorted(known))}")
        chosen = arguments.stages or [job.stage for job in jobs]
        wanted = {job.name: job for name in chosen for job in jobs if name in (job.name, job.stage)}
        about = {
            "benchmark": "gpu",
            "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "is_rehearsal": arguments.rehearse,
        }
        is_well = run_jobs(list(wanted.values()), arguments.out, about, arguments.within)
    sys.exit(0 if is_well else 1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="directory; what it holds of others is kept")
    parser.add_argument("--stages", nargs="+", metavar="STAGE", help="stages or single jobs (tests.one), in this order")
    parser.add_argument("--within", type=float, default=3600.0, metavar="S", help="seconds for all jobs together")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: whether everything runs at all")
    parser.add_argument("--plan", action="store_true", help="print calls that fit into half an hour, and end")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    return arguments


def _stop(*_: object) -> NoReturn:
    sys.exit(143)


def _print_plan(jobs: list[Job]) -> None:
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    commit = told.stdout.strip() or "COMMIT"
    for place, names in enumerate(CALLS, start=1):
        limit_s = sum(job.limit_s for job in jobs if job.name in names or job.stage in names)
        command = f'python3 benchmarks/gpu.py --out "$OUT" --within {CALL_S} --stages {" ".join(names)}'
        print(f"STREAMSHARD_COMMIT={commit} {command}")
        print(f"    call {place}: ends within {CALL_S} s; the limits of its jobs are {limit_s:.0f} s in all")
    minutes = len(CALLS) * CALL_S / 60
    print(f"{len(CALLS)} calls, {minutes:.1f} minutes at most; a job that finds no time left is told as not run")


# -- jobs -------------------------------------------------------------------------------------------------------------


def _jobs(scratch: Path, out: Path, *, rehearses: bool) -> list[Job]:
    """All of them, in order."""
    *tests, graphs = _tests(scratch, rehearses=rehearses)
    return [
        _compare("machine", scratch, 90, "machine", rehearses=rehearses),
        _shared(scratch, rehearses=rehearses),
        *tests,
        _compare("llama", scratch, 330, "llama", "--seconds", "240", rehearses=rehearses),
        _compare("small.many", scratch, 120, "small", "--pretend-ranks", "8", rehearses=rehearses),
        _compare("small.compiled", scratch, 180, "small", "--pretend-ranks", "8", "--compile", rehearses=rehearses),
        _compare("small.alone", scratch, 120, "small", rehearses=rehearses),
        _operators(scratch, rehearses=rehearses),
        *_profiles(scratch, out, rehearses=rehearses),
        _registered(scratch, rehearses=rehearses),
        _train(scratch, rehearses=rehearses),
        _suite(scratch, rehearses=rehearses),
        graphs,
    ]


def _environment(*, rehearses: bool, **more: str) -> dict[str, str]:
    """The package is found where it lies; nothing is asked of a network, which need not be there."""
    path = [str(ROOT), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = {"HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        **{name: os.environ.get(name, word) for name, word in words.items()},
        **({"CUDA_VISIBLE_DEVICES": ""} if rehearses else {}),
        **more,
    }


def _compare(name: str, scratch: Path, limit_s: float, *options: str, rehearses: bool) -> Job:
    """`one_device.py`."""
    found = scratch / f"{name}.json"
    command = [PYTHON, "benchmarks/one_device.py", *options, "--output", str(found)]
    return Job(
        name=name,
        command=[*command, *(["--rehearse"] if rehearses else [])],
        limit_s=limit_s,
        environment=_environment(rehearses=rehearses),
        found=found,
        brief=_of_machine if name == "machine" else _of_targets,
    )


def _of_machine(found: dict[str, Any]) -> str:
    machine, environment = found["machine"], found["environment"]
    rates = f"bf16 matmul {machine['matmul_tflops']:.3g} TFLOP/s, copy {machine['copy_gb_per_s']:.4g} GB/s"
    return f"{environment['device']}, torch {environment['torch']}, {rates}"


def _of_targets(found: dict[str, Any]) -> str:
    verdict = {True: "met", False: "NOT met", None: "not known"}
    told = [
        f"{verdict[each['met']]}: {each['target']} {'-' if each['found'] is None else format(each['found'], '.4g')}"
        for each in found["targets"]
    ]
    return "; ".join([*told, *(f"{name} not run: {why}" for name, why in found["not_run"].items())])


def _shared(scratch: Path, *, rehearses: bool) -> Job:
    """`shared_gpu.py`: before half an hour is spent on ranks that wait for each other in vain."""
    found = scratch / "shared.json"
    return Job(
        name="shared",
        command=[PYTHON, "benchmarks/shared_gpu.py", "--output", str(found)],
        limit_s=60,
        environment=_environment(rehearses=rehearses),
        found=found,
        brief=_of_sharing,
    )


def _of_sharing(found: dict[str, Any]) -> str:
    times = ", ".join(f"{kind} {found[f'{kind}_ms']:.1f} ms" for kind in ("gather", "reduce", "exchange"))
    return f"{found['config']['ranks']} ranks over {found['config']['backend']}, 16 MiB in all: {times}"


def _tests(scratch: Path, *, rehearses: bool) -> list[Job]:
    """Tests marked gpu, by numbers of ranks and with what makes them harder; those of integrations."""
    settings = {
        "one": ("1", 120, f"not {GRAPHS}", {}),
        "two": ("2", 220, f"not {GRAPHS}", {}),
        "adversary": ("2", 220, f"not {GRAPHS} and {NOT_WHEN_SLOWED}", {"STREAMSHARD_TEST_ADVERSARY": "1"}),
        "sanitizer": ("1,2", 240, f"not {GRAPHS} and {NOT_WHEN_SLOWED}", {"STREAMSHARD_TEST_SANITIZER": "1"}),
        "four": ("4", 150, f"not {GRAPHS}", {}),
        "integrations": ("2", 240, "", {}),
        "graphs": ("1,2", 180, GRAPHS, {}),
    }
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    jobs = []
    for what, (sizes, limit_s, chosen, harder) in settings.items():
        found = scratch / f"tests.{what}.jsonl"
        timeout_s = "60" if what == "one" else TIMEOUT_S
        command = _pytest(found, "-s", "--world-sizes", sizes, "--timeout", timeout_s)
        if what == "integrations":
            command += [f"{INTEGRATIONS}/test_accelerate_examples.py" if rehearses else INTEGRATIONS]
        else:
            command += ["-m", "gpu", *(str(path.relative_to(ROOT)) for path in files)]
        played = {"STREAMSHARD_TEST_PLAYED_GPU": "1"} if rehearses else {}
        if rehearses:
            chosen = "overflow or replicas_train"
        environment = _environment(
            rehearses=rehearses,
            STREAMSHARD_TEST_GROUP_TIMEOUT_S=timeout_s,
            STREAMSHARD_TEST_RUN_TIMEOUT_S=timeout_s,
            STREAMSHARD_TEST_WARNINGS="default",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # whoever asks for a GPU before ranks are forked does not start CUDA
            **harder,
            **played,
        )
        jobs.append(
            Job(
                name=f"tests.{what}",
                command=[*command, *(["-k", chosen] if chosen else [])],
                limit_s=limit_s,
                environment=environment,
                found=found,
                brief=_of_tests,
                needs=None if sizes == "1" else "shared",
            )
        )
    return jobs


def _pytest(found: Path, *options: str) -> list[str]:
    """Warnings are shown and no errors: on another machine, with other versions, they are not what is tested."""
    record = ["-p", "_record_tests", "--record", str(found)]
    return [PYTHON, "-m", "pytest", *record, "-p", "no:cacheprovider", "-W", "default", "--tb=short", *options]


def _of_tests(found: dict[str, Any]) -> str:
    failed = [test["test"] for test in found["tests"] if test["outcome"] == "failed"]
    counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    return f"{counts}{': ' if failed else ''}{', '.join(failed)}"


def _operators(scratch: Path, *, rehearses: bool) -> Job:
    """`host_overhead.py`, on the device."""
    found = scratch / "small.operators.json"
    command = [PYTHON, "benchmarks/host_overhead.py", "--output", str(found)]
    tiny = ["--cpu", "--parameters", "1", "--layers", "2", "--rounds", "2", "--warmup", "1"]
    return Job(
        name="small.operators",
        command=[*command, *(tiny if rehearses else [])],
        limit_s=90,
        environment=_environment(rehearses=rehearses),
        found=found,
        brief=_of_operators,
    )


def _of_operators(found: dict[str, Any]) -> str:
    ratios = {case["parameters_per_layer"]: case["systems"]["streamshard"]["ratio_to_fsdp2"] for case in found["cases"]}
    told = ", ".join(f"{count}: {ratio['median']:.3f}" for count, ratio in ratios.items())
    return f"host time, share of fsdp2's, by parameters of a layer: {told}"


def _profiles(scratch: Path, out: Path, *, rehearses: bool) -> list[Job]:
    """`timeline.py`, two ranks on the GPU: how many rows hide a gather depends on the machine's sockets."""
    jobs = []
    for rows in ("8", "32"):
        found = scratch / f"profile.{rows}.json"
        size = ["--layers", "6", "--width", "512", "--sequence", "8192", "--rows", rows]
        if rehearses:
            size = ["--layers", "2", "--width", "64", "--sequence", "32", "--warmup", "1", "--steps", "1"]
        command = [PYTHON, "benchmarks/timeline.py", "--ranks", "2", *size, "--output", str(found)]
        command += ["--json", str(out / f"timeline-{rows}.json")]
        jobs.append(
            Job(
                name=f"profile.{rows}",
                command=command,
                limit_s=75,
                environment=_environment(rehearses=rehearses),
                found=found,
                brief=_of_profile,
                needs="shared",
            )
        )
    return jobs


def _of_profile(found: dict[str, Any]) -> str:
    told = (
        f"of {found[f'{kind}_s'] * 1e3:.1f} ms of {kind}s {found[f'exposed_{kind}_s'] * 1e3:.1f} exposed"
        for kind in ("all_gather", "reduction")
    )
    return f"{found['step_s'] * 1e3:.1f} ms a step; {', '.join(told)}"


def _registered(scratch: Path, *, rehearses: bool) -> Job:
    """`step_time.py`, two ranks: with and without registered memory, in turn. On the CPU the former says why not."""
    found = scratch / "registered.json"
    size = ["--preset", "tiny" if rehearses else "48x512-512", "--rounds", "2" if rehearses else "10"]
    command = [PYTHON, "benchmarks/step_time.py", "--ranks", "2", *size, "--systems", "streamshard", "registered"]
    return Job(
        name="registered",
        command=[*command, "--output", str(found)],
        limit_s=90,
        environment=_environment(rehearses=rehearses),
        found=found,
        brief=_of_registered,
        needs="shared",
    )


def _of_registered(found: dict[str, Any]) -> str:
    if found["not_run"]:
        return "; ".join(f"{name} not run: {why}" for name, why in found["not_run"].items())
    plain, registered = (found["systems"][name] for name in ("streamshard", "registered"))
    pairs = zip(registered["rounds_ms"], plain["rounds_ms"], strict=True)
    ratio = statistics.median(own / other for own, other in pairs)
    more = (registered["memory"]["held_bytes"] - plain["memory"]["held_bytes"]) / 2**20
    losses = f"losses {plain['last_loss']:.4f} and {registered['last_loss']:.4f}"
    return f"step time {ratio:.3f} of that without registration, {more:.0f} MiB more, {losses}"


def _train(scratch: Path, *, rehearses: bool) -> Job:
    """The README's job, on one GPU."""
    launcher = [PYTHON, "-m", "accelerate.commands.launch", "--config_file", "docs/examples/two_processes.yaml"]
    job = ["--num_processes", "1", "docs/examples/train_llama.py", "--out", str(scratch / "train")]
    tiny = ["--steps", "2", "--hidden", "64", "--layers", "1", "--seq-len", "16", "--device", "cpu"]
    return Job(
        name="job.train",
        command=[*launcher, *job, *(tiny if rehearses else ["--device", "cuda"])],
        limit_s=150,
        environment=_environment(rehearses=rehearses),
        found=scratch / "train" / "result.json",
        brief=_of_training,
    )


def _of_training(found: dict[str, Any]) -> str:
    losses = f"held-out loss {found['held_out_loss']:.3f}, byte frequencies {found['byte_frequency_loss']:.3f}"
    return f"on {found['device']}, {found['ranks_that_took_part']} rank(s): {losses}"


def _suite(scratch: Path, *, rehearses: bool) -> Job:
    """All other tests, on this machine's CPUs; several at once where pytest-xdist is there.

    They see no GPU: models that are made on the CPU would move there, away from inputs that stay.
    """
    found = scratch / "job.suite.jsonl"
    options = ["-m", "not gpu", "--ignore", INTEGRATIONS]
    if importlib.util.find_spec("xdist") and not rehearses:
        options += ["-n", str(max((os.cpu_count() or 1) // 2, 1))]
    return Job(
        name="job.suite",
        command=[*_pytest(found, *options), *(["tests/planning/test_structure.py"] if rehearses else [])],
        limit_s=400,
        environment=_environment(rehearses=rehearses, CUDA_VISIBLE_DEVICES="", STREAMSHARD_TEST_WARNINGS="default"),
        found=found,
        brief=_of_tests,
    )


if __name__ == "__main__":
    main()
