"""How much of the communication a GPU hides behind compute: one rank of several, whose collectives only take time.

    python benchmarks/overlap.py --gb-per-s 300 --picture step.png

The ranks are torch's "fake" ones. A gather or a reduction sleeps on the comm stream as long as its bytes take at that
rate. The same step is measured with collectives that take no time, traced, and profiled by torch: what the trace calls
exposed has to be what the profile shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _measure import RESULTS, Clock, environment, summary, write_json
from _models import LLAMAS, llama, next_token_loss
from _picture import draw
from torch.testing._internal.distributed.fake_pg import FakeStore

from streamshard import Precision, StreamShard, trace
from streamshard.comm.communicator import Communicator
from streamshard.comm.nccl import NcclTransport
from streamshard.comm.streams import Work
from streamshard.comm.transport import Gather, Reduction

RANKS = 8
WARMUP = 3
STEPS = 8
Stretch = tuple[float, float]


class SlowTransport(NcclTransport):
    """Gathers and reductions take as long on their stream as their bytes do.

    Attributes:
        cycles_per_byte: of the device's clock; 0: they take no time.
    """

    cycles_per_byte = 0.0

    def start_gather(self, gather: Gather) -> Work | None:
        """See `Transport.start_gather`."""
        work = super().start_gather(gather)
        self._sleep(gather.slot)
        return work

    def start_reduce(self, reduction: Reduction) -> Work | None:
        """See `Transport.start_reduce`."""
        work = super().start_reduce(reduction)
        self._sleep(reduction.slot)
        return work

    def _sleep(self, sent: torch.Tensor) -> None:
        if self.streams.has_streams and self.cycles_per_byte:
            with self.streams.on(self.stream):
                torch.cuda._sleep(int(sent.nbytes * self.cycles_per_byte))


class SlowRanks(Communicator):
    """Ranks with a `SlowTransport`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.transport = SlowTransport(self)

    def share_memory(self, nbytes: int, units: int) -> None:
        """Ranks on GPUs do not."""


def main() -> None:
    """Measure with and without time for collectives, trace, profile; what is known is written at once."""
    arguments = _parse()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    size, rows = ("tiny", 1) if arguments.rehearse else ("1.1B", 2)
    config = {"model": size, "rows": rows, "ranks": RANKS, "gb_per_s": arguments.gb_per_s}
    result: dict[str, Any] = {"benchmark": "overlap", "environment": environment(device), "config": config}
    model, step = _training(size, rows, device)
    for _ in range(WARMUP):
        step()
    result["free_step_ms"] = _steps_ms(step, device)
    SlowTransport.cycles_per_byte = _cycles_per_s(device, arguments) / (arguments.gb_per_s * 1e9)
    step()
    result["step_ms"] = _steps_ms(step, device)
    write_json(result, arguments.output)
    with trace(model) as traced:
        step()
    result["trace"] = traced.summary()
    write_json(result, arguments.output)
    result["profile"] = _hidden(_kernels(step, device, arguments.profile))
    write_json(result, arguments.output)
    print({name: result[name] for name in ("trace", "profile")})
    dist.destroy_process_group()
    if arguments.picture is not None:  # last: matplotlib may be absent
        draw(traced, arguments.picture)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, default=300.0, help="of a gather's or reduction's whole buffer")
    parser.add_argument("--picture", type=Path, help="draw the traced step")
    parser.add_argument("--profile", type=Path, help="write torch's profile of a step, for chrome://tracing")
    parser.add_argument("--rehearse", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap.json")
    return parser.parse_args()


def _training(size: str, rows: int, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """A sharded Llama, and what trains it for a step."""
    torch.manual_seed(0)
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with mock.patch("streamshard.build.Communicator", SlowRanks):
        model: Any = StreamShard(llama(size, device), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sizes = LLAMAS[size]
    tokens = torch.randint(sizes["vocab_size"], (rows, sizes["max_position_embeddings"]), device=device)

    def step() -> None:
        next_token_loss(model(input_ids=tokens, use_cache=False).logits, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _steps_ms(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    clock = Clock(device)
    clock.lap()
    for _ in range(STEPS):
        step()
        clock.lap()
    return summary(clock.laps_ms())


def _cycles_per_s(device: torch.device, arguments: argparse.Namespace) -> float:
    """Of the clock by which kernels sleep, while it runs as fast as it gets."""
    cycles = 1000 if arguments.rehearse else 20_000_000
    if device.type != "cuda":
        return 0.0
    clock = Clock(device)
    torch.cuda._sleep(cycles)
    clock.lap()
    torch.cuda._sleep(cycles)
    clock.lap()
    return cycles / max(clock.laps_ms()[0], 1e-6) * 1e3


def _kernels(step: Callable[[], None], device: torch.device, path: Path | None) -> list[tuple[bool, Stretch]]:
    """Of a step, in microseconds: whether it is a collective's sleep, start and end. None where none is profiled."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if path is not None:
        profiler.export_chrome_trace(str(path))
    found = []
    for event in profiler.events():
        name = event.name.lower()
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if is_kernel and not name.startswith("mem"):
            is_sleep = "spin" in name or "sleep" in name
            found.append((is_sleep, (event.time_range.start, event.time_range.end)))
    return found


def _hidden(kernels: Iterable[tuple[bool, Stretch]]) -> dict[str, float]:
    """Milliseconds of collectives, and the share in which the device computes beside them."""
    kernels = list(kernels)
    sleeps = [stretch for is_sleep, stretch in kernels if is_sleep]
    computes = [stretch for is_sleep, stretch in kernels if not is_sleep]  # of one stream: none beside another
    slept_us = sum(end - start for start, end in sleeps)
    beside_us = sum(_common(sleep, compute) for sleep in sleeps for compute in computes)
    share = {"hidden_share": beside_us / slept_us} if slept_us else {}
    return {"collectives": len(sleeps), "collectives_ms": slept_us / 1e3, **share}


def _common(one: Stretch, other: Stretch) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


if __name__ == "__main__":
    main()
