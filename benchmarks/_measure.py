"""What the benchmarks share: statistics, clocks, memory, the machine, and the result file.

A result says how it was obtained (command, settings, commit, versions, device, noise), then what was measured.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from _live import LiveBytes, shared_bytes

__all__ = [
    "QUIET_CORES",
    "RESULTS",
    "Clock",
    "Memory",
    "Noise",
    "Steady",
    "counted",
    "environment",
    "launch",
    "measured_memory",
    "own_device",
    "runtime_calls",
    "said",
    "save",
    "seeded_order",
    "summary",
    "write_json",
]

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).parent.parent
QUIET_CORES = 0.1  # a round counts as quiet when the rest of the machine used no more than this
PROBE_S = 0.2  # /proc/stat counts in hundredths of a second


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and a confidence interval of the median.

    Args:
        values: one number per round, at least one.

    Returns:
        median, q25, q75, iqr, and median_low/median_high: a 95 % confidence interval of the median that assumes nothing
        about the distribution (order statistics at n/2 -+ 0.98 sqrt(n); the extremes when there are too few values).
    """
    ordered = sorted(values)
    count = len(ordered)

    def quantile(fraction: float) -> float:
        position = fraction * (count - 1)
        low = int(position)
        high = min(low + 1, count - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    reach = 0.98 * count**0.5
    low_rank = max(int(count / 2 - reach), 0)
    high_rank = min(int(count / 2 + reach), count - 1)
    q25, q75 = quantile(0.25), quantile(0.75)
    return {
        "median": quantile(0.5),
        "q25": q25,
        "q75": q75,
        "iqr": q75 - q25,
        "median_low": ordered[low_rank],
        "median_high": ordered[high_rank],
    }


def seeded_order(names: Sequence[str], round_index: int) -> list[str]:
    """A permutation of `names` that is random from round to round and the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(1000 + round_index)
    return [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]


def launch(ranks: int) -> NoReturn:
    """Replace this process by torchrun on this machine, with the same command line."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    os.execv(sys.executable, [*launcher, "--nproc-per-node", str(ranks), *sys.argv])


def own_device() -> torch.device:
    """The device of this rank, made the current one: ranks take turns in the GPUs; the CPU where there are none.

    NCCL refuses two ranks on one GPU of one host. Where there are more ranks than GPUs, each says that it is another
    host: correct, but what they send goes through sockets.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > devices:
        os.environ["NCCL_HOSTID"] = f"rank{local_rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_NET", "Socket")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(device)
    return device


class Clock:
    """Splits one step into laps: on the host for CPU, by events on the current stream for CUDA.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def lap(self) -> None:
        """Mark the end of a lap (the first call marks the start)."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._host.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        """Milliseconds of each lap; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [start.elapsed_time(end) for start, end in pairwise(self._events)]
        return [(end - start) * 1e3 for start, end in pairwise(self._host)]


@dataclass
class Memory:
    """Bytes of tensors, as the allocator sees them; buffers inside the communication library are not tensors.

    Attributes:
        held_bytes: allocated inside the block and still held at its end.
        peak_bytes: the most that was held at once inside the block.
    """

    held_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def measured_memory(device: torch.device) -> Iterator[Memory]:
    """Count what the block allocates on `device`. On CPU the profiler counts, so do not time inside.

    On CPU the peak is too high by tensors that other threads have freed inside the block: see `_live`.

    Yields:
        The counts, filled in at the end of the block.
    """
    memory = Memory()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield memory
        torch.cuda.synchronize(device)
        memory.held_bytes = torch.cuda.memory_allocated(device) - before
        memory.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    ranks = dist.get_world_size()
    before, shared_before = LiveBytes().held_bytes, shared_bytes(ranks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield memory
        gc.collect()
    running = memory.peak_bytes = shared_bytes(ranks) - shared_before
    memory.held_bytes = LiveBytes().held_bytes - before + running
    results = profiler.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        running += change
        memory.peak_bytes = max(memory.peak_bytes, running)


@dataclass
class Steady:
    """What steps cost beyond computing. All zero on the CPU, which has none of it.

    Attributes:
        synchronizations: how often the host has waited for the device, as torch's debug mode sees it.
        synchronized_at: where, "file:line", and how often.
        allocations: blocks that were taken from torch's allocator.
        device_allocations: blocks that it had to take from the device: these wait for the device.
    """

    synchronizations: int = 0
    synchronized_at: dict[str, int] = field(default_factory=dict)
    allocations: int = 0
    device_allocations: int = 0


@contextmanager
def counted(device: torch.device) -> Iterator[Steady]:
    """Count what the block costs beyond computing.

    Yields:
        The counts, filled in at the end of the block.
    """
    counts = Steady()
    if device.type != "cuda":
        yield counts
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield counts
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats(device)
    told = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    counts.synchronizations = len(told)
    counts.synchronized_at = dict(Counter(f"{warning.filename}:{warning.lineno}" for warning in told))
    counts.allocations = after["allocation.all.allocated"] - before["allocation.all.allocated"]
    counts.device_allocations = after["segment.all.allocated"] - before["segment.all.allocated"]


def runtime_calls(device: torch.device, step: Callable[[], object]) -> dict[str, int]:
    """How often each function of the CUDA runtime is called while `step` runs on the host; nothing on the CPU."""
    if device.type != "cuda":
        step()
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.cuda.synchronize(device)
        with torch.profiler.record_function("the step"):
            step()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    inside = next(event.time_range for event in events if event.name == "the step")
    calls = (
        event.name
        for event in events
        if event.name.startswith("cu") and inside.start <= event.time_range.start < inside.end
    )
    return dict(Counter(calls).most_common())


class Sample(NamedTuple):
    """CPU seconds since boot and since this process began, at one moment."""

    wall_s: float
    busy_s: float
    stolen_s: float
    own_s: float


class Noise:
    """How busy the rest of the machine was in each round: other people's work skews even paired ratios.

    Owns the samples at both ends of every round. Linux only; elsewhere it sees a quiet machine.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[Sample, Sample]] = []
        self._begin = _sample()

    def begin_round(self, patience_s: float = 0.0) -> float:
        """Start a round, after waiting until others leave the machine alone.

        Args:
            patience_s: wait no longer than this.

        Returns:
            The patience that is left.
        """
        self._begin = _sample()
        while patience_s > 0.0:
            time.sleep(PROBE_S)
            patience_s -= PROBE_S
            before, self._begin = self._begin, _sample()
            if _foreign_cores(before, self._begin, self._begin.own_s - before.own_s) <= QUIET_CORES:
                break
        return patience_s

    def end_round(self) -> None:
        """End the round."""
        self._rounds.append((self._begin, _sample()))

    def own_cpu_s(self) -> list[float]:
        """CPU seconds this process used in each round, all its threads together."""
        return [end.own_s - begin.own_s for begin, end in self._rounds]

    def foreign_cores(self, ranks_cpu_s: Sequence[Sequence[float]]) -> list[float]:
        """The load of others in each round.

        Args:
            ranks_cpu_s: `own_cpu_s` of every rank on this machine.

        Returns:
            Per round: cores that other processes kept busy, plus cores that the hypervisor took away.
        """
        ours_s = [sum(cpu_s) for cpu_s in zip(*ranks_cpu_s, strict=True)]
        return [_foreign_cores(begin, end, own_s) for (begin, end), own_s in zip(self._rounds, ours_s, strict=True)]


def _foreign_cores(begin: Sample, end: Sample, ours_s: float) -> float:
    foreign_s = end.busy_s - begin.busy_s + end.stolen_s - begin.stolen_s - ours_s
    return max(foreign_s, 0.0) / (end.wall_s - begin.wall_s)


def _sample() -> Sample:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own_s = usage.ru_utime + usage.ru_stime
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return Sample(time.perf_counter(), 0.0, 0.0, own_s)
    user, nice, system, _idle, _wait, irq, soft_irq, stolen = (value / os.sysconf("SC_CLK_TCK") for value in fields)
    return Sample(time.perf_counter(), user + nice + system + irq + soft_irq, stolen, own_s)


def said(*command: str) -> str | None:
    """What a command prints; None if it cannot be run here."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment(device: torch.device) -> dict[str, Any]:
    """Where and from what this result comes: command, commit, versions, device.

    A copy of the files alone, without git, says by ``BENCHMARK_COMMIT`` which commit it is of.
    """
    changed = said("git", "status", "--porcelain", "--", "streamshard", "benchmarks/*.py")
    return {
        "command": shlex.join(["python", *(os.path.relpath(part, REPOSITORY) for part in sys.argv[:1]), *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": said("git", "rev-parse", "--verify", "--quiet", "HEAD") or os.environ.get("BENCHMARK_COMMIT"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(terse=True),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads_per_rank": torch.get_num_threads(),
        **(_of_gpu(device) if device.type == "cuda" else {}),
    }


def _of_gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn": torch.backends.cudnn.version(),
        "device_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "packages": {name: _version(name) for name in ("transformers", "accelerate", "triton", "numpy", "pytest")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON: under a temporary name first, so that no half-written file looks whole."""
    write_json(result, path)
    print(f"saved {os.path.relpath(path)}")


def write_json(result: dict[str, Any], path: Path) -> None:
    """`save` without a word: for what grows while it is measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.replace(path)
