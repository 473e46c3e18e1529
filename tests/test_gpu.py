"""On a GPU: parity at one rank and at two NCCL ranks on one device, steady memory, collectives behind compute.

Run with ``pytest -m gpu``. Ranks that share a GPU say that they are on different hosts (see `tests.ranks`), so
their traffic goes through sockets: this shows correctness and order, not speed.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from streamshard import (
    Precision,
    StreamShard,
    export_safetensors,
    init_weights,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    trace,
)
from streamshard.comm.streams import StreamName
from streamshard.errors import HostMemoryError
from streamshard.optim import WholeParameterOptimizer
from streamshard.pinned import PinnedMemory
from streamshard.tools.memory import explain_out_of_memory
from tests.compare import EXACT, Tolerance, assert_same, full_weights
from tests.counts import engine_inside
from tests.faults import let_dynamo_look
from tests.gpu import IS_PLAYED
from tests.models import Block, Stack, TinyConfig, TinyLM, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    ALL_SLOTS,
    FP32,
    Call,
    adamw,
    assert_trains_like_plain,
    lm_step,
    only_sharded,
    stack_step,
    train_stack,
)

pytestmark = pytest.mark.gpu

# Kernels sum in other orders from launch to launch (atomic adds in embeddings' backward).
NEAR = Tolerance(relative=2e-4, absolute=1e-6)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Call], Tensor]]] = {
    "transformer": (TinyLM, lm_step),
    "tied embedding": (lambda: TinyLM(TinyConfig(tied=True)), lm_step),
    "layers of different sizes": (lambda: Stack((16, 64, 8, 40, 16)), stack_step),
}


DIAL: dict[str, dict[str, Any]] = {"ZeRO-3": {}, "ZeRO-2": {"weight_slots": "all"}, "ZeRO-1": ALL_SLOTS}


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("setting", DIAL)
@pytest.mark.parametrize("case", CASES)
def test_models_train_like_plain_pytorch_on_a_gpu(context: RankContext, case: str, setting: str) -> None:
    options: dict[str, Any] = {"steps": 5, "checked": (1, 4), "optimizer": adamw, "tolerance": NEAR}
    assert_trains_like_plain(context, *CASES[case], **options, **DIAL[setting])


def _capture_layers(model: Any) -> None:
    for block in model.blocks:
        block.compile(mode="reduce-overhead")


@pytest.mark.gpu(may_be_played=False)  # Inductor's kernels, and graphs
@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("setting", DIAL)
def test_layers_captured_in_graphs_train_like_plain_pytorch_on_a_gpu(context: RankContext, setting: str) -> None:
    """The first steps warm up and capture, the others replay; what is gathered and reduced stays outside."""
    let_dynamo_look()
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    options: dict[str, Any] = {"optimizer": adamw, "tolerance": Tolerance(relative=2e-3, absolute=1e-5)}
    options["prepare"] = only_sharded(_capture_layers)
    assert_trains_like_plain(context, TinyLM, lm_step, steps=6, checked=(1, 5), **options, **DIAL[setting])
    assert counters["cudagraph_recorded_non_static_inputs"] > 0
    assert counters["cudagraph_skips"] == 0


@on_ranks(1, 2, backend="nccl")
def test_a_model_from_the_meta_device_is_initialised_and_loaded_on_a_gpu(context: RankContext, tmp_path: Path) -> None:
    """The same at each call, and the GPU's generator is what it was; it trains where a CPU model would."""
    with torch.device("meta"):
        model: Any = StreamShard(Stack(), precision=FP32)
        again: Any = StreamShard(Stack(), precision=FP32)
        other: Any = StreamShard(Stack(), precision=FP32)
    generator: Any = torch if context.device.type == "cpu" else torch.cuda
    before = generator.get_rng_state()
    init_weights(model, seed=5)
    assert torch.equal(generator.get_rng_state(), before)
    init_weights(again, seed=5)
    assert_same(full_weights(again), full_weights(model), "weights", EXACT)
    export_safetensors(model, tmp_path)
    load_safetensors(other, tmp_path)
    assert_same(full_weights(other), full_weights(model), "loaded weights")
    stack_step(other, context.call(0))


class _HostCopies(TorchDispatchMode):
    """Asks, of copies between host and GPU, whether the host's memory is pinned and nobody waits for the copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.are_free: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default and args[0].numel() and args[0].device != args[1].device
        if is_copy:
            is_free = args[2:] == (True,) or bool((kwargs or {}).get("non_blocking"))
            self.are_free += [each.is_pinned() and is_free for each in args[:2] if each.device.type == "cpu"]
        return func(*args, **(kwargs or {}))


@on_ranks(2, backend="nccl")
def test_the_host_copies_through_pinned_memory(context: RankContext, tmp_path: Path) -> None:
    """Flags of used parameters, and what a checkpoint is written of."""
    model: Any = StreamShard(Stack().to(context.device), precision=FP32)
    weights = [param for param in model.parameters() if param.ndim == 2]
    optimizer = WholeParameterOptimizer(weights, torch.optim.Muon, lr=0.02)
    with _HostCopies() as copies:
        for number in range(2):
            stack_step(model, context.call(number))
        optimizer.step()
        save_checkpoint(tmp_path, model, optimizer, wait=False).wait()
    assert len(copies.are_free) > 2 + len(weights) or IS_PLAYED  # there all memory is the host's
    assert all(copies.are_free)


@pytest.mark.skipif(IS_PLAYED, reason="the CPU pins nothing")
@on_ranks(1, backend="nccl")
def test_no_kernel_raises_the_error_of_memory_that_could_not_be_pinned(context: RankContext) -> None:
    twice = mmap.mmap(-1, mmap.PAGESIZE)
    with mock.patch("mmap.mmap", return_value=twice):
        memory = PinnedMemory(context.device)
        block = memory._map(mmap.PAGESIZE)
        with pytest.raises(HostMemoryError, match="already .*712"):
            memory._map(mmap.PAGESIZE)
    assert torch.zeros(2, device=context.device).add(1).tolist() == [1.0, 1.0]
    del block


def _wide(dim: int = 1024, depth: int = 8) -> nn.Module:
    """Blocks wide enough for a kernel to take longer than a launch."""
    return nn.Sequential(*(Block(dim) for _ in range(depth)), nn.Linear(dim, 1))


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_from_a_checkpoint_on_a_gpu(context: RankContext, tmp_path: Path, wait: bool) -> None:
    """With weights, moments and the device's random numbers, which dropout takes; in the background as at the call."""

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = StreamShard(nn.Sequential(Stack(), nn.Dropout(0.5)), precision=FP32)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(model: Any, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        losses = list[Tensor]()
        train_stack(model, optimizer, context, first=first, steps=2, step=lambda *now: losses.append(stack_step(*now)))
        return [*map(float, losses), float(torch.rand((), device=context.device))]

    run, other = make(0), make(1)
    train(*run, 0)
    saved = save_checkpoint(tmp_path, *run, wait=wait)
    wanted = train(*run, 2)
    path = saved.wait()
    train(*other, 0)
    load_checkpoint(path, *other)
    found = train(*other, 2)
    assert found[-1] == wanted[-1]
    assert_same({"losses": torch.tensor(found)}, {"losses": torch.tensor(wanted)}, "losses", NEAR)


@on_ranks(1, 2, backend="nccl")
def test_the_current_device_may_be_another_one_than_the_models(context: RankContext, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    first, there = torch.device("cuda", 0), dataclasses.replace(context, device=torch.device("cuda", 1))

    def choose_first(model: nn.Module, number: int) -> None:
        assert number or not isinstance(model, StreamShard) or torch.cuda.current_device() == 1
        torch.cuda.set_device(first)

    def whole(model: nn.Module) -> torch.optim.Optimizer:
        if isinstance(model, StreamShard):
            return WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor)
        return torch.optim.Adafactor(model.parameters())

    try:
        for optimizer in (adamw, whole):
            options: dict[str, Any] = {"prepare": choose_first, "optimizer": optimizer, "tolerance": NEAR}
            model = assert_trains_like_plain(there, Stack, stack_step, **options)
            streams = engine_inside(model).streams
            streams._compute = None, None  # asks for the stream again, with another current device
            found = {streams.device_stream(name).device for name in (StreamName.COMPUTE, *streams._own)}
            assert found == {there.device}
            before = full_weights(model)
            save_checkpoint(tmp_path, model, wait=False).wait()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            load_checkpoint(tmp_path, model)
            assert_same(full_weights(model), before, "weights after a save and a load", EXACT)
            assert {param.device for param in model.parameters()} == {there.device}
    finally:
        torch.cuda.set_device(first)


def _train_wide(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.gpu(may_be_played=False)
@on_ranks(1, 2, backend="nccl")
def test_memory_is_steady_from_step_to_step(context: RankContext) -> None:
    model = StreamShard(_wide(256, 4).to(context.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, 64, 256, device=context.device)
    for _ in range(4):
        _train_wide(model, optimizer, x)
    held, allocations = [], [torch.cuda.memory_stats()["allocation.all.allocated"]]
    for _ in range(6):
        _train_wide(model, optimizer, x)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        allocations.append(stats["allocation.all.allocated"])
        names = ["allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.allocated"]
        held.append(tuple(stats[name] for name in names))
    assert len(set(held)) == 1, held
    per_step = [after - before for before, after in zip(allocations[:-1], allocations[1:], strict=True)]
    assert len(set(per_step)) == 1, per_step


def _kernels(profile: Any) -> list[tuple[bool, float, float]]:
    return [
        ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.lower().startswith(("memcpy", "memset"))
    ]


@pytest.mark.gpu(may_be_played=False)
@on_ranks(2, backend="nccl")
def test_collectives_run_while_layers_compute(context: RankContext) -> None:
    model = StreamShard(_wide().to(context.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, 512, 1024, device=context.device)
    for _ in range(3):
        _train_wide(model, optimizer, x)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _train_wide(model, optimizer, x)
        torch.cuda.synchronize()
    kernels = _kernels(profile)
    collectives, compute = ([each[1:] for each in kernels if each[0] is wanted] for wanted in (True, False))
    assert len(collectives) >= 2 * 8  # gathers of forward and reductions of backward at the least
    overlapped = [any(start < stop and begin < end for start, end in compute) for begin, stop in collectives]
    assert sum(overlapped) >= 8


@on_ranks(2, backend="nccl")
@pytest.mark.parametrize("fused", [None, True])
def test_state_from_before_sharding_follows_the_model_to_a_gpu(context: RankContext, fused: bool | None) -> None:
    plain: Any = Stack()
    model: Any = Stack()
    model.load_state_dict(plain.state_dict())
    make: Any = functools.partial(torch.optim.AdamW, lr=0.01, **({} if fused is None else {"fused": fused}))
    theirs, ours = make(plain.parameters()), make(model.parameters())
    train_stack(plain, theirs, steps=6)
    train_stack(model, ours)
    model = StreamShard(model, precision=FP32)
    train_stack(model, ours, first=3)
    assert next(model.parameters()).device == context.device
    assert_same(full_weights(model), full_weights(plain), "weights", NEAR)


@on_ranks(4, backend="nccl")
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_replicas_train_like_plain_pytorch_on_a_gpu(context: RankContext, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh(context.device.type, shape)
    for settings in ({}, {"min_unit_size": 4096}):
        assert_trains_like_plain(context, TinyLM, lm_step, optimizer=adamw, tolerance=NEAR, mesh=mesh, **settings)


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_a_gpu(context: RankContext, fused: bool) -> None:
    model: Any = StreamShard(Stack().to(context.device), precision=Precision(param_dtype=torch.float16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler(context.device.type, init_scale=1024.0)
    for overflows in (False, True, True, False):
        before = full_weights(model)
        factor = torch.inf if overflows and context.rank == context.world_size - 1 else 1.0
        loss = model(vector_batch(0, context.rank).to(context.device)).float().square().mean()
        scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        is_same = all(torch.equal(before[name], weight) for name, weight in full_weights(model).items())
        assert is_same == overflows
    assert scaler.get_scale() == 256.0


@pytest.mark.skipif(IS_PLAYED, reason="torch does not count the CPU's memory")
@on_ranks(1, backend="nccl")
def test_an_explanation_of_out_of_memory_says_what_torch_has_allocated_of_the_device(context: RankContext) -> None:
    model = StreamShard(TinyLM().cuda())
    text = explain_out_of_memory(engine_inside(model))
    most, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    assert most > 0
    assert f"torch has allocated at most {most / 2**30:.2f} GiB, of {total / 2**30:.2f} GiB" in text


@on_ranks(2, backend="nccl")
def test_a_trace_has_the_times_of_the_device_on_a_gpu(context: RankContext) -> None:
    model = StreamShard(TinyLM().to(context.device))
    optimizer = adamw(model)
    for number in range(3):
        with trace(model) as found:
            lm_step(model, context.call(number))
            optimizer.step()
    summary = found.summary()
    parts = ("compute_s", "exposed_all_gather_s", "exposed_reduction_s", "optimizer_s", "other_s")
    assert summary["step_s"] == pytest.approx(sum(summary[part] for part in parts))
    assert summary["host_s"] > 0.0
    waits = [span for span in found.spans if span.activity.startswith("wait for")]
    assert len(waits) > len(engine_inside(model).units)
    for span in found.spans:  # the last exchange of flags may end behind the step
        assert 0.0 <= span.start_us <= span.stop_us
        assert span.stream is StreamName.COMM or span.stop_us <= found.total_us
