"""On a GPU: parity at one rank and at two NCCL ranks on one device, steady memory, collectives behind compute.

Run with ``pytest -m gpu``. Ranks that share a GPU say that they are on different hosts (see `tests.ranks`), so
their traffic goes through sockets: this shows correctness and order, not speed.
"""

from __future__ import annotations

import contextlib
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
from tests.gpu import IS_PLAYED
from tests.models import Block, Stack, TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    Tolerance,
    adamw,
    assert_same,
    assert_trains_like_plain,
    engine_inside,
    full_weights,
    let_dynamo_look,
)
from tests.scenarios import PRECISIONS, RoutedStack

pytestmark = pytest.mark.gpu

# Kernels sum in other orders from launch to launch (atomic adds in embeddings' backward).
NEAR = Tolerance(relative=2e-4, absolute=1e-6)


def lm_step(model: nn.Module, call: Call) -> Tensor:
    """Next-token training of a `TinyLM` on the GPU."""
    tokens = token_batch(call.step, call.rank).to(_device(model))
    return call.backward(next_token_loss(model(tokens), tokens))


def stack_step(model: nn.Module, call: Call) -> Tensor:
    """Regression to zero of a `Stack` on the GPU."""
    return call.backward(model(vector_batch(call.step, call.rank).to(_device(model))).square().mean())


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Call], Tensor]]] = {
    "transformer": (TinyLM, lm_step),
    "tied embedding": (lambda: TinyLM(TinyConfig(tied=True)), lm_step),
    "layers of different sizes": (lambda: Stack((16, 64, 8, 40, 16)), stack_step),
}


DIAL: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "ZeRO-2": {"weight_slots": "all"},
    "ZeRO-1": {"weight_slots": "all", "grad_slots": "all"},  # gathers and reductions in place
}


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("setting", DIAL)
@pytest.mark.parametrize("case", CASES)
def test_models_train_like_plain_pytorch_on_a_gpu(context: RankContext, case: str, setting: str) -> None:
    """Losses, gradients and weights in fp32, at one rank and at two."""
    build, step = CASES[case]
    settings = DIAL[setting]
    assert_trains_like_plain(context, build, step, steps=5, checked=(1, 4), optimizer=adamw, tolerance=NEAR, **settings)


def _capture_layers(model: Any, number: int) -> None:
    is_ours = isinstance(model, StreamShard)
    if number == 0 and is_ours:
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
    near, settings = Tolerance(relative=2e-3, absolute=1e-5), DIAL[setting]
    assert_trains_like_plain(
        context,
        TinyLM,
        lm_step,
        steps=6,
        checked=(1, 5),
        optimizer=adamw,
        prepare=_capture_layers,
        tolerance=near,
        **settings,
    )
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
    stack_step(other, Call(0, context.rank, context.world_size, 1.0))


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
    """Flags of used parameters, digests of an optimizer's, and what a checkpoint is written of."""
    model: Any = StreamShard(Stack().to(context.device), precision=FP32)
    weights = [param for param in model.parameters() if param.ndim == 2]
    optimizer = WholeParameterOptimizer(weights, torch.optim.Muon, lr=0.02)
    with _HostCopies() as copies:
        for number in range(2):
            stack_step(model, Call(number, context.rank, context.world_size, 1.0))
        optimizer.step()
        save_checkpoint(tmp_path, model, optimizer, wait=False).wait()
    assert len(copies.are_free) > 2 + len(weights) or IS_PLAYED  # there all memory is the host's
    assert all(copies.are_free)


@pytest.mark.skipif(IS_PLAYED, reason="the CPU pins nothing")
@on_ranks(1, backend="nccl")
def test_no_kernel_raises_the_error_of_memory_that_could_not_be_pinned(context: RankContext) -> None:
    """The same memory is pinned twice."""
    twice = mmap.mmap(-1, mmap.PAGESIZE)
    with mock.patch("mmap.mmap", return_value=twice):
        memory = PinnedMemory(context.device)
        block = memory._map(mmap.PAGESIZE)
        with pytest.raises(HostMemoryError, match="already .*712"):
            memory._map(mmap.PAGESIZE)
    assert torch.zeros(2, device=context.device).add(1).tolist() == [1.0, 1.0]
    del block


class WideLM(nn.Module):
    """Blocks wide enough for a kernel to take longer than a launch."""

    def __init__(self, dim: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, length, dim] -> [rows, length, 1]"""
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_from_a_checkpoint_on_a_gpu(context: RankContext, tmp_path: Path, wait: bool) -> None:
    """With weights, moments and the device's random numbers, which dropout takes; in the background as at the call."""

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = StreamShard(nn.Sequential(Stack(), nn.Dropout(0.5)), precision=FP32)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(model: Any, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
        losses = []
        for number in range(first, first + 2):
            loss = model(vector_batch(number, context.rank).to(context.device)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return [*losses, float(torch.rand((), device=context.device))]

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
    """Sharding makes the model's device the current one. Steps, saves and whole parameters follow the model."""
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
            assert {streams.device_stream(name).device for name in (StreamName.COMPUTE, *streams._own)} == {
                there.device
            }
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
    """After warm-up: the same bytes held and reserved, no new flat_param, the same number of allocations every step."""
    model = StreamShard(WideLM(256, 4).to(context.device))
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
    """(is a collective, start, end in us) of every kernel in a profile."""
    found = []
    for event in profile.events():
        name = event.name.lower()
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if is_kernel and not name.startswith(("memcpy", "memset")):
            found.append(("nccl" in name, event.time_range.start, event.time_range.end))
    return found


def _overlapped(kernels: list[tuple[bool, float, float]]) -> int:
    """How many collectives run while some compute kernel runs."""
    compute = [(start, end) for is_nccl, start, end in kernels if not is_nccl]
    return sum(
        any(start < other_end and other_start < end for other_start, other_end in compute)
        for is_nccl, start, end in kernels
        if is_nccl
    )


@pytest.mark.gpu(may_be_played=False)
@on_ranks(2, backend="nccl")
def test_collectives_run_while_layers_compute(context: RankContext) -> None:
    """In the profile of a steady step, collectives of most blocks share their time with compute kernels."""
    depth = 8
    model = StreamShard(WideLM(1024, depth).to(context.device))
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
    collectives = sum(is_nccl for is_nccl, _, _ in kernels)
    assert collectives >= 2 * depth  # gathers of forward and reductions of backward at the least
    assert _overlapped(kernels) >= depth


@on_ranks(2, backend="nccl")
@pytest.mark.parametrize("fused", [None, True])
def test_state_from_before_sharding_follows_the_model_to_a_gpu(context: RankContext, fused: bool | None) -> None:
    """A model and its optimizer that have trained on the CPU go on where the model is then."""
    plain: Any = Stack()
    model: Any = Stack()
    model.load_state_dict(plain.state_dict())
    make: Any = functools.partial(torch.optim.AdamW, lr=0.01, **({} if fused is None else {"fused": fused}))
    theirs, ours = make(plain.parameters()), make(model.parameters())
    _train_alike(plain, theirs, 0)
    _train_alike(model, ours, 0)
    model = StreamShard(model, precision=FP32)
    _train_alike(plain, theirs, 3)
    _train_alike(model, ours, 3)
    assert _device(model) == context.device
    assert_same(full_weights(model), full_weights(plain), "weights", NEAR)


def _train_alike(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Three steps, on the same batches everywhere."""
    for number in range(first, first + 3):
        stack_step(model, Call(number, 0, 1, 1.0))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(4, backend="nccl")
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_replicas_train_like_plain_pytorch_on_a_gpu(context: RankContext, shape: tuple[int, int]) -> None:
    """Averages over the replicate axis, where one rank holds the whole model too; layers together in one unit."""
    mesh = init_device_mesh(context.device.type, shape)
    for settings in ({}, {"min_unit_size": 4096}):
        assert_trains_like_plain(context, TinyLM, lm_step, optimizer=adamw, tolerance=NEAR, mesh=mesh, **settings)


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("precision", ["fp32", "16-bit wire", "16-bit"])
def test_sums_of_gradients_are_divided_by_the_factor_on_a_gpu(context: RankContext, precision: str) -> None:
    """Of losses divided by N before, sums are as good as means of the losses; accumulated over micro-batches."""
    size, results = context.world_size, []
    for divides in (False, True):
        model: Any = StreamShard(RoutedStack().to(context.device), precision=PRECISIONS[precision])
        model.load_state_dict(results[0]) if divides else results.append(full_weights(model))
        if divides:
            model.set_gradient_divide_factor(1.0)
        optimizer = adamw(model)
        for number in range(6):
            with model.no_sync() if number % 3 == 0 else contextlib.nullcontext():
                stack_step(model, Call(number, context.rank, size, 1.0 / size if divides else 1.0))
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        results.append(full_weights(model))
    assert_same(results[2], results[1], "weights", NEAR)


@on_ranks(1, 2, backend="nccl")
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_a_gpu(context: RankContext, fused: bool) -> None:
    """fp16 with the loss scaler: each overflow halves the scale and keeps the weights."""
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
    """Beside what the engine holds."""
    model = StreamShard(TinyLM().cuda())
    text = explain_out_of_memory(engine_inside(model))
    most, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    assert most > 0
    assert f"torch has allocated at most {most / 2**30:.2f} GiB, of {total / 2**30:.2f} GiB" in text


@on_ranks(2, backend="nccl")
def test_a_trace_has_the_times_of_the_device_on_a_gpu(context: RankContext) -> None:
    """The parts add up to the step."""
    model = StreamShard(TinyLM().to(context.device))
    optimizer = adamw(model)
    for number in range(3):
        with trace(model) as found:
            lm_step(model, Call(number, context.rank, context.world_size, 1.0))
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
