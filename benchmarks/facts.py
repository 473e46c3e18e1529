"""What a machine does: rates of matrix products and copies, an Adam on the host, and what single calls cost.

    python benchmarks/facts.py --output facts.json      # --rehearse: tiny; without a GPU, what the CPU has of it

Facts are in the order of their worth, and each is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _measure import RESULTS, Clock, environment, said, summary, write_json

# Dense bf16, by the vendors' data sheets.
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
ADAM_TENSORS = 4


class Sizes(NamedTuple):
    """How much is copied, pinned and updated, and how often a call is repeated."""

    copied_bytes: int = 1 << 28
    pinned_bytes: int = 1 << 30
    adam_numel: int = 1 << 26
    calls: int = 2000


TINY = Sizes(copied_bytes=1 << 16, pinned_bytes=1 << 16, adam_numel=1 << 10, calls=20)


def main() -> None:
    """Find facts, and write them down one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "facts.json")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    sizes = TINY if arguments.rehearse else Sizes()
    result: dict[str, Any] = {"benchmark": "facts", "environment": environment(device)}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": functools.partial(speed, device, is_brief=arguments.rehearse),
        "copies_gb_s": functools.partial(_copies, device, sizes),
        "calls_us": functools.partial(_calls, device, sizes),
        "host": functools.partial(_host, device, sizes),
    }
    for name, find in parts.items():
        result[name] = find()
        write_json(result, arguments.output)
        print(f"{name}: {result[name]}", flush=True)
    result["nvidia_smi"] = said("nvidia-smi")
    write_json(result, arguments.output)


def speed(device: torch.device, *, is_brief: bool) -> dict[str, Any]:
    """TFLOP/s of a large bf16 matrix product, and GB/s of a large copy, on random data."""
    size, copied = (64, 1 << 16) if is_brief else (8192, 1 << 31)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.empty(copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    matmul_ms = _median_ms(device, lambda: torch.mm(left, right, out=product))
    copy_ms = _median_ms(device, lambda: target.copy_(source))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "matmul_tflops": 2 * size**3 / matmul_ms / 1e9,
        "copy_gb_per_s": 2 * copied / copy_ms / 1e6,
        "data_sheet_tflops": PEAK_TFLOPS.get(name),
    }


def _median_ms(device: torch.device, run: Callable[[], object], times: int = 10) -> float:
    """The device's time of a call."""
    for _ in range(3):
        run()
    clock = Clock(device)
    clock.lap()
    for _ in range(times):
        run()
        clock.lap()
    return summary(clock.laps_ms())["median"]


def _copies(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """GB/s between host and device: pinned and pageable, and both directions at once, which counts both."""
    is_gpu, count = device.type == "cuda", sizes.copied_bytes
    pinned = [torch.empty(count, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
    pageable = torch.empty(count, dtype=torch.uint8)
    ours = [torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2)]
    aside = torch.cuda.Stream(device) if is_gpu else None

    def both() -> None:
        with torch.cuda.stream(aside):  # nothing without a GPU
            ours[1].copy_(pinned[1], non_blocking=True)
        pinned[0].copy_(ours[0], non_blocking=True)

    ways: dict[str, tuple[Callable[[], object], int]] = {
        "to_device_pinned": (lambda: ours[0].copy_(pinned[0], non_blocking=True), count),
        "to_host_pinned": (lambda: pinned[0].copy_(ours[0], non_blocking=True), count),
        "both_pinned": (both, 2 * count),
        "to_device_pageable": (lambda: ours[0].copy_(pageable), count),
        "to_host_pageable": (lambda: pageable.copy_(ours[0]), count),
    }
    return {name: nbytes / _median_s(device, run) / 1e9 for name, (run, nbytes) in ways.items()}


def _calls(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """The host's microseconds for single calls; the loop of additions tells how fast its Python is."""
    one = torch.zeros(1, device=device)
    calls: dict[str, Callable[[], object]] = {"launch": lambda: one.add_(1)}
    if device.type == "cuda":
        event, aside, current = torch.cuda.Event(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
        calls |= {
            "record_event": lambda: event.record(aside),
            "wait_for_event": lambda: current.wait_event(event),
            "enter_stream": lambda: _enter(aside),
            "current_stream": lambda: torch.cuda.current_stream(device),
        }
    calls["thousand_python_additions"] = lambda: sum(number for number in range(1000))
    return {name: _host_us(device, call, sizes.calls) for name, call in calls.items()}


def _enter(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        pass


def _host(device: torch.device, sizes: Sizes) -> dict[str, float]:
    """What main weights in host memory would cost: pinning, and AdamW's step by all cores."""
    found: dict[str, float] = {"threads": torch.get_num_threads()}
    if device.type == "cuda":
        start = time.perf_counter()
        torch.empty(sizes.pinned_bytes, dtype=torch.uint8, pin_memory=True)
        found["pinning_s_per_gib"] = (time.perf_counter() - start) * 2**30 / sizes.pinned_bytes
    for is_fused in (True, False):
        weights = [torch.zeros(sizes.adam_numel // ADAM_TENSORS).requires_grad_() for _ in range(ADAM_TENSORS)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        step = torch.optim.AdamW(weights, fused=is_fused).step
        seconds = _median_s(torch.device("cpu"), step, times=3)
        found["fused_adamw_ns_per_param" if is_fused else "adamw_ns_per_param"] = seconds * 1e9 / sizes.adam_numel
    return found


def _median_s(device: torch.device, run: Callable[[], object], times: int = 5) -> float:
    """Seconds until the device has done a call."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _host_us(device: torch.device, call: Callable[[], object], times: int) -> float:
    for _ in range(10):
        call()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    passed_s = time.perf_counter() - start
    _synchronize(device)
    return passed_s * 1e6 / times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
