"""``streamshard doctor``: what it finds on a machine, and what ranks measure."""

from __future__ import annotations

import json
import os
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from streamshard import Precision
from streamshard import device as devices
from streamshard.comm.communicator import Communicator
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Streams
from streamshard.errors import HostMemoryError
from streamshard.tools import doctor, speed
from streamshard.tools.command import main
from streamshard.tools.doctor import check_machine
from streamshard.tools.speed import measure
from tests.launched import Launched
from tests.ranks import RankContext, on_ranks
from tests.scenarios import over_sockets
from tests.simulated import simulated_device

NUMEL = 1000  # of a measured unit
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable that the doctor looks at, whatever this machine has set, no driver, and fast measurements."""
    for name in os.environ:
        if name in doctor._TRAPS or name.startswith("STREAMSHARD_SHARED"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(speed, "_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "none")


@pytest.fixture
def played_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, the third without P2P access. No speed is measured."""
    module = types.SimpleNamespace(
        device_count=lambda: 3,
        get_device_name=lambda index: "H100" if index < 2 else "A100",
        can_device_access_peer=lambda one, other: other < 2,
    )
    monkeypatch.setattr(devices, "get_device_module", lambda kind: module)
    monkeypatch.setattr(speed, "matmul_tflops", lambda device, dtype: 1.0)
    monkeypatch.setattr(speed, "host_gb_s", lambda: 150.0)
    monkeypatch.setattr(speed, "link_gb_s", lambda device: [55.0, 54.0, 48.0])


def _found(device: torch.device = CPU, local_size: int = 1) -> list[str]:
    return [str(finding) for finding in check_machine(device, local_size)]


@pytest.mark.parametrize("name", doctor._TRAPS)
@pytest.mark.usefixtures("played_machine")
def test_a_trap_is_a_problem_on_gpus_and_a_note_on_cpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values, told = doctor._TRAPS[name]
    monkeypatch.setenv(name, values.split()[-1].lower())
    for device, level in ((GPU, "problem "), (CPU, "note    ")):
        assert _found(device)[-1] == f"{level} {name}={values.split()[-1].lower()}: {told}"
    monkeypatch.setenv(name, "8")
    assert not any(name in line for line in _found(GPU))


@pytest.mark.usefixtures("played_machine")
def test_cpu_ranks_are_told_how_many_threads_suit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, each of several ranks would take all cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for threads, ranks, told in (
        (None, 4, "problem  OMP_NUM_THREADS: not set: set it to 2: then 4 rank(s) use each core once"),
        (None, 1, "note     OMP_NUM_THREADS: not set: set it to 8: then 1 rank(s) use each core once"),
        ("1", 4, "note     OMP_NUM_THREADS: 1: set it to 2: then 4 rank(s) use each core once"),
        ("2", 4, None),
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        lines = _found(CPU, ranks)
        assert [line for line in lines if "OMP" in line] == [told] * (told is not None)
        assert lines[0] == "note     ranks train on the CPU: 8 cores, no GPU"


@pytest.mark.usefixtures("played_machine")
def test_gpus_are_listed_with_what_slows_them_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pairs without P2P access; bf16; memory that cannot be pinned; a build of torch for CPUs."""
    assert _found(GPU, 3) == [
        "ok       2 x H100, 1 x A100",
        "note     GPUs 0-2, 1-2 cannot access each other's memory (P2P): they communicate through the host",
        "ok       host memory: 150.0 GB/s",
        "ok       link: 55.0 GB/s to the GPU, 54.0 GB/s to host memory, 48.0 GB/s each way at once",
        "ok       matmul: bf16 1.00 TFLOP/s, fp32 1.00 TFLOP/s",
    ]
    monkeypatch.setattr(speed, "matmul_tflops", lambda device, dtype: 0.5 if dtype is torch.bfloat16 else 1.0)
    monkeypatch.setattr(speed, "link_gb_s", mock.Mock(side_effect=HostMemoryError("look at ulimit -l")))
    *_, link, matmul = _found(GPU)
    assert link == 'note     offload="state" cannot run: look at ulimit -l'
    assert matmul.startswith("note     matmul: bf16 0.50 TFLOP/s, fp32 1.00 TFLOP/s") and 'precision="fp32"' in matmul
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path)
    what = f"problem  torch {torch.__version__} finds no GPU, and there is an NVIDIA driver: install a build of torch"
    assert _found(CPU)[0].startswith(what)


def _communicator(device: torch.device = CPU) -> Communicator:
    speed._SECONDS = 0.01  # in this rank
    return Communicator(dist.group.WORLD, Streams(device))


@on_ranks(2)
@pytest.mark.parametrize("way", [nullcontext, over_sockets, simulated_device])
def test_ranks_measure_what_training_sends(context: RankContext, way: Any) -> None:
    """Bytes of a unit in the wire's dtype, and in that of gradients, over each transport."""
    with way():
        ranks = _communicator()
        speeds = measure(ranks, [NUMEL, 2 * NUMEL], Precision())
        assert isinstance(ranks.transport, NcclTransport) == (way is simulated_device)
    sent = 4 if way is simulated_device else 2  # NCCL sums what it sends
    wanted = [("all-gather", 2), ("reduction", sent), ("all-gather", 4), ("reduction", 2 * sent)]
    assert [(each.name, each.unit_bytes) for each in speeds] == [(name, count * NUMEL) for name, count in wanted]
    assert all(each.gb_s == each.unit_bytes / each.median_ms / 1e6 for each in speeds)


@pytest.mark.gpu
@on_ranks(2, backend="nccl")
def test_ranks_measure_on_gpus(context: RankContext) -> None:
    """Devices, matmuls, and collectives."""
    assert len(measure(_communicator(context.device), [NUMEL], Precision())) == 2
    with (
        mock.patch.object(speed, "matmul_tflops", return_value=1.0),  # a played device takes seconds for one
        mock.patch.object(speed, "_COPIED_BYTES", 1 << 20),
    ):
        found = [] if context.device.type == "cpu" else _found(context.device)
    assert not found or found[0].startswith("ok       ") and any(line.startswith("ok       link: ") for line in found)


def test_one_process_checks_the_machine(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = command("doctor").splitlines()
    assert {line[:8].strip() for line in lines} <= {"ok", "note"} and "matmul: bf16" in lines[-1]
    monkeypatch.setattr(doctor, "_DRIVER", Path(__file__))
    report = json.loads(command("doctor", "--json", code=1))
    assert (report["world_size"], report["transport"]) == (1, None)
    (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert "finds no GPU" in problem["what"]


def _run_on_own_machine() -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NCCL_P2P_DISABLE="1", STREAMSHARD_SHARED_MEMORY="0")
    if os.environ["RANK"] == "1":
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    speed._SECONDS = 0.01
    doctor._UNIT_NUMELS = (1 << 12, 1 << 14)
    sys.exit(main(["doctor"]))


@pytest.mark.ranks
def test_ranks_print_their_bandwidth_once_and_findings_of_other_machines_too(tmp_path: Path) -> None:
    """What the first machine does not have."""
    (code, told), other = Launched(2, tmp_path, _run_on_own_machine).end()
    assert (code, other) == (0, (0, "")), told
    assert "ok       2 ranks on 2 machine(s), over sockets\n" in told
    assert told.count("NCCL_P2P_DISABLE=1") == 1 and "note     rank 1: CUDA_LAUNCH_BLOCKING=1: the host waits" in told
    for name in ("all-gather", "reduction"):
        assert re.search(rf"^ok       {name} of \d+\.\d KiB: \d+\.\d\d GB/s, \d+\.\d\d ms$", told, re.M), told
