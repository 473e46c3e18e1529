"""What ``streamshard doctor`` says: is this machine ready for training, how fast is it, and which settings suit it.

One rank of each machine looks at it. If a launcher has started several ranks, they measure their collectives and, of a
given model, one layer (`streamshard.tools.speed`). `advise` turns these numbers into settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from streamshard.comm.communicator import Communicator
from streamshard.comm.gloo import PairwiseTransport
from streamshard.comm.groups import resolve_group
from streamshard.comm.ranks import RankGroup, run_on_all_ranks
from streamshard.comm.shared_memory import SharedMemoryTransport, share_memory
from streamshard.comm.streams import Streams
from streamshard.config import Precision, ReductionMode, SlotCount
from streamshard.device import module_of, training_device
from streamshard.errors import ConfigError, StreamShardError
from streamshard.tools.speed import CollectiveSpeed, Layer, LayerSpeed, matmul_tflops, measure

_UNIT_NUMELS = tuple(mib << 19 for mib in (1, 16, 128))  # of units that take so many MiB in bf16
_HIDDEN = 0.1  # communication hides if it makes compute longer by at most so much
_DRIVER = Path("/proc/driver/nvidia/version")
_SHM = "/dev/shm"
_TRAPS = {  # of GPUs, by variable: values that are bad, and why
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "all streams of a GPU share one queue, so nothing overlaps: unset it"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for each kernel, so nothing overlaps: unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1 TRUE", "the host waits for each collective, so nothing overlaps: unset it"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "ranks hang when a collective fails: unset it"),
    "NCCL_P2P_DISABLE": ("1", "GPUs do not use NVLink or PCIe directly: unset it"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a machine that have no P2P communicate through sockets: unset it"),
    "NCCL_IB_DISABLE": ("1", "machines communicate through TCP, not InfiniBand or RoCE: unset it"),
    "NCCL_DEBUG": ("INFO TRACE", "its lines hide all others, and take time: use WARN"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "ranks compare each collective first, which takes time: unset it"),
}
_TUNING = "NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True)
class Finding:
    """One line: a level ("ok", "note" or "problem"), what was found, and what to do."""

    level: str
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level:<9}{self.what}" + (f": {self.advice}" if self.advice else "")


@dataclass
class Report:
    """What `examine` has found.

    Attributes:
        world_size, machines: how many ranks on how many machines.
        memory_bytes: of a rank: free memory of its device, or its part of the machine's memory.
        findings: in the order of printing.
        transport: what connects the ranks, as `streamshard.plan` names it; None: there is one rank, or ranks failed.
        collectives: all-gather and reduction of each unit: units of a few sizes, or the layer and, if it is small, four
            such layers in one unit.
        layer: None: not measured.
    """

    world_size: int
    machines: int
    memory_bytes: int
    findings: list[Finding]
    transport: str | None = None
    collectives: Sequence[CollectiveSpeed] = ()
    layer: LayerSpeed | None = None


def examine(
    build: Callable[[], nn.Module] | None, precision: Precision, batch: int | None, seq: int | None
) -> Report | None:
    """Check this machine and, with several ranks, measure them. All ranks have to call it.

    Args:
        build: makes the model of which one layer is measured; None: measure units of a few sizes.
        precision: the dtypes.
        batch, seq: shape of a rank's tokens, with `build`.

    Returns:
        The report; None on all ranks but the first. If ranks fail, the error is a finding.

    Raises:
        ConfigError: a model needs several ranks, `batch` and `seq`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if build is not None and (world_size == 1 or batch is None or seq is None):
        raise ConfigError(
            "a model's layer is measured between ranks: torchrun --nproc-per-node N -m streamshard doctor MODEL "
            "--batch B --seq S"
        )
    device = training_device(torch.device("cpu"), None, None)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_size
    else:
        module_of(device).set_device(device)
        memory = module_of(device).mem_get_info(device)[0]
    report = Report(world_size, -(-world_size // local_size), memory, [])
    if os.environ.get("LOCAL_RANK", "0") == "0":
        report.findings = [*check_versions(), *check_device(device, local_size), *check_environment_of(device)]
    if world_size > 1:
        dtype = precision.param_dtype or torch.float32
        make = None if build is None else lambda: Layer(build, dtype, (batch or 0, seq or 0), device)
        try:
            _measure(report, device, make, precision)
        except StreamShardError as error:
            report.findings.append(Finding("problem", "the ranks cannot train together", str(error)))
    return report if os.environ.get("RANK", "0") == "0" else None


# -- checks ---------------------------------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    """What is installed, against what the package requires."""
    for requirement in metadata.requires("streamshard") or ():
        name, _, wanted = requirement.partition(">=")
        if ";" not in requirement:  # no extra
            version = metadata.version(name)
            is_old = TorchVersion(version) < wanted
            advice = f"pip install '{requirement}'" if is_old else ""
            yield Finding("problem" if is_old else "ok", f"{name} {version}", advice)


def check_device(device: torch.device, local_size: int) -> Iterator[Finding]:
    """Devices of this machine, and bf16 against fp32.

    Args:
        device: of this rank.
        local_size: ranks on this machine.
    """
    found = re.search(r"\d+\.[\d.]+", _DRIVER.read_text()) if _DRIVER.exists() else None
    driver = found[0] if found else None
    yield from _check_cpu(local_size, driver) if device.type == "cpu" else _check_gpus(device, local_size, driver)
    bf16, fp32 = (matmul_tflops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    slow = 'precision="fp32" computes faster here' if bf16 < fp32 else ""
    yield Finding("note" if slow else "ok", f"matmul: bf16 {bf16:.2f} TFLOP/s, fp32 {fp32:.2f} TFLOP/s", slow)


def _check_gpus(device: torch.device, local_size: int, driver: str | None) -> Iterator[Finding]:
    module = module_of(device)
    count = module.device_count()
    names = ", ".join(f"{n} x {name}" for name, n in Counter(map(module.get_device_name, range(count))).items())
    nccl = ".".join(map(str, module.nccl.version())) if dist.is_nccl_available() else None
    advice = "" if nccl else "install a build of torch that has NCCL"
    what = (
        f"{names}; driver {driver or 'unknown'}, {device.type} {torch.version.cuda or torch.version.hip}, NCCL {nccl}"
    )
    yield Finding("ok" if nccl else "problem", what, advice)
    if local_size > count:
        advice = f"NCCL refuses this: start {count}, one for each"
        yield Finding("problem", f"{local_size} ranks share {count} GPU(s)", advice)
    for index in range(count):
        free, total = module.mem_get_info(index)
        advice = "" if free > 0.9 * total else "nvidia-smi lists what uses the rest"
        yield Finding("note" if advice else "ok", f"GPU {index}: {_size(free)} of {_size(total)} free", advice)
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    far = [f"{one}-{other}" for one, other in pairs if not module.can_device_access_peer(one, other)]
    if far:
        what = f"GPUs {', '.join(far)} cannot access each other's memory (P2P)"
        yield Finding("note", what, "they communicate through the host")


def _check_cpu(local_size: int, driver: str | None) -> Iterator[Finding]:
    if driver:
        what = f"torch {torch.__version__} finds no GPU, and there is driver {driver}"
        yield Finding("problem", what, "install a build of torch for CUDA; if this is one, see nvidia-smi")
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding("note", f"ranks train on the CPU: {cores} cores, no GPU")
    fair = str(max(1, cores // local_size))
    if threads != fair:
        level = "problem" if threads == "not set" and local_size > 1 else "note"
        yield Finding(
            level, f"OMP_NUM_THREADS: {threads}", f"set it to {fair}: then {local_size} rank(s) use each core once"
        )
    if share_memory(RankGroup(), 4096, 1):
        yield Finding("ok", "ranks of this machine can share memory")
    else:
        advice = "shared memory needs Linux on x86, and no STREAMSHARD_SHARED_MEMORY=0"
        yield Finding("note", "ranks of this machine communicate through sockets", advice)


def check_environment_of(device: torch.device) -> Iterator[Finding]:
    """Variables, the network, limits of the process, /dev/shm. Traps of GPUs are notes if ranks train on the CPU."""
    level, environment = "note" if device.type == "cpu" else "problem", os.environ
    traps = [name for name, (bad, _) in _TRAPS.items() if environment.get(name, "").upper() in bad.split()]
    for name in traps:
        yield Finding(level, f"{name}={environment[name]}", _TRAPS[name][1])
    tuned = [name for name in sorted(environment) if name.startswith(_TUNING) and name not in _TRAPS]
    if tuned:
        what = ", ".join(f"{name}={environment[name]}" for name in tuned)
        yield Finding("note", what, "each replaces a choice of NCCL, gloo or torch's allocator")
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environment.get(variable, "^")
        names = tuple(wanted.lstrip("=").split(","))
        is_prefix = variable.startswith("NCCL") and not wanted.startswith("=")
        if not any(name in names or is_prefix and name.startswith(names) for name in there) and wanted[:1] != "^":
            yield Finding("problem", f"{variable}={wanted} names no interface", f"there are {', '.join(there)}")
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        if (address := socket.gethostbyname(host)).startswith("127."):
            advice = "on several machines set GLOO_SOCKET_IFNAME before you make a gloo group of your own"
            yield Finding("note", f"the name of this machine, {host}, leads to {address}", advice)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < 1024:
        yield Finding("problem", f"ulimit -n is {files}", "too few for sockets and files of data: ulimit -n 65536")
    with contextlib.suppress(OSError):
        size = os.statvfs(_SHM).f_frsize * os.statvfs(_SHM).f_blocks
        advice = "" if size >= 2**30 else "NCCL and a DataLoader's workers need more: docker run --ipc=host"
        yield Finding(level if advice else "ok", f"{_SHM} has {_size(size)}", advice)


def _size(n_bytes: int) -> str:
    power = min(max((n_bytes.bit_length() - 1) // 10, 1), 3)
    return f"{n_bytes / 2 ** (10 * power):.1f} {'KMG'[power - 1]}iB"


# -- measurements -----------------------------------------------------------------------------------------------------


def _measure(report: Report, device: torch.device, make: Callable[[], Layer] | None, precision: Precision) -> None:
    """Connect the ranks, exchange findings and measure. Fills `report`. Collective."""
    ranks = Communicator(resolve_group(device), Streams(device))
    first, *others = ranks.gather_objects(report.findings)
    for rank, theirs in enumerate(others, 1):
        new = [found for found in theirs if found not in first]
        first += [dataclasses.replace(found, what=f"rank {rank}: {found.what}") for found in new]
    report.findings = first
    layer = None if make is None else run_on_all_ranks(ranks, "run a layer", make)
    sizes = [(numel, numel) for numel in _UNIT_NUMELS] if layer is None else layer.sizes
    report.collectives, report.layer = measure(ranks, sizes, layer, precision)
    names = {SharedMemoryTransport: "shared-memory", PairwiseTransport: "sockets"}
    report.transport = names.get(type(ranks.transport), "nccl")
    what = f"{ranks.world_size} ranks on {report.machines} machine(s), over {report.transport}"
    report.findings.append(Finding("ok", what))
    for each in report.collectives:
        what = f"{each.name} of {_size(each.unit_bytes)}: {each.gb_s:.2f} GB/s, {each.median_ms:.2f} ms"
        report.findings.append(Finding("ok", what))


# -- advice -----------------------------------------------------------------------------------------------------------


def advise(report: Report, precision: Precision, batch: int, weight_slots: SlotCount | None) -> list[Finding]:
    """Whether a layer's communication hides behind its compute, and which settings help. A pure function.

    Args:
        report: with a layer, and its collectives.
        precision: the dtypes that were measured.
        batch: sequences per rank that were measured.
        weight_slots: the most that fit the memory; None: not even two.
    """
    layer = report.layer
    if layer is None:
        return []
    if weight_slots is None:
        what = f"the model does not fit {_size(report.memory_bytes)} per rank"
        return [Finding("problem", what, "streamshard plan MODEL --budget says how many ranks it takes")]
    gather, reduce, *of_four = report.collectives
    both_ms = gather.median_ms + reduce.median_ms
    found, exposed = list[Finding](), dict[str, float]()  # by phase, time of communication / time of compute
    for phase, what, comm_ms, alone_ms, beside_ms in (
        ("forward", "all-gather", gather.median_ms, layer.forward_ms, layer.forward_beside_ms),
        ("backward", "all-gather and reduction", both_ms, layer.backward_ms, layer.backward_beside_ms),
    ):
        times = f"{what} {comm_ms:.2f} ms, {phase} {alone_ms:.2f} ms, both at once {beside_ms:.2f} ms"
        exposed_ms = min(beside_ms - alone_ms, comm_ms)  # what is more than communication is noise
        if exposed_ms <= _HIDDEN * alone_ms:
            found.append(Finding("ok", f"communication hides behind {phase}: {times}"))
            continue
        exposed[phase] = comm_ms / alone_ms
        cost = f"{exposed_ms:.2f} ms per layer are exposed, in {layer.count} layers"
        found.append(Finding("note", f"communication does not hide behind {phase}: {times}", cost))
    if not exposed:
        return [*found, Finding("ok", "choose StreamShard(model): two slots suffice")]
    choices = []
    if of_four and of_four[0].median_ms < 2 * gather.median_ms:
        size = f"{-(-of_four[0].unit_bytes // 2**10)}KiB"
        choices.append(f'min_unit_size="{size}": four layers are all-gathered in less than twice the time of one')
    if "backward" in exposed:
        if weight_slots != 2:
            what = "nothing" if weight_slots == "all" else "fewer layers"
            choices.append(f"weight_slots={weight_slots!r}: backward all-gathers {what}, and the memory suffices")
        choices += _narrower_gradients(report, precision)
    ratio = max(exposed.values())
    needed = f" of {math.ceil(batch * ratio)}" if ratio > 1 and report.transport != "shared-memory" else ""
    choices.append(f"a larger batch{needed}: compute grows, communication does not")
    return [*found, *(Finding("note", f"choose {choice}") for choice in choices)]


def _narrower_gradients(report: Report, precision: Precision) -> list[str]:
    """The setting that sends fewer bytes of gradients, as docs/guide/dial.md says; none if there is none."""
    dtype = precision.param_dtype
    if precision.reduction_mode is not ReductionMode.FP32 or dtype in (None, torch.float32):
        return []
    if report.transport != "nccl" or report.world_size * (1 - 1 / report.machines) <= 2 * report.machines:
        return [f"Precision(grad_dtype={dtype}): gradients are sent in 16 bits, and summed in fp32"]
    if report.world_size > 2 / torch.finfo(dtype).eps:
        return []
    return [f"Precision(reduce_dtype={dtype}): gradients are sent and summed in 16 bits, which rounds"]
