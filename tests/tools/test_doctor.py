"""``streamshard doctor``: what it finds on a machine, what ranks measure, and what it advises."""

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
from torch import nn

from streamshard import Precision
from streamshard import device as devices
from streamshard.comm.communicator import Communicator
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Streams
from streamshard.errors import ConfigError, HostMemoryError
from streamshard.tools import doctor, speed
from streamshard.tools.command import main
from streamshard.tools.doctor import Report, advise, check_machine
from streamshard.tools.speed import CollectiveSpeed, Layer, LayerSpeed, measure
from tests.launched import Launched
from tests.models import TinyConfig, TinyLM
from tests.ranks import RankContext, on_ranks
from tests.scenarios import over_sockets
from tests.simulated import simulated_device

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


def _build() -> nn.Module:
    return TinyLM(TinyConfig(depth=3))


@on_ranks(2)
@pytest.mark.parametrize("way", [nullcontext, over_sockets, simulated_device])
def test_ranks_measure_what_training_sends(context: RankContext, way: Any) -> None:
    with way():
        ranks = _communicator()
        layer = Layer(_build, torch.bfloat16, (2, 4), CPU)
        speeds, found = measure(ranks, [layer.size], layer, Precision())
        assert isinstance(ranks.transport, NcclTransport) == (way is simulated_device)
    numel = sum(param.numel() for param in TinyLM().blocks[0].parameters())
    sent = 4 if way is simulated_device else 2  # NCCL sums what it sends
    assert [(each.name, each.unit_bytes) for each in speeds] == [("all-gather", 2 * numel), ("reduction", sent * numel)]
    assert all(each.gb_s == each.unit_bytes / each.median_ms / 1e6 for each in speeds)
    assert found is not None and (found.name, found.count) == ("blocks.0", 3)
    assert min(speeds[0].median_ms, found.forward_ms, found.backward_beside_ms) > 0


@pytest.mark.gpu
@on_ranks(2, backend="nccl")
def test_ranks_measure_on_gpus(context: RankContext) -> None:
    ranks = _communicator(context.device)
    layer = Layer(_build, torch.bfloat16, (2, 4), context.device)
    speeds, found = measure(ranks, [layer.size], layer, Precision())
    assert len(speeds) == 2 and found is not None and found.backward_beside_ms > 0
    with (
        mock.patch.object(speed, "matmul_tflops", return_value=1.0),  # a played device takes seconds for one
        mock.patch.object(speed, "_COPIED_BYTES", 1 << 20),
    ):
        found = [] if context.device.type == "cpu" else _found(context.device)
    assert not found or found[0].startswith("ok       ") and any(line.startswith("ok       link: ") for line in found)


@on_ranks(2)
def test_a_frozen_layer_is_not_reduced(context: RankContext) -> None:
    layer = Layer(lambda: _build().requires_grad_(False), torch.bfloat16, (2, 4), CPU)
    (gather, reduce), found = measure(_communicator(), [layer.size], layer, Precision())
    assert gather.unit_bytes > 0 and reduce.unit_bytes == 0 and found is not None
    with pytest.raises(ConfigError, match="Linear has no layers"):
        Layer(lambda: nn.Linear(4, 4), torch.bfloat16, (2, 4), CPU)


_Unit = tuple[float, float]  # milliseconds of its all-gather and of its reduction


def _report(layer: LayerSpeed, unit: _Unit, transport: str = "nccl", ranks: int = 8, machines: int = 1) -> Report:
    names = "all-gather", "reduction"
    collectives = [CollectiveSpeed(name, 1024, ms, 1.0) for name, ms in zip(names, unit, strict=True)]
    return Report(ranks, machines, 40 << 30, [], transport, collectives, layer)


def _advice(report: Report, weight_slots: Any = 2, precision: Precision | None = None) -> list[str]:
    return [str(finding) for finding in advise(report, precision or Precision(), 4, weight_slots)]


HIDDEN = LayerSpeed("layers.0", 32, forward_ms=8.0, backward_ms=16.0, forward_beside_ms=8.1, backward_beside_ms=17.5)
LATE = LayerSpeed("layers.0", 32, forward_ms=8.0, backward_ms=16.0, forward_beside_ms=10.5, backward_beside_ms=32.0)
UNIT = 10.0, 20.0


def test_hidden_communication_needs_no_setting() -> None:
    assert _advice(_report(HIDDEN, (3.1, 6.2))) == [
        "ok       communication hides behind forward: all-gather 3.10 ms, forward 8.00 ms, both at once 8.10 ms",
        "ok       communication hides behind backward: all-gather and reduction 9.30 ms, backward 16.00 ms, both at "
        "once 17.50 ms",
        "ok       choose StreamShard(model): two slots suffice",
    ]
    assert advise(Report(8, 1, 0, [], "nccl"), Precision(), 4, 2) == []  # no layer, no advice


def test_exposed_communication_names_the_settings_that_help() -> None:
    """Slots that fit, 16-bit gradients, and the batch whose compute takes as long: 4 sequences * 30 ms / 16 ms."""
    assert _advice(_report(LATE, UNIT), "all") == [
        "note     communication does not hide behind forward: all-gather 10.00 ms, forward 8.00 ms, both at once 10.50 "
        "ms: 2.50 ms per layer are exposed, in 32 layers",
        "note     communication does not hide behind backward: all-gather and reduction 30.00 ms, backward 16.00 ms, "
        "both at once 32.00 ms: 16.00 ms per layer are exposed, in 32 layers",
        "note     choose weight_slots='all': backward all-gathers nothing, and the memory suffices",
        "note     choose Precision(sums_in_rank_order=True): gradients are sent in 16 bits, and summed in fp32",
        "note     choose a larger batch of 8: compute grows, communication does not",
    ]
    (line,) = _advice(_report(LATE, UNIT), None)
    assert line.startswith("problem  the model does not fit 40.0 GiB per rank: ") and "streamshard plan" in line


@pytest.mark.parametrize(
    ("transport", "ranks", "machines", "precision", "told"),
    [
        ("nccl", 8, 1, Precision(), "sums_in_rank_order"),
        ("nccl", 4, 2, Precision(), "sums_in_rank_order"),  # dial.md: at most the same with two GPUs per machine
        ("nccl", 16, 2, Precision(), "reduce_dtype"),
        ("nccl", 512, 64, Precision(), None),  # a bf16 sum of more than 256 gradients stops growing
        ("sockets", 16, 2, Precision(), None),  # which sends 16 bits already
        ("nccl", 8, 1, Precision(grad_dtype=torch.bfloat16), None),
    ],
)
def test_16_bit_gradients_are_those_that_the_dial_recommends(
    transport: str, ranks: int, machines: int, precision: Precision, told: str | None
) -> None:
    """``sums_in_rank_order`` where it sends fewer bytes, else ``reduce_dtype`` where sums are accurate."""
    lines = _advice(_report(LATE, UNIT, transport=transport, ranks=ranks, machines=machines), 2, precision)
    dtypes = [line.split("(")[1].split("=")[0] for line in lines if "Precision(" in line]
    assert dtypes == [told] * (told is not None)


def _run(*arguments: str) -> None:
    speed._SECONDS = 0.01
    doctor._UNIT_NUMELS = (1 << 12, 1 << 14)
    sys.exit(main(["doctor", *arguments]))


def test_one_process_checks_the_machine_and_measures_no_model(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = command("doctor").splitlines()
    assert {line[:8].strip() for line in lines} <= {"ok", "note"} and "matmul: bf16" in lines[-1]
    monkeypatch.setattr(doctor, "_DRIVER", Path(__file__))
    report = json.loads(command("doctor", "--json", code=1))
    assert (report["world_size"], report["transport"], report["layer"]) == (1, None, None)
    (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert "finds no GPU" in problem["what"]
    advice = "torchrun --nproc-per-node N -m streamshard doctor MODEL --batch B --seq S"
    assert advice in command("doctor", "tests.models:TinyLM", *["--batch", "1", "--seq", "4"], code=2)


@pytest.mark.ranks
def test_ranks_measure_a_layer_of_a_model_and_advise(tmp_path: Path) -> None:
    """As JSON, with the times that the advice is derived from. The plan knows that all slots fit."""
    arguments = ["tests.models:TinyLM", "--batch", "2", "--seq", "8", "--precision", "fp32", "--json"]
    (code, told), other = Launched(2, tmp_path, _run, *arguments).end()
    assert (code, other) == (0, (0, "")), told
    report = json.loads(told)
    assert (report["world_size"], report["transport"]) == (2, "shared-memory")
    assert (report["layer"]["name"], report["layer"]["count"]) == ("blocks.0", 4)
    assert [each["unit_bytes"] for each in report["collectives"]] == [8896, 8896]
    lines = [finding["what"] for finding in report["findings"]]
    assert any("communication" in line and "behind forward" in line for line in lines)
    assert any(line.startswith("choose ") for line in lines)


def _complex() -> nn.Module:
    model = TinyLM()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


@pytest.mark.ranks
def test_ranks_print_their_bandwidth_once_and_findings_of_other_machines_too(tmp_path: Path) -> None:
    """What the first machine does not have. A model that cannot be sharded is a problem beside the others."""
    (code, told), other = Launched(2, tmp_path, _run_on_own_machine).end()
    assert (code, other) == (1, (0, "")), told
    assert "ok       2 ranks on 2 machine(s), over sockets\n" in told and "doctor: 1 problem found\n" in told
    assert told.count("NCCL_P2P_DISABLE=1") == 1 and "note     rank 1: CUDA_LAUNCH_BLOCKING=1: the host waits" in told
    for name in ("all-gather", "reduction"):
        assert re.search(rf"^ok       {name} of \d+\.\d KiB: \d+\.\d\d GB/s, \d+\.\d\d ms$", told, re.M), told
    assert "problem  StreamShard cannot shard this model: parameter 'phase' is torch.complex64" in told


def _run_on_own_machine() -> None:
    environment = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_P2P_DISABLE": "1"}
    environment["STREAMSHARD_SHARED_MEMORY"] = "0"
    if os.environ["RANK"] == "1":
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    os.environ.update(environment)
    _run(*f"{__name__}:_complex --batch 2 --seq 8".split())
