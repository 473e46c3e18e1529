"""``streamshard doctor``: finds causes of slow training, and measures the machine.

One rank of each machine looks for settings that cost time and raise no error. If a launcher has started several ranks,
they measure their collectives (`streamshard.tools.speed`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from streamshard.comm.communicator import Communicator
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.groups import resolve_group
from streamshard.comm.shared_memory import SharedMemoryTransport
from streamshard.comm.streams import Streams
from streamshard.config import Precision
from streamshard.device import module_of, training_device
from streamshard.errors import HostMemoryError, StreamShardError
from streamshard.tools import speed

_UNIT_NUMELS = tuple(mib << 19 for mib in (1, 16, 128))  # elements of units of so many MiB in bf16
_DRIVER = Path("/proc/driver/nvidia/version")
_TRAPS = {  # environment variables for GPUs: bad values, and the effect
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "all streams of a GPU share one queue, so nothing overlaps: unset it"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for each kernel, so nothing overlaps: unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1 TRUE", "the host waits for each collective, so nothing overlaps: unset it"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "ranks hang when a collective fails: unset it"),
    "NCCL_P2P_DISABLE": ("1", "GPUs do not use NVLink or PCIe directly: unset it"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a machine that have no P2P communicate through sockets: unset it"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "ranks compare each collective first, which takes time: unset it"),
}


@dataclass(frozen=True)
class Finding:
    """One line: a level ("ok", "note" or "problem"), the finding, and the advice."""

    level: str
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<9}{self.what}" + (f": {self.advice}" if self.advice else "")


@dataclass
class Report:
    """The result of `examine`.

    Attributes:
        world_size, machines: the numbers of ranks and machines.
        findings: in the order of printing.
        transport: the transport, by its name in `streamshard.plan`; None: there is one rank, or a rank failed.
        collectives: all-gather and reduction of units of a few sizes.
    """

    world_size: int
    machines: int
    findings: list[Finding]
    transport: str | None = None
    collectives: Sequence[speed.CollectiveSpeed] = ()


def examine(precision: Precision) -> Report | None:
    """Check this machine and, if there are several ranks, measure them. Call it on all ranks.

    Args:
        precision: the dtypes.

    Returns:
        The report; None on all ranks but the first. If a rank fails, its error is a finding.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = training_device(torch.device("cpu"), None, None)  # of a model that was built on the CPU
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device.type != "cpu":
        module_of(device).set_device(device)
    report = Report(world_size, -(-world_size // local_size), [])
    if os.environ.get("LOCAL_RANK", "0") == "0":  # each machine once
        # Before ranks connect: a failure to connect hides none of them.
        report.findings = [*check_machine(device, local_size)]
    if world_size > 1:
        try:
            _measure(report, device, precision)
        except StreamShardError as error:
            report.findings.append(Finding("problem", "the ranks cannot train together", str(error)))
    return report if os.environ.get("RANK", "0") == "0" else None


# -- checks ---------------------------------------------------------------------------------------------------------


def check_machine(device: torch.device, local_size: int) -> Iterator[Finding]:
    """Check this machine's devices, host memory, the speed of bf16 and fp32, and environment variables.

    Args:
        device: this rank's device.
        local_size: the number of ranks on this machine.
    """
    yield from _check_cpu(local_size) if device.type == "cpu" else _check_gpus(device)
    yield from _check_host(device)
    bf16, fp32 = (speed.matmul_tflops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    slow = 'precision="fp32" computes faster here' if bf16 < fp32 else ""
    yield Finding("note" if slow else "ok", f"matmul: bf16 {bf16:.2f} TFLOP/s, fp32 {fp32:.2f} TFLOP/s", slow)
    for name, (bad, advice) in _TRAPS.items():
        if (value := os.environ.get(name, "")).upper() in bad.split():
            yield Finding("note" if device.type == "cpu" else "problem", f"{name}={value}", advice)


def _check_gpus(device: torch.device) -> Iterator[Finding]:
    module = module_of(device)
    count = module.device_count()
    names = Counter(map(module.get_device_name, range(count)))
    yield Finding("ok", ", ".join(f"{number} x {name}" for name, number in names.items()))
    far = [f"{a}-{b}" for a, b in itertools.combinations(range(count), 2) if not module.can_device_access_peer(a, b)]
    if far:
        what = f"GPUs {', '.join(far)} cannot access each other's memory (P2P)"
        yield Finding("note", what, "they communicate through the host")


def _check_cpu(local_size: int) -> Iterator[Finding]:
    if _DRIVER.exists():
        what = f"torch {torch.__version__} finds no GPU, and there is an NVIDIA driver"
        yield Finding("problem", what, "install a build of torch for CUDA; if this is one, see nvidia-smi")
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding("note", f"ranks train on the CPU: {cores} cores, no GPU")
    fair = str(max(1, cores // local_size))
    if threads != fair:
        level = "problem" if threads == "not set" and local_size > 1 else "note"
        advice = f"set it to {fair}: then {local_size} rank(s) use each core once"
        yield Finding(level, f"OMP_NUM_THREADS: {threads}", advice)


def _check_host(device: torch.device) -> Iterator[Finding]:
    """The speeds that ``offload`` needs."""
    yield Finding("ok", f"host memory: {speed.host_gb_s():.1f} GB/s")
    if device.type == "cpu":
        yield Finding("note", "there is no GPU, whose link to host memory would be measured")
        return
    try:
        there, back, both = speed.link_gb_s(device)
    except HostMemoryError as error:
        yield Finding("note", 'offload="state" cannot run', str(error))
    else:
        what = f"{there:.1f} GB/s to the GPU, {back:.1f} GB/s to host memory, {both:.1f} GB/s each way at once"
        yield Finding("ok", f"link: {what}")


def _size(n_bytes: int) -> str:
    power = min(max((n_bytes.bit_length() - 1) // 10, 1), 3)
    return f"{n_bytes / 2 ** (10 * power):.1f} {'KMG'[power - 1]}iB"


# -- measurements -----------------------------------------------------------------------------------------------------


def _measure(report: Report, device: torch.device, precision: Precision) -> None:
    """Connect the ranks, exchange findings, and measure. Fills `report`. Collective."""
    ranks = Communicator(resolve_group(device), Streams(device))
    first, *others = ranks.gather_objects("exchange findings", report.findings)
    for rank, theirs in enumerate(others, 1):
        new = [found for found in theirs if found not in first]
        first += [dataclasses.replace(found, what=f"rank {rank}: {found.what}") for found in new]
    report.findings = first
    report.collectives = speed.measure(ranks, _UNIT_NUMELS, precision)
    names = {SharedMemoryTransport: "shared-memory", PairwiseTransport: "sockets"}
    report.transport = names.get(type(ranks.transport), "nccl")
    what = f"{ranks.world_size} ranks on {report.machines} machine(s), over {report.transport}"
    can_share = report.transport == "sockets" and report.machines == 1
    advice = "shared memory needs Linux on x86, and no STREAMSHARD_SHARED_MEMORY=0" if can_share else ""
    report.findings.append(Finding("note" if can_share else "ok", what, advice))
    for each in report.collectives:
        what = f"{each.name} of {_size(each.unit_bytes)}: {each.gb_s:.2f} GB/s, {each.median_ms:.2f} ms"
        report.findings.append(Finding("ok", what))
